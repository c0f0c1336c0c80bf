"""Enumeration: whatever a policy decides, outputs follow the target. Dropping drawn tokens is no policy and wrong."""

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from spec_lab.cli.main import conf
from spec_lab.core.draft import empty
from spec_lab.core.limit import Limit
from spec_lab.policy.adaptive import Adaptive, adapt
from spec_lab.policy.bandit import Bandit, Rewards
from spec_lab.policy.batch_budget import BatchBudget
from spec_lab.policy.confidence import OnlineConfidence
from spec_lab.policy.costs import DraftCosts
from spec_lab.policy.depths import FixedDepth, Heuristic
from spec_lab.policy.gain import GainOverCost, Rate
from spec_lab.policy.goodput import Goodput
from spec_lab.policy.levels import Levels
from spec_lab.policy.recorded import RecordedPolicy
from spec_lab.policy.thresholds import Threshold
from spec_lab.propose.best_first import Budget
from spec_lab.propose.stop_rules import AdaEdl, Confidence, Svip
from spec_lab.tasks.certify.certificate import prove
from spec_lab.tasks.certify.instances import LOOPS, QUICK, TOGETHER
from spec_lab.verify import Token, Traversal
from tests.tasks.certify.test_exact import best_of, draft_model, early_exit, kangaroo, require_exact, skip

COSTS = DraftCosts({200: {1: {0: 1.0, 1: 1.001, 8: 1.008}}})
DEPTHS = tuple(Limit(depth) for depth in (1, 2, 4, 8))
STOPS = tuple(Limit(depth, threshold) for depth in (4, 8) for threshold in (0.01, 0.02))

POLICIES = {
    "fixed": FixedDepth(4),
    "heuristic": Heuristic(),
    "confidence": Threshold(Confidence(), 0.4),
    "draft_and_verify": Threshold(Confidence(), 0.4, adapt=True),
    "adaedl": Threshold(AdaEdl(), 0.1),
    "svip": Threshold(Svip(), 0.99),
    "ucb": Bandit(DEPTHS, {"": COSTS}, Rewards.none(4)),
    "ucb over thresholds": Bandit(STOPS, {"": COSTS}, Rewards.none(4), stop=AdaEdl()),
    "thompson": Bandit(DEPTHS, {"": COSTS}, Rewards.none(4), "thompson"),
    "goodput": Goodput(COSTS, 8, Levels.none(8)),
    "goodput with svip": Goodput(COSTS, 8, Levels.none(8), stop=Svip(), threshold=0.99),
    "gain": GainOverCost(COSTS, 3, Rate()),
    "batch budget": BatchBudget(COSTS, OnlineConfidence(16, 2)),
    "batch budget by q": BatchBudget(COSTS, OnlineConfidence(16, 2), "q"),
    "recorded": RecordedPolicy({0: [Limit(4), Limit(4), Limit(5)]}),
    "recorded thresholds": RecordedPolicy({0: [Limit(None, 0.01)]}, stop=Confidence()),
}
"""With values that cut no draft of three tokens, or no toy draft at all."""
PROPOSERS = {
    "chain": draft_model("1x1", "iid"),
    "tree": draft_model("2x1", "without_replacement"),
    "best first": draft_model(drawn="iid", budget=Budget(3)),
    "early exit": early_exit("2x1", "without_replacement"),
    "Kangaroo": kangaroo("2x1", "without_replacement"),
    "skipped MLP": skip("2x1", "without_replacement"),
}


PAIRS = [
    (policy, proposer)
    for policy in POLICIES
    for proposer in PROPOSERS
    if not PROPOSERS[proposer].why_not_admitted or type(POLICIES[policy]) is not BatchBudget
]
"""All but those that are refused."""


@pytest.mark.nightly
@pytest.mark.parametrize(("policy", "proposer"), PAIRS)
def test_every_policy_is_exact(policy, proposer):
    proof = prove(adapt(PROPOSERS[proposer], POLICIES[policy]), Token(), QUICK)
    require_exact(proof)
    assert proof.drafts == "proposer"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.one_in(3)
