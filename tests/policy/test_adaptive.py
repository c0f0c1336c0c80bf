"""A proposer under a policy: what it drafts, records and repeats, and which pairs are refused."""

import json
from dataclasses import replace

import numpy as np
import pytest

from spec_lab.core.faults import PartError
from spec_lab.core.limit import Limit
from spec_lab.policy.adaptive import adapt
from spec_lab.policy.bandit import Bandit, Rewards
from spec_lab.policy.costs import DraftCosts, Timing, draft_costs
from spec_lab.policy.depths import FixedDepth, Heuristic
from spec_lab.policy.goodput import Goodput
from spec_lab.policy.levels import Levels
from spec_lab.policy.recorded import RecordedPolicy
from spec_lab.policy.thresholds import Threshold
from spec_lab.propose.best_first import Budget
from spec_lab.propose.ngram import Index, Ngram, NgramTree
from spec_lab.propose.pld_plus import ComputedText, PldPlus
from spec_lab.propose.step_costs import StepCosts
from spec_lab.propose.stop_rules import AdaEdl, Confidence
from spec_lab.propose.suffix import Suffix
from spec_lab.propose.suffix_index import SuffixIndex
from spec_lab.propose.tree_plan import TreePlan
from tests.propose.lab import COLD, WARM, batch_of, decode, draft_model, emitted, requests
from tests.propose.test_best_of import Truth, best_of

COSTS = DraftCosts({200: {1: {0: 1.0, 4: 1.4}, 3: {0: 1.5, 4: 2.5}}})


def test_drafts_are_no_deeper_than_the_policy_allows(target, truth):
    """For a proposer that looks at the limits, and for one that does not."""
    for proposer in (draft_model("1x1x1x1"), Truth(truth, 4)):
        for depth in (0, 1, 3):
            group, steps = decode(target, adapt(proposer, FixedDepth(depth)), requests())
            assert max(step.draft.shape.deepest for step in steps) == depth
            assert emitted(group) == truth


@pytest.mark.parametrize("sampling", [COLD, WARM])
def test_a_depth_drafts_what_a_chain_of_that_depth_drafts(target, sampling):
    """The same tokens, and the same random choices."""
    whole, steps = decode(target, adapt(draft_model("1x1x1x1"), FixedDepth(2)), requests(sampling))
    short, expected = decode(target, draft_model("1x1"), requests(sampling))
    assert emitted(whole) == emitted(short)
    assert [step.draft.shape.nodes for step in steps] == [step.draft.shape.nodes for step in expected]


def test_a_proposer_is_not_asked_where_nothing_may_be_drafted(target, truth, monkeypatch):
    """The step is that of the null proposer; with a limit above 0 for one sequence all are asked."""
    asked = []
    plain = Ngram.propose
    monkeypatch.setattr(Ngram, "propose", lambda self, batch: asked.append(1) or plain(self, batch))
    adaptive = adapt(Ngram(3, 3, 1), FixedDepth(0))
    group, steps = decode(target, adaptive, requests())
    assert not asked
    assert emitted(group) == truth
    assert [step.draft for step in steps[1:3]] == [steps[0].draft] * 2, "one draft serves all steps"
    assert all(list(step.draft.limits) == [Limit(0)] * len(step.sequences) for step in steps)
    mixed = adapt(Ngram(3, 3, 1), RecordedPolicy({0: [Limit(1)], 1: [Limit(0)], 2: [Limit(0)]}))
    mixed.propose(batch_of(target, requests(), mixed))
    assert asked


def test_each_sequence_has_its_own_limit(target):
    adaptive = adapt(draft_model("1x1x1"), RecordedPolicy({n: [Limit(n + 1)] for n in range(3)}))
    draft = adaptive.propose(batch_of(target, requests(), adaptive))
    assert [int(draft.shape.depth[rows].max()) for rows in draft.shape.trees] == [1, 2, 3]
    assert list(draft.limits) == [Limit(1), Limit(2), Limit(3)]


