"""The joint distribution of several tokens through the real loop: drafts, KV cache, masks, p, verdicts, commits."""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest

from spec_lab.core.draft import Draft
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.propose import Null
from spec_lab.propose.ngram import Ngram, NgramTree
from spec_lab.tasks.certify.enumeration import explore, side_by_side
from spec_lab.tasks.certify.exact import examine, toy_parts
from spec_lab.tasks.certify.ground_truth import truth
from spec_lab.tasks.certify.instances import PLAIN, Instance
from spec_lab.tasks.certify.outputs import EXACT, first_difference, text_probabilities, total_variation
from spec_lab.tasks.certify.toy_models import PROMPT, RandomToy, code
from spec_lab.verify import KSeq, Match, Token, Traversal

FEW = RandomToy(8, support=2)
STOP = frozenset({2})
LOSSLESS = [Token(), Traversal(), Match()]
LONGEST = (("2", 4), "iid", "match")  # it takes as long as all others together; the short run has 2x1 for 2 tokens
EVERY_VERIFIER = pytest.mark.parametrize("verifier", LOSSLESS, ids=lambda v: v.name)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("tree", "tokens", "drawn", "verifier"),
    [
        pytest.param(
            *tree, drawn, verifier, marks=[pytest.mark.nightly] if (tree, drawn, verifier.name) == LONGEST else []
        )
        for tree in (("1", 4), ("1x1", 3), ("2", 4), ("2x1", 2))
        for drawn in ("iid", "without_replacement", "deterministic")
        for verifier in LOSSLESS
    ],
)
def test_four_tokens_have_the_target_s_distribution(tree, tokens, drawn, verifier):
    assert examine(Instance(FEW, tree, tokens), drawn, verifier).wrong is None


@pytest.mark.parametrize(("tree", "tokens"), [("2", 4), ("2x1", 2)])
@pytest.mark.nightly
def test_k_seq_as_well(tree, tokens):
    assert examine(Instance(FEW, tree, tokens), "iid", KSeq()).wrong is None


@pytest.mark.nightly
@EVERY_VERIFIER
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7),
        Sampling(1.3, top_k=2),
        Sampling(1.0, top_p=0.7),
        Sampling(1.0, min_p=0.3),
        Sampling(1.2, repetition_penalty=1.5),
        Sampling(0.8, top_k=3, top_p=0.9, min_p=0.05, repetition_penalty=0.8),
        Sampling(0.0),
    ],
    ids=["temperature", "top-k", "top-p", "min-p", "penalty", "all", "greedy"],
)
def test_warped_distributions_are_kept(sampling, verifier):
    for tree, drawn in (("1x1", "iid"), ("2", "deterministic")):
        assert examine(Instance(FEW, tree, tokens=3), drawn, verifier, sampling).wrong is None


@pytest.mark.parametrize("proposer", [Null(), Ngram(3, 3, 1), NgramTree(5, 3, 3, 1)], ids=lambda p: p.name)
@EVERY_VERIFIER
@pytest.mark.each_value
def test_proposers_without_a_model_keep_the_distribution(proposer, verifier):
    for stop in (frozenset(), STOP):
        assert examine(Instance(FEW, "1", tokens=4, stop=stop), proposer, verifier).wrong is None


def decoded(parts, verifier, stop=frozenset(), tokens=4):
    """Every outcome of one request: probability, text, and what each step committed, with its draft."""

    def play(draws, count):
        requests = [Request(n, f"{n}", PROMPT, PLAIN, tokens, stop) for n in range(count)]
        group = fixed_group(Arm(parts.target, parts.proposer, verifier, draws), requests)
        steps = [[] for _ in requests]
        for done in group:
            for head, (live, got) in enumerate(zip(done.sequences, done.committed, strict=True)):
                steps[live.request.id].append((done.draft.shape, head, got))
        return [(tuple(live.emitted), steps[live.request.id]) for live in group.sequences]

    return side_by_side(play)


