"""Measures steps of the server's networks in two sizes, what ZeRO adds, and passes
through the bank.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcfed.clients.network import client_layout
from hpcfed.errors import remark
from hpcfed.options import Settings
from hpcfed.plan.bank import BankWork, generating_work, learning_work, recognising_work
from hpcfed.plan.constants import (
    BankPoint,
    Preparation,
    ServerPoint,
    ZeroPreparation,
    kind_of,
)
from hpcfed.plan.server import NetworkSize, inversion_work, network_sizes
from hpcfed.runtime import accelerator
from hpcfed.runtime import world as worlds
from hpcfed.runtime.device import set_arithmetic
from hpcfed.server import likeness
from hpcfed.server.bank import BankedRound, BankedRows
from hpcfed.server.columns import Columns
from hpcfed.server.engines import import_engine
from hpcfed.server.latent_diffusion import LatentDiffusion
from hpcfed.server.options import ServerOptions
from hpcfed.server.report import LearningReport
from hpcfed.server.row_model import RowModel
from hpcfed.server.schedule import generated
from hpcfed.server.span import Coordinates, SpanDiffusion
from hpcfed.server.training_plan import RankSlot

SIZES = {"cuda": ("small", "paper"), "cpu": ("tiny", "small")}
"""Sizes to measure, by device: a CPU would take hours for the paper's."""
WARMUP, STEPS = 4, {"cuda": 12, "cpu": 4}
"""Warm-up steps, and steps that count."""
BANK = {"cuda": 400, "cpu": 40}
"""Rows to learn from."""
INVERTED = 20
"""Rows to generate."""
FEW_COLUMNS = 1_000
"""Columns for steps of span's denoiser: so few that passes through them cost nothing."""
BANKS = {
    "cuda": ((100, 1_000_000), (1_000, 200_000), (2_000, 20_000), (50, 8_000_000)),
    "cpu": ((40, 50_000), (200, 50_000), (400, 5_000), (20, 2_000_000)),
}
"""Rows and columns of banks to pass through, by device."""


def measure_server(
    settings: Settings, options: ServerOptions, device: torch.device
) -> dict[str, Any]:
    """Return the server's fields of `Calibration`."""
    world = worlds.enter(device=device.type)
    world.join_alone()
    config = settings.config
    set_arithmetic(
        precision=config.precision, deterministic=False, kernels=config.kernels
    )
    layout = client_layout(config)
    points: list[ServerPoint] = []
    prepared: list[Preparation] = []
    start = 0.0
    for number, size in enumerate(SIZES[kind_of(device.type)]):
        remark(f"calibrating: the server's model, size {size}")
        plain = options.model_copy(update=_few_steps(options, size, device))
        sizes = network_sizes(plain, layout, rows=BANK[kind_of(device.type)])
        widths = generated(layout, plain).widths
        if plain.server_model == "span":
            widths = [FEW_COLUMNS]
        first = _learnt(plain, widths, world.device)
        clock = first
        if number == 0:
            # The first learning of a process loads libraries and compiles kernels.
            clock = _learnt(plain, widths, world.device)
            start = max(0.0, first.besides - clock.besides)
        points += clock.points(sizes)
        cold, warm = clock.invert(), clock.invert()
        launches, flops = inversion_work(sizes["denoiser"], plain, INVERTED)
        prepared.append(
            Preparation(
                parameters=sum(size.parameters for size in sizes.values()),
                seconds=max(0.0, clock.besides),
                invert=warm,
                first=max(0.0, cold - warm),
                launches=max(1, launches),
                flops=max(1.0, flops),
            )
        )
    # ZeRO adds hooks and launches, so measuring one size is enough.
    built: list[ZeroPreparation] = []
    for stage in (1, 2, 3):
        remark(f"calibrating: the server's model, ZeRO stage {stage}")
        # `plain`, `widths`, `sizes` and `clock` are still those of the last size above.
        staged = plain.model_copy(update={"zero_stage": stage})
        first, again = (_learnt(staged, widths, world.device) for _ in range(2))
        points += again.points(sizes)
        built.append(
            ZeroPreparation(
                stage=stage,
                seconds=max(0.0, again.besides - clock.besides),
                first=max(0.0, first.besides - again.besides),
            )
        )
    passes: list[BankPoint] = []
    if options.server_model == "span":
        # Libraries load in the first products.
        measure_passes(INVERTED, FEW_COLUMNS, world.device)
        for shape in BANKS[kind_of(device.type)]:
            passes += measure_passes(*shape, world.device)
    world.close()
    return {
        "server_model": options.server_model,
        "bank": tuple(passes),
        "server": tuple(points),
        "preparations": tuple(prepared),
        "zero_preparations": tuple(built),
        "server_start": start,
    }


def _few_steps(
    options: ServerOptions, size: str, device: torch.device
) -> dict[str, Any]:
    steps = WARMUP + STEPS[kind_of(device.type)]
    return {
        "server": size,
        # These options would make all sizes alike.
        "server_width": None,
        "server_latent": None,
        "server_depth": None,
        "denoiser_depth": None,
        "server_load": "",
        "server_engine": "deepspeed",
        "zero_stage": 0,
        "server_offload": "none",
        "server_micro_batch": None,
        "autoencoder_samples": steps * options.batch("autoencoder"),
        "denoiser_samples": steps * options.batch("denoiser"),
    }


