"""What the server does when workers ask: keep their uploads, learn from them, generate
rows.

A request comes from all workers together, each with its own clients. The room is the
same on every server rank, and handles every request there, since learning is
collective.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from re import escape, fullmatch
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hpcfed.record import checkpoints
from hpcfed.record.checkpoints import Part
from hpcfed.record.observer import observer
from hpcfed.server.model import Diverged, LatentDiffusion, Learnt, Told
from hpcfed.server.options import ServerOptions
from hpcfed.server.training import Place

Verb = Literal[
    "bank",
    "learn",
    "recall",
    "invert",
    "reconstruct",
    "sample",
    "guide",
    "save",
    "store",
    "restore",
    "leave",
]


@dataclass(frozen=True)
class Request:
    """One worker's part of a request."""

    verb: Verb
    seed: int
    """Whose server: stacked seeds have one each."""
    clients: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Ids of the worker's clients that it is about."""
    details: dict[str, Any] = field(default_factory=dict)
    rows: Tensor | None = None
    """Travel in a buffer of their own."""


@dataclass(frozen=True)
class Answer:
    rows: Tensor | None = None
    known: np.ndarray | None = None
    """Which clients the server could answer for: those with an upload in the bank."""
    report: Learnt | None = None
    kept: float = float("nan")
    """Of all workers' clients that were generated anew, the share that is still nearest
    to its own uploads' latents.
    """
    seconds: float = 0.0
    """What the server took."""
    parts: tuple[Part, ...] = ()
    """Files of a checkpoint that the server has written."""
    failure: str = ""
    """Why there is no answer: the server has diverged."""


