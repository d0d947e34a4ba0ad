"""What clients weigh against each other: their samples, or all of them alike."""

from typing import Literal

from hpcfed.errors import UserError
from hpcfed.options.privacy import PrivacyOptions
from hpcfed.options.traits import MethodTraits

Weighing = Literal["samples", "uniform"]


def weighs_by(config: PrivacyOptions, method: MethodTraits) -> Weighing:
    """Return what clients of this run weigh by: what the user asks for, or the method's
    own.
    """
    # Sizes of private data would tell on their owners.
    if config.privacy != "none":
        return "uniform"
    return method.weighs if config.weights == "method" else config.weights


def check_weights(config: PrivacyOptions, method: MethodTraits) -> None:
    """Refuse weights that a run could not use, or that nothing would be weighed by."""
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