def distribution_of(outcomes, stop=frozenset()):
    """The probability of each output; a text ends with a stop token or at its length."""
    counts = Counter()
    for probability, text in outcomes:
        counts[((text, "stop" if text[-1] in stop else "length"),)] += probability
    return counts


@EVERY_VERIFIER
def test_a_stop_token_ends_the_text_wherever_it_stands(verifier):
    """Inside an accepted path, as its end, as residual and as bonus: all of them occur, the distribution is kept."""
    instance = Instance(FEW, "1x1", tokens=3, stop=STOP)
    parts, places, texts = toy_parts(instance, "iid"), Counter(), []
    for probability, (text, steps) in decoded(parts, verifier, STOP, 3):
        texts.append((probability, text))
        shape, head, got = steps[-1]
        if text[-1] in STOP:
            row = got.path[-1] if got.path else head
            bonus = not len(shape.children[row])
            cut = got.count(kept=True)
            places[
                "inside" if cut < len(got.path) else "end" if cut == len(got.path) else "bonus" if bonus else "residual"
            ] += 1
        assert not STOP.intersection(text[:-1])
    assert set(places) == {"inside", "end", "bonus", "residual"}
    assert total_variation(distribution_of(texts, STOP), truth(instance)) < EXACT


@pytest.mark.nightly
@EVERY_VERIFIER
@pytest.mark.one_in(3)
def test_a_length_limit_cuts_inside_a_path(verifier):
    instance = Instance(FEW, "1x1", tokens=3)
    parts = toy_parts(instance, "iid")
    outcomes = list(decoded(parts, verifier, tokens=3))
    assert any(got.count(accepted=True, kept=True) < len(got.path) for _, (_, steps) in outcomes for _, _, got in steps)
    texts = [(probability, text) for probability, (text, _) in outcomes]
    assert {len(text) for _, text in texts} == {3}
    assert total_variation(distribution_of(texts), truth(instance)) < EXACT


@dataclass
class Moody:
    """Drafts only where an even number of tokens is out."""

    inner: object

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def propose(self, batch) -> Draft:
        draft = self.inner.propose(batch)
        quiet = [len(s.emitted) % 2 == 1 for s in batch.sequences]
        return draft.cut([0 if silent else 9 for silent in quiet])


@pytest.mark.parametrize(
    "verifier", [pytest.param(Token(), marks=pytest.mark.nightly), Traversal()], ids=lambda v: v.name
)
def test_empty_drafts_among_others_keep_the_distribution(verifier):
    instance = Instance(FEW, "2x1", tokens=3)
    parts = toy_parts(instance, "without_replacement")
    parts = parts._replace(proposer=Moody(parts.proposer))
    outcomes = list(decoded(parts, verifier, tokens=3))
    sizes = {shape.trees[head].size for _, (_, steps) in outcomes for shape, head, _ in steps}
    assert 1 in sizes and len(sizes) > 1
    assert total_variation(distribution_of([(p, text) for p, (text, _) in outcomes]), truth(instance)) < EXACT


