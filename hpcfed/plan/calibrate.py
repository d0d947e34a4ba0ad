"""Measures, on the machine at hand, what plans are made from: short runs of the actual
settings with few clients, on one rank and on a few, and steps of the server's model.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from hpcfed.clients.network import client_layout, described_network, sample_of
from hpcfed.errors import UserError, count, remark
from hpcfed.models.cost import cost
from hpcfed.options import (
    AS_GIVEN,
    LEFT_OUT,
    RunConfig,
    Settings,
    facts_of,
    idle,
    resolve,
)
from hpcfed.options.declare import flags
from hpcfed.plan.constants import (
    Calibration,
    LinkPoint,
    MeasuredMachine,
    MeasuredWork,
    RoundPoint,
    Spread,
    kind_of,
)
from hpcfed.plan.rounds import mean_load, rank_loads
from hpcfed.plan.server import PLANNED
from hpcfed.plan.server_calibration import measure_server
from hpcfed.plan.shares import has_own_data
from hpcfed.plan.speeds import Ceilings
from hpcfed.plan.work import client_bytes
from hpcfed.results.run import RunRecord
from hpcfed.results.stored import read_run
from hpcfed.runtime import accelerator
from hpcfed.runtime.launcher import environment_of, launcher
from hpcfed.runtime.location import choose_device
from hpcfed.runtime.machine import this_machine
from hpcfed.runtime.timer import PHASES
from hpcfed.server.options import server_options

CLIENTS = (10, 30, 100, 300, 1000, 3000)
"""Clients of a round to measure on one rank, until a point takes too long. Evaluations
of few clients take the same time whatever their number, so some points must have many.
"""
USUAL = 300
"""Clients to measure even if the run has fewer, if each has its own data."""
SAMPLES_SHARE = 0.25
"""Largest share of the memory that samples of measured clients may take."""
RANKS = (2, 4)
"""Numbers of ranks to measure, as far as there are cores or GPUs."""
ROUNDS, EVERY, WARMUP = 12, 4, 2
"""Rounds of a point, between evaluations, and to warm up without counting."""
LONG = 12.0
"""If a point's rounds take longer than this, in seconds, no larger one is measured."""
OWN = "hpcfed: "
"""Prefix of the lines in which a run says why it ends."""
LIMIT = 300
"""Seconds that a short run may take in total."""


def calibrate(
    settings: Settings,
    values: Mapping[str, Any],
    *,
    clients: Sequence[int] = CLIENTS,
    ranks: Sequence[int] = RANKS,
) -> Calibration:
    """Measure what a plan needs; `values` are the options as the user wrote them."""
    config = settings.config
    device = choose_device(config.device, 0)
    units = len(os.sched_getaffinity(0))
    if accelerator.is_gpu(device):
        units = accelerator.count()
    options = server_options(settings)
    dtype = torch.float32
    if options is not None and options.server_precision == "bf16":
        dtype = torch.bfloat16
    machine, work = machine_of(device, units, dtype), work_of(config)
    fitting = SAMPLES_SHARE * machine.memory / max(1.0, work.client_bytes)
    points = list(_measure_alone(settings, values, clients, fitting=int(fitting)))
    few = _for_several(points)
    links: list[LinkPoint] = []
    for number in ranks:
        if number <= units:
            points.append(
                measure_rounds(settings, values, ranks=number, clients=few * number)
            )
            links += _measure_link(number, device.type)
    constants = Calibration(
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine,
        work=work,
        rounds=tuple(points),
        links=tuple(links),
    )
    if options is None or options.server_model not in PLANNED:
        return constants
    return constants.model_copy(update=measure_server(settings, options, device))


def work_of(config: RunConfig) -> MeasuredWork:
    """Return what clients train, as far as it affects the cost."""
    network = described_network(config)
    sample = cost(network, sample_of(config))
    return MeasuredWork(
        network=config.network(),
        columns=client_layout(config, network).num_columns,
        batch_size=config.batch_size,
        training=sample.training,
        activations=sample.activations,
        client_bytes=client_bytes(config),
        method=config.method,
        precision=config.precision,
        kernels=config.kernels,
    )


