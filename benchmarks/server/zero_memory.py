"""Measure what training a large network takes of a server rank, by ZeRO stage and number
of ranks, beside what the stage promises.

All ranks share one GPU over NCCL. A line has the promise's parts, the most that training
took on any rank, in GiB, their ratio, and the loss of the last step. `tokens` is the
transformer of --server-model tokens, with windows of 64 tokens; `blocks` are equal
residual blocks with few activations. Their lines have the same loss up to rounding.
`p-diff` is the paper's autoencoder at size large; its batch norm takes a rank's samples,
so that the loss depends on the number of ranks.

examples:
  python -m benchmarks.server.zero_memory                              1, 2 and 4 ranks, ZeRO 0 to 3, 1.3 billion parameters
  python -m benchmarks.server.zero_memory --network p-diff --ranks 2 --precision fp32
  python -m benchmarks.server.zero_memory --device cpu --parameters 5e6 --ranks 2
"""

import argparse
import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import launching
from benchmarks.arguments import add_device, parser_of
from hpcfed.runtime import world as worlds
from hpcfed.server.diffusion import Schedule
from hpcfed.server.engines import import_engine
from hpcfed.server.half_learnt import HalfLearnt
from hpcfed.server.learning import LearningRun
from hpcfed.server.networks import Autoencoder, ServerNetwork
from hpcfed.server.options import ServerOptions
from hpcfed.server.row_model import silent
from hpcfed.server.sizes import SIZES, Size
from hpcfed.server.token_denoiser import TokenDenoiser
from hpcfed.server.token_layout import TokenLayout
from hpcfed.server.training_plan import RankSlot

WIDTH, WINDOW = 2048, 64
BATCH, STEPS = 16, 3
MARK = "zero_memory: "
GIB = 2**30


