"""SCAFFOLD (Karimireddy et al. 2020, option II), as a file of one's own.

Every client corrects its gradient by c − cᵢ, what all clients and it alone would do.

  hpcfed run --method benchmarks/examples/scaffold.py --momentum 0
"""

from dataclasses import dataclass, field, replace

from hpcfed.methods import IN_PLACE, OWNED, Cohort, Federation, Tensor, fedavg

EXTENDS = fedavg


@dataclass(frozen=True)
class State:
    w: Tensor
    """The global row."""
    c: Tensor
    """The server's control variate."""
    own: Tensor = field(metadata=OWNED | IN_PLACE)
    """Every client's control variate cᵢ."""


def init(fed: Federation) -> State:
    w = fed.initial_row()
    return State(w, w * 0, (w * 0).repeat(len(fed.clients), 1))


def round(fed: Federation, state: State, cohort: Cohort) -> State:
    import torch

    width = len(state.w)
    own = state.own[cohort.here]
    # Clients are sent both, and send both: that is what SCAFFOLD costs.
    sent = fed.download(torch.cat([state.w, state.c]), cohort)
    start, c = sent[:, :width], sent[:, width:]
    rows = fed.train(start, cohort, correction=c - own)
    # cᵢ⁺ = cᵢ − c + (w − yᵢ) / (K η)
    steps = torch.as_tensor(fed.num_steps(cohort), device=fed.device, dtype=rows.dtype)
    rate = fed.recipe(cohort.round).lr
    new = own - c + (start - rows) / (steps.clamp(min=1) * rate)[:, None]
    state.own[cohort.here] = new
    uploads = fed.upload(torch.cat([rows, new - own], 1), cohort)
    w = fed.mean(uploads[:, :width], cohort)
    # c ← c + |S| / N · the mean of what has changed, every client alike
    change = fed.mean(uploads[:, width:], cohort.equally())
    share = len(cohort.clients) / len(fed.sizes)
    return replace(state, w=w, c=state.c + share * change)
