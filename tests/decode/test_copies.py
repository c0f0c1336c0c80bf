"""How often a step waits for the device: once for each drafted level, once for masks, and once after the forward.

On the CPU copies are only counted. On the ``meta`` device, which has no numbers, everything that reads a tensor raises
except ``Readback``, which makes some up here: nothing in a step reads the device behind its back.
"""

import numpy as np
import pytest
import torch

from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.protocol import Constraint, ConstraintState, pack
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.readback import Readback
from spec_lab.core.request import Request
from spec_lab.decode import step as engine_step
from spec_lab.decode.arm import Arm
from spec_lab.decode.commit import commit
from spec_lab.decode.engine import fixed_group
from spec_lab.decode.sequence import SequenceState
from spec_lab.decode.study import Capture, choose_nothing, commit_nothing
from spec_lab.drafters.block.heads import HeadSettings
from spec_lab.drafters.block.network import BlockNetwork, BlockSettings
from spec_lab.drafters.block.propose import BlockDrafter
from spec_lab.drafters.draft_layers import random_network, small_layer
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.drafters.early_exit import EarlyExit
from spec_lab.drafters.kangaroo.network import Kangaroo, KangarooSettings
from spec_lab.drafters.kangaroo.propose import KangarooDrafter
from spec_lab.drafters.medusa.network import Heads
from spec_lab.drafters.medusa.propose import Medusa
from spec_lab.drafters.pard.propose import Pard
from spec_lab.drafters.peagle.network import PEagle, PEagleSettings
from spec_lab.drafters.peagle.propose import PEagleDrafter
from spec_lab.drafters.skip.propose import Skip
from spec_lab.drafters.sparse_kv import SparseKV
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.propose.best_first import Budget
from spec_lab.propose.ngram import Ngram
from spec_lab.propose.pld_plus import PldPlus
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import parse
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.draft_pass import Sublayer
from spec_lab.runners.sparse_kv import Selection
from spec_lab.verify import Token, Traversal, choose
from tests.tiny import VOCABULARY, tiny_model

CHAIN, TREE = parse("1x1x1"), parse("2x2")
ADAPTER = KangarooSettings(small_layer(32), 32, 1)


def kangaroo(target):
    network = random_network(Kangaroo(ADAPTER), target)
    return KangarooDrafter(network, target, TreePlan(CHAIN))


def target_on(device):
    with torch.device(device):
        return Target(CausalLM(tiny_model(dtype=torch.float32)), None, "tiny", 64, "", 0.0)


MARKOV = BlockSettings(
    small_layer(32), 32, 32, VOCABULARY, (1, 2), block_size=3, mask_token=60, head=HeadSettings("rnn", 2)
)
PARALLEL = PEagleSettings(small_layer(32), 32, 32, VOCABULARY, (1, 2), 50, mask_token=60)
PROPOSERS = {
    "null": lambda t: Null(),
    "ngram": lambda t: Ngram(3, 2, 1),
    "pld_plus": lambda t: PldPlus(3, 1),
    "medusa": lambda t: Medusa(Heads.random(t, 2, False), TREE),
    "draft_chain": lambda t: DraftModel(t.lm, 64, TreePlan(CHAIN)),
    "draft_points": lambda t: DraftModel(t.lm, 64, TreePlan(TREE, "deterministic")),
    "draft_without": lambda t: DraftModel(t.lm, 64, TreePlan(TREE, "without_replacement", 1.0)),
    "draft_gumbel": lambda t: DraftModel(t.lm, 64, TreePlan(TREE, "gumbel")),
    "draft_best_first": lambda t: DraftModel(
        t.lm, 64, TreePlan((), "without_replacement", 1.0, budget=Budget(4, 2, 2, width=1))
    ),
    "draft_confident": lambda t: DraftModel(t.lm, 64, TreePlan(CHAIN, confidence=0.001)),
    "pard": lambda t: Pard(t.lm, 64, VOCABULARY - 1, TreePlan(CHAIN)),
    "early_exit": lambda t: EarlyExit(t.lm, 1, TreePlan(CHAIN)),
    "kangaroo": kangaroo,
    "early_exit_best_first": lambda t: EarlyExit(
        t.lm, 1, TreePlan((), "deterministic", budget=Budget(4, 2, 2, width=1))
    ),
    "skip": lambda t: Skip(t.lm, TreePlan(CHAIN), frozenset({Sublayer("attn", 1)})),
    "sparse_kv": lambda t: SparseKV(t.lm.sparse(Selection("snapkv", 6, window=2)), 64, TreePlan(CHAIN)),
    "peagle": lambda t: PEagleDrafter(random_network(PEagle(PARALLEL), t), t, TreePlan(TREE, "deterministic")),
    "block": lambda t: BlockDrafter(random_network(BlockNetwork(MARKOV), t), t, TreePlan(TREE, "deterministic")),
}
LEVELS = (
    dict.fromkeys(PROPOSERS, 0)
    | dict.fromkeys(("draft_chain", "draft_confident", "pard", "early_exit", "kangaroo", "skip", "sparse_kv"), 3)
    | dict.fromkeys(
        (
            "draft_points",
            "draft_without",
            "draft_gumbel",
            "draft_best_first",
            "early_exit_best_first",
            "block",
            "peagle",
        ),
        2,
    )
    | {"pld_plus": 1}
)
"""The number of levels that each one's draft model computes; PLD+ compares hidden states once."""
AHEAD = ("draft_chain", "draft_points", "sparse_kv")
"""Those of them whose trees a device drafts without a look at a token."""


