"""Proposers: who drafts. One file each; they know neither verifiers nor each other."""

from spec_lab.propose.null import Null
from spec_lab.propose.proposer import Branching, Proposer, branches

__all__ = ["Branching", "Null", "Proposer", "branches"]
