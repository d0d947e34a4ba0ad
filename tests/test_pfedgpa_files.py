"""What a run of pFedGPA writes down and reads, and mistakes in its options."""

import json
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from rich.console import Console

from hpcfed import cli
from hpcfed.analysis.render.show import show
from hpcfed.analysis.run_findings import costs
from hpcfed.methods import pfedgpa
from hpcfed.results.run import RunRecord, mean_accuracy
from hpcfed.results.server import SERVER_PHASES
from hpcfed.results.stored import read_run
from hpcfed.server.options import NETWORKS
from tests.federations import assembled
from tests.pfedgpa_runs import EVERYONE, TINY, assert_seconds_fit
from tests.runs import flags, mistake, started

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that learns twice, in one process."""
    own = TINY | {
        "server_every": 2,
        "direct": True,
        "memorisation": True,
        "new_clients": 3,
        "new_updates": 12,
        "generated_layers": 1,
    }
    return started(*flags(**own, out=tmp_path_factory.mktemp("recorded") / "run"))


def test_a_warm_start_gives_every_client_a_sample_or_their_average(
    recorded: Path,
) -> None:
    options = TINY | {
        "generated_layers": 1,
        "seed": 1,
        "server_load": str(recorded / "server.h5"),
    }
    cold, each, average = (
        assembled(**options | more)
        for more in (
            {},
            {"warm_start": True},
            {"warm_start": True, "warm_rows": "average"},
        )
    )
    fed, at = each.federation, each.federation.generated
    assert torch.equal(cold.method.init(cold.federation).w, fed.initial_row())
    made = fed.server.sample(fed.clients, whole=True)
    with np.load(recorded / "model.npz") as trained:
        start = np.concatenate([trained["head.weight"].ravel(), trained["head.bias"]])
    np.testing.assert_allclose(
        made - fed.server.sample(fed.clients),
        np.broadcast_to(start, made.shape),
        atol=1e-5,
        err_msg="updates are added to the row that the server's own run ended with",
    )
    own = fed.initial_row().repeat(6, 1)
    own[:, at] = made
    assert len(own.unique(dim=0)) == 6
    shared = fed.initial_row()
    shared[at] = made.mean(0)
    first = {
        "each": each.method.personal(fed, each.method.init(fed), EVERYONE),
        "average": average.method.personal(
            average.federation, average.method.init(average.federation), EVERYONE
        ),
    }
    assert torch.equal(first["each"], own)
    torch.testing.assert_close(first["average"], shared.expand(6, -1))
    # The first round begins there, and from the second on FedAvg's row is all.
    after = each.method.round(fed, each.method.init(fed), fed.sample(0))
    expected = fed.mean(fed.train(own, fed.sample(0)), fed.sample(0))
    assert torch.equal(after.w, expected) and not after.generated.numel()


def test_the_trained_server_is_kept_unless_told(recorded: Path, tmp_path: Path) -> None:
    names = sorted(path.name for path in recorded.iterdir())
    assert names == ["model.npz", "run.h5", "server.h5"]
    words = flags(
        **TINY
        | {
            "rounds": 1,
            "bank_rounds": 1,
            "autoencoder_samples": 20,
            "denoiser_samples": 20,
        }
    )
    folder = started(*words, "--no-server-save", "--out", tmp_path / "run")
    assert {path.name for path in folder.iterdir()} == {"model.npz", "run.h5"}


def test_a_server_file_that_does_not_serve_is_one_line(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, bad, out = recorded / "server.h5", tmp_path / "bad.h5", tmp_path / "run"
    bad.write_text("no HDF5")
    own = TINY | {"generated_layers": 1, "out": out}
    for values, expected in (
        ({"server_load": tmp_path / "missing.h5"}, "missing.h5: no such file"),
        ({"server_load": tmp_path}, "no such file"),
        ({"server_load": bad}, "bad.h5 is not a saved server"),
        ({"server_load": recorded / "run.h5"}, "--server-load"),
        ({"server_load": server, "generated_layers": 2}, "was made for other columns"),
        ({"server_load": server, "server_latent": 9}, "has another size"),
        (
            {"server_load": server, "bank_of": "uploads"},
            "has learnt updates; use --bank-of updates",
        ),
        (
            {"warm_start": True},
            "--warm-start needs a trained server: add --server-load",
        ),
    ):
        assert expected in mistake(capsys, "run", *flags(**own | values))
        assert not out.exists(), "told before anything was written"


# What is written down


def test_the_servers_group_of_the_results(recorded: Path) -> None:
    shapes = {
        "round": ((2,), "round"),
        "rows": ((2,), "rows"),
        "own": ((2,), "fraction"),
        "own_uploads": ((2,), "fraction"),
        "seconds": ((2, len(SERVER_PHASES)), "s"),
        "samples_per_second": ((2, 2), "1/s"),
        "parameters": ((2, 2), "1"),
        "flops": ((2, 2), "1"),
        "utilisation": ((2, 2), "fraction"),
        "peak_memory": ((2, 1), "bytes"),
        "bank_bytes": ((2, 1), "bytes"),
        "earlier": ((2,), "s"),
        "training_memory": ((2, 2), "bytes"),
        "promised_parameters": ((2, 2), "bytes"),
        "promised_gradients": ((2, 2), "bytes"),
        "promised_optimizer": ((2, 2), "bytes"),
        "promised_buffers": ((2, 2), "bytes"),
        "autoencoder_loss": ((2, 5), "1"),
        "denoiser_loss": ((2, 5), "1"),
    }
    with (
        h5py.File(recorded / "run.h5") as file,
        h5py.File(recorded / "server.h5") as trained,
    ):
        group = file["server"]
        of_the_last = {"latents", "latent_clients", "latent_shares"}
        names = {"phase_names", "network_names"}
        assert set(group) == {*shapes, *of_the_last, *names}
        places = group["latents"][()]
        assert np.isfinite(places).all(1).sum() == 18, "the rows of the last training"
        for name, (shape, unit) in shapes.items():
            assert (group[name].shape, group[name].attrs["units"]) == (shape, unit), (
                name
            )
            assert (
                group[name].attrs["description"] and group[name].dims[0].label == "time"
            )
            on_gpus = name in ("utilisation", "training_memory")
            assert np.isfinite(group[name][()]).all() or on_gpus, name
        assert group["phase_names"].asstr()[()].tolist() == list(SERVER_PHASES)
        assert group["network_names"].asstr()[()].tolist() == list(NETWORKS)
        assert group["round"][()].tolist() == [1, 3]
        assert group["rows"][()].tolist() == [12, 18], (
            "two rounds of six clients, then the last three"
        )
        assert (
            group["seconds"][()][:, [SERVER_PHASES.index(name) for name in NETWORKS]]
            > 0
        ).all()
        kept = 4 * file.attrs["generated_columns"] * group["rows"][()]
        assert group["bank_bytes"][:, 0].tolist() == kept.tolist()
        assert (group["peak_memory"][()] > 2**26).all() and (
            group["flops"][()] > 1e6
        ).all()
        for i, network in enumerate(NETWORKS):
            assert (
                group["parameters"][:, i].tolist() == [num_learnt(trained[network])] * 2
            )
            # Float32 without ZeRO: parameters and gradients, and two moments.
            for part, each in (("parameters", 4), ("gradients", 4), ("optimizer", 8)):
                promised = group[f"promised_{part}"][0, i]
                assert promised == each * group["parameters"][0, i], part
            seconds = group["seconds"][0, SERVER_PHASES.index(network)]
            assert group["samples_per_second"][0, i] == pytest.approx(100 / seconds)
        assert file["finals/name"].asstr()[()].tolist() == list(pfedgpa.FINALS)
        assert file["finals/accuracy"].shape == (len(pfedgpa.FINALS), 6)
        assert file["newcomers/accuracy"].shape == (4, 13, 3)
        for name in ("finals/accuracy", "newcomers/accuracy"):
            assert file[name].attrs["units"] == "fraction"
    record = read_run(recorded)
    assert record.finals.keys() == set(pfedgpa.FINALS)
    assert mean_accuracy(record.finals["pFedGPA"]) == pytest.approx(
        record.last("accuracy")
    )
    assert record.newcomers["method"].shape == (13, 3)
    np.testing.assert_array_equal(
        record.newcomers["method"][0], record.newcomers["global model"][0]
    )


def num_learnt(group: h5py.Group) -> int:
    """Parameters of a saved network, without what batch norm counts and averages."""
    names = list[str]()
    group.visit(names.append)
    kept = [
        name for name in names if "running" not in name and "num_batches" not in name
    ]
    return sum(
        group[name].size for name in kept if isinstance(group[name], h5py.Dataset)
    )


def test_the_servers_seconds_are_within_the_rounds(recorded: Path) -> None:
    assert_seconds_fit(recorded)


def test_show_prints_it_all_in_80_columns(
    recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    cli.main(["show", str(recorded)])
    text = capsys.readouterr().out
    assert "…" not in text
    cli.main(["show", str(recorded), "--json"])
    summary = json.loads(capsys.readouterr().out)
    lines = [line.split() for line in text.splitlines()]
    for name, accuracy in summary["finals"].items():
        assert ["at", "the", "end:", *name.split(), f"{accuracy:.2%}"] in lines
    assert summary["figures"].keys() == set(pfedgpa.FIGURES)
    for name, mean in summary["figures"].items():
        words = [*name.split(), f"{mean:.3f}"]
        assert any(line[: len(words)] == words for line in lines), name
    for update in range(13):
        own = [
            f"{summary['newcomers'][start][update]:.2%}"
            for start in ("random", "global model", "method", "random, guided")
        ]
        assert [
            "after",
            str(update),
            "local",
            f"update{'s' * (update != 1)}",
            *own,
        ] in lines
    first, last = summary["server"]
    for phase in SERVER_PHASES:
        seconds = first["seconds"][phase] + last["seconds"][phase]
        about = []
        if phase in NETWORKS:
            about = [
                f"{last['parameters'][phase]:,}",
                f"{last['samples_per_second'][phase]:,.0f}",
            ]
        line = next(line for line in lines if line[:1] == [phase])
        assert line[1] == f"{seconds:.2f}" and line[3:] == about
    assert ["uploads", "that", "the", "server", "learnt", "from", "18"] in lines

    with h5py.File(recorded / "run.h5") as file:
        for time_, learning in enumerate(summary["server"]):
            group = file["server"]
            assert (learning["round"], learning["rows"]) == (
                group["round"][time_],
                group["rows"][time_],
            )
            assert (
                list(learning["seconds"].values()) == group["seconds"][time_].tolist()
            )
            assert learning["peak_memory"] == group["peak_memory"][time_].tolist()
            for name in ("samples_per_second", "parameters", "flops"):
                assert list(learning[name].values()) == group[name][time_].tolist()
            assert list(learning["utilisation"].values()) == [None, None], (
                "no CPU has a known peak"
            )


def test_promised_memory_stands_beside_what_was_measured(recorded: Path) -> None:
    run = read_run(recorded)
    parts = {"parameters": 2.0, "gradients": 2.0, "optimizer": 12.0, "buffers": 1.0}
    gib = {part: size * 2**30 for part, size in parts.items()}
    learning = replace(
        run.learnings[-1],
        promised={"denoiser": gib},
        training_memory={"denoiser": 18.5 * 2**30},
    )
    _, table = costs.of_server([replace(run, learnings=(learning,))])
    (row,) = table.rows
    sizes = ["2.00", "2.00", "12.00", "1.00", "17.00", "18.50"]
    assert [str(cell) for cell in row] == ["denoiser", *(f"{n} GiB" for n in sizes)]
    # On a CPU without ZeRO there is nothing to compare.
    assert len(list(costs.of_server([run]))) == 1
    shared = replace(run, config=run.config | {"zero_stage": 2})
    assert len(list(costs.of_server([shared]))) == 2
    unknown = {"denoiser": dict.fromkeys(parts, float("nan"))}
    older = replace(run.learnings[-1], promised=unknown)
    assert len(list(costs.of_server([replace(shared, learnings=(older,))]))) == 1


def test_the_tables_of_a_large_server_are_not_cut(recorded: Path) -> None:
    record = read_run(recorded)

    def large(values: dict[str, Any], number: Any) -> dict[str, Any]:
        return dict.fromkeys(values, number)

    learnings = [
        replace(
            one,
            seconds=large(one.seconds, 12345.6),
            parameters=large(one.parameters, 2_345_678_901),
            samples_per_second=large(one.samples_per_second, 1_234_567.0),
            utilisation=large(one.utilisation, 0.456),
        )
        for one in record.learnings
    ]
    text, rounds = StringIO(), record.rounds | {"seconds": np.full(4, 1e5)}
    show(
        replace(record, rounds=rounds, learnings=tuple(learnings)),
        Console(file=text, width=80),
    )
    assert (
        "…" not in text.getvalue()
        and "2,345,678,901" in text.getvalue()
        and "45.6%" in text.getvalue()
    )


def test_another_method_has_none_of_it_but_welcomes_new_clients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = started(
        *flags(
            method="fedavg",
            clients=4,
            rounds=2,
            new_clients=3,
            new_updates=2,
            out=tmp_path / "run",
        )
    )
    with h5py.File(folder / "run.h5") as file:
        assert "server" not in file and "finals" not in file
    assert not (folder / "server.h5").exists()
    record: RunRecord = read_run(folder)
    assert record.learnings == () and record.finals == {}
    assert record.newcomers.keys() == {"random", "global model", "method"}
    assert all(
        curve.shape == (3, 3) and np.isfinite(curve).all()
        for curve in record.newcomers.values()
    )
    np.testing.assert_array_equal(
        record.newcomers["method"], record.newcomers["global model"]
    )
    assert (
        mean_accuracy(record.newcomers["random"][0])
        < 0.4
        < mean_accuracy(record.newcomers["random"][2])
    )
    capsys.readouterr()
    cli.main(["show", str(folder)])
    text = capsys.readouterr().out
    assert "new clients that start from" in text
    assert not [
        line
        for line in text.splitlines()
        if line.startswith(("server", "at the end", "uploads that"))
    ]
    cli.main(["show", str(folder), "--json"])
    summary = json.loads(capsys.readouterr().out)
    assert summary["server"] == [] and summary["finals"] == {}


# Mistakes


@pytest.mark.parametrize(
    ("values", "ranks", "expected"),
    [
        (
            {"server_ranks": 1},
            1,
            "--server-ranks 1 leaves no worker among 1 rank; start more, as in mpirun -n 2",
        ),
        (
            {"server_ranks": 1, "method": "fedavg"},
            2,
            "--server-ranks 1, but method fedavg has no model on the server",
        ),
        ({"zero_stage": 4}, 1, "--zero-stage 4: must be less than or equal to 3"),
        (
            {"server_latent": 4811},
            1,
            "a latent of 4811 is larger than the 4810 generated columns",
        ),
        (
            {"generated_layers": 1, "server_latent": 651},
            1,
            "larger than the 650 generated columns",
        ),
        ({"bank_rounds": 5}, 1, "--bank-rounds 5, but the run has only 4 rounds"),
        ({"server_every": 5}, 1, "--server-every 5, but the run has only 4 rounds"),
        (
            {"generated_layers": 3},
            1,
            "--generated-layers 3, but mlp has 2 layers with weights",
        ),
        (
            {"inversion_depth": 51},
            1,
            "--inversion-depth 51 is beyond --diffusion-steps 50",
        ),
        (
            {"new_clients": 3, "guided_start": 51},
            1,
            "--guided-start 51 is beyond --diffusion-steps 50",
        ),
        (
            {"server_micro_batch": 7},
            1,
            "--server-micro-batch 7 does not divide the 20 samples of a server rank",
        ),
        (
            {"server_ranks": 3, "server_engine": "deepspeed"},
            4,
            "--server-batch 20 cannot be shared by 3 server ranks; use a multiple of 3",
        ),
        (
            {"server_batch": 2, "server_micro_batch": 1, "server_engine": "deepspeed"},
            2,
            "batch norm needs two samples",
        ),
        ({"zero_stage": 1}, 1, "--server-engine torch is a plain loop on one rank"),
        (
            {"server_engine": "torch"},
            2,
            "--server-engine torch is a plain loop on one rank",
        ),
        (
            {"new_clients": 2, "server_ranks": 1},
            4,
            "--new-clients 2 on 3 ranks; use --new-clients 3 or more",
        ),
    ],
)
def test_a_mistake_is_one_line(
    values: dict[str, Any],
    ranks: int,
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refuse on the first of these ranks, before MPI starts."""
    if ranks > 1:
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", str(ranks))
    own = {"method": "fedavg", "clients": 6} if "method" in values else TINY
    assert expected in mistake(
        capsys, "run", *flags(**own | values, out=tmp_path / "run")
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("ranks", "values", "expected"),
    [
        (2, {"server_ranks": 2}, "--server-ranks 2 leaves no worker among 2 ranks"),
        (3, {"server_ranks": 2}, "--server-engine torch is a plain loop on one rank"),
        (2, {"new_clients": 1}, "--new-clients 1 on 2 ranks"),
    ],
    ids=["no worker", "plain loop on two ranks", "fewer new clients than ranks"],
)
def test_a_mistake_of_many_ranks_is_one_line(
    ranks: int,
    values: dict[str, Any],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The root tells it before MPI has begun; the file on MPI shows that no other rank
    says it, too.
    """
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", str(ranks))
    words = flags(**TINY | values, out=tmp_path / "run")
    assert expected in mistake(capsys, "run", *words)
    assert not (tmp_path / "run").exists()


def test_the_first_try_works_and_tells_what_was_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rounds, and a server for a CPU: the record holds what was used, so that the
    run can go on as it was.
    """
    words = [
        "--method",
        "pfedgpa",
        "--rounds",
        "2",
        "--clients",
        "4",
        "--model",
        "mlp",
        "--device",
        "cpu",
    ]
    few = [
        "--autoencoder-samples",
        "100",
        "--server-engine",
        "torch",
        "--diffusion-steps",
        "20",
        "--no-server-save",
    ]
    monkeypatch.setattr(
        "hpcfed.server.auto.CPU_SAMPLES",
        {"autoencoder": (200, 200), "denoiser": (100, 100)},
    )  # to be quick
    cli.main(["run", *words, *few, "--out", str(tmp_path)])
    said, config = capsys.readouterr().err, read_run(tmp_path).config
    chosen = {
        "server": "tiny",
        "bank_rounds": 2,
        "denoiser_samples": 100,
        "inversion_depth": 20,
    }
    chosen["autoencoder_samples"] = 100  # as it was given
    assert {name: config[name] for name in chosen} == chosen
    for line in (
        "--bank-rounds is 2: the run has only 2 rounds",
        "--server is tiny: it learns on a CPU, from 100 and 100 samples",
        "--server paper",
    ):
        assert line in said
    assert cli.parse_run(["--resume", str(tmp_path)]).flat()["server"] == "tiny"


def test_files_that_tell_whose_rows_are_by_distance_are_read(
    recorded: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "older"
    shutil.copytree(recorded, folder)
    with h5py.File(folder / "run.h5", "r+") as file:
        group = file["server"]
        expected = group["own"][-1], group["own_uploads"][-1]
        group.move("own", "kept")
        group.move("own_uploads", "kept_uploads")
    record = read_run(folder)
    last = record.learnings[-1]
    assert (last.kept, last.kept_uploads) == expected
    assert np.isnan([last.own, last.own_uploads]).all()
    text = StringIO()
    show(record, Console(file=text, width=200))
    told = text.getvalue()
    assert "generated rows nearest to their own client's updates" in told
    assert "direction" not in told
