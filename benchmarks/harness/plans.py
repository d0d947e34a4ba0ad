"""Whether plans come true: calibrates with few clients, few ranks and small servers,
predicts larger ones, measures them, and prints the error of every prediction.

    python -m benchmarks.harness.plans clients      10 to 300 clients predict 1000 and 10,000
    python -m benchmarks.harness.plans cores        1 to 4 ranks on cores predict 8 and 16
    python -m benchmarks.harness.plans server       small and paper predict large (a GPU of 80 GB)
    python -m benchmarks.harness.plans span         small banks predict 10 thousand to 1.6 million columns, on any device
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import add_device, parser_of
from benchmarks.measuring import settings_of
from hpcfed.analysis.costmodel import Range
from hpcfed.clients.network import client_layout, client_network
from hpcfed.options import Settings
from hpcfed.options.declare import flags
from hpcfed.plan.bank import fit_passes
from hpcfed.plan.calibrate import calibrate, measure_rounds, start
from hpcfed.plan.constants import Calibration
from hpcfed.plan.planner import Planner
from hpcfed.plan.rounds import Load, Target, fit_rates, plan_round, rank_loads
from hpcfed.plan.server import LearningPlan, plan_learning
from hpcfed.plan.server_calibration import measure_server
from hpcfed.plan.shares import train_sizes
from hpcfed.plan.speeds import ASSUMED, measured_link
from hpcfed.results.stored import read_run
from hpcfed.server.options import server_options
from hpcfed.server.schedule import banked_rows

CLIENTS = {
    "method": "fedavg",
    "dataset": "synthetic",
    "model": "cnn-cifar",
    "partition": "iid",
    "train_per_client": 100,
    "test_per_client": 4,
    "batch_size": 50,
    "epochs": 1,
}
CORES = {
    **CLIENTS,
    "device": "cpu",
    "synthetic_shape": "1x28x28",
    "model": "cnn-fmnist",
    "epochs": 2,
}
SERVER = {
    "method": "pfedgpa",
    "dataset": "synthetic",
    "model": "cnn-cifar",
    "partition": "dominant",
    "clients": 20,
    "rounds": 20,
    "train_per_client": 600,
    "test_per_client": 100,
    "evaluate_every": 10,
    "server_batch": 100,
    "denoiser_batch": 400,
    "server_precision": "bf16",
    "autoencoder_samples": 2_000,
    "denoiser_samples": 8_000,
}
SPAN = {
    "method": "pfedgpa",
    "server_model": "span",
    "dataset": "synthetic",
    "model": "cnn-fmnist",
    "partition": "dominant",
    "train_per_client": 20,
    "test_per_client": 10,
    "batch_size": 10,
    "epochs": 1,
    "rounds": 4,
    "evaluate_every": 4,
    "server_every": 2,
    "bank_rounds": 2,
    "server": "tiny",
    "denoiser_samples": 4_000,
}


def loads_of(settings: Settings, ranks: int) -> list[Load]:
    """Return the work of the busiest rank."""
    config = settings.config
    sizes = train_sizes(config)
    work = settings.options.local_work(config, client_layout(config))
    return rank_loads(settings, work, sizes, ranks, mode="batched")


def show(name: str, predicted: Range, measured: float, unit: float = 1e3) -> None:
    """Print one prediction beside what was measured."""
    error = predicted.middle / measured - 1
    inside = predicted.low <= measured <= predicted.high
    print(
        f"{name:32} {unit * predicted.middle:10.2f} "
        f"[{unit * predicted.low:.2f}, {unit * predicted.high:.2f}] "
        f"{unit * measured:10.2f} {100 * error:+7.1f} %"
        f"{'' if inside else '  outside'}",
        flush=True,
    )


def predict_clients(asked: argparse.Namespace) -> None:
    """Predict more clients on one rank."""
    values = dict(CLIENTS, device=asked.device)
    base = settings_of(values)
    constants = calibrate(base, values, clients=asked.fit, ranks=())
    report(constants)
    for number in asked.clients:
        settings = settings_of({**values, "clients": number})
        target = Target(ranks=1, per_node=1, link=ASSUMED)
        loads = loads_of(settings, 1)
        columns = constants.work.columns
        plan = plan_round(constants, loads, target, columns=columns)
        found = measure_rounds(settings, values, ranks=1, clients=number)
        seconds = found.train.middle + found.rest.middle
        show(f"{number} clients, ms a round", plan.seconds, seconds)
        show(f"{number} clients, evaluation", plan.evaluation, found.evaluate)
        show(f"{number} clients, MiB", plan.memory, found.memory, 2.0**-20)


def predict_cores(asked: argparse.Namespace) -> None:
    """Predict more ranks on the cores of this machine, weak and strong."""
    values = dict(CORES)
    base = settings_of(values)
    constants = calibrate(base, values, clients=(4, 12, 24), ranks=(2, 4))
    report(constants)
    link = measured_link(constants.links)
    assert link is not None
    print(f"link: {link}")
    for ranks in asked.ranks:
        for name, clients in (("weak", 12 * ranks), ("strong", 96)):
            settings = settings_of({**values, "clients": clients})
            target = Target(ranks=ranks, per_node=constants.machine.units, link=link)
            columns = constants.work.columns
            plan = plan_round(
                constants, loads_of(settings, ranks), target, columns=columns
            )
            found = measure_rounds(settings, values, ranks=ranks, clients=clients)
            seconds = found.train.middle + found.rest.middle
            show(f"{name}, {ranks} ranks, ms a round", plan.seconds, seconds)
            print("   measured", found.model_dump_json(), flush=True)


def predict_server(asked: argparse.Namespace) -> None:
    """Predict a larger server."""
    values = dict(SERVER)
    base = settings_of({**values, "server": "paper"})
    options = server_options(base)
    assert options is not None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fields = measure_server(base, options, device)
    from hpcfed.plan.calibrate import machine_of, work_of

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    constants = Calibration.model_construct(
        machine=machine_of(device, 1, dtype), work=work_of(base.config), **fields
    )
    for point in constants.server:
        print(point.model_dump_json())
    for prepared in constants.preparations:
        print(prepared.model_dump_json())
    print(constants.machine.model_dump_json(), constants.server_start, flush=True)
    layout = client_layout(base.config, client_network(base.config, seed=0))
    torch.cuda.empty_cache()
    for size in asked.sizes:
        larger = settings_of({**values, "server": size})
        chosen = server_options(larger)
        assert chosen is not None
        plan = plan_learning(
            constants,
            chosen,
            layout,
            ranks=1,
            zero_stage=0,
            link=ASSUMED,
            clients=20,
            rows=banked_rows(chosen, larger.config),
        )
        print("predicted", plan, flush=True)
        measure_learning(size, {**values, "server": size}, plan)


def measure_learning(name: str, values: Mapping[str, Any], plan: LearningPlan) -> None:
    """Make a run, and print what its last learning took beside the plan."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/run"
        words = flags({**values, "server_save": False})
        start(1, ["hpcfed", "run", *words, "--out", out])
        learning = read_run(Path(out)).learnings[-1]
    print(json.dumps(learning.seconds), flush=True)
    show(f"{name}, s a learning", plan.seconds, sum(learning.seconds.values()), 1)
    memory = float(learning.peak_memory.max())
    show(f"{name}, GiB", plan.memory, memory, 2.0**-30)