def test_decisions_are_recorded_and_repeated(target):
    first = adapt(draft_model("1x1x1x1"), Goodput(COSTS, 4, Levels.none(4)))
    group, steps = decode(target, first, requests(WARM))
    rows = [row for step in steps for row in step.slim().rows()]
    limits = {n: [Limit.parse(row["policy"]) for row in rows if row["request"] == n] for n in range(3)}
    assert len({limit for each in limits.values() for limit in each}) > 1, "it decided differently"
    again, repeated = decode(target, adapt(draft_model("1x1x1x1"), RecordedPolicy(limits)), requests(WARM))
    assert emitted(again) == emitted(group)
    assert [step.draft.token.tolist() for step in repeated] == [step.draft.token.tolist() for step in steps]


class Wrong(FixedDepth):
    """A policy that fails in its code, or decides something else."""

    def decide(self, batch, states):
        return {}["lost"] if self.depth else [2] * len(states)


@pytest.mark.parametrize(
    ("depth", "said"),
    [
        (1, r"KeyError: 'lost' \(.*test_adaptive.py:\d+, in decide\)"),
        (0, r"decide must return 3 Limit.* not \[2, 2, 2\]"),
    ],
)
def test_a_policy_that_fails_is_named_and_not_the_proposer(target, depth, said):
    adaptive = adapt(draft_model("1x1"), Wrong(depth))
    with pytest.raises(PartError, match=f"policy 'fixed' raised .*{said}"):
        adaptive.propose(batch_of(target, requests(), adaptive))


def test_recorded_decisions_are_for_the_same_prompts(target):
    first = requests()[0]
    for prompt in ((first.name, len(first.tokens)), ("other", len(first.tokens)), (first.name, 1 + len(first.tokens))):
        adaptive = adapt(draft_model("1x1"), RecordedPolicy({0: [Limit(1)]}, {0: prompt}, source="run"))
        if prompt == (first.name, len(first.tokens)):
            adaptive.close(adaptive.init(first))
        else:
            with pytest.raises(ValueError, match=f"request 0 of run is prompt '{prompt[0]}' with {prompt[1]} tokens"):
                adaptive.init(first)


def test_a_threshold_of_0_stops_nothing_and_one_of_1_everything(target):
    """The bound of AdaEDL is 1 only for a one-hot distribution."""
    whole, _ = decode(target, draft_model("1x1x1"), requests(WARM))
    free, steps = decode(target, adapt(draft_model("1x1x1"), Threshold(Confidence(), 0.0)), requests(WARM))
    assert emitted(free) == emitted(whole)
    assert max(step.draft.shape.deepest for step in steps) == 3
    _, none = decode(target, adapt(draft_model("1x1x1"), Threshold(AdaEdl(), 1.0)), requests(WARM))
    assert max(step.draft.shape.deepest for step in none) == 0


def test_forks_learn_separately_and_the_run_s_store_is_forgotten(target):
    policy = Heuristic(2.0)
    adaptive = adapt(draft_model("1x1"), policy)
    state = adaptive.init(requests()[0])
    other = adaptive.fork(state)
    other.own.state.value = 7.0
    assert state.own.state.value == 2.0
    adaptive.close(state)
    adaptive.close(other)
    bandit = Bandit((Limit(0), Limit(2)), {"": COSTS}, Rewards.none(2))
    shared = adapt(draft_model("1x1"), bandit)
    decode(target, shared, requests())
    assert bandit.shared.steps.sum() > 0
    assert "tokens per second" in shared.shared_store
    shared.forget()
    assert bandit.shared.steps.sum() == 0
    assert adaptive.shared_store == ""


def test_it_declares_what_the_proposer_does_and_records_the_policy(target):
    proposer = draft_model("2x1", "without_replacement")
    adaptive = adapt(proposer, Threshold(AdaEdl(), 0.3))
    for name in ("name", "drawn", "nodes", "branches", "requires", "sha256"):
        assert getattr(adaptive, name) == getattr(proposer, name)
    facts = json.loads(json.dumps(dict(adaptive.facts)))
    assert facts.pop("policy") == {
        "name": "threshold", "rule": "adaedl", "factor": 0.2, "threshold": 0.3, "adapt": False, "depth": None,
    }  # fmt: skip
    assert facts == proposer.facts


