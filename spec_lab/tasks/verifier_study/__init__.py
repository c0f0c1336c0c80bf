"""The verifier study: every verifier verifies the same drafts. A verifier returns probabilities, so nothing is decoded.

The target's own texts are recorded once. At positions along them every proposer drafts below the recorded prefix, and
all verifiers get the same draft and the same target probabilities.
"""

from spec_lab.tasks.verifier_study.task import study_verifiers

__all__ = ["study_verifiers"]
