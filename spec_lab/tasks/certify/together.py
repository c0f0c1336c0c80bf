"""Enumeration of several requests that are decoded together, for policies and stores that act across sequences.

Each request's output must have the target's distribution, whatever the others draft, and outputs of different requests
must be independent: their joint distribution is the product. One script makes the choices of all requests, so every
combination of their drafts, verdicts and tokens is visited, with the tolerances of ``exact``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import reduce
from itertools import product
from math import prod

import numpy as np
import torch

from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import Draws
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.tasks.certify.enumeration import side_by_side
from spec_lab.tasks.certify.exact import MAX_DECODINGS, Finding, ToyParts, Tree, verified
from spec_lab.tasks.certify.ground_truth import truth
from spec_lab.tasks.certify.instances import Instance
from spec_lab.tasks.certify.outputs import (
    EXACT,
    Distribution,
    Output,
    StepOutputs,
    first_difference,
    text_probabilities,
)
from spec_lab.tasks.certify.toy_models import code
from spec_lab.verify import Verifier


@torch.inference_mode()
def examine_together(
    instance: Instance, parts: ToyParts, verifier: Verifier, sampling: Sampling, max_decodings: int = MAX_DECODINGS
) -> Finding:
    """Enumerate an instance of several requests. Errors are those of ``exact.examine``."""
    examined = _loop if instance.tokens else _step
    return examined(instance, parts, verifier, sampling, max_decodings)


def _step(instance: Instance, parts: ToyParts, verifier: Verifier, sampling: Sampling, max_decodings: int) -> Finding:
    """Enumerate the drafts of one step of all requests; verdicts give the outputs without sampling."""
    v, start = instance.toy.v, len(instance.start)
    p = [after[code(instance.start, v) * v**k :][: v**k] for k, after in enumerate(parts.p[start:])]
    each = [StepOutputs(v, len(p)) for _ in range(instance.requests)]
    joint = np.zeros((v ** len(p),) * instance.requests)
    accepted = expected = 0.0
    outcomes = drafted = 0

    def play(draws: Draws, _: int) -> list[list[Tree]]:
        parts.forget()
        return [verified(instance, parts, verifier, sampling, draws, instance.requests)]

    for probability, trees in side_by_side(play, 1, max_decodings):
        outcomes += 1
        of_outcome = [StepOutputs(v, len(p)) for _ in trees]
        for of_request, so_far, tree in zip(of_outcome, each, trees, strict=True):
            drafted += len(tree.depth) - 1
            tree.add_to(of_request, 1.0)
            tree.add_to(so_far, probability)
            accepted += probability * float(tree.ends.sum(-1) @ tree.depth)
            expected += probability * tree.expected
        joint += probability * _outer([outputs.extended(p) for outputs in of_outcome])
    tv = 0.5 * float(np.abs(joint - _outer([text_probabilities(p, len(p))] * instance.requests)).sum())
    failures = [outputs.first_failure(p) for outputs in each]
    return Finding(instance.name, tv, float(joint.sum()), _failure(failures, tv), accepted, expected, outcomes, drafted)


def _loop(instance: Instance, parts: ToyParts, verifier: Verifier, sampling: Sampling, max_decodings: int) -> Finding:
    """Enumerate the decode loop of all requests."""
    joint: dict[tuple[Output, ...], float] = defaultdict(float)
    accepted = expected = 0.0
    outcomes = drafted = 0

    def play(draws: Draws, _: int) -> list[tuple[tuple[Output, ...], float, float, int]]:
        parts.forget()
        requests = [instance.request(number, sampling) for number in range(instance.requests)]
        group = fixed_group(Arm(parts.target, parts.proposer, verifier, draws, instance.applied), requests)
        steps = list(group)
        outputs = tuple(
            tuple(
                (tuple(sequence.emitted), str(sequence.finish))
                for sequence in sorted(group.sequences, key=lambda live: live.lineage)
                if sequence.request.id == request.id
            )
            for request in requests
        )
        kept = sum(len(got.path) - got.count(accepted=True, forced=True) for info in steps for got in info.committed)
        expectation = sum(float(info.expected.sum()) for info in steps)
        return [(outputs, kept, expectation, sum(info.draft.shape.nodes for info in steps))]

    for probability, (outputs, kept, expectation, nodes) in side_by_side(play, 1, max_decodings):
        outcomes, drafted = outcomes + 1, drafted + nodes
        joint[outputs] += probability
        accepted, expected = accepted + probability * kept, expected + probability * expectation
    of_target = truth(instance, sampling)
    each = [Distribution() for _ in range(instance.requests)]
    for outputs, probability in joint.items():
        for so_far, output in zip(each, outputs, strict=True):
            so_far[output] = so_far.get(output, 0.0) + probability
    independent = {
        outputs: prod(map(of_target.__getitem__, outputs)) for outputs in product(of_target, repeat=instance.requests)
    }
    tv = 0.5 * sum(abs(joint.get(key, 0.0) - independent.get(key, 0.0)) for key in {*joint, *independent})
    failures = [first_difference(outputs, of_target) for outputs in each]
    mass = sum(joint.values())
    return Finding(instance.name, tv, mass, _failure(failures, tv), accepted, expected, outcomes, drafted)


def _outer(each: Sequence[np.ndarray]) -> np.ndarray:
    """Return the joint distribution of independent outputs."""
    return reduce(np.multiply.outer, each)


def _failure(failures: Sequence[str | None], tv: float) -> str | None:
    """Return what is wrong: a request's own distribution, else the independence of the requests."""
    for number, wrong in enumerate(failures):
        if wrong is not None:
            return f"request {number} of {len(failures)}: {wrong}"
    if tv <= EXACT:
        return None
    return (
        f"each of {len(failures)} requests has the target's distribution, but they are not independent: their joint "
        f"distribution has a total variation of {tv:.3g} from the product. A decision in one request depends on tokens "
        "drawn in another: let decide and admit follow from earlier steps or from admitted rows "
        "(docs/how_to/policies.md)"
    )
