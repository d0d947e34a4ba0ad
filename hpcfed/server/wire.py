"""How messages are sent: a header without tensors, then one buffer per tensor.

The small header is pickled, the large rows are not. In place of each tensor the header
has its shape, so that a receiver knows how many buffers follow.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.link import Link
from hpcfed.runtime.world import World
from hpcfed.server.messages import M, Message


@dataclass(frozen=True)
class _Shape:
    """Replaces a float32 tensor of this shape in a header."""

    sizes: tuple[int, ...]


def send(link: Link, to: int, message: Message) -> None:
    """Send a message to another role's rank; return at once."""
    header, tensors = _pack(message)
    if not tensors:
        link.send(to, header)
        return
    # The link sends a header and one buffer; further buffers go without a header.
    first, *others = tensors
    link.send(to, header, first)
    for tensor in others:
        link.send(to, None, tensor)


def receive(
    link: Link, source: int, *, meanwhile: Callable[[], None] = lambda: None
) -> Any:
    """Wait for the next message of another role's rank; its tensors are on the host.
    Call `meanwhile` again and again until it comes.
    """
    header, rows = link.receive(source, meanwhile=meanwhile)
    tensors: list[Tensor] = []
    for _ in _shapes(header):
        if tensors:
            _, rows = link.receive(source)
        assert rows is not None
        tensors.append(torch.from_numpy(rows))
    return _unpack(header, tensors)


def allgather(collectives: Collectives, request: M) -> list[M]:
    """Return the requests of all workers, in rank order; call it in turn only."""
    header, tensors = _pack(request)
    # One exchange for headers and first tensors. All workers have the same kind of
    # request, and so the same number of tensors.
    first = tensors[0] if tensors else None
    headers, received = [], []
    for other, rows in collectives.allgather_rows(header, first):
        headers.append(other)
        received.append([] if rows is None else [rows])
    for tensor in tensors[1:]:
        gathered = collectives.allgather_rows(None, tensor)
        for worker, (_, rows) in enumerate(gathered):
            assert rows is not None
            received[worker].append(rows)
    requests = []
    for other, theirs in zip(headers, received, strict=True):
        requests.append(_unpack(other, theirs))
    return requests


def bcast(world: World, requests: Sequence[M]) -> list[M]:
    """Return the requests of the first server rank on all server ranks.

    The `requests` of other ranks are ignored.
    """
    headers, buffers = [], []
    for request in requests:
        header, tensors = _pack(request)
        headers.append(header)
        buffers.append(tensors)
    headers = world.role_bcast(headers)
    # The other ranks learn from the headers which buffers to expect.
    if world.role_rank > 0:
        buffers = [_empty_tensors(header) for header in headers]
    received = []
    for header, tensors in zip(headers, buffers, strict=True):
        for tensor in tensors:
            world.role_bcast_array(tensor.numpy())
        received.append(_unpack(header, tensors))
    return received


def on_device(message: M, device: torch.device) -> M:
    """Return the message with its tensors on the device."""
    tensors = message.tensors()
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    return replace(message, **moved)


def _pack(message: Message) -> tuple[Message, list[Tensor]]:
    """Take the tensors out of a message; return its header and the tensors."""
    tensors = message.tensors()
    shapes: dict[str, Any] = {}
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32, f"{name} is {tensor.dtype}"
        shapes[name] = _Shape(tuple(tensor.shape))
    return replace(message, **shapes), list(tensors.values())


def _shapes(header: Message) -> dict[str, _Shape]:
    """Return the names and shapes of the tensors that were taken out."""
    shapes = {}
    for name, value in vars(header).items():
        if isinstance(value, _Shape):
            shapes[name] = value
    return shapes


def _empty_tensors(header: Message) -> list[Tensor]:
    """Return empty tensors to receive those that were taken out."""
    tensors = []
    for shape in _shapes(header).values():
        tensors.append(torch.empty(shape.sizes))
    return tensors


def _unpack(header: Any, tensors: Sequence[Tensor]) -> Any:
    """Put the tensors back into a message."""
    names = _shapes(header)
    fields = dict(zip(names, tensors, strict=True))
    return replace(header, **fields)
