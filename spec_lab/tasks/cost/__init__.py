"""Costs of drafted nodes on this machine, and the speed-up that follows from it.

The seconds t(n; batch, context) of a step with n draft nodes for each sequence are measured with the engine's own step
function, and so are the seconds that each proposer adds. Together with the tokens per step they predict a speed-up.
"""

from spec_lab.tasks.cost.predict import Cost, predict, predicted_and_measured, predicted_speedups
from spec_lab.tasks.cost.tables import load
from spec_lab.tasks.cost.task import measure

__all__ = ["Cost", "load", "measure", "predict", "predicted_and_measured", "predicted_speedups"]
