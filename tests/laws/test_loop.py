"""The real loop has the target's law: every choice it makes is enumerated through ``Draws``."""

from collections import Counter

import numpy as np
import pytest
import torch

import spec_lab.decode
import spec_lab.propose.growth
from spec_lab.batch import Request
from spec_lab.decode import Group
from spec_lab.law import Purpose, Sampling, law
from spec_lab.model import CausalLM
from spec_lab.propose.draft_model import DraftModel
from spec_lab.propose.trees import parse
from spec_lab.verify import Token, Traversal
from tests.laws.tabular import explore
from tests.tiny import tiny_model, tiny_target

V, PROMPT, LENGTH = 3, (1, 2, 0), 2
PLAIN = Sampling(temperature=1.0)
WARPED = Sampling(temperature=1.5, top_p=0.8, repetition_penalty=1.4)


@pytest.fixture(scope="module")
def target():
    target = tiny_target(vocab_size=V)
    with torch.no_grad():
        target.lm.model.lm_head.weight.mul_(0.15)  # every token keeps some mass
    return target


@pytest.fixture(scope="module")
def draft():
    return tiny_model(seed=1, num_hidden_layers=1, vocab_size=V)


def next_law(target, tokens, sampling):
    """The law after ``tokens`` by a forward without cells."""
    with torch.no_grad():
        logits = target.lm.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1:]
    seen = torch.zeros(1, V, dtype=torch.bool)
    seen[0, tokens] = True
    return law(logits.clone(), [sampling], seen)[0].numpy()


def truth(target, sampling):
    """The law of ``LENGTH`` tokens, autoregressively."""
    laws = {(): 1.0}
    for _ in range(LENGTH):
        laws = {
            (*path, token): mass * p
            for path, mass in laws.items()
            for token, p in enumerate(next_law(target, [*PROMPT, *path], sampling))
            if p > 0
        }
    return laws


def distance(target, draft, tree, drawn, verifier, sampling):
    """Total variation between the loop's output law, enumerated, and the target's."""
    proposer = DraftModel(CausalLM(draft), 256, parse(tree), drawn)

    def once(draws):
        group = Group(target, proposer, verifier, [Request(0, "one", PROMPT, sampling, LENGTH)], draws)
        for _ in group:
            pass
        return tuple(group.sequences[0].emitted)

    found = Counter()
    for mass, output in explore(once):
        found[output] += mass
    expected = truth(target, sampling)
    return 0.5 * sum(abs(found[path] - expected.get(path, 0.0)) for path in {*found, *expected})


@pytest.mark.parametrize("sampling", [PLAIN, WARPED], ids=["plain", "warped"])
@pytest.mark.parametrize(
    ("tree", "drawn", "verifier"),
    [("1", "iid", Token()), ("2", "without", Token()), ("2", "iid", Traversal())],
    ids=["chain", "without", "iid"],
)
def test_the_loop_has_the_target_s_law(target, draft, tree, drawn, verifier, sampling):
    assert distance(target, draft, tree, drawn, verifier, sampling) < 1e-12


def test_noise_shared_by_draft_and_residual_is_seen(target, draft, monkeypatch):
    class Shared:
        DRAFT = Purpose.EMIT

    monkeypatch.setattr(spec_lab.propose.growth, "Purpose", Shared)
    with pytest.raises(AssertionError, match="names two choices"):
        distance(target, draft, "1", "iid", Token(), PLAIN)


def test_a_loop_that_forgets_the_warps_is_seen(target, draft, monkeypatch):
    right = spec_lab.decode._warp
    monkeypatch.setattr(
        spec_lab.decode, "_warp", lambda *args: ([Sampling(s.temperature) for s in right(*args)[0]], None)
    )
    assert distance(target, draft, "1", "iid", Token(), WARPED) > 1e-3


def test_the_truth_is_a_law(target):
    assert np.isclose(sum(truth(target, WARPED).values()), 1.0)
