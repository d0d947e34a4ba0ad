"""Comparison of two runs or studies, A and B: what changed, and its effect."""

from hpcfed.analysis.comparison.comparison import Comparison, compare
from hpcfed.analysis.comparison.conditions import Decision, judge_all, read_conditions
from hpcfed.analysis.comparison.shown import exported, print_comparison

__all__ = [
    "Comparison",
    "Decision",
    "compare",
    "exported",
    "judge_all",
    "print_comparison",
    "read_conditions",
]
