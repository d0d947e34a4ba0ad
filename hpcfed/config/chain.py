"""The way of an upload in words, from the client to the server's new row."""

from collections.abc import Iterator

from hpcfed.config.compression import WITH_FEEDBACK, packing
from hpcfed.config.runconfig import RunConfig
from hpcfed.config.traits import MethodTraits
from hpcfed.errors import count


def chain(config: RunConfig, method: MethodTraits | None = None) -> list[str]:
    """Return what an upload passes, in order: attack, clip, compress, noise, arrive,
    aggregate; only the parts that the run asks for.

    Without a method, nobody asks whether it uploads anything.
    """
    if method is not None and not method.uploads:
        return []
    before = [*_attack(config), *_clip(config), *_pack_and_noise(config)]
    if method is not None and method.asynchronous:
        return [*before, *_trickle_in(config)]
    return [*before, *_arrive(config), *_aggregate(config)]


def chain_line(config: RunConfig, method: MethodTraits | None = None) -> str:
    """Return the chain in one line; empty where clients upload nothing."""
    return " → ".join(chain(config, method))


def _attack(config: RunConfig) -> Iterator[str]:
    if config.attack != "none":
        attackers = count(config.num_attackers, "attacker")
        yield f"attack: {config.attack} by {attackers}"


def _pack_and_noise(config: RunConfig) -> Iterator[str]:
    """Say how updates are packed and noised, in this order or, where clients add the
    noise, in the other: it hides them before anything is chosen by their size.
    """
    if config.privacy == "local":
        yield from _noise(config)
        yield from _compress(config)
    else:
        yield from _compress(config)
        yield from _noise(config)


def _compress(config: RunConfig) -> Iterator[str]:
    if config.compress != "none":
        kept = config.feedback and config.compress in WITH_FEEDBACK
        aside = ", error feedback" if kept else ""
        yield f"compress: {packing(config.compress, config)}{aside}"


def _clip(config: RunConfig) -> Iterator[str]:
    if config.privacy == "none":
        return
    to = f"norm {config.clip_norm:g}"
    if config.clip_quantile is not None:
        to = (
            f"quantile {config.clip_quantile:g} of norms, {config.clip_norm:g} at first"
        )
    yield f"clip: {to}"


def _noise(config: RunConfig) -> Iterator[str]:
    if config.privacy == "none":
        return
    where = "on the mean" if config.privacy == "central" else "by each client"
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
    yield "aggregate: by staleness"


def _aggregate(config: RunConfig) -> Iterator[str]:
    yield f"aggregate: {config.aggregation}"
