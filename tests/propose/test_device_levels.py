"""Trees drafted without a look at a token are those of ``LevelByLevel``, bit for bit. Here on the CPU."""

from functools import partial

import numpy as np
import pytest
import torch

from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.decode import step as engine_step
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.decode.sequence import Batch
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.models.target import Target
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.verify import Token
from tests.decode.test_uploads import CHAIN, TREE, eagle3
from tests.tiny import tiny_model

PLANS = {
    "iid": TreePlan(CHAIN),
    "without_replacement": TreePlan(CHAIN, "without_replacement", temperature=1.5),
    "deterministic": TreePlan(TREE, "deterministic"),
}
DRAFTERS = {"draft": lambda plan: lambda _: DraftModel(tiny_lm(3), 64, plan), "eagle3": eagle3}


def tiny_lm(seed):
    return CausalLM(tiny_model(seed=seed, dtype=torch.float64))


def decoded(proposer, temperatures, monkeypatch, deferred):
    monkeypatch.setattr(engine_step, "Batch", lambda *args, **_: Batch(*args, deferred=deferred, recorded=True))
    target = Target(tiny_lm(0), None, "tiny", 64, "", 0.0)
    requests = [
        Request(number, f"r{number}", tuple(range(1, 9 - number)), Sampling(temperature), 12)
        for number, temperature in enumerate(temperatures)
    ]
    return list(fixed_group(Arm(target, proposer(target), Token(), CounterDraws(1)), requests))


@pytest.mark.parametrize("temperatures", [(0.0, 0.0), (0.8, 0.0, 1.2)], ids=["greedy", "various"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_and_tokens_are_those_of_levels_that_are_read(monkeypatch, drafter, plan, temperatures):
    run = partial(decoded, DRAFTERS[drafter](plan), temperatures, monkeypatch)
    read, unread = run(False), run(True)
    assert len(read) == len(unread) > 2 and sum(info.draft.late is not None for info in unread) >= len(unread) - 1
    for expected, info in zip(read, unread, strict=True):
        assert info.draft.shape.parent.tolist() == expected.draft.shape.parent.tolist()
        assert info.draft.token.tolist() == expected.draft.token.tolist()
        assert [done.tokens for done in info.committed] == [done.tokens for done in expected.committed]
        assert info.copies_before == 0 or info.draft.late is None
        if expected.draft.q is not None and info.draft.shape.nodes:
            assert torch.equal(info.draft.q, expected.draft.q)
            assert np.array_equal(info.draft.q_row, expected.draft.q_row)
        if info.draft.shape.nodes:
            greedy_q, stated = info.draft.greedy_q, expected.draft.greedy_q
            assert (greedy_q is None) == (stated is None)
            if stated is not None:
                torch.testing.assert_close(greedy_q, stated)


def test_a_tree_without_a_distribution_ends_its_sequence(monkeypatch):
    def broken(target):
        proposer = DRAFTERS["draft"](PLANS["iid"])(target)
        with torch.no_grad():
            proposer.lm.model.get_output_embeddings().weight[0] = float("nan")
        return proposer

    read, unread = (decoded(broken, (0.8, 0.8), monkeypatch, deferred)[-1] for deferred in (False, True))
    assert list(read.errors.values()) == list(unread.errors.values()) != []
    assert [sequence.finish for sequence in unread.sequences] == ["nan", "nan"]
