"""What a study's page says in words: worked out by hand on points made for it."""

import csv
import json
from dataclasses import replace
from itertools import product
from math import isnan
from pathlib import Path

import numpy as np
import pytest

from hpcfed.analysis.collect import Found
from hpcfed.analysis.contests import contests, frontiers
from hpcfed.analysis.groups import Process, groups, noisy
from hpcfed.analysis.labels import times_text
from hpcfed.analysis.outcomes import measure
from hpcfed.analysis.render.exports import csv_text, points_csv_text
from hpcfed.analysis.render.run_page import verdict
from hpcfed.analysis.render.run_page.learning import clients as clients_section
from hpcfed.analysis.render.sections import sections
from hpcfed.analysis.render.sections.server import SERVER_COLUMNS, server
from hpcfed.analysis.run_findings.costs import of_costs
from hpcfed.analysis.scaling import growths, limits
from hpcfed.analysis.server_costs import server_costs
from hpcfed.analysis.statistics import Estimate
from hpcfed.analysis.swept import (
    Swept,
    effects,
    families,
    held,
    reference,
    score_effect,
    swept,
    time_effect,
)
from hpcfed.analysis.verdicts import verdicts
from hpcfed.results.learnings import LearningRecord
from hpcfed.results.stored import most_memory
from hpcfed.runtime.timer import PHASES
from hpcfed.words import times_as
from tests.points import process_of, run_of


def answers(processes: list[Process]) -> dict[str, str]:
    return {one.question: " ".join(one.answers) for one in verdicts(groups(processes))}


def grid(**figures: float) -> list[Process]:
    """Two methods at two learning rates, each with two seeds: fedper is 0.1 better at
    either, and lr 0.1 is 0.2 better than 0.01 with each.
    """
    made = []
    for method, more in (("fedavg", 0.0), ("fedper", 0.1)):
        for lr, gain in ((0.01, 0.0), (0.1, 0.2)):
            for seed in (0, 1):
                accuracy = 0.5 + more + gain + 0.01 * seed
                made.append(
                    process_of(
                        method=method, lr=lr, seed=seed, accuracy=accuracy, **figures
                    )
                )
    return made


def test_swept_options_and_the_points_that_differ_in_one() -> None:
    every = groups(grid())
    options = swept(every)
    assert [(one.name, one.values) for one in options] == [
        ("method", ("fedavg", "fedper")),
        ("lr", (0.01, 0.1)),
    ], "what follows from the method is not swept"
    alike = families(every, "lr", options)
    assert [choice["method"] for choice in alike] == ["fedavg", "fedper"]
    judged = measure(every)
    assert judged is not None
    effect = score_effect(alike, options[1], judged)
    assert effect is not None and (effect.best, effect.worst, effect.pairs) == (
        0.1,
        0.01,
        2,
    )
    assert effect.change.centre == pytest.approx(20)


@pytest.mark.parametrize(
    ("values", "geometric"),
    [
        ((1, 2, 4), True),
        ((0.001, 0.003, 0.01), True),
        ((10, 20, 30, 40), False),
        ((0, 1, 10), False),
        ((1, 10), False),
        (("a", "b", "c"), False),
    ],
)
def test_values_that_grow_by_a_factor_have_a_logarithmic_axis(
    values: tuple[object, ...], geometric: bool
) -> None:
    assert Swept("lr", values).geometric is geometric


