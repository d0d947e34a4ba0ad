"""Runs that go on from another: made longer, or started from its weights; cohorts of a
fixed size.
"""

import csv
import hashlib
import shlex
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import hpcfed
from hpcfed import cli
from hpcfed.analysis.collect import find
from hpcfed.analysis.groups import groups
from hpcfed.analysis.outcomes import run_seconds
from hpcfed.analysis.render.exports import csv_text
from hpcfed.analysis.run_findings.costs import of_phases
from hpcfed.clients import initial
from hpcfed.experiment.run import run
from hpcfed.models.networks import build
from hpcfed.results.as_json import run_summary
from hpcfed.results.stored import read_run
from hpcfed.runtime.signals import STOPPED, Stop
from tests.runs import flags, mistake, recorded, rows, started

SMALL: dict[str, Any] = {"clients": 4, "epochs": 1, "precision": "fp64"}


@pytest.mark.parametrize(
    "options",
    [
        {"method": "fedavg", "cohort": 2},
        {"method": "fedper", "new_clients": 2, "new_updates": 1},
        {"method": "genefl", "clusters": 2, "seeds": "0..1"},
        # Clients that take part by turns, each with a count of its own steps.
        {"method": "fedper", "cohort": 3, "model": "tests/own/networks.py:Warming"},
    ],
)
def test_a_run_that_is_made_longer_equals_a_long_one(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Bit for bit, finals and newcomers of the new end included; from a complete run,
    and once more from one that was killed on the way.
    """
    common = {**SMALL, **options}
    snapshots = {} if "seeds" in options else {"snapshot_every": 2}
    long, short = tmp_path / "long", tmp_path / "short"
    started(*flags(**common, **snapshots, rounds=6, out=long))
    started(*flags(**common, **snapshots, rounds=2, out=short))
    started("--resume", short, "--rounds", 4)
    first, others = short, []
    if "seeds" in options:
        first, others = short / "seed-0", ["seed-1"]
        shutil.copytree(short / others[0], tmp_path / others[0])
    # As if it had been killed while it was made longer still: the record says 6, and
    # that of another seed does not know it yet.
    started("--resume", short, "--rounds", 6)
    shutil.rmtree(first / "checkpoints/00000006")
    _mark(first, "running")
    for name in others:
        shutil.rmtree(short / name)
        shutil.move(tmp_path / name, short / name)
    started("--resume", short)
    for one in hpcfed.open(long).seeds:
        other = short / one.folder.relative_to(long)
        found, expected = recorded(other), recorded(one.folder)
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values, err_msg=name)
        assert read_run(other).rounds_done == 6
        if "seeds" not in options:
            long_run, short_run = hpcfed.open(long), hpcfed.open(short)
            for round in (2, 4, 6):
                np.testing.assert_array_equal(
                    short_run.parameters(round).rows, long_run.parameters(round).rows
                )


def _mark(folder: Path, status: str) -> None:
    import h5py

    with h5py.File(folder / "run.h5", "r+") as file:
        file.attrs["status"] = status


def test_an_evaluation_of_the_former_last_round_is_taken_back(tmp_path: Path) -> None:
    """A long run has evaluated other rounds than a short one."""
    common = {**SMALL, "evaluate_every": 2, "metrics": "accuracy,f1,per-class"}
    long, short = tmp_path / "long", tmp_path / "short"
    started(*flags(**common, rounds=6, out=long))
    started(*flags(**common, rounds=3, out=short))
    assert np.isfinite(read_run(short).rounds["accuracy"]).tolist() == [0, 1, 1]
    started("--resume", short, "--rounds", 6)
    found, expected = recorded(short), recorded(long)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    with h5py.File(short / "run.h5") as one, h5py.File(long / "run.h5") as other:
        for group in ("clients", "classes"):
            for name in other[group]:
                np.testing.assert_array_equal(one[group][name], other[group][name])


def test_times_belong_to_the_runs_that_a_round_had_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two seeds advance together for three rounds, then one goes on alone for two."""
    out = started(*flags(**SMALL, rounds=3, seeds="0,1", out=tmp_path / "run"))
    started("--resume", out / "seed-1", "--rounds", 5)
    found = read_run(out / "seed-1")
    assert found.stacks.tolist() == [2, 2, 2, 1, 1]
    assert (found.stacked_seeds, found.untimed) == (1, 3)
    seconds = found.rounds["seconds"]
    assert found.timed_seconds() == pytest.approx(seconds[3:].sum())
    table = of_phases(found)
    assert table.columns[2] == "s in rounds 4 to 5"
    assert "with another number of runs at once" in table.caption
    summary = run_summary(found)
    assert summary["stacked_seeds_of_rounds"] == [2, 2, 2, 1, 1]
    capsys.readouterr()
    cli.main(["show", str(out / "seed-1")])
    assert "one of 2 runs at once up to round 3, then 1: sec" in capsys.readouterr().out
    cli.main(["show", str(out)])
    assert "From round 4 to 5 fewer seeds advanced" in capsys.readouterr().out
    # They stay seeds of one point, whose times are those of the last rounds.
    (process,) = find([out]).processes
    assert process.seconds.tolist() == seconds[4:].tolist()
    (group,) = groups([process])
    assert group.options["stacked_seeds"] == 1 and np.isnan(run_seconds(group).centre)
    lines = list(csv.DictReader(csv_text([group]).splitlines()))
    told = [line["stacked_seeds"] for line in lines if line["seed"] == "1"]
    assert told == ["2", "2", "2", "1", "1"]
    # Alone, too: then the other's time is not part of this one's.
    started("--resume", out / "seed-0", "--rounds", 4)
    capsys.readouterr()
    cli.main(["show", str(out)])
    said = capsys.readouterr().out
    assert (
        "2 seeds\n" in said and "seed 1: 2 runs at once up to round 3, then 1" in said
    )
    assert f"wall time of all rounds of seed 1: {seconds.sum():.2f} s" in said


def test_what_cannot_be_made_longer_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, bare = tmp_path / "run", tmp_path / "bare"
    started(*flags(**SMALL, rounds=3, out=out))
    started(*flags(**SMALL, rounds=3, checkpoint_minutes=0, out=bare))
    capsys.readouterr()
    said = mistake(capsys, "run", "--resume", out, "--rounds", 2)
    assert "the run has 3 rounds, and can only be made longer" in said
    said = mistake(capsys, "run", "--resume", out, "--rounds", "many")
    assert "must be a whole number" in said
    said = mistake(capsys, "run", "--resume", bare, "--rounds", 4)
    assert "there is no whole checkpoint" in said
    cli.main(["run", "--resume", str(out), "--rounds", "3"])
    said = capsys.readouterr().err
    assert "is complete; there is nothing to go on with" in said
    assert "more --rounds make it longer" in said
    cli.main(["run", "--resume", str(bare)])
    assert "more --rounds" not in capsys.readouterr().err, "they would be refused"


def test_a_run_that_is_stopped_before_it_is_longer_is_told_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --rounds: its record does not know them yet. What is told can be typed."""
    out = tmp_path / "a run"
    started(*flags(**SMALL, rounds=2, out=out))
    stop = Stop()
    stop.asked = True
    with pytest.raises(SystemExit) as ended:
        run(cli.parse_run(["--resume", str(out), "--rounds", "3"]), stop)
    assert ended.value.code == STOPPED
    _, advice = capsys.readouterr().err.rstrip().rsplit("go on with: hpcfed ", 1)
    cli.main(shlex.split(advice))
    assert read_run(out).rounds_done == 3


@pytest.mark.parametrize(
    ("client", "server", "told"),
    [
        ("cosine", "step", ["--lr-schedule cosine", "--server-lr-schedule step"]),
        ("step --lr-step-size 2", "warmup --server-lr-warmup 2", []),
        ("step", "step --server-lr-step-size 1", ["--lr-schedule step"]),
    ],
)
def test_a_schedule_over_rounds_is_told_when_they_change(
    client: str,
    server: str,
    told: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Unless what is done is the beginning of the longer schedule, too."""
    out = tmp_path / "run"
    words = f"--method fedavgm --lr-schedule {client} --server-lr-schedule {server}"
    started(*words.split(), *flags(**SMALL, rounds=3, out=out))
    capsys.readouterr()
    cli.parse_run(["--resume", str(out), "--rounds", "4"])
    said = capsys.readouterr().err
    assert said.count("from here on") == len(told)
    for schedule in told:
        assert f"from here on {schedule} counts 4 rounds; the rounds that are" in said


def test_a_run_starts_from_given_weights(tmp_path: Path) -> None:
    """From a run's folder, from .npz and .safetensors alike: its first loss is that
    of the model, and the record has the file's hash.
    """
    from safetensors.torch import save_file

    first = hpcfed.run(
        model="cnn-bn",
        device="cpu",
        progress=False,
        rounds=2,
        out=tmp_path / "first",
        **SMALL,
    )
    model = first.model
    assert set(model) >= {"conv1.weight", "bn1.running_mean"}
    tensors = {name: torch.from_numpy(array) for name, array in model.items()}
    np.savez(tmp_path / "w.npz", **model)
    save_file(tensors, tmp_path / "w.safetensors")
    expected = first.rounds["global_loss"].iloc[-1]
    for source in ("first", "w.npz", "w.safetensors"):
        run = hpcfed.run(
            model="cnn-bn", device="cpu", progress=False, rounds=1, lr=1e-30,
            init=tmp_path / source, out=tmp_path / f"from-{source}", **SMALL,
        )  # fmt: skip
        # The running statistics of batch norm move even where no weight does.
        for name, array in run.model.items():
            if "running" not in name:
                np.testing.assert_allclose(array, model[name], rtol=1e-12)
        assert abs(run.rounds["global_loss"].iloc[0] - expected) < 0.2
        file = tmp_path / source
        if file.is_dir():
            file = file / "model.npz"
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        assert run.environment["files"] == {str(file): digest}


def test_a_global_model_is_the_last_snapshots(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = hpcfed.run(
        model="mlp", device="cpu", progress=False, rounds=2, snapshot_every=2, out=out, **SMALL
    )  # fmt: skip
    row = run.parameters().global_row
    flat = np.concatenate([array.ravel() for array in run.model.values()])
    np.testing.assert_array_equal(flat, row)
    network = build("mlp", shape=(1, 8, 8), classes=10, seed=0)
    shapes = {name: tuple(t.shape) for name, t in network.state_dict().items()}
    assert {name: array.shape for name, array in run.model.items()} == shapes
    assert rows(out)


@pytest.mark.parametrize("becomes", ["removed", "changed"])
@pytest.mark.parametrize("source", ["run", "safetensors", "adapter", "seeds"])
def test_a_run_goes_on_with_the_weights_that_it_began_with(
    source: str, becomes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit, whatever has become of the file: the frozen layers below adapters, the
    adapters, and what clients that join begin with.
    """
    from safetensors.torch import save_file

    first: Path = tmp_path / "first"
    begun = {**SMALL, "lora": 2} if source == "adapter" else SMALL
    started(*flags(**begun, rounds=1, seed=7, out=first))
    init = first
    if source == "safetensors":
        init = tmp_path / "w.safetensors"
        with np.load(first / "model.npz") as arrays:
            save_file({name: torch.from_numpy(arrays[name]) for name in arrays}, init)
    elif source == "adapter":
        init = first / "adapter"
    common = {**SMALL, "new_clients": 1, "new_updates": 1, "init": init}
    if source != "adapter":
        common["lora"] = 2
    if source == "seeds":
        common["seeds"] = "0..1"
    long, short = tmp_path / "long", tmp_path / "short"
    started(*flags(**common, rounds=3, out=long))
    started(*flags(**common, rounds=2, out=short))
    file = {"safetensors": init, "adapter": init / "adapter_model.safetensors"}.get(
        source, first / "model.npz"
    )
    if becomes == "removed":
        # All of it: what else is in PEFT's folder is needed, too.
        first.rename(tmp_path / "gone")
        init.unlink() if source == "safetensors" else None
    else:
        file.write_bytes(b"another network")
    capsys.readouterr()
    started("--resume", short, "--rounds", 3)
    runs = ["seed-0", "seed-1"] if source == "seeds" else ["."]
    for run_ in runs:
        one, other = recorded(short / run_), recorded(long / run_)
        assert one.keys() == other.keys()
        for name, numbers in one.items():
            np.testing.assert_array_equal(numbers, other[name], err_msg=name)
        models = (np.load(folder / run_ / "model.npz") for folder in (short, long))
        with next(models) as ours, next(models) as theirs:
            for name in theirs.files:
                np.testing.assert_array_equal(ours[name], theirs[name])
        files = read_run(short / run_).environment["files"]
        # The record still says which weights these were.
        assert files == read_run(long / run_).environment["files"] and list(files) == [
            str(file)
        ]
        assert "files_before" not in read_run(short / run_).environment
    if source == "seeds":
        # A seed by itself, too: the copy is above its folder.
        started("--resume", short / "seed-1", "--rounds", 4)
    assert [path.name for path in tmp_path.glob("**/first-weights")] == [
        "first-weights"
    ] * 2


def test_first_weights_that_were_not_copied_or_have_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large ones are not copied: then the run needs the file, unless it is complete. A
    copy of other content is refused.
    """
    first = started(*flags(**SMALL, rounds=1, out=tmp_path / "first"))
    options = flags(**SMALL, rounds=2, init=first)
    out = started(*options, "--out", tmp_path / "run")
    kept = out / "first-weights/model.npz"
    whole = kept.read_bytes()
    assert "too large" not in capsys.readouterr().err
    kept.write_bytes((first / "run.h5").read_bytes())
    told = mistake(capsys, "run", "--resume", out, "--rounds", 3)
    assert f"{kept} has changed since the run began" in told
    kept.write_bytes(whole)
    monkeypatch.setattr(initial, "MOST_KEPT", len(whole) - 1)
    started(*options, "--out", out, "--overwrite")
    assert not kept.parent.exists()
    told = f"--init {first}: too large to copy; a stopped run needs it to go on\n"
    assert told in capsys.readouterr().err
    first.rename(tmp_path / "gone")
    cli.main(["run", "--resume", str(out)])
    assert "there is nothing to go on with" in capsys.readouterr().err
    told = mistake(capsys, "run", "--resume", out, "--rounds", 3)
    assert told.endswith(f"put it back: the run in {out} began with it\n")
    (tmp_path / "gone").rename(first)
    assert read_run(started("--resume", out, "--rounds", 3)).rounds_done == 3


def test_a_run_does_not_remove_the_weights_that_it_begins_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = started(*flags(**SMALL, rounds=1, out=tmp_path / "run"))
    capsys.readouterr()
    for init in (out, out / "model.npz"):
        words = flags(**SMALL, rounds=1, init=init, out=out)
        told = mistake(capsys, "run", *words, "--overwrite")
        assert "which --overwrite empties; name another --out" in told
        assert (out / "model.npz").exists()


class _Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("evil-was-here"),))


def test_weights_that_do_not_fit_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    network = build("mlp", shape=(1, 8, 8), classes=10, seed=0)
    good = {name: tensor.numpy() for name, tensor in network.state_dict().items()}

    def refused(source: str) -> str:
        words = flags(**SMALL, rounds=1, init=source, out=tmp_path / "run")
        return mistake(capsys, "run", *words)

    assert "no such file or folder" in refused("nowhere.npz")
    (tmp_path / "empty").mkdir()
    assert "there is no model.npz" in refused("empty")
    (tmp_path / "w.txt").write_text("1")
    assert "must be a run's folder, or end in .npz" in refused("w.txt")
    (tmp_path / "w.npz").write_bytes(bytes(range(255, 0, -1)))
    said = refused("w.npz")
    assert "cannot be read" in said and "it is not an .npz file" in said
    assert "pickle" not in said and "unsafe" not in said
    np.savez("less.npz", **{n: a for n, a in good.items() if n != "fc1.bias"})
    assert "there is no fc1.bias" in refused("less.npz")
    (tmp_path / "other").mkdir()
    np.savez("other/model.npz", **{**good, "fc1.bias": np.zeros(3)})
    with h5py.File("other/run.h5", "w") as file:
        file.attrs["model"] = "cnn-bn"
    ours = refused("other")
    assert "has model cnn-bn, this run has" in ours and "add --model cnn-bn" in ours
    np.savez("more.npz", **good, fc9=np.zeros(1))
    assert "the network has no fc9" in refused("more.npz")
    np.savez("shape.npz", **{**good, "fc1.bias": np.zeros(3)})
    assert "fc1.bias has shape 3, the network's has 64" in refused("shape.npz")
    np.savez("nan.npz", **{**good, "fc1.bias": np.full(64, np.nan)})
    assert "not finite" in refused("nan.npz")
    np.savez("complex.npz", **{**good, "fc1.bias": np.full(64, 1 + 2j)})
    assert "fc1.bias has complex numbers" in refused("complex.npz")
    np.savez("large.npz", **{**good, "fc1.bias": np.full(64, 1e39)})
    assert "fc1.bias has numbers beyond ±3.4e+38" in refused("large.npz")
    torch.save({"fc1.bias": _Evil()}, "evil.pt")
    assert "such a file is a pickle" in refused("evil.pt")
    np.savez("pickle.npz", **{**good, "fc1.bias": np.array([_Evil()], object)})
    assert "fc1.bias holds Python objects" in refused("pickle.npz")
    assert not Path("evil-was-here").exists()


def test_a_network_of_single_numbers_starts_from_its_own_model(tmp_path: Path) -> None:
    """A parameter without dimensions, and a whole number, are what they were."""
    for name in ("Temperature", "Counting"):
        common = {**SMALL, "model": f"tests/own/networks.py:{name}", "lr": 1e-30}
        first = started(*flags(**common, rounds=1, seed=5, out=tmp_path / name))
        again = tmp_path / f"{name}-again"
        started(*flags(**common, rounds=1, cohort=1, init=first, out=again))
        one, two = np.load(first / "model.npz"), np.load(again / "model.npz")
        for key in one.files:
            assert one[key].shape == two[key].shape and one[key].dtype == two[key].dtype
        if name == "Counting":
            assert one["k"].dtype == np.int64 and one["k"].shape == ()
            assert two["k"] > one["k"] > 0
        else:
            assert one["scale"] == two["scale"] == 1.5


def test_a_cohort_has_a_fixed_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It draws the same clients as the share that gives as many."""
    common = {**SMALL, "clients": 10, "rounds": 3, "alpha": 100}
    started(*flags(**common, cohort=3, out=tmp_path / "size"))
    started(*flags(**common, participation=0.3, out=tmp_path / "share"))
    np.testing.assert_equal(recorded(tmp_path / "size"), recorded(tmp_path / "share"))
    np.testing.assert_array_equal(read_run(tmp_path / "size").rounds["cohort"], 3)
    capsys.readouterr()
    said = mistake(capsys, "run", "--cohort", 3, "--participation", 0.3)
    assert "--participation 0.3 and --cohort 3 exclude each other" in said
    said = mistake(capsys, "run", "--cohort", 30, "--clients", 20)
    assert "--cohort 30, but there are 20 clients" in said
