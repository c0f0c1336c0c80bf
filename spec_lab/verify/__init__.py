"""Verifiers: pure laws over a draft. See ``verdict`` for the contract."""

from spec_lab.verify.verdict import Verdict, Verifier, check_pair, choose

__all__ = ["Verdict", "Verifier", "check_pair", "choose"]