class Bank:
    """The uploads of the last rounds."""

    def __init__(self, rounds: int) -> None:
        self._most = rounds
        self._rounds: OrderedDict[int, tuple[np.ndarray, Tensor]] = OrderedDict()

    def add(self, round: int, clients: np.ndarray, rows: Tensor) -> None:
        finite = torch.isfinite(rows).all(
            1
        )  # one bad upload would spoil all that is learnt
        clients, rows = clients[finite.cpu().numpy()], rows[finite]
        order = np.argsort(
            clients
        )  # so that what is learnt does not depend on the placement of clients
        self._rounds[round] = (
            clients[order],
            rows[torch.from_numpy(order).to(rows.device)],
        )
        while len(self._rounds) > self._most:
            self._rounds.popitem(last=False)

    def store(self, folder: Path, seed: int) -> list[Part]:
        """Writes everything to a checkpoint; an empty bank has nothing."""
        parts = []
        for round, (clients, rows) in self._rounds.items():
            parts.append(
                checkpoints.write(
                    folder, f"server-{seed}.bank-{round}.clients", clients
                )
            )
            parts.append(
                checkpoints.write(
                    folder, f"server-{seed}.bank-{round}.rows", rows.cpu().numpy()
                )
            )
        return parts

    def restore(
        self, folder: Path, seed: int, width: int, device: torch.device
    ) -> None:
        beginning, end = f"server-{seed}.bank-", ".rows.npy"
        found = (
            fullmatch(f"{escape(beginning)}([0-9]{{1,18}}){escape(end)}", name)
            for name in checkpoints.listed(folder)
        )
        for round in sorted(int(name[1]) for name in found if name):
            clients = checkpoints.load(
                folder, f"{beginning}{round}.clients", np.int64, [None]
            )
            rows = checkpoints.load(
                folder, f"{beginning}{round}.rows", np.float32, [len(clients), width]
            )
            self._rounds[round] = clients, torch.from_numpy(rows).to(device)

    def rows(self) -> Tensor:
        return torch.cat([rows for _, rows in self._rounds.values()])

    def owners(self) -> np.ndarray:
        """Whose upload each of the rows is."""
        return np.concatenate([clients for clients, _ in self._rounds.values()])

    def newest(self, clients: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Which of the clients are in the bank, and the last upload of each of those."""
        newest: dict[int, Tensor] = {}
        for ids, rows in self._rounds.values():
            newest.update(zip(ids.tolist(), rows, strict=True))
        known = np.array([client in newest for client in clients], bool)
        found = [newest[int(client)] for client in clients[known]]
        return known, torch.stack(found) if found else self.rows()[:0]


class ServerRank:
    """All seeds' servers, on one server rank."""

    def __init__(
        self,
        widths: Sequence[int],
        options: ServerOptions,
        place: Place,
        *,
        seeds: Sequence[int],
        told: Told,
        gather: Callable[[float], list[float]],
    ) -> None:
        """`gather` brings a number of every server rank together."""
        self._widths, self._options, self._place = list(widths), options, place
        self._told, self._gather = told, gather
        self._banks: dict[int, Bank] = {}
        self._models: dict[int, LatentDiffusion] = {}
        if (
            options.server_load
        ):  # a file that does not serve is told before clients have trained for hours
            for seed in seeds:
                self.model(seed)

    def model(self, seed: int) -> LatentDiffusion:
        if seed not in self._models:
            self._models[seed] = LatentDiffusion(
                self._widths, self._options, self._place, seed=seed
            )
        return self._models[seed]

    def handle(self, requests: Sequence[Request]) -> list[Answer | None]:
        """Every worker's answer; None where nobody waits for one."""
        try:
            return self._handle(requests)
        except (
            Diverged
        ) as error:  # workers end the run: they know its folder, and who is to speak
            return [Answer(failure=str(error)) for _ in requests]

    def _handle(self, requests: Sequence[Request]) -> list[Answer | None]:
        begin = time.perf_counter()
        first = requests[0]
        seed, details = first.seed, first.details
        match first.verb:
            case "bank":
                self._bank(seed).add(
                    details["round"],
                    np.concatenate([r.clients for r in requests]),
                    _all_rows(requests),
                )
                return [None] * len(requests)
            case "learn":
                report = self.model(seed).learn(self._banks[seed].rows(), self._told)
                report.note_peak(self._place.device)
                report.peak_memory = self._gather(float(report.own_peak))
                return [
                    Answer(report=report, seconds=time.perf_counter() - begin)
                    for _ in requests
                ]
            case "save":
                if self._place.rank == 0:
                    self.model(seed).save(Path(details["path"]))
                return [Answer() for _ in requests]
            case "store":
                return [
                    Answer(parts=tuple(self._store(seed, Path(details["folder"]))))
                    for _ in requests
                ]
            case "restore":
                self._restore(seed, Path(details["folder"]))
                return [Answer() for _ in requests]
            case "sample":
                order = np.argsort(np.concatenate([r.clients for r in requests]))
                made = self.model(seed).sample(len(order))
                self.model(seed).check_rows("sample", made)
                rows = made[
                    torch.from_numpy(np.argsort(order)).to(made.device)
                ]  # the same for a client anywhere
            case "guide":
                before, after = _all_rows(requests).split(
                    sum(len(r.clients) for r in requests)
                )
                rows = self.model(seed).guide(before, after, **details)
                trained = torch.isfinite(before).all(1) & torch.isfinite(after).all(1)
                self.model(seed).check_rows(
                    "guide", rows, trained
                )  # a client may itself have failed
            case "recall" | "invert" | "reconstruct":
                with observer().span(first.verb):
                    return self._generated(requests, begin)
            case _:
                raise AssertionError(first.verb)
        return [
            Answer(rows=part, seconds=time.perf_counter() - begin)
            for part in _shares(rows, requests)
        ]

    def _store(self, seed: int, folder: Path) -> list[Part]:
        """The first server rank writes: all of them have the same rows and networks."""
        if self._place.rank:
            return []
        parts = self._bank(seed).store(folder, seed)
        if seed in self._models and self._models[seed].learnt:
            file = folder / f"server-{seed}.h5"
            self._models[seed].save(file)
            parts.append(checkpoints.existing(file))
        return parts

    def _restore(self, seed: int, folder: Path) -> None:
        self._bank(seed).restore(folder, seed, sum(self._widths), self._place.device)
        if f"server-{seed}.h5" in checkpoints.listed(folder):
            self.model(seed).load(folder / f"server-{seed}.h5")

    def _bank(self, seed: int) -> Bank:
        return self._banks.setdefault(seed, Bank(self._options.bank_rounds))

    def _generated(
        self, requests: Sequence[Request], begin: float
    ) -> list[Answer | None]:
        """Of the newest uploads of the clients; all at once, in the order of ids,
        wherever clients live.
        """
        model, bank = self.model(requests[0].seed), self._banks[requests[0].seed]
        clients = np.concatenate([request.clients for request in requests])
        order = np.argsort(clients)
        known, uploads = bank.newest(clients[order])
        kept = float("nan")
        match requests[0].verb:
            case "recall":
                made = uploads
            case "reconstruct":
                made = model.reconstruct(uploads)
            case _:
                made = model.invert(uploads, depth=requests[0].details.get("depth"))
                kept = _kept(model, bank, clients[order][known], made)
        model.check_rows(requests[0].verb, made)
        rows = made.new_zeros(len(clients), made.shape[1])
        rows[torch.from_numpy(order[known]).to(rows.device)] = made
        everyone = np.zeros(len(clients), bool)
        everyone[order[known]] = True
        cuts = np.cumsum([len(request.clients) for request in requests])[:-1]
        parts = zip(_shares(rows, requests), np.split(everyone, cuts), strict=True)
        return [
            Answer(part, known, kept=kept, seconds=time.perf_counter() - begin)
            for part, known in parts
        ]


def _kept(
    model: LatentDiffusion, bank: Bank, clients: np.ndarray, made: Tensor
) -> float:
    """For which share of the clients the nearest centre, the mean latent of a client's
    uploads, is their own.
    """
    ids, whose = np.unique(bank.owners(), return_inverse=True)
    at = torch.from_numpy(whose).to(made.device)
    latents = model.encode(bank.rows())
    centres = latents.new_zeros(len(ids), latents.shape[1]).index_add_(
        0, at, latents
    ) / at.bincount().unsqueeze(1)
    nearest = torch.cdist(model.encode(made), centres).argmin(1)
    own = torch.from_numpy(np.searchsorted(ids, clients)).to(made.device)
    return float((nearest == own).float().mean())


def _all_rows(requests: Sequence[Request]) -> Tensor:
    """The workers' rows one after the other; of guided clients first everyone's rows
    before, then after.
    """
    count = 2 if requests[0].verb == "guide" else 1
    blocks = [
        torch.chunk(r.rows, count)
        for r in requests
        if r.rows is not None and len(r.rows)
    ]
    return torch.cat([part for block in zip(*blocks, strict=True) for part in block])


def _shares(rows: Tensor, requests: Sequence[Request]) -> list[Tensor]:
    return list(rows.split([len(request.clients) for request in requests]))