def test_a_method_wins_only_where_the_interval_says_so() -> None:
    # Both seeds differ by 0.1: paired, there is no doubt.
    told = answers(grid())["Which method wins where?"]
    assert told.count("fedper wins") == 2
    assert "lr 0.1: fedper wins with 80.5 %" in told
    assert "10.0 points [10.0, 10.0] ahead of fedavg" in told
    # Seeds that disagree: leads of 0.3 and -0.1, an interval that holds 0.
    doubtful = [
        process_of(method="fedavg", seed=0, accuracy=0.4),
        process_of(method="fedavg", seed=1, accuracy=0.6),
        process_of(method="fedper", seed=0, accuracy=0.7),
        process_of(method="fedper", seed=1, accuracy=0.5),
    ]
    told = answers(doubtful)["Which method wins where?"]
    assert "fedavg is not told apart from it by 2 seeds" in told
    assert "wins" not in told
    alone = [one for one in doubtful if one.runs[0].facts["seed"] == 0]
    told = answers(alone)["Which method wins where?"]
    assert "fedper is ahead with 70.0 %, 30.0 points before fedavg; one seed" in told


def test_a_winner_beats_everybody_not_the_second_alone() -> None:
    processes = []
    values = {"fedavg": (0.80, 0.80), "fedper": (0.79, 0.79), "fedrep": (0.5, 0.9)}
    for method, by_seed in values.items():
        for seed, accuracy in enumerate(by_seed):
            processes.append(process_of(method=method, seed=seed, accuracy=accuracy))
    every = groups(processes)
    (contest,) = contests(every, swept(every))
    assert [group.options["method"] for group in contest.ranking] == list(values)
    assert contest.leads[0].low > 0, "the second is told apart"
    assert [group.options["method"] for group in contest.rivals] == ["fedrep"]


def test_the_frontier_has_what_nobody_beats() -> None:
    points = {0.01: (0.5, 1.0), 0.02: (0.4, 2.0), 0.03: (0.7, 3.0), 0.04: (0.7, 4.0)}
    processes = [
        process_of(lr=lr, accuracy=accuracy, seconds=seconds, energy=seconds)
        for lr, (accuracy, seconds) in points.items()
    ]
    every = groups(processes)
    found = {one.cost.unit: one for one in frontiers(every, swept(every))}
    for unit in ("s", "J"):
        best = [point.group.options["lr"] for point in found[unit].best]
        assert best == [0.01, 0.03], "0.02 is dearer and worse, 0.04 no better"
    # All send the same: two have the best score, and nothing tells them apart.
    best = [point.group.options["lr"] for point in found["MiB"].best]
    assert sorted(best) == [0.03, 0.04]
    # The same choice on other ranks is not another one.
    more = process_of(lr=0.03, accuracy=0.7, seconds=3.0, ranks=2)
    every = groups([*processes, more])
    of_bytes = [one for one in frontiers(every, swept(every)) if one.cost.unit == "MiB"]
    assert [len(one.best) for one in of_bytes] == [2]
    other_data = [*processes, process_of(alpha=9.0, accuracy=0.9, seconds=0.5)]
    every = groups(other_data)
    assert len(frontiers(every, swept(every))) == 3, "another problem does not compete"


def test_cohort_and_steps_of_a_point_are_means_over_its_seeds() -> None:
    # The second seed's clients were less often there, and had more samples.
    seeds = [
        process_of(seed=0, series={"cohort": [4, 8], "longest_steps": [2, 2]}, seconds=[1, 1]),
        process_of(seed=1, series={"cohort": [2, 4], "longest_steps": [5, 7]}, seconds=[1, 1]),
    ]  # fmt: skip
    (group,) = groups(seeds)
    assert (group.cohort, group.steps) == (4.5, 4.0)
    unknown = {"cohort": [np.nan] * 2, "longest_steps": [np.nan] * 2}
    older = process_of(seed=2, series=unknown, seconds=[1, 1])
    (group,) = groups([*seeds, older])
    assert (group.cohort, group.steps) == (4.5, 4.0)
    (group,) = groups([older])
    assert group.cohort == group.clients and isnan(group.steps)