def measure_passes(rows: int, columns: int, device: torch.device) -> list[BankPoint]:
    """Time what span does with a bank of this size: find coordinates, map rows there
    and back, and recognise them.
    """
    remark(f"calibrating: passes through {rows:,} rows of {columns:,} columns")
    generator = torch.Generator(device).manual_seed(0)
    numbers = torch.randn(rows, columns, device=device, generator=generator)
    clients = np.arange(INVERTED)
    owners = np.arange(rows) % INVERTED
    bank = BankedRows([BankedRound(owners, numbers)], Columns.all_of([columns]))
    newest = numbers[:INVERTED]
    learn = partial(Coordinates.of, bank, share=1.0, most=None)
    points = list(_twice(learning_work(rows, columns), learn, device))
    found = learn()

    def there_and_back() -> Tensor:
        coordinates = found.of_rows(bank, newest)
        return bank.combined(found.combinations(coordinates))

    recognise = partial(likeness.recognised, bank, clients, newest)
    generating = generating_work(rows, columns, INVERTED)
    points += _twice(generating, there_and_back, device)
    points += _twice(recognising_work(rows, columns, INVERTED), recognise, device)
    return points


def _twice(
    work: BankWork, do: Callable[[], Any], device: torch.device
) -> Iterator[BankPoint]:
    """Time a pass twice. The first one touches new memory, as the first learning of a
    run does; later ones find it touched.
    """
    for _ in range(2):
        accelerator.synchronize(device)
        begin = time.perf_counter()
        do()
        accelerator.synchronize(device)
        seconds = time.perf_counter() - begin
        yield BankPoint(**asdict(work), seconds=seconds)


def _learnt(
    options: ServerOptions, widths: Sequence[int], device: torch.device
) -> "_Clock":
    """Learn once with a new model."""
    clock = _Clock(options, widths, device)
    clock.learn()
    return clock


def _new_model(
    options: ServerOptions, widths: Sequence[int], device: torch.device
) -> RowModel:
    slot = RankSlot(device)
    if options.server_model == "span":
        return SpanDiffusion(Columns.all_of(widths), options, slot, seed=0)
    return LatentDiffusion(widths, options, slot, seed=0)


class _Clock:
    """Learns with a clock that is read twice: after the first and the last steps."""

    def __init__(
        self, options: ServerOptions, widths: Sequence[int], device: torch.device
    ) -> None:
        self._options = options
        self._device = device
        import_engine(options, device)
        generator = torch.Generator(device).manual_seed(0)
        self._rows = torch.randn(
            BANK[kind_of(device.type)], sum(widths), device=device, generator=generator
        )
        self._bank = BankedRows.of(self._rows, widths)
        self._model = _new_model(options, widths, device)
        self._looks: dict[str, dict[int, float]] = {
            name: {} for name in options.networks
        }
        self._report: LearningReport | None = None

    def learn(self) -> None:
        """Learn once."""
        self._report = self._model.learn(self._bank, self._look)

    def _look(self, network: str, done: int, steps: int, losses: Tensor) -> None:
        # Twice only: each look waits for the device, and so would slow the steps.
        if done in (WARMUP, steps):
            accelerator.synchronize(self._device)
            self._looks[network][done] = time.perf_counter()

    @property
    def report(self) -> LearningReport:
        """What the learning reported."""
        assert self._report is not None, "learn() first"
        return self._report

    @property
    def besides(self) -> float:
        """Seconds of the learning besides steps and passes through the bank."""
        seconds = self.report.seconds["prepare"]
        if self._options.server_model == "span":
            return seconds
        return seconds + self.report.seconds["encode"]

    def points(self, sizes: dict[str, NetworkSize]) -> list[ServerPoint]:
        """Return the seconds of a step of each network."""
        found = []
        for network, size in sizes.items():
            begin, end = sorted(self._looks[network].values())
            steps = STEPS[kind_of(self._device.type)]
            each = (end - begin) / steps
            batch = self._options.batch(network)
            whole = self.report.seconds[network]
            found.append(
                ServerPoint(
                    network="autoencoder" if network == "autoencoder" else "denoiser",
                    zero_stage=self._options.zero_stage,
                    batch=batch,
                    flops=size.flops * batch,
                    activations=size.activations * batch,
                    stages=size.stages,
                    parameters=size.parameters,
                    seconds=each,
                    first=max(0.0, whole - each * (steps + WARMUP)),
                    memory=float(self.report.peak_here),
                )
            )
        return found

    def invert(self) -> float:
        """Return the seconds of generating a few clients' rows."""
        accelerator.synchronize(self._device)
        begin = time.perf_counter()
        self._model.invert(self._rows[:INVERTED])
        accelerator.synchronize(self._device)
        return time.perf_counter() - begin