def clients_alone(
    config: RunConfig, clients: Sequence[int], *, fitting: int
) -> list[int]:
    """Choose the numbers of clients to measure on one rank: at least two, and numbers
    beyond USUAL only if the samples of that many clients are `fitting`.
    """
    most = config.clients
    if not _keeps_clients(config):
        most = max(USUAL, min(config.clients, fitting))
    numbers = [number for number in clients if number < most]
    if len(numbers) < len(clients):
        numbers.append(most)
    if len(numbers) == 1:
        numbers = [max(1, numbers[0] // 2), numbers[0]]
    return numbers


def _measure_alone(
    settings: Settings,
    values: Mapping[str, Any],
    clients: Sequence[int],
    *,
    fitting: int,
) -> Iterator[RoundPoint]:
    """Measure more and more clients on one rank, until a point takes too long."""
    config = settings.config
    numbers = clients_alone(config, clients, fitting=fitting)
    for position, number in enumerate(numbers):
        point = measure_rounds(settings, values, ranks=1, clients=number)
        yield point
        seconds = ROUNDS * (point.train.middle + point.rest.middle)
        # At least two points, to separate a fixed cost from a cost per client.
        if position and seconds > LONG:
            break
    if has_own_data(config):
        # Evaluations judge rows that have trained, and then all clients. This point
        # separates the cost of the two.
        everyone = config.cohort_size == config.clients
        hosted = number if everyone else numbers[0]
        yield measure_rounds(
            settings, values, ranks=1, clients=numbers[0], hosted=hosted
        )


def _for_several(points: Sequence[RoundPoint]) -> int:
    """Return the most clients that a rank trains in a third of a second."""
    few = [point.clients for point in points if point.train.middle < 0.33]
    return max(few, default=points[0].clients)


def _keeps_clients(config: RunConfig) -> bool:
    """Tell whether the number of clients must not change, because fewer clients would
    have more samples each; then rounds sample some of them.
    """
    return not has_own_data(config) or config.cohort_size < config.clients


def measure_rounds(
    settings: Settings,
    values: Mapping[str, Any],
    *,
    ranks: int,
    clients: int,
    hosted: int | None = None,
) -> RoundPoint:
    """Run a few rounds in which `clients` of `hosted` train; return what they took."""
    config = settings.config
    if hosted is None and _keeps_clients(config):
        hosted = config.clients
        clients = min(clients, hosted)
    small, given = small_run(settings, values, clients=clients, hosted=hosted)
    remark(f"calibrating: {count(clients, 'client')} on {count(ranks, 'rank')}")
    with TemporaryDirectory(
        prefix="hpcfed-plan-", ignore_cleanup_errors=True
    ) as folder:
        out = Path(folder) / "run"
        words = [*flags(given), "--out", str(out)]
        start(ranks, ["hpcfed", "run", *words])
        return _point(small, read_run(out), ranks)


def small_run(
    settings: Settings,
    values: Mapping[str, Any],
    *,
    clients: int,
    hosted: int | None = None,
) -> tuple[Settings, dict[str, Any]]:
    """Return the settings of a short run in which `clients` train, and its options."""
    options = type(settings.options)
    given: dict[str, Any] = {}
    for name, field in settings.fields().items():
        short = facts_of(field).calibration
        if short is AS_GIVEN and name in values:
            given[name] = values[name]
        elif short is not AS_GIVEN and short is not LEFT_OUT:
            given[name] = short
    given["rounds"], given["evaluate_every"] = ROUNDS, EVERY
    given["clients"] = hosted or clients
    if hosted:
        # As many as asked for train; the other hosted clients are only judged.
        given |= {"cohort": clients}
    given |= fewer(settings, clients=clients, hosted=hosted or clients)
    while True:
        small = resolve(given, {name: name for name in given}, options)
        # Drop options that only act on something already dropped, such as new clients.
        without = {name: given[name] for name in given if name not in idle(small)}
        if len(without) == len(given):
            return small, given
        given = without


def fewer(settings: Settings, *, clients: int, hosted: int) -> dict[str, Any]:
    """Return the options that count clients or rounds, scaled down for a smaller run.
    Shares of clients stay the same, up to rounding. `clients` train in a round.
    """
    config, flat = settings.config, settings.flat()
    of_all, of_round = hosted / config.clients, clients / config.cohort_size
    found: dict[str, Any] = {}
    if config.attack != "none":
        # Some attacks need a benign client.
        attackers = round(of_all * config.num_attackers)
        found["attackers"] = max(1, min(attackers, hosted - 1))
    if config.aggregation in ("krum", "multi-krum"):
        found |= _robust(config, clients)
    for name, field in settings.fields().items():
        value = flat[name]
        if value is None:
            continue
        match facts_of(field).counts:
            case "clients":
                found[name] = max(1, round(of_all * value))
            case "uploads":
                found[name] = max(1, min(round(of_round * value), hosted))
            case "clusters":
                found[name] = min(value, hosted)
            case "rounds":
                # No time depends on when a rate changes.
                found[name] = min(value, ROUNDS - 1)
    return found


def _robust(config: RunConfig, uploads: int) -> dict[str, Any]:
    """Return what Krum requires: three more uploads than twice the malicious ones."""
    if uploads < 3:
        return {"aggregation": "mean"}
    return {"tolerance": min(config.tolerance, (uploads - 3) // 2 / uploads)}


def _point(settings: Settings, record: RunRecord, ranks: int) -> RoundPoint:
    """Make a point from a short run."""
    done = slice(WARMUP, None)
    train = record.phases[done, :, PHASES.index("train")].max(1)
    judged = record.phases[done, :, PHASES.index("evaluate")].max(1)
    learnt = record.phases[done, :, PHASES.index("server")].max(1)
    wall = record.wall[done].max(1)
    # Rounds are numbered from 0.
    numbers = np.arange(WARMUP, record.rounds_done)
    evaluated = (numbers + 1) % EVERY == 0
    plain = ~evaluated
    # Slowest ranks of each phase may differ, so this may be a little negative;
    # `_spread` clips it.
    rest = wall - train - judged - learnt
    # The same rule as in a plan, so that its errors are the same in both.
    work = settings.options.local_work(settings.config, client_layout(settings.config))
    mode = str(record.facts["engine"])
    loads = rank_loads(settings, work, record.train_samples, ranks, mode=mode)
    return RoundPoint(
        ranks=ranks,
        **asdict(mean_load(loads)),
        train=_spread(train),
        rest=_spread(rest[plain]),
        # The first evaluation loads and compiles what later ones use.
        evaluate=float(np.median(judged[evaluated][1:])),
        memory=float(record.peak_memory.max()),
    )


def _spread(seconds: np.ndarray) -> Spread:
    low, middle, high = np.quantile(np.maximum(seconds, 0.0), (0.1, 0.5, 0.9))
    return Spread(low=low, middle=middle, high=high)


def _measure_link(ranks: int, device: str) -> list[LinkPoint]:
    """Time all-reduces between ranks of this machine."""
    output = start(ranks, ["hpcfed.plan.speeds", device])
    # The last line: launchers may print notices before it.
    found = json.loads(output.strip().splitlines()[-1])
    return [LinkPoint(ranks=ranks, **point) for point in found]


def start(ranks: int, module: Sequence[str]) -> str:
    """Run a Python module on this number of ranks; return what it prints."""
    words = [*launcher("auto")(ranks), sys.executable, "-m", *module]
    # A single rank would take all cores, which it has to share in a full run.
    variables = {"OMP_NUM_THREADS": "1", **environment_of(words)}
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=variables,
            timeout=LIMIT,
        )
    except OSError as error:
        raise UserError(f"cannot start {words[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise UserError(
            f"--calibrate: a short run took more than {LIMIT} s; give a smaller network "
            "or less data"
        ) from None
    if done.returncode:
        reason = failure_line(done.stderr, done.returncode)
        raise UserError(f"--calibrate: a short run failed: {reason}")
    return done.stdout


def failure_line(stderr: str, code: int) -> str:
    """Return the line that says why a run failed: its own, else the last line with a
    letter.

    mpirun frames its own messages with lines of dashes.
    """
    telling = [
        line.strip() for line in stderr.splitlines() if re.search(r"[^\W\d_]", line)
    ]
    own = [line.removeprefix(OWN) for line in telling if line.startswith(OWN)]
    return (own or telling or [f"exit code {code}"])[-1]


def machine_of(device: torch.device, units: int, dtype: torch.dtype) -> MeasuredMachine:
    ceilings = Ceilings.of(device, dtype)
    if accelerator.is_gpu(device):
        properties = accelerator.properties(device)
        name, memory = properties.name, properties.total_memory
    else:
        name = f"{os.uname().machine} core"
        memory = this_machine().memory
    return MeasuredMachine(
        device=name,
        kind=kind_of(device.type),
        units=units,
        memory=memory,
        flops=ceilings.flops,
        bytes_per_second=ceilings.bytes_per_second,
        torch=str(torch.__version__),
    )
