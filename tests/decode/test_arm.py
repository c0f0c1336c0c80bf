"""An arm is valid because it exists: parts that do not go together are refused when it is made or replaced."""

from dataclasses import replace

import pytest
import torch

from spec_lab.constrain import AppliedConstraint
from spec_lab.core.protocols import WrongValue
from spec_lab.core.randomness import CounterDraws
from spec_lab.decode.arm import Arm, Memory
from spec_lab.decode.engine import Engine
from spec_lab.decode.prefix_cache import PrefixCache
from spec_lab.propose import Null, Proposer, Requires
from spec_lab.verify import Gumbel, Misfit, Token
from tests.constrain.toys import Table
from tests.propose.lab import draft_model
from tests.tiny import VOCABULARY, tiny_target


class Demands(Null):
    """The null proposer with requirements."""

    def __init__(self, **requires):
        self.requires = Requires(**requires)


def null_with(**attributes):
    proposer = Null()
    vars(proposer).update(attributes)
    return proposer


def an_arm(proposer: Proposer | None = None, **parts):
    return Arm(tiny_target(), proposer or Null(), Token(), CounterDraws(0), **parts)


@pytest.mark.parametrize(
    ("proposer", "parts", "error", "words"),
    [
        (draft_model("1x1", "gumbel"), {}, Misfit, "verifier 'token' supports .*'draft_model' draws 'gumbel'"),
        (Demands(top_k=-1), {}, ValueError, r"not Requires\(.*top_k=-1\b"),
        *((Demands(top_k=k), {}, ValueError, rf"requires the top_k={k}\b") for k in (VOCABULARY + 1, 10**6)),
        *((Demands(hidden=(0, n)), {}, ValueError, f"requires hidden state {n} ") for n in (99, -99)),
        (Demands(abilities=frozenset({"state_snapshots"})), {}, ValueError, "requires state_snapshots"),
        (null_with(nodes="3"), {}, WrongValue, r"Null\.nodes must be a whole number of at least 0, not '3'"),
        (null_with(node=3), {}, TypeError, r"Null\.node .*did you mean nodes\?"),
        (
            Demands(hidden=(1,), every_position=True),
            {"prefix_cache": PrefixCache(256)},
            ValueError,
            "requires hidden states of every position .* prefix_cache=null",
        ),
        (
            None,
            {"applied": AppliedConstraint(Table(lambda _: [0], VOCABULARY - 1))},
            ValueError,
            f"constraint 'table' is over {VOCABULARY - 1} tokens, the target has {VOCABULARY}",
        ),
    ],
)
def test_parts_that_do_not_go_together_are_refused(proposer, parts, error, words):
    with pytest.raises(error, match=words):
        an_arm(proposer, **parts)


def test_a_replaced_part_is_checked_again():
    arm = an_arm(draft_model("1x1", "iid"))
    with pytest.raises(Misfit, match="verifier 'gumbel'"):
        replace(arm, verifier=Gumbel())
    assert replace(arm, proposer=draft_model("1x1", "gumbel"), verifier=Gumbel()).draws is arm.draws
    an_arm(Demands(top_k=VOCABULARY))  # as many as there are


def test_engines_of_one_arm_count_their_own_forks_and_have_their_own_memory():
    arm = an_arm()
    first, second = Engine(arm), Engine(arm)
    first.arm.made[0] += 1
    assert not arm.made and not second.arm.made
    assert len({id(memory) for memory in (arm.memory, first.arm.memory, second.arm.memory)}) == 3


def test_memory_for_probabilities_follows_the_dtype_of_the_logits():
    memory = Memory()
    assert memory.like(torch.zeros(2, 5)).dtype == torch.float32
    assert memory.like(torch.zeros(2, 5, dtype=torch.float64)).dtype == torch.float64


def test_an_arm_for_some_steps_shares_all_but_three_parts():
    arm = an_arm()
    drafts = arm.within(draft_model("1x1", "gumbel"), CounterDraws(7), arm.choose)
    assert drafts.proposer.drawn == "gumbel" and drafts.draws is not arm.draws
    assert (drafts.target, drafts.verifier, drafts.memory) == (arm.target, arm.verifier, arm.memory)


def test_rows_and_cells_follow_from_the_proposer_and_a_constraint_that_forces_tokens():
    def forced(placement):
        table = Table(lambda _: range(VOCABULARY), VOCABULARY)
        return an_arm(draft_model("1x1"), applied=AppliedConstraint(table, placement, fast_forward=True))

    plain, more = draft_model("1x1").nodes, draft_model("1x1").forced_nodes
    assert more > 0 and (forced("both").max_rows, forced("target").max_rows) == (plain + more, plain)
