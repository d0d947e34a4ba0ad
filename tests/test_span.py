"""--server-model span: exact coordinates, any division of columns, and rivals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

from hpcfed import cli
from hpcfed.experiment.run import run_setup
from hpcfed.methods import pfedgpa
from hpcfed.models.layout import Entry, Layout
from hpcfed.results.stored import read_run
from hpcfed.server import auto, diffusion, likeness
from hpcfed.server import bank as server_bank
from hpcfed.server.auto import bank_line
from hpcfed.server.bank import BankedRound, BankedRows, UploadBank
from hpcfed.server.columns import Columns
from hpcfed.server.diffusion import Schedule
from hpcfed.server.fitting import least_memory, shortage
from hpcfed.server.guidance import Guidance
from hpcfed.server.latent_diffusion import LatentDiffusion
from hpcfed.server.networks import Autoencoder
from hpcfed.server.options import ServerOptions
from hpcfed.server.sizes import Size
from hpcfed.server.span import CoordinateDenoiser, Coordinates, SpanDiffusion
from hpcfed.server.training_plan import RankSlot
from hpcfed.words import bytes_text
from tests.federations import assembled
from tests.pfedgpa_runs import TINY, assert_learnt_alike
from tests.runs import flags, mistake, same, started
from tests.small_runs import SMALL
from tests.stopped_run import StopAfter

HERE = Path(__file__).parent
CPU = torch.device("cpu")
WIDTHS = [70, 5, 25]


def random_rows(count: int, *, seed: int = 0) -> Tensor:
    """Tensors whose sizes differ by orders of magnitude, in float64."""
    numbers = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 100, dtype=torch.float64, generator=numbers)
    rows[:, 70:75] *= 1e-4
    return 3 + rows


def banked(rows: Tensor, clients: list[int] | None = None) -> BankedRows:
    ids = np.arange(len(rows)) if clients is None else np.array(clients)
    return BankedRows([BankedRound(ids, rows)], Columns.all_of(WIDTHS))


def coordinates(bank: BankedRows, **changed: Any) -> Coordinates:
    return Coordinates.of(bank, **{"share": 1.0, "most": None, **changed})


def test_coordinates_by_hand() -> None:
    """Rows (0, 0), (6, 0), (0, 0) and (6, 0) have the mean (3, 0) and differ along one
    axis. Their standard deviation over both columns is √(9 / 2), so the coordinates are
    ±3 / √4.5 = ±√2.
    """
    rows = torch.tensor([[0.0, 0.0], [6.0, 0.0]] * 2, dtype=torch.float64)
    bank = BankedRows([BankedRound(np.arange(4), rows)], Columns.all_of([2]))
    found = coordinates(bank)
    assert found.places.shape == (4, 1)
    expected = np.sqrt(2) * np.array([-1.0, 1.0, -1.0, 1.0])
    sign = np.sign(found.places[1, 0].item())
    np.testing.assert_allclose(sign * found.places[:, 0], expected, rtol=1e-12)
    # (0, 9) is as far to the left as the first row, and otherwise outside the space.
    outside = found.of_rows(bank, torch.tensor([[0.0, 9.0]], dtype=torch.float64))
    np.testing.assert_allclose(sign * outside, [[-np.sqrt(2)]], rtol=1e-12)
    made = bank.combined(found.combinations(outside))
    np.testing.assert_allclose(made, [[0.0, 0.0]], atol=1e-12)


@pytest.mark.parametrize("at_once", [2**25, 40])
def test_every_row_is_its_coordinates(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the bank passes in blocks of one column."""
    monkeypatch.setattr(server_bank, "AT_ONCE", at_once)
    rows = random_rows(30)
    bank = banked(rows)
    found = coordinates(bank)
    assert found.places.shape == (30, 29)
    torch.testing.assert_close(
        found.of_rows(bank, rows), found.places, rtol=0, atol=1e-10
    )
    made = bank.combined(found.combinations(found.places))
    torch.testing.assert_close(made, rows, rtol=0, atol=1e-10)
    # Coordinates keep distances, in units of each tensor's standard deviation.
    scale = torch.cat([part.sub(part.mean(0)).square().mean().sqrt().expand(part.shape[1])
                       for part in rows.split(WIDTHS, 1)])  # fmt: skip
    for row, place in zip(rows, found.places, strict=True):
        expected = ((rows - row) / scale).norm(dim=1)
        torch.testing.assert_close((found.places - place).norm(dim=1), expected)


