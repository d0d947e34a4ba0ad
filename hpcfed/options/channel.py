"""Describe in words what happens to an upload between client and aggregated row."""

from hpcfed.errors import count
from hpcfed.options.compression import WITH_FEEDBACK, packing
from hpcfed.options.runconfig import RunConfig
from hpcfed.options.traits import MethodTraits

CHANNEL = (
    "attack", "clip", "local noise", "compress", "clip again", "arrive", "aggregate",
    "central noise",
)  # fmt: skip
"""The stages of an upload, in order. `build_channel` arranges its stages in this order,
and pages show it. A run has only the stages that its options turn on.

A client adds its own noise before it compresses: otherwise the compressor would choose
columns by the very values that the noise should hide. A server that adds the noise
clips each upload again after decompression.
"""


def channel_parts(config: RunConfig, method: MethodTraits) -> list[str]:
    """Describe the stages of this run in order; none if clients upload nothing."""
    if not method.uploads:
        return []
    said = {"aggregate": f"aggregate: {config.aggregation}"}
    if config.attack != "none":
        attackers = count(config.num_attackers, "attacker")
        said["attack"] = f"attack: {config.attack} by {attackers}"
    if config.privacy != "none":
        said["clip"] = f"clip: {_clipping(config)}"
        if not config.clips_alone:
            said[f"{config.privacy} noise"] = f"noise: {_noise(config)}"
    if config.compress != "none":
        said["compress"] = f"compress: {_packed(config)}"
        if config.privacy == "central":
            said["clip again"] = "clip again: what is unpacked"
    if config.devices != "none":
        said["arrive"] = f"arrive: {_arrival(config)}"
    if method.asynchronous:
        lost = f", {config.dropout_rate:.0%} lost" if config.dropout_rate else ""
        said["arrive"] = f"arrive: each at its own pace{lost}"
        said["aggregate"] = "aggregate: by staleness"
    # The tuple decides the order, not the code above: pages and `build_channel` agree.
    return [said[part] for part in CHANNEL if part in said]


def channel_line(config: RunConfig, method: MethodTraits) -> str:
    """Return the channel in one line; empty if clients upload nothing."""
    return " → ".join(channel_parts(config, method))


def _clipping(config: RunConfig) -> str:
    to = f"norm {config.clip_norm:g}"
    if config.clip_quantile is not None:
        to = (
            f"quantile {config.clip_quantile:g} of norms, {config.clip_norm:g} at first"
        )
    if config.clip_per == "layer":
        to += ", an equal share for every layer"
    return to


def _noise(config: RunConfig) -> str:
    where = "on the mean" if config.privacy == "central" else "by each client"
    if config.target_epsilon is not None:
        return f"{where}, for ε = {config.target_epsilon:g}"
    return f"{where}, z = {config.noise_multiplier}"


def _packed(config: RunConfig) -> str:
    kept = config.feedback and config.compress in WITH_FEEDBACK
    aside = ", error feedback" if kept else ""
    if config.ef21:
        aside = ", EF21"
    return f"{packing(config.compress, config)}{aside}"


def _arrival(config: RunConfig) -> str:
    losses = []
    if config.deadline is not None:
        cut = ", as far as they come" if config.partial else ""
        losses.append(f"within {config.deadline:g} s{cut}")
    if config.oversample > 1:
        losses.append(f"the first {config.cohort_size} of {config.num_invited}")
    if config.dropout_rate:
        losses.append(f"{config.dropout_rate:.0%} lost")
    return ", ".join(losses) or "the server waits for all"
