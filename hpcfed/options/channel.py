"""Describe in words what happens to an upload between client and aggregated row."""

from collections.abc import Callable, Iterable, Iterator

from hpcfed.errors import count
from hpcfed.options.compression import WITH_FEEDBACK, packing
from hpcfed.options.runconfig import RunConfig
from hpcfed.options.traits import MethodTraits

CHANNEL = (
    "attack",
    "clip",
    "local noise",
    "compress",
    "clip again",
    "arrive",
    "aggregate",
    "central noise",
)
"""The stages of an upload, in order. `build_channel` arranges its stages in this order,
and pages show it. A run has only the stages that its options turn on.

A client adds its own noise before it compresses: otherwise the compressor would choose
columns by the very values that the noise should hide. A server that adds the noise
clips each upload again after decompression.
"""


def channel_parts(config: RunConfig, method: MethodTraits | None = None) -> list[str]:
    """Describe the stages that this run turns on, in the order of `CHANNEL`.

    Without a method, assume that clients upload.
    """
    if method is not None and not method.uploads:
        return []
    asynchronous = method is not None and method.asynchronous
    parts: dict[str, Callable[[RunConfig], Iterable[str]]] = {
        "attack": _attack,
        "clip": _clip,
        "local noise": _local_noise,
        "compress": _compress,
        "clip again": _clip_again,
        "arrive": _trickle_in if asynchronous else _arrive,
        "aggregate": _by_staleness if asynchronous else _aggregate,
        "central noise": _central_noise,
    }
    return [said for part in CHANNEL for said in parts[part](config)]


def channel_line(config: RunConfig, method: MethodTraits | None = None) -> str:
    """Return the channel in one line; empty if clients upload nothing."""
    return " → ".join(channel_parts(config, method))


def _attack(config: RunConfig) -> Iterator[str]:
    if config.attack != "none":
        attackers = count(config.num_attackers, "attacker")
        yield f"attack: {config.attack} by {attackers}"


def _compress(config: RunConfig) -> Iterator[str]:
    if config.compress != "none":
        kept = config.feedback and config.compress in WITH_FEEDBACK
        aside = ", error feedback" if kept else ""
        if config.ef21:
            aside = ", EF21"
        yield f"compress: {packing(config.compress, config)}{aside}"


def _clip(config: RunConfig) -> Iterator[str]:
    if config.privacy == "none":
        return
    to = f"norm {config.clip_norm:g}"
    if config.clip_quantile is not None:
        to = (
            f"quantile {config.clip_quantile:g} of norms, {config.clip_norm:g} at first"
        )
    if config.clip_per == "layer":
        to += ", an equal share for every layer"
    yield f"clip: {to}"


def _clip_again(config: RunConfig) -> Iterator[str]:
    if config.privacy == "central" and config.compress != "none":
        yield "clip again: what is unpacked"


def _local_noise(config: RunConfig) -> Iterator[str]:
    if config.privacy == "local":
        yield from _noise(config, "by each client")


def _central_noise(config: RunConfig) -> Iterator[str]:
    if config.privacy == "central":
        yield from _noise(config, "on the mean")


def _noise(config: RunConfig, where: str) -> Iterator[str]:
    if config.clips_alone:
        return
    size = f"z = {config.noise_multiplier}"
    if config.target_epsilon is not None:
        size = f"for ε = {config.target_epsilon:g}"
    yield f"noise: {where}, {size}"


def _arrive(config: RunConfig) -> Iterator[str]:
    if config.devices == "none":
        return
    losses = []
    if config.deadline is not None:
        cut = ", as far as they come" if config.partial else ""
        losses.append(f"within {config.deadline:g} s{cut}")
    if config.oversample > 1:
        invited = config.invited_among(config.clients)
        losses.append(f"the first {config.cohort_size} of {invited}")
    if config.dropout_rate:
        losses.append(f"{config.dropout_rate:.0%} lost")
    yield "arrive: " + (", ".join(losses) or "all are waited for")


def _trickle_in(config: RunConfig) -> Iterator[str]:
    lost = f", {config.dropout_rate:.0%} lost" if config.dropout_rate else ""
    yield f"arrive: each at its own pace{lost}"


def _by_staleness(config: RunConfig) -> Iterator[str]:
    yield "aggregate: by staleness"


def _aggregate(config: RunConfig) -> Iterator[str]:
    yield f"aggregate: {config.aggregation}"
