"""Verifiers: pure functions of a draft and target probabilities. See ``verdict`` for the contract."""

from spec_lab.verify.cascade import Cascade
from spec_lab.verify.diversed import Diversed
from spec_lab.verify.fly import FLy
from spec_lab.verify.gumbel import Gumbel, match_probability
from spec_lab.verify.kseq import KSeq
from spec_lab.verify.lenient import Lenient
from spec_lab.verify.match import Match, greedy_path
from spec_lab.verify.relaxed import Relaxed
from spec_lab.verify.synthetic import Synthetic
from spec_lab.verify.token import Token
from spec_lab.verify.traversal import Traversal
from spec_lab.verify.typical import Typical
from spec_lab.verify.verdict import (
    Choice,
    Misfit,
    Replayed,
    Verdict,
    Verifier,
    check_draft,
    check_pair,
    choose,
    misfit,
)

__all__ = [
    "Cascade",
    "Choice",
    "Diversed",
    "FLy",
    "Gumbel",
    "KSeq",
    "Lenient",
    "Match",
    "Misfit",
    "Relaxed",
    "Replayed",
    "Synthetic",
    "Token",
    "Traversal",
    "Typical",
    "Verdict",
    "Verifier",
    "check_draft",
    "check_pair",
    "choose",
    "greedy_path",
    "match_probability",
    "misfit",
]