def test_memory_of_a_server_is_the_most_of_all_learnings_and_seeds() -> None:
    def learning(*mebibytes: float) -> LearningRecord:
        peaks = np.array(mebibytes) * 2.0**20
        parts: dict[str, float] = {"denoiser": 1.0}
        return LearningRecord(3, 4, parts, parts, {"denoiser": 7}, parts, parts, peaks)

    first = replace(run_of(seed=0), learnings=(learning(3, 9), learning(5, 2)))
    second = replace(run_of(seed=1), learnings=(learning(8, 1), learning(4, 4)))
    assert most_memory([first, second]).tolist() == [8 * 2.0**20, 9 * 2.0**20]
    rows = {str(name): str(cell) for name, cell in of_costs([first, second]).rows}
    assert rows["peak memory of a server rank"] == "9.00 MiB"
    rows = {str(name): str(cell) for name, cell in of_costs([second, first]).rows}
    assert rows["peak memory of a server rank"] == "9.00 MiB"
    every = groups([Process((first, second), 0, "both")])
    (cost,) = server_costs(every)
    assert cost.memory == (8 * 2.0**20, 9 * 2.0**20)
    *_, table = server(every, swept(every)).tables
    (row,) = table.rows
    cells = dict(zip(SERVER_COLUMNS, map(str, row), strict=True))
    assert cells["peak memory, MiB"] == "9"


def test_ranks_are_limited_by_the_phase_that_shrinks_least() -> None:
    # 0.75 s of training become 0.3 s, aggregation stays at 0.25 and 0.3 s.
    processes = [
        process_of(ranks=1, seconds=1.0, train=0.75),
        process_of(ranks=4, seconds=0.6, train=0.5),
    ]
    (limit,) = limits(groups(processes))
    assert (limit.phase, limit.share) == ("train", pytest.approx(0.5))
    assert limit.loss is not None and limit.loss.phase == "aggregate"
    assert (limit.loss.before, limit.loss.after) == (
        pytest.approx(0.25),
        pytest.approx(0.3),
    )
    told = answers(processes)
    assert "4 ranks are 1.67 times" in told["How does it scale over ranks?"]
    assert "250 ms there and 300 ms here" in told["What limits it?"]


def test_time_by_clients_has_its_power() -> None:
    processes = [
        process_of(clients=clients, seconds=0.01 * clients**0.5)
        for clients in (4, 16, 64)
    ]
    (growth,) = growths(groups(processes))
    assert growth.power.centre == pytest.approx(0.5)
    assert growth.power.low == pytest.approx(0.5)
    assert growth.per_client == pytest.approx([0.02 / 4, 0.04 / 16, 0.08 / 64])
    assert "4 times" in answers(processes)["How does it scale by clients?"]


def test_a_machine_that_was_not_quiet_is_found() -> None:
    quiet = [process_of(seconds=seconds) for seconds in (1.0, 1.05, 0.97)]
    assert noisy(groups(quiet)) == []
    (loud,) = noisy(groups([*quiet, process_of(seconds=2.0)]))
    # Medians 1, 1.05, 0.97 and 2: deviation 0.4976 by mean 1.255.
    assert loud.variation == pytest.approx(0.397, abs=1e-3) and isnan(loud.drift)
    # Rounds that vary as much as the repeats do say nothing about the machine.
    restless = [
        process_of(seconds=[1, 9, 1, 9, 1, 9, 5, 2]),
        process_of(seconds=[1, 9, 1, 9, 1, 9, 5, 8]),
    ]
    assert noisy(groups(restless)) == []
    (slower,) = noisy(groups([process_of(seconds=[1.0] * 12 + [1.5] * 6)]))
    assert slower.drift == pytest.approx(0.5) and isnan(slower.variation)
    assert noisy(groups([process_of(seconds=[1.0] * 12 + [1.5, 1, 1, 1, 1, 1])])) == []


def test_what_was_not_asked_has_no_verdict() -> None:
    assert list(answers([process_of()])) == ["What limits it?"]


