"""The task on a tiny target: a planted mode is chosen, crippled ones are not, a stopped run resumes, time is held."""

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console

from spec_lab.analysis import report
from spec_lab.analysis.metrics.intervals import Interval
from spec_lab.core.draft import Draft
from spec_lab.core.files import write_json
from spec_lab.core.probabilities import Sampling
from spec_lab.core.progress import Progress
from spec_lab.core.roofline import AttentionWork, ForwardWork
from spec_lab.core.shape import chain, forest
from spec_lab.decode.proposer import Proposer
from spec_lab.policy.costs import DraftCosts
from spec_lab.propose import Null
from spec_lab.propose.cost_cache import CostCache
from spec_lab.replay.recorded_trees import of_rows
from spec_lab.results.schema import TIMING_COLUMNS
from spec_lab.results.writer import Recorder, load, replay_rows_of
from spec_lab.tasks.cost.timing import Fixed
from spec_lab.tasks.recommend import recommend
from spec_lab.tasks.recommend.confirm import Confirmed
from spec_lab.tasks.recommend.judge import DraftingSeconds, JudgedMode, best_few, judge
from spec_lab.tasks.recommend.limits import TimeLimit, TooSlow, fixed_costs, max_gain, why_no_small_cache
from spec_lab.tasks.recommend.modes import ModeFamily, SpeculativeMode
from spec_lab.tasks.recommend.stages import FILE, Stages
from spec_lab.tasks.recommend.summary import changes, conclusion
from spec_lab.verify import Token, Typical
from tests.labs import lab, settings
from tests.tiny import tiny_target

TEXTS = tuple(f"{word} text {word}" for word in ("one", "two", "three", "four", "five", "six", "seven", "eight"))
NEW = 40


class Answers(Proposer):
    """Drafts the target's own answers; shuffled ones where ``right`` is False."""

    name, drawn, branches = "answers", "deterministic", False

    def __init__(self, answers, depth, right=True):
        self.answers, self.nodes, self.depth, self.right = answers, depth, depth, right

    @property
    def facts(self):
        return {"max_ngram": 4, "min_ngram": 1}

    def propose(self, batch):
        drafts = []
        for sequence in batch.sequences:
            text = next((known for known in self.answers if known[: len(sequence.tokens)] == sequence.tokens), [])
            following = text[len(sequence.tokens) :][: self.depth] or [0]
            drafts.append(following if self.right else [(token + 1) % 61 for token in following])
        shape = forest(tuple(chain(len(draft)) for draft in drafts))
        return Draft(shape, torch.tensor([token for draft in drafts for token in draft]))


def answers(used):
    arm, texts = used.arm(settings("", batch_size=1, max_new_tokens=NEW), Null.load(used.target), used.verifier), []
    for turn in used.first_turns(settings("", batch_size=1, max_new_tokens=NEW)):
        (outcome,) = arm.decode([turn.request]).outcomes
        texts.append([*turn.request.tokens, *outcome.tokens])
    return texts


def planted(right=True, only="ngram", **parts):
    """A lab whose mode ``only`` drafts the target's own answers, as deep as its option says; others are refused."""
    used = lab(TEXTS, proposer=Null(), **parts)
    known = answers(used)

    def modes(mode):
        if mode.proposer != only:
            raise ValueError(f"{mode.proposer} is not for this target")
        return Answers(known, mode.options["depth"], right)

    return lab(TEXTS, proposer=Null(), modes=modes, **parts)


def run(folder, used, minutes=0.5, **options):
    console = Console(file=io.StringIO(), width=150)
    chosen = settings(folder, batch_size=1, max_new_tokens=NEW, given=["prompts=prose", "task.minutes=1"])
    code = recommend(used, chosen, {"task": {"_target_": "spec_lab.tasks.recommend.recommend"}, "name": "toy"}, console,
                     minutes=minutes, **options)  # fmt: skip
    assert code == 0
    return json.loads((folder / "summary.json").read_text()), console.file.getvalue()


# Judging -------------------------------------------------------------------------------------------------------------


def recorded(used, depth=6):
    record = settings("", batch_size=1, max_new_tokens=NEW, record="replay")
    arm, rows = used.arm(record, used.modes(SpeculativeMode("ngram", {"depth": depth})), used.verifier), []
    for number, turn in enumerate(used.first_turns(record)):
        rows += replay_rows_of(arm.decode([turn.request]).steps, number, "ngram", 61)
    return of_rows(pd.DataFrame(rows), "ngram")


