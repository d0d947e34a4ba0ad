"""Losses and rows that are not finite end the run, with a line that says what to change.

All server ranks have the same losses and rows, and so raise together.
"""

import numpy as np
from torch import Tensor

from hpcfed.errors import Diverged
from hpcfed.server.options import ServerOptions


def check_losses(network: str, losses: np.ndarray, options: ServerOptions) -> None:
    """Raise where the losses of a network's steps are not finite."""
    bad = np.flatnonzero(~np.isfinite(losses))
    if len(bad):
        raise Diverged(
            f"the server's {network} has diverged: its loss is not finite from step "
            f"{bad[0] + 1} of {len(losses)} on; "
            f"{_advice(options)}"
        )


def check_rows(
    request: str, rows: Tensor, options: ServerOptions, sound: Tensor | None = None
) -> None:
    """Raise where generated rows are not finite.

    They would be evaluated as if nothing had happened. `sound` says which rows should
    be finite; None: all.
    """
    bad = ~rows.isfinite().all(1)
    if sound is not None:
        bad &= sound
    number = int(bad.sum())
    if number:
        raise Diverged(
            f"{number} of {len(rows)} rows that the server made ({request}) are "
            f"not finite; {_advice(options)}"
        )


def _advice(options: ServerOptions) -> str:
    """Name the options that keep networks from diverging."""
    advice = f"try --server-lr below {options.size.lr:g}"
    if options.server_precision == "bf16":
        advice += " or --server-precision fp32"
    return advice
