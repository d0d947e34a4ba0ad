"""FedLPS (Jia et al. 2024), in clusters: each client prunes channels of its
convolutions, and sends the others.

Our reading: after its first training, a client drops the share of channels with the
smallest L1 norms in every convolution, with their bias and batch norm. It drops the
same channels from then on. It starts each round from its cluster's row without them,
and trains without them: they stay 0. (An option trains the whole network, so that they
may grow again, and drops them afterwards.) A channel is averaged over its senders.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from hpcfed.errors import UserError
from hpcfed.methods import OWNED, _clusters
from hpcfed.methods._clusters import aggregate, arrive, begin, download
from hpcfed.methods._interface import (
    Cohort,
    Entry,
    Federation,
    Layout,
    Positions,
    Tensor,
)
from hpcfed.models import MODELS
from hpcfed.options import Choice, RunConfig, option

EXTENDS = _clusters


class Options(_clusters.Options):
    names_layers = True
    weighs = "uniform"

    prune_ratio: float = option(
        0.8, "share of each convolution's channels that a client drops", ge=0, lt=1
    )

    train_pruned: bool = option(
        True, "train without the channels that a client has dropped"
    )

    def fit(self, config: RunConfig, ranks: int) -> Iterable[Choice]:
        yield from super().fit(config, ranks)
        fits = config.data().side >= MODELS["cnn-digits"].smallest
        if config.network() == "mlp" and fits:
            yield Choice(
                "model",
                "cnn-digits",
                "mlp, the data set's usual one, has no convolutions, whose channels "
                "fedlps prunes; --model takes others",
            )

    def check_layout(self, layout: Layout, network: str) -> None:
        if not _convolutions(layout):
            raise UserError(
                f"model {network} has no convolutions, whose channels fedlps prunes; "
                "use --model cnn-digits"
            )


@dataclass(frozen=True)
class State(_clusters.State):
    channels: Tensor = field(metadata=OWNED)
    """[clients, groups], True for channels that a client keeps; at first all."""


def init(fed: Federation[Options]) -> State:
    common = begin(fed, group_of=_channel_of(fed.layout))
    return State(**vars(common), channels=_all_channels(fed, common))


def _all_channels(fed: Federation[Options], state: _clusters.State) -> Tensor:
    shape = len(fed.clients), state.gene.shape[1]
    return torch.ones(shape, dtype=torch.bool, device=fed.device)


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    mask = state.channels[cohort.here]
    # The cluster's row without the channels that the client has dropped.
    gates = mask[:, state.group_of]
    rows = download(fed, state, cohort) * gates
    # Weights that are 0 without a gradient stay 0, and so do their running statistics.
    rows = fed.train(rows, cohort, gates=gates if fed.options.train_pruned else None)
    # A client that diverges in its first round prunes in its next: NaN has no norm.
    # A full mask marks a client that has not pruned yet.
    first = mask.all(1, keepdim=True) & rows.isfinite().all(1, keepdim=True)
    mask = _strongest(fed, rows).where(first, mask)
    # After its first training a client drops channels here. With --no-train-pruned, it
    # drops here what has grown again.
    rows = rows * mask[:, state.group_of]
    state, _ = aggregate(fed, state, rows, cohort, sent=mask)
    # A few bits per client and channel: small enough to copy.
    channels = state.channels.clone()
    channels[cohort.here] = mask
    return replace(state, channels=channels)


def adopt(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    """Let new clients start with all channels, as known ones did."""
    arrived, _ = arrive(fed, state, cohort)
    return replace(arrived, channels=_all_channels(fed, arrived))


def personal(fed: Federation[Options], state: State, clients: Positions) -> Tensor:
    mask = state.channels[clients][:, state.group_of]
    return _clusters.personal(fed, state, clients) * mask


def _convolutions(layout: Layout) -> list[Entry]:
    return [entry for entry in layout.entries if len(entry.shape) == 4]


def _channel_of(layout: Layout) -> Tensor:
    """Return the channel of every column, counted from 1 over all convolutions; 0 for
    columns that are never dropped.
    """
    found = torch.zeros(layout.num_columns, dtype=torch.int64)
    first = 1
    for convolution in _convolutions(layout):
        num_channels = convolution.shape[0]
        channels = torch.arange(first, first + num_channels)
        # The block is the convolution with the batch norm that follows it.
        block = next(block for block in layout.blocks if convolution.layer in block)
        for entry in layout.entries:
            # A single number in the block belongs to no channel.
            if entry.layer in block and entry.shape[:1] == (num_channels,):
                width = (entry.stop - entry.start) // num_channels
                found[entry.start : entry.stop] = channels.repeat_interleave(width)
        first += num_channels
    return found


def _strongest(fed: Federation[Options], rows: Tensor) -> Tensor:
    """Return a mask [clients, groups] of group 0 and of the channels with the largest
    L1 norms in every convolution.
    """
    masks = [rows.new_ones(len(rows), 1, dtype=torch.bool)]
    for entry in _convolutions(fed.layout):
        num_channels = entry.shape[0]
        weights = rows[:, entry.start : entry.stop].unflatten(1, (num_channels, -1))
        norms = weights.abs().sum(2)
        # 0.29 × 100 is 28.999999999999996 in floating point.
        dropped = int(fed.options.prune_ratio * num_channels + 1e-9)
        strongest = norms.topk(max(1, num_channels - dropped)).indices
        mask = torch.zeros_like(norms, dtype=torch.bool)
        masks.append(mask.scatter(1, strongest, True))
    return torch.cat(masks, 1)