@pytest.mark.parametrize(("per_node", "best"), [(0.0, 6), (0.15, 6), (10.0, 1)])
def test_the_best_depth_follows_from_the_cost_of_a_node(per_node, best):
    family = ModeFamily(SpeculativeMode("ngram", {"depth": 6}), ["depth"])
    costs = DraftCosts({200: {1: {0: 1.0, 1: 1.0 + per_node, 6: 1.0 + 6 * per_node}}})
    judged = judge(recorded(planted()), 0, family, Token(), costs, DraftingSeconds(0.0, 0.0, 6.0), 1)
    (chosen,) = best_few(judged, 1, 1)
    assert chosen.mode.options["depth"] == best
    right = {mode.mode.options["depth"]: mode for mode in judged if mode.mode.policy == "none"}
    assert right[6].tau == max(mode.tau for mode in judged) and right[6].tau > right[1].tau > 1.5
    for mode in right.values():
        assert mode.speedup[1] == pytest.approx(mode.tau / (1 + per_node * mode.nodes))


def test_drafting_and_rows_beside_the_draft_are_paid_for():
    family = ModeFamily(SpeculativeMode("ngram", {"depth": 6}), ["depth"])
    costs, trees = DraftCosts({200: {1: {0: 1.0, 8: 1.8}}}), recorded(planted())
    free, paid = (judge(trees, 0, family, Token(), costs, drafting, 1)[0]
                  for drafting in (DraftingSeconds(0, 0, 6), DraftingSeconds(0.5, 2.0, 6)))  # fmt: skip
    assert 1 / paid.speedup[1] - 1 / free.speedup[1] == pytest.approx((0.5 + 2 * 0.1) / free.tau)


def test_shallower_drafts_of_the_target_s_layers_take_fewer_forwards():
    family = ModeFamily(SpeculativeMode("sparse_kv", {"depth": 6}), ["depth"])
    judged = judge(recorded(planted()), 0, family, Token(), DraftCosts({200: {1: {0: 1.0, 6: 1.0}}}),
                   DraftingSeconds(0.6, 0.0, 6.0), 1)  # fmt: skip
    by_depth = {mode.mode.options["depth"]: mode for mode in judged if mode.mode.policy == "none"}
    assert {1, 6} <= by_depth.keys()
    for depth, mode in by_depth.items():
        assert mode.speedup[1] == pytest.approx(mode.tau / (1 + 0.1 * depth))


def test_a_small_cache_is_tried_where_reading_the_context_takes_a_share_of_a_step():
    work = ForwardWork(weight_bytes=1000, row_flops=1000, logits_flops=0, attention=(AttentionWork(1, 1),) * 2)
    assert max_gain(work, 1, 1256, 256) == pytest.approx((1000 + 2 * 1256) / (1000 + 2 * 256))
    assert max_gain(work, 8, 1256, 256) == pytest.approx((1000 + 16 * 1256) / (1000 + 16 * 256))
    assert max_gain(work, 1, 200, 256) == 1.0 and max_gain(replace(work, row_flops=1), 1, 1256, 256) > 4
    assert why_no_small_cache(work, 1, 1256, 256) == why_no_small_cache(None, 1, 1, 256) == ""
    assert "at most 1.06 times as fast" in why_no_small_cache(work, 1, 300, 256)


def test_long_contexts_add_what_the_baseline_s_steps_take_more():
    costs = {1: {0: 0.01, 8: 0.02}, 2: {0: 0.01, 8: 0.03}}
    made = SimpleNamespace(long_contexts=True, batch=1, costs=costs, table=DraftCosts({200: costs}))
    forwards = pd.DataFrame({"prefill": [True, False, False, False], "live": [1, 1, 1, 2],
                             "whole": [9.0, 0.05, 0.05, 0.5]})  # fmt: skip
    table = Stages.at_prompts(made, forwards)
    assert [table.of(nodes, batch) for batch in (1, 2) for nodes in (0, 8)] == pytest.approx([0.05, 0.06, 0.09, 0.11])
    made.long_contexts = False
    assert Stages.at_prompts(made, forwards) is made.table


