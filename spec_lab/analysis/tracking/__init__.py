"""Weights & Biases: show the rows of a run, while it runs or from its files later.

``facts`` selects what describes a run there (config, tags, group), ``headline`` names its figures, ``series`` its
points, ``tables`` its tables; ``client`` logs them, ``tracker`` is the protocol that a run calls, ``replay`` is
``spec-lab track``, ``dashboard`` defines the workspace. The files in the run's directory remain authoritative; wandb is
used in this package only, and imported when it is first needed.
"""

from spec_lab.analysis.tracking.replay import track, track_all
from spec_lab.analysis.tracking.series import group_figures
from spec_lab.analysis.tracking.tracker import Files, Guarded, Tracker, Wandb

__all__ = ["Files", "Guarded", "Tracker", "Wandb", "group_figures", "track", "track_all"]
