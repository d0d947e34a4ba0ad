"""Every method's curves of 20 rounds are the stored ones: bit by bit on the kind of
machine that made them, elsewhere within their bounds; and wrong numbers are noticed.
"""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.harness import curves
from benchmarks.harness.curves import Precision, Reference
from benchmarks.harness.trajectories import (
    ROUNDS,
    TERMS,
    UNITS,
    Trajectory,
    follow,
    words_of,
)
from hpcfed import methods
from hpcfed.experiment.assemble import Setup

STORED = curves.read(curves.FILE)
FLOAT32 = ("fedadam", "fedavg", "genfed", "scaffold")
"""Methods whose float32 is checked here: a mean, a server's optimiser, a choice of
uploads, and control variates. The command checks those of all.
"""
OWN_RATE = ("pfedhn",)
"""Methods that have a learning rate of their own in place of --lr."""
NO_MEAN = ("fedasync", "local")
"""Methods that take no mean: uploads are mixed in one by one, or there are none."""
FLOAT32_SERVER = ("pfedgpa",)
"""Methods whose server computes in float32, whatever clients do: their bounds are those
of float32.
"""
OTHER_WEIGHTS = {"samples": "uniform", "uniform": "samples"}


def reference(method: str) -> Reference:
    assert method in STORED.methods, (
        f"{method} has no curve; type: {curves.COMMAND} --methods {method} --write"
    )
    return STORED.methods[method]


def ratio(found: Trajectory, method: str) -> float:
    """Return the distance from the stored float64 curve in units of its bound."""
    differing = curves.compare(found, reference(method), "fp64")
    return max((one.ratio for one in differing), default=0.0)


def least(method: str) -> float:
    """Return the bounds by which a wrong curve must be off."""
    return 5 if method in FLOAT32_SERVER else 100


def assert_right(method: str, precision: Precision) -> None:
    assert reference(method).options == words_of(method)
    found = follow(method, precision)
    here = curves.name_of(curves.machine("cpu"))
    assert curves.is_right(found, reference(method), precision, here), (
        curves.compare(found, reference(method), precision)
        or "rows after the last round have other bits"
    )


def test_every_method_has_a_curve_and_no_other() -> None:
    for method in methods.names():
        reference(method)
    assert STORED.methods.keys() == set(methods.names())
    assert STORED.machines.keys() == {one.machine for one in STORED.methods.values()}
    for name, machine in STORED.machines.items():
        assert curves.name_of(machine) == name


@pytest.mark.parametrize("method", methods.names())
def test_float64_is_as_stored(method: str) -> None:
    assert_right(method, "fp64")


@pytest.mark.parametrize("method", FLOAT32)
def test_float32_is_as_stored(method: str) -> None:
    assert_right(method, "fp32")


@pytest.mark.gpu
@pytest.mark.parametrize("method", methods.names())
def test_a_gpu_is_within_the_bound_of_float64(method: str) -> None:
    if method in FLOAT32_SERVER:
        pytest.skip("noise of clients' rows does not bound a server's own rounding")
    assert ratio(follow(method, "fp64", device="cuda"), method) <= 1


@pytest.mark.parametrize("method", methods.names())
def test_stored_float32_is_within_its_bound_of_float64(method: str) -> None:
    stored = reference(method)
    found = Trajectory(stored.fp32.figures, stored.fp32.bits)
    assert all(len(values) == ROUNDS for values in found.figures.values())
    assert all(one.ratio <= 1 for one in curves.compare(found, stored, "fp32"))


@pytest.mark.parametrize("method", methods.names())
def test_no_choice_is_near_a_tie(method: str) -> None:
    """Noise that is 2^29 times as large moves losses as many times as far, up to what is
    random in both: neither flips a choice, which would move a loss by thousandths. No
    answer flips by the noise of float64.
    """
    small, large = (reference(method).curve(each).bounds for each in curves.PRECISIONS)
    assert small["accuracy"] == pytest.approx(TERMS * UNITS["fp64"], rel=0.01)
    for loss in ("train_loss", "loss"):
        if method not in FLOAT32_SERVER:
            assert small[loss] < 1e-11
            assert large[loss] / small[loss] < 2 * UNITS["fp32"] / UNITS["fp64"]
        assert large[loss] < 5e-3


