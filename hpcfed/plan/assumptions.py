"""What a plan assumes if nothing was measured, or other work than that of the run."""

from dataclasses import replace
from math import inf

import torch

from hpcfed.clients.stacks import CPU_ACTIVATIONS, MATRICES, floats_of_client
from hpcfed.federation.training import FLOPS
from hpcfed.options import Settings
from hpcfed.plan.constants import (
    Calibration,
    MeasuredMachine,
    MeasuredWork,
    RoundPoint,
    Spread,
)
from hpcfed.plan.rounds import samples_and_rows
from hpcfed.plan.work import (
    FLOAT,
    FORWARD_AND_BACKWARD,
    described_footprint,
    local_work,
)
from hpcfed.runtime import accelerator

UNMEASURED = {"cpu": 5e9, "cuda": 2e13}
"""FLOP/s assumed if nothing was measured; only an order of magnitude."""
GUESSED = 4.0
"""The factor by which a plan without calibration may be off, either way."""
ROOM = 80e9
"""Bytes of a GPU's memory."""
OTHER_WORK = 1.5
"""The factor by which a plan may be off if it was calibrated with another network."""
STEP = {"cpu": 1e-3, "cuda": 3e-4}
"""Seconds of a local step beyond its arithmetic."""
ROUND = 2e-3
"""Seconds of a round besides training."""
PROCESS = 500 * 2**20
"""Bytes of a process before its first client."""
COPIES = {"cpu": 1e10, "cuda": 2e12}
"""Bytes per second that a device copies."""


def assumed(settings: Settings, work: MeasuredWork) -> Calibration:
    """Make constants by counting: arithmetic at a typical speed, and rows in memory."""
    config = settings.config
    on_gpu = config.device != "cpu"
    if config.device == "auto":
        on_gpu = accelerator.kind() is not None
    kind = "cuda" if on_gpu else "cpu"
    flops = UNMEASURED[kind]
    in_round, judged = local_work(settings)
    # Seconds of a client's step, and of its training before an evaluation.
    client_step = in_round.flops / max(1.0, in_round.steps) / flops
    finetuning = judged.flops / flops
    # A forward pass over about as much data as a step.
    forward = FLOPS * work.training * work.batch_size / flops / FORWARD_AND_BACKWARD
    # Only these hosted clients are judged.
    share = (config.evaluate_clients or config.clients) / config.clients
    in_flight = work.batch_size * work.activations
    each = FLOAT * floats_of_client(columns=work.columns, activations=in_flight)
    if kind == "cpu":
        # A stack's activations are limited, however many clients there are.
        each = FLOAT * MATRICES * work.columns
    base = float(PROCESS) if kind == "cuda" else PROCESS + 12.0 * CPU_ACTIVATIONS
    most = inf
    over = described_footprint(config, kind)
    if over is not None:
        # All clients share a large frozen network, and train as many as fit at a time.
        base += over.base
        if kind == "cuda":
            each = over.client
            fit = replace(over, free=max(0.0, ROOM - base)).clients_fit
            most = max(1.0, float(int(fit)))
    points = []
    # The last point separates the evaluation of trained rows from that of all hosted
    # clients.
    for clients, hosted in ((10, 10), (1000, 1000), (10, 1000)):
        train = STEP[kind] + client_step * clients
        evaluate = STEP[kind] / 3 + forward * clients
        evaluate += STEP[kind] * judged.steps + share * hosted * (forward + finetuning)
        points.append(
            RoundPoint(
                ranks=1,
                clients=clients,
                hosted=hosted,
                longest=1.0,
                steps=clients,
                train=Spread.exactly(train),
                rest=Spread.exactly(ROUND),
                evaluate=evaluate,
                memory=base + each * min(clients, most) + work.client_bytes * hosted,
            )
        )
    return Calibration(
        made="",
        machine=MeasuredMachine(
            device=f"a {'GPU' if on_gpu else 'core'} of {flops / 1e9:g} GFLOP/s",
            kind="cuda" if on_gpu else "cpu",
            units=1,
            memory=ROOM if on_gpu else 0.0,
            flops=flops,
            bytes_per_second=COPIES[kind],
            torch=str(torch.__version__),
        ),
        work=work,
        rounds=tuple(points),
    )


def scaled(constants: Calibration, work: MeasuredWork) -> Calibration:
    """Return constants for other work: time scales by arithmetic, memory by columns."""
    before = constants.work
    of_sample = work.training / before.training
    of_step = of_sample * work.batch_size / before.batch_size
    samples = 1.0
    # If images differ in size, their bytes say nothing about their number.
    if of_sample == 1 and before.client_bytes:
        samples = work.client_bytes / before.client_bytes
    rows = work.columns / before.columns
    besides = [
        max(0.0, point.memory - samples_and_rows(before, point))
        for point in constants.rounds
    ]
    # The memory of a process without clients stays the same.
    least = min(besides)
    points = []
    for point, held in zip(constants.rounds, besides, strict=True):
        in_training = (held - least) * rows
        change = {
            "train": Spread(
                low=point.train.low * of_step,
                middle=point.train.middle * of_step,
                high=point.train.high * of_step,
            ),
            "evaluate": point.evaluate * of_sample * samples,
            "memory": least + in_training + samples_and_rows(work, point),
        }
        points.append(point.model_copy(update=change))
    return constants.model_copy(update={"rounds": tuple(points), "work": work})
