"""Plans of --server-model span: work counted by torch and by hand, made-up speeds that
are found again, and what is not planned.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hpcfed.cli import keyword_settings
from hpcfed.clients.network import client_layout
from hpcfed.plan.bank import (
    BankWork,
    answer_work,
    bank_exchange,
    bank_memory,
    fit_passes,
    generating_work,
    learning_work,
    recognising_work,
)
from hpcfed.plan.constants import BankPoint, Preparation, write_constants
from hpcfed.plan.make import PlanRequest, make_plan
from hpcfed.plan.planner import Planner
from hpcfed.plan.server import LearningPlan
from hpcfed.plan.server_calibration import measure_passes
from hpcfed.plan.work import network_sizes, run_work
from hpcfed.server import likeness
from hpcfed.server.bank import AT_ONCE, BankedRound, BankedRows
from hpcfed.server.columns import Columns
from hpcfed.server.options import ServerOptions, server_options
from hpcfed.server.schedule import banked_rows
from hpcfed.server.span import Coordinates
from tests.test_plan import LINK, constants, server_point

ROWS, CLIENTS, WIDTHS = 12, 4, (50, 30)
SIZES = ("tiny", "small")
COLUMNS = sum(WIDTHS)
SPAN: dict[str, Any] = {
    "method": "pfedgpa",
    "server_model": "span",
    "model": "mlp",
    "clients": CLIENTS,
    "rounds": 3,
    "server": "tiny",
    "denoiser_samples": 1_000,
}


def in_place(total: Any, a: Any, b: Any, *more: Any, **named: Any) -> int:
    """FLOPs of an in-place product of these shapes, which torch does not count."""
    return 2 * a[0] * a[1] * b[1]


def counter() -> FlopCounterMode:
    return FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.addmm_: in_place}
    )


def bank() -> tuple[BankedRows, torch.Tensor]:
    rows = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    owners = np.arange(ROWS) % CLIENTS
    return BankedRows([BankedRound(owners, rows)], Columns.all_of(WIDTHS)), rows


def test_products_are_those_that_torch_counts() -> None:
    banked, rows = bank()
    with counter() as learning:
        found = Coordinates.of(banked, share=1.0, most=None)
    assert found.places.shape[1] == ROWS - 1
    expected = learning_work(ROWS, COLUMNS)
    assert learning.get_total_flops() == expected.flops == 2 * 12 * 12 * 80
    with counter() as generating:
        coordinates = found.of_rows(banked, rows[:CLIENTS])
        banked.combined(found.combinations(coordinates))
    generated = generating_work(ROWS, COLUMNS, CLIENTS)
    assert generating.get_total_flops() == generated.flops
    with counter() as recognising:
        likeness.recognised(banked, np.arange(CLIENTS), rows[:CLIENTS])
    recognised = recognising_work(ROWS, COLUMNS, CLIENTS)
    assert recognising.get_total_flops() == recognised.flops
    sets = [rows[:CLIENTS], rows[CLIENTS : 2 * CLIENTS]]
    with counter() as both:
        owned = likeness.in_own_direction(banked, np.arange(CLIENTS), sets)
    twice = recognising_work(ROWS, COLUMNS, CLIENTS, sets=2)
    assert both.get_total_flops() == twice.flops
    for updates, own in zip(sets, owned, strict=True):
        [alone] = likeness.in_own_direction(banked, np.arange(CLIENTS), [updates])
        assert own.tolist() == alone.tolist()


def test_passes_load_as_many_numbers_as_blocks_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    banked, rows = bank()
    loaded = 0
    blocks = BankedRows.blocks

    def counted(self: BankedRows, **named: Any) -> Any:
        nonlocal loaded
        for block in blocks(self, **named):
            loaded += block.rows.numel()
            yield block

    monkeypatch.setattr(BankedRows, "blocks", counted)
    found = Coordinates.of(banked, share=1.0, most=None)
    assert loaded == learning_work(ROWS, COLUMNS).numbers
    loaded = 0
    banked.combined(found.combinations(found.of_rows(banked, rows[:CLIENTS])))
    # Beside them, clients' rows are loaded and written.
    beside = CLIENTS * COLUMNS
    assert loaded + 2 * beside == generating_work(ROWS, COLUMNS, CLIENTS).numbers
    loaded = 0
    likeness.recognised(banked, np.arange(CLIENTS), rows[:CLIENTS])
    # Beside them, directions are written, and clients' rows are loaded.
    assert loaded + 2 * beside == recognising_work(ROWS, COLUMNS, CLIENTS).numbers


def passes(number: float, flop: float, cube: float) -> tuple[BankPoint, ...]:
    """Points of a machine that takes these seconds for a number, a FLOP and a cube."""
    points = []
    for rows, columns in ((10, 1000), (100, 1000), (400, 10)):
        for work in (
            learning_work(rows, columns),
            generating_work(rows, columns, 5),
            recognising_work(rows, columns, 5),
        ):
            seconds = number * work.numbers + flop * work.flops + cube * work.cubes
            points.append(BankPoint(**asdict(work), seconds=seconds))
    return tuple(points)


def test_speeds_of_passes_are_found_again() -> None:
    found = fit_passes(passes(2e-9, 1e-10, 5e-11)).coefficients
    assert found == pytest.approx([2e-9, 1e-10, 5e-11], rel=1e-6)
    # Two ranks share the columns, but each finds the eigenvectors.
    work = BankWork(numbers=10, flops=20, cubes=30)
    assert work.shared(2) == BankWork(5, 10, 30)


def test_the_memory_of_a_bank_by_hand() -> None:
    options = ServerOptions(server_model="span")
    shape = {"rows": 10, "columns": 1000, "clients": 5, "ranks": 2}
    # 5000 numbers of 4 bytes, three blocks of them in float64, 4 · 5 whole rows.
    expected = 20_000 + 3 * 40_000 + 4 * 20_000
    assert bank_memory(options, **shape) == expected
    uploads = options.model_copy(
        update={"bank_of": "uploads", "bank_precision": "bf16"}
    )
    assert bank_memory(uploads, **shape) == expected
    on_host = options.model_copy(update={"bank_on": "host"})
    assert bank_memory(on_host, **shape) == expected - 20_000
    # However long rows are, blocks stay as they are.
    long = bank_memory(on_host, rows=10, columns=10**9, clients=0, ranks=1)
    assert long == 3 * 8 * AT_ONCE
    # 100 + 50 + 50 numbers of 8 bytes in two turns of half of them.
    assert bank_exchange(10, 5, 2, LINK) == pytest.approx(2 * (0.1 + 800 / 1e9))


def test_a_learning_takes_its_steps_and_its_passes() -> None:
    # Rows are mapped there and back, without denoising.
    settings = keyword_settings({**SPAN, "inversion_depth": 0})
    options = server_options(settings)
    assert options is not None
    rows = banked_rows(options, settings.config)
    assert rows == 3 * CLIENTS, "no more rounds than the run has"
    prepared = Preparation(
        parameters=1, seconds=0, invert=1e-9, first=0, launches=1, flops=1
    )
    points = []
    for size in SIZES:
        chosen = options.model_copy(update={"server": size})
        planner = Planner(settings, constants(), LINK, per_node=1)
        network = network_sizes(chosen, planner.layout, rows=rows)["denoiser"]
        points.append(server_point(network, options.batch("denoiser"), 0.5))

    def seconds(number: float) -> float:
        measured = constants(
            server_model="span",
            server=points,
            preparations=(prepared, prepared),
            bank=passes(number, 0.0, 0.0),
        )
        planner = Planner(settings, measured, LINK, per_node=1)
        return planner.learning(options, 1, 0).seconds.middle

    columns = 4810
    numbers = learning_work(rows, columns) + answer_work(rows, columns, CLIENTS)
    # Two passes to learn, two to generate, and two to recognise rows and uploads.
    # Beside them, uploads are loaded, rows written, mean rows written, and two loaded.
    assert numbers.numbers == (6 * rows + 5 * CLIENTS) * columns
    more = seconds(2e-6) - seconds(1e-6)
    assert more == pytest.approx(1e-6 * numbers.numbers, rel=1e-6)
    # 20 steps of half a second, as measured.
    assert seconds(1e-15) == pytest.approx(10, rel=1e-6)


def test_a_plan_has_the_learning_by_ranks(tmp_path: Path) -> None:
    points = [server_point(network_sizes_of(size), 50, 0.5) for size in SIZES]
    prepared = Preparation(
        parameters=1, seconds=0, invert=1e-9, first=0, launches=1, flops=1
    )

    def planned(number: float) -> list[LearningPlan]:
        """Plan one and two ranks that take these seconds for a number of the bank."""
        measured = constants(
            server_model="span",
            server=points,
            preparations=(prepared,),
            bank=passes(number, 0.0, 0.0),
        )
        path = tmp_path / "plan.json"
        write_constants(path, measured)
        settings = keyword_settings({**SPAN, "device": "cpu"})
        plan = make_plan(PlanRequest(constants=path, ranks=2), settings)
        return [found for found in plan.learnings if found.zero_stage == 0]

    slow, fast = planned(2e-3), planned(1e-3)
    assert [found.ranks for found in slow] == [1, 2]
    more = [
        one.seconds.middle - other.seconds.middle
        for one, other in zip(slow, fast, strict=True)
    ]
    # Six passes through 12 rows and five matrices of 4 rows, which two ranks share.
    expected = 1e-3 * (6 * 12 + 5 * 4) * 4810
    assert more == pytest.approx([expected, expected / 2], rel=1e-6)
    assert slow[1].exchange > slow[0].exchange == 0
    assert slow[1].memory.middle < slow[0].memory.middle


def test_passes_are_measured_with_their_work() -> None:
    points = measure_passes(40, 500, torch.device("cpu"))
    assert [point.cubes for point in points] == [40**3, 40**3, 0, 0, 0, 0]
    assert all(point.seconds > 0 for point in points)


def test_a_dry_run_counts_passes() -> None:
    with_passes = run_work(keyword_settings(SPAN)).server
    rows, columns = 3 * CLIENTS, 4810
    flops = learning_work(rows, columns).flops
    flops += answer_work(rows, columns, CLIENTS).flops
    settings = keyword_settings(SPAN)
    options = server_options(settings)
    assert options is not None
    planner = Planner(settings, constants(), LINK, per_node=1)
    steps = network_sizes(options, planner.layout, rows=rows)["denoiser"].flops
    assert with_passes == pytest.approx(flops + 1_000 * steps)


def test_every_model_of_rows_has_its_networks_counted() -> None:
    """A dry run, a profile and a plan ask for them, whatever the model."""
    for model in get_args(ServerOptions.model_fields["server_model"].annotation):
        settings = keyword_settings({**SPAN, "server_model": model})
        options = server_options(settings)
        assert options is not None
        layout = client_layout(settings.config)
        sizes = network_sizes(options, layout, rows=12)
        assert tuple(sizes) == options.networks
        assert run_work(settings).server >= 1_000 * sizes["denoiser"].flops


def test_another_model_of_rows_is_not_planned_from_this_one(
    tmp_path: Path,
) -> None:
    measured = constants(
        server=(server_point(network_sizes_of("tiny"), 50, 0.5),),
        preparations=(),
    )
    path = tmp_path / "plan.json"
    write_constants(path, measured)
    settings = keyword_settings({**SPAN, "device": "cpu"})
    plan = make_plan(PlanRequest(constants=path), settings)
    assert plan.learnings == []
    assert any("p-diff was measured, not span" in note for note in plan.notes)


def network_sizes_of(size: str) -> Any:
    settings = keyword_settings({**SPAN, "server": size})
    options = server_options(settings)
    assert options is not None
    planner = Planner(settings, constants(), LINK, per_node=1)
    return network_sizes(options, planner.layout, rows=12)["denoiser"]