class EvenTokens(Constraint):
    """Allows even tokens only."""

    name, vocabulary = "even", VOCABULARY

    def start(self, request):
        return Even()


class Even(ConstraintState):
    def fork(self):
        return self

    def advance(self, token):
        assert token % 2 == 0

    def mask(self):
        return pack(np.arange(VOCABULARY) % 2 == 0)


def requests(temperature, count):
    return [Request(n, f"r{n}", (1, 2, 3, 1, 2, 3, 1, 2), Sampling(temperature), 8) for n in range(count)]


def decoded(device, name, verifier, temperature, applied=None, count=2):
    target = target_on(device)
    return list(
        fixed_group(
            Arm(target, PROPOSERS[name](target), verifier, CounterDraws(1), applied), requests(temperature, count)
        )
    )


VERIFIERS = pytest.mark.parametrize("verifier", [Token(), Traversal()], ids=lambda verifier: verifier.name)
EVERY = pytest.mark.parametrize("name", [name for name in PROPOSERS if name != "draft_gumbel"])
TEMPERATURE = pytest.mark.parametrize("temperature", [0.0, 0.8])


@EVERY
@VERIFIERS
@TEMPERATURE
@pytest.mark.each_value
def test_one_copy_for_each_drafted_level_and_one_after_the_forward(name, verifier, temperature):
    for info in decoded("cpu", name, verifier, temperature):
        assert info.copies_after == 1
        assert info.copies_before <= LEVELS[name]
        if info.draft.shape.depth.max() == LEVELS[name]:
            assert info.copies_before == LEVELS[name]
    assert info.row()["copies_before"] == info.copies_before and info.row()["copies_after"] == 1


@EVERY
@TEMPERATURE
@pytest.mark.each_value
def test_masks_computed_on_the_host_cost_one_copy_more(name, temperature):
    applied = AppliedConstraint(EvenTokens())
    for info in decoded("cpu", name, Token(), temperature, applied):
        drafted = info.draft.shape.nodes > 0
        assert info.copies_after == 1
        assert info.copies_before <= LEVELS[name] + 1
        if drafted and info.draft.shape.depth.max() == LEVELS[name]:
            assert info.copies_before == LEVELS[name] + 1


class MadeUp(Readback):
    """Numbers in place of those that the meta device does not have: one whole number everywhere, and no flags."""

    whole = 2

    def fetch(self, tensors):
        assert all(tensor.is_meta for tensor in tensors)
        whole = {torch.int64: self.whole, torch.bool: False}
        return [np.full(tuple(tensor.shape), whole.get(tensor.dtype, 0.5)) for tensor in tensors]


UNSAMPLED = {
    "null": 0.0,
    "ngram": 0.0,
    "pld_plus": 0.0,
    "medusa": 0.0,
    "block": 0.0,
    "peagle": 0.0,
    "sparse_kv": 0.0,
}  # greedy: where nothing is drafted, there is no node 2


@pytest.mark.parametrize("name", [name for name in PROPOSERS if name not in ("draft_gumbel", "draft_confident")])
@VERIFIERS
@pytest.mark.each_value
def test_a_step_reads_nothing_of_the_device_but_the_counted_copies(monkeypatch, name, verifier):
    """All accepted paths end at row 2, a node of the one tree, with token 2.

    Without flags a draft that stops where it is unsure has one node only; the next test covers it.
    """
    monkeypatch.setattr(engine_step, "Readback", MadeUp)
    steps = decoded("meta", name, verifier, UNSAMPLED.get(name, 0.8), count=1)
    assert len(steps) >= 2 and all(info.copies_after == 1 for info in steps)
    assert any(info.copies_before == (0 if name in AHEAD else LEVELS[name]) for info in steps)
    assert not any(info.copies_before for info in steps) or name not in AHEAD


@pytest.mark.nightly
@EVERY
@VERIFIERS
def test_nor_does_a_step_under_a_constraint(monkeypatch, name, verifier):
    """All accepted paths end at the root, with token 0."""
    monkeypatch.setattr(engine_step, "Readback", MadeUp)
    monkeypatch.setattr(MadeUp, "whole", 0)
    steps = decoded("meta", name, verifier, 0.8, AppliedConstraint(EvenTokens()), count=1)
    assert len(steps) >= 2 and all(info.copies_after == 1 for info in steps)


@pytest.mark.each_value
@pytest.mark.parametrize("commits", [commit, commit_nothing], ids=["commits", "forgets"])
@pytest.mark.parametrize("chooses", [choose, choose_nothing], ids=["samples", "chooses_nothing"])
@pytest.mark.parametrize("name", ["medusa", "draft_without"])
def test_the_parts_of_studies_read_nothing_else_either(monkeypatch, name, chooses, commits):
    """Calibration, certification and the verifier study only record drafts and p."""
    monkeypatch.setattr(engine_step, "Readback", MadeUp)
    monkeypatch.setattr(MadeUp, "whole", 0)
    target = target_on("meta")
    proposer, (request,) = PROPOSERS[name](target), requests(0.8, 1)
    state = SequenceState(request, target.lm.open(), list(request.tokens), state=proposer.init(request))
    parts = Arm(target, proposer, Capture(), CounterDraws(1), choose=chooses, commit=commits)
    engine_step.step([], parts, [(state, len(state.tokens) - 1)])  # Medusa's heads read the last hidden state
    info = engine_step.step([state], parts)
    assert info.copies_after == 1 and parts.verifier.draft is not None
