"""Constraints: states along a path that say what may come next, or what must happen first.

``state`` is the protocol, ``binding`` says where a constraint binds and drives it through the decode loop. Grammars:
``engines``. ``control`` turns a ``Controller`` (the Branch
protocol) into a constraint; ``healing``, ``banned`` and ``lengths`` are text's own; ``together`` binds by several.
"""

from spec_lab.constrain.applied import AppliedConstraint, StepConstraint
from spec_lab.constrain.protocol import Constraint, Masks, Onward, State, Stuck

__all__ = ["AppliedConstraint", "Constraint", "Masks", "Onward", "State", "StepConstraint", "Stuck"]