def test_fewer_axes_keep_the_widest() -> None:
    """Variances of 8, 4, 2 and 1 in four columns of one tensor."""
    signs = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    both = torch.cat([signs, -signs]).double()
    rows = both * torch.tensor([8.0, 4.0, 2.0, 1.0]).sqrt().double()
    bank = BankedRows([BankedRound(np.arange(8), rows)], Columns.all_of([4]))
    assert coordinates(bank).places.shape[1] == 4
    # 12 of 15 is 0.8.
    assert coordinates(bank, share=0.79).places.shape[1] == 2
    assert coordinates(bank, share=0.81).places.shape[1] == 3
    two = coordinates(bank, most=2)
    assert two.places.shape[1] == 2
    made = bank.combined(two.combinations(two.places))
    expected = rows.clone()
    expected[:, 2:] = 0
    torch.testing.assert_close(made, expected)


def test_rows_that_all_agree_are_one_axis_of_nothing() -> None:
    bank = banked(random_rows(1).expand(4, -1))
    made = bank.combined(coordinates(bank).combinations(coordinates(bank).places))
    torch.testing.assert_close(made, random_rows(1).expand(4, -1))


@pytest.mark.parametrize("ranks", [1, 2, 3, 100, 130])
def test_shares_of_columns_are_all_columns_once(ranks: int) -> None:
    every = torch.arange(100.0).unsqueeze(0)
    shares = [Columns.share_of(WIDTHS, rank, ranks) for rank in range(ranks)]
    assert torch.equal(torch.cat([share.of(every) for share in shares], 1), every)
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(WIDTHS))
    for share in shares:
        here = torch.full((share.stop - share.start,), -1)
        for tensor, columns in share.pieces():
            here[columns] = tensor
        assert torch.equal(here, owner[share.start : share.stop])


def test_distances_through_blocks_are_distances(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_bank, "AT_ONCE", 60)
    rows, others = random_rows(9), random_rows(4, seed=1)
    found = likeness.squared_distances(banked(rows), others).sqrt()
    expected = (others.unsqueeze(1) - rows).norm(dim=2)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)
    itself = likeness.likeness(banked(rows), np.arange(9), rows)
    # Of the rounding of squares that cancel, the root remains.
    assert itself.own.max() < 1e-6 and itself.nearest_is_own.all()


def test_shrinkage_by_hand() -> None:
    """Client 0 uploads 1 and 3, client 1 uploads −1 and −3. Between rounds the variance
    is 4 / 2 = 2; between clients (16 / 1 − 2) / 2 = 7. A mean of two rows counts
    7 / (7 + 2 / 2) = 7/8.
    """
    rows = torch.tensor([[1.0], [-1.0], [3.0], [-3.0]], dtype=torch.float64)
    bank = BankedRows([BankedRound(np.array([0, 1, 0, 1]), rows)], Columns.all_of([1]))
    known, made = likeness.shrunk_rows(bank, np.array([1, 5, 0]))
    assert known.tolist() == [True, False, True]
    np.testing.assert_allclose(made, [[-1.75], [1.75]], rtol=1e-12)
    # Means of −2 and 2, and 0 between them.
    known, made = likeness.halfway_rows(bank, np.array([1, 5, 0]))
    assert known.tolist() == [True, False, True]
    np.testing.assert_allclose(made, [[-1.0], [1.0]], rtol=1e-12)
    # A single upload of each cannot be doubted.
    single = BankedRows([BankedRound(np.arange(4), rows)], Columns.all_of([1]))
    np.testing.assert_allclose(likeness.shrunk_rows(single, np.arange(4))[1], rows)


def test_shrinkage_beats_the_mean_of_noisy_uploads() -> None:
    """As the theory says: by σ⁴ / (a² + σ²) a number, for two uploads with noise of
    variance 2σ² around rows of variance a².
    """
    numbers = torch.Generator().manual_seed(3)
    true = torch.randn(40, 100, dtype=torch.float64, generator=numbers)
    noise = 2 * torch.randn(2, 40, 100, dtype=torch.float64, generator=numbers)
    rows = (true + noise).flatten(0, 1)
    bank = banked(rows, clients=list(range(40)) * 2)
    everyone = np.arange(40)
    errors = []
    for make in (likeness.mean_rows, likeness.shrunk_rows):
        errors.append((make(bank, everyone)[1] - true).square().mean().item())
    # a² = 1 and σ² = 2: errors of 2 and of 2/3. The sample of 4,000 numbers has a
    # standard error of 2 √(2 / 4000) = 0.045.
    assert errors[0] == pytest.approx(2, abs=0.2)
    assert errors[1] == pytest.approx(2 / 3, abs=0.07)


