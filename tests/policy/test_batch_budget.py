"""A budget of rows across a batch: which rows are admitted, from which costs, and that outputs stay independent."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spec_lab.core.draft import Draft
from spec_lab.core.limit import Limit
from spec_lab.core.options import WrongOption
from spec_lab.core.shape import Shape
from spec_lab.policy.adaptive import adapt
from spec_lab.policy.batch_budget import FIRST_WAIT, BatchBudget, largest
from spec_lab.policy.confidence import LevelModel, OnlineConfidence, margin
from spec_lab.policy.costs import DraftCosts
from spec_lab.policy.depths import FixedDepth
from spec_lab.policy.policy import DraftOutcome
from spec_lab.propose.ngram import Ngram
from spec_lab.tasks.certify.certificate import prove
from spec_lab.tasks.certify.instances import FEW, TOGETHER, Instance
from spec_lab.verify import Token
from tests.propose.lab import decode, draft_model, emitted, requests
from tests.tasks.certify.test_exact import draft_model as toy_model
from tests.tasks.certify.test_exact import require_exact

CHEAP = DraftCosts({200: {1: {0: 1.0, 1: 1.1, 3: 1.2}, 2: {0: 1.0, 1: 1.1, 3: 1.2}}})
COSTLY = DraftCosts({200: {1: {0: 1.0, 1: 1.9, 3: 9.0}, 2: {0: 1.0, 1: 1.9, 3: 9.0}}})
CHAINS = Shape(2, np.array([0, 2, 1, 4]))
"""Two roots with a chain of two nodes each: rows 2 and 3, rows 4 and 5."""


def policy(costs=CHEAP, confidence="q", start=(), **options):
    return BatchBudget(costs, OnlineConfidence(4, 0, fewest=4), confidence, start=start, **options)


def batch(count):
    return SimpleNamespace(sequences=[SimpleNamespace(tokens=[0] * 200) for _ in range(count)])


def draft_of(confidence, shape=CHAINS):
    """A draft of which each row has this confidence in its children."""
    q = torch.full((shape.rows, 4), 0.25)
    return Draft(shape, torch.zeros(shape.nodes, dtype=torch.long), "iid", q, np.arange(shape.rows),
                 measured=np.array(confidence))  # fmt: skip


def admitted(known, draft, rows):
    """The rows that a policy admits with a budget of ``rows``."""
    states = [known.init(None) for _ in range(draft.shape.roots)]
    known.shared.rows = rows
    return np.flatnonzero(known.admit(batch(draft.shape.roots), states, draft)[draft.shape.roots :]).tolist()


@pytest.mark.parametrize(
    ("confidence", "rows", "nodes"),
    [
        ([0.9, 0.5, 0.9, 0, 0.5, 0], 2, [0, 1]),  # 0.9, 0.81; 0.5, 0.25
        ([0.9, 0.5, 0.3, 0, 0.5, 0], 2, [0, 2]),  # 0.9, 0.27; 0.5, 0.25
        ([0.9, 0.5, 0.3, 0, 0.9, 0], 3, [0, 2, 3]),
        ([0.9, 0.5, 0.9, 0, 0.5, 0], 0, []),
        ([0.9, 0.5, 0.9, 0, 0.5, 0], None, [0, 1, 2, 3]),
        ([1.0, 1.0, 1.0, 0, 1.0, 0], 3, [0, 1, 2]),  # of equal ones the first sequence's, from the top
    ],
)
def test_rows_of_the_largest_survivals_over_all_sequences_are_admitted(confidence, rows, nodes):
    assert admitted(policy(), draft_of(confidence), rows) == nodes


@pytest.mark.parametrize(("rows", "nodes"), [(1, []), (2, [0, 1]), (3, [0, 1, 2])])
def test_sampled_siblings_are_admitted_together_and_deterministic_ones_alone(rows, nodes):
    tree = Shape(1, np.array([0, 0, 1]))
    assert admitted(policy(), draft_of([0.8, 0.9, 0, 0], tree), rows) == nodes
    alone = Draft(tree, torch.zeros(3, dtype=torch.long))
    assert largest(alone, np.array([1, 0.8, 0.1, 0.7]), np.arange(4), 2).tolist() == [True, True, False, True]


def test_the_budget_follows_from_earlier_survivals_and_costs():
    assert policy().best(np.array([0.9, 0.8, 0.02, 0.01]), 2)[0] == 2
    assert policy(COSTLY).best(np.array([0.5, 0.4, 0.1, 0.01]), 2)[0] == 0
    known = policy(start=(0.9, 0.8))
    assert known.decide(batch(2), [known.init(None), known.init(None)]) == [Limit()] * 2 and known.shared.rows == 4
    before = known.shared.rows
    admitted(known, draft_of([0.2] * 6), before)  # what this step shows decides in the next one
    state = replace(known.init(None), survival=known.shared.survival)
    known.decide(batch(2), [state, state])
    assert known.shared.rows < before


def test_a_graph_that_pads_rows_makes_costs_a_staircase():
    stairs = policy(pads=True)
    assert [stairs.seconds(rows, 1) for rows in (2, 3)] == [CHEAP.of(3)] * 2
    assert stairs.seconds(1, 1) == CHEAP.of(1)


def test_nothing_is_drafted_where_drafts_never_pay_but_for_trials():
    known = policy(COSTLY, start=(0.1, 0.01))
    depths = [known.decide(batch(1), [known.init(None)])[0].depth for _ in range(4 * FIRST_WAIT)]
    assert [step for step, depth in enumerate(depths, 1) if depth is None] == [FIRST_WAIT, 3 * FIRST_WAIT]


def test_a_model_learns_how_acceptance_follows_from_the_margin():
    random = np.random.default_rng(0)
    margins = random.exponential(2.0, 2000)
    model = LevelModel()
    model.seen.extend(zip(margins, random.random(2000) < 1 / (1 + np.exp(-(0.8 * margins - 0.5))), strict=True))
    model.refit()
    assert (model.weight, model.bias) == pytest.approx((0.8, -0.5), abs=0.15)
    model.seen.extend(zip(margins, random.random(2000) < 1 / (1 + np.exp(0.8 * margins)), strict=True))
    model.refit()
    assert model.weight == 0, "a larger margin never means less confidence"


def test_a_margin_is_the_difference_of_the_two_largest_logits():
    logits = torch.tensor([[3.0, 1.0, -2.0], [0.0, 0.5, -torch.inf], [0.0, -torch.inf, -torch.inf]])
    assert margin(logits.softmax(-1)).tolist() == pytest.approx([2.0, 0.5, 30.0])


def test_it_learns_from_rows_that_were_verified_and_reached():
    known = policy(confidence="margin")
    draft = draft_of([2.0, 1.0, 4.0, 3.0, 0.0, 0.0])
    states = [known.init(None) for _ in range(2)]
    known.shared.rows = 3
    known.admit(batch(2), states, draft)
    known.learn([DraftOutcome(states[0], Limit(), 2, 2, 1, 2, path=[0]), DraftOutcome(states[1], Limit(), 1, 1, 0, 2)])
    seen = {level: sorted(model.seen) for level, model in known.shared.model.levels.items()}
    assert seen == {0: [(1.0, False), (2.0, True)], 1: [(4.0, False)]}


def test_outputs_are_those_of_the_target_and_fewer_rows_are_verified(target, truth):
    proposer = draft_model("1x1x1x1")
    whole = decode(target, proposer, requests())[1]
    group, steps = decode(target, adapt(proposer, policy(start=(0.5, 0.2), confidence="margin")), requests())
    assert emitted(group) == truth
    assert sum(step.draft.shape.nodes for step in steps) < 0.9 * len(steps) * max(s.draft.shape.nodes for s in whole)


def test_proposers_without_confidences_are_refused():
    with pytest.raises(WrongOption, match="confidence=margin .*ngram"):
        BatchBudget.load(None, Ngram(3, 4, 1))
    with pytest.raises(WrongOption, match="confidence=head"):
        BatchBudget.load(None, draft_model("1x1"), confidence="head")


def test_a_depth_by_batch_size():
    table = FixedDepth.load(None, None, 5, per_batch_size={16: 1, 4: 3})
    assert [table.decide(batch(n), [None] * n)[0].depth for n in (1, 3, 4, 15, 16, 40)] == [5, 5, 3, 3, 1, 1]
    with pytest.raises(WrongOption, match="per_batch_size"):
        FixedDepth.load(None, None, 5, per_batch_size={0: 1})


@pytest.mark.parametrize("confidence", ["margin", "q"])
@pytest.mark.parametrize("drawn", ["iid", "without_replacement"])
@pytest.mark.parametrize("instance", TOGETHER, ids=str)
@pytest.mark.nightly
def test_two_requests_have_the_product_of_the_targets_distributions(confidence, drawn, instance):
    require_exact(prove(adapt(toy_model("1x1", drawn), policy(confidence=confidence)), Token(), [instance]))


def test_two_requests_that_share_a_budget_are_exact_and_independent():
    proof = prove(adapt(toy_model("1x1", "iid"), policy()), Token(), [replace(TOGETHER[0], toy=FEW)])
    require_exact(proof)
    (finding,) = proof.findings
    assert finding.drafted == 2 * finding.outcomes, "two of four rows are verified"


def test_a_depth_by_batch_size_is_exact_for_two_requests():
    proof = prove(
        adapt(toy_model("1x1", "iid"), FixedDepth(2, per_batch_size={2: 1})),
        Token(),
        [Instance(FEW, "1x1", requests=2)],
    )
    require_exact(proof)
    (finding,) = proof.findings
    assert finding.drafted == 2 * finding.outcomes
