"""Proposers of another package that learn from the target while it runs are exact under everything the engine does."""

import importlib
import sys
from pathlib import Path

import pytest

from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.banned import Banned
from spec_lab.constrain.combined import Combined
from spec_lab.constrain.control import ControllerConstraint
from spec_lab.constrain.engines.grammar import regex
from spec_lab.constrain.min_new_tokens import MinNewTokens
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import Limits, fixed_group
from spec_lab.drafters.block.heads import HeadSettings
from spec_lab.drafters.block.network import BlockNetwork, BlockSettings
from spec_lab.drafters.block.propose import BlockDrafter
from spec_lab.drafters.draft_layers import random_network, small_layer
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.drafters.draft_model.retokenized import Retokenized, Tokens
from spec_lab.drafters.draft_model.vocabularies import SharedTokens
from spec_lab.drafters.eagle.network import Eagle3Settings, EagleSettings
from spec_lab.drafters.early_exit import EarlyExit
from spec_lab.drafters.feature_drafter import FeatureDrafter
from spec_lab.drafters.hydra.network import HydraHeads, HydraSettings
from spec_lab.drafters.hydra.propose import Hydra
from spec_lab.drafters.kangaroo.network import Kangaroo, KangarooSettings
from spec_lab.drafters.kangaroo.propose import KangarooDrafter
from spec_lab.drafters.medusa.network import Heads
from spec_lab.drafters.medusa.propose import Medusa
from spec_lab.drafters.mtp.network import Mtp, MtpSettings
from spec_lab.drafters.pard.propose import Pard
from spec_lab.drafters.peagle.network import PEagle, PEagleSettings
from spec_lab.drafters.peagle.propose import PEagleDrafter
from spec_lab.drafters.skip.propose import Skip
from spec_lab.drafters.skip.search import SkipSearch
from spec_lab.drafters.sparse_kv import SparseKV
from spec_lab.policy.adaptive import adapt
from spec_lab.policy.depths import Heuristic
from spec_lab.policy.thresholds import Threshold
from spec_lab.propose.best_first import Budget
from spec_lab.propose.ngram import Ngram
from spec_lab.propose.pld_plus import PldPlus
from spec_lab.propose.stop_rules import AdaEdl
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import parse
from spec_lab.propose.union import Union
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.draft_pass import Sublayer
from spec_lab.runners.sparse_kv import Selection
from spec_lab.tasks.certify.instances import PIECES, Forking
from spec_lab.tasks.certify.toy_models import PROMPT
from spec_lab.verify import Gumbel, KSeq, Misfit, Token, Traversal
from tests.drafters.eagle_heads import network_of
from tests.drafters.small_tokenizers import letters
from tests.extension.enumerated import SAMPLING, V, decoded, distance, model, wanted
from tests.tiny import tiny_model

EXACT = 1e-12
PACKAGE = Path(__file__).parent / "package"
VERIFIERS = {"token": Token(), "traversal": Traversal()}


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(PACKAGE)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy_plugin"]:
        del sys.modules[name]


def part(module: str, name: str):
    return getattr(importlib.import_module(f"toy_plugin.{module}"), name)


def features(target):
    return part("features", "load")(target, Budget(nodes=2, children=1, depth=2, width=1))


def feature_trees(target):
    return part("features", "load")(target, Budget(nodes=4, children=2, depth=2, width=1))


def eagle1(target):
    return eagle(EagleSettings(small_layer(16), 16, V), target, TreePlan(parse("0 1 0.0"), "deterministic"))


def eagle3(target):
    settings = Eagle3Settings(small_layer(16), 16, 16, V, (1, 2, 3), V - 1, norm_before_residual=True)
    return eagle(settings, target, TreePlan(parse("0 0.0"), "iid"))


def eagle3_tree(target):
    settings = Eagle3Settings(small_layer(16), 16, 16, V, (1, 2, 3), V)
    return eagle(settings, target, TreePlan(parse("0 1"), "without_replacement"))


def eagle3_reranked(target):
    settings = Eagle3Settings(small_layer(16), 16, 16, V, (1, 2, 3), V - 1, layers=2, norm_output="feedback")
    return eagle(settings, target, TreePlan(drawn="deterministic", budget=Budget(3, 2, 2, 2, rerank=True)))