def test_time_counts_for_an_option_as_a_factor() -> None:
    processes = [process_of(epochs=epochs, seconds=2.0 * epochs) for epochs in (1, 3)]
    every = groups(processes)
    (one,) = effects(every, swept(every))
    assert one.time is not None and (one.time.best, one.time.worst) == (1, 3)
    assert one.time.change.centre == pytest.approx(3)
    alike = families(every, "epochs", swept(every))
    assert time_effect(alike, one.option) == one.time


def test_points_with_a_deadline_do_not_tell_what_devices_do() -> None:
    every = groups(
        [
            process_of(accuracy=0.8),
            process_of(accuracy=0.7, devices="uniform"),
            process_of(accuracy=0.3, devices="uniform", deadline=1.0),
        ]
    )
    options, judged = swept(every), measure(every)
    (devices,) = [one for one in options if one.name == "devices"]
    assert judged is not None
    effect = score_effect(families(every, "devices", options), devices, judged)
    assert effect is not None and effect.change.centre == pytest.approx(10)


def test_a_point_is_a_line_with_its_options_and_intervals() -> None:
    every = groups(grid(seconds=2.0, sent=50.0))
    rows = list(csv.DictReader(points_csv_text(every).splitlines()))
    keys = [(row["method"], row["lr"]) for row in rows]
    assert keys == [
        ("fedavg", "0.01"),
        ("fedavg", "0.1"),
        ("fedper", "0.01"),
        ("fedper", "0.1"),
    ]
    first = rows[0]
    assert (first["runs"], first["seeds"]) == ("2", "2")
    assert float(first["seconds"]) == pytest.approx(20.0), "of ten rounds"
    assert float(first["bytes"]) == pytest.approx(1000.0), "up and down"
    assert float(first["accuracy"]) == pytest.approx(0.505)
    # Two seeds 0.01 apart: Student's t of two values times 0.005.
    half = float(first["accuracy_high"]) - 0.505
    assert half == pytest.approx(12.7062 * 0.005, rel=1e-3)
    assert first["energy"] == "nan"
    rounds = next(csv.reader(csv_text(every).splitlines()))
    assert "lr" in rounds and "options" not in rounds, "no label to take apart"


def test_many_options_make_few_charts_and_no_empty_section() -> None:
    """Six options were swept: 64 points. Charts hold some of them, and say which."""
    names = ("epochs", "lr", "batch_size", "momentum", "alpha", "clients")
    values = ((1, 2), (0.01, 0.1), (8, 16), (0.0, 0.9), (0.1, 1.0), (4, 6))
    processes = []
    for number, chosen in enumerate(product(*values)):
        own = dict(zip(names, chosen, strict=True))
        processes.append(process_of(accuracy=0.5 + number / 200, **own))
    made = sections(groups(processes), Found(processes=processes))
    assert not any(section.empty for section in made)
    charts = [drawing for section in made for drawing in section.charts]
    assert len(charts) < 40
    by_id = {section.id: section for section in made}
    titles = [drawing.title for drawing in by_id["options"].charts]
    # Sixteen lines over the default batch size are too many: momentum is held as well.
    assert any(title.startswith("accuracy over epochs at ") for title in titles)
    for drawing in by_id["options"].charts:
        lines = {record["series"] for record in drawing.spec["data"]["values"]}
        assert len(lines) <= 8, drawing.title
    assert "The tables and the CSV have" in " ".join(by_id["phases"].text)


def test_options_are_held_where_most_points_are() -> None:
    lrs = (0.01, 0.05, 0.1)
    processes = [process_of(lr=lr, epochs=epochs) for lr in lrs for epochs in (1, 3, 9)]
    every = groups(processes)
    found = held(every, swept(every), keep=("epochs",), most=2)
    # All values are as frequent: lr has its default; epochs would have the middle one.
    assert dict(found.options) == {"lr": 0.05}
    assert len(found.groups) == 3 and found.left_out == 6
    assert reference(every, "epochs") == 3
    whole = held(every, swept(every), keep=("epochs",), most=3)
    assert whole.groups == every and not whole.options


