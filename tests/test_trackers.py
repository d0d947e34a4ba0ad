"""What trackers are told of a run: everything, once, and never at the run's expense."""

import json
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpcfed.cli.settings import keyword_settings
from hpcfed.experiment import tracking as module
from hpcfed.experiment.trackers import (
    Figures,
    MLflow,
    TensorBoard,
    Tracked,
    WeightsAndBiases,
    check_key,
)
from hpcfed.experiment.tracking import Tracking, thinned
from hpcfed.options import named
from hpcfed.results.folder import TRACKED, check_out, empty, strangers
from hpcfed.results.results import ResultsWriter
from tests.runs import mistake
from tests.test_watch import begun, take_down


class Notebook:
    """A tracker that remembers what it was told."""

    def __init__(self, run: Tracked, known: str) -> None:
        self.id = known or "first"
        self.told: list[Figures] = []
        self.learnt: list[Figures] = []
        self.ended = ""

    def rounds(self, figures: Sequence[Figures]) -> None:
        self.told += figures

    def losses(self, figures: Sequence[Figures]) -> None:
        self.learnt += figures

    def close(self, status: str) -> None:
        self.ended = status


class Broken(Notebook):
    """A tracker whose network has gone."""

    def rounds(self, figures: Sequence[Figures]) -> None:
        if figures:
            raise ConnectionError("no route")


def run_in(folder: Path, **options: Any) -> Tracked:
    return Tracked(folder, {"lr": 0.1, "seeds": None, **options}, "hpcfed run", None)


def followed(
    results: ResultsWriter, folder: Path, said: list[str], **openers: Any
) -> Tracking:
    return Tracking(results, run_in(folder), openers or {"book": Notebook}, said.append)


def book(tracking: Tracking) -> Any:
    return tracking._trackers["book"]


def test_every_round_is_told_once_also_after_a_resume(tmp_path: Path) -> None:
    """A run is killed after five rounds, of which the tracker knows four, and goes on
    after the third: the tracker gets the fifth and those that follow.
    """
    said: list[str] = []
    results = begun(tmp_path)
    tracking = followed(results, tmp_path, said)
    for round in range(5):
        take_down(results, round)
        tracking._spent = 0.0 if round < 4 else 1e9
        tracking.after_round()
    first = book(tracking)
    assert [step for step, _ in first.told] == [1, 2, 3, 4]
    assert first.told[1].values == pytest.approx(
        {
            "rounds/accuracy": 0.51,
            "rounds/train_loss": 0.5,
            "rounds/seconds": 2.0,
            "rounds/cohort": 4,
            "rounds/bytes_up": 512,
            "rounds/bytes_down": 512,
            "phases/train": 1.0,
            "phases/evaluate": 1.0,
            "ranks/peak_memory": 2**20,
            "ranks/wire": 0,
        }
    )
    assert "rounds/accuracy" not in first.told[0].values, "it was not evaluated"
    results.finish("failed")
    again = begun(tmp_path / "again")
    again.restore(tmp_path / "run.h5", 3)
    tracking = followed(again, tmp_path, said)
    for round in range(3, 8):
        take_down(again, round)
        tracking.after_round()
    again.finish("complete")
    tracking.close("complete")
    second = book(tracking)
    assert second.id == "first" and second.ended == "complete"
    assert [step for step, _ in second.told] == [5, 6, 7, 8]
    assert not said


def test_a_tracker_that_is_new_to_a_run_gets_the_rounds_before(tmp_path: Path) -> None:
    results = begun(tmp_path, rounds=200)
    for round in range(120):
        take_down(results, round)
    tracking = followed(results, tmp_path, [])
    tracking.after_round()
    # Not all at once: a round would wait for it.
    assert len(book(tracking).told) == module.MOST_ROUNDS < 120
    tracking.close("stopped")
    assert [step for step, _ in book(tracking).told] == list(range(1, 121))


