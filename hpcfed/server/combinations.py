"""Options of the server that do not fit each other are refused; imports no torch."""

from pathlib import Path
from typing import TYPE_CHECKING

from hpcfed.errors import UserError

if TYPE_CHECKING:
    from hpcfed.server.options import ServerOptions

MOST_HALVINGS = 12
"""The most convolutions of p-diff's encoder."""


def check_combination(options: "ServerOptions") -> None:
    """Refuse options that do not fit each other, and a file that is not there."""
    depth = options.size.depth
    if options.server_model == "p-diff" and depth > MOST_HALVINGS:
        raise UserError(
            f"--server-depth {depth} is beyond {MOST_HALVINGS}, p-diff's most: each of "
            "its convolutions halves the row"
        )
    check_depth("--inversion-depth", options.inversion_depth, options)
    # Offload is a part of ZeRO.
    if options.server_offload != "none" and not options.zero_stage:
        raise UserError(
            f"--server-offload {options.server_offload} needs --zero-stage 1, 2 or 3"
        )
    if options.server_offload == "parameters" and options.zero_stage != 3:
        raise UserError("--server-offload parameters needs --zero-stage 3")
    if options.server_load and not Path(options.server_load).is_file():
        raise UserError(f"--server-load {options.server_load}: no such file")


def check_depth(flag: str, depth: int, options: "ServerOptions") -> None:
    """Refuse a depth of diffusion that is never reached."""
    steps = options.diffusion_steps
    if depth > steps:
        raise UserError(f"{flag} {depth} is beyond --diffusion-steps {steps}")


def check_engine(options: "ServerOptions", ranks: int) -> None:
    """Refuse a plain loop on several ranks."""
    if options.server_engine == "torch" and (ranks > 1 or options.zero_stage):
        raise UserError(
            "--server-engine torch is a plain loop on one rank: no ZeRO, and no other "
            "rank that learns"
        )