def test_long_names_are_cut_in_sentences_and_whole_elsewhere() -> None:
    name = "file.py:" + "x" * 300
    processes = [process_of(method=name, accuracy=0.5), process_of(accuracy=0.4)]
    told = answers(processes)["Which method wins where?"]
    assert "xxx…" in told and "x" * 100 not in told
    assert name in points_csv_text(groups(processes))


def test_a_profile_says_what_limits_its_point(tmp_path: Path) -> None:
    part = {"name": "clients", "seconds": 2.0, "warm": 1.0, "busy": 0.2, "next": []}
    part |= {"compute": None, "bandwidth": None, "words": "clients is launch-bound"}
    short = part | {"seconds": 1.0, "words": "denoiser is compute-bound"}
    profile = {"device": "cpu", "parts": [short, part], "ranks": []}
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    processes = [process_of(lr=0.1, folder=tmp_path), process_of(lr=0.2)]
    told = answers(processes)["What limits it?"]
    assert "Profile of fedavg, lr 0.1: clients is launch-bound." in told
    assert "denoiser" not in told, "it takes less of the time"
    (tmp_path / "profile.json").write_text("[]")
    assert "Profile" not in answers(processes)["What limits it?"]


def test_runs_of_other_lengths_do_not_compete() -> None:
    """fedavg learnt for 20 and for 5 rounds, fedper for 5."""
    longer = process_of(method="fedavg", rounds=20, accuracy=0.8)
    shorter = process_of(method="fedper", rounds=5, accuracy=0.7)
    other = process_of(method="fedavg", rounds=5, accuracy=0.6)
    every = groups([longer, shorter, other])
    (contest,) = contests(every, swept(every))
    assert contest.condition["rounds"] == 5
    every = groups([longer, shorter])
    assert [group.key["rounds"] for group in every] == [20, 5]
    assert not contests(every, swept(every))


def test_an_option_that_helps_one_method_and_harms_another_is_told_by_method() -> None:
    """A small lr is 20 points better for ditto and 10 worse for fedavg, in each seed."""
    processes = []
    means = {("ditto", 0.01): 0.8, ("ditto", 0.1): 0.6}
    means |= {("fedavg", 0.01): 0.5, ("fedavg", 0.1): 0.6}
    for (method, lr), mean in means.items():
        for seed in range(3):
            score = mean + 0.01 * seed
            processes.append(
                process_of(method=method, lr=lr, seed=seed, accuracy=score)
            )
    told = answers(processes)["Which options matter?"]
    assert told == (
        "lr: 0.01 instead of 0.1 helps ditto (20.0 points [20.0, 20.0]) and harms "
        "fedavg (-10.0 points [-10.0, -10.0])."
    )


def test_an_effect_within_the_noise_is_named_and_no_more() -> None:
    """Pairs of points gain 20 and lose 16 points: the interval has room for anything."""
    processes = []
    means = {("fedavg", 0.01): 0.5, ("fedavg", 0.1): 0.7}
    means |= {("fedper", 0.01): 0.70, ("fedper", 0.1): 0.54}
    for (method, lr), mean in means.items():
        for seed, shift in enumerate((-0.2, 0.2)):
            # Every method's seeds disagree about lr.
            score = mean + (shift if lr == 0.1 else 0.0)
            processes.append(
                process_of(method=method, lr=lr, seed=seed, accuracy=score)
            )
    told = answers(processes)["Which options matter?"]
    assert told == "Not told apart from noise: lr."


