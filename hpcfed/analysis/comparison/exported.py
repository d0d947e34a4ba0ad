"""A comparison as plain values, for JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hpcfed.analysis.comparison.comparison import Comparison
from hpcfed.analysis.comparison.points import Figure, PointPair
from hpcfed.analysis.comparison.texts import changed, group_name, verdict, verdicts


def exported(comparison: Comparison) -> dict[str, Any]:
    """Return what the page says about A and B."""
    before, after = comparison.names
    return {
        "a": before,
        "b": after,
        "verdicts": [changed(comparison), *verdicts(comparison)],
        "options": [asdict(change) for change in comparison.options],
        "code": [asdict(change) for change in comparison.code],
        "costs": _figures(comparison.costs),
        "phases": _figures(comparison.phases),
        "judged": _figures(comparison.headlines),
        "points": [_point(point) for point in comparison.points],
        "only_in_a": [group_name(group) for group in comparison.only_before],
        "only_in_b": [group_name(group) for group in comparison.only_after],
    }


def _figures(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    return [_figure(figure) for figure in figures]


def _figure(figure: Figure) -> dict[str, Any]:
    return {
        "name": figure.name,
        "unit": figure.unit,
        "a": figure.before,
        "b": figure.after,
        # B / A, or B − A.
        "kind": "ratio" if figure.neutral else "difference",
        "change": asdict(figure.change),
        "verdict": verdict(figure),
        "interval_over": figure.found.basis,
    }


def _point(point: PointPair) -> dict[str, Any]:
    return {
        "options": dict(point.key),
        "clients": [point.before.clients, point.after.clients],
        "ranks": [point.before.ranks, point.after.ranks],
        "costs": _figures(point.costs),
        "judged": _figures(point.headlines),
    }
