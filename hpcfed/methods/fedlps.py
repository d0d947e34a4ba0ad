"""FedLPS (Jia et al. 2024), in clusters: each client prunes channels of its
convolutions, and sends the others.

Read here: when a client has trained for the first time, it drops in every convolution
the share of channels with the least L1 norms, with their bias and batch norm, and drops
the same ones from then on. It starts a round from its cluster's row without them, and
drops again what training has brought back. A channel is the mean over its senders.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from hpcfed.config import Choice, RunConfig, option
from hpcfed.errors import UserError
from hpcfed.methods import OWNED, _clusters
from hpcfed.methods._clusters import begin, download, global_row, upload, welcome
from hpcfed.models import MODELS

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from hpcfed.federation.federation import Cohort, Federation
    from hpcfed.models.layout import Entry, Layout

__all__ = ["Options", "State", "global_row", "init", "personal", "round", "welcome"]


class Options(_clusters.Options):
    names_layers = True

    prune_ratio: float = option(
        0.8, "share of each convolution's channels that a client drops", ge=0, lt=1
    )

    def fit(self, config: RunConfig, ranks: int) -> Iterable[Choice]:
        yield from super().fit(config, ranks)
        if (
            config.network() == "mlp"
            and min(config.data().shape[1:]) >= MODELS["cnn-digits"].smallest
        ):
            reason = "mlp, the data set's usual one, has no convolutions, whose channels fedlps prunes"
            yield Choice("model", "cnn-digits", f"{reason}; --model takes others")

    def check_layout(self, layout: Layout, network: str) -> None:
        if not _convolutions(layout):
            raise UserError(
                f"model {network} has no convolutions, whose channels fedlps prunes; "
                "use --model cnn-digits"
            )


@dataclass(frozen=True)
class State(_clusters.State):
    kept: Tensor = field(metadata=OWNED)
    """[clients, parts]: the channels that each has kept, all before its first round."""


def init(fed: Federation) -> State:
    import torch

    common = begin(fed, part_of=_channel_of(fed.layout))
    kept = torch.ones(
        len(fed.clients), common.gene.shape[1], dtype=torch.bool, device=fed.device
    )
    return State(**vars(common), kept=kept)


def round(fed: Federation, state: State, cohort: Cohort) -> State:
    kept = state.kept[cohort.here]
    rows = fed.train(download(fed, state, cohort) * kept[:, state.part_of], cohort)
    first = kept.all(1, keepdim=True) & rows.isfinite().all(1, keepdim=True)
    kept = _strongest(fed, rows).where(first, kept)
    state.kept[cohort.here] = kept
    after, _ = upload(
        fed,
        state,
        rows * kept[:, state.part_of],
        cohort.equally_with_data(),
        parts=kept,
    )
    return cast(State, after)


def personal(fed: Federation, state: State, clients: np.ndarray) -> Tensor:
    return (
        _clusters.personal(fed, state, clients) * state.kept[clients][:, state.part_of]
    )


def _convolutions(layout: Layout) -> list[Entry]:
    return [e for e in layout.entries if len(e.shape) == 4]


def _channel_of(layout: Layout) -> Tensor:
    """The channel of every column, counted from 1 through all convolutions; 0 for what
    is never dropped.
    """
    import torch

    found, last = torch.zeros(layout.num_columns, dtype=torch.int64), 1
    for e in _convolutions(layout):
        block = next(block for block in layout.blocks if e.layer in block)
        for own in (own for own in layout.entries if own.layer in block):
            channels = torch.arange(last, last + e.shape[0])
            found[own.start : own.stop] = channels.repeat_interleave(
                (own.stop - own.start) // e.shape[0]
            )
        last += e.shape[0]
    return found


def _strongest(fed: Federation, rows: Tensor) -> Tensor:
    """[clients, parts]: in every convolution the channels with the largest L1 norms,
    and part 0.
    """
    import torch

    options = cast(Options, fed.options)
    kept = [rows.new_ones(len(rows), 1, dtype=torch.bool)]
    for e in _convolutions(fed.layout):
        norms = rows[:, e.start : e.stop].unflatten(1, (e.shape[0], -1)).abs().sum(2)
        number = max(1, e.shape[0] - int(options.prune_ratio * e.shape[0] + 1e-9))
        kept.append(
            torch.zeros_like(norms, dtype=torch.bool).scatter(
                1, norms.topk(number).indices, True
            )
        )
    return torch.cat(kept, 1)
