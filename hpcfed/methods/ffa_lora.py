"""FFA-LoRA (Sun et al. 2024): adapters whose A stays as it was first drawn; clients train
and send B alone.

Section 4: W + (α / r) Bᵢ A₀ with one A₀ for all. So the mean of factors is the mean of
products, Σ pᵢ (Bᵢ A₀) = (Σ pᵢ Bᵢ) A₀, and half as much is sent. Layers of --lora-train
are trained and sent, too.
"""

from dataclasses import dataclass, field, replace

from hpcfed.methods import FIXED, Cohort, Federation, Layout, Tensor, _adapters, fedavg
from hpcfed.methods._adapters import columns_of
from hpcfed.options import LocalWork, RunConfig, Training

EXTENDS = fedavg
PRIVATE_MEAN = True


class Options(_adapters.Options):
    def local_work(self, config: RunConfig, layout: Layout) -> LocalWork:
        trained = ~columns_of(layout, "A")
        return LocalWork((replace(Training.usual(config), columns=trained),))


@dataclass(frozen=True)
class State(fedavg.State):
    at: Tensor = field(metadata=FIXED)
    """The columns that are trained and sent, by position: all but those of A."""


def init(fed: Federation[Options]) -> State:
    trained = ~columns_of(fed.layout, "A")
    return State(fed.initial_row(), trained.nonzero().squeeze(1).to(fed.device))


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    rows = state.w.repeat(len(cohort.here), 1)
    rows[:, state.at] = fed.download(state.w[state.at], cohort)
    rows = fed.train(rows, cohort, columns=~columns_of(fed.layout, "A"))
    uploads = fed.upload(rows[:, state.at], cohort)
    w = state.w.clone()
    w[state.at] = fed.mean(uploads, cohort)
    return replace(state, w=w)


def welcome(fed: Federation[Options], state: State, cohort: Cohort) -> Tensor:
    # All clients know A₀.
    rows = state.w.expand(len(cohort.here), -1)
    return fed.greet(rows, cohort, fed.num_holders * len(state.at))
