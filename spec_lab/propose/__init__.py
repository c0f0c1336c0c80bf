"""Proposers: who drafts. One file each; they know neither verifiers nor each other."""

from spec_lab.decode.proposer import (
    Branching,
    CertifiableProposer,
    ChecksSampling,
    LearnsAcrossRequests,
    Proposer,
    branches,
    check_requires,
    check_sampling,
    draws_of,
)
from spec_lab.propose.null import Null

__all__ = [
    "Branching",
    "CertifiableProposer",
    "ChecksSampling",
    "LearnsAcrossRequests",
    "Null",
    "Proposer",
    "branches",
    "check_requires",
    "check_sampling",
    "draws_of",
]
