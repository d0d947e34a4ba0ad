"""How messages travel: without their tensors, each of which gets a buffer of its own.

A small header is pickled, and large rows are not. Where a message has a tensor, its
header has the tensor's shape, so that a receiver knows how many buffers follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.link import Link
from hpcfed.runtime.world import World
from hpcfed.server.requests import M, Message, Request


@dataclass(frozen=True)
class _Shape:
    """Stands in a header for a float32 tensor of this shape."""

    sizes: tuple[int, ...]


def send(link: Link, to: int, message: Message) -> None:
    """Send a message to another role's rank; returns at once."""
    header, tensors = _pack(message)
    link.send(to, header, tensors[0] if tensors else None)
    for tensor in tensors[1:]:
        link.send(to, None, tensor)


def receive(link: Link, source: int) -> Any:
    """Wait for the next message of another role's rank; its tensors are on the host."""
    header, rows = link.receive(source)
    tensors: list[Tensor] = []
    for _ in _shapes(header):
        if tensors:
            _, rows = link.receive(source)
        assert rows is not None
        tensors.append(torch.from_numpy(rows))
    return _unpack(header, tensors)


def allgather(collectives: Collectives, request: Request) -> list[Request]:
    """Return the requests of all workers, in rank order; to be called in turn."""
    header, tensors = _pack(request)
    gathered = collectives.allgather_rows(header, tensors[0] if tensors else None)
    headers = [other for other, _ in gathered]
    tensors_of_workers: list[list[Any]] = [[rows] for _, rows in gathered]
    for tensor in tensors[1:]:
        others = collectives.allgather_rows(None, tensor)
        for worker, (_, rows) in enumerate(others):
            tensors_of_workers[worker].append(rows)
    if not tensors:
        return headers
    return [_unpack(*both) for both in zip(headers, tensors_of_workers, strict=True)]


def bcast(world: World, requests: Sequence[Request]) -> list[Request]:
    """Return the requests of the first server rank on all server ranks.

    The others' own `requests` do not matter.
    """
    packed = [_pack(request) for request in requests]
    headers = world.role_bcast([header for header, _ in packed])
    received = []
    for number, header in enumerate(headers):
        if world.role_rank == 0:
            tensors = packed[number][1]
        else:
            tensors = [torch.empty(shape.sizes) for shape in _shapes(header).values()]
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
    items = vars(header).items()
    return {name: value for name, value in items if isinstance(value, _Shape)}


def _unpack(header: Any, tensors: Sequence[Tensor]) -> Any:
    """Put the tensors back into a message."""
    return replace(header, **dict(zip(_shapes(header), tensors, strict=True)))
