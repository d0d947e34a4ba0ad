"""Chooses how a network is called for many clients: by trying, and with a reason.

There are three ways, the fastest first: clients folded into the batch (`stack`), vmap
(`vmapped`), one client after another (`plain`). A user's network is tried on two
clients with different weights, in all passes that a run makes: training with and
without dropout's random numbers, evaluation, different numbers of samples, a single
sample. A way works if it gives the same as the plain module: outputs, gradients,
running statistics.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn

from hpcfed.errors import UserError, one_line
from hpcfed.models.forward import Forward
from hpcfed.models.layout import Layout
from hpcfed.models.own import Sample
from hpcfed.models.plain import PlainNetwork
from hpcfed.models.stack import StackedNetwork
from hpcfed.models.trial import (
    EVALUATION,
    UNEVEN,
    Expected,
    TrialClients,
    asks_host,
    difference,
    drawn,
    in_float32,
    more_expected,
    nudged,
    outcome,
    tolerance,
    trial_clients,
)
from hpcfed.models.vmapped import VmapNetwork

Mode = Literal["batched", "vmap", "loop"]
ROUNDED = 0.2
"""How much bfloat16 may change, beside the largest number: many roundings follow each
other, but an index that is rounded changes all.
"""


@dataclass(frozen=True)
class Way:
    """How a network is called."""

    forward: Forward
    mode: Mode
    reason: str = ""
    """Why not a faster way; empty for the fastest."""


def choose(
    network: nn.Module,
    layout: Layout,
    sample: Sample,
    *,
    mode: Literal["auto", "batched", "vmap", "loop"],
    bf16: bool,
    device: torch.device,
) -> Way:
    """Find the fastest way to call a network that equals the plain module."""
    trial, expected, drops, draws = _begin(network, layout, sample, device)
    plain = PlainNetwork(network, layout, draws=draws, drops=drops, bf16=bf16)
    if draws:
        reason = "it draws random numbers of torch's own, each client's from its key"
        if mode in ("batched", "vmap"):
            raise UserError(f"--engine {mode}: {reason}; use --engine auto or loop")
        return Way(plain, "loop", reason)
    # The reference of all trials. Not `plain`, which may compute in bfloat16.
    alone = PlainNetwork(network, layout, draws=False, drops=drops)
    expected |= more_expected(alone, trial, layout)
    others = outcome(alone, nudged(trial), layout, UNEVEN, alone=True)
    most = tolerance(expected[UNEVEN], others)
    reasons = []
    if mode != "vmap":
        stack = partial(StackedNetwork, network, layout, drops=drops)
        failure, contiguous = _tried(stack, trial, layout, expected, most)
        if not failure:
            way: Mode = "loop" if mode == "loop" else "batched"
            # Built again: the trial was in full precision, so that only mistakes could
            # differ.
            stacked = stack(bf16=bf16, contiguous=contiguous)
            if stacked.over_halves and not _serves(stacked, trial, layout, expected):
                stacked = stack(bf16=bf16, together=False, contiguous=contiguous)
            # Bloom's network, for instance, creates a tensor on the host in every pass.
            asks = asks_host(stack(contiguous=contiguous), trial, layout)
            stacked.captures = not asks
            return Way(stacked, way)
        reasons.append(failure)
    if mode != "loop":
        make = partial(VmapNetwork, network, layout, drops=drops)
        failure, contiguous = _tried(make, trial, layout, expected, most)
        if not failure:
            vmapped = make(contiguous=contiguous)
            vmapped.captures = not asks_host(make(contiguous=contiguous), trial, layout)
            return Way(vmapped, "vmap", "; ".join(reasons))
        reasons.append(f"by vmap: {failure}")
        if mode in ("batched", "vmap"):
            why = "; ".join(reasons)
            raise UserError(f"--engine {mode}: {why}; use --engine auto or loop")
    plain.captures = not asks_host(alone, trial, layout)
    return Way(plain, "loop", "; ".join(reasons))


def _begin(
    network: nn.Module, layout: Layout, sample: Sample, device: torch.device
) -> tuple[TrialClients, Expected, int, bool]:
    """Return two clients for the trial, what the plain network makes of them, how many
    functional dropout calls a training pass makes, and whether it draws other random
    numbers.
    """
    plain = PlainNetwork(network, layout, draws=False)
    error: Exception | None = None
    # In float64 if the module can: then only rounding separates right from wrong.
    for dtype in (torch.float64, torch.float32):
        trial = trial_clients(network, layout, sample, device, dtype)
        try:
            return trial, *drawn(plain, trial, layout)
        except Exception as raised:
            error = raised
    assert error is not None
    raise UserError(f"the model cannot be trained: {one_line(error)}") from error


def _tried(
    make: Callable[..., Forward],
    trial: TrialClients,
    layout: Layout,
    expected: Expected,
    most: float,
) -> tuple[str, bool]:
    """Try a way; return why it fails, or "", and if images must be contiguous."""
    with warnings.catch_warnings():
        # torch's warnings about a way that is only tried would mislead.
        warnings.simplefilter("ignore")
        return _tried_layouts(make, trial, layout, expected, most)


def _tried_layouts(
    make: Callable[..., Forward],
    trial: TrialClients,
    layout: Layout,
    expected: Expected,
    most: float,
) -> tuple[str, bool]:
    if trial.inputs.dim() != 5:  # not images
        return _failure(make, trial, layout, expected, most), False
    # Channels-last is faster, but many modules reshape images by Tensor.view.
    for contiguous in (False, True):
        way = partial(make, contiguous=contiguous)
        failure = _failure(way, trial, layout, expected, most)
        if not failure:
            break
    return failure, contiguous


def _serves(
    forward: Forward, trial: TrialClients, layout: Layout, expected: Expected
) -> bool:
    """Tell whether a way that computes in bfloat16 gives about the same."""
    try:
        for of in (UNEVEN, EVALUATION):
            outputs, *rest = outcome(
                forward, in_float32(trial), layout, of, alone=False
            )
            # A vocabulary may be rounded up.
            known = outputs[..., : expected[of][0].shape[-1]]
            found = (known, rest[0], rest[1])
            if difference(found, expected[of], of, most=ROUNDED):
                return False
    except Exception:
        return False
    return True


def _failure(
    make: Callable[[], Forward],
    trial: TrialClients,
    layout: Layout,
    expected: Expected,
    most: float,
) -> str:
    """Try a way; return why it does not work, or an empty text."""
    try:
        forward = make()
        for of, theirs in expected.items():
            found = outcome(forward, trial, layout, of, alone=False)
            failure = difference(found, theirs, of, most=most)
            if failure:
                return failure
        # One row is judged on the samples of all clients.
        found = outcome(forward, trial, layout, EVALUATION, alone=True)
        failure = difference(found, expected[EVALUATION], EVALUATION, most=most)
        if failure:
            return failure
        # Some kernels only support float32, and lay images out in their own way.
        for of in (UNEVEN, EVALUATION):
            outcome(forward, in_float32(trial), layout, of, alone=False)
    except TypeError as error:
        return str(error)
    # If a way does not support what a module does, it may raise anything.
    except Exception as error:
        return one_line(error).partition(". ")[0][:200]
    return ""
