"""Figures of clients' rows: where they lie, what is between two of them, and what the
server generates from several depths of inversion.
"""

from collections.abc import Sequence

import numpy as np

import hpcfed
from benchmarks.paper.pictures import Picture, Runs, line_of
from benchmarks.paper.study import Drawing
from hpcfed.analysis.render import charts
from hpcfed.analysis.render.charts import Axis, Line, ScatterPoint, scatter
from hpcfed.options import Settings
from hpcfed.results.run import RunRecord, mean_accuracy

BEYOND = 0.25
"""How far the line between two rows goes on beyond each, by their distance."""
POINTS = 31
"""Points on that line."""
RIVALS = ("upload", "mean of uploads")
"""Finals that need no inversion."""


def depths(drawing: Drawing, runs: Sequence[Runs]) -> Picture | None:
    """Draw the accuracy of rows that the server generates by the depth of inversion,
    beside what needs none, and the paper's figure.
    """
    ((cell, records),) = runs
    found = [record.depths for record in records if record.depths is not None]
    if not found:
        return None
    depth = found[0].depth
    values = [[mean_accuracy(at) for at in sweep.accuracy] for sweep in found]
    lines = [line_of("generated", depth, 100 * np.array(values))]
    ends = [float(depth[0]), float(depth[-1])]
    for rival in RIVALS:
        finals = [one.finals[rival] for one in records if rival in one.finals]
        if finals:
            level = 100 * float(np.mean([mean_accuracy(final) for final in finals]))
            lines.append(Line(rival, ends, [level, level]))
    printed = cell.study.ablation.figures.get(cell.names[0], {}).get("pFedGPA")
    if printed is not None:
        level = printed.value
        lines.append(Line("the paper's generated", ends, [level, level], ideal=True))
    subject = drawing.label or "accuracy of generated rows by depth of inversion"
    x = Axis("steps of diffusion before the way back", whole=True)
    y = Axis("accuracy, %")
    return Picture(charts.lines(subject, lines, x, y), subject)


def between(drawing: Drawing, runs: Sequence[Runs]) -> Picture | None:
    """Draw the loss of rows on the line from one client's row to that which is farthest
    from it, on the test data of both clients.
    """
    ((cell, (record,)),) = runs
    rows, owners = _last_rows(record)
    if len(rows) < 2:
        return None
    other = int(((rows - rows[0]) ** 2).sum(1).argmax())
    at = np.linspace(-BEYOND, 1 + BEYOND, POINTS)
    line = rows[0] + at[:, None] * (rows[other] - rows[0])
    pair = [int(owners[0]), int(owners[other])]
    losses = _losses(cell.settings.of_seed(record.facts["seed"]), line, pair)
    lines = []
    for client, loss in zip(pair, losses, strict=True):
        lines.append(Line(f"test data of client {client}", at.tolist(), loss.tolist()))
    both = np.mean(losses, axis=0)
    lines.append(Line("of both", at.tolist(), both.tolist()))
    subject = drawing.label or "loss between the rows of two clients"
    x = Axis(f"from client {pair[0]} (0) to client {pair[1]} (1)")
    return Picture(charts.lines(subject, lines, x, Axis("loss")), subject)


def _last_rows(record: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the last snapshot, and whose each is."""
    if not int(record.config["snapshot_every"]):
        return np.empty((0, 0)), np.empty(0, int)
    snapshot = hpcfed.open(record.folder).parameters()
    took_part = ~np.isnan(snapshot.rows).any(1)
    return snapshot.rows[took_part], snapshot.clients[took_part]


def _losses(
    settings: Settings, rows: np.ndarray, clients: Sequence[int]
) -> list[np.ndarray]:
    """Return the loss of each row on the test data of each client."""
    import torch

    from hpcfed.experiment.assemble import assemble
    from hpcfed.runtime import process_group, world
    from hpcfed.runtime.timer import Timer

    here = world.enter(device="cpu")
    fed = assemble(settings, here, Timer(here.device)).federation
    points = torch.from_numpy(rows).to(fed.initial_row())
    losses = []
    for client in clients:
        score = fed.evaluate(points, np.full(len(points), client))
        losses.append((score.loss / score.count).double().numpy())
    process_group.leave()
    return losses


def map_of_clients(drawing: Drawing, runs: Sequence[Runs]) -> Picture | None:
    """Draw what clients' training did to their rows on its two principal axes: a point
    for every snapshot, a colour and marker for every client.
    """
    ((_, records),) = runs
    rows, owners = _updates(records[0])
    if len(rows) < 3:
        return None
    points, shares = principal_axes(rows)
    drawn = []
    for (first, second), client in zip(points.tolist(), owners.tolist(), strict=True):
        drawn.append(ScatterPoint(first, second, series=str(client)))
    subject = drawing.label or "updates of clients by client, on two principal axes"
    x = Axis(f"first axis, {shares[0]:.0%} of the variance")
    y = Axis(f"second axis, {shares[1]:.0%} of the variance")
    return Picture(scatter(subject, drawn, x, y), subject)


def _updates(record: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    """Return clients' rows of all snapshots without the mean of their round, which
    drifts, and whose each is.
    """
    every = int(record.config["snapshot_every"])
    rows, owners = [], []
    run = hpcfed.open(record.folder)
    for round in range(every, record.rounds_done + 1, every) if every else ():
        snapshot = run.parameters(round)
        took_part = ~np.isnan(snapshot.rows).any(1)
        trained = snapshot.rows[took_part]
        rows.append(trained - trained.mean(0))
        owners.append(snapshot.clients[took_part])
    if not rows:
        return np.empty((0, 0)), np.empty(0, int)
    return np.concatenate(rows), np.concatenate(owners)


def principal_axes(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where rows lie on their two principal axes, [rows, 2], and the share of
    the variance on each.
    """
    centred = rows - rows.mean(0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    shares = sizes**2 / max(float((sizes**2).sum()), np.finfo(float).tiny)
    return left[:, :2] * sizes[:2], shares[:2]
