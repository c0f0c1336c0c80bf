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
from spec_lab.policy.adaptive import Adaptive, adapt
from spec_lab.policy.admission import largest
from spec_lab.policy.batch_budget import BatchBudget
from spec_lab.policy.budget_state import FIRST_WAIT
from spec_lab.policy.confidence import LevelModel, OnlineConfidence, margin
from spec_lab.policy.costs import DraftCosts
from spec_lab.policy.depths import FixedDepth
from spec_lab.policy.policy import DraftOutcome
from spec_lab.policy.recorded import RecordedRows
from spec_lab.propose.best_first import Budget
from spec_lab.propose.ngram import Ngram
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.tasks.certify.certificate import prove
from spec_lab.tasks.certify.instances import FEW, QUICK, TOGETHER, Instance
from spec_lab.tasks.certify.toy_models import RandomToy
from spec_lab.verify import Token
from tests.propose.lab import WARM, decode, draft_model, emitted, requests
from tests.tasks.certify.test_exact import draft_model as toy_model
from tests.tasks.certify.test_exact import require_exact, string_model

CHEAP = DraftCosts({200: {1: {0: 1.0, 1: 1.1, 3: 1.2}, 2: {0: 1.0, 1: 1.1, 3: 1.2}}})
COSTLY = DraftCosts({200: {1: {0: 1.0, 1: 1.9, 3: 9.0}, 2: {0: 1.0, 1: 1.9, 3: 9.0}}})
CHAINS = Shape(2, np.array([0, 2, 1, 4]))
"""Two roots with a chain of two nodes each: rows 2 and 3, rows 4 and 5."""


def policy(costs=CHEAP, confidence="q", start=(), kind=BatchBudget, warm_up=0, **options):
    return kind(costs, OnlineConfidence(4, warm_up, fewest=4), confidence, start=start, **options)


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
    survival, deterministic = np.array([1, 0.8, 0.1, 0.7]), np.zeros(3, dtype=bool)
    assert largest(tree, deterministic, survival, np.arange(4), 2).tolist() == [True, True, False, True]


def test_the_budget_follows_from_earlier_survivals_and_costs():
    assert policy().best([np.array([0.9, 0.8]), np.array([0.02, 0.01])])[0] == 2
    assert policy(COSTLY).best([np.array([0.5, 0.4]), np.array([0.1, 0.01])])[0] == 0
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
    even, one_sided = [np.array([0.9, 0.8])] * 2, [np.array([0.9, 0.8, 0.7, 0.6]), np.zeros(0)]
    assert stairs.best(even)[1] == pytest.approx((2 + 3.4) / CHEAP.of(3, 2))
    assert stairs.best(one_sided)[1] == pytest.approx((2 + 2.4) / CHEAP.of(3, 2)), "three rows of one tree, in both"


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


def outcome(state, path, **options):
    return DraftOutcome(state, Limit(), 2, 3, len(path), 1, path=path, **options)


@pytest.mark.parametrize(
    ("path", "ended", "seen"),
    [
        ([0, 2], False, {0: [True], 1: [True]}),
        ([1], False, {0: [False]}),  # a later sibling was accepted, of which nothing was drawn
        ([0], False, {0: [True], 1: [False]}),
        ([0], True, {0: [True]}),  # whether its child would have been accepted is not known
        ([], True, {}),
    ],
)
def test_the_first_child_of_an_accepted_row_counts(path, ended, seen):
    known = policy(confidence="margin")
    states = [known.init(None)]
    known.admit(batch(1), states, draft_of([2.0, 1.0, 0.0, 0.0], Shape(1, np.array([0, 0, 1]))))
    known.learn([outcome(states[0], path, ended=ended)])
    levels = known.shared.model.levels
    assert {level: [accepted for _, accepted in model.seen] for level, model in levels.items()} == seen


def test_a_model_is_used_after_so_many_fits_and_rows_are_all_verified_until_then():
    known = policy(confidence="margin", warm_up=2, start=(0.9, 0.8))
    states, used = [known.init(None)], []
    for _ in range(16):
        known.decide(batch(1), states)
        used.append(known.shared.rows is not None)
        known.admit(batch(1), states, draft_of([2.0, 1.0, 0.0], Shape(1, np.array([0, 1]))))
        known.learn([outcome(states[0], [0])])
    assert used == [False] * 8 + [True] * 8, "four rows are enough, and each fourth step fits"
    few = policy(confidence="margin", warm_up=1)
    for _ in range(8):
        few.shared.model.step()
    assert not few.shared.model.ready, "nothing was seen"
    known = policy(confidence="q", warm_up=2, start=(0.9, 0.8))
    known.decide(batch(1), [known.init(None)])
    assert known.shared.rows == 2, "there is nothing to fit"


def test_outputs_are_those_of_the_target_and_fewer_rows_are_verified(target, truth):
    proposer = draft_model("1x1x1x1")
    whole = decode(target, proposer, requests())[1]
    group, steps = decode(target, adapt(proposer, policy(start=(0.5, 0.2), confidence="margin")), requests())
    assert emitted(group) == truth
    assert sum(step.draft.shape.nodes for step in steps) < 0.9 * len(steps) * max(s.draft.shape.nodes for s in whole)


def test_verified_rows_are_recorded_and_repeated(target):
    def decoded(known):
        group, steps = decode(target, adapt(draft_model("2x1", "without_replacement"), known), requests(WARM))
        return emitted(group), steps, [row for step in steps for row in step.slim().rows()]

    texts, steps, rows = decoded(policy(start=(0.5, 0.2), confidence="margin"))
    limits = {n: [Limit.parse(row["policy"]) for row in rows if row["request"] == n] for n in range(3)}
    assert any(limit.rows is not None and 0 < len(limit.rows) < 4 for each in limits.values() for limit in each)
    again, repeated, rows_again = decoded(RecordedRows(limits))
    assert again == texts and [row["policy"] for row in rows_again] == [row["policy"] for row in rows]
    for first, second in zip(steps, repeated, strict=True):
        assert second.draft.shape.parent.tolist() == first.draft.shape.parent.tolist()
        assert second.draft.token.tolist() == first.draft.token.tolist()