def test_toys_have_drafts_that_a_policy_cuts_and_whole_ones(policy, monkeypatch):
    steps: Counter[str] = Counter()
    propose = Adaptive.propose

    def counted(adaptive, batch):
        draft = propose(adaptive, batch)
        whole = np.minimum(replace(batch, limits=()).room(), adaptive.proposer.plan.depth)
        for rows, depth in zip(draft.shape.trees, whole, strict=True):
            steps["cut" if draft.shape.depth[rows].max() < depth else "whole"] += 1
        return draft

    monkeypatch.setattr(Adaptive, "propose", counted)
    require_exact(prove(adapt(PROPOSERS["chain"], POLICIES[policy]), Token(), (QUICK[0], QUICK[3], QUICK[-1])))
    assert steps["cut"] >= 9 and steps["whole"] >= 9, steps


@pytest.mark.parametrize("policy", ["adaedl", "gain", "heuristic"])
def test_policies_are_exact_with_traversal_verification(policy):
    require_exact(prove(adapt(PROPOSERS["tree"], POLICIES[policy]), Traversal(), QUICK))


@pytest.mark.nightly
@pytest.mark.parametrize("instance", TOGETHER, ids=str)
def test_goodput_is_exact_for_two_requests_that_share_it(instance):
    require_exact(prove(adapt(PROPOSERS["chain"], POLICIES["goodput"]), Token(), [instance]))


def test_a_policy_of_parts_is_exact():
    arms = (Limit(2, part="0"), Limit(2, part="1"))
    bandit = Bandit(arms, {"0": COSTS, "1": COSTS}, Rewards.none(2))
    require_exact(
        prove(
            adapt(best_of(draft_model("1x1", "iid"), draft_model("2x1", "without_replacement")), bandit), Token(), QUICK
        )
    )


@pytest.mark.nightly
def test_policies_change_what_is_drafted():
    proofs = [prove(adapt(PROPOSERS["chain"], policy), Token(), LOOPS[:2]) for policy in POLICIES.values()]
    assert len({tuple(np.round([finding.accepted for finding in proof.findings], 9)) for proof in proofs}) >= 6


def test_every_shipped_policy_is_enumerated():
    shipped = {OmegaConf.load(file).get("_target_") for file in Path(conf(), "policy").glob("*.yaml")}
    mine = {f"{type(policy).__module__}.{type(policy).__name__}.load" for policy in POLICIES.values()}
    assert shipped - {None} == mine | {"spec_lab.policy.none"}


class Drops:
    """A chain that ends before the first sampled token of a draft probability below ``least``, as llama.cpp's p_min.

    Args:
        inner: drafts a chain, sampled.
        stated: whether q is stated as the distribution of the tokens that stay.
    """

    least = 0.3

    def __init__(self, inner, stated):
        self.inner, self.stated = inner, stated

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def toy(self, target, draft, tree):
        return Drops(self.inner.toy(target, draft, tree), self.stated)

    def propose(self, batch):
        draft = self.inner.propose(batch)
        shape = draft.shape
        if not shape.nodes:
            return draft
        q_of_nodes = draft.q[torch.from_numpy(draft.q_row[shape.parent])]
        kept = q_of_nodes.gather(-1, draft.token[:, None])[:, 0] >= self.least
        if not kept.any():
            return empty(shape.roots)
        smaller, _ = draft.keep(np.append(np.ones(shape.roots, dtype=bool), kept.numpy()))
        if not self.stated:
            return smaller
        q = torch.where(smaller.q >= self.least, smaller.q, 0.0)
        return replace(smaller, q=torch.where(q.sum(-1, keepdim=True) > 0, q / q.sum(-1, keepdim=True), smaller.q))


@cache
def dropped(stated):
    return prove(Drops(draft_model("1x1", "iid"), stated), Token(), QUICK)


@pytest.mark.nightly
def test_dropping_sampled_tokens_by_their_probability_is_not_lossless():
    """Judged with plain q, a token that is dropped when it is drawn is emitted too seldom (or too often)."""
    assert dropped(stated=False).failure is not None
    assert dropped(stated=False).worst.tv > 0.01


@pytest.mark.nightly
def test_it_is_lossless_where_q_is_the_distribution_of_the_tokens_that_stay():
    require_exact(dropped(stated=True))
