"""Chooses how a network is called for many clients: by trying, and with a reason.

There are three ways, the fastest first: clients folded into the batch (`stack`), vmap
(`vmapped`), one client after another (`plain`). A user's network is tried on two
clients with different weights, in all passes that a run makes: training with and
without dropout's random numbers, evaluation, different numbers of samples, a single
sample. A way works if it gives the same as the plain module: outputs, gradients,
running statistics. A large network is tried with a few of its blocks.
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import nn

from hpcfed.errors import UserError, one_line
from hpcfed.models.blocks import (
    EACH,
    Blocks,
    find_blocks,
    is_large,
    is_of_transformers,
    shortened,
)
from hpcfed.models.forward import Forward
from hpcfed.models.frozen import own_copies
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
    drops_out,
    in_float32,
    is_causal,
    more_expected,
    nudged,
    outcome,
    tolerance,
    trial_clients,
)
from hpcfed.models.vmapped import VmapNetwork
from hpcfed.runtime import accelerator

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


@dataclass(frozen=True)
class _Found:
    """What a trial has found out."""

    kind: Literal["stack", "vmap", "plain"]
    captures: bool
    """Whether a step on a GPU can be captured and replayed."""
    reason: str = ""
    contiguous: bool = False
    together: bool = True
    """Whether a frozen network may compute in bfloat16 for all clients."""
    draws: bool = False
    """Whether the network draws random numbers of torch's own."""
    drops: int = 0
    """Functional dropout calls in a training pass."""
    causal: bool = False
    """Whether outputs at the first positions of texts depend on these alone."""


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
    try_out = partial(_tried_out, sample=sample, mode=mode, bf16=bf16, device=device)
    found = None
    blocks = find_blocks(network) if is_large(network) else None
    if blocks is not None:
        found = _tried_short(network, layout, sample, device, blocks, try_out)
    if found is None:
        shared = own_copies(network)
        # With weights of its own: a trial changes their type.
        own = copy.deepcopy(network, shared) if shared else network
        found = try_out(own, layout)
    if accelerator.is_gpu(device):
        # Stacks are as large as free memory allows.
        accelerator.return_memory()
    drops = found.drops
    forward: Forward
    if found.kind == "stack":
        forward = StackedNetwork(
            network,
            layout,
            # The trial was in full precision, so that only mistakes could differ.
            bf16=bf16,
            together=found.together,
            contiguous=found.contiguous,
            drops=drops,
        )
    elif found.kind == "vmap":
        forward = VmapNetwork(network, layout, contiguous=found.contiguous, drops=drops)
    else:
        forward = PlainNetwork(
            network, layout, draws=found.draws, drops=drops, bf16=bf16
        )
    forward.captures = found.captures
    if is_of_transformers(network):
        # Their passes differ between architectures and versions; the trial is one pass.
        forward.capture_may_fail = True
    forward.causal = found.causal
    forward.causal_in_training = found.causal and not drops and not drops_out(network)
    way: Mode = "loop"
    if found.kind == "vmap":
        way = "vmap"
    elif found.kind == "stack" and mode != "loop":
        way = "batched"
    return Way(forward, way, found.reason)


def _tried_short(
    network: nn.Module,
    layout: Layout,
    sample: Sample,
    device: torch.device,
    blocks: Blocks,
    try_out: Callable[[nn.Module, Layout], _Found],
) -> _Found | None:
    """Try a network with fewer blocks; None if that does not tell enough about it."""
    frozen = {name for name, p in network.named_parameters() if not p.requires_grad}
    send_frozen = any(e.name in frozen for e in layout.entries)

    def short(each: int) -> tuple[nn.Module, Layout]:
        made = shortened(network, blocks, each)
        return made, Layout.of(made, send_frozen=send_frozen)

    try:
        found = try_out(*short(EACH))
        if not found.drops:
            return found
        if not blocks.alike:
            return None
        # Every block makes as many calls.
        of_block = found.drops - _begin(*short(EACH - 1), sample, device)[2]
    except UserError:
        # The network may need all its blocks; if not, the whole one says what is wrong.
        return None
    more = len(blocks.kinds) - EACH
    return replace(found, drops=found.drops + more * of_block)


def _tried_out(
    network: nn.Module,
    layout: Layout,
    *,
    sample: Sample,
    mode: Literal["auto", "batched", "vmap", "loop"],
    bf16: bool,
    device: torch.device,
) -> _Found:
    trial, expected, drops, draws = _begin(network, layout, sample, device)
    if draws:
        reason = "it draws random numbers of torch's own, each client's from its key"
        if mode in ("batched", "vmap"):
            raise UserError(f"--engine {mode}: {reason}; use --engine auto or loop")
        # Seeding happens on the host, which cannot be captured.
        return _Found("plain", False, reason, draws=True, drops=drops)
    # The reference of all trials. Never in bfloat16.
    alone = PlainNetwork(network, layout, draws=False, drops=drops)
    expected |= more_expected(alone, trial, layout)
    others = outcome(alone, nudged(trial), layout, UNEVEN, alone=True)
    most = tolerance(expected[UNEVEN], others)
    causal = is_causal(alone, trial, layout, expected[EVALUATION], most)
    reasons = []
    if mode != "vmap":
        stack = partial(StackedNetwork, network, layout, drops=drops)
        failure, contiguous = _tried(stack, trial, layout, expected, most)
        if not failure:
            halved = stack(bf16=bf16, contiguous=contiguous)
            together = not halved.over_halves or _serves(
                halved, trial, layout, expected
            )
            # Bloom's network, for instance, creates a tensor on the host in every pass.
            asks = asks_host(stack(contiguous=contiguous), trial, layout)
            return _Found(
                "stack",
                not asks,
                contiguous=contiguous,
                together=together,
                drops=drops,
                causal=causal,
            )
        reasons.append(failure)
    if mode != "loop":
        make = partial(VmapNetwork, network, layout, drops=drops)
        failure, contiguous = _tried(make, trial, layout, expected, most)
        if not failure:
            asks = asks_host(make(contiguous=contiguous), trial, layout)
            reason = "; ".join(reasons)
            return _Found(
                "vmap",
                not asks,
                reason,
                contiguous=contiguous,
                drops=drops,
                causal=causal,
            )
        reasons.append(f"by vmap: {failure}")
        if mode in ("batched", "vmap"):
            why = "; ".join(reasons)
            raise UserError(f"--engine {mode}: {why}; use --engine auto or loop")
    asks = asks_host(alone, trial, layout)
    reason = "; ".join(reasons)
    return _Found("plain", not asks, reason, drops=drops, causal=causal)


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
