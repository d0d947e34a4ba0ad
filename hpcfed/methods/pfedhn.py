"""pFedHN (Shamsian et al. 2021): the server's hypernetwork generates every client's
model from an embedding of it.

The server sends θᵢ = h(vᵢ; φ) to client i, which takes some steps of SGD to θᵢ′. With
Δᵢ = θᵢ − θᵢ′, the gradient of φ is (∂θᵢ/∂φ)ᵀ Δᵢ; φ includes the embeddings vᵢ. The
authors update φ after every single client. Our reading: a round's cohort trains in
parallel from one φ, and the sum of its gradients makes one step, so that as many
clients' steps count as in the authors' sequence. The mean is an option. So are the
authors' turns, in which one client after the other trains from the φ that the previous
one has left. Running statistics of batch norm have no gradient: they are averaged as in
FedAvg. Every rank holds φ and differentiates for its own clients. Unless --inner common
is given, --epochs, --lr and the like act on new clients only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from hpcfed import options
from hpcfed.clients.job import Recipe
from hpcfed.errors import UserError
from hpcfed.kernels.sgd import Rule, descend
from hpcfed.methods import IN_PLACE, Cohort, Federation, Layout, Positions, Tensor
from hpcfed.models.hypernetwork import Hypernetwork
from hpcfed.options import NEWCOMERS, LocalWork, Need, RunConfig, Training, option
from hpcfed.runtime.device import on_device

_OWN = Need("--inner own", lambda run: run.inner == "own")


class Options(options.Options):
    averages = False  # only running statistics are averaged
    weighs = "uniform"

    hn_hidden: int = option(100, "width of the hypernetwork", ge=1, le=2**16)
    hn_layers: int = option(
        3,
        "hidden layers of the hypernetwork, after the one that takes the embedding",
        ge=0,
        le=1000,
    )
    hn_embedding: int | None = option(
        None,
        "size of a client's embedding (default: 1 + a quarter of the clients)",
        ge=0,
        le=2**16,
        zero_was_unset=True,
    )
    hn_lr: float = option(1e-2, "learning rate of the hypernetwork", gt=0)
    hn_momentum: float = option(0.9, "momentum of the hypernetwork", ge=0, lt=1)
    hn_decay: float = option(1e-3, "L2 decay of the hypernetwork", ge=0)
    hn_clip: float = option(
        50.0, "largest norm of the hypernetwork's gradient; 0: no limit", ge=0
    )
    hn_combine: Literal["sum", "mean", "turns"] = option(
        "sum",
        "how a cohort's clients change the hypernetwork: in one step by the sum or the "
        "mean of their gradients, or in turns, a step for each",
    )
    inner: Literal["own", "common"] = option(
        "own",
        "how clients train: as the authors', by the options --inner-…, or as in other "
        "methods, by --epochs, --batch-size, --lr and the like",
    )
    inner_steps: int = option(
        50,
        "steps of a client in a round",
        ge=1,
        le=10**7,
        needs=_OWN,
        replaces="epochs",
    )
    inner_batch: int = option(
        64,
        "samples of a client's step",
        ge=1,
        lt=2**31,
        needs=_OWN,
        replaces="batch_size",
    )
    inner_lr: float = option(
        5e-3,
        "learning rate of a client",
        gt=0,
        needs=_OWN,
        replaces=("lr", "lr_decay", "lr_schedule"),
    )
    inner_momentum: float = option(
        0.9,
        "momentum of a client; starts anew each round",
        ge=0,
        lt=1,
        needs=_OWN,
        replaces=("momentum", "nesterov", "optimiser"),
    )
    inner_decay: float = option(
        5e-5, "L2 decay of a client", ge=0, needs=_OWN, replaces="weight_decay"
    )
    inner_clip: float = option(
        50.0,
        "largest norm of a client's gradient; 0: no limit",
        ge=0,
        needs=_OWN,
        replaces="clip",
    )
    welcome_rounds: int = option(
        20,
        "rounds in which a new client's embedding is trained, and nothing else",
        ge=0,
        needs=NEWCOMERS,
    )

    def replaced(self) -> Mapping[str, str]:
        return super().replaced() if self.inner == "own" else {}

    def local_work(self, config: RunConfig, layout: Layout) -> LocalWork:
        if self.inner == "common":
            return super().local_work(config, layout)
        return LocalWork((Training(self.inner_batch, steps=self.inner_steps),))

    def check(self, config: RunConfig) -> None:
        if self.hn_combine == "turns" and config.devices != "none":
            raise UserError(
                "--hn-combine turns: clients that wait for each other have no round on "
                "the virtual clock; use sum or mean, or leave --devices out"
            )
        if config.weights == "samples" and self.hn_combine == "turns":
            raise UserError(
                "--weights samples: --hn-combine turns takes one client at a time, so "
                "there is nothing to weigh it against; use --hn-combine sum or mean"
            )
        # A round of turns has a separate upload for each client, without a number by
        # which to find its residual again.
        packs = {config.compress, config.compress_down} != {"none"}
        if packs and self.hn_combine == "turns":
            raise UserError(
                "--hn-combine turns sends and uploads client by client, which is not "
                "packed; use --hn-combine sum or mean, or leave --compress out"
            )


@dataclass(frozen=True)
class State:
    phi: Tensor = field(metadata=IN_PLACE)
    """φ: all clients' embeddings and the hypernetwork."""
    velocity: Tensor = field(metadata=IN_PLACE)
    """The momentum of φ."""
    statistics: Tensor
    """Running statistics of batch norm, which all clients share."""


