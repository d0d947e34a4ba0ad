"""--server-model tokens: rows cut into tokens, and a transformer that denoises them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hpcfed.experiment.run import run_setup
from hpcfed.server import likeness, tokens
from hpcfed.server.bank import BankedRound, BankedRows
from hpcfed.server.columns import Columns
from hpcfed.server.diffusion import Schedule
from hpcfed.server.losses import token_loss
from hpcfed.server.options import ServerOptions, batching
from hpcfed.server.sizes import Size
from hpcfed.server.streams import Streams
from hpcfed.server.token_denoiser import TokenDenoiser
from hpcfed.server.token_layout import TokenLayout
from hpcfed.server.tokens import TokenDiffusion
from hpcfed.server.training_plan import RankSlot
from tests.federations import assembled
from tests.pfedgpa_runs import assert_learnt_alike
from tests.runs import flags, mistake, same, started
from tests.small_runs import SMALL
from tests.stopped_run import StopAfter

HERE = Path(__file__).parent
CPU = torch.device("cpu")
WIDTHS = [70, 5, 25]
OPTIONS: dict[str, Any] = {
    "server_model": "tokens",
    "server": "tiny",
    "server_latent": 8,
    "server_width": 32,
    "server_engine": "torch",
    "denoiser_samples": 800,
    "token_window": 5,
    "diffusion_steps": 100,
    "inversion_depth": 10,
}


def layout(widths: list[int], length: int, window: int) -> TokenLayout:
    return TokenLayout.of(widths, length=length, window=window, device=CPU)


def test_a_row_is_cut_tensor_by_tensor() -> None:
    """5, 3 and 1 columns make two, one and one tokens of four numbers; two tokens
    without columns fill up the second window of three.
    """
    cut = layout([5, 3, 1], 4, 3)
    rows = torch.arange(1.0, 10.0).unsqueeze(0)
    none = [0.0] * 4
    expected = [1.0, 2.0, 3.0, 4.0], [5.0, 0, 0, 0], [6.0, 7.0, 8.0, 0], [9.0, 0, 0, 0]
    assert cut.cut(rows).view(-1, 4).tolist() == [*expected, none, none]
    assert torch.equal(cut.joined(cut.cut(rows)), rows)
    assert cut.tensors.tolist() == [0, 0, 1, 2, 3, 3]
    assert cut.places.tolist() == [0, 1, 0, 0, 0, 1]
    assert cut.begins.tolist() == [0, 4, 5, 8, 9, 9, 9]
    columns = cut.window_at(torch.tensor([1]))
    assert columns.tolist() == [[4, -1, -1, -1, 5, 6, 7, -1, 8, -1, -1, -1]]
    # A window is not longer than the row.
    assert layout([5, 3, 1], 4, 100).window == 4


def random_rows(count: int, *, seed: int = 0) -> Tensor:
    """Tensors whose sizes differ by orders of magnitude."""
    numbers = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 100, generator=numbers)
    rows[:, 70:75] *= 1e-4
    return 3 + rows


def clients_rows() -> Tensor:
    """Ten clients with six uploads each, which differ by a tenth of what clients do."""
    own = random_rows(10).repeat_interleave(6, 0)
    return own + 0.1 * (random_rows(60, seed=2) - 3)


def banked(rows: Tensor, clients: np.ndarray | None = None) -> BankedRows:
    """Rows of two rounds."""
    ids = np.arange(len(rows)) if clients is None else clients
    rounds = [BankedRound(ids[:7], rows[:7]), BankedRound(ids[7:], rows[7:])]
    return BankedRows(rounds, Columns.all_of(WIDTHS))


def model_of(**changed: Any) -> TokenDiffusion:
    options = ServerOptions(**{**OPTIONS, **changed})
    return TokenDiffusion(Columns.all_of(WIDTHS), options, RankSlot(CPU), seed=1)


def learnt(rows: Tensor, **changed: Any) -> TokenDiffusion:
    model = model_of(**changed)
    model.learn(banked(rows))
    return model


def test_windows_are_parts_of_standardised_rows() -> None:
    rows = clients_rows()
    model = learnt(rows, denoiser_samples=50)
    whole = model.encode(rows).unflatten(1, (-1, 8))
    at, first = torch.tensor([3, 59, 8]), torch.tensor([0, 2, 10])
    windows, real = model._windows(banked(rows), at, first)
    for number in range(3):
        begin = int(first[number])
        expected = whole[at[number], begin : begin + 5].flatten()
        torch.testing.assert_close(windows[number], expected)
    # 70 columns are eight tokens and six numbers of a ninth; then 5 and 25 columns.
    assert real[0].all() and int(real[1].sum()) == 40
    assert int(real[2].sum()) == 25
    # Over all columns of a tensor, standardised rows have mean 0 and variance 1, up to
    # float32's rounding of numbers near 3 that differ by 1e-4.
    rounding = 3 * 2.4e-7 / 1e-4
    assert whole[:, 9, :5].mean().item() == pytest.approx(0, abs=rounding)
    assert whole[:, 9, :5].square().mean().item() == pytest.approx(1, rel=rounding)


def test_shares_of_columns_make_up_a_window() -> None:
    rows = clients_rows()
    together = torch.zeros(40)
    for rank in range(3):
        share = Columns.share_of(WIDTHS, rank, 3)
        bank = BankedRows([BankedRound(np.arange(60), share.of(rows))], share)
        alone = torch.zeros(40)
        bank.copy_part(7, slice(30, 70), alone)
        together += alone
    assert torch.equal(together, rows[7, 30:70])


def test_the_denoiser_begins_as_the_ideal_one_of_white_noise() -> None:
    schedule = Schedule.linear(1000)
    denoiser = TokenDenoiser(layout(WIDTHS, 8, 5), Size(32, 8, 2), schedule)
    z = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    t, first = torch.tensor([1, 100, 500, 1000]), torch.tensor([0, 1, 2, 10])
    with torch.no_grad():
        predicted = denoiser(z, t, first)
    # z_t has variance 1, of which the noise is 1 − ᾱ.
    ideal = (1 - schedule.alpha_bars[t]).sqrt().float().unsqueeze(1) * z
    torch.testing.assert_close(predicted, ideal)


def test_its_cost_is_what_torch_counts() -> None:
    cut = layout([5000, 300, 900], 64, 30)
    denoiser = TokenDenoiser(cut, Size(128, 64, 3), Schedule.linear(1000))
    # Not every torch counts fused attention.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        denoiser(torch.zeros(1, cut.width), torch.tensor([3]), torch.tensor([2]))
    assert denoiser.flops() == counter.get_total_flops()


@pytest.mark.parametrize("changed", [{}, {"server_micro_batch": 4}])
def test_ranks_share_the_samples_of_a_step(changed: dict[str, Any]) -> None:
    """The mean of two ranks' losses is the loss of one rank with the same samples."""
    rows = clients_rows()
    model = learnt(rows, denoiser_samples=50)
    bank = banked(rows)
    seen: list[int] = []

    def step(ranks: int) -> float:
        options = ServerOptions(**{**OPTIONS, **changed, "server_batch": 8})
        division = batching(options, ranks, "denoiser")
        streams = Streams(5, CPU)
        loss = token_loss(
            lambda rows, first: model._windows(bank, rows, first),
            division,
            streams.draws("denoiser"),
            streams.draws("windows", CPU),
            schedule=model.schedule,
            num_rows=len(bank),
            num_starts=9,
            filled=1.0,
        )

        def network(z: Tensor, t: Tensor, first: Tensor) -> Tensor:
            seen.append(len(z))
            return model.denoiser(z, t, first)

        numbers = range(ranks * division.accumulation)
        return float(np.mean([loss(network, 3, n).item() for n in numbers]))

    assert step(2) == pytest.approx(step(1), rel=1e-5)
    assert seen == [4, 4, 8] if not changed else seen == [4, 4, 4, 4]