@pytest.mark.parametrize("method", sorted({*methods.names()} - {*OWN_RATE}))
def test_another_learning_rate_is_noticed(method: str) -> None:
    """By one per cent, in the first round."""
    found = follow(method, "fp64", rounds=1, more="--lr 0.101")
    assert ratio(found, method) > least(method)


@pytest.mark.parametrize("method", sorted({*methods.names()} - {*NO_MEAN}))
def test_other_weights_of_clients_are_noticed(method: str) -> None:
    """Equal ones in place of the numbers of samples, or the other way round. Clients
    that keep a row of their own feel it in the second round.
    """
    weights = OTHER_WEIGHTS[methods.load(method).Options.weighs]
    found = follow(method, "fp64", rounds=2, more=f"--weights {weights}")
    assert ratio(found, method) > least(method)


@pytest.mark.parametrize("method", [*OWN_RATE, *NO_MEAN])
def test_what_a_method_does_not_have_changes_nothing(method: str) -> None:
    more = "--lr 0.101" if method in OWN_RATE else "--weights uniform"
    plain, other = (follow(method, "fp64", rounds=1, more=m) for m in ("", more))
    assert plain.bits == other.bits


def nudge(setup: Setup) -> None:
    """Replace one number of the first row by the next larger one."""
    fed = setup.federation
    first = fed.initial_row()
    row = first.clone()
    row[3] = torch.nextafter(row[3], torch.tensor(torch.inf, dtype=row.dtype))
    setattr(fed, "initial_row", row.clone)  # noqa: B010


@pytest.mark.parametrize("method", ["fedadam", "genfed"])
def test_a_unit_in_the_last_place_is_told_here_and_allowed_elsewhere(
    method: str,
) -> None:
    stored = reference(method)
    plain, nudged = (follow(method, "fp64", rounds=6, change=c) for c in (None, nudge))
    assert nudged.bits != plain.bits
    # As on the machine that has made this curve, and on any other.
    curve = stored.fp64.model_copy(update={"bits": plain.bits})
    here = stored.model_copy(update={"fp64": curve})
    assert curves.is_right(plain, here, "fp64", stored.machine)
    assert not curves.is_right(nudged, here, "fp64", stored.machine)
    assert curves.is_right(nudged, here, "fp64", "another")


def test_the_command_prints_what_differs_and_writes_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "curves.json"
    monkeypatch.setattr(curves, "FILE", file)
    monkeypatch.setattr(curves, "DRAWS", 1)
    words = ["--methods", "local"]
    assert curves.main(words) == 1
    assert "local has no curve" in capsys.readouterr().out and not file.exists()
    assert curves.main([*words, "--write"]) == 0
    right = json.loads(file.read_text())
    wrong = json.loads(file.read_text())
    wrong["methods"]["local"]["fp64"]["figures"]["loss"][6] += 0.5
    wrong["methods"]["local"]["fp64"]["bits"] = "others"
    file.write_text(json.dumps(wrong))
    capsys.readouterr()
    assert curves.main(words) == 1
    told = capsys.readouterr().out
    assert "local fp64 loss, round 7: " in told and "--write" in told
    assert json.loads(file.read_text()) == wrong
    assert curves.main([*words, "--write"]) == 0
    renewed = json.loads(file.read_text())
    assert renewed == right and file.read_text().count("\n") < 60
    file.write_text("{}")
    capsys.readouterr()
    assert curves.main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_number_that_is_none_is_outside_of_every_bound() -> None:
    stored = reference("fedavg")
    figures = stored.fp64.figures | {"loss": [float("nan")] * ROUNDS}
    found = Trajectory(figures, "")
    assert not curves.is_right(found, stored, "fp64", "another")