def eagle(settings, target, plan):
    network = random_network(network_of(settings), target)
    return FeatureDrafter(network, target, plan, "eagle")


def medusa(target):
    return Medusa(Heads.random(target, 2, trunk=True), parse("0 1 0.0"))


def hydra(target):
    return Hydra(
        random_network(HydraHeads(HydraSettings(16, V, 4, 2)), target),
        target,
        TreePlan(parse("0 1 0.0"), "deterministic"),
    )


def hydra_prefix(target):
    settings = HydraSettings(16, V, 3, prefix=small_layer(16), shared_lm_head=True)
    return Hydra(random_network(HydraHeads(settings), target), target, TreePlan(parse("0 0.0"), "iid"))


def hydra_best_first(target):
    settings = HydraSettings(16, V, 2, prefix=small_layer(16))
    return Hydra(
        random_network(HydraHeads(settings), target), target, TreePlan(drawn="deterministic", budget=Budget(3, 2, 2, 1))
    )


def mtp_tree(target):
    settings = MtpSettings(small_layer(16), 16, V)
    return mtp(settings, target, TreePlan(parse("0 1 0.0"), "deterministic"))


def mtp_modules(target):
    settings = MtpSettings(small_layer(16), 16, V, modules=2, shared=True)
    return mtp(settings, target, TreePlan(parse("0 0.0"), "iid"))


def mtp(settings, target, plan):
    network = random_network(Mtp(settings), target)
    return FeatureDrafter(network, target, plan, "mtp")


def block(target):
    return block_drafter(target, TreePlan(parse("0 1 0.0"), "deterministic"), block_size=3)


def block_markov(target):
    return block_drafter(
        target, TreePlan(parse("0 0.0"), "iid"), block_size=2, predicts_next=True, head=HeadSettings("vanilla", 2)
    )


def block_drafter(target, plan, **more):
    settings = BlockSettings(small_layer(16), 16, 16, V, (1, 2), mask_token=V - 1, layers=2, **more)
    return BlockDrafter(random_network(BlockNetwork(settings), target, seed=2), target, plan)


def pard(target):
    return masked(target, TreePlan(parse("0 0.0"), "iid"))


def pard_tree(target):
    return masked(target, TreePlan(parse("0 1 0.0"), "deterministic"))


def masked(target, plan):
    """Its draft has one token more than the target, the mask token."""
    lm = tiny_model(seed=4, num_hidden_layers=1, vocab_size=V + 1, hidden_size=16, intermediate_size=16)
    return Pard(CausalLM(lm), target.context, V, plan)


def peagle(target):
    settings = PEagleSettings(small_layer(16), 16, 16, V, (1, 2, 3), V - 1, layers=2, mask_token=V - 1)
    return PEagleDrafter(random_network(PEagle(settings), target), target, TreePlan(parse("0 1 0.0"), "deterministic"))


def pld_plus(target):
    return PldPlus(2, 1)


def shared(target):
    """A chain of a draft model whose tokens are c, bc, b, a, the end and ca."""
    return of_shared_tokens(target, TreePlan(parse("0 0.0"), "iid"))


def shared_tree(target):
    return of_shared_tokens(target, TreePlan(drawn="deterministic", budget=Budget(3, 2, 2, 1)))


def of_shared_tokens(target, plan):
    mine, draft_tokens = (
        Tokens(letters(tokens), len(tokens), frozenset({4}), "toy")
        for tokens in (["a", "b", "ab", "c", "</s>"], ["c", "bc", "b", "a", "</s>", "ca"])
    )
    tokens = SharedTokens([(0, 3), (1, 2), (3, 0), (4, 4)], V, Retokenized(mine, draft_tokens, {4: 4}), V)
    draft = tiny_model(seed=2, num_hidden_layers=1, vocab_size=draft_tokens.size)
    return DraftModel(CausalLM(draft), target.context, plan, vocabularies=tokens)


def recycling(target):
    return part("recycling", "Recycling")((2, 1))


