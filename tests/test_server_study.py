"""The study of the server's cost: growth that was made up is found again, a point that
fails keeps its line, and terminal, page and JSON say the same.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcfed.analysis.collect import Found
from hpcfed.analysis.groups import Process, groups
from hpcfed.analysis.render.console import Output
from hpcfed.analysis.render.exports import json_text
from hpcfed.analysis.render.page import Content, page
from hpcfed.analysis.render.sections import sections
from hpcfed.analysis.server_costs import (
    ServerCost,
    over_clients,
    over_columns,
    over_server_ranks,
    server_costs,
    zero_stages,
)
from hpcfed.analysis.server_findings import fit_answers, growth_answers, server_tables
from hpcfed.analysis.study_points import show_study, summary
from hpcfed.clients.network import client_layout
from hpcfed.results.learnings import LearningRecord
from hpcfed.results.run import RunRecord
from hpcfed.results.study import Outcome, StudyRecord, TrialRecord
from hpcfed.server.options import ServerOptions, server_options
from hpcfed.server.schedule import generated
from hpcfed.studies.plan import find_study, points, read_study
from tests.points import run_of
from tests.test_same_words import Tables, words_of

NETWORKS = {"cnn-fmnist": 10_000, "cnn-cifar": 100_000, "cnn-pfl": 1_000_000}
MIB = 2.0**20


def run(
    network: str,
    *,
    encode: float,
    denoiser: float = 2.0,
    memory: tuple[float, ...] = (MIB,),
    **options: Any,
) -> RunRecord:
    """Return a run of ten rounds of 1 s, whose server learns after every fifth."""
    made = run_of(
        method="pfedgpa",
        model=network,
        rounds=10,
        server_every=5,
        facts={"model": network, "generated_columns": NETWORKS[network]},
        **options,
    )
    learnings = []
    # The first learning is slow, and does not count.
    for after, factor in ((4, 100.0), (9, 1.0)):
        seconds = {"encode": factor * encode, "denoiser": factor * denoiser}
        networks = {"denoiser": 1.0}
        learnings.append(
            LearningRecord(
                round=after,
                rows=8,
                seconds=seconds,
                samples_per_second=networks,
                parameters={"denoiser": 1},
                flops=networks,
                utilisation=networks,
                peak_memory=np.array(memory),
                own=0.75,
                own_uploads=1.0,
                bank_bytes=np.full(len(memory), 4.0 * MIB),
            )
        )
    finals = {"upload": np.full(4, 0.5), "pFedGPA": np.full(4, 0.25)}
    return replace(made, learnings=tuple(learnings), finals=finals)


def linear(network: str, **options: Any) -> RunRecord:
    """Its server takes 2 s, and 3 s per million columns; 1 MiB, and 8 per million."""
    columns = NETWORKS[network]
    bytes_taken = MIB * (1 + 8e-6 * columns)
    return run(
        network,
        encode=3e-6 * columns,
        memory=(bytes_taken,),
        server_model="span",
        **options,
    )


def steep(network: str) -> RunRecord:
    """Its server takes 0.1 ms for each column, in one part."""
    seconds = 1e-4 * NETWORKS[network]
    return run(network, encode=0, denoiser=seconds, server_model="p-diff")


def study(runs: dict[str, RunRecord], failed: dict[str, str]) -> StudyRecord:
    """Return a study with these runs; some have failed, for a reason."""
    trials = []
    for name, record in runs.items():
        why = failed.get(name, "")
        outcome = Outcome("failed" if why else "complete", why, 1.0, "hpcfed run")
        if why:
            record = replace(record, status="failed", learnings=(), finals={})
        trials.append(TrialRecord(f"{name}/repeat-0", outcome, {}, (record,)))
    return StudyRecord(Path("runs/made/study.h5"), "made up", 0, "", tuple(trials))


def both_models() -> StudyRecord:
    runs = {f"span-{name}": linear(name) for name in NETWORKS}
    runs |= {f"p-diff-{name}": steep(name) for name in NETWORKS}
    # Longer than a line of any terminal.
    why = (
        f"exit code 2: the networks do not fit{' at all' * 40}; use --server-model span"
    )
    return study(runs, {"p-diff-cnn-pfl": why})


def processes(of: StudyRecord) -> list[Process]:
    return [
        Process(trial.runs, 0, trial.name)
        for trial in of.trials
        if trial.outcome.status == "complete"
    ]


def costs(of: StudyRecord) -> list[ServerCost]:
    return server_costs(groups(processes(of)), [of])


def test_made_up_slopes_are_found_again() -> None:
    span, p_diff = sorted(
        over_columns(costs(both_models())), key=lambda one: one.name, reverse=True
    )
    assert span.sizes == [1e4, 1e5, 1e6]
    assert span.seconds == (pytest.approx(2), pytest.approx(3e-6))
    assert span.memory == (pytest.approx(MIB), pytest.approx(8e-6 * MIB))
    # 1 s and 10 s for 1e4 and 1e5 columns: proportional.
    assert p_diff.power.centre == pytest.approx(1)
    assert [one.columns for one in p_diff.failed] == [1e6]


def test_a_point_takes_its_last_learning_beside_five_rounds_of_clients() -> None:
    (cost,) = costs(study({"one": linear("cnn-pfl")}, {}))
    assert cost.seconds == {"encode": pytest.approx(3), "denoiser": 2}
    assert (cost.whole, cost.between) == (pytest.approx(5), pytest.approx(5))
    assert cost.share == pytest.approx(0.5)
    # Clients that went on waited 1 s in the end: 6 s from one learning to the next.
    assert replace(cost, waited=1.0).share == pytest.approx(5 / 6)
    assert cost.limit == ("encode", pytest.approx(0.6))
    assert (cost.own, cost.before, cost.after) == (0.75, 0.5, 0.25)
    assert cost.bank == (4 * MIB,)


def test_verdicts_say_what_fits_and_where_a_model_ends() -> None:
    told = fit_answers(costs(both_models()))
    p_diff = next(line for line in told if "p-diff" in line)
    assert "up to 10,000 columns (1 s, clients work 5 s)" in p_diff
    assert "not with 100,000 columns (10 s, clients work 5 s)" in p_diff
    assert "It ends at 100,000 columns; with 1,000,000: the networks do not" in p_diff
    assert p_diff.endswith("use --server-model span.")
    span = next(line for line in told if "server_model span" in line)
    assert "fits between rounds up to 1,000,000 columns" in span
    assert "limited by encode, 60%" in span and "ends" not in span
    grown = " ".join(growth_answers(costs(both_models())))
    assert "3 s per million columns" in grown


def test_an_option_that_older_records_lack_does_not_part_points() -> None:
    runs = {name: linear(name) for name in NETWORKS}
    default = ServerOptions().token_window
    newer = linear("cnn-pfl", token_window=default)
    (growth,) = over_columns(costs(study(runs | {"cnn-pfl": newer}, {})))
    assert growth.sizes == [1e4, 1e5, 1e6]


def test_a_server_that_never_fits_is_told() -> None:
    slow = run("cnn-fmnist", encode=1, denoiser=9, server_model="span")
    (told,) = fit_answers(costs(study({"slow": slow}, {})))
    assert "never fits between rounds, as with 10,000 columns (10 s, clie" in told


@pytest.mark.parametrize(("added", "told"), [(0.05, "500 ms per client"), (0.0, "")])
def test_a_slope_that_makes_no_difference_is_not_told(added: float, told: str) -> None:
    """Ten clients more add half a second for each to 10 s, or a thousandth in all."""
    runs = {}
    for clients in (4, 14):
        seconds = 10 + (added or 1e-5) * 10 * (clients - 4)
        point = run("cnn-cifar", encode=0, denoiser=seconds, clients=clients)
        runs[f"clients-{clients}"] = point
    (grown,) = growth_answers(costs(study(runs, {})))
    assert told in grown and ("per client" in grown) == bool(told)


def test_clients_and_server_ranks_have_their_growth() -> None:
    runs = {}
    for clients in (4, 16, 64):
        # The root of the number of clients.
        runs[f"clients-{clients}"] = run(
            "cnn-cifar", encode=clients**0.5, denoiser=0, clients=clients
        )
    for ranks, stage, memory in ((1, 0, 9), (2, 0, 8), (2, 3, 4)):
        runs[f"ranks-{ranks}-{stage}"] = run(
            "cnn-cifar",
            encode=8 / ranks,
            denoiser=0,
            memory=(memory * MIB,) * ranks,
            server_ranks=ranks,
            zero_stage=stage,
        )
    found = costs(study(runs, {}))
    several = [one for one in over_clients(found) if len(one.sizes) > 1]
    assert [one.power.centre for one in several] == [pytest.approx(0.5)]
    several = [one for one in over_server_ranks(found) if len(one.sizes) > 1]
    assert [(one.sizes, one.power.centre) for one in several] == [
        ([1, 2], pytest.approx(-1))
    ]
    ((plain, sharing),) = zero_stages(found)
    assert (max(plain.memory), max(sharing.memory)) == (8 * MIB, 4 * MIB)
    assert "ZeRO 0, 3 take 8.00 MiB, 4.00 MiB" in " ".join(growth_answers(found))


def test_a_point_without_a_record_keeps_its_line() -> None:
    refused = TrialRecord(
        "bad/repeat-0",
        Outcome("failed", "exit code 2: --zero-stage 2 over gloo", 1.0, ""),
        {"method": "pfedgpa", "clients": 7, "ranks": 1, "zero_stage": 2},
        (),
    )
    made = both_models()
    (cost,) = [
        one
        for one in costs(replace(made, trials=(*made.trials, refused)))
        if one.clients == 7
    ]
    assert cost.why == "--zero-stage 2 over gloo"
    (times, *_) = server_tables([cost])
    assert times.rows[0][-1] == cost.why


@pytest.mark.parametrize("name", ["server", "server-gpu", "server-ranks"])
def test_ready_studies_have_the_columns_that_they_name(name: str) -> None:
    """Their names are rounded; each point generates all of its network."""
    path = find_study(Path(name))
    wanted = {"13k": 13e3, "108k": 108e3, "1.6M": 1.6e6, "11.2M": 11.2e6}
    by_network = {}
    models = set()
    for point in points(read_study(path), path):
        options = server_options(point.settings)
        assert options is not None
        models.add(options.server_model)
        # A network looks the same at all of its points.
        key = point.settings.config.model, options.server_model
        by_network[key] = point.name, options, point.settings
    assert {"span", "p-diff"} <= models
    for point_name, options, settings in by_network.values():
        layout = client_layout(settings.config)
        columns = len(generated(layout, options).at)
        assert columns == layout.num_parameters
        size = point_name.partition(",")[0].rpartition("-")[2]
        named = wanted.get(size, columns)
        assert columns == pytest.approx(named, rel=0.02)


def test_other_methods_have_no_server() -> None:
    plain = study({"plain": run_of(method="fedavg")}, {})
    assert costs(plain) == [] and "server" not in summary(plain)
    failed = study({"plain": run_of(method="fedavg")}, {"plain": "exit code 1: no"})
    assert costs(failed) == []


def test_terminal_page_and_json_say_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = both_models()
    every = groups(processes(made))
    found = Found(processes=processes(made), studies=[made])
    shown = sections(every, found)
    tables = server_tables(costs(made))

    show_study(made, Output())
    terminal = [words_of(line) for line in capsys.readouterr().out.splitlines()]
    reader = Tables()
    reader.feed(page(Content("made up", [], [], shown)))
    on_page = [[words_of(text) for text, _ in row] for row in reader.found["server"]]
    told = json.loads(json_text(every, None, shown, [made]))
    of_study = summary(made)["server"]
    for table, as_json in zip(tables, of_study["tables"], strict=True):
        assert as_json in told["tables"]["server"]
        for row in table.texts:
            assert list(map(words_of, row)) in on_page
            assert words_of(" ".join(row)) in terminal
    answers = [line for one in told["verdicts"] for line in one["answers"]]
    for line in of_study["verdicts"]:
        assert line in answers and words_of(line) in terminal
