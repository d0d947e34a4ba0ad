"""How a network is called for many clients: found out by trying, and said with a reason.

Three ways, the fastest first: clients folded into the batch (`stack`), vmap
(`vmapped`), one client after another (`plain`). A network of the user's is tried on two
clients with different weights, in all passes that a run makes: training with and without
what dropout draws, evaluation, different numbers of samples, a single sample. A way
serves if it gives what the plain module gives: outputs, gradients, running statistics.
"""

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hpcfed.errors import UserError, one_line
from hpcfed.models.functional_dropout import FunctionalDropout
from hpcfed.models.kernel_layout import KernelLayout
from hpcfed.models.layout import Layout
from hpcfed.models.own import Sample
from hpcfed.models.plain import PlainNetwork
from hpcfed.models.stack import StackedNetwork
from hpcfed.models.stacked_layers import Batch
from hpcfed.models.vmapped import VmapNetwork
from hpcfed.runtime import randomness

Forward = StackedNetwork | VmapNetwork | PlainNetwork
Mode = Literal["batched", "vmap", "loop"]
SLOTS = 3
"""Samples of a client in the trial."""
SLOTS_OF_BATCH_NORM = 8
"""Samples of a client where there is batch norm. Over images of one pixel it has as many values as
there are samples, and of two it makes signs: some such layers enlarge a rounding of 1e-16
to 1e-5, so that nobody can tell right from wrong. Of eight they enlarge it to 1e-12.
"""


@dataclass(frozen=True)
class Way:
    """How a network is called."""

    forward: Forward
    mode: Mode
    reason: str = ""
    """Why not a faster way; empty for the fastest."""


@dataclass(frozen=True)
class Trial:
    """Two clients that a way is tried on."""

    rows: Tensor
    inputs: Tensor
    """[clients, slots, …]."""
    weights: Tensor
    """[clients, slots, …]: what outputs are multiplied by to make a loss."""
    keys: Tensor
    """[clients]: what dropout draws from."""


@dataclass(frozen=True)
class Pass:
    """A kind of pass that a run makes."""

    said: str
    """What a reason adds of it."""
    training: bool = True
    uneven: bool = False
    """Whether the second client lacks its last sample."""
    single: bool = False
    """Whether clients have one sample each."""
    drops: bool = False
    """Whether dropout draws."""


UNEVEN = Pass("", uneven=True)
EVALUATION = Pass(" in evaluation", training=False)
ALONE = Pass(" for a single sample in evaluation", training=False, single=True)
DROPPING = Pass(" with dropout", drops=True)
SINGLE = Pass(" for a single sample", single=True)


def choose(
    network: nn.Module,
    layout: Layout,
    sample: Sample,
    *,
    mode: Literal["auto", "batched", "vmap", "loop"],
    bf16: bool,
    device: torch.device,
) -> Way:
    """Find the fastest way to call a network that gives what the plain module gives."""
    trial, expected, drops, draws = _begin(network, layout, sample, device)
    plain = PlainNetwork(network, layout, draws=draws, drops=drops, bf16=bf16)
    if draws:
        reason = "it draws random numbers of torch's own, each client's from its key"
        if mode in ("batched", "vmap"):
            raise UserError(f"--engine {mode}: {reason}; use --engine auto or loop")
        return Way(plain, "loop", reason)
    alone = PlainNetwork(network, layout, draws=False, drops=drops)
    expected |= _more_expected(alone, trial, layout)
    reasons = []
    if mode != "vmap":
        stack = partial(StackedNetwork, network, layout, drops=drops)
        failure, contiguous = _tried(stack, trial, layout, expected)
        if not failure:
            way: Mode = "loop" if mode == "loop" else "batched"
            stacked = stack(bf16=bf16, contiguous=contiguous)
            # Bloom's makes a tensor on the host in every pass, for instance.
            asks = _asks_host(stack(contiguous=contiguous), trial, layout)
            stacked.captures = not asks
            return Way(stacked, way)
        reasons.append(failure)
    if mode != "loop":
        make = partial(VmapNetwork, network, layout, drops=drops)
        failure, contiguous = _tried(make, trial, layout, expected)
        if not failure:
            vmapped = make(contiguous=contiguous)
            vmapped.captures = not _asks_host(
                make(contiguous=contiguous), trial, layout
            )
            return Way(vmapped, "vmap", "; ".join(reasons))
        reasons.append(f"by vmap: {failure}")
        if mode in ("batched", "vmap"):
            why = "; ".join(reasons)
            raise UserError(f"--engine {mode}: {why}; use --engine auto or loop")
    plain.captures = not _asks_host(alone, trial, layout)
    return Way(plain, "loop", "; ".join(reasons))