@pytest.mark.nightly
@pytest.mark.parametrize("verifier", LOSSLESS[:2], ids=lambda v: v.name)
@pytest.mark.parametrize(
    "order",
    [
        (2, 0, 1),  # the sampled one in the middle
        pytest.param((0, 1, 2), marks=pytest.mark.nightly),
        pytest.param((1, 2, 0), marks=pytest.mark.nightly),
    ],
)
def test_a_sampled_request_among_greedy_ones_keeps_its_distribution_and_they_theirs(order, verifier):
    """One script makes all choices of the batch; greedy requests leave it nothing to choose."""
    instance, cold = Instance(FEW, "1x1", tokens=3), Sampling(0.0)
    parts, greedy = toy_parts(instance, "iid"), toy_parts(instance, "iid", cold).p

    def play(draws):
        requests = [
            Request(0, "sampled", PROMPT, PLAIN, 3),
            Request(1, "greedy", PROMPT, cold, 3),
            Request(2, "longer", PROMPT + (1,), cold, 2),
        ]
        group = fixed_group(Arm(parts.target, parts.proposer, verifier, draws), [requests[n] for n in order])
        for _ in group:
            pass
        return {live.request.name: tuple(live.emitted) for live in group.sequences}

    outcomes = list(explore(play))
    assert len(outcomes) > 10
    sampled = distribution_of([(p, texts["sampled"]) for p, texts in outcomes])
    assert total_variation(sampled, truth(instance)) < EXACT
    (certain,) = {texts["greedy"] for _, texts in outcomes}
    assert text_probabilities(greedy, 3)[code(certain, 4)] == 1.0
    assert {len(texts["longer"]) for _, texts in outcomes} == {2}


def test_the_order_of_a_batch_changes_nobody_s_text():
    parts = toy_parts(Instance(RandomToy(11, support=4, plain=True), "2x1", tokens=4), "without_replacement")
    requests = [Request(n, f"{n}", PROMPT, replace(PLAIN, temperature=0.5 + n / 4), 4) for n in range(12)]
    texts = []
    for order in (requests, requests[::-1], requests[5:] + requests[:5]):
        group = fixed_group(Arm(parts.target, parts.proposer, Traversal(), CounterDraws(3)), order)
        for _ in group:
            pass
        texts.append({live.request.id: tuple(live.emitted) for live in group.sequences})
    assert texts[0] == texts[1] == texts[2]
    assert len(set(texts[0].values())) > 3


class Same(RandomToy):
    """The draft is the target."""

    def probabilities(self, length):
        p, _ = super().probabilities(length)
        return p, p


@pytest.mark.parametrize("verifier", [Token(), Traversal(), KSeq()], ids=lambda v: v.name)
@pytest.mark.parametrize("tree", ["1", "1x1", "1x1x1"])
def test_a_draft_that_is_the_target_is_accepted_whole(tree, verifier):
    finding = examine(Instance(Same(3), tree, tokens=0), "iid", verifier)
    assert finding.wrong is None
    assert finding.accepted == pytest.approx(len(tree.split("x")), abs=1e-12)


def test_a_sampled_loop_s_draft_that_is_the_target_is_accepted_whole():
    parts = toy_parts(Instance(Same(11, support=4, plain=True), "1x1", tokens=4), "iid")
    for verifier in (Token(), Traversal()):
        group = fixed_group(
            Arm(parts.target, parts.proposer, verifier, CounterDraws(0)),
            [Request(n, f"{n}", PROMPT, PLAIN, 4) for n in range(50)],
        )
        for done in group:
            deepest = np.array(done.draft.shape.depth)
            assert [len(got.path) for got in done.committed] == [int(deepest[t].max()) for t in done.draft.shape.trees]


def test_a_draft_that_reads_ahead_is_seen():
    """Negative control: a proposer that leaves its draft out when the first token is 0."""
    instance = Instance(FEW, "1x1", tokens=3)
    parts = toy_parts(instance, "iid")

    class Choosy(Moody):
        def propose(self, batch):
            draft = self.inner.propose(batch)
            keep = [
                int(draft.token[rows[1] - draft.shape.roots]) != 0 if len(rows) > 1 else True
                for rows in draft.shape.trees
            ]
            return draft.cut([9 if kept else 0 for kept in keep])

    parts = parts._replace(proposer=Choosy(parts.proposer))
    outputs = distribution_of([(p, text) for p, (text, _) in decoded(parts, Token(), tokens=3)])
    assert sum(outputs.values()) == pytest.approx(1)
    assert total_variation(outputs, truth(instance)) > 1e-3
    assert "outputs begin with" in first_difference(outputs, truth(instance))
