"""How a network is called for many clients: found out by trying, and said with a reason.

Three ways, the fastest first: clients folded into the batch (`stack`), vmap
(`vmapped`), one client after another (`plain`). A network of the user's is tried on two
clients with different weights and different numbers of samples. A way serves if it
gives what the plain module gives: outputs, gradients, running statistics.
"""

import copy
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hpcfed.errors import UserError, one_line
from hpcfed.models.kernel_layout import KernelLayout
from hpcfed.models.layout import Layout
from hpcfed.models.own import Sample
from hpcfed.models.plain import PlainNetwork
from hpcfed.models.stack import StackedNetwork
from hpcfed.models.vmapped import VmapNetwork

Forward = StackedNetwork | VmapNetwork | PlainNetwork
Mode = Literal["batched", "vmap", "loop"]
SLOTS = 3
"""Samples of the first client in the trial; the second has one fewer."""


@dataclass(frozen=True)
class Way:
    """How a network is called."""

    forward: Forward
    mode: Mode
    reason: str = ""
    """Why not a faster way; empty for the fastest."""


@dataclass(frozen=True)
class Trial:
    """Two clients that a way is tried on, and what the plain network makes of them."""

    rows: Tensor
    inputs: Tensor
    """[clients · slots, …]; the last slot of the second client holds no sample."""
    valid: Tensor
    weights: Tensor
    """What outputs are multiplied by to make a loss."""


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
    trial, draws = _begin(network, layout, sample, device)
    if draws:
        reason = "it draws random numbers of torch's own, each client's from its key"
        if mode in ("batched", "vmap"):
            raise UserError(f"--engine {mode}: {reason}; use --engine auto or loop")
        return Way(PlainNetwork(network, layout, draws=True, bf16=bf16), "loop", reason)
    silent = _without_dropout(network)
    expected = _outcome(
        PlainNetwork(silent, layout, draws=False), trial, layout, alone=True
    )
    reasons = []
    if mode != "vmap":
        failure, contiguous = _tried(
            partial(StackedNetwork, silent, layout), trial, layout, expected
        )
        if not failure:
            way: Mode = "loop" if mode == "loop" else "batched"
            stacked = StackedNetwork(network, layout, bf16=bf16, contiguous=contiguous)
            return Way(stacked, way)
        reasons.append(failure)
    if mode != "loop":
        failure, contiguous = _tried(
            partial(VmapNetwork, silent, layout), trial, layout, expected
        )
        if not failure:
            vmapped = VmapNetwork(network, layout, contiguous=contiguous)
            vmapped.captures = not _asks_host(
                VmapNetwork(silent, layout, contiguous=contiguous), trial, layout
            )
            return Way(vmapped, "vmap", "; ".join(reasons))
        reasons.append(f"by vmap: {failure}")
        if mode in ("batched", "vmap"):
            why = "; ".join(reasons)
            raise UserError(f"--engine {mode}: {why}; use --engine auto or loop")
    plain = PlainNetwork(network, layout, draws=False, bf16=bf16)
    alone = PlainNetwork(silent, layout, draws=False)
    plain.captures = not _asks_host(alone, trial, layout)
    return Way(plain, "loop", "; ".join(reasons))


def _begin(
    network: nn.Module, layout: Layout, sample: Sample, device: torch.device
) -> tuple[Trial, bool]:
    """Return two clients to try on, and whether the network draws random numbers."""
    silent = _without_dropout(network)
    plain = PlainNetwork(silent, layout, draws=False)
    error: Exception | None = None
    # In float64 where the module can: then only rounding separates right from wrong.
    for dtype in (torch.float64, torch.float32):
        trial = _trial(network, layout, sample, device, dtype)
        try:
            first, again = [
                _seeded_outputs(plain, trial, layout, seed) for seed in (1, 2)
            ]
        except Exception as raised:
            error = raised
            continue
        return trial, not torch.equal(first, again)
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
    inputs = sample.batch(2 * SLOTS, device=device, dtype=dtype)
    if inputs.dim() == 4:
        # As steps gather images.
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    valid = torch.ones(2, SLOTS, dtype=torch.bool)
    valid[1, -1] = False
    weights = torch.randn(2 * SLOTS, *sample.outputs, generator=generator, dtype=dtype)
    weights[-1] = 0
    return Trial(
        torch.stack([row, other]).to(device),
        inputs,
        valid.to(device),
        weights.to(device),
    )