def test_a_policy_names_the_part_that_drafts(target, truth):
    both = best_of(Truth(truth, 3), Truth(truth, 3, right=False))
    for part, accepts in (("p0", True), ("p1", False)):
        group, steps = decode(target, adapt(both, FixedDepth(3, part)), requests())
        assert emitted(group) == truth
        assert (sum(len(got.path) for step in steps for got in step.committed) > 0) == accepts


def test_pairs_that_do_not_fit_are_refused(target, truth):
    stops, named = Threshold(AdaEdl(), 0.3), FixedDepth(2, "p7")
    confident = draft_model("1x1")
    confident.plan = replace(confident.plan, confidence=0.4)
    reranked = draft_model("1x1")
    reranked.plan = TreePlan((), "deterministic", budget=Budget(4, rerank=True))
    for proposer, policy, why in (
        (Ngram(3, 2, 1), stops, "does not ask it"),
        (confident, stops, "proposer.confidence=0.4"),
        (reranked, stops, "proposer.rerank"),
        (Ngram(3, 2, 1), named, "does not choose between parts"),
        (best_of(Truth(truth, 1), Truth(truth, 1)), named, "has the parts p0, p1"),
    ):
        with pytest.raises(ValueError, match=why):
            adapt(proposer, policy)


@pytest.mark.parametrize("make", [lambda target: draft_model("1x1x1"), lambda target: Ngram(3, 4, 1)])
def test_costs_are_measured_for_drafts_of_every_depth(target, make, tmp_path, monkeypatch):
    """Steps really draft so many levels: a look-up finds its drafts, and thresholds do not stop them."""
    drafted = {}

    def measure(visit, tokens, threads):
        for size in tokens:
            drafted[size] = visit(size)
        return StepCosts({size: 1.0 + size for size in tokens}, dict.fromkeys(tokens, 0.0), 3)

    monkeypatch.setattr("spec_lab.policy.costs.measure", measure)
    seen = []
    proposer = make(target)
    propose = type(proposer).propose

    def spy(self, batch):
        draft = propose(self, batch)
        seen.append((batch.limits[0].depth, np.unique(draft.cut(batch.room()).shape.depth).tolist()))
        return draft

    monkeypatch.setattr(type(proposer), "propose", spy)
    timing = Timing(2, cache=str(tmp_path), contexts=(48, 96))
    costs = draft_costs(target, proposer, 3, timing)
    assert sorted(drafted) == [0, 1, 2, 3]
    assert {depth: max(levels) for depth, levels in seen} == {1: 1, 2: 2, 3: 3}, "at depth 0 it is not asked"
    assert all(levels == list(range(depth + 1)) for depth, levels in seen)
    assert costs.of(2) == 3.0
    assert {context: sorted(by_live) for context, by_live in costs.seconds.items()} == {48: [1, 2], 96: [1, 2]}
    seen.clear()
    assert draft_costs(target, proposer, 3, timing).of(2) == 3.0
    assert not seen, "costs are cached"


LOOK_UPS = {
    "ngram": lambda: Ngram(3, 3, 1),
    "ngram_tree": lambda: NgramTree(4, 3, 3, 1),
    "suffix": lambda: Suffix.load(None),
    "pld_plus": lambda: PldPlus(2, 1),
}


@pytest.mark.parametrize("name", LOOK_UPS)
def test_nothing_is_looked_up_at_depth_0(target, name, monkeypatch):
    looked = []
    for of, method in ((Index, "follow"), (SuffixIndex, "follow"), (ComputedText, "occurrences")):
        plain = getattr(of, method)
        monkeypatch.setattr(of, method, lambda *given, plain=plain: looked.append(1) or plain(*given))
    proposer = LOOK_UPS[name]()
    decode(target, adapt(proposer, FixedDepth(1)), requests())
    assert looked
    looked.clear()
    _, steps = decode(target, adapt(proposer, FixedDepth(0)), requests())
    assert not looked
    assert not any(step.draft.shape.nodes for step in steps)
