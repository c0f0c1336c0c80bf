"""A proposer of each bundled kind for a small random target; what has weights has random ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from experiments.gpu.random_models import llama, target_of
from spec_lab.core.randomness import CounterDraws
from spec_lab.decode.arm import Arm
from spec_lab.drafters.block.network import BlockNetwork, BlockSettings
from spec_lab.drafters.block.propose import BlockDrafter
from spec_lab.drafters.cascade import DraftCascade
from spec_lab.drafters.draft_layers import random_network
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.drafters.eagle.network import Eagle, Eagle3, Eagle3Settings, EagleSettings
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
from spec_lab.drafters.skip.propose import Skip
from spec_lab.models.fused import fuse
from spec_lab.models.target import Target
from spec_lab.propose import Null, Proposer
from spec_lab.propose.best_first import Budget
from spec_lab.propose.best_of import BestOf
from spec_lab.propose.jacobi import Jacobi
from spec_lab.propose.lookahead import Lookahead
from spec_lab.propose.ngram import Ngram, NgramTree
from spec_lab.propose.pld_plus import PldPlus
from spec_lab.propose.recycling import Recycling
from spec_lab.propose.suffix import Suffix
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import parse
from spec_lab.propose.union import Union
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.draft_pass import Sublayer
from spec_lab.verify import Token

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=128)
"""Sizes of the target. The vocabulary is small, so that its text repeats itself and look-ups draft."""

LAYER: Mapping[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
"""Sizes of drafters with decoder layers."""

V, H, CONTEXT = SIZES["vocab_size"], SIZES["hidden_size"], 512

CHAIN = TreePlan(parse("1x1x1"), "deterministic")
TREE = TreePlan(parse("2x2x1"), "deterministic")
BEST_FIRST = TreePlan((), "deterministic", budget=Budget(8, 2, 3, width=2))
EAGLE_2 = TreePlan((), "deterministic", budget=Budget(8, 4, 3, width=4, rerank=True))

BLOCK = BlockSettings(LAYER, H, H, V, (1, 2), block_size=4, mask_token=V - 1)
EAGLE_3 = Eagle3Settings(LAYER, H, H, V, (1, 2, 3), draft_vocab_size=96)


def small_target(device: Any, dtype: Any, captured: bool) -> Target:
    """A random target."""
    model = llama(SIZES, device, dtype, CONTEXT)
    if captured:
        fuse(model)
    return target_of(model, "small", captured)


def _draft_lm(target: Target, layers: int = 1) -> CausalLM:
    model = llama({**SIZES, "num_hidden_layers": layers}, target.lm.device, target.lm.dtype, CONTEXT)
    return target.draft_runner(model, "")


def _draft(plan: TreePlan) -> Callable[[Target], Proposer]:
    return lambda target: DraftModel(_draft_lm(target), CONTEXT, plan)


def _features(name: str, settings: Any, plan: TreePlan) -> Callable[[Target], Proposer]:
    kinds = {MtpSettings: Mtp, EagleSettings: Eagle, Eagle3Settings: Eagle3}

    def build(target: Target) -> Proposer:
        network: Any = random_network(kinds[type(settings)](settings), target)
        return FeatureDrafter(network, target, plan, name)

    return build


def _kangaroo(target: Target) -> Proposer:
    network = random_network(Kangaroo(KangarooSettings(LAYER, H, 1)), target)
    return KangarooDrafter(network, target, CHAIN)


def _cascade(target: Target) -> Proposer:
    draft = Target(_draft_lm(target), None, "draft", CONTEXT, "", 0.0)
    return DraftCascade(Arm(draft, Ngram(3, 2, 1), Token(), CounterDraws(0)), 4, "deterministic")


def _medusa(target: Target) -> Medusa:
    return Medusa(Heads.random(target, 3, False), parse("2x2x1"))


PROPOSERS: Mapping[str, Callable[[Target], Proposer]] = {
    "null": lambda target: Null(),
    "draft_chain": _draft(CHAIN),
    "eagle3_chain": _features("eagle", EAGLE_3, CHAIN),
    "eagle3_tree": _features("eagle", EAGLE_3, TREE),
    "eagle3_rerank": _features("eagle", EAGLE_3, EAGLE_2),
    "eagle3_best_first": _features("eagle", EAGLE_3, BEST_FIRST),
    "eagle_chain": _features("eagle", EagleSettings(LAYER, H, V), CHAIN),
    "medusa": _medusa,
    "draft_tree": _draft(TREE),
    "draft_best_first": _draft(BEST_FIRST),
    "draft_confident": _draft(TreePlan(parse("1x1x1"), "deterministic", confidence=0.001)),
    "ngram": lambda target: Ngram(6, 3, 1),
    "ngram_tree": lambda target: NgramTree(8, 4, 3, 1),
    "suffix": lambda target: Suffix.load(target, children=2),
    "mtp": _features("mtp", MtpSettings(LAYER, H, V, modules=2), CHAIN),
    "hydra": lambda target: Hydra(random_network(HydraHeads(HydraSettings(H, V, 3)), target), target, TREE),
    "hydra_prefix": lambda target: Hydra(
        random_network(HydraHeads(HydraSettings(H, V, 3, prefix=LAYER)), target), target, TREE
    ),
    "block": lambda target: BlockDrafter(random_network(BlockNetwork(BLOCK), target), target, TREE),
    "pard": lambda target: Pard(_draft_lm(target), CONTEXT, V - 1, CHAIN),
    "early_exit": lambda target: EarlyExit(target.lm, 1, CHAIN),
    "kangaroo": _kangaroo,
    "skip": lambda target: Skip(target.lm, CHAIN, frozenset({Sublayer("attn", 1), Sublayer("mlp", 2)})),
    "recycling": lambda target: Recycling.load(target, "2x2x1"),
    "lookahead": lambda target: Lookahead.load(target, 3, 3, 3),
    "jacobi": lambda target: Jacobi.load(target, 4),
    "pld_plus": lambda target: PldPlus.load(target, 6),
    "union": lambda target: Union.load(target, {"medusa": _medusa(target), "ngram": Ngram(4, 2, 1)}),
    "best_of": lambda target: BestOf.load(target, {"suffix": Suffix.load(target), "chain": _draft(CHAIN)(target)}),
    "cascade": _cascade,
}
"""Each builds one; the most used ones first."""

WITHOUT_FIXED_SHAPES = ("early_exit", "kangaroo", "skip")
"""Proposers that run ranges of the target's layers, which a target in fixed shapes refuses."""
