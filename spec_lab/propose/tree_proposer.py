"""Base class of proposers that draft the trees of a plan."""

from __future__ import annotations

from spec_lab.core.draft import Drawn
from spec_lab.core.probabilities import Sampling
from spec_lab.decode.proposer import Proposer, Requires
from spec_lab.propose.tree_plan import TreePlan


class TreeProposer(Proposer):
    """A proposer with a plan, which declares what follows from it.

    Args:
        plan: the trees, and how their tokens are drawn.
        name, requires, sha256: see ``Proposer``.
    """

    name: str
    drawn: Drawn
    nodes: int
    branches: bool
    requires: Requires
    sha256: str | None

    def __init__(self, plan: TreePlan, name: str, requires: Requires, sha256: str | None) -> None:
        self.plan, self.name, self.requires, self.sha256 = plan, name, requires, sha256
        self.drawn, self.tree, self.nodes, self.branches = plan.drawn, plan.tree, plan.nodes, plan.branches

    @property
    def why_not_stopped(self) -> str:
        """See ``TreePlan.why_not_stopped``."""
        return self.plan.why_not_stopped

    def check_sampling(self, sampling: Sampling) -> None:
        """See ``TreePlan.check_sampling``."""
        self.plan.check_sampling(sampling)
