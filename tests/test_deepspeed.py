"""DeepSpeed for real: two server ranks that train in every way, beside a worker that is
no part of it.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcfed.runtime import process_group
from hpcfed.runtime.accelerator import noting_peaks
from tests import conftest, server_ranks
from tests.server_ranks import HALF, WAYS

SCRIPT = Path(server_ranks.__file__)
EXACT = [name for name in WAYS if not name.startswith("bf16")]
ROUNDED = 1e-4
"""By which share losses may differ by the order of sums.

A gradient is a sum over 16 rows of 999 columns: its rounding is √(16 · 999) · 6e-8 = 8e-6,
in each of six steps.
"""

Told = dict[str, np.ndarray]


def read(path: Path) -> Told:
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


@pytest.fixture(scope="module")
def ranks(
    tmp_path_factory: pytest.TempPathFactory, mpirun: Callable[..., Any]
) -> dict[str, Any]:
    """What every rank wrote, and what was printed. Starting costs more than training,
    so all is one job.
    """
    folder = tmp_path_factory.mktemp("ranks")
    job = mpirun(3, SCRIPT, folder)
    assert job.returncode == 0, job.stderr
    return {"job": job, **{path.stem: read(path) for path in folder.glob("*.npz")}}


@pytest.fixture(scope="module")
def servers(ranks: dict[str, Any]) -> tuple[Told, Told]:
    return ranks["server-0"], ranks["server-1"]


def apart(array: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(array - expected) / np.linalg.norm(expected))


def reference(server: Told, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Accumulated micro-batches are normalised each by itself; without them ranks share
    the statistics of a batch.
    """
    kind = "reference accumulated" if "accumulated" in name else "reference"
    return server[f"{kind}/losses"], server[f"{kind}/weights"]


def test_the_worker_is_no_part_of_deepspeeds_world(
    ranks: dict[str, Any], servers: tuple[Told, Told]
) -> None:
    for rank, server in enumerate(servers):
        assert server["worlds"].tolist() == [2, 2, rank]
    worker = ranks["worker-0"]
    assert not worker["joined"] and not worker["deepspeed"]


def test_the_worker_goes_on_meanwhile(ranks: dict[str, Any]) -> None:
    assert ranks["worker-0"]["steps"] > 20
    assert ranks["worker-0"]["there"] == pytest.approx(4.0, abs=0.5)


def test_nothing_is_printed(ranks: dict[str, Any]) -> None:
    """Neither DeepSpeed's remarks nor torch's warnings."""
    assert ranks["job"].stdout == ""
    assert ranks["job"].stderr == ""


@pytest.mark.parametrize("name", EXACT)
def test_losses_are_those_of_a_plain_loop(
    name: str, servers: tuple[Told, Told]
) -> None:
    for server in servers:
        losses, weights = reference(server, name)
        assert losses[-1] < 0.8 * losses[0], "it learns, so the steps matter"
        np.testing.assert_allclose(server[f"{name}/losses"], losses, rtol=ROUNDED)
        assert apart(server[f"{name}/weights"], weights) < 1e-3


@pytest.mark.parametrize("name", ["bf16", "bf16 zero 1", "bf16 zero 3"])
def test_bf16_is_close(name: str, servers: tuple[Told, Told]) -> None:
    losses, _ = reference(servers[0], name)
    np.testing.assert_allclose(servers[0][f"{name}/losses"], losses, rtol=0.02)
    assert not np.allclose(servers[0][f"{name}/losses"], losses, rtol=ROUNDED), (
        "it is another arithmetic"
    )


@pytest.mark.parametrize("name", WAYS)
def test_ranks_have_the_same_weights_and_statistics(
    name: str, servers: tuple[Told, Told]
) -> None:
    for kind in ("losses", "weights", "statistics", "latents"):
        np.testing.assert_array_equal(
            servers[0][f"{name}/{kind}"], servers[1][f"{name}/{kind}"], err_msg=kind
        )


@pytest.mark.parametrize("name", WAYS)
def test_statistics_start_as_they_were_and_move(
    name: str, servers: tuple[Told, Told]
) -> None:
    server = servers[0]
    np.testing.assert_array_equal(
        server[f"{name}/first statistics"], server["initial/statistics"]
    )
    assert apart(server[f"{name}/statistics"], server["initial/statistics"]) > 0.1
    if "accumulated" not in name and "bf16" not in name:
        np.testing.assert_allclose(
            server[f"{name}/statistics"],
            server["reference/statistics"],
            rtol=1e-3,
            atol=1e-5,
        )


