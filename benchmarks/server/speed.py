"""How long the server's model learns: through DeepSpeed, as a plain loop, and as one
would write it first.

DeepSpeed may shard by ZeRO, too, which gains nothing on one rank: zero1, zero2 and
zero3 show what it costs. All see the same number of samples of a bank of rows that
differ by little, as clients' uploads do: a common row, a part of low rank for every
client that drifts from round to round, and noise. The program prints seconds, the last
losses, what DeepSpeed costs over the plain loop, and the share of the device's peak
that was used. The first steps of a process, in which libraries load and compile kernels, are not
counted, but for the loop that one would write first.

examples:
  python -m benchmarks.server.speed                                     Fashion-MNIST's setting: 400 rows of the whole network
  python -m benchmarks.server.speed --server-batch 200 --engines deepspeed,torch
  python -m benchmarks.server.speed --model cnn-cifar --samples 20000   40 million parameters over the last two layers
  python -m benchmarks.server.speed --engines torch,deepspeed,zero1,zero2,zero3 --model cnn-cifar --samples 20000
  python -m benchmarks.server.speed --server small --samples 2000       a taste, on a CPU
"""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.arguments import add_device, parser_of
from benchmarks.measuring import synchronize
from hpcfed.models.layout import Layout
from hpcfed.models.networks import build
from hpcfed.runtime import world as worlds
from hpcfed.runtime.device import set_arithmetic
from hpcfed.server.bank import BankedRows
from hpcfed.server.engines import import_engine
from hpcfed.server.latent_diffusion import LatentDiffusion
from hpcfed.server.networks import Autoencoder, Denoiser
from hpcfed.server.options import ServerOptions
from hpcfed.server.report import LearningReport
from hpcfed.server.scaling import LatentScaling, RowScaling
from hpcfed.server.schedule import generated
from hpcfed.server.training_plan import RankSlot

SHAPES = {
    "cnn-fmnist": (1, 28, 28),
    "cnn-cifar": (3, 32, 32),
    "cnn-digits": (1, 8, 8),
    "mlp": (1, 8, 8),
}
ENGINES: dict[str, dict[str, Any]] = {
    "first": {},
    "torch": {"server_engine": "torch"},
    "deepspeed": {},
    **{f"zero{stage}": {"zero_stage": stage} for stage in (1, 2, 3)},
}
"""Options of each engine; `deepspeed` is without ZeRO."""
FIRST_BATCH = 50
"""The batch of the loop that one would write first, as p-diff has it."""


def bank(columns: int, *, clients: int, rounds: int, device: torch.device) -> Tensor:
    """Return uploads of a number of clients and rounds."""
    random = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=random)

    # Uploads differ by little, and mostly along few directions.
    common, directions = normal(columns), normal(8, columns) / 8**0.5
    start = normal(clients, 1, 8)
    drift = 0.3 * normal(clients, rounds, 8).cumsum(1) / rounds**0.5
    noise = 0.01 * normal(clients, rounds, columns)
    rows = common + 0.05 * (start + drift) @ directions + noise
    return rows.transpose(0, 1).reshape(-1, columns)