class Blocks(ServerNetwork):
    """Equal residual blocks of two linear layers each, and the loss of their output."""

    def __init__(self, parameters: float, width: int = WIDTH) -> None:
        super().__init__()
        self.columns = width
        number = max(1, round(parameters / (8 * width**2)))
        self.blocks = nn.ModuleList()
        for _ in range(number):
            block = (
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.SiLU(),
                nn.Linear(4 * width, width),
            )
            self.blocks.append(nn.Sequential(*block))

    def flops(self) -> int:
        return 2 * sum(p.numel() for p in self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(next(self.parameters()).dtype)
        for block in self.blocks:
            x = x + self.checkpoint(block, x)
        return x.float().square().mean()


def builder(network: str, parameters: float, device: torch.device) -> Callable[[], Any]:
    """Return what builds the network."""
    width = WIDTH if parameters > 1e8 else WIDTH // 8
    if network == "blocks":
        return lambda: Blocks(parameters, width)
    if network == "tokens":
        size = Size(width, width, max(1, round(parameters / (12 * width**2))))
        layout = TokenLayout.of(
            [WINDOW * width], length=width, window=WINDOW, device=device
        )
        schedule = Schedule.linear(1000, device)
        return lambda: TokenDenoiser(layout, size, schedule)
    # Two linear layers have 16,384 parameters for each column, convolutions the rest.
    columns = max(64, round((parameters - 1.04e8) / 16_384))
    return lambda: Autoencoder(columns, SIZES["large"])


def job(arguments: argparse.Namespace) -> None:
    """Train with every stage on the ranks of this job; the first one prints."""
    (ranks,) = arguments.ranks
    backend: Any = "nccl" if ranks > 1 and arguments.device != "cpu" else "auto"
    world = worlds.enter(device=arguments.device, backend=backend)
    if world.alone:
        world.join_alone()
    slot = RankSlot.of(world)
    build = builder(arguments.network, arguments.parameters, world.device)
    torch.manual_seed(0)
    # Drawing a billion numbers takes seconds, so once for all stages.
    drawn = build()
    for stage in arguments.stages:
        told = measured(drawn, build, options_of(arguments, stage), slot)
        told["measured"] = max(world.role_allgather(told["measured"]))
        if slot.rank == 0:
            line = {"ranks": ranks, "stage": stage, **told}
            print(MARK + json.dumps(line), flush=True)
    world.close()


def options_of(arguments: argparse.Namespace, stage: int) -> ServerOptions:
    """Return the options of a training."""
    (ranks,) = arguments.ranks
    return ServerOptions(
        zero_stage=stage,
        server_precision=arguments.precision,
        server_offload=arguments.offload if stage else "none",
        server_checkpointing=arguments.checkpointing,
        server_batch=BATCH,
        # Each rank its own statistics, so that batch norm sends nothing.
        server_micro_batch=BATCH // ranks,
        autoencoder_samples=BATCH * STEPS,
        server_lr=1e-4,
    )


def measured(
    drawn: Any, build: Callable[[], Any], options: ServerOptions, slot: RankSlot
) -> dict[str, Any]:
    """Train a copy of the network for a few steps."""
    import_engine(options, slot.device)
    owner = SimpleNamespace(autoencoder=copy.deepcopy(drawn))
    samples = samples_of(drawn, slot.device)
    share = options.server_micro_batch or BATCH

    def loss(network: Callable[..., Tensor], step: int, micro: int) -> Tensor:
        own = [values[micro * share : (micro + 1) * share] for values in samples]
        answer = network(*own)
        return F.mse_loss(answer, own[0]) if answer.ndim else answer

    run = LearningRun(options, slot, silent, HalfLearnt(), rows=BATCH)
    run.fit(owner, "autoencoder", build, loss)
    report = run.finish()
    return {
        "parameters": report.parameters["autoencoder"],
        "promised": report.promised["autoencoder"],
        "measured": report.training_memory["autoencoder"],
        "seconds": report.seconds["autoencoder"],
        "loss": float(report.losses["autoencoder"][-1]),
    }


def samples_of(network: Any, device: torch.device) -> list[Tensor]:
    """Return what the network takes in a step."""
    random = torch.Generator(device).manual_seed(1)
    if isinstance(network, TokenDenoiser):
        z = torch.randn(
            BATCH, WINDOW * network.first.in_features, device=device, generator=random
        )
        t = torch.arange(1, BATCH + 1, device=device) * 50
        return [z, t, torch.zeros_like(t)]
    return [torch.randn(BATCH, network.columns, device=device, generator=random)]


def lines(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Start a job for each number of ranks, and yield what they measure."""
    words = [word for word in sys.argv[1:] if word != "--job"]
    for ranks in arguments.ranks:
        program = ["-m", "benchmarks.server.zero_memory", *words, "--job"]
        if ranks > 1:
            # By mpi4py, which ends all ranks when one fails.
            program = ["-m", "mpi4py", *program]
        command = launching.on_ranks(ranks, [*program, "--ranks", str(ranks)])
        with subprocess.Popen(
            command, env=launching.environment(), stdout=subprocess.PIPE, text=True
        ) as started:
            assert started.stdout is not None
            for line in started.stdout:
                if line.startswith(MARK):
                    yield json.loads(line.removeprefix(MARK))


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2, 4])
    add("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    add("--precision", choices=["fp32", "bf16"], default="bf16")
    add("--network", choices=["tokens", "blocks", "p-diff"], default="tokens")
    add("--parameters", type=float, default=1.3e9)
    add("--offload", choices=["none", "optimizer", "parameters"], default="none")
    add("--checkpointing", action="store_true")
    add("--job", action="store_true", help=argparse.SUPPRESS)
    add_device(parser)
    arguments = parser.parse_args()
    if arguments.job:
        job(arguments)
        return
    parts: list[str] = []
    for told in lines(arguments):
        if not parts:
            parts = list(told["promised"])
            names = ["ranks", "ZeRO", *parts, "promised", "measured", "ratio", "loss"]
            print(f"{told['parameters']:,} parameters, {arguments.precision}, GiB")
            print("".join(f"{name:>12}" for name in names))
        promised = sum(told["promised"].values())
        sizes = [*told["promised"].values(), promised, told["measured"]]
        cells = [f"{told['ranks']:12}{told['stage']:12}"]
        cells += [f"{size / GIB:12.3f}" for size in sizes]
        cells.append(f"{told['measured'] / promised:12.2f}{told['loss']:12.5f}")
        print("".join(cells), flush=True)


if __name__ == "__main__":
    main()
