"""Compare runs and sweeps: how they differ, what changed, and which changes are significant.

The first run is the reference. Acceptance is compared prompt by prompt and speed group by group where both runs have
the same prompts, in any order; prompts that only one of them has are left out. Speeds are compared as speed-ups over
each run's own baseline, because tokens per second of two runs were measured at different times; the tested figure is
the geometric mean of the groups' speed-ups (``speedup_geometric_mean``).

A change is significant if its interval excludes "no change" at a level that holds for all tested changes at once
(Bonferroni). Intervals are over prompts. Differences between a run and its repetition (a busy machine, another memory
layout) are not in them.
"""

from spec_lab.analysis.compare.changes import Comparison, compare
from spec_lab.analysis.compare.frame import as_frame
from spec_lab.analysis.compare.pairing import ArmComparison, FigureChange
from spec_lab.analysis.compare.selection import SelectedRun, SettingValues

__all__ = [
    "ArmComparison",
    "Comparison",
    "FigureChange",
    "SelectedRun",
    "SettingValues",
    "as_frame",
    "compare",
]