def init(fed: Federation[Options]) -> State:
    row, net = fed.initial_row(), _hypernetwork(fed)
    # Drawn on the host, so that every rank starts from the same φ.
    phi = row.new_tensor(net.first(fed.generator("hypernetwork")))
    return State(phi, phi.new_zeros(phi.shape), row[net.outputs :])


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    in_turns = fed.options.hn_combine == "turns"
    advance = _in_turns if in_turns else _together
    trained, finite_updates = advance(fed, state, cohort)
    if not finite_updates:
        raise ArithmeticError(f"no update of round {cohort.round + 1} is finite")
    # Running statistics have no gradient: they are averaged.
    first = _hypernetwork(fed).outputs
    statistics = fed.mean(trained[:, first:], cohort)
    return replace(state, statistics=statistics)


def _together(
    fed: Federation[Options], state: State, cohort: Cohort, *, final: bool = True
) -> tuple[Tensor, int]:
    """Train the cohort from one φ, and take a step of φ in place. Return this rank's
    uploads, and the number of finite ones on all ranks.
    """
    options, net = fed.options, _hypernetwork(fed)
    theta = personal(fed, state, cohort.here)
    # θᵢ′, after some steps of the client's own SGD.
    start = fed.download(theta, cohort)
    trained = fed.train(start, cohort, recipe=_inner(fed), final=final)
    trained = fed.upload(trained, cohort)
    theta, _ = fed.arrived(theta, cohort)
    uploads, cohort = fed.arrived(trained, cohort)

    with fed.timed("server"):
        # A client that diverged has Δ = 0 and adds nothing to the gradient.
        finite = fed.revert_diverged(uploads, theta, cohort)
        delta = (theta - finite)[:, : net.outputs]
        delta = delta * _relative_weights(fed, cohort).to(delta.dtype)
        # (∂θᵢ/∂φ)ᵀ Δᵢ, summed over this rank's clients.
        gradient = net.gradient(state.phi, _ids(fed, cohort.here), delta)
    gradient = fed.sum(gradient)
    members = set(fed.clients[cohort.here].tolist())
    excluded = fed.sum(gradient.new_tensor(len(cohort.log.excluded & members)))
    finite_updates = len(cohort.clients) - int(excluded)

    # Every rank takes the same step, so φ stays the same on all ranks.
    with fed.timed("server"):
        if options.hn_combine == "mean" and finite_updates:
            gradient /= finite_updates
        if finite_updates:
            _step(options, state.phi[None], gradient[None], state.velocity[None])
    return trained, finite_updates


def _relative_weights(fed: Federation[Options], cohort: Cohort) -> Tensor:
    """Return each member's weight divided by the cohort's mean weight."""
    weights = fed.weights[cohort.clients]
    # If no member has data, all weights are 0, and nothing was learnt.
    relative = weights / weights.mean() if weights.any() else weights
    return on_device(relative[cohort.chosen, None], fed.device)