def test_rows_are_read_as_they_are_written():
    assert Limit.parse(Limit(2, rows=(0, 2)).as_json()) == Limit(2, rows=(0, 2)) and "rows" not in Limit(2).as_json()
    for wrong in ('{"rows": [-1]}', '{"rows": 1}', '{"rows": [null]}'):
        with pytest.raises(ValueError, match="not a policy's decision"):
            Limit.parse(wrong)


@pytest.mark.parametrize("drawn", ["iid", "without_replacement"])
def test_rows_that_are_repeated_are_exact(drawn):
    require_exact(prove(adapt(toy_model("2x1", drawn), RecordedRows({})), Token(), (QUICK[2], QUICK[-1])))


def test_sampled_siblings_are_repeated_together_or_not_at_all():
    class Second(RecordedRows):
        """Repeats a row whose earlier sibling was not verified, as another seed's tree may ask for."""

        def toy(self):
            return Second({}, otherwise=(Limit(rows=(1,)), Limit()))

    require_exact(prove(adapt(toy_model("2x1", "without_replacement"), Second({})), Token(), (QUICK[2], QUICK[-1])))


def test_proposers_without_confidences_are_refused():
    with pytest.raises(WrongOption, match="confidence=margin .*ngram"):
        BatchBudget.load(None, Ngram(3, 4, 1))
    with pytest.raises(WrongOption, match="confidence=head"):
        BatchBudget.load(None, draft_model("1x1"), confidence="head")
    with pytest.raises(WrongOption, match="warm_up=3 is of the model of confidence=margin"):
        BatchBudget.load(None, draft_model("1x1"), confidence="q", warm_up=3)


@pytest.mark.parametrize(
    ("drawn", "children", "refused"),
    [("iid", 2, True), ("without_replacement", 2, True), ("iid", 1, False), ("deterministic", 2, False)],
)
def test_trees_whose_shape_follows_from_sampled_tokens_are_refused(drawn, children, refused):
    proposer = toy_model(drawn=drawn, budget=Budget(7, children))
    assert bool(proposer.why_not_admitted) == refused
    if refused:
        with pytest.raises(ValueError, match="policy 'batch_budget' .*proposer.nodes=7"):
            adapt(proposer, policy())
        with pytest.raises(ValueError, match="proposer.nodes=7"):
            BatchBudget.load(None, proposer, confidence="q")


def test_translated_tokens_are_refused_and_a_draft_that_states_nothing_of_its_rows():
    with pytest.raises(ValueError, match="vocabularies=strings"):
        BatchBudget.load(None, string_model("1x1"))
    with pytest.raises(ValueError, match="the draft states nothing"):
        admitted(policy(), replace(draft_of([0.5] * 6), measured=None), 2)


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


class Staircase(BatchBudget):
    """A mutant: the budget follows from this step's survivals, and of two further rows only the first costs time."""

    def budget(self, known, survival):
        return self.best(survival)[0]

    def seconds(self, rows, live, context=0):
        return 1.0 + 0.8 * -(-rows // (2 * live))


class LinearCost(Staircase):
    """Exact: each further row costs the same."""

    def seconds(self, rows, live, context=0):
        return 1.0 + 0.5 * rows / live


class DrawnTokens(LinearCost):
    """A mutant: a survival is the product of the drawn tokens' probabilities."""

    def confidences(self, batch, states, draft):
        q = draft.q[torch.from_numpy(draft.q_row[draft.shape.parent])]
        return q.gather(-1, draft.token[:, None])[:, 0].numpy()


LOSSY = {(Staircase, 1): 0.2091, (Staircase, 2): 0.1372, (DrawnTokens, 1): 0.1982, (DrawnTokens, 2): 0.2818}


@pytest.mark.nightly
@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("mutant", [Staircase, DrawnTokens, LinearCost])
def test_budgets_from_this_step_are_exact_only_where_costs_are_linear_and_rows_are_ranked_by_features(mutant, requests):
    """Total variations are those of enumeration."""
    instance = Instance(RandomToy(38, v=3, support=3, plain=True), "1x1", requests=requests)
    (finding,) = prove(adapt(toy_model("1x1", "iid"), policy(kind=mutant)), Token(), [instance]).findings
    tv = LOSSY.get((mutant, requests), 0.0)
    assert finding.tv == pytest.approx(tv, abs=1e-4) and bool(finding.wrong) == bool(tv)


class FourRows(BatchBudget):
    """The four rows of the largest survivals, whatever was drawn."""

    def budget(self, known, survival):
        return 4


@pytest.mark.nightly
def test_a_sampled_tree_that_grows_best_first_is_not_exact_under_a_budget(monkeypatch):
    """Its refusal is avoided here. Whether B has children follows from the token of A, and they can displace it."""
    monkeypatch.setattr(TreePlan, "toy", lambda plan, tree: plan)
    proposer = toy_model(drawn="iid", budget=Budget(7, depth=3, width=1))
    instance = Instance(RandomToy(15, v=3, support=3, plain=True), "1x1")
    (finding,) = prove(Adaptive({"best first": proposer}, policy(kind=FourRows)), Token(), [instance]).findings
    assert finding.wrong is not None and finding.tv == pytest.approx(0.0124, abs=1e-4)
