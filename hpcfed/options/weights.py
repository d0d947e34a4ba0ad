"""How clients are weighted in means: by their samples, or uniformly."""

from typing import Literal

from hpcfed.errors import UserError
from hpcfed.options.privacy import PrivacyOptions
from hpcfed.options.traits import MethodTraits

Weighing = Literal["samples", "uniform"]


def weighs_by(config: PrivacyOptions, method: MethodTraits) -> Weighing:
    """Return how this run weights clients: as the user asks, or as the method does."""
    # The number of samples is private, too.
    if config.privacy != "none":
        return "uniform"
    return method.weighs if config.weights == "method" else config.weights


def check_weights(config: PrivacyOptions, method: MethodTraits) -> None:
    """Refuse --weights if clients upload nothing, or if sizes must stay private."""
    if config.weights == "method":
        return
    if not method.uploads:
        raise UserError(
            f"--weights {config.weights}: clients of method {config.method} send nothing "
            "that could be weighed"
        )
    if config.weights == "samples" and config.privacy != "none":
        raise UserError(
            f"--weights samples with --privacy {config.privacy}: how many samples a "
            "client has would be known; private clients weigh alike"
        )
