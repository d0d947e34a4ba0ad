"""Two clients with different weights, to try ways of calling a network on."""

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hpcfed.models.forward import Forward, FunctionalDropout
from hpcfed.models.kernel_layout import KernelLayout
from hpcfed.models.layout import Layout
from hpcfed.models.own import Sample
from hpcfed.models.plain import PlainNetwork
from hpcfed.models.stacked_layer import Batch
from hpcfed.models.vmapped import VmapNetwork
from hpcfed.runtime import accelerator, randomness

SLOTS = 3
"""Samples of a client in the trial."""
NUDGE = 1e-10
"""How much weights differ to find out how much a network rounds."""
SLOTS_OF_BATCH_NORM = 8
"""Samples of a client if there is batch norm. For images of one pixel, batch norm has
as many values as samples, and it turns two values into signs: some such layers enlarge
a rounding of 1e-16 to 1e-5, which hides a wrong result. With eight they enlarge it to
1e-12.
"""


@dataclass(frozen=True)
class TrialClients:
    """Two clients that a way is tried on."""

    rows: Tensor
    inputs: Tensor
    """[clients, slots, …]."""
    weights: Tensor
    """[clients, slots, …]: factors of the outputs, whose sum is the loss."""
    keys: Tensor
    """[clients]: keys for dropout."""


@dataclass(frozen=True)
class Pass:
    """A kind of pass that a run makes."""

    said: str
    """What a reason adds about it."""
    training: bool = True
    uneven: bool = False
    """Whether the second client lacks its last sample."""
    single: bool = False
    """Whether clients have one sample each."""
    drops: bool = False
    """Whether dropout is active."""


UNEVEN = Pass("", uneven=True)
EVALUATION = Pass(" in evaluation", training=False)
ALONE = Pass(" for a single sample in evaluation", training=False, single=True)
DROPPING = Pass(" with dropout", drops=True)
SINGLE = Pass(" for a single sample", single=True)


Outcome = tuple[Tensor, Tensor, Tensor]
"""Outputs of valid slots, gradients of rows, and running statistics afterwards."""
Expected = dict[Pass, Outcome]
"""What the plain network gives."""


def trial_clients(
    network: nn.Module,
    layout: Layout,
    sample: Sample,
    device: torch.device,
    dtype: torch.dtype,
) -> TrialClients:
    """Return the network's own client, and one with slightly other weights."""
    generator = torch.Generator().manual_seed(20)
    row = layout.row(network, dtype=dtype)
    # Only slightly different weights: variances must stay positive.
    noise = torch.rand(len(row), generator=generator, dtype=dtype)
    other = row * (1 + 0.1 * noise) + 0.01 * noise
    for e in layout.entries:
        if e.whole is not None:
            # A count or an index into a table: another number might be invalid.
            other[e.start : e.stop] = row[e.start : e.stop]
    slots = SLOTS_OF_BATCH_NORM if _has_batch_norm(network) else SLOTS
    inputs = sample.batch(2 * slots, device=device, dtype=dtype)
    if inputs.dim() == 4:
        # Channels-last, as in the images that steps gather.
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    weights = torch.randn(2, slots, *sample.outputs, generator=generator, dtype=dtype)
    return TrialClients(
        torch.stack([row, other]).to(device),
        inputs.unflatten(0, (2, slots)),
        weights.to(device),
        randomness.client_keys(0, "trial", 0, torch.arange(2, device=device)),
    )


def _has_batch_norm(network: nn.Module) -> bool:
    kind = nn.modules.batchnorm._BatchNorm
    return any(isinstance(module, kind) for module in network.modules())


def in_float32(trial: TrialClients) -> TrialClients:
    """Return the same clients in single precision."""
    inputs = trial.inputs
    return replace(
        trial,
        rows=trial.rows.float(),
        # Tokens stay integers.
        inputs=inputs.float() if inputs.is_floating_point() else inputs,
        weights=trial.weights.float(),
    )


def drawn(
    plain: PlainNetwork, trial: TrialClients, layout: Layout
) -> tuple[Expected, int, bool]:
    """Return what a network gives without dropout, how many functional dropout calls a
    training pass makes, and whether it draws other random numbers from torch.
    """
    device = trial.rows.device
    expected = {}
    with accelerator.keeping_draws(device):
        # Not by comparing outcomes: a draw may happen to change nothing, for example if
        # a layer is only skipped now and then.
        before = _generators(device)
        with FunctionalDropout(Batch(), first=0) as caught:
            expected[UNEVEN] = outcome(plain, trial, layout, UNEVEN, alone=True)
        expected[EVALUATION] = outcome(plain, trial, layout, EVALUATION, alone=True)
        draws = not torch.equal(before, _generators(device))
    return expected, caught.calls // len(trial.rows), draws


