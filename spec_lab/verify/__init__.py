"""Verifiers: pure laws over a draft. See ``verdict`` for the contract."""

from spec_lab.verify.cascade import Cascade
from spec_lab.verify.gumbel import Gumbel, match_probability
from spec_lab.verify.kseq import KSeq
from spec_lab.verify.lenient import Lenient
from spec_lab.verify.match import Match
from spec_lab.verify.relaxed import Relaxed
from spec_lab.verify.token import Token
from spec_lab.verify.traversal import Traversal
from spec_lab.verify.typical import Typical
from spec_lab.verify.verdict import Choice, Verdict, Verifier, check_pair, choose

__all__ = [
    "Cascade",
    "Choice",
    "Gumbel",
    "KSeq",
    "Lenient",
    "Match",
    "Relaxed",
    "Token",
    "Traversal",
    "Typical",
    "Verdict",
    "Verifier",
    "check_pair",
    "choose",
    "match_probability",
]