def _begin(
    network: nn.Module, layout: Layout, sample: Sample, device: torch.device
) -> tuple[Trial, "Expected", int, bool]:
    """Return two clients to try on, what the plain network makes of them, how often a
    training pass drops by a function, and whether other random numbers are drawn.
    """
    plain = PlainNetwork(network, layout, draws=False)
    error: Exception | None = None
    # In float64 where the module can: then only rounding separates right from wrong.
    for dtype in (torch.float64, torch.float32):
        trial = _trial(network, layout, sample, device, dtype)
        try:
            return trial, *_drawn(plain, trial, layout)
        except Exception as raised:
            error = raised
    assert error is not None
    raise UserError(f"the model cannot be trained: {one_line(error)}") from error


def _trial(
    network: nn.Module,
    layout: Layout,
    sample: Sample,
    device: torch.device,
    dtype: torch.dtype,
) -> Trial:
    generator = torch.Generator().manual_seed(20)
    row = layout.row(network, dtype=dtype)
    # Another client's weights, not far away: variances must stay positive.
    noise = torch.rand(len(row), generator=generator, dtype=dtype)
    other = row * (1 + 0.1 * noise) + 0.01 * noise
    for e in layout.entries:
        if e.whole is not None:
            # A count or a place in a table: another one might not be any.
            other[e.start : e.stop] = row[e.start : e.stop]
    slots = SLOTS_OF_BATCH_NORM if _has_batch_norm(network) else SLOTS
    inputs = sample.batch(2 * slots, device=device, dtype=dtype)
    if inputs.dim() == 4:
        # As steps gather images.
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    weights = torch.randn(2, slots, *sample.outputs, generator=generator, dtype=dtype)
    return Trial(
        torch.stack([row, other]).to(device),
        inputs.unflatten(0, (2, slots)),
        weights.to(device),
        randomness.client_keys(0, "trial", 0, torch.arange(2, device=device)),
    )


def _has_batch_norm(network: nn.Module) -> bool:
    kind = nn.modules.batchnorm._BatchNorm
    return any(isinstance(module, kind) for module in network.modules())


def _drawn(
    plain: PlainNetwork, trial: Trial, layout: Layout
) -> tuple["Expected", int, bool]:
    """Return what a network gives where nothing is dropped, how often a training pass
    drops by a function, and whether other random numbers are drawn, of torch's own.
    """
    device = trial.rows.device
    expected = {}
    with torch.random.fork_rng(devices=[device] if trial.rows.is_cuda else []):
        # Not by outcomes: what is drawn may change nothing today, as where a layer is
        # skipped now and then.
        before = _generators(device)
        with FunctionalDropout(Batch(), first=0) as caught:
            expected[UNEVEN] = _outcome(plain, trial, layout, UNEVEN, alone=True)
        expected[EVALUATION] = _outcome(plain, trial, layout, EVALUATION, alone=True)
        draws = not torch.equal(before, _generators(device))
    return expected, caught.calls // len(trial.rows), draws


def _generators(device: torch.device) -> Tensor:
    """Return the states of torch's own generators that a network may draw from."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


Outcome = tuple[Tensor, Tensor, Tensor]
"""Outputs of valid slots, gradients of rows, and running statistics afterwards."""
Expected = dict[Pass, Outcome]
"""What the plain network gives."""


def _more_expected(alone: PlainNetwork, trial: Trial, layout: Layout) -> Expected:
    """Return what the plain network makes of the trial in further passes."""
    found = {}
    if alone.random_layers:
        found[DROPPING] = _outcome(alone, trial, layout, DROPPING, alone=True)
    passes = [ALONE]
    if trial.inputs.shape[1] == SLOTS:
        # Elsewhere there is batch norm, and statistics of one sample are hardly any.
        passes.append(SINGLE)
    for of in passes:
        # A network that takes no single sample is not asked for it.
        with suppress(Exception):
            found[of] = _outcome(alone, trial, layout, of, alone=True)
    return found


def _outcome(
    forward: Forward, trial: Trial, layout: Layout, of: Pass, *, alone: bool
) -> Outcome:
    """Make one pass, in training forward and back; `alone`: client after client, without
    padding.
    """
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
                # What padding gives counts nothing.
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


def _asks_host(forward: Forward, trial: Trial, layout: Layout) -> bool:
    """Tell whether a network on a GPU makes the host wait, which no capture allows."""
    if not trial.rows.is_cuda:
        return False
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch remarks that it does not find all; a capture that fails finds the rest.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
        try:
            _pass_once(forward, trial, layout)
        except RuntimeError:
            return True
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return False


def _pass_once(forward: Forward, trial: Trial, layout: Layout) -> None:
    """Pass the first client's samples forward."""
    rows = trial.rows[:1]
    kernel_layout = KernelLayout(layout, rows.device)
    kernel_rows = kernel_layout.zeros(1, rows)
    kernel_layout.load(rows, kernel_rows)
    forward(kernel_layout.views(*kernel_rows), trial.inputs[0], training=True)