def test_options_that_change_together_are_told_together() -> None:
    """A key of a variant holds a single option; and fedper has a rate of its own."""
    plain, tuned = {"lr": 0.1, "momentum": 0.0}, {"lr": 0.2, "momentum": 0.5}
    processes = []
    for seed, (options, accuracy) in product((0, 1), ((plain, 0.5), (tuned, 0.6))):
        processes.append(process_of(seed=seed, accuracy=accuracy, **options))
    told = answers(processes)["Which options matter?"]
    assert told.startswith("lr: 0.2 is 10.0 points of accuracy better than 0.1, over ")
    assert "1 pair of points that differ in momentum, too; " in told
    alone = [one for one in processes if one.runs[0].config["momentum"] == 0.0]
    other = {"method": "fedper", "lr": 0.3, "momentum": 0.0}
    alone += [process_of(seed=seed, accuracy=0.7, **other) for seed in (0, 1)]
    told = answers(alone)["Which method wins where?"]
    assert told.endswith("ahead of fedavg; they differ in lr, too.")
    same = [process_of(seed=seed, accuracy=0.7, **other | plain) for seed in (0, 1)]
    told = answers([*alone[:2], *same])["Which method wins where?"]
    assert told.endswith("ahead of fedavg.")


def test_a_method_has_its_price() -> None:
    processes = []
    for alpha, repeat in product((0.1, 1.0), range(2)):
        for method, seconds, sent in (("fedavg", 1.0, 100.0), ("ditto", 2.0, 150.0)):
            more = {"alpha": alpha, "seconds": alpha * seconds, "sent": sent}
            processes.append(process_of(method=method, seed=repeat, **more))
    told = answers(processes)["What does it cost?"]
    assert (
        "A round of ditto takes 2 times [2, 2] as long as one of fedavg and sends 1.5 "
        "times the bytes." in told
    )


@pytest.mark.parametrize(
    ("fast", "slow", "told"),
    [
        (100.0, 0.0, "as long as one of scaffold and sends nothing."),
        (0.0, 100.0, "as long as one of scaffold, which sends nothing."),
        (0.0, 0.0, "as long as one of scaffold."),
    ],
)
def test_a_method_that_sends_nothing_has_its_price(
    fast: float, slow: float, told: str
) -> None:
    processes = [
        process_of(method="scaffold", seconds=1.0, sent=fast),
        process_of(method="local", seconds=2.0, sent=slow),
    ]
    price = answers(processes)["What does it cost?"]
    assert f"A round of local takes 2 times [2, 2] {told}" in price


def test_bytes_are_compared_where_both_methods_send_some() -> None:
    processes = []
    for alpha, (fast, slow) in {0.1: (100.0, 0.0), 1.0: (100.0, 300.0)}.items():
        processes += [
            process_of(method="fedavg", alpha=alpha, sent=fast),
            process_of(method="ditto", alpha=alpha, seconds=2.0, sent=slow),
        ]
    price = answers(processes)["What does it cost?"]
    assert "as one of fedavg and sends 3 times the bytes." in price


def test_equal_times_are_told_in_words() -> None:
    processes = [process_of(method=method) for method in ("fedavg", "ditto")]
    told = answers(processes)["What does it cost?"]
    assert "takes just as long [1, 1] as one of" in told and "1 times" not in told
    assert times_as("1 times", "long") == "just as long"
    assert times_as("1.2 times [1, 1.4]", "long") == "1.2 times [1, 1.4] as long"


def test_pairs_that_agree_by_chance_hide_no_noise() -> None:
    """Under both alphas Ditto takes twice as long by the means of repeats far apart."""
    processes = []
    for alpha, (seed, slow) in product((0.1, 1.0), enumerate((1.0, 9.0))):
        for method, times in (("fedavg", 1.0), ("ditto", 2.0)):
            more = {"alpha": alpha, "seconds": slow * times, "seed": seed}
            processes.append(process_of(method=method, **more))
    told = answers(processes)["What does it cost?"]
    assert "takes 2 times (by the mean; too few repeats for an interval) as" in told


