"""Recorded drafts, judged by every verifier that accepts them: a verifier is a law, so no decoding is needed.

The target's own texts are recorded once. At places along them every proposer drafts below the true prefix, and all
verifiers are asked about the very same draft and target law.
"""

from spec_lab.tasks.verifier_study.task import judge

__all__ = ["judge"]