def _seeded_outputs(
    plain: PlainNetwork, trial: Trial, layout: Layout, seed: int
) -> Tensor:
    devices = [trial.rows.device] if trial.rows.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        return _outcome(plain, trial, layout, alone=True)[0]


def _without_dropout(network: nn.Module) -> nn.Module:
    """Return a copy whose dropout layers drop nothing; their draws are tested apart."""
    copied = copy.deepcopy(network)
    for module in copied.modules():
        if type(module) is nn.Dropout:
            module.p = 0.0
    return copied


Outcome = tuple[Tensor, Tensor, Tensor]
"""Outputs of valid slots, gradients of rows, and running statistics afterwards."""


def _outcome(forward: Forward, trial: Trial, layout: Layout, *, alone: bool) -> Outcome:
    """Make one pass forward and back; `alone`: client after client, without padding."""
    kernel_layout = KernelLayout(layout, trial.rows.device)
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
            if e.trainable:
                leaves.append(tensors[e.name].requires_grad_())
        valid = trial.valid[clients]
        inputs = trial.inputs.unflatten(0, (2, SLOTS))[clients]
        weights = trial.weights.unflatten(0, (2, SLOTS))[clients]
        if alone:
            inputs, weights = inputs[valid], weights[valid]
            y = forward(tensors, inputs, training=True)
            valid_outputs = y
        else:
            inputs, weights = inputs.flatten(0, 1), weights.flatten(0, 1)
            with _watched(forward, [inputs, *tensors.values()]):
                y = forward(tensors, inputs, training=True, valid=valid)
            valid_outputs = y[valid.flatten()]
        found = torch.autograd.grad((y * weights).sum(), leaves, allow_unused=True)
        forward.join()
        outputs.append(valid_outputs.detach())
        flat = []
        for leaf, gradient in zip(leaves, found, strict=True):
            missing = torch.zeros_like(leaf) if gradient is None else gradient
            flat.append(missing.reshape(len(rows), -1))
        gradients.append(torch.cat(flat, 1))
        statistics.append(kernel_rows[1])
    return torch.cat(outputs), torch.cat(gradients), torch.cat(statistics)


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
    forward(kernel_layout.views(*kernel_rows), trial.inputs[:SLOTS], training=True)


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
    make: Callable[..., Forward], trial: Trial, layout: Layout, expected: Outcome
) -> tuple[str, bool]:
    """Try a way; return why it does not serve, or nothing, and whether its images must
    be contiguous.
    """
    if trial.inputs.dim() != 4:  # no images
        return _failure(make, trial, layout, expected), False
    # Channels-last is faster, but many a module takes images by Tensor.view.
    for contiguous in (False, True):
        way = partial(make, contiguous=contiguous)
        failure = _failure(way, trial, layout, expected)
        if not failure:
            # Convolutions of our own serve float32 alone.
            _, failure = _attempted(way, _in_float32(trial), layout)
        if not failure:
            break
    return failure, contiguous


def _in_float32(trial: Trial) -> Trial:
    return replace(
        trial,
        rows=trial.rows.float(),
        inputs=trial.inputs.float(),
        weights=trial.weights.float(),
    )


def _failure(
    make: Callable[[], Forward], trial: Trial, layout: Layout, expected: Outcome
) -> str:
    """Try a way; return why it does not serve, or nothing."""
    found, failure = _attempted(make, trial, layout)
    if found is None:
        return failure
    tolerance = 1e-8 if trial.rows.dtype == torch.float64 else 1e-2
    kinds = ("outputs", "gradients", "running statistics")
    for kind, ours, theirs in zip(kinds, found, expected, strict=True):
        if not theirs.numel():
            continue
        scale = theirs.abs().max().clamp(min=1e-30)
        error_size = (ours - theirs).abs().max() / scale
        if not bool(error_size <= tolerance):
            return f"its {kind} would differ from those of one client alone"
    return ""


def _attempted(
    make: Callable[[], Forward], trial: Trial, layout: Layout
) -> tuple[Outcome | None, str]:
    """Return what a way gives, or None and what it raises."""
    try:
        return _outcome(make(), trial, layout, alone=False), ""
    except TypeError as error:
        return None, str(error)
    # Whatever a module does that a way cannot carry, it raises what it likes.
    except Exception as error:
        return None, one_line(error).partition(". ")[0][:200]


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
