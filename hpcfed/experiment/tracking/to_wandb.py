"""Weights & Biases, configured by its own package."""

import os
from collections.abc import Sequence

from hpcfed.errors import UserError
from hpcfed.experiment.tracking.interface import Figures, Tracked

OFFLINE = ("offline", "disabled", "dryrun")
"""Modes in which nothing is sent."""
BY_ROUND = ("rounds", "phases", "ranks")


class WeightsAndBiases:
    """Sends figures to a project; each seed is a separate run."""

    def __init__(self, project: str, run: Tracked, known: str) -> None:
        import wandb

        several = run.seed is not None
        self._run = wandb.init(
            project=project,
            name=run.name,
            group=run.folder.parent.name if several else None,
            id=known or None,
            resume="allow" if known else None,
            config={**run.options, "command": run.command},
            # Seeds are parallel runs in one process.
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )
        self.id = str(self._run.id)
        # Rounds and the server's steps are two axes; wandb's own axis counts calls.
        self._run.define_metric("round", hidden=True)
        self._run.define_metric("server_step", hidden=True)
        for group in BY_ROUND:
            self._run.define_metric(f"{group}/*", step_metric="round")
        self._run.define_metric("server_losses/*", step_metric="server_step")

    def rounds(self, figures: Sequence[Figures]) -> None:
        for step, values in figures:
            self._run.log({"round": step, **values})

    def losses(self, figures: Sequence[Figures]) -> None:
        for step, values in figures:
            self._run.log({"server_step": step, **values})

    def close(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "complete" else 1)


def check_key() -> None:
    """Refuse to begin without an account: wandb would ask for one, and a job on a
    cluster cannot answer.
    """
    import wandb

    if os.environ.get("WANDB_MODE") in OFFLINE or wandb.api.api_key:
        return
    raise UserError(
        "--wandb: there is no API key; run `wandb login` first, or set "
        "WANDB_MODE=offline to send the figures later"
    )