def predict_span(asked: argparse.Namespace) -> None:
    """Predict banks of more rows and columns than were measured."""
    small = {**SPAN, "device": asked.device}
    constants = calibrate(settings_of(small), small, clients=(4, 8), ranks=())
    for passed in constants.bank:
        print(passed.model_dump_json())
    print(f"s per number, FLOP, cube: {fit_passes(constants.bank).coefficients}")
    for model in ("cnn-fmnist", "cnn-cifar", "cnn-pfl"):
        for clients in (10, 30):
            values = {**small, "model": model, "clients": clients}
            settings = settings_of(values)
            planner = Planner(settings, constants, ASSUMED, per_node=1)
            options = server_options(settings)
            assert options is not None
            plan = planner.learning(options, 1, 0)
            measure_learning(f"{model}, {clients} clients", values, plan)


def report(constants: Calibration) -> None:
    """Print what was measured and what follows."""
    for point in constants.rounds:
        print(point.model_dump_json())
    for link in constants.links:
        print(link.model_dump_json())
    here = measured_link(constants.links) or ASSUMED
    print(fit_rates(constants.rounds, 4.0 * constants.work.columns, here))
    print(
        f"{'':32} {'predicted':>10} {'interval':12} {'measured':>10} {'error':>8}",
        flush=True,
    )


PARTS = {
    "clients": predict_clients,
    "cores": predict_cores,
    "server": predict_server,
    "span": predict_span,
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("part", choices=PARTS)
    add_device(parser)
    parser.add_argument("--fit", type=int, nargs="+", default=[10, 30, 100, 300])
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--sizes", nargs="+", default=["large"])
    asked = parser.parse_args()
    begin = time.perf_counter()
    PARTS[asked.part](asked)
    print(f"{time.perf_counter() - begin:.0f} s in all", file=sys.stderr)


if __name__ == "__main__":
    main()
