"""For the tests of parts of your own: enumerate a few toys, as ``spec-lab check`` does, in about a second.

``assert_lossless(Mine())`` fails with the smallest counter-example, in words.
"""

from __future__ import annotations

from collections.abc import Callable

from spec_lab.constrain import AppliedConstraint, Constraint
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.models.target import Target
from spec_lab.policy.adaptive import adapt
from spec_lab.policy.policy import Policy
from spec_lab.propose import Proposer
from spec_lab.tasks.certify.check import CheckedPair, check, toy_target, toy_vocabulary
from spec_lab.verify import Token, Verifier

__all__ = ["CheckedPair", "assert_lossless", "check_parts", "toy_target", "toy_vocabulary"]


def check_parts(
    verifier: Verifier | None = None,
    proposer: Proposer | Callable[[Target], Proposer] | None = None,
    policy: Policy | None = None,
    constraint: Constraint | Callable[[Vocabulary], Constraint] | None = None,
) -> list[CheckedPair]:
    """Enumerate every outcome of a few toys with these parts.

    Args:
        verifier: None: ``Token``.
        proposer: a proposer, or what builds it for a target, such as ``Mine.load``, which is called with toy targets.
            None: a draft model drafts, in each way of drawing that the verifier accepts.
        policy: limits the proposer.
        constraint: a constraint with a ``toy``, or what builds it for a vocabulary, such as ``Mine.load``; it is called
            with ``toy_vocabulary()``.

    Returns:
        One result for each way of drawing: its ``verdict``, whether it ``failed``, and its ``lines``.

    Raises:
        ValueError: the policy and the proposer do not go together; a policy without a proposer.
    """
    if policy is not None:
        if proposer is None:
            raise ValueError("policy limits a proposer: give one")
        given, rule = proposer, policy
        if isinstance(given, Proposer):
            proposer = adapt(given, rule)
        else:
            proposer = lambda target: adapt(given(target), rule)  # noqa: E731
    applied = None
    if constraint is not None:
        built = constraint if isinstance(constraint, Constraint) else constraint(toy_vocabulary())
        applied = AppliedConstraint(built)
    return check(Token() if verifier is None else verifier, proposer, applied)


def assert_lossless(
    verifier: Verifier | None = None,
    proposer: Proposer | Callable[[Target], Proposer] | None = None,
    policy: Policy | None = None,
    constraint: Constraint | Callable[[Vocabulary], Constraint] | None = None,
) -> None:
    """Assert that the output has the target's distribution. Arguments and errors as in ``check_parts``.

    Raises:
        AssertionError: it has not, or it could not be enumerated; with the smallest counter-example.
    """
    results = check_parts(verifier, proposer, policy, constraint)
    wrong = [result for result in results if result.failed or not result.verdict.startswith("lossless")]
    assert results and not wrong, "\n" + "\n".join(line for result in wrong for line in result.lines())
