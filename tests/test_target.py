"""When a target is reached, and from which round on it is held: curves worked by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from hpcfed.analysis.groups import Group, Process, groups
from hpcfed.analysis.outcomes import mean_to_target
from hpcfed.analysis.render.run_page import verdict as page_verdict
from hpcfed.analysis.render.sections.tradeoffs import target as target_section
from hpcfed.analysis.render.show import show, show_seeds
from hpcfed.analysis.swept import swept
from hpcfed.analysis.target_verdicts import target_answers
from hpcfed.analysis.verdicts import verdicts
from hpcfed.results.as_json import run_summary
from hpcfed.results.run import RunRecord
from hpcfed.results.target import first_round, stays_from
from tests.points import run_of

NAN = float("nan")
KEPT = [0.5, 0.8, 0.9, 0.85]
SWINGS = [0.5, 0.8, 0.7, 0.9]
LOST = [0.5, 0.8, 0.9, 0.79]


def run(curve: list[float], **figures: Any) -> RunRecord:
    """Return a run with this curve of the global model and a target of 80 %; a round
    takes 2 s and sends 100 bytes both ways.
    """
    series = {"global_accuracy": curve, "accuracy": [0.1] * len(curve)}
    return run_of(
        seconds=[2.0] * len(curve), series=series, target_accuracy=80, **figures
    )


def point(*runs: RunRecord) -> Group:
    return groups([Process(runs, 0, "one")])[0]


def shown(*runs: RunRecord) -> list[str]:
    """Return the words of the row that tells of the target, or of the mean."""
    console = Console(width=200)
    with console.capture() as caught:
        if len(runs) == 1:
            show(runs[0], console)
        else:
            show_seeds(runs, runs[0].folder, console)
    lines = caught.get().splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith("target of 80"))
    assert lines[head].endswith("stays from round")
    return [" ".join(line.split()) for line in lines[head + 1 : head + 2 + len(runs)]]


@pytest.mark.parametrize(
    ("curve", "first", "stays"),
    [
        pytest.param([0.5, 0.6, 0.79], None, None, id="never reached"),
        pytest.param(LOST, 2, None, id="reached and lost"),
        pytest.param(KEPT, 2, 2, id="reached and kept"),
        pytest.param(SWINGS, 2, 4, id="lost on the way"),
        pytest.param([0.5, 0.6, 0.8], 3, 3, id="reached by the last evaluation alone"),
        pytest.param([0.8, 0.9], 1, 1, id="from the beginning"),
        # Evaluated in rounds 2, 4, 6 and 8.
        pytest.param([NAN, 0.9, NAN, 0.7, NAN, 0.8, NAN, 0.9], 2, 6, id="every second"),
        pytest.param([NAN, 0.5, NAN, 0.9, NAN], 4, 4, id="not evaluated at the end"),
        pytest.param([NAN, NAN], None, None, id="never evaluated"),
        pytest.param([], None, None, id="no round"),
    ],
)
def test_rounds_of_curves(
    curve: list[float], first: int | None, stays: int | None
) -> None:
    found = np.array(curve, float)
    assert (first_round(found, 80), stays_from(found, 80)) == (first, stays)


def test_what_holding_the_target_has_cost() -> None:
    record = run(SWINGS)
    first, stays = record.reached(), record.stays()
    assert first is not None and stays is not None
    assert (first.rounds, first.seconds, first.bytes) == (2, 4.0, 400.0)
    assert (stays.rounds, stays.seconds, stays.bytes) == (4, 8.0, 800.0)
    told = run_summary(record)
    assert told["stays_at_target"]["rounds"] == 4 and not told["ended_at_target"]
    assert run_summary(run(LOST))["stays_at_target"] is None


def test_a_run_that_ended_at_its_target_does_not_know() -> None:
    ended = run([0.5, 0.8], stop_at_target=True)
    assert ended.reached() is not None and ended.stays() is None
    assert run_summary(ended)["ended_at_target"]
    assert shown(ended)[0].endswith("unknown: it ended there")
    assert "reached after 2 rounds, which ended the run." in told(ended)
    # One that was made longer went on, and knows.
    longer = run(SWINGS, stop_at_target=True).stays()
    assert longer is not None and longer.rounds == 4
    assert not run([0.5, 0.7], stop_at_target=True).ended_at_target
    assert not run([0.5, 0.8]).ended_at_target


def told(*runs: RunRecord) -> str:
    return " ".join(page_verdict(point(*runs)))


def test_one_run_shows_both() -> None:
    assert shown(run(SWINGS))[0] == "reached after 2 4.00 400 B 4"
    assert shown(run(LOST))[0].endswith("lost again")
    assert "reached after 2 rounds, and held from round 4 on." in told(run(SWINGS))
    assert "reached after 2 rounds, and lost again." in told(run(LOST))
    goes_on = replace(run(SWINGS), status="active")
    assert "and held from round 4 on, so far." in told(goes_on)


def test_seeds_show_both() -> None:
    """A mean of the seeds that stay alone would flatter the others."""
    *_, mean = shown(run(KEPT, seed=0), run(SWINGS, seed=1))
    assert mean.endswith("3.0 ± 1.0")
    *_, mean = shown(run(KEPT, seed=0), run(LOST, seed=1))
    assert "2.0 ± 0.0" in mean and mean.endswith("400 B")
    both = run(KEPT, seed=0), run(LOST, seed=1)
    assert "reached by 2 of 2 seeds, and held to the end by 1." in told(*both)


def test_a_study_shows_both() -> None:
    every = [point(run(KEPT, seed=0), run(SWINGS, seed=1))]
    every += [point(run([0.5, 0.8], stop_at_target=True, method="fedprox"))]
    table = target_section(every).tables[0]
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.texts]
    assert rows[0]["seeds that stay"] == "2 of 2"
    assert rows[0]["stay from round"].startswith("3")
    assert rows[1]["seeds that stay"] == "unknown: ended there"


def test_seconds_to_the_target_are_means_over_repeats() -> None:
    """The second round of the first repeat ends after 4 s, that of the second after 8;
    one that was resumed beside others does not know.
    """
    first, slower = run(KEPT), run(KEPT)
    slower.rounds["seconds"][:] = 4.0
    resumed = slower.facts | {"resumed": [2]}
    apart = replace(slower, stacks=np.array([2, 2, 1, 1]), facts=resumed)
    for second, told in ((slower, "6"), (apart, "–")):
        (group,) = groups([Process((one,), 0, "one") for one in (first, second)])
        section = target_section([group])
        (row,) = section.tables[0].texts
        cells = dict(zip(section.tables[0].columns, row, strict=True))
        assert (cells["seconds"], cells["rounds"]) == (told, "2")
        assert cells["seeds that reached it"] == "1 of 1"
        expected = 6.0 if second is slower else NAN
        assert mean_to_target(group, "seconds") == pytest.approx(expected, nan_ok=True)


def test_a_study_tells_who_holds_the_target_first() -> None:
    """The first to reach it need not be the first to hold it."""
    swings = run([0.8, 0.7, 0.7, 0.8], method="fedavg")
    keeps = run([0.5, 0.8, 0.8, 0.8], method="fedprox")
    every = groups([Process((one,), 0, "") for one in (swings, keeps)])
    told = " ".join(sentence for one in verdicts(every) for sentence in one.answers)
    assert "fedavg is first, after 2 s" in told
    assert "fedprox holds it first, from round 2 on" in told


def test_who_is_first_in_seconds_is_doubted_if_repeats_are() -> None:
    """Two repeats each: 4 s or so against 8, and against 4 to 40."""

    def told(of_first: list[float], of_other: list[float]) -> str:
        processes = []
        for method, seconds in (("fedavg", of_first), ("fedprox", of_other)):
            for each in seconds:
                one = run(KEPT, method=method)
                one.rounds["seconds"][:] = each
                processes.append(Process((one,), 0, ""))
        every = groups(processes)
        (line,) = target_answers(every, swept(every))
        return line

    assert "fedavg is first, after 4 s; " in told([2.0, 2.001], [4.0, 4.001])
    spread = told([2.0, 2.001], [2.0, 20.0])
    assert "4 s (by the mean; repeats do not tell it from others); " in spread
    assert "4 s (too few repeats to tell times from noise); " in told([2.0], [4.0])


def told_of(*runs: RunRecord) -> list[str]:
    every = groups([Process((one,), 0, "") for one in runs])
    answers = [sentence for one in verdicts(every) for sentence in one.answers]
    return [sentence for sentence in answers if "target" in sentence]


def of_clients(curve: list[float], **figures: Any) -> RunRecord:
    """Return a run without a global model: the target is for its clients."""
    made = run(curve, **figures)
    unknown = np.full(len(curve), NAN)
    made.rounds.update(accuracy=np.array(curve), global_accuracy=unknown)
    return made


def test_points_compete_for_a_target_of_the_same_accuracy() -> None:
    """The clients' own models are first at 80 %, but of their own test data."""
    every = [
        run([0.5, 0.5, 0.8], method="fedavg"),
        run([0.5, 0.8, 0.8], method="fedprox"),
        of_clients([0.8, 0.8, 0.8], method="fedper"),
        of_clients([0.5, 0.5, 0.8], method="ditto"),
    ]
    theirs, ours = sorted(told_of(*every))
    assert (
        "target 80 % (global model, all test data): fedprox is first, after 4" in ours
    )
    assert "target 80 % (clients, own test data): fedper is first, after 2 s" in theirs
    assert told_of(every[0], every[2]) == [], "nobody to compete with"
    columns = target_section([point(one) for one in every]).tables[0].columns
    assert "accuracy of" in columns


def test_all_that_tie_are_named() -> None:
    names = ("fedavg", "fedprox", "scaffold")
    (told,) = told_of(
        *(run(KEPT, method=name) for name in names[:2]), run(LOST, method=names[2])
    )
    assert told.endswith(
        ": fedavg and fedprox and scaffold are first, after 4 s, and send the fewest "
        "bytes, 0.000381 MiB; fedavg and fedprox hold it first, from round 2 on."
    )