def test_inversion_changes_rows_and_keeps_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = clients_rows()
    model = learnt(rows)
    unchanged = model.invert(rows[:3], depth=0)
    torch.testing.assert_close(unchanged, rows[:3])
    newest = rows[5::6]
    clients = np.repeat(np.arange(10), 6)
    # 15 tokens with the noise of 10 steps and four more: all rows at once, then three.
    for at_once in (2**30, 3 * 15 * 8 * 14):
        monkeypatch.setattr(tokens, "AT_ONCE", at_once)
        made = model.invert(newest)
        changed = (made - newest).norm(dim=1) / (newest - rows.mean(0)).norm(dim=1)
        assert (changed > 0.01).all() and (changed < 0.5).all()
        recognised = likeness.recognised(banked(rows, clients), np.arange(10), made)
        assert recognised == 1.0
    # No two parts have the same noise.
    sampled = model.sample(6)
    assert not torch.allclose(sampled[:3], sampled[3:])


def test_learning_teaches_the_denoiser() -> None:
    """Rows that differ in two directions are not white noise: in all others everything
    is noise.
    """
    numbers = torch.Generator().manual_seed(0)
    places = torch.randn(60, 2, generator=numbers)
    rows = places @ torch.randn(2, 100, generator=numbers)
    options = {"server_width": 32, "token_window": 20, "server_lr": 1e-2}
    model = learnt(rows, **options, server_batch=50, denoiser_samples=5_000)
    untrained = model_of(**options)
    z = model.encode(rows)
    t = torch.full((60,), 30)
    noise = torch.randn(z.shape, generator=torch.Generator().manual_seed(9))
    noised = model.schedule.noised(z, t, noise)
    with torch.no_grad():
        errors = [(each._epsilon(noised, t) - noise) for each in (untrained, model)]
    before, after = (error[:, :70].square().mean().item() for error in errors)
    assert after < 0.8 * before


