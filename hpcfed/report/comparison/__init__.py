"""Comparison of two runs or studies, A and B: what changed, and what it did."""

from hpcfed.report.comparison.comparison import Comparison, compare
from hpcfed.report.comparison.conditions import Outcome, judge_all, read_conditions
from hpcfed.report.comparison.exported import exported
from hpcfed.report.comparison.printed import print_comparison

__all__ = [
    "Comparison",
    "Outcome",
    "compare",
    "exported",
    "judge_all",
    "print_comparison",
    "read_conditions",
]
