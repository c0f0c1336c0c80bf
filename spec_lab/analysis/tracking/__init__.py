"""Weights & Biases: a view of a run's rows, drawn while the run goes on or from its files later.

``view`` says what the rows show there, ``board`` logs it, ``tracker`` is what a run tells its progress to, ``replay``
is ``spec-lab track``, ``dashboard`` lays it all out. The files under the run's directory stay the truth; wandb is known
in this package only, and imported when it is first needed.
"""

from spec_lab.analysis.tracking.replay import track, track_all
from spec_lab.analysis.tracking.tracker import Files, Tracker, Wandb
from spec_lab.analysis.tracking.view import group_figures

__all__ = ["Files", "Tracker", "Wandb", "group_figures", "track", "track_all"]