def test_a_saved_model_is_the_same(tmp_path: Path) -> None:
    rows = clients_rows()
    model = learnt(rows)
    model.save(tmp_path / "server.h5", start=rows[0])
    again = model_of(server_load=str(tmp_path / "server.h5"))
    assert torch.equal(again.invert(rows[:4]), model.invert(rows[:4]))
    assert torch.equal(again.sample(3), model.sample(3))
    assert again.start is not None and torch.equal(again.start, rows[0])


RUN: dict[str, Any] = {
    **SMALL,
    "method": "pfedgpa",
    "clients": 6,
    "rounds": 4,
    "bank_rounds": 3,
    "precision": "fp32",
    "server_model": "tokens",
    "server": "tiny",
    "server_latent": 256,
    "denoiser_samples": 120,
    "server_batch": 12,
    "token_window": 8,
    "diffusion_steps": 50,
    "inversion_depth": 5,
    "memorisation": True,
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return started(*flags(**RUN, out=tmp_path_factory.mktemp("tokens") / "alone"))


def test_any_number_of_ranks_learns_the_same(
    alone: Path, tmp_path: Path, mpirun: Callable
) -> None:
    """Three workers that learn themselves, and one with two server ranks and ZeRO 3."""
    among, apart = tmp_path / "among", tmp_path / "apart"
    first = flags(**RUN, out=among)
    second = flags(**RUN, server_ranks=2, zero_stage=3, out=apart)
    result = mpirun(3, "-m", "mpi4py", HERE / "several_runs.py", *first, "+", *second)
    assert result.returncode == 0, result.stderr
    for folder in (among, apart):
        assert_learnt_alike(folder, alone)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    options = {**RUN, "rounds": 7, "server_every": 4, "denoiser_samples": 48}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    run_setup(assembled(**options), whole, quiet=True)
    run_setup(assembled(**options), cut, quiet=True, stop=StopAfter(5))
    resumed = assembled(**options, resume=str(cut), out=str(cut))
    run_setup(resumed, cut, quiet=True)
    same(whole, cut)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"token_window": 0}, "token-window"),
        ({"server_model": "span"}, "--server-model tokens"),
        ({"server_depth": 201}, "server-depth"),
        (
            {"server_model": "p-diff", "token_window": None, "server_depth": 13},
            "--server-depth 13 is beyond 12",
        ),
    ],
)
def test_mistakes(
    changed: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {**RUN, **changed}
    given = {name: value for name, value in options.items() if value is not None}
    assert words in mistake(capsys, "run", *flags(**given))


def excess(model: TokenDiffusion, bank: BankedRows) -> float:
    """Return the denoiser's squared error less that of the best one for white noise, as
    which it began. Both see the same noise.
    """
    random = torch.Generator().manual_seed(7)
    at = torch.arange(len(bank))
    first = torch.randint(0, 8, at.shape, generator=random)
    z, real = model._windows(bank, at, first)
    noise = torch.randn(z.shape, generator=random).to(z.device) * real
    t = torch.full_like(at, 20).to(z.device)
    schedule = model.schedule
    noisy = schedule.noised(z, t, noise)
    with torch.no_grad():
        predicted = model.denoiser(noisy, t, first.to(z.device)) * real
    white = (1 - schedule.alpha_bars[20]).sqrt() * noisy
    errors = [(each - noise).square().sum() for each in (predicted, white)]
    return float((errors[0] - errors[1]) / errors[1])


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("cpu", "fp32"),
        pytest.param("cuda", "fp32", marks=pytest.mark.gpu),
        pytest.param("cuda", "bf16", marks=pytest.mark.gpu),
    ],
)
def test_it_learns_and_keeps_clients(device: str, precision: str) -> None:
    rows = clients_rows().to(device)
    changed = {"server_precision": precision, "denoiser_samples": 8000}
    options = ServerOptions(**{**OPTIONS, **changed})
    slot = RankSlot(torch.device(device))
    model = TokenDiffusion(Columns.all_of(WIDTHS), options, slot, seed=1)
    bank = banked(rows, np.repeat(np.arange(10), 6))
    model.learn(bank)
    # Rows of a client are alike, which white noise does not have.
    assert excess(model, bank) < 0
    made = model.invert(rows[5::6])
    assert likeness.recognised(bank, np.arange(10), made) == 1.0
