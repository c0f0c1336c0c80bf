"""Verifiers: pure laws over a draft. See ``verdict`` for the contract."""

from spec_lab.verify.match import Match
from spec_lab.verify.token import Token
from spec_lab.verify.traversal import Traversal
from spec_lab.verify.verdict import Choice, Verdict, Verifier, check_pair, choose

__all__ = ["Choice", "Match", "Token", "Traversal", "Verdict", "Verifier", "check_pair", "choose"]
