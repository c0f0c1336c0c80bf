"""Controllers that cannot be forked, penalties in a batch, forks counted."""

import pytest

from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.control import Branch, ControllerConstraint
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.decode import commit
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.propose.null import Null
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import parse
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.verify import Token
from tests.constrain.toys import Table
from tests.labs import Repeat
from tests.tiny import CONTEXT, VOCABULARY, tiny_model, tiny_target


def draft(target, tree: str = "1x1x1") -> DraftModel:
    return DraftModel(CausalLM(tiny_model(seed=1)), CONTEXT, TreePlan(parse(tree), "iid"))


class Listens:
    """Allows everything and records what it receives; its fork is itself."""

    def __init__(self) -> None:
        self.heard = []

    def step(self, event):
        self.heard.append(event.append)
        return [Branch(allow=set(range(VOCABULARY - len(self.heard))))]

    def fork(self):
        return self


@pytest.mark.parametrize("placement", ["target", "both"])
def test_a_controller_that_cannot_be_forked_receives_committed_tokens_only(placement):
    target = tiny_target()
    outputs = []
    for proposer in (Null(), draft(target), Repeat(3)):
        listener = Listens()
        applied = AppliedConstraint(
            ControllerConstraint(lambda _, controller=listener: controller, VOCABULARY, supports_drafts=False),
            placement,
        )
        group = fixed_group(
            Arm(target, proposer, Token(), CounterDraws(0), applied), [Request(0, "r", (1, 2), max_new_tokens=6)]
        )
        assert all(not done.draft.shape.nodes for done in group)
        assert [token for append in listener.heard for token in append] == group.sequences[0].emitted
        outputs.append(group.sequences[0].emitted)
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_batch_mates_penalty_changes_nothing():
    target = tiny_target()
    applied = AppliedConstraint(
        Table(lambda before: [5] if len(before) % 3 == 2 else range(VOCABULARY), VOCABULARY), "both", None, True
    )
    for seed in range(4):
        alone = [Request(0, "a", (1, 2, 3), Sampling(1.0), 12)]
        mates = [[*alone, Request(1, "b", (4, 5), Sampling(1.0, repetition_penalty=p), 12)] for p in (1.0, 1.4)]
        outputs = []
        for requests in (alone, *mates):
            group = fixed_group(Arm(target, draft(target), Token(), CounterDraws(seed), applied), requests)
            list(group)
            outputs.append(group.sequences[0].emitted)
        assert outputs[0] == outputs[1] == outputs[2]


class Doubles:
    """Forks after its first and its second token."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps

    def step(self, event):
        self.steps += 1
        return [Branch(), Branch()] if self.steps in (2, 3) else [Branch()]

    def fork(self):
        return Doubles(self.steps)


def test_the_limit_on_forks_does_not_depend_on_drafts(monkeypatch):
    target = tiny_target()
    request = Request(0, "r", (1, 2), max_new_tokens=5)
    for most, broken in ((3, False), (2, True)):
        monkeypatch.setattr(commit, "MAX_FORKS", most)
        for proposer in (Null(), Repeat(3)):
            applied = AppliedConstraint(ControllerConstraint(lambda _: Doubles(), VOCABULARY))
            group = fixed_group(Arm(target, proposer, Token(), CounterDraws(0), applied), [request])
            list(group)
            assert ("stuck" in {sequence.finish for sequence in group.sequences}) is broken
            assert bool(group.errors) is broken
    assert target.lm.cells.references.sum() == 0


def test_a_penalty_on_forced_chains_leaves_greedy_output_as_it_is():
    target = tiny_target()
    table = Table(lambda before: [7] if len(before) % 2 else range(VOCABULARY), VOCABULARY)
    request = Request(0, "r", (1, 2, 3), Sampling(0.0, repetition_penalty=1.5), 16)
    outputs = []
    for proposer in (Null(), draft(target), replace_drawn(draft(target))):
        group = fixed_group(
            Arm(target, proposer, Token(), CounterDraws(0), AppliedConstraint(table, "both", None, True)), [request]
        )
        list(group)
        outputs.append(group.sequences[0].emitted)
    assert outputs[0] == outputs[1] == outputs[2]


def replace_drawn(proposer: DraftModel) -> DraftModel:
    return DraftModel(proposer.lm, CONTEXT, TreePlan(proposer.tree, "deterministic"))