def test_trackers_take_no_more_than_their_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of 1 s with a tracker that takes 0.1 s for each: one in twenty is allowed,
    and at the end all are there.
    """
    now = [0.0]
    clock = SimpleNamespace(**vars(time) | {"monotonic": lambda: now[0]})
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "MOST_ROUNDS", 1)

    class Slow(Notebook):
        def rounds(self, figures: Sequence[Figures]) -> None:
            super().rounds(figures)
            now[0] += 0.1 * len(figures)

    results = begun(tmp_path, rounds=200)
    tracking = followed(results, tmp_path, [], book=Slow)
    for round in range(100):
        now[0] += 1.0
        results._rounds_done = round + 1
        tracking.after_round()
    spent = now[0] - 100
    assert 0.4 <= spent <= module.SHARE * now[0] + 0.1 + 1e-9
    tracking.close("complete")
    assert len(book(tracking).told) == 100


def test_a_tracker_that_fails_is_off_and_the_run_goes_on(tmp_path: Path) -> None:
    said: list[str] = []

    def absent(run: Tracked, known: str) -> Notebook:
        raise PermissionError("not yours")

    results = begun(tmp_path)
    tracking = followed(
        results, tmp_path, said, bad=Broken, book=Notebook, absent=absent
    )
    for round in range(3):
        take_down(results, round)
        tracking.after_round()
    tracking.close("complete")
    assert len(book(tracking).told) == 3 and book(tracking).ended == "complete"
    assert said == [
        "--absent is off from here on: PermissionError: not yours",
        "--bad is off from here on: ConnectionError: no route",
    ]


def test_what_is_no_mark_is_none(tmp_path: Path) -> None:
    results = begun(tmp_path)
    take_down(results, 0)
    for content in ("", "[" * 10_000, '{"book": {"rounds": "x"}}', '{"book": 3}'):
        (tmp_path / TRACKED).write_text(content)
        tracking = followed(results, tmp_path, [])
        tracking.after_round()
        assert len(book(tracking).told) == 1, content


def test_losses_are_means_over_windows_and_steps_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_LOSSES", 2)
    points = thinned({"denoiser": np.array([1.0, 3.0, 8.0, np.nan])}, 1)
    assert points == [Figures(6, {"server_losses/denoiser": 2.0})], (
        "a window with NaN has no mean"
    )
    points = thinned({"a": np.array([5.0]), "b": np.array([6.0, 8.0, 9.0])}, 0)
    assert points == [
        Figures(1, {"server_losses/a": 5.0}),
        Figures(2, {"server_losses/b": 7.0}),
        Figures(3, {"server_losses/b": 9.0}),
    ]


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="no tensorboard")
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    results = begun(tmp_path)
    for part in (range(3), range(3, 6)):
        # The second part is a resumed run, which writes a second file.
        tracking = followed(results, tmp_path, [], tensorboard=TensorBoard)
        for round in part:
            take_down(results, round)
            tracking.after_round()
        tracking.close("complete")
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    losses = {event.step: event.value for event in read.Scalars("rounds/train_loss")}
    assert losses == pytest.approx({n: 1 / n for n in range(1, 7)})
    assert [event.step for event in read.Scalars("rounds/accuracy")] == [2, 4, 6]
    text = read.Tensors("options/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| lr | 0.1 |" in text
    # --overwrite begins anew, and a study takes it for the run's own.
    results.finish("complete")
    assert not strangers(tmp_path)
    (tmp_path / "tensorboard/notes").touch()
    check_out(tmp_path, overwrite=True)
    empty(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["tensorboard", "notes"]


class FakeRun:
    """What `wandb.init` returns."""

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.id = given["id"] or "new"
        self.logged: list[dict[str, float]] = []
        self.axes: dict[str, str] = {}
        self.summary: dict[str, str] = {}

    def define_metric(self, name: str, step_metric: str = "", **more: Any) -> None:
        self.axes[name] = step_metric

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def finish(self, exit_code: int) -> None:
        self.summary["code"] = str(exit_code)


def test_weights_and_biases_has_two_axes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[FakeRun] = []

    def init(**given: Any) -> FakeRun:
        made.append(FakeRun(**given))
        return made[-1]

    fake = ModuleType("wandb")
    fake.__dict__.update(init=init, Settings=dict, api=SimpleNamespace(api_key=None))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = Tracked(tmp_path / "five/seed-3", {"lr": 0.1}, "hpcfed run", 3)
    tracker = WeightsAndBiases("project", run, "")
    tracker.rounds([Figures(1, {"rounds/accuracy": 0.5})])
    tracker.losses([Figures(7, {"server_losses/denoiser": 2.0})])
    tracker.close("stopped")
    (seen,) = made
    assert (seen.given["project"], seen.given["name"]) == ("project", "five/seed-3")
    assert seen.given["group"] == "five" and seen.given["resume"] is None
    assert seen.axes["rounds/*"] == "round"
    assert seen.axes["server_losses/*"] == "server_step"
    assert seen.logged == [
        {"round": 1, "rounds/accuracy": 0.5},
        {"server_step": 7, "server_losses/denoiser": 2.0},
    ]
    assert seen.summary == {"status": "stopped", "code": "1"}
    WeightsAndBiases("project", run, "known")
    assert (made[1].given["id"], made[1].given["resume"]) == ("known", "allow")
    # Nobody is there to answer when it asks for a key.
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr("hpcfed.options.recording.find_spec", lambda name: True)
    words = ("run", "--model", "mlp", "--out", tmp_path / "run", "--wandb", "project")
    assert "there is no API key" in mistake(capsys, *words)
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_key()


@pytest.mark.skipif(find_spec("mlflow") is None, reason="no mlflow")
def test_mlflow_has_every_round_of_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    long = run_in(tmp_path, note="x" * 10_000, **{f"o{n}": n for n in range(150)})
    tracker = MLflow("experiment", long, "")
    tracker.rounds([Figures(n, {"rounds/accuracy": n / 10}) for n in (1, 2)])
    again = MLflow("experiment", long, tracker.id)
    again.rounds([Figures(3, {"rounds/accuracy": 0.3})])
    again.close("failed")
    client = MlflowClient()
    history = client.get_metric_history(tracker.id, "rounds/accuracy")
    assert [(one.step, one.value) for one in history] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    found = client.get_run(tracker.id)
    assert found.info.status == "FAILED" and len(found.data.params) == 153


def test_trackers_need_their_packages_and_change_no_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcfed.options.recording.find_spec", lambda name: None)
    out = tmp_path / "run"
    for words in ("--tensorboard", "--wandb project", "--mlflow experiment"):
        package = words.split()[0].removeprefix("--")
        said = mistake(capsys, "run", "--out", out, *words.split())
        assert f"pip install {package}" in said and not out.exists()
    assert {"tensorboard", "wandb", "mlflow"} <= set(named(changes="nothing"))


def test_a_folder_sends_nothing_by_itself(tmp_path: Path) -> None:
    """--resume takes up TensorBoard alone of a record's trackers: it stays in the
    folder.
    """
    results = begun(tmp_path)
    stored = json.loads(results._file["config"].asstr()[()])
    stored |= {"tensorboard": True, "wandb": "theirs", "mlflow": "theirs"}
    del results._file["config"]
    results._file["config"] = json.dumps(stored)
    results.finish("stopped")
    config = keyword_settings({"resume": str(tmp_path)}).config
    assert (config.tensorboard, config.wandb, config.mlflow) == (True, None, None)
    config = keyword_settings({"resume": str(tmp_path), "wandb": "mine"}).config
    assert (config.wandb, config.mlflow) == ("mine", None)
