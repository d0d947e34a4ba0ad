"""Values of an option, drawn as its declaration allows.

Type, limits and choices come from the declaration itself, so that a new option takes
part without a line here. Only names that a text may hold are looked up in the
catalogues that own them, or listed below.
"""

from pathlib import Path
from random import Random
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from hpcfed import methods
from hpcfed.data import PARTITIONS
from hpcfed.options.declare import facts_of
from hpcfed.options.devices import DISTRIBUTIONS
from hpcfed.options.malicious import ATTACKS
from hpcfed.options.metrics import METRICS
from hpcfed.options.settings import FLOATS

TEXTS: dict[str, tuple[str, ...]] = {
    "method": tuple(methods.names()),
    "partition": tuple(PARTITIONS),
    "attack": tuple(ATTACKS),
    "devices": ("none", *DISTRIBUTIONS),
    "model": ("mlp", "cnn-digits", "cnn-bn"),
    "dataset": ("digits", "synthetic"),
    "metrics": tuple(METRICS),
    "synthetic_shape": ("1x4x4", "1x8x8"),
    "shared_layers": ("fc1", "head", "fc1,head"),
    "gene_pools": ("fc1", "fc1/head", "fc1,head"),
    "lora_layers": ("*", "fc1"),
    "lora_train": ("head",),
    "client_ranks": ("1", "1,2"),
    "depth_sweep": ("1", "1,2"),
    "supplement_below": ("mean", "50"),
    # Twice the width with every level.
    "denoiser_depth": ("1", "2"),
    # Those that wait, or end a run that a busy machine keeps waiting.
    "simulate_training": ("1ms",),
    "stall_timeout": ("0", "600"),
}
STRANGE = "nothing-of-the-kind"
"""A text of an option without a list above; most refuse it."""
EXTREME = 0.02
"""How often a number without a limit is as large or as small as a float32 can be."""
MOST = 40
"""Whole numbers are at most so large: most of them cost time."""


def is_drawn(field: FieldInfo) -> bool:
    """Tell whether the swarm draws this option.

    It names all folders itself, and neither downloads nor sends anything. Options that
    a study sets are those of folders and resuming.
    """
    stated = facts_of(field)
    elsewhere = stated.study_sets or stated.package or not stated.from_record
    return not elsewhere and Path not in _members(field.annotation)


def draw(random: Random, name: str, field: FieldInfo) -> Any:
    """Return a value of an option, as it is typed on a command line."""
    if name in TEXTS:
        return random.choice(TEXTS[name])
    members = _members(field.annotation)
    if bool in members:
        return not field.default
    choices = [kind for kind in members if get_origin(kind) is Literal]
    if choices and (int not in members or random.random() < 0.5):
        others = [value for value in get_args(choices[0]) if value != field.default]
        return random.choice(others or list(get_args(choices[0])))
    if float in members:
        return _number(random, _limits(field), field.default)
    if int in members:
        return _whole(random, _limits(field), field.default)
    return STRANGE


def _members(kind: Any) -> tuple[Any, ...]:
    """Return the types that an annotation allows."""
    if get_origin(kind) is Annotated:
        return _members(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        found: tuple[Any, ...] = ()
        for member in get_args(kind):
            found += _members(member)
        return found
    return (kind,)


class Limits(NamedTuple):
    """The least and the largest value, and whether these are allowed themselves."""

    least: float
    most: float
    has_least: bool
    has_most: bool


def _limits(field: FieldInfo) -> Limits:
    least, most, has_least, has_most = -1.0, float("inf"), True, False
    stated = list(field.metadata)
    for kind in get_args(field.annotation):  # those within `Annotated[...] | None`
        for inner in get_args(kind):
            stated += getattr(inner, "metadata", [])
    for limit in stated:
        if hasattr(limit, "ge"):
            least, has_least = limit.ge, True
        if hasattr(limit, "gt"):
            least, has_least = limit.gt, False
        if hasattr(limit, "le"):
            most, has_most = limit.le, True
        if hasattr(limit, "lt"):
            most, has_most = limit.lt, False
    return Limits(least, most, has_least, has_most)


def _number(random: Random, limits: Limits, default: float | None) -> float:
    """Return a number at a limit, or around the default."""
    edges = []
    if limits.has_least:
        edges.append(float(limits.least))
    if limits.has_most:
        edges.append(float(limits.most))
    if limits.most == float("inf") and random.random() < EXTREME:
        return random.choice([FLOATS[0] * 10, FLOATS[1] / 10])
    if edges and random.random() < 0.25:
        return random.choice(edges)
    middle = default or min(1.0, limits.most / 2)
    found = float(f"{middle * 2 ** random.uniform(-2, 2):.2g}")
    if found >= limits.most:
        found = (middle + limits.most) / 2
    if found <= limits.least:
        found = middle if middle > limits.least else 2 * abs(limits.least) + 1
    return found


def _whole(random: Random, limits: Limits, default: int | None) -> int:
    """Return a small whole number, or one at a limit."""
    least = int(limits.least) + (not limits.has_least)
    most = limits.most if limits.has_most else limits.most - 1
    edges = [least, *([int(most)] if most <= MOST else [])]
    if default is not None and default <= MOST:
        edges.append(default)
    if random.random() < 0.3:
        return random.choice(edges)
    return random.randint(least, int(min(most, least + random.choice([2, 5, 10]))))