def test_the_denoiser_begins_as_the_ideal_one_of_gaussian_data() -> None:
    schedule = Schedule.linear(1000)
    variances = torch.tensor([4.0, 0.25])
    denoiser = CoordinateDenoiser(variances, Size(16, 0, 1), schedule)
    numbers = torch.Generator().manual_seed(0)
    z0 = variances.sqrt() * torch.randn(200_000, 2, generator=numbers)
    noise = torch.randn(200_000, 2, generator=numbers)
    t = torch.full((200_000,), 300)
    z = schedule.noised(z0, t, noise)
    with torch.no_grad():
        predicted = denoiser(z, t)
    kept = schedule.alpha_bars[300].item()
    for axis, variance in enumerate(variances.tolist()):
        # No linear prediction is better than the regression of noise on z.
        slope = (z[:, axis] @ noise[:, axis]) / (z[:, axis] @ z[:, axis])
        ideal = (1 - kept) ** 0.5 / (kept * variance + 1 - kept)
        assert slope.item() == pytest.approx(ideal, rel=0.02)
        torch.testing.assert_close(predicted[:, axis], ideal * z[:, axis])


OPTIONS: dict[str, Any] = {
    "server_model": "span",
    "server": "tiny",
    "server_engine": "torch",
    "denoiser_samples": 4000,
}


def learnt(rows: Tensor, **changed: Any) -> SpanDiffusion:
    options = ServerOptions(**{**OPTIONS, **changed})
    model = SpanDiffusion(Columns.all_of(WIDTHS), options, RankSlot(CPU), seed=1)
    model.learn(banked(rows))
    return model


def clients_rows() -> Tensor:
    """Ten clients with six uploads each, which differ by a tenth of what clients do."""
    own = random_rows(10).repeat_interleave(6, 0)
    return own + 0.1 * (random_rows(60, seed=2) - 3)


def test_inversion_changes_rows_and_keeps_clients() -> None:
    rows = clients_rows()
    model = learnt(rows)
    unchanged = model.invert(rows[:3], depth=0)
    torch.testing.assert_close(unchanged, rows[:3], rtol=0, atol=1e-10)
    newest = rows[5::6]
    made = model.invert(newest)
    changed = (made - newest).norm(dim=1) / (newest - rows.mean(0)).norm(dim=1)
    assert (changed > 0.01).all() and (changed < 0.5).all()
    bank = banked(rows, clients=np.repeat(np.arange(10), 6).tolist())
    assert likeness.recognised(bank, np.arange(10), made) == 1.0
    # At full depth nothing of the client is left.
    lost = model.invert(newest, depth=1000)
    assert likeness.recognised(bank, np.arange(10), lost) < 0.8


def test_the_mean_of_inversions_has_less_noise() -> None:
    """A denoiser that finds no noise leaves all of it: then DDIM returns
    z₀ + s·noise with s² = (1 − ᾱ) / ᾱ, and the mean of k inversions has s² / k of it.
    """
    model = learnt(clients_rows(), denoiser_samples=200, inversion_noise="none")
    model._epsilon = lambda z, t: torch.zeros_like(z)  # type: ignore[method-assign]
    z = model.encode(clients_rows())
    kept = model.schedule.alpha_bars[100].item()
    numbers = z.numel()
    for number in (1, 8):
        total = sum(model.invert(clients_rows(), draw=draw) for draw in range(number))
        noise = model.encode(total / number) - z
        # The mean square of n normal numbers has a standard error of √(2 / n).
        expected = (1 - kept) / kept / number
        far = 5 * (2 / numbers) ** 0.5
        assert noise.square().mean().item() == pytest.approx(expected, rel=far)