def _in_turns(
    fed: Federation[Options], state: State, cohort: Cohort
) -> tuple[Tensor, int]:
    """Let one client after the other train and change φ, in the order of ids. All ranks
    take part in every turn, because all of them hold φ.
    """
    rows, norms, finite_updates = [], [], 0
    for number in range(len(cohort.clients)):
        _, alone = cohort.only(np.array([number]))
        trained, finite = _together(fed, state, alone, final=False)
        finite_updates += finite
        rows.append(trained)
        # The log only holds the norms of the last upload.
        norms.append(cohort.log.update_norms)
    everyones = torch.cat(rows)
    cohort.log.update_norms = torch.cat([own for own in norms if own is not None])
    fed.finish(everyones, cohort)
    return everyones, finite_updates


def personal(fed: Federation[Options], state: State, clients: Positions) -> Tensor:
    net = _hypernetwork(fed)
    rows = _rows(fed, state, net.embeddings(state.phi, _ids(fed, clients)))
    # Check here because evaluation calls this, too: after the last round no other check
    # would notice that φ has diverged.
    if not bool(rows.isfinite().all()):
        raise ArithmeticError(
            "the hypernetwork has diverged: its rows are not finite in round "
            f"{fed.round + 1}; try --hn-lr below {fed.options.hn_lr:g}"
        )
    return rows


def global_row(state: State) -> None:
    return None


def welcome(fed: Federation[Options], state: State, cohort: Cohort) -> Tensor:
    """Return rows of new embeddings, trained as in rounds with φ frozen."""
    options, net = fed.options, _hypernetwork(fed)
    generator = fed.generator("new embeddings")
    # All ranks draw all embeddings, and keep those of their own clients.
    drawn = generator.standard_normal((len(fed.sizes), net.embedding))
    embeddings = state.phi.new_tensor(drawn[fed.clients[cohort.here]])
    velocity = embeddings.new_zeros(embeddings.shape)
    for number in range(options.welcome_rounds):
        theta = fed.greet(_rows(fed, state, embeddings), cohort)
        trained = fed.finetune(theta, cohort.here, recipe=_inner(fed), phase=number)
        delta = (theta - trained)[:, : net.outputs]
        gradient = net.embedding_gradient(state.phi, embeddings, delta)
        _step(options, embeddings, gradient, velocity)
    return fed.greet(_rows(fed, state, embeddings), cohort)


def _hypernetwork(fed: Federation[Options]) -> Hypernetwork:
    options = fed.options
    clients = fed.config.clients  # clients that join later have no embedding in φ
    return Hypernetwork(
        clients,
        options.hn_embedding or int(1 + clients / 4),
        options.hn_hidden,
        options.hn_layers,
        fed.layout.num_parameters,
    )


def _rows(fed: Federation[Options], state: State, embeddings: Tensor) -> Tensor:
    """Return h(v; φ) for each embedding v, with the shared running statistics."""
    with fed.timed("server"):
        generated = _hypernetwork(fed).rows(state.phi, embeddings)
        statistics = state.statistics.expand(len(generated), -1)
        return torch.cat([generated, statistics], dim=1)


def _ids(fed: Federation[Options], clients: Positions) -> Tensor:
    return on_device(fed.clients[clients], fed.device)


def _inner(fed: Federation[Options]) -> Recipe:
    """Return how a client trains; the authors count steps in place of epochs."""
    options = fed.options
    if options.inner == "common":
        return fed.recipe(fed.round)
    return Recipe(
        epochs=0,
        batch_size=options.inner_batch,
        lr=options.inner_lr,
        momentum=options.inner_momentum,
        weight_decay=options.inner_decay,
        clip=options.inner_clip,
        steps=options.inner_steps,
    )


def _step(options: Options, phi: Tensor, gradient: Tensor, velocity: Tensor) -> None:
    """Take a step of the server's SGD in place, each row's gradient clipped."""
    rule = Rule(options.hn_momentum, options.hn_decay, options.hn_clip)
    lr = phi.new_full((), options.hn_lr)
    descend(phi, gradient, velocity, None, lr, rule)