def lookahead(target):
    return part("lookahead", "Lookahead")(window=2, depth=2)


def union(target):
    return part("union", "Union")(depth=2)


def adaptive(target):
    """A draft model's chain under a policy of depths."""
    return adapt(shared(target), Heuristic(1.0, max_depth=2))


def stopped(target):
    """An EAGLE head's tree under a policy that stops drafts, at a threshold that follows the acceptance."""
    return adapt(eagle3_tree(target), Threshold(AdaEdl(), 0.4, adapt=True))


def early_exit(target):
    return EarlyExit(target.lm, 1, TreePlan(parse("0 1 0.0"), "deterministic"))


def early_exit_tree(target):
    return EarlyExit(target.lm, 2, TreePlan(parse("0 1"), "without_replacement"))


def early_exit_best_first(target):
    return EarlyExit(target.lm, 2, TreePlan(drawn="iid", budget=Budget(2, 2, 2, 1)))


def kangaroo(target):
    return adapted(target, TreePlan(parse("0 1 0.0"), "deterministic"), layers=2)


def kangaroo_tree(target):
    return adapted(target, TreePlan(parse("0 1"), "without_replacement"))


def kangaroo_confident(target):
    return adapted(target, TreePlan(parse("0 0.0"), "iid", confidence=0.4))


def adapted(target, plan, layers=1):
    settings = KangarooSettings(small_layer(16), 16, 1, layers)
    network = random_network(Kangaroo(settings), target)
    return KangarooDrafter(network, target, plan)


def early_exit_union(target):
    """Its nodes are renumbered among those of an n-gram proposer."""
    return Union.load(target, {"ngram": Ngram(2, 2, 1), "early_exit": early_exit(target)})


def skip(target):
    """Without the attention of layer 1 and the MLP of layer 2."""
    skipped = frozenset({Sublayer("attn", 1), Sublayer("mlp", 2)})
    return Skip(target.lm, TreePlan(parse("0 1 0.0"), "deterministic"), skipped)


def skip_searched(target):
    """Each request finds which sublayer of layer 1 it skips."""
    search = SkipSearch((Sublayer("attn", 1), Sublayer("mlp", 1)), 0.5, tries=3, every=1, window=4)
    return Skip(target.lm, TreePlan(parse("0 0.0"), "iid"), search, "request")


def sparse_kv(target):
    """The first and the last two positions."""
    lm = target.lm.sparse(Selection("streaming_llm", 3, 1))
    return SparseKV(lm, target.context, TreePlan(parse("0 1 0.0"), "deterministic"))


PROPOSERS = {
    "features": features, "feature_trees": feature_trees, "recycling": recycling, "lookahead": lookahead,
    "union": union, "eagle1": eagle1, "eagle3": eagle3, "eagle3_tree": eagle3_tree,
    "eagle3_reranked": eagle3_reranked, "medusa": medusa,
    "hydra": hydra, "hydra_prefix": hydra_prefix, "hydra_best_first": hydra_best_first,
    "mtp_tree": mtp_tree, "mtp_modules": mtp_modules,
    "pard": pard, "pard_tree": pard_tree, "block": block, "block_markov": block_markov,
    "peagle": peagle,
    "pld_plus": pld_plus, "shared": shared, "shared_tree": shared_tree,
    "early_exit": early_exit, "early_exit_tree": early_exit_tree, "early_exit_best_first": early_exit_best_first,
    "early_exit_union": early_exit_union, "kangaroo": kangaroo, "kangaroo_tree": kangaroo_tree,
    "kangaroo_confident": kangaroo_confident,
    "skip": skip, "skip_searched": skip_searched, "sparse_kv": sparse_kv,
    "adaptive": adaptive, "stopped": stopped,
}  # fmt: skip


def constraints() -> dict[str, AppliedConstraint | None]:
    vocabulary = Vocabulary.plain(PIECES, 4)
    grammar = regex(vocabulary, "(ab|c)(a|b|c)*b|a[bc]")
    return {
        "none": None,
        "grammar": AppliedConstraint(grammar, "both", fast_forward=True),
        "forks": AppliedConstraint(
            ControllerConstraint(lambda _: Forking(), vocabulary.size, "a controller that forks")
        ),
        "backtracking": AppliedConstraint(Combined([Banned(("ab",), PIECES), MinNewTokens(2, vocabulary.size)])),
    }