def test_a_guided_row_keeps_what_lies_outside_the_space() -> None:
    rows = clients_rows()
    model = learnt(rows, denoiser_samples=200)
    after = random_rows(2, seed=5)
    how = Guidance(strength=0.0, start=20, steps=20, moved=True)
    guided = model.guide(rows[:2], after, how)
    moved = guided - after
    assert moved.norm() > 1e-3
    # The move itself lies within the space: rows plus it are their coordinates.
    within = rows.mean(0) + moved
    torch.testing.assert_close(model.reconstruct(within), within, rtol=1e-8, atol=1e-10)


def test_learning_teaches_the_denoiser() -> None:
    """Clusters of clients are not Gaussian data: there is something to learn."""
    rows = clients_rows()
    model = learnt(rows, server_batch=200, denoiser_samples=40_000)
    z = model.encode(rows).float().repeat(20, 1)
    ideal = CoordinateDenoiser(z.square().mean(0), model.options.size, model.schedule)
    noise = torch.randn(z.shape, generator=torch.Generator().manual_seed(9))
    t = torch.full((len(z),), 300)
    noised = model.schedule.noised(z, t, noise)
    errors = []
    with torch.no_grad():
        for denoiser in (ideal, model.denoiser):
            errors.append((denoiser(noised, t) - noise).square().mean().item())
    assert errors[1] < 0.8 * errors[0]


def test_a_bank_on_the_host_in_bfloat16_holds_rounded_rows() -> None:
    rows = random_rows(4).float()
    bank = UploadBank(2, Columns.all_of(WIDTHS), dtype=torch.bfloat16, on_host=True)
    bank.add(0, np.array([3, 1, 2, 0]), rows)
    content = bank.content()
    expected = rows[[3, 1, 2, 0]].bfloat16()
    assert torch.equal(content.rows(), expected.float())
    assert torch.equal(content.at(np.array([2])), expected[[2]].float())
    [block, *_] = content.blocks()
    assert torch.equal(block.rows, expected[:, block.at].double())


def test_a_saved_model_is_the_same(tmp_path: Path) -> None:
    rows = clients_rows().float()
    few = {"denoiser_samples": 200, "diffusion_steps": 50, "inversion_depth": 10}
    model = learnt(rows, **few)
    model.save(tmp_path / "server.h5", start=rows[0])
    again = SpanDiffusion(
        Columns.all_of(WIDTHS),
        ServerOptions(**{**OPTIONS, **few, "server_load": str(tmp_path / "server.h5")}),
        RankSlot(CPU),
        seed=1,
    )
    assert torch.equal(again.invert(rows[:4]), model.invert(rows[:4]))
    assert torch.equal(again.sample(3), model.sample(3))
    assert again.start is not None and torch.equal(again.start, rows[0])


def test_a_file_may_hold_coordinates_of_another_type(tmp_path: Path) -> None:
    """Files come from anywhere: a type that we do not write is no reason to fail."""
    rows = random_rows(6)
    model, path = learnt(rows, denoiser_samples=200), tmp_path / "server.h5"
    model.save(path)
    with h5py.File(path, "r+") as file:
        for name in ("coordinates/places", "coordinates/weights", "axes/mean"):
            single = file[name][()].astype(np.float32)
            del file[name]
            file[name] = single
    model.load(path)
    torch.testing.assert_close(model.invert(rows, depth=0), rows, rtol=0, atol=1e-5)