def first_written(
    rows: Tensor, widths: Sequence[int], options: ServerOptions
) -> tuple[dict[str, float], list[float]]:
    """Train both networks step by step in plain torch with small batches; return
    seconds and last losses. This is what there is to gain from.
    """
    device, size = rows.device, options.size
    autoencoder = Autoencoder(
        rows.shape[1],
        size,
        input_noise=options.input_noise,
        latent_noise=options.latent_noise,
    ).to(device)
    denoiser = Denoiser(size).to(device)
    x = RowScaling.of(rows, widths)(rows)
    betas = torch.linspace(1e-4, 0.02, options.diffusion_steps, device=device)
    bars = (1 - betas).cumprod(0)

    def reconstruction() -> Tensor:
        batch = x[torch.randint(len(x), (FIRST_BATCH,), device=device)]
        input_noise = torch.randn_like(batch)
        latent_noise = torch.randn(FIRST_BATCH, size.latent, device=device)
        loss: Tensor = autoencoder(batch, (input_noise, latent_noise))
        return loss

    def descend(
        network: nn.Module, loss: Callable[[], Tensor], samples: int
    ) -> tuple[float, float]:
        # Rounded up.
        steps = -(-samples // FIRST_BATCH)
        optimizer = torch.optim.AdamW(
            network.parameters(), lr=size.lr, weight_decay=options.server_decay
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        begin, last = _clock(device), 0.0
        for _ in range(steps):
            optimizer.zero_grad()
            value = loss()
            value.backward()
            optimizer.step()
            schedule.step()
            last = value.item()  # as most do, to print it
        network.eval()
        return _clock(device) - begin, last

    seconds = {}
    seconds["autoencoder"], first = descend(
        autoencoder, reconstruction, options.samples("autoencoder")
    )
    with torch.no_grad():
        latents = autoencoder.encode(x)
        z = LatentScaling.of(latents)(latents)

    def denoising() -> Tensor:
        batch = z[torch.randint(len(z), (FIRST_BATCH,), device=device)]
        t = torch.randint(options.diffusion_steps, (FIRST_BATCH,), device=device)
        noise, signal = torch.randn_like(batch), bars[t].unsqueeze(1)
        noisy = signal.sqrt() * batch + (1 - signal).sqrt() * noise
        return F.mse_loss(denoiser(noisy, t + 1), noise)

    seconds["denoiser"], second = descend(
        denoiser, denoising, options.samples("denoiser")
    )
    return seconds, [first, second]


def ours(
    rows: Tensor, widths: Sequence[int], options: ServerOptions, slot: RankSlot
) -> LearningReport:
    """Learn as a run does, after a few steps that do not count: libraries load and compile
    their kernels in the first ones.
    """
    # Three steps of each network load and compile what a process needs once.
    few = {
        "autoencoder_samples": 3 * options.batch("autoencoder"),
        "denoiser_samples": 3 * options.batch("denoiser"),
    }
    banked = BankedRows.of(rows, widths)
    brief = options.model_copy(update=few)
    LatentDiffusion(widths, brief, slot, seed=0).learn(banked)
    return LatentDiffusion(widths, options, slot, seed=0).learn(banked)


def _clock(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--model", choices=SHAPES, default="cnn-fmnist", help="the clients' network")
    add("--clients", type=int, default=20)
    add("--rounds", type=int, default=20, help="rounds in the bank")
    add("--server", choices=("small", "paper", "large"), default="paper")
    add("--server-width", type=int, default=0, help="0: as --server says")
    add("--server-batch", type=int, default=50)
    add("--denoiser-batch", type=int, default=0, help="0: as --server-batch")
    add("--server-precision", choices=("fp32", "bf16"), default="fp32")
    add("--server-lr", type=float, default=0.0, help="0: as --server says")
    add(
        "--samples",
        type=int,
        default=100_000,
        help="samples that the autoencoder sees; the denoiser sees 4 times as many",
    )
    add(
        "--engines",
        default="first,torch,deepspeed",
        help=f"engines, of {', '.join(ENGINES)}",
    )
    add_device(parser)
    add("--json", action="store_true")
    asked = parser.parse_args()
    for engine in asked.engines.split(","):
        if engine not in ENGINES:
            parser.error(
                f"--engines: unknown engine '{engine}'; known: {', '.join(ENGINES)}"
            )

    world = worlds.enter(device=asked.device)
    world.join_alone()
    set_arithmetic(precision="tf32", deterministic=False, kernels="auto")
    slot = RankSlot(world.device)
    layout = Layout.of(
        build(asked.model, shape=SHAPES[asked.model], classes=10, seed=0)
    )
    options = ServerOptions(
        server=asked.server,
        server_width=asked.server_width,
        server_batch=asked.server_batch,
        denoiser_batch=asked.denoiser_batch,
        server_precision=asked.server_precision,
        server_lr=asked.server_lr,
        autoencoder_samples=asked.samples,
        denoiser_samples=4 * asked.samples,
    )
    columns = generated(layout, options)
    rows = bank(
        sum(columns.widths),
        clients=asked.clients,
        rounds=asked.rounds,
        device=world.device,
    )
    print(
        f"{len(rows)} rows of {rows.shape[1]:,} columns on "
        f"{world.locations[0].device_name}, torch {torch.__version__}"
    )
    found: dict[str, dict[str, float]] = {}
    for engine in asked.engines.split(","):
        if engine == "first":
            seconds, losses = first_written(rows, columns.widths, options)
            found[engine] = seconds | dict(
                zip(("autoencoder loss", "denoiser loss"), losses, strict=True)
            )
        else:
            chosen = options.model_copy(update=ENGINES[engine])
            import_engine(chosen, world.device)
            report = ours(rows, columns.widths, chosen, slot)
            found[engine] = {
                name: report.seconds[name]
                for name in ("prepare", "autoencoder", "denoiser")
            }
            for network, losses_of in report.losses.items():
                found[engine][f"{network} loss"] = float(
                    losses_of[-max(1, len(losses_of) // 50) :].mean()
                )
                found[engine][f"{network} of peak"] = report.utilisation(network)
                found[engine][f"{network} parameters"] = report.parameters[network]
        print(
            engine
            + ": "
            + ", ".join(
                f"{name} {value:,.4g}" for name, value in found[engine].items()
            ),
            flush=True,
        )
    for other, base in [
        ("deepspeed", "torch"),
        ("zero1", "deepspeed"),
        ("zero2", "deepspeed"),
        ("zero3", "deepspeed"),
    ]:
        if {other, base} <= set(found):
            ratios = {
                name: found[other][name] / found[base][name]
                for name in ("autoencoder", "denoiser")
            }
            print(
                f"{other} / {base}: "
                + ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
            )
    if asked.json:
        print(json.dumps(found))
    world.close()


if __name__ == "__main__":
    main()
