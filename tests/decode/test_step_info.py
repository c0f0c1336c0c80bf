"""The record of a step: where its seconds go."""

import pytest

from spec_lab.core.randomness import CounterDraws
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.decode.step_info import PHASES
from spec_lab.drafters.draft_model.propose import DraftModel
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import parse
from spec_lab.results.writer import rows_of
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.verify import Token
from tests.propose.lab import requests
from tests.runners.replays import LONG, slow_target
from tests.tiny import CONTEXT, tiny_model


@pytest.fixture
def rows():
    """Rows of ``forwards`` of a target and a draft model in fixed shapes."""
    draft = CausalLM(tiny_model(seed=1), fixed=True)
    target = slow_target(draft)
    proposer = DraftModel(draft, CONTEXT, TreePlan(parse("1x1"), "deterministic"))
    return rows_of(list(fixed_group(Arm(target, proposer, Token(), CounterDraws(0)), requests(new=12))), 0, "")[0]


def test_captures_of_both_models_are_counted_apart_from_the_steps(rows):
    assert {row["captures"] for row in rows} > {0}
    for row in rows:
        assert row["capture"] == pytest.approx(LONG * row["captures"], abs=100)
        assert 0 < row["propose_forward"] < row["propose"] < row["whole"] < 1000 > row["start"]
        assert 0 < row["target_forward"] < row["target"]
        phases = sum(row[name] for name in PHASES if name in row)
        assert phases + row["mask_wait"] == pytest.approx(row["whole"])
