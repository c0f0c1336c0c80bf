"""The real loop has the target's distribution, by enumeration of all choices through ``Draws``; broken loops do not."""

from collections import Counter

import pytest
import torch

import spec_lab.decode.rows
from spec_lab.core.history import History
from spec_lab.core.probabilities import Sampling, logits_to_probs
from spec_lab.core.request import Request
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import parse
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.verify import Token, Traversal
from tests.distributions.tabular import explore
from tests.tiny import tiny_model, tiny_target

V, PROMPT, LENGTH = 3, (1, 2, 0), 2
PLAIN = Sampling(temperature=1.0)
WARPED = Sampling(temperature=1.5, top_p=0.8, repetition_penalty=1.4)
STOP = frozenset({2})


@pytest.fixture(scope="module")
def target():
    target = tiny_target(vocab_size=V)
    with torch.no_grad():
        target.lm.model.lm_head.weight.mul_(0.15)  # every token keeps some mass
    return target


@pytest.fixture(scope="module")
def draft():
    return tiny_model(seed=1, num_hidden_layers=1, vocab_size=V)


def next_probabilities(target, tokens, sampling):
    """The probabilities after ``tokens`` by a forward without a KV cache."""
    with torch.no_grad():
        logits = target.lm.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1:]
    seen = torch.zeros(1, V, dtype=torch.bool)
    seen[0, tokens] = True
    return logits_to_probs(logits.clone(), [sampling], History(seen))[0].numpy()


def truth(target, sampling, stop=frozenset()):
    """The autoregressive distribution of up to ``LENGTH`` tokens, the last of which may be a stop token."""
    masses = {(): 1.0}
    for _ in range(LENGTH):
        ended = {path: mass for path, mass in masses.items() if stop.intersection(path)}
        masses = ended | {
            (*path, token): mass * p
            for path, mass in masses.items()
            if path not in ended
            for token, p in enumerate(next_probabilities(target, [*PROMPT, *path], sampling))
            if p > 0
        }
    return masses


def distance(target, draft, tree, drawn, verifier, sampling, stop=frozenset(), confidence=0.0):
    """Total variation between the loop's enumerated output distribution and the target's."""
    proposer = DraftModel(CausalLM(draft), 256, TreePlan(parse(tree), drawn, confidence=confidence))

    def once(draws):
        group = fixed_group(Arm(target, proposer, verifier, draws), [Request(0, "one", PROMPT, sampling, LENGTH, stop)])
        for _ in group:
            pass
        return tuple(group.sequences[0].emitted)

    counts = Counter()
    for mass, output in explore(once):
        counts[output] += mass
    expected = truth(target, sampling, stop)
    assert (sum(counts.values()), sum(expected.values())) == pytest.approx((1, 1))
    return 0.5 * sum(abs(counts[path] - expected.get(path, 0.0)) for path in {*counts, *expected})


@pytest.mark.each_value
@pytest.mark.parametrize("sampling", [PLAIN, WARPED], ids=["plain", "warped"])
@pytest.mark.parametrize(
    ("tree", "drawn", "verifier"),
    [("1", "iid", Token()), ("2", "without_replacement", Token()), ("2", "iid", Traversal())],
    ids=["chain", "without_replacement", "iid"],
)
def test_the_loop_has_the_target_s_distribution(target, draft, tree, drawn, verifier, sampling):
    assert distance(target, draft, tree, drawn, verifier, sampling) < 1e-12


@pytest.fixture(scope="module")
def unsure(target, draft):
    """A confidence that the draft has at some but not all of its choices after the prompt."""
    texts = [PROMPT, *((*PROMPT, token) for token in range(V))]
    with torch.no_grad():
        best = [draft(input_ids=torch.tensor([t]), use_cache=False).logits[0, -1].softmax(-1).max() for t in texts]
    return float(sum(sorted(best)[:2]) / 2)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("tree", "drawn", "verifier"),
    [
        ("1x1", "iid", Token()),
        ("1x1", "iid", Traversal()),
        pytest.param(
            "2x1", "without_replacement", Traversal(), marks=pytest.mark.nightly
        ),  # trees take longer than all chains
        pytest.param("2x1", "iid", Token(), marks=pytest.mark.nightly),
    ],
)
def test_a_draft_that_stops_where_it_is_unsure_keeps_the_distribution(target, draft, unsure, tree, drawn, verifier):
    sizes = set()

    class Watched(type(verifier)):
        def __call__(self, forest, p):
            sizes.add(forest.shape.nodes)
            return super().__call__(forest, p)

    # The first drafted token is kept whatever its confidence; further drafting depends on it.
    for confidence in (unsure, 1.0):
        assert distance(target, draft, tree, drawn, Watched(), PLAIN, confidence=confidence) < 1e-12
    assert len(sizes) > 1


@pytest.mark.nightly
@pytest.mark.one_in(2)
@pytest.mark.parametrize("tree", ["1", "1x1"])
def test_a_stop_token_ends_the_text_and_keeps_its_distribution(target, draft, tree):
    """As an accepted token within the path, as the recovered token or as the bonus token."""
    assert distance(target, draft, tree, "iid", Token(), PLAIN, STOP) < 1e-12


def test_a_loop_that_omits_the_warps_is_detected(target, draft, monkeypatch):
    right = spec_lab.decode.rows.logits_to_probs

    def bare(logits, samplings, history=None, mask=None, **more):
        return right(logits, [Sampling(s.temperature) for s in samplings], None, mask, **more)

    monkeypatch.setattr(spec_lab.decode.rows, "logits_to_probs", bare)
    assert distance(target, draft, "1", "iid", Token(), WARPED) > 1e-3
