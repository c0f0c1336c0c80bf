"""Constrained decoding: token masks that follow a state, and actions such as backtracking and forking.

``protocol`` defines constraints and their states, ``applied`` says what a constraint applies to (target, draft, both)
and computes each step's masks. ``engines`` compile grammars. ``control`` turns a ``Controller`` (the Branch protocol)
into a constraint. ``healing``, ``banned`` and ``min_new_tokens`` follow from options of the run; ``combined`` applies
several constraints at once.
"""

from spec_lab.constrain.applied import AppliedConstraint, StepConstraint
from spec_lab.constrain.protocol import Constraint, ConstraintError, ConstraintState, Continuation, Masks

__all__ = [
    "AppliedConstraint",
    "Constraint",
    "ConstraintError",
    "ConstraintState",
    "Continuation",
    "Masks",
    "StepConstraint",
]
