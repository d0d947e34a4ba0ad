"""Between client and server: devices and their time, privacy, and compression.

`build` puts the channel of a run together from these parts; `channel` says what a part is.
"""

from dataclasses import dataclass, field

from torch import Tensor

from hpcfed.errors import UserError


@dataclass
class Memory:
    """Tensors that the channel keeps from one round to the next, such as residuals.

    Checkpoints hold them. When a client moves to another rank, its rows move with it.
    """

    num_clients: int
    """Clients of this rank."""
    rows: dict[str, Tensor] = field(default_factory=dict)
    """Tensors with an entry per client of this rank."""
    shared: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that are the same on every rank."""

    def owned(self, name: str, like: Tensor) -> Tensor:
        """Return an entry per client of this rank, to be overwritten in place: zeros
        like `like` at first.

        Every rank asks for it in the same round, even without clients in the cohort.
        """
        if name not in self.rows:
            self.rows[name] = like.new_zeros(self.num_clients, *like.shape)
        rows = self.rows[name]
        # Compare single entries: the number of clients is already right.
        self._check(name, rows.new_empty(rows.shape[1:]), like)
        # A checkpoint is read to the host.
        if rows.device != like.device:
            self.rows[name] = rows = rows.to(like.device)
        return rows

    def common(self, name: str, first: Tensor) -> Tensor:
        """Return what was kept under this name on every rank, or `first`."""
        kept = self.shared.get(name)
        if kept is None:
            return first
        self._check(name, kept, first)
        return kept.to(first.device)

    def keep(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor that is the same on every rank."""
        self.shared[name] = tensor

    def _check(self, name: str, kept: Tensor, asked: Tensor) -> None:
        """Refuse what a checkpoint with other options has left."""
        if kept.shape != asked.shape or kept.dtype != asked.dtype:
            raise UserError(
                f"the checkpoint's {name} is {kept.dtype} of shape "
                f"{tuple(kept.shape)}, not {asked.dtype} of {tuple(asked.shape)}"
            )
