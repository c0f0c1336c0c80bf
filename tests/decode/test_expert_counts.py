"""The experts that steps read, of kept rows and of rejected ones."""

import numpy as np
import pytest

from spec_lab.core.randomness import CounterDraws
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.decode.expert_counts import ExpertCounts
from spec_lab.decode.recording import Recording
from spec_lab.drafters.early_exit import EarlyExit
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.propose.tree_plan import TreePlan
from spec_lab.propose.trees import parse
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.verify import Token
from tests.propose.lab import draft_model, requests
from tests.tiny import CONTEXT, tiny_mixture


def test_each_layer_counts_the_experts_of_kept_rows_of_rejected_rows_and_of_both():
    """Two layers, four rows: rows 0 and 2 are kept, row 1 is rejected, row 3 belongs to neither."""
    chosen = np.array([[[0, 1], [1, 2], [0, 3], [5, 6]], [[4, 0], [4, 0], [0, 4], [1, 2]]])
    counts = ExpertCounts.of(chosen, np.array([0, 2]), np.array([1]), 7)
    assert counts == ([4, 2], [3, 2], [2, 2])
    few = ExpertCounts.of(chosen, np.array([0, 2]), np.array([1]), 3)
    assert few == ([3, 1], [2, 1], [2, 1]), "numbers beyond the experts with weights read nothing"
    assert ExpertCounts.of(chosen, np.array([], dtype=int), np.array([3]), 7) == ([2, 2], [0, 0], [2, 2])


@pytest.fixture(scope="module")
def target():
    return Target(CausalLM(tiny_mixture()), None, "mixture", CONTEXT, "", 0.0)


def decoded(target, proposer, monkeypatch=None):
    """The steps of three prompts, and the output of the forward of each."""
    outputs = []
    if monkeypatch is not None:
        run = target.lm.run
        kept = lambda prepared: outputs.append(run(prepared)) or outputs[-1]  # noqa: E731
        monkeypatch.setattr(target.lm, "run", kept)
    arm = Arm(target, proposer, Token(), CounterDraws(0), record=Recording(experts=True))
    return list(fixed_group(arm, requests(new=8))), outputs


@pytest.mark.parametrize("tree", ["1x1x1", "2x1"])
def test_the_counts_of_steps_are_unions_over_their_rows(target, tree, monkeypatch):
    steps, outputs = decoded(target, draft_model(tree, "deterministic"), monkeypatch)
    assert len(steps) == len(outputs) > 3 and any(info.draft.shape.nodes for info in steps)
    for info, output in zip(steps, outputs, strict=True):
        rows = output.experts.numbers.tolist()
        kept, rejected = [], []
        for tree_number, got in enumerate(info.committed):
            pending, nodes = output.pending_rows[tree_number], output.node_rows[tree_number]
            path = [int(info.draft.shape.places[row]) for row in got.path]
            kept += range(pending.start, pending.stop)
            for place, row in enumerate(range(nodes.start, nodes.stop)):
                (kept if place in path else rejected).append(row)
        for layer, counts in zip(rows, zip(*info.experts, strict=True), strict=True):
            accepted, others = ({expert for row in some for expert in layer[row]} for some in (kept, rejected))
            assert counts == (len(accepted | others), len(accepted), len(others))


def test_without_drafts_all_rows_are_kept_and_the_row_of_the_table_has_the_counts(target):
    steps, _ = decoded(target, Null())
    for info in steps:
        read, accepted, rejected = info.experts
        assert read == accepted and rejected == [0, 0] and min(read) >= 2
        row = info.row()
        assert (row["experts"], row["experts_accepted"], row["experts_rejected"]) == (read, accepted, rejected)


def test_a_draft_that_is_all_accepted_reads_nothing_for_rejected_rows(target):
    proposer = draft_model("1x1", "deterministic", lm=CausalLM(tiny_mixture()))
    steps, _ = decoded(target, proposer)
    whole = [info for info in steps if all(len(got.path) == 2 for got in info.committed)]
    assert whole and all(info.experts.rejected == [0, 0] for info in whole)


def test_steps_that_continue_a_draft_of_the_target_s_own_layers_are_not_counted(target):
    steps, _ = decoded(target, EarlyExit(target.lm, 1, TreePlan(parse("1x1"), "deterministic")))
    assert all(info.experts is None for info in steps)


def test_nothing_is_counted_unless_asked_for(target):
    decoded(target, Null())
    steps = list(fixed_group(Arm(target, Null(), Token(), CounterDraws(0)), requests(new=2)))
    assert all(info.experts is None and "experts" not in info.row() for info in steps)
