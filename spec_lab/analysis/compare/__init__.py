"""Runs and sweeps side by side: what differs between them, what changed, and which changes are real.

The first run is the reference. Acceptance is compared prompt by prompt and speed group by group where both runs have
the same prompts, whatever their numbers; prompts that only one of them has are left out. Speeds are compared as
speed-ups over each run's own baseline: tokens per second of two runs were measured at different times.

A change is called real if its interval leaves out "no change" at a level shared by all changes that are judged
(Bonferroni): then all of them hold at once. Intervals are over prompts. What one run has and its repetition has not (a
busy machine, memory laid out otherwise) is not in them.
"""

from spec_lab.analysis.compare.changes import Comparison, Difference, Pair, compare
from spec_lab.analysis.compare.show import as_frame, show
from spec_lab.analysis.compare.sides import Fact, Side

__all__ = ["Comparison", "Difference", "Fact", "Pair", "Side", "as_frame", "compare", "show"]