def _generators(device: torch.device) -> Tensor:
    """Return the states of torch's own generators that a network may draw from."""
    states = [torch.get_rng_state()]
    if accelerator.is_gpu(device):
        states.append(accelerator.generator_state(device))
    return torch.cat(states)


def more_expected(alone: PlainNetwork, trial: TrialClients, layout: Layout) -> Expected:
    """Return what the plain network makes of the trial in further passes."""
    found = {}
    if alone.random_layers:
        found[DROPPING] = outcome(alone, trial, layout, DROPPING, alone=True)
    passes = [ALONE]
    if trial.inputs.shape[1] == SLOTS:
        # Not with batch norm, where statistics of one sample are meaningless.
        passes.append(SINGLE)
    for of in passes:
        # Skip this for a network that does not accept a single sample.
        with suppress(Exception):
            found[of] = outcome(alone, trial, layout, of, alone=True)
    return found


def outcome(
    forward: Forward, trial: TrialClients, layout: Layout, of: Pass, *, alone: bool
) -> Outcome:
    """Run one pass, in training with its backward; `alone`: client by client."""
    kernel_layout = KernelLayout(layout, trial.rows.device)
    slots = 1 if of.single else trial.inputs.shape[1]
    valid = torch.ones(2, slots, dtype=torch.bool, device=trial.rows.device)
    if of.uneven:
        valid[1, -1] = False
    numbers = torch.arange(forward.random_layers, device=trial.rows.device)
    all_keys = randomness.child_keys(trial.keys, numbers[:, None])
    outputs, gradients, statistics = [], [], []
    stacks = [slice(0, 1), slice(1, 2)] if alone else [slice(0, 2)]
    for clients in stacks:
        rows = trial.rows[clients]
        kernel_rows = kernel_layout.zeros(len(rows), rows)
        kernel_layout.load(rows, kernel_rows)
        tensors = {}
        for name, view in kernel_layout.views(*kernel_rows).items():
            tensors[name] = view.detach()
        leaves = []
        for e in layout.entries:
            if e.trainable and of.training:
                leaves.append(tensors[e.name].requires_grad_())
        own = valid[clients]
        inputs = trial.inputs[clients, :slots]
        weights = trial.weights[clients, :slots]
        keys = all_keys[:, clients] if of.drops else None
        with torch.set_grad_enabled(of.training):
            if alone:
                inputs, weights = inputs[own], weights[own]
                y = forward(tensors, inputs, training=of.training, keys=keys)
            else:
                inputs, weights = inputs.flatten(0, 1), weights.flatten(0, 1)
                given = own if of.uneven else None
                with _watched(forward, [inputs, *tensors.values()]):
                    y = forward(
                        tensors, inputs, training=of.training, valid=given, keys=keys
                    )
                # Ignore the results of padding.
                y, weights = y[own.flatten()], weights[own.flatten()]
        outputs.append(y.detach())
        statistics.append(kernel_rows[1])
        if not of.training:
            continue
        # A network may know more tokens than the data has.
        loss = (y[..., : weights.shape[-1]] * weights).sum()
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        forward.join()
        flat = []
        for leaf, gradient in zip(leaves, found, strict=True):
            missing = torch.zeros_like(leaf) if gradient is None else gradient
            flat.append(missing.reshape(len(rows), -1))
        gradients.append(torch.cat(flat, 1))
    of_rows = torch.cat(gradients) if gradients else trial.rows[:, :0]
    return torch.cat(outputs), of_rows, torch.cat(statistics)


def nudged(trial: TrialClients) -> TrialClients:
    """Return the same clients, with weights that float32 could not tell apart."""
    return replace(trial, rows=trial.rows * (1 + NUDGE))


def tolerance(theirs: Outcome, others: Outcome) -> float:
    """Return how much a way may differ from the plain network, which gives `theirs`, and
    `others` for nudged clients.

    In float64 that is little. But a network may round to float32 inside, as norms of
    language models do: then the last bits of its weights decide about larger ones. The
    nudge is larger than rounding in float64, and changes more of these.
    """
    if theirs[0].dtype != torch.float64:
        return 1e-2
    noise = [0.0]
    for own, other in zip(theirs, others, strict=True):
        if other.numel():
            noise.append(_difference(own, other))
    return min(max(1e-8, 3 * max(noise)), 1e-4)


