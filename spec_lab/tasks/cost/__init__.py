"""What drafted nodes cost on this machine, and the speed-up that follows from it.

The seconds t(n; batch, context) of a round in which n nodes stand below every sequence are measured by the project's
own loop, and so is what each proposer adds. Together with the tokens that a step gives they predict a speed-up.
"""

from spec_lab.tasks.cost.predict import Cost, beside_measured, predict, predicted_speedups
from spec_lab.tasks.cost.tables import load
from spec_lab.tasks.cost.task import measure

__all__ = ["Cost", "beside_measured", "load", "measure", "predict", "predicted_speedups"]
