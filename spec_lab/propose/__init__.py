"""Proposers: who drafts. One file each; they know neither verifiers nor each other."""

from spec_lab.engine.proposer import Branching, Proposer, branches, draws_of
from spec_lab.propose.null import Null

__all__ = ["Branching", "Null", "Proposer", "branches", "draws_of"]