def difference(ours: Outcome, theirs: Outcome, of: Pass, *, most: float) -> str:
    """Return what differs by more than this, beside the largest number; or an empty
    text.
    """
    kinds = ("outputs", "gradients", "running statistics")
    for kind, own, other in zip(kinds, ours, theirs, strict=True):
        if not other.numel():
            continue
        # Not `>`: NaN differs.
        if not _difference(own, other) <= most:
            return f"its {kind}{of.said} would differ from those of one client alone"
    return ""


def _difference(own: Tensor, other: Tensor) -> float:
    scale = other.abs().max().clamp(min=1e-30)
    return float((own - other).abs().max() / scale)


def drops_out(network: nn.Module) -> bool:
    """Tell whether a layer drops anything in training."""
    kind = nn.modules.dropout._DropoutNd
    return any(isinstance(m, kind) and m.p > 0 for m in network.modules())


def is_causal(
    plain: PlainNetwork,
    trial: TrialClients,
    layout: Layout,
    expected: Outcome,
    most: float,
) -> bool:
    """Tell whether outputs at the first positions of texts depend on these alone, so
    that a pass over texts without their ends gives the same; `expected` is what
    evaluation gives of whole ones.
    """
    # Tokens [clients, slots, …, length] that all have an output. Statistics that clients
    # keep may be of anything.
    texts = trial.weights.dim() == 4 and not trial.inputs.is_floating_point()
    if not texts or expected[2].numel():
        return False
    full = trial.inputs.shape[-1]
    for length in {-(-full // 4), full - 1} - {0}:
        shorter = replace(
            trial,
            inputs=trial.inputs[..., :length].contiguous(),
            weights=trial.weights[:, :, :length],
        )
        try:
            outputs, *_ = outcome(plain, shorter, layout, EVALUATION, alone=True)
        # A network may take only texts of its full length.
        except Exception:
            return False
        theirs = expected[0][:, :length]
        if outputs.shape != theirs.shape or not _difference(outputs, theirs) <= most:
            return False
    return True


def asks_host(forward: Forward, trial: TrialClients, layout: Layout) -> bool:
    """Tell whether a network on a GPU makes the host wait, which prevents a capture."""
    if not accelerator.is_gpu(trial.rows.device):
        return False
    # The first pass moves constants from the host, and compiles kernels.
    _pass_once(forward, trial, layout)
    with warnings.catch_warnings():
        # torch warns that it does not find all cases; a failing capture finds the rest.
        warnings.simplefilter("ignore")
        try:
            with accelerator.refusing_to_wait(trial.rows.device):
                _pass_once(forward, trial, layout)
        except RuntimeError:
            return True
    return False


def _pass_once(forward: Forward, trial: TrialClients, layout: Layout) -> None:
    """Pass the first client's samples forward."""
    rows = trial.rows[:1]
    kernel_layout = KernelLayout(layout, rows.device)
    kernel_rows = kernel_layout.zeros(1, rows)
    kernel_layout.load(rows, kernel_rows)
    forward(kernel_layout.views(*kernel_rows), trial.inputs[0], training=True)


def _watched(
    forward: Forward, of_clients: Iterable[Tensor]
) -> AbstractContextManager[object]:
    """Refuse, within the block, a decision that is made once for all clients."""
    if isinstance(forward, VmapNetwork):
        return nullcontext()
    for tensor in of_clients:
        mark_as_clients(tensor)
    return _NoLooks()


class _NoLooks(TorchFunctionMode):
    """Refuses to convert a value that depends on clients to a Python number.

    A module that decides by such a number would decide once for all clients. The
    trial's clients may happen to agree, so comparing results is not enough. vmap
    refuses it by itself.
    """

    LOOKS = ("__bool__", "__float__", "__int__", "__index__", "item", "tolist", "numpy")

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        inputs = torch.utils._pytree.tree_leaves((args, kwargs))
        of_clients = any(map(_depends_on_clients, inputs))
        name = getattr(func, "__name__", "")
        if of_clients and name in self.LOOKS:
            raise TypeError(f"it looks at its numbers by Tensor.{name}")
        found = func(*args, **(kwargs or {}))
        if of_clients:
            for output in torch.utils._pytree.tree_leaves(found):
                mark_as_clients(output)
        return found


def mark_as_clients(tensor: object) -> None:
    """Remember that a tensor depends on clients' weights or samples."""
    if isinstance(tensor, Tensor):
        tensor.__dict__["of_clients"] = True


def _depends_on_clients(tensor: object) -> bool:
    if not isinstance(tensor, Tensor):
        return False
    return tensor.requires_grad or "of_clients" in tensor.__dict__