MANY = {  # some thousand outcomes
    ("feature_trees", "forks"), ("feature_trees", "backtracking"), ("feature_trees", "chunked prefill"),
    ("feature_trees", "preempted"), ("union", "forks"), ("mtp_modules", "forks"), ("mtp_modules", "chunked prefill"),
    ("early_exit_best_first", "forks"), ("skip_searched", "forks"), ("skip_searched", "backtracking"),
    ("skip_searched", "preempted"),
}  # fmt: skip


def case(proposer, other, verifier, quick=True):
    marks = [] if quick and (proposer, other) not in MANY else [pytest.mark.nightly]
    return pytest.param(proposer, other, verifier, marks=marks)


CONSTRAINTS = ("none", "grammar", "forks", "backtracking")
CASES = [
    case(proposer, constraint, verifier)
    for proposer in PROPOSERS
    for constraint in CONSTRAINTS
    for verifier in VERIFIERS
]


@pytest.mark.each_value
@pytest.mark.parametrize(("proposer", "constraint", "verifier"), CASES)
def test_outputs_have_the_target_s_distribution(proposer, constraint, verifier):
    target, applied, tokens = model(), constraints()[constraint], 2 if proposer in SAMPLED else 3
    outcomes, seen = decoded(target, PROPOSERS[proposer](target), VERIFIERS[verifier], tokens, applied)
    assert distance(outcomes, wanted(target, tokens, applied)) < EXACT
    assert abs(sum(outcomes.values()) - 1) < EXACT
    assert seen["drafted"] > 0 and seen["accepted"] > 0


SAMPLED = (  # many more outcomes
    "features", "feature_trees", "union", "eagle3", "eagle3_tree", "hydra_prefix", "mtp_modules", "pard",
    "block_markov", "shared", "early_exit_tree", "early_exit_best_first", "skip_searched", "kangaroo_tree",
    "kangaroo_confident",
)  # fmt: skip

LIMITS = {
    "two at once": Limits(max_batch_size=2),
    "chunked prefill": Limits(max_batch_size=3, max_prefill_tokens=4),
    "preempted": Limits(max_kv_tokens=32, max_prefill_tokens=5),
}
BOTTOM_UP = {("recycling", "two at once"), ("union", "preempted")}  # with traversal, in the short run


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("proposer", "limits", "verifier"),
    [
        case(proposer, limits, verifier, quick=verifier == "token" or (proposer, limits) in BOTTOM_UP)
        for proposer in PROPOSERS
        for limits in LIMITS
        for verifier in VERIFIERS
    ],
)
def test_a_request_has_its_distribution_whatever_requests_come_and_go(proposer, limits, verifier):
    target, tokens = model(), 2 if proposer in SAMPLED else 3
    outcomes, seen = decoded(target, PROPOSERS[proposer](target), VERIFIERS[verifier], tokens, None, LIMITS[limits])
    assert distance(outcomes, wanted(target, tokens)) < EXACT
    assert seen["drafted"] > 0 and seen["accepted"] > 0


def test_computed_only_rows_are_observed_and_counted_separately():
    target = model()
    request = Request(0, "request", PROMPT, SAMPLING, 8, frozenset())
    engine = fixed_group(Arm(target, lookahead(target), Token(), CounterDraws(0)), [request])
    rows = [row for info in engine for row in info.rows()]
    assert [row["computed_only"] for row in rows] == [2] * len(rows)
    assert all(row["nodes"] <= 2 for row in rows) and any(row["nodes"] for row in rows)


@pytest.mark.parametrize("verifier", [KSeq(), Gumbel()])
def test_a_mixture_of_sampled_and_point_siblings_is_refused_by_verifiers_without_support(verifier):
    target = model()
    with pytest.raises(Misfit, match=rf"(?s){verifier.name}.*union"):
        fixed_group(Arm(target, union(target), verifier, CounterDraws(0)), [])