def test_of_equal_modes_the_smallest_is_taken_and_policies_only_on_request():
    def made(name, family, speedup, nodes, policy="none"):
        return JudgedMode(SpeculativeMode(name, {}, policy), family, 2.0, nodes, {1: speedup})

    judged = [
        made("a", 0, 2.0, 8.0),
        made("b", 0, 1.995, 3.0),
        made("c", 1, 1.5, 1.0),
        made("d", 1, 3.0, 8.0, "goodput"),
    ]
    assert [mode.mode.proposer for mode in best_few(judged, 1, 5)] == ["b", "c"]
    assert [mode.mode.proposer for mode in best_few(judged, 1, 2, policies=True)] == ["d", "b"]


# Time ----------------------------------------------------------------------------------------------------------------


def test_the_time_of_a_resumed_run_goes_on():
    clock = iter([100.0, 103.0, 104.0, 105.0])
    limit = TimeLimit(10.0, before=2.0, clock=lambda: next(clock))
    assert (limit.spent, limit.left(), limit.left(0.5)) == (5.0, 4.0, -2.0)


def stages(folder, used, seconds, per_call):
    """Stages whose costs are known, with a clock that only goes on while it is read."""
    chosen, now = settings(folder, batch_size=1, max_new_tokens=NEW), [0.0]

    def clock():
        now[0] += per_call
        return now[0]

    known = {"seconds": 0.0, "costs": {"1": {"0": 0.01, "8": 0.01}}, "max_new_tokens": NEW}
    write_json(folder / FILE, known)
    family = ModeFamily(SpeculativeMode("ngram", {"depth": 4}), ["depth"])
    recorder = Recorder(folder, ["policy", *TIMING_COLUMNS], "replay")
    groups, limit = [[number] for number in range(len(TEXTS))], TimeLimit(seconds, clock=clock)
    return Stages(used, chosen, [family], used.modes, groups, recorder, limit, Progress(disable=True))


@pytest.mark.parametrize("seconds", [20.0, 60.0, 400.0])
@pytest.mark.one_in(3)
def test_no_group_begins_that_is_not_expected_to_end_in_time(tmp_path, seconds):
    made = stages(tmp_path, planted(), seconds, per_call=1.0)
    made.record()
    assert made.recorded and made.limit.spent <= 0.8 * seconds + 8
    recorded = load(tmp_path).requests
    assert set(recorded["arm"]) == {"baseline", "ngram depth=4"} or seconds == 20.0
    assert len(recorded) == len(TEXTS) or seconds < 400.0, "half of the prompts, by two arms"
    few, confirmed = made.confirm(made.judge())
    assert made.limit.spent <= seconds + 8
    assert confirmed.ended == "time" or seconds == 400.0
    assert [mode.mode.options["depth"] for mode in few] == [4] * len(few)


@pytest.mark.nightly
def test_costs_are_measured_within_their_seconds_and_cached(tmp_path):
    target, cache = tiny_target(), CostCache(tmp_path)
    first = fixed_costs(target, [1, 2], 4.0, Sampling(0.0), cache)
    assert next(iter(first)) == 1 and list(first[1].seconds)[:2] == [0, 1]
    again = fixed_costs(target, [1], 2.0, Sampling(0.0), cache)
    assert again[1].seconds == first[1].seconds or not first[1].steady
    with pytest.raises(TooSlow, match="a step takes .* at batch size 3"):
        fixed_costs(target, [3], 1e-6, Sampling(0.0), cache)


def test_the_verdict_is_on_the_mode_that_was_selected_whatever_selection_measured_of_others(tmp_path):
    measured = {"other": Interval(1.9, 1.8, 2.0), "selected": Interval(0.9, 0.8, 1.1)}
    done = Confirmed("selected", measured, {"other": 8, "selected": 8}, 0.99, "groups")
    few = [JudgedMode(SpeculativeMode(name), 0, 2.0, 1.0, {1: 1.0}) for name in measured]
    assert done.fastest == ""
    assert conclusion(stages(tmp_path, planted(), 60.0, 1.0), few, done) == (
        "Run no speculation: selected, the best of 2 measured, was not shown to be faster: 0.90 times the "
        "baseline's speed [0.80, 1.10] (an interval of 99.0%: 95 % for all looks together)."
    )


