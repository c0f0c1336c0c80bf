"""Proposers: who drafts. One file each; they know neither verifiers nor each other."""

from spec_lab.decode.proposer import Observation, Proposer, Requires
from spec_lab.propose.null import Null

__all__ = ["Null", "Observation", "Proposer", "Requires"]
