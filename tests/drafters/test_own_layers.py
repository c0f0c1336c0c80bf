"""Proposers that draft with the target's own layers beside others: hybrids, cascades, policies, engines, bfloat16."""

import pytest

from spec_lab.core.limit import Limit
from spec_lab.drafters.draft_layers import random_network, small_layer
from spec_lab.drafters.early_exit import EarlyExit
from spec_lab.drafters.kangaroo.network import Kangaroo, KangarooSettings
from spec_lab.drafters.kangaroo.propose import KangarooDrafter
from spec_lab.drafters.skip.propose import Skip
from spec_lab.drafters.skip.search import SkipSearch
from spec_lab.models.target import Target
from spec_lab.policy.adaptive import adapt
from spec_lab.policy.recorded import RecordedPolicy
from spec_lab.propose.best_first import Budget
from spec_lab.propose.best_of import BestOf
from spec_lab.propose.ngram import Ngram
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import parse
from spec_lab.propose.union import Union
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.draft_pass import Sublayer
from tests.propose.lab import cascade, decode, emitted, requests
from tests.tiny import CONTEXT, tiny_model, tiny_target

H, LAYERS = 32, 4
CHAIN, TREE = TreePlan(parse("1x1x1")), TreePlan(parse("2x1"), "deterministic")
RERANKED = TreePlan(drawn="deterministic", budget=Budget(3, 3, 3, 3, rerank=True))
SUBLAYERS = tuple(Sublayer(kind, layer) for layer in (1, 2) for kind in ("attn", "mlp"))


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_hidden_layers=LAYERS)


def early_exit(target, plan=TREE, layers=2):
    return EarlyExit(target.lm, layers, plan)


def kangaroo(target, plan=TREE):
    network = random_network(Kangaroo(KangarooSettings(small_layer(H), H, 2)), target)
    return KangarooDrafter(network, target, plan)


def skip(target, plan=TREE):
    return Skip(target.lm, plan, frozenset(SUBLAYERS[:3]))


def searched(target, plan=TREE):
    return Skip(target.lm, plan, SkipSearch(SUBLAYERS, 0.5, tries=4, every=2, window=4), "request")


OWN = {"early_exit": early_exit, "kangaroo": kangaroo, "skip": skip, "searched": searched}


def require(target, truth, proposer):
    group, steps = decode(target, proposer, requests())
    assert emitted(group) == truth
    assert not target.lm.cells.references.any()
    return steps


@pytest.mark.parametrize("name", OWN)
def test_parts_of_a_best_of_draft_for_different_sequences_of_a_batch(target, truth, name):
    both = BestOf.load(target, {"ngram": Ngram(3, 2, 1), name: OWN[name](target)})
    turns = {0: [Limit(4, part="ngram"), Limit(4, part=name)], 1: [Limit(4, part=name)], 2: [Limit(4, part=name)]}
    policy = RecordedPolicy({key: depth * 20 for key, depth in turns.items()})
    require(target, truth, adapt(both, policy))


@pytest.mark.parametrize("parts", [
    (early_exit, lambda target: early_exit(target, CHAIN, 3)), (lambda target: early_exit(target, RERANKED), skip),
    (skip, early_exit), (early_exit, searched), (searched, lambda target: early_exit(target, RERANKED)),
    (kangaroo, lambda target: early_exit(target, CHAIN, 1)),
])  # fmt: skip
@pytest.mark.one_in(3)
def test_unions_emit_the_target_s_tokens(target, truth, parts):
    both = Union.load(target, {str(n): part(target) for n, part in enumerate(parts)})
    require(target, truth, both)
    assert both.target_cells >= max(part(target).target_cells for part in parts)


@pytest.mark.parametrize("name", ["early_exit", "skip"])
def test_an_early_exit_of_a_draft_model_drafts_for_it(target, truth, name):
    lm = CausalLM(tiny_model(num_hidden_layers=LAYERS, seed=1))
    inner = OWN[name](Target(lm, None, "draft", CONTEXT, "", 0.0), CHAIN)
    require(target, truth, cascade(inner, lm))
    assert not lm.cells.references.any()


@pytest.mark.parametrize("name", OWN)
def test_a_policy_may_let_nothing_be_drafted_in_some_steps(target, truth, name):
    policy = RecordedPolicy({key: [Limit(depth) for depth in (0, 2, 1, 0, 0, 2) * 4] for key in range(3)})
    steps = require(target, truth, adapt(OWN[name](target), policy))
    assert {step.draft.shape.nodes > 0 for step in steps} == {True, False}