@pytest.mark.parametrize(
    ("tau", "lines"),
    [
        (1.5, ["A better draft: mode 1, the best prediction, emitted 1.50 (3.00 predicted) tokens a step and needs "
               "more than 2.00, since its step takes 2.00 times as long as one without a draft."]),
        (2.5, []),
        (None, []),
    ],
)  # fmt: skip
def test_a_better_draft_is_named_only_where_the_tau_that_is_known_is_not_enough(tau, lines):
    costs = {1: {0: 0.01, 8: 0.01}}
    made = SimpleNamespace(too_slow="", batch=1, costs=costs, table=DraftCosts({1: costs}))
    best = JudgedMode(SpeculativeMode("ngram"), 0, 3.0, 1.0, {1: 1.5}, free=1.5)
    done = Confirmed("", {}, {}, 0.99, "groups")
    assert changes(made, [best], done, [{"mode": "ngram", "tau": tau}]) == lines


# The task ------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_shuffled_drafts_are_not_recommended_and_the_page_says_why(tmp_path):
    summary, shown = run(tmp_path / "run", planted(right=False), minutes=0.3)
    chosen = summary["recommended"]
    assert chosen["mode"] == "none" and chosen["speedup"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert chosen["command"] == "spec-lab prompts=prose proposer=none"
    assert summary["conclusion"].startswith("Run no speculation") and summary["changes"][0].startswith("A better draft")
    assert {"mode": "jacobi depth=8", "reason": "jacobi is not for this target"} in summary["refused"]
    assert summary["seconds"] <= 0.3 * 60 + 5
    page = report.write(tmp_path / "run").read_text()
    assert "Run no speculation" in page and "jacobi is not for this target" in page
    assert "Run no speculation" in " ".join(shown.split())


@pytest.mark.nightly
def test_a_stopped_run_resumes_with_its_groups_costs_and_choice(tmp_path):
    used, calls = planted(), []

    def stops(mode):
        calls.append(mode.name)
        if calls.count("ngram depth=16") and len(calls) > 10:
            raise KeyboardInterrupt
        return used.modes(mode)

    stopped = lab(TEXTS, proposer=Null(), modes=stops)
    console = Console(file=io.StringIO())
    chosen = settings(tmp_path, batch_size=1, max_new_tokens=NEW, given=["prompts=prose", "task.minutes=1"])
    config = {"task": {"_target_": "spec_lab.tasks.recommend.recommend"}, "name": "toy"}
    assert recommend(stopped, chosen, config, console, minutes=0.5) == 130
    before, kept = load(tmp_path).requests, json.loads((tmp_path / FILE).read_text())
    assert kept["recorded"] and len(before)
    summary, _ = run(tmp_path, used)
    after = load(tmp_path).requests
    both = before.merge(after, on=["group", "arm"], suffixes=("", "_after"))
    assert len(both) == len(before) and np.array_equal(both["decode_seconds"], both["decode_seconds_after"])
    assert json.loads((tmp_path / FILE).read_text())["costs"] == kept["costs"]
    assert summary["seconds"] >= kept["seconds"]
    again, _ = run(tmp_path, used)
    assert again["recommended"] == summary["recommended"] and again["modes"] == summary["modes"]


@pytest.mark.parametrize(
    ("parts", "changes", "message"),
    [
        ({"proposer": Fixed(2, 61)}, {}, "set proposer=none"),
        ({"peers": {"other": None}}, {}, "peers={}"),
        ({}, {"baseline": False}, "baseline=true"),
        ({"verifier": Typical()}, {}, "verifier=token"),
        ({}, {"batch_size": 2}, "at least 16 prompts"),
    ],
)
def test_what_is_not_supported_is_refused_before_anything_is_decoded(tmp_path, parts, changes, message):
    used = lab(TEXTS, **({"proposer": Null()} | parts))
    with pytest.raises(ValueError, match=message):
        recommend(used, settings(tmp_path, **({"batch_size": 1} | changes)), {}, Console(file=io.StringIO()))
    assert not list(tmp_path.iterdir())


def test_an_unknown_model_of_the_projection_is_refused_before_anything_is_decoded(tmp_path):
    with pytest.raises(ValueError, match=r"task\.model"):
        recommend(planted(), settings(tmp_path, batch_size=1), {}, Console(file=io.StringIO()), model="no-such")