def _watched(
    forward: Forward, of_clients: Iterable[Tensor]
) -> AbstractContextManager[object]:
    """Watch a network with folded clients for decisions that it takes for all."""
    if isinstance(forward, VmapNetwork):
        return nullcontext()
    for tensor in of_clients:
        mark_as_clients(tensor)
    return _NoLooks()


def _tried(
    make: Callable[..., Forward], trial: Trial, layout: Layout, expected: Expected
) -> tuple[str, bool]:
    """Try a way; return why it does not serve, or nothing, and whether its images must
    be contiguous.
    """
    with warnings.catch_warnings():
        # Of a way that is only tried, nobody wants to know what torch remarks.
        warnings.simplefilter("ignore")
        return _tried_layouts(make, trial, layout, expected)


def _tried_layouts(
    make: Callable[..., Forward], trial: Trial, layout: Layout, expected: Expected
) -> tuple[str, bool]:
    if trial.inputs.dim() != 5:  # no images
        return _failure(make, trial, layout, expected), False
    # Channels-last is faster, but many a module takes images by Tensor.view.
    for contiguous in (False, True):
        way = partial(make, contiguous=contiguous)
        failure = _failure(way, trial, layout, expected)
        if not failure:
            break
    return failure, contiguous


def _in_float32(trial: Trial) -> Trial:
    inputs = trial.inputs
    return replace(
        trial,
        rows=trial.rows.float(),
        # Tokens stay what they are.
        inputs=inputs.float() if inputs.is_floating_point() else inputs,
        weights=trial.weights.float(),
    )


def _failure(
    make: Callable[[], Forward], trial: Trial, layout: Layout, expected: Expected
) -> str:
    """Try a way; return why it does not serve, or nothing."""
    try:
        forward = make()
        for of, theirs in expected.items():
            found = _outcome(forward, trial, layout, of, alone=False)
            failure = _difference(found, theirs, of)
            if failure:
                return failure
        # One row is judged on the samples of all clients.
        found = _outcome(forward, trial, layout, EVALUATION, alone=True)
        failure = _difference(found, expected[EVALUATION], EVALUATION)
        if failure:
            return failure
        # Some kernels serve float32 alone, and lay images out in their own way.
        for of in (UNEVEN, EVALUATION):
            _outcome(forward, _in_float32(trial), layout, of, alone=False)
    except TypeError as error:
        return str(error)
    # Whatever a module does that a way cannot carry, it raises what it likes.
    except Exception as error:
        return one_line(error).partition(". ")[0][:200]
    return ""


def _difference(ours: Outcome, theirs: Outcome, of: Pass) -> str:
    """Return what differs by more than rounding, or nothing."""
    kinds = ("outputs", "gradients", "running statistics")
    for kind, own, other in zip(kinds, ours, theirs, strict=True):
        if not other.numel():
            continue
        tolerance = 1e-8 if other.dtype == torch.float64 else 1e-2
        scale = other.abs().max().clamp(min=1e-30)
        error_size = (own - other).abs().max() / scale
        if not bool(error_size <= tolerance):
            return f"its {kind}{of.said} would differ from those of one client alone"
    return ""


class _NoLooks(TorchFunctionMode):
    """Refuses to turn what depends on clients into a number of Python's.

    A module that decides by such a number would decide once for all clients. The trial's
    clients may happen to agree, so what they give is not enough to tell. vmap refuses it
    by itself.
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
