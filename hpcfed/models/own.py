"""A user's network: any torch module that a file, a package or a plugin builds."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hpcfed import plugins
from hpcfed.errors import UserError, unknown
from hpcfed.models import MODELS, hugging_face
from hpcfed.models.apart import keep_apart
from hpcfed.models.blocks import find_blocks, is_large, shortened
from hpcfed.models.frozen import META, freeze, frozen_weights_of, place_of
from hpcfed.models.state import Call, alike, keep_no_buffers, keep_state

_probable: set[str] = set()
"""Networks, by name, whose outputs were probabilities when they were last checked."""


@dataclass(frozen=True)
class Sample:
    """Shapes of a network's input and output, for one sample."""

    shape: tuple[int, ...]
    """(channels, height, width) of an image, (length,) of tokens, or any other."""
    outputs: tuple[int, ...]
    """(classes,), or (length, vocabulary) if every token predicts the next. A network
    may know more tokens than the data has.
    """
    vocabulary: int = 0
    """Tokens are integers below it; 0: inputs are floats."""
    apart: bool = False
    """Whether a row may hold several texts, see `apart.py`."""

    def batch(self, size: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return random inputs, the same at every call."""
        generator = torch.Generator().manual_seed(20)
        if self.vocabulary:
            shape = (size, *self.shape)
            tokens = torch.randint(self.vocabulary, shape, generator=generator)
            # A network that does not know the largest token should fail here.
            tokens.view(-1)[0] = self.vocabulary - 1
            if self.apart and self.shape[0] > 1:
                # In every second row another text begins.
                tokens[::2, self.shape[0] // 2] = ~tokens[::2, self.shape[0] // 2]
            return tokens.to(device)
        values = torch.randn(size, *self.shape, generator=generator)
        return values.to(device, dtype)


def sample_through(network: nn.Module, shape: tuple[int, ...]) -> Sample:
    """Return the input and output shapes of a network of the catalogue."""
    x = Sample(shape, ()).batch(1, device=torch.device("cpu"), dtype=torch.float32)
    # In evaluation mode, where batch norm accepts one sample.
    with torch.no_grad():
        y = copy.deepcopy(network).eval()(x)
    return Sample(shape, tuple(y.shape[1:]))


def find_builder(name: str) -> Callable[..., Any]:
    """Return the class or function that a model's name refers to, or None."""
    if plugins.is_reference(name):
        found = plugins.load_object(name, "model")
    else:
        entries = plugins.installed("models")
        if name not in entries:
            raise unknown("model", name, ("auto", *MODELS, *entries, "FILE.py:NAME"))
        found = plugins.load_installed(entries[name])
    if not callable(found):
        raise UserError(
            f"model {name} is {type(found).__name__}; name a class or a function that "
            "returns a torch.nn.Module"
        )
    builder: Callable[..., Any] = found
    return builder


def load_builder(name: str) -> None:
    """Import what builds a user's network."""
    if not hugging_face.is_hugging_face(name):
        find_builder(name)


def build_own(
    name: str,
    sample: Sample,
    classes: int,
    options: Mapping[str, Any],
    onto: torch.device | None = None,
) -> nn.Module:
    """Build the user's network, and make sure that it takes the data.

    If a builder has parameters `shape` and `classes`, it gets them from the data set,
    unless the options give them. The caller sets torch's seed. `onto` is for networks of
    transformers: a device where the whole network is frozen, in bfloat16.
    """
    if hugging_face.is_hugging_face(name):
        network: Any = hugging_face.load(
            name,
            tokens=sample.vocabulary > 0,
            generates=len(sample.outputs) == 2,
            classes=classes,
            options=options,
            onto=onto,
        )
        if sample.apart:
            keep_apart(network, name, sample.shape[0], sample.vocabulary)
        if onto is not None:
            freeze(network)
        if onto == META:
            keep_no_buffers(network)
        else:
            check_network(network, name, sample)
        return network
    network = construct(name, sample, classes, options)
    check_network(network, name, sample)
    return network


def construct(
    name: str, sample: Sample, classes: int, options: Mapping[str, Any]
) -> nn.Module:
    """Call the builder of a user's network."""
    builder = find_builder(name)
    known = {"shape": sample.shape, "classes": classes}
    arguments = {**_accepted(builder, known), **options}
    with plugins.one_line_of(f"model {name} cannot be built"):
        network = builder(**arguments)
    if not isinstance(network, nn.Module):
        raise UserError(
            f"model {name} returns {type(network).__name__}; it must return a "
            "torch.nn.Module"
        )
    # torch.compile would compile anew for every number of clients and samples.
    plain: nn.Module = getattr(network, "_orig_mod", network)
    if isinstance(plain, torch.jit.ScriptModule | nn.DataParallel):
        raise UserError(
            f"model {name} returns {type(network).__name__}; return the module itself, "
            "without torch.jit or DataParallel around it"
        )
    return plain


def check_drawn_alike(network: nn.Module, again: nn.Module, name: str) -> None:
    """Refuse first weights that another construction from the same seed does not give."""
    theirs = dict((*again.named_parameters(), *again.named_buffers()))
    for tensor_name, tensor in (*network.named_parameters(), *network.named_buffers()):
        other = theirs.get(tensor_name)
        # The first input draws what is still lazy, and may create buffers.
        if other is None or is_lazy(other):
            continue
        if alike(tensor.detach(), other.detach()):
            continue
        raise UserError(
            f"model {name} does not follow from --seed: constructed twice, its "
            f"{tensor_name} is not the same; draw first weights from torch's, numpy's or "
            "Python's own generator, not from one that you make, and set every value"
        )


def _accepted(builder: Callable[..., Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known values for which a builder has parameters."""
    try:
        parameters = inspect.signature(builder).parameters
    except (TypeError, ValueError):
        # Some builtins have no signature.
        return {}
    return {key: value for key, value in known.items() if key in parameters}


def check_network(network: nn.Module, name: str, sample: Sample) -> None:
    """Refuse a network that does not fit the data; mark its constants, and remember it
    for `outputs_probabilities`.
    """
    device, dtype = place_of(network)
    may_train = any(p.requires_grad for p in network.parameters())
    if not may_train and next(frozen_weights_of(network), None) is None:
        raise UserError(f"model {name} has no parameter that training could change")
    for tensor_name, tensor in network.named_parameters():
        if not tensor.is_floating_point():
            raise UserError(f"model {name}: {tensor_name} is {tensor.dtype}, not float")
    # Two samples per call: batch norm refuses one.
    x = sample.batch(4, device=device, dtype=dtype)
    last: list[Tensor] = []

    def call(network: nn.Module, x: Tensor) -> Tensor:
        with plugins.one_line_of(f"model {name} fails on {_said(x, sample)}"):
            y = answers(network(x))
        _check_outputs(y, name, sample)
        last[:] = [y]
        return y

    if any(map(is_lazy, (*network.parameters(), *network.buffers()))):
        _finish_lazy(network, x, call)
    if not _short_keeps_none(network, name, x, call):
        keep_state(network, name, x, call)
    # Another run of this process may have built it by other options.
    _probable.discard(name)
    if _are_probabilities(last[0]):
        _probable.add(name)


def outputs_probabilities(name: str) -> bool:
    """Tell whether a user's network, as last built, ends with a softmax of its own."""
    return name in _probable


def _are_probabilities(y: Tensor) -> bool:
    """Tell whether every row sums to one up to rounding, with nothing below zero."""
    if y.shape[-1] < 2 or not y.is_floating_point():
        return False
    # Each is rounded to its type, and what they are divided by is a sum in float32.
    in_sum = y.shape[-1] * torch.finfo(torch.float32).eps
    rounding = torch.finfo(y.dtype).eps + in_sum
    missed = (y.double().sum(-1) - 1).abs()
    return bool((y >= 0).all() and (missed <= rounding).all())


def _short_keeps_none(network: nn.Module, name: str, x: Tensor, call: Call) -> bool:
    """Tell whether a large network keeps no state, by a few of its blocks; then mark its
    buffers as constants.
    """
    blocks = find_blocks(network) if is_large(network) else None
    if blocks is None:
        return False
    short = shortened(network, blocks, share=True)
    try:
        keep_state(short, name, x, call)
    except UserError:
        # It may need all its blocks; if not, the whole network says what is wrong.
        return False
    if short.state_dict().keys() & dict(short.named_buffers()).keys():
        return False
    keep_no_buffers(network)
    return True


def _check_outputs(y: Any, name: str, sample: Sample) -> None:
    if not isinstance(y, Tensor):
        raise UserError(
            f"model {name}: its forward returns {type(y).__name__}, not a tensor"
        )
    if y.shape[:1] != (2,) or not _serves(tuple(y.shape[1:]), sample.outputs):
        wanted = ", ".join(map(str, ("batch", *sample.outputs)))
        more = " or more tokens" if len(sample.outputs) == 2 else ""
        raise UserError(
            f"model {name} returns [{', '.join(map(str, ('batch', *y.shape[1:])))}]; "
            f"this data needs [{wanted}]{more}"
        )


def _finish_lazy(network: nn.Module, x: Tensor, call: Call) -> None:
    """Let modules that wait for their first input create their tensors."""
    was_training = network.training
    # In evaluation mode, where statistics do not change. Weights are drawn here.
    network.eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        call(network, x[:2])
    network.train(was_training)


def _serves(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Tell whether outputs are as wanted; a network may know more tokens."""
    if len(wanted) != 2 or len(found) != 2:
        return found == wanted
    return found[0] == wanted[0] and found[1] >= wanted[1]


def answers(y: Any) -> Any:
    """Return the outputs of a network; Hugging Face puts them into `logits`."""
    return getattr(y, "logits", y)


def _said(x: Tensor, sample: Sample) -> str:
    kind = f"tokens below {sample.vocabulary}" if sample.vocabulary else "floats"
    return f"{kind} of shape [batch, {', '.join(map(str, x.shape[1:]))}]"
