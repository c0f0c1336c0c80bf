"""Greedy speculative output is the greedy output of the bundled model, token for token, in float64.

A sample of what ``experiments/exactness/greedy.py`` compares; the truth is a bare loop over transformers' model.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from experiments.exactness.greedy import (
    GREEDY,
    PROPOSERS,
    VERIFIERS,
    ZOO,
    decoded,
    differences,
    draft,
    pairs,
    some_prompts,
    truth,
)  # fmt: skip
from spec_lab import verify
from spec_lab.models.target import Target
from spec_lab.tasks.lab import requests_of

NEW, PROMPTS, LONGEST = 16, 9, 32

DETERMINISTIC = {"token", "traversal", "match", "lenient"}
IID = DETERMINISTIC | {"kseq"}
RACED = {"match", "gumbel"}
EXPECTED = {
    "none": DETERMINISTIC,
    "draft_chain": IID,
    "draft_chain gumbel": RACED,
    "draft_chain warm": IID,
    "draft_tree": DETERMINISTIC,
    "draft_tree iid warm": IID,
    "draft_tree without warm": DETERMINISTIC,
    "draft_tree gumbel warm": RACED,
    "medusa": DETERMINISTIC,
    "ngram": DETERMINISTIC,
    "ngram_tree": DETERMINISTIC,
}
"""Which verifiers support which drafts; all other pairs are refused when a run is composed."""

SHORT = {
    "none": "token",
    "draft_chain": "kseq",
    "draft_chain gumbel": "gumbel",
    "draft_chain warm": "token",
    "draft_tree": "traversal",
    "draft_tree iid warm": "lenient",
    "draft_tree without warm": "traversal",
    "draft_tree gumbel warm": "match",
    "medusa": "token",
    "ngram": "match",
    "ngram_tree": "traversal",
}
"""The pairs of the short run: each proposer, and each verifier at least once. All others are nightly."""

BY_NAME = {verifier.name: verifier for verifier in VERIFIERS}


@pytest.fixture(scope="module")
def target():
    return Target.load(str(ZOO / "target"), dtype="float64")


@pytest.fixture(scope="module")
def proposers(target):
    return {name: load(target) for name, load in PROPOSERS.items()}


@pytest.fixture(scope="module")
def requests(target):
    """Three prompts of each workload; of long ones the ends."""
    whole = requests_of(target, some_prompts(PROMPTS), GREEDY, NEW)
    return [replace(request, tokens=request.tokens[-LONGEST:]) for request in whole]


@pytest.fixture(scope="module")
def truths(requests):
    model = AutoModelForCausalLM.from_pretrained(ZOO / "target", dtype=torch.float64).eval()
    answers = [truth(model, request) for request in requests]
    assert min(distance for _, distance in answers) > 1e-6, "no ties that rounding could decide"
    return [tokens for tokens, _ in answers]


def test_every_compatible_pair_is_compared(proposers):
    assert {(name, verifier.name) for name, verifier in pairs(proposers)} == {
        (name, verifier) for name, fitting in EXPECTED.items() for verifier in fitting
    }
    verifiers = [getattr(verify, name) for name in verify.__all__ if hasattr(getattr(verify, name), "accepts")]
    lossless = {
        verifier.name for verifier in verifiers if verifier is not verify.Verifier and verifier.lossless is True
    }
    assert lossless | {"lenient"} == set(BY_NAME) == set(SHORT.values()) and all(
        verifier.lossless for verifier in VERIFIERS
    )


def test_a_cold_tree_of_sampled_siblings_is_refused(target):
    for drawn in ("iid", "without_replacement", "gumbel"):
        with pytest.raises(ValueError, match="at temperature 0"):
            draft(target, tree="2x1", drawn=drawn).check_sampling(GREEDY)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("name", "verifier"),
    [
        pytest.param(name, verifier, marks=[] if verifier == SHORT[name] else [pytest.mark.nightly])
        for name, fitting in EXPECTED.items()
        for verifier in sorted(fitting)
    ],
)
def test_greedy_output_is_the_model_s_own(target, proposers, requests, truths, name, verifier):
    outputs, accepted = decoded(target, proposers[name], BY_NAME[verifier], requests, batch=PROMPTS)
    assert differences(requests, outputs, truths) == []
    assert accepted > 20 or name == "none", "drafts were accepted, so there was something to get wrong"