RUN: dict[str, Any] = {
    **SMALL,
    "method": "pfedgpa",
    "clients": 6,
    "rounds": 4,
    "bank_rounds": 3,
    "precision": "fp32",
    "server_model": "span",
    "server": "tiny",
    "denoiser_samples": 400,
    "server_batch": 16,
    "inversion_depth": 20,
    "memorisation": True,
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return started(*flags(**RUN, out=tmp_path_factory.mktemp("span") / "alone"))


def test_the_bank_lies_once_over_any_number_of_ranks(
    alone: Path, tmp_path: Path, mpirun: Callable
) -> None:
    """Four workers that learn themselves, and two workers with two server ranks."""
    among, apart = tmp_path / "among", tmp_path / "apart"
    first = flags(**RUN, out=among)
    second = flags(**RUN, server_ranks=2, zero_stage=2, out=apart)
    result = mpirun(4, "-m", "mpi4py", HERE / "several_runs.py", *first, "+", *second)
    assert result.returncode == 0, result.stderr
    for folder in (among, apart):
        assert_learnt_alike(folder, alone)


def test_ranks_without_a_column_join_in_every_sum(mpirun: Callable) -> None:
    """One column on two ranks: the first has none, the second all. If only one of them
    summed over ranks, it would wait for ever.
    """
    result = mpirun(2, "-m", "mpi4py", "-m", "tests.one_column")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["[1.0, 3.0, -5.0]"] * 2


def test_a_bank_has_only_rows_that_its_type_can_hold() -> None:
    """The largest bfloat16 is (2 − 2⁻⁷) · 2¹²⁷. Float32 goes on to (2 − 2⁻²³) · 2¹²⁷, and
    rounds to infinity from halfway to 2¹²⁸ on.
    """
    largest = (2 - 2**-7) * 2.0**127
    halfway = (2 - 2**-8) * 2.0**127
    numbers = [1.0, largest, -halfway, torch.nan]
    rows = torch.tensor([[0.0, number] for number in numbers])
    for dtype, kept in ((torch.bfloat16, [0, 1]), (None, [0, 1, 2])):
        bank = UploadBank(1, Columns.all_of([2]), dtype=dtype)
        bank.add(0, np.arange(4), rows)
        content = bank.content()
        assert content.uploaders.tolist() == kept
        assert content.rows().isfinite().all()


LONGER = {**RUN, "rounds": 9, "bank_rounds": 3, "server_every": 5}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run_setup(assembled(**LONGER), folder, quiet=True)
    return folder


@pytest.mark.parametrize("stopped_after", [5, 7])
def test_a_resumed_run_is_the_uninterrupted_one(
    stopped_after: int, whole: Path, tmp_path: Path
) -> None:
    """It stops after it has learnt, and when the rows of that learning have left the
    bank; then it stops once more before it learns again.
    """
    cut = tmp_path
    run_setup(assembled(**LONGER), cut, quiet=True, stop=StopAfter(stopped_after))
    for stop in (StopAfter(stopped_after + 1), None):
        resumed = assembled(**LONGER, resume=str(cut), out=str(cut))
        run_setup(resumed, cut, quiet=True, stop=stop)
    same(whole, cut)


@pytest.mark.parametrize("model", ["p-diff", "span"])
def test_a_loaded_server_is_stored_before_anything_is_banked(
    model: str, tmp_path: Path
) -> None:
    options = {**SMALL, **TINY, "server_model": model, "rounds": 3, "bank_rounds": 1}
    if model == "span":
        del options["autoencoder_samples"]
    teacher, whole, cut = tmp_path / "teacher", tmp_path / "whole", tmp_path / "cut"
    for folder in (teacher, whole, cut):
        folder.mkdir()
    run_setup(assembled(**options), teacher, quiet=True)
    options |= {"server_load": str(teacher / "server.h5"), "warm_start": True}
    run_setup(assembled(**options), whole, quiet=True)
    run_setup(assembled(**options), cut, quiet=True, stop=StopAfter(1))
    resumed = assembled(**options, resume=str(cut), out=str(cut))
    run_setup(resumed, cut, quiet=True)
    same(whole, cut)


def test_what_is_recorded_has_no_autoencoder(alone: Path) -> None:
    record = read_run(alone)
    [learning] = record.learnings
    assert set(learning.parameters) == {"denoiser"}
    assert learning.rows == 12, "four of six clients in each of three rounds"
    assert "shrunk mean" in record.finals


def test_a_model_that_grows_too_large_says_what_to_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_large(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 66.6 GiB")

    monkeypatch.setattr(LatentDiffusion, "learn", too_large)
    options = {**RUN, "server_model": "p-diff", "out": tmp_path / "run"}
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", *map(str, flags(**options))])
    assert ended.value.code == 2
    [*_, line] = capsys.readouterr().err.splitlines()
    assert "of 4,810 columns does not fit" in line and "--server-model span" in line


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"span_variance": 0}, "span-variance"),
        ({"server_model": "p-diff", "span_variance": 0.9}, "--server-model span"),
        ({"server_model": "spam"}, "spam"),
        ({"autoencoder_samples": 200}, "without --server-model p-diff"),
        ({"latent_noise": 0.2}, "without --server-model p-diff"),
        (
            {"server_load": __file__},
            "--server-load changes nothing without --warm-start",
        ),
    ],
)
def test_mistakes(
    changed: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in mistake(capsys, "run", *flags(**{**RUN, **changed}))


@pytest.mark.gpu
def test_a_gpu_has_the_same_coordinates() -> None:
    rows = clients_rows()
    here = learnt(rows, inversion_noise="none")
    bank = BankedRows([BankedRound(np.arange(60), rows.cuda())], Columns.all_of(WIDTHS))
    found = coordinates(bank)
    expected = coordinates(banked(rows))
    torch.testing.assert_close(found.scales.cpu(), expected.scales)
    made = bank.combined(found.combinations(found.places))
    torch.testing.assert_close(made.cpu(), rows, rtol=1e-10, atol=1e-14)
    there = SpanDiffusion(
        Columns.all_of(WIDTHS),
        ServerOptions(**OPTIONS, inversion_noise="none"),
        RankSlot(torch.device("cuda")),
        seed=1,
    )
    there.learn(bank)
    # Noise differs between devices, so only what both learn from can be compared.
    lengths = [
        diffusion.retrace(one.schedule, one.encode(rows.to(one.slot.device)), []).norm()
        for one in (here, there)
    ]
    assert lengths[0].item() == pytest.approx(lengths[1].item(), rel=1e-9)
    made = there.invert(rows[5::6].cuda())
    bank = BankedRows(
        [BankedRound(np.repeat(np.arange(10), 6), rows.cuda())], Columns.all_of(WIDTHS)
    )
    assert likeness.recognised(bank, np.arange(10), made) == 1.0


def test_a_large_bank_says_beforehand_what_it_takes() -> None:
    """200 uploads of 11,181,642 columns are 8.33 GiB in float32."""
    columns = 11_181_642
    entry = Entry("linear.weight", (1, columns), 0, columns, True)
    layout = Layout((entry,), head="linear")
    options = ServerOptions(server_model="span")
    expected = f"200 uploads will take up to {bytes_text(800 * columns)} of its device"
    line = bank_line(options, layout, uploads=200, ranks=1)
    assert line is not None and expected in line
    halved = options.model_copy(update={"bank_precision": "bf16", "bank_on": "host"})
    line = bank_line(halved, layout, uploads=200, ranks=2)
    assert line is not None
    assert f"{bytes_text(200 * columns)} of host memory" in line
    assert bank_line(options, layout, uploads=20, ranks=1) is None


def test_p_diff_that_exceeds_its_device_is_refused_beforehand(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted machine of 64 MiB: p-diff for 1.6 million columns needs more, whatever
    its size.
    """
    monkeypatch.setattr("hpcfed.runtime.location.usable", lambda: 2**26)
    wide = {"dataset": "synthetic", "model": "cnn-pfl", "clients": 2, "rounds": 1}
    options = {**wide, "train_per_client": 4, "test_per_client": 4, "device": "cpu"}
    out = tmp_path / "run"
    words = flags(**options, method="pfedgpa", server_model="p-diff", server="small",
                  generated_layers=2, out=out)  # fmt: skip
    told = mistake(capsys, "run", *words)
    assert "p-diff takes at least" in told and "its device has 64.00 MiB" in told
    assert "use --server-model span" in told and told.count("\n") == 1
    assert not out.exists()


def test_only_options_of_p_diff_ask_for_it() -> None:
    """A method adds options of its own."""
    options = pfedgpa.Options(guided_start=50, autoencoder_samples=100)
    assert not auto._asks_for_p_diff(options, {"guided_start"})
    assert auto._asks_for_p_diff(options, {"guided_start", "autoencoder_samples"})


def test_least_memory_by_hand() -> None:
    """One rank in float32: 16 bytes of a parameter, and 4 for gradients as they are
    averaged; 4 of each activation; and two copies of the bank.
    """
    options = ServerOptions(server="small", server_batch=10)
    network = Autoencoder(1000, options.size, input_noise=0, latent_noise=0)
    parameters = sum(p.numel() for p in network.parameters())
    expected = 20 * parameters + 4 * 10 * network.activations + 2 * 4 * 30 * 1000
    assert least_memory(options, 1000, uploads=30, ranks=1) == expected
    known = {"uploads": 30, "ranks": 1}
    assert shortage(options, 1000, **known, memory=expected) == ""
    assert shortage(options, 1000, **known, memory=expected - 1)
    assert shortage(options, 1000, **known, memory=0) == "", "unknown"