@pytest.mark.parametrize("name", WAYS)
def test_a_trainer_goes_on_from_the_state_of_another_bit_for_bit(
    name: str, servers: tuple[Told, Told]
) -> None:
    for server in servers:
        second = server[f"{name}/losses"][HALF:]
        np.testing.assert_array_equal(server[f"{name}/resumed losses"], second)
        for kind in ("weights", "statistics"):
            np.testing.assert_array_equal(
                server[f"{name}/resumed {kind}"], server[f"{name}/{kind}"], err_msg=kind
            )


@pytest.mark.parametrize("name", WAYS)
def test_zero_shares_out_what_it_should(name: str, servers: tuple[Told, Told]) -> None:
    """Stages 1 to 3 keep half of the moments on either rank, stage 3 of the parameters
    too: none is there between.
    """
    stage = WAYS[name].get("zero_stage", 0)
    for server in servers:
        number = int(server[f"{name}/parameters"])
        moments, parameters = server[f"{name}/held"].tolist()
        assert moments == pytest.approx(number / 2 if stage else number, rel=1e-3)
        assert parameters == (0 if stage == 3 else number)


def test_tiles_are_tensors_of_their_own(servers: tuple[Told, Told]) -> None:
    """A weight more of either large layer, and a bias more of the one whose outputs are
    joined.
    """
    for server in servers:
        more = server["zero 3 in tiles/tensors"] - server["zero 3/tensors"]
        assert more == 3


@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_activations_computed_anew_change_nothing(
    engine: str, servers: tuple[Told, Told]
) -> None:
    for server in servers:
        for kind in ("losses", "gradients", "statistics"):
            found, expected = (
                server[f"checkpoint {engine}/{kind}"],
                server[f"checkpoint/{kind}"],
            )
            np.testing.assert_allclose(
                found, expected, rtol=1e-5, atol=1e-7, err_msg=kind
            )
        assert (server["checkpoint/gradients"] != 0).mean() > 0.9


def test_all_ranks_have_the_same_diffusion_model(servers: tuple[Told, Told]) -> None:
    for kind in ("autoencoder losses", "denoiser losses", "inverted", "sampled"):
        first, second = (server[f"model/{kind}"] for server in servers)
        assert np.isfinite(first).all()
        np.testing.assert_array_equal(first, second, err_msg=kind)


@pytest.mark.parametrize(
    "model", ["model", "model of zero 3", "model of micro-batches"]
)
def test_ranks_learn_what_one_would(model: str, servers: tuple[Told, Told]) -> None:
    """From the same batches, or micro-batches of the same size.

    Also the denoiser, whose latents depend on the statistics that batch norm gathered
    on all ranks.
    """
    alone = "model of micro-batches alone" if "micro" in model else "model alone"
    for kind in ("autoencoder losses", "denoiser losses", "inverted", "sampled"):
        found, expected = (servers[0][f"{name}/{kind}"] for name in (model, alone))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=kind)


def test_a_process_alone_learns_the_same_by_both_engines(tmp_path: Path) -> None:
    job = conftest.start([sys.executable, str(SCRIPT), str(tmp_path)])
    assert job.returncode == 0, job.stderr
    assert job.stdout == job.stderr == ""
    told = read(tmp_path / "worker-0.npz")
    for kind in ("autoencoder losses", "denoiser losses", "inverted", "sampled"):
        np.testing.assert_allclose(
            told[f"deepspeed/{kind}"],
            told[f"torch/{kind}"],
            rtol=1e-4,
            atol=1e-5,
            err_msg=kind,
        )


def test_what_has_been_learnt_leaves_no_engine_behind(
    servers: tuple[Told, Told],
) -> None:
    """Else every time that a server learns would cost its weights and moments for ever."""
    for model in ("model", "model of zero 3"):
        assert [int(server[f"{model}/engines left"]) for server in servers] == [0, 0], (
            model
        )


def test_a_deepspeed_that_was_only_imported_ends_no_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other libraries import it, too. It knows only groups that it has begun with."""
    comm = pytest.importorskip("deepspeed.comm.comm")
    monkeypatch.setattr(comm, "cdb", None)
    process_group.join_alone("gloo")
    process_group.leave()
    assert not process_group.dist.is_initialized()


def test_a_peak_is_noted_before_somebody_resets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted memory: a start takes 7, and is then forgotten; steps take 3."""
    peak, noted = [7], []

    def forget(device: object = None) -> None:
        peak[0] = 3

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", forget)
    with (
        pytest.raises(ValueError, match="fails"),
        noting_peaks(lambda: noted.append(peak[0])),
    ):
        torch.cuda.reset_peak_memory_stats()
        raise ValueError("fails")
    assert (noted, peak) == ([7], [3])
    assert torch.cuda.reset_peak_memory_stats is forget, "nobody notes afterwards"
