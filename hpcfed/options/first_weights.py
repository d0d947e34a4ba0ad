"""The weights of --init: where a resumed run has them, and which are refused."""

from pathlib import Path
from re import fullmatch
from typing import TYPE_CHECKING

from hpcfed.errors import UserError
from hpcfed.models import peft_files

if TYPE_CHECKING:  # its options ask for the copy
    from hpcfed.options.run import RunOptions

INIT = "first-weights"
"""The folder in a run's own with a copy of the weights of --init."""


def kept_weights(run: Path) -> Path | None:
    """Return a run's copy of the weights of --init, as a path for --init. Several seeds
    share one, in the folder above theirs.
    """
    run = run.resolve()
    is_seed = fullmatch("seed-[0-9]+", run.name)
    for folder in (run, run.parent) if is_seed else (run,):
        kept = folder / INIT
        if peft_files.is_folder(kept):
            return kept
        for path in (kept / "model.npz", kept / "model.safetensors"):
            if path.is_file():
                return path
    return None


def check_first_weights(config: "RunOptions") -> None:
    """Refuse weights that are missing, or that --overwrite would remove."""
    if config.first_weights is not None and not config.first_weights.exists():
        advice = "give a run's folder, or weights as .npz or .safetensors"
        # The run has kept no copy, since they are large. A checkpoint lacks frozen
        # weights, and what clients that join begin with.
        if config.resume is not None:
            advice = f"put it back: the run in {config.resume} began with it"
        raise UserError(f"--init {config.init}: no such file or folder; {advice}")
    if config.init is None or config.out is None or config.resume is not None:
        return
    inside = config.init.resolve().is_relative_to(config.out.resolve())
    if config.overwrite and inside:
        raise UserError(
            f"--init {config.init} is in --out {config.out}, which --overwrite empties; "
            "name another --out"
        )