@pytest.mark.parametrize("repeats", [(1, 1), (1, 2), (2, 2)])
def test_a_price_without_an_interval_is_no_evidence(repeats: tuple[int, int]) -> None:
    processes = []
    for (lr, seconds), count in zip(((0.1, 1.0), (0.2, 1.01)), repeats, strict=True):
        for seed in range(count):
            times = {"seconds": seconds + 1e-4 * seed, "seed": seed}
            processes.append(process_of(lr=lr, accuracy=0.4 + lr, **times))
    told = answers(processes)["What does it cost?"]
    assert "are enough for 50.0 %" in told
    doubt = "lr 0.1); too few repeats to tell these times from noise."
    assert told.endswith(doubt) == (1 in repeats)


def test_an_interval_of_two_repeats_that_says_nothing_is_not_printed() -> None:
    wide, narrow = Estimate(0.36, 0.026, 4.9), Estimate(0.36, 0.3, 0.4)
    assert times_text(wide, " %", 100) == (
        "36.0 % (by the mean; too few repeats for an interval)"
    )
    assert times_text(narrow, " %", 100) == "36.0 % [30.0, 40.0]"
    assert times_text(Estimate(2.0), " times") == "2 times"


def test_two_repeats_far_apart_tell_no_speed_up() -> None:
    processes = []
    for ranks, repeats in ((1, (1.0, 4.0)), (2, (0.5, 3.0))):
        for seed, seconds in enumerate(repeats):
            processes.append(process_of(ranks=ranks, seconds=seconds, seed=seed))
    told = answers(processes)["How does it scale over ranks?"]
    assert told == (
        "fedavg, 20 clients: too few repeats to tell whether 2 ranks are faster than 1 "
        "(1.63 times as fast by the mean)."
    )


def test_one_seed_has_no_interval_even_where_pairs_agree() -> None:
    """Two methods gain the very same 20 points by lr, with one seed each."""
    processes = []
    for method, lr in product(("fedavg", "fedper"), (0.1, 0.2)):
        processes.append(
            process_of(method=method, lr=lr, accuracy=0.4 + 2 * (lr - 0.1))
        )
    told = answers(processes)
    assert "0.2 is 20.0 points of accuracy" in told["Which options matter?"]
    assert "too few seeds" in told["Which options matter?"]
    # Training dominates all four points: one sentence says so.
    assert told["What limits it?"].count("train takes") == 1


def test_a_server_that_learns_once_takes_no_share_of_a_usual_round() -> None:
    """The fourth of ten rounds of 1 s has 30 s of the server's training."""
    run = run_of(method="genfed")
    phases = run.phases.copy()
    phases[3, :, PHASES.index("server")] = 30.0
    learning = LearningRecord(3, 4, {}, {}, {}, {}, {}, np.zeros(1), 1.0, 1.0)
    once = replace(run, phases=phases, learnings=(learning,))
    (group,) = groups([Process((once,), 0, "once")])
    assert "server 30 s once, 75% of the run; train 19%" in " ".join(verdict(group))
    told = answers([Process((once,), 0, "once")])["What limits it?"]
    assert "server 30 s once, 75 % of the run" in told


def test_equal_curves_are_one_line_with_all_their_names() -> None:
    climbs = {"fedavg": 0.5, "fedper": 0.5, "ditto": 0.6}
    every = groups(
        [process_of(method=name, accuracy=end) for name, end in climbs.items()]
    )
    section = next(one for one in sections(every, Found()) if one.id == "accuracy")
    chart = section.charts[0].spec
    names = {record["series"] for record in chart["data"]["values"]}
    assert names == {"fedavg = fedper", "ditto"}
    legend = chart["layer"][-1]["encoding"]["color"]["scale"]["domain"]
    assert set(legend) == names, "every colour has a name"


def test_empty_rows_of_the_map_are_explained() -> None:
    run = run_of(clients=4, accuracy=0.5)
    run.client_accuracy[:, 2] = np.nan
    group = groups([Process((run,), 0, "one")])[0]
    assert clients_section(group).text == [
        "Empty rows of the map: 1 client that has no test data, or that no round has "
        "judged."
    ]
    whole = groups([process_of(clients=4)])[0]
    assert not clients_section(whole).text
