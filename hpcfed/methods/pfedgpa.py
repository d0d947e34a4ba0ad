"""pFedGPA (Lai et al. 2025): FedAvg, then a diffusion model of the clients' uploads
generates a row for every client.

The server keeps the uploads of the last rounds, learns their distribution, and inverts
every client's last upload: it is diffused some steps and generated anew, which keeps
the client's own and adds what all clients have in common. Only the generated columns
change hands; the others are FedAvg's. A client that was not sampled in those rounds
keeps FedAvg's row. With --server-every the round after each time of learning starts
from generated rows; FedAvg goes on from there until the server has learnt again.

New clients start from FedAvg's row, and after each of their first local updates the
server guides them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from hpcfed.config import Choice, RunConfig, Switch, option
from hpcfed.errors import UserError
from hpcfed.methods import GENERATED
from hpcfed.server.options import ServerOptions
from hpcfed.server.schedule import is_banked, learns_after

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from hpcfed.federation.federation import Cohort, Federation

__all__ = [
    "FINALS",
    "Options",
    "State",
    "finals",
    "global_row",
    "init",
    "lead",
    "personal",
    "round",
    "welcome",
]

FINALS = (
    "FedAvg",
    "FedAvg-FT",
    "upload",
    "reconstruction",
    "pFedGPA",
    "pFedGPA-FT",
    "direct",
    "direct-FT",
)
"""What is judged at the end: columns as uploaded, through the autoencoder, generated,
and `direct` out of noise.
"""


class Options(ServerOptions):
    finetune_epochs: int | None = option(
        None,
        "epochs of fine-tuning at the end (default: --epochs)",
        ge=0,
        le=100_000,
    )
    direct: bool = option(
        False,
        "also judge rows that are generated without inversion, as in the paper's ablation",
    )
    warm_start: bool = option(
        False, "the first global row has columns that the loaded server generates"
    )
    guided_updates: int = option(
        3, "new clients: local updates after which the server guides them", ge=0
    )
    guidance: float = option(
        0.0, "new clients: ω, what their own progress counts for beyond once", ge=-1
    )
    guided_start: int = option(
        20, "new clients: diffusion time at which guidance starts", ge=1
    )
    guided_steps: int = option(20, "new clients: reverse steps of one guidance", ge=1)

    def fit(self, config: RunConfig, ranks: int) -> Iterable[Choice]:
        yield from super().fit(config, ranks)
        if self.guided_start > self.diffusion_steps:
            yield Choice(
                "guided_start",
                self.diffusion_steps,
                "it goes no further than --diffusion-steps",
            )

    def switches(self, config: RunConfig) -> Iterable[Switch]:
        yield from super().switches(config)
        guided = config.new_clients > 0 and self.guided_updates > 0
        yield Switch("guided_updates", "--new-clients 10", config.new_clients > 0)
        for name in ("guidance", "guided_start", "guided_steps"):
            yield Switch(name, "--new-clients 10 and --guided-updates", guided)

    def check(self, config: RunConfig) -> None:
        super().check(config)
        if self.warm_start and not self.server_load:
            raise UserError(
                "--warm-start needs a trained server: add --server-load with a "
                "server.h5 of an earlier run"
            )
        if (
            config.new_clients
            and self.guided_updates
            and self.guided_start > self.diffusion_steps
        ):
            raise UserError(
                f"--guided-start {self.guided_start} is beyond --diffusion-steps "
                f"{self.diffusion_steps}"
            )


@dataclass(frozen=True)
class State:
    w: Tensor
    """FedAvg's row."""
    generated: Tensor = field(metadata=GENERATED)
    """Every client's generated columns; none before the server has learnt, and none
    from the next round on.
    """


def init(fed: Federation) -> State:
    w = fed.initial_row()
    if cast(Options, fed.options).warm_start:
        made = fed.server.sample(fed.clients)
        w[fed.generated] = fed.sum(made.to(w.dtype).sum(0)) / len(fed.sizes)
    return State(w, w.new_empty(len(fed.clients), 0))


def round(fed: Federation, state: State, cohort: Cohort) -> State:
    options = cast(Options, fed.options)
    start = personal(fed, state, cohort.here) if state.generated.numel() else state.w
    rows = fed.upload(fed.train(fed.download(start, cohort), cohort), cohort)
    done = cohort.round + 1
    last = done == fed.config.rounds
    if is_banked(options, done, fed.config.rounds):
        fed.bank(rows[:, fed.generated], cohort)
    w = fed.mean(rows, cohort)
    if not learns_after(options, done, fed.config.rounds):
        return State(
            w, w.new_empty(len(fed.clients), 0)
        )  # older columns know nothing of this round
    fed.learn(cohort.round)
    made = _known_or(fed, w, fed.server.invert)
    if last:  # else the next round's download has them
        cohort.log.bytes_down += fed.num_holders * made.shape[1] * made.element_size()
    return State(w, made)


def _known_or(
    fed: Federation,
    w: Tensor,
    generate: Callable[[np.ndarray], tuple[Tensor, np.ndarray]],
) -> Tensor:
    """Generated columns of this rank's clients, FedAvg's where the server does not know
    a client.
    """
    with fed.timed("server"):
        made, known = generate(fed.clients)
        rows = made.to(w.dtype)
        rows[~known] = w[fed.generated]
        return rows


def personal(fed: Federation, state: State, clients: np.ndarray) -> Tensor:
    rows = state.w.expand(len(clients), -1)
    return (
        _with(fed, rows, state.generated[clients]) if state.generated.numel() else rows
    )


def _with(fed: Federation, rows: Tensor, columns: Tensor) -> Tensor:
    rows = rows.clone()
    rows[:, fed.generated] = columns
    return rows


def finals(
    fed: Federation, state: State, clients: np.ndarray
) -> Iterator[tuple[str, Tensor]]:
    options = cast(Options, fed.options)
    epochs = options.finetune_epochs or fed.config.epochs

    def before_and_after(name: str, rows: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield name, rows
        yield f"{name}-FT", fed.finetune(rows, clients, epochs=epochs)

    w = state.w.expand(len(clients), -1)
    yield from before_and_after("FedAvg", w)
    yield from before_and_after("pFedGPA", personal(fed, state, clients))
    for name, made in (
        ("upload", fed.server.recall),
        ("reconstruction", fed.server.reconstruct),
    ):
        yield name, _with(fed, w, _known_or(fed, state.w, made)[clients])
    if options.direct:
        sampled = fed.server.sample(fed.clients).to(w.dtype)
        yield from before_and_after("direct", _with(fed, w, sampled[clients]))


def global_row(state: State) -> Tensor:
    return state.w


def welcome(fed: Federation, state: State, cohort: Cohort) -> Tensor:
    return fed.greet(state.w.expand(len(cohort.here), -1), cohort)


def lead(fed: Federation, update: int, before: Tensor, after: Tensor) -> Tensor:
    """New clients' rows after a local update, led on by the server."""
    options = cast(Options, fed.options)
    if update >= options.guided_updates:
        return after
    columns = [rows[:, fed.generated].float() for rows in (before, after)]
    with fed.timed("server"):
        led = fed.server.guide(
            fed.clients,
            *columns,
            strength=options.guidance,
            start=options.guided_start,
            steps=options.guided_steps,
        )
    return _with(fed, after, led.to(after.dtype))
