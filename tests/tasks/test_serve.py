"""Serving a stream: when each request waits, starts and ends, and the task."""

import io
import json
from dataclasses import dataclass, field, replace

import pandas as pd
import pytest
import torch
from rich.console import Console

from spec_lab.analysis.metrics import SCHEMA_VERSION
from spec_lab.analysis.results import serving as results
from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.control import Branch, ControllerConstraint
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.core.roofline import ForwardWork, MachineLimits, Roofline
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import Engine, Limits, fixed_group
from spec_lab.decode.prefix_cache import PrefixCache
from spec_lab.propose import Null
from spec_lab.tasks import serve as module
from spec_lab.tasks.drift import COUNTS, RequestStream, change_at
from spec_lab.tasks.lab import Loop
from spec_lab.tasks.serve import LATER, ROOFLINE, SERVED, serve, serve_segment
from spec_lab.text.prompts import Prompt
from spec_lab.verify import Match, Token, Traversal
from tests.labs import TEXTS, Repeat, lab, settings
from tests.propose.lab import COLD, WARM, draft_model
from tests.runners.replays import LONG, slow_target
from tests.tiny import tiny_target

PROMPTS = ((3, 14, 15), (2, 7), (31, 41, 5, 9, 2, 6, 5, 35, 8), (8,), (1, 2, 3, 1))


# Serving a segment -------------------------------------------------------------------------------------------------


@dataclass
class Time:
    """A clock that advances by ``step`` seconds in each step of an engine, and during sleeps."""

    monkeypatch: pytest.MonkeyPatch
    step: float = 1.0
    oversleep: float = 1.0  # share of the requested time
    now: float = 100.0
    slept: list = field(default_factory=list)
    infos: list = field(default_factory=list)
    engines: list = field(default_factory=list)

    def __post_init__(self):
        plain = Engine.step

        def step(engine):
            self.engines += [] if engine in self.engines else [engine]
            info = plain(engine)
            self.now += self.step
            self.infos.append(info)
            return info

        self.monkeypatch.setattr(Engine, "step", step)

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds * self.oversleep

    def serve(self, arm, requests, due, limits=None):
        return serve_segment(arm, requests, due, limits or Limits(), clock=self, sleep=self.sleep)


def test_prompts_come_from_the_prefix_cache_within_a_segment(monkeypatch):
    target, prefix = tiny_target(), tuple(range(20))
    requests = [Request(n, f"r{n}", (*prefix, 30 + n), COLD, 3) for n in range(3)]
    plain = Loop(target, Null(), Match(), CounterDraws(0))
    cached = replace(plain, prefix_cache=PrefixCache(1024))
    for _ in range(2):  # the cache is empty when a segment begins
        rows_of_arms = [Time(monkeypatch).serve(arm, requests, [0, 0, 0], Limits(1)) for arm in (plain, cached)]
        assert "cached_tokens" not in rows_of_arms[0][0]
        assert [row["cached_tokens"] for row in rows_of_arms[1]] == [0, 20, 20]
        assert [row["tokens"] for row in rows_of_arms[0]] == [row["tokens"] for row in rows_of_arms[1]]


@pytest.fixture
def time(monkeypatch):
    return Time(monkeypatch)


@pytest.fixture
def plain():
    """Autoregressive decoding: every step emits one token for each request."""
    return Loop(tiny_target(), Null(), Match(), CounterDraws(0))


def requests(lengths, sampling=COLD):
    return [Request(10 + n, f"r{n}", PROMPTS[n % len(PROMPTS)], sampling, length) for n, length in enumerate(lengths)]


def columns(rows, *names):
    return [tuple(row[name] for name in names) for row in rows]


def test_a_request_alone_needs_one_step_per_token(time, plain):
    (row,) = time.serve(plain, requests([4]), [0.0])
    assert row == {
        "request": 10, "prompt_tokens": 3, "arrival": 0.0, "steps": 4, "admitted": 0.0, "first_token": 1.0, "end": 4.0,
        "tokens": 4, "finish": "length", "error": "", "prefill_compute_seconds": 1.0,
        "decode_steps": 3, "drafted": 0, "accepted": 0, "emitted": 3,
    }  # fmt: skip
    assert set(row) == {*SERVED, *COUNTS} - {"id", "segment", "arm", "order"}


def test_least_seconds_are_of_the_steps_without_a_part_of_a_prompt(time, plain):
    """A forward needs 1 s for reading. The second request joins at step 3; its prompt's step counts for none."""
    limits = MachineLimits(1.0, 1.0, 1, 1.0, 1.0, "float32", None, None, 1, 1, None, 0.0)
    roofline = Roofline(ForwardWork(1, 0, 0, ()), limits)
    first, two = serve_segment(plain, requests([6, 4]), [0.0, 1.5], Limits(), roofline, time, time.sleep)
    assert [info.prefill for info in time.infos] == [[True], [False], [False, True], *[[False, False]] * 3]
    assert columns([first, two], "lower_bound_seconds") == [(1 + 3 / 2,), (3 / 2,)], (
        "divided among those who shared a step"
    )
    assert first["read_seconds"] == first["lower_bound_seconds"]
    forwards = [time.infos[number].seconds()["target_forward"] for number in (1, 3, 4, 5)]
    assert first["forward_seconds"] + two["forward_seconds"] == pytest.approx(sum(forwards))


def test_requests_beyond_the_batch_size_wait_in_the_order_of_arrival(time, plain):
    rows = time.serve(plain, requests([3, 5, 2, 1]), [0.0] * 4, Limits(max_batch_size=2))
    assert columns(rows, "admitted", "first_token", "end") == [(0, 1, 3), (0, 1, 5), (3, 4, 5), (5, 6, 6)]
    assert [row["request"] for row in rows] == [10, 11, 12, 13]
    assert max(len(info.sequences) for info in time.infos) == 2
    assert not time.slept


def test_a_request_that_arrives_while_others_decode_joins_the_next_step(time, plain):
    rows = time.serve(plain, requests([4, 3]), [0.0, 1.5])
    assert columns(rows, "arrival", "admitted", "first_token", "end") == [(0, 0, 1, 4), (1.5, 2, 3, 5)]
    assert [len(info.sequences) for info in time.infos] == [1, 1, 2, 2, 1]


def test_an_idle_loop_sleeps_until_the_next_arrival(time, plain):
    rows = time.serve(plain, requests([2, 1]), [0.5, 10.0])
    assert time.slept == [0.5, 7.5]
    assert columns(rows, "admitted", "end") == [(0.5, 2.5), (10.0, 11.0)]


def test_a_request_is_admitted_when_its_prompt_begins_to_be_computed(time, plain):
    """Nine tokens in chunks of four: two steps without a token, while the first request decodes."""
    asked = [Request(0, "short", (1, 2), COLD, 5), Request(1, "long", PROMPTS[2], COLD, 2)]
    rows = time.serve(plain, asked, [0.0, 0.5], Limits(max_prefill_tokens=4))
    assert columns(rows, "admitted", "first_token", "end", "steps") == [(0, 1, 5, 5), (1, 4, 5, 2)]
    shares = [4 / 5, 4 / 5, 1 / 2]  # of the steps: chunks of 4, 4 and 1 tokens beside one decoded token
    assert columns(rows, "prefill_compute_seconds") == [(1,), (pytest.approx(sum(shares)),)]
    assert [len(info.chunks) for info in time.infos] == [0, 1, 1, 0, 0]


def test_captures_are_no_seconds_of_a_prompt():
    target = slow_target()
    arm, mark = Loop(target, Repeat(2), Match(), CounterDraws(0)), target.lm.clock.mark
    rows = serve_segment(arm, requests([6, 6, 6]), [0.0] * 3, Limits(2), clock=mark, sleep=lambda seconds: None)
    assert rows[2]["first_token"] > LONG  # it waits for the others, whose step is captured
    assert all(0 < row["prefill_compute_seconds"] < 1000 for row in rows)


def test_a_preempted_request_keeps_its_admission_and_finishes(time, plain):
    asked = [Request(n, f"r{n}", (1, 2, 3), COLD, 6) for n in range(2)]
    rows = time.serve(plain, asked, [0.0, 0.0], Limits(max_kv_tokens=12))
    assert [row["tokens"] for row in rows] == [6, 6]
    assert columns(rows, "admitted") == [(0,), (0,)]
    assert rows[1]["end"] > rows[0]["end"] == 6


ARMS = {
    "none": (Null, Match()),
    "chain": (lambda: draft_model("1x1x1", "iid"), Token()),
    "tree": (lambda: draft_model("2x1", "without_replacement", 1.0), Traversal()),
}


@pytest.mark.parametrize("sampling", [COLD, WARM], ids=["cold", "warm"])
@pytest.mark.parametrize("name", ARMS)
@pytest.mark.each_value
def test_every_request_has_the_tokens_it_has_alone(time, name, sampling):
    proposer, verifier = ARMS[name][0](), ARMS[name][1]
    target = tiny_target()
    asked = requests([6, 9, 4, 7, 5, 8], sampling)
    rows = time.serve(
        Loop(target, proposer, verifier, CounterDraws(3)),
        asked,
        [0, 0, 0.5, 3, 3.5, 30],
        Limits(2, max_prefill_tokens=4),
    )
    (engine,) = time.engines
    served = {sequence.request.id: sequence.emitted for sequence in engine.sequences}
    for request, row in zip(asked, rows, strict=True):
        group = fixed_group(Arm(target, proposer, verifier, CounterDraws(3)), [request])
        list(group)
        assert served[request.id] == group.sequences[0].emitted
        assert row["tokens"] == len(served[request.id]) == request.max_new_tokens
        assert row["arrival"] <= row["admitted"] < row["first_token"] <= row["end"]
    assert not target.lm.cells.references.any()


@dataclass
class Forking:
    """Forks the sequence in two after its second token; the controller of the fork may fail later."""

    fails: bool
    tokens: int = 0

    def fork(self):
        return replace(self)

    def step(self, event):
        self.tokens += len(event.append)
        if self.fails and event.branch == 1:
            raise RuntimeError("this fork fails")
        return [Branch()] * (2 if self.tokens == 2 else 1)


def forking(keep=None, fails=False):
    """Autoregressive decoding of two sequences for each request."""
    target = tiny_target()
    constraint = ControllerConstraint(lambda request: Forking(fails), target.vocabulary, keep=keep)
    return Loop(target, Null(), Match(), CounterDraws(0), AppliedConstraint(constraint))


@pytest.mark.parametrize("keep", [None, lambda ended: [1]], ids=["all", "the fork"])
def test_a_forked_request_has_the_tokens_of_all_its_sequences_and_shared_ones_once(time, keep):
    """Two shared tokens, then three more of each sequence, whichever the constraint keeps: all were decoded."""
    rows = time.serve(forking(keep), requests([5, 5], WARM), [0.0, 0.0])
    assert columns(rows, "tokens", "finish", "error") == [(2 + 3 + 3, "length", "")] * 2
    assert columns(rows, "steps", "end") == [(2 + 3 + 3, 5)] * 2


def test_the_tokens_of_a_forked_request_are_those_that_the_benchmark_counts(time):
    arm, asked = forking(), requests([5, 7, 2, 1], WARM)
    served = {row["request"]: row["tokens"] for row in time.serve(arm, asked, [0.0] * 4)}
    counted = dict.fromkeys(served, 0)
    for outcome in arm.decode(asked).outcomes:
        counted[outcome.request.id] += outcome.prefill_tokens + outcome.decode_tokens
    assert served == counted == {10: 8, 11: 12, 12: 2, 13: 1}


def test_a_request_with_a_broken_fork_is_broken_whichever_sequence_is_kept(time):
    (row,) = time.serve(forking(lambda ended: [0], fails=True), requests([5], WARM), [0.0])
    assert row["finish"] == "stuck" and "this fork fails" in row["error"]


def test_an_engine_that_fails_frees_its_cells(time, plain, monkeypatch):
    step = Engine.step

    def failing(engine):
        if len(time.infos) == 2:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", failing)
    with pytest.raises(KeyboardInterrupt):
        time.serve(plain, requests([9, 9]), [0.0, 0.0])
    assert not plain.target.lm.cells.references.any()


# The task ----------------------------------------------------------------------------------------------------------


def quiet():
    return Console(file=io.StringIO(), width=120)


def run(out, console=None, parts=None, changes=None, **options):
    config = settings(out, **({"max_new_tokens": 4} | (changes or {})))
    return serve(parts or lab(), config, {}, console or quiet(), **({"segment": 2} | options))


def test_every_arm_serves_every_request_once_and_the_first_arm_alternates(tmp_path):
    console = quiet()
    assert run(tmp_path / "out", console, requests=7) == 0
    rows = pd.read_parquet(tmp_path / "out" / "served.parquet")
    assert (
        list(rows.columns) == [*SERVED, *LATER, *ROOFLINE]
        and rows["id"].is_unique
        and not (tmp_path / "out" / "parts").exists()
    )
    summary, manifest = (
        json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("summary", "manifest")
    )
    assert summary["verdict"] in ("doubtful", "not reliable"), "four segments"
    assert (manifest["verdict"], manifest["verdict_reasons"]) == (summary["verdict"], summary["verdict_reasons"])
    assert f"Verdict: {summary['verdict']}" in console.file.getvalue()
    assert {arm: sorted(group["request"]) for arm, group in rows.groupby("arm")} == {
        "repeat": [*range(7)], "baseline": [*range(7)],
    }  # fmt: skip
    assert (rows["segment"] == rows["request"] // 2).all()
    assert (rows["read_seconds"] <= rows["lower_bound_seconds"]).all() and (rows["forward_seconds"] >= 0).all()
    first = rows[rows["order"] == 0].groupby("segment")["arm"].first()
    assert first.tolist() == ["repeat", "baseline", "repeat", "baseline"]
    assert (rows["tokens"] == 4).all() and set(rows["finish"]) == {"length"}
    assert rows["prompt_tokens"].tolist() == [len(TEXTS[number % len(TEXTS)]) for number in rows["request"]]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["schema_version"] == SCHEMA_VERSION
    assert (summary["broken_segments"], summary["errors"]) == (0, [])
    assert summary["segments"] == 4 and summary["max_batch_size"] == 2 and summary["arrivals"] == "all"
    assert list(summary["arms"]) == ["repeat", "baseline"]
    shown = console.file.getvalue()
    assert "repeat" in shown and "baseline" in shown and "7 requests" in shown


def poisoned(tmp_path, *places):
    """The lab with a token whose embedding is NaN, which no output has, at the end of these prompts."""
    laboratory = lab()
    seen = {token for request in laboratory.requests(settings(tmp_path)) for token in request.tokens}
    group = fixed_group(
        Arm(laboratory.target, Null(), Match(), CounterDraws(0)), laboratory.requests(settings(tmp_path))
    )
    list(group)
    seen |= {token for sequence in group.sequences for token in sequence.emitted}
    poison = next(token for token in range(32, 61) if token not in seen)
    with torch.no_grad():
        laboratory.target.lm.model.get_input_embeddings().weight[poison] = float("nan")
    texts = {name: "n" + chr(poison) for name in places}
    prompts = [replace(prompt, text=texts.get(n, prompt.text)) for n, prompt in enumerate(laboratory.prompts)]
    return replace(laboratory, prompts=prompts)


def test_a_segment_with_a_broken_request_is_left_out_of_every_arm_and_the_error_is_stated(tmp_path, capsys):
    out, console = tmp_path / "out", quiet()
    assert run(out, console, poisoned(tmp_path, 3)) == 0
    rows = pd.read_parquet(out / "served.parquet")
    broken = rows["request"] == 3
    assert set(rows[broken]["finish"]) == {"nan"} and rows[broken]["error"].str.contains("request 3").all()
    assert set(rows[~broken]["finish"]) == {"length"} and set(rows[~broken]["error"]) == {""}
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["broken_segments"], summary["segments"]) == (1, 3)
    assert summary["errors"] == rows[broken]["error"].tolist() and len(summary["errors"]) == 2
    complete = rows[rows["segment"] != 1]
    assert set(complete["request"]) == {0, 1, 4}
    for arm, figures in summary["arms"].items():
        arm_rows = complete[complete["arm"] == arm]
        assert (figures["requests"], figures["tokens"]) == (3, 12)
        assert figures["ttft"]["mean"] == pytest.approx((arm_rows["first_token"] - arm_rows["arrival"]).mean())
        seconds = arm_rows.groupby("segment")["end"].max() - arm_rows.groupby("segment")["arrival"].min()
        assert figures["goodput"] <= figures["requests"] / seconds.sum() + 1e-9
        assert figures["tokens_per_second"] == pytest.approx(12 / seconds.sum())
    assert "1 of 3 segments" in " ".join(console.file.getvalue().split())
    assert capsys.readouterr().err.count("request 'request 3'") == 2


def test_arrivals_count_from_the_start_of_their_segment(tmp_path):
    trace = tmp_path / "trace.txt"
    trace.write_text("0\n0.01\n5.0\n5.02\n9.0\n")
    assert run(tmp_path / "out", arrivals="file", trace=str(trace)) == 0
    rows = pd.read_parquet(tmp_path / "out" / "served.parquet")
    arrivals = rows[rows["arm"] == "baseline"].sort_values("request")["arrival"]
    assert arrivals.tolist() == pytest.approx([0, 0.01, 0, 0.02, 0])
    assert (rows["admitted"] >= rows["arrival"]).all() and (rows["end"] >= rows["first_token"]).all()


def test_finished_segments_stay_and_the_rest_is_served_after_an_interruption(tmp_path, monkeypatch):
    out, seen = tmp_path / "out", []

    def watched(arm, asked, *given):
        seen.append([request.id for request in asked])
        if len(seen) == 4:
            raise KeyboardInterrupt
        return serve_segment(arm, asked, *given)

    monkeypatch.setattr(module, "serve_segment", watched)
    assert run(out) == 130
    before = pd.read_parquet(out / "served.parquet")
    assert set(before["segment"]) == {0} and not (out / "summary.json").exists()
    assert run(out) == 0
    assert seen == [[0, 1], [0, 1], [2, 3], [2, 3], [2, 3], [2, 3], [4], [4]]
    after = pd.read_parquet(out / "served.parquet")
    pd.testing.assert_frame_equal(after[after["segment"] == 0].reset_index(drop=True), before)
    assert set(after["segment"]) == {0, 1, 2} and len(after) == 10


def test_every_arm_warms_up_with_a_full_batch_of_short_requests(tmp_path, monkeypatch):
    """As the benchmark does: memory for a batch is allocated before anything is measured."""
    seen = []

    def watched(arm, asked, due, *given):
        seen.append(([request.id for request in asked], {request.max_new_tokens for request in asked}, set(due)))
        return serve_segment(arm, asked, due, *given)

    monkeypatch.setattr(module, "serve_segment", watched)
    for batch, ids in ((3, [0, 1, 2]), (9, [0, 1, 2, 3, 4])):
        seen.clear()
        run(tmp_path / str(batch), changes={"warmup": 2, "batch_size": batch}, segment=5)
        assert seen[:2] == [(ids, {2}, {0.0})] * 2 and [new for _, new, _ in seen[2:]] == [{4}, {4}]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"arrivals": "file"}, "trace"),
        ({"max_kv_tokens": 3}, "max_kv_tokens is 3"),
    ],
    ids=str,
)
def test_invalid_options_are_refused_before_anything_is_written(tmp_path, options, named):
    with pytest.raises(ValueError, match=named):
        run(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


# A change of the workload ------------------------------------------------------------------------------------------

OTHERS = [Prompt("x", "to be or", "verse"), Prompt("y", "not to be", "verse")]


@pytest.mark.parametrize(
    ("count", "at", "numbers", "change"),
    [
        (None, None, [0, 1, 2, 3, 4, 5, 6], 5),
        (6, None, [0, 1, 2, 5, 6, 5], 3),
        (9, 7, [0, 1, 2, 3, 4, 0, 1, 5, 6], 7),
    ],
)
def test_the_prompts_of_a_stream_change_with_a_request(tmp_path, count, at, numbers, change):
    stream = RequestStream.of(lab(), settings(tmp_path), count, OTHERS, at)
    texts = [*TEXTS, *(prompt.text for prompt in OTHERS)]
    assert [request.tokens for request in stream.requests] == [
        tuple(lab().target.tokenizer.encode(texts[number])) for number in numbers
    ]
    assert [request.id for request in stream.requests] == [*range(len(numbers))]
    assert stream.workloads == ["toy"] * change + ["verse"] * (len(numbers) - change)
    assert stream.change == change
    assert [stream.columns(number)["drifted"] for number in (change - 1, change)] == [False, True]


@pytest.mark.parametrize(
    ("count", "drift", "at", "option"),
    [(None, None, 3, "drift_at"), (None, OTHERS, 7, "drift_at"), (None, OTHERS, 9, "drift_at"),
     (1, OTHERS, None, r"requests must be at least 2 with drift.*\(got 1\)")],
)  # fmt: skip
def test_a_change_that_the_stream_does_not_have_is_refused(tmp_path, count, drift, at, option):
    with pytest.raises(ValueError, match=option):
        RequestStream.of(lab(), settings(tmp_path), count, drift, at)


@pytest.mark.parametrize(("seconds", "change"), [(0.5, 1), (1.0, 1), (2.5, 4), (3.0, 4)])
def test_a_change_at_a_time_begins_with_the_first_request_that_arrives_then(seconds, change):
    times = [0.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert change_at(seconds, times, OTHERS, None) == change
    assert all(time < seconds for time in times[:change]) and times[change] >= seconds


def test_a_trace_changes_its_workload_at_a_time(tmp_path):
    trace = tmp_path / "trace"
    trace.write_text("0\n0.001\n0.002\n0.003\n0.004\n0.005\n0.006\n")
    options = {"arrivals": "file", "trace": str(trace), "drift": OTHERS, "drift_window": 2}
    assert run(tmp_path / "out", **options, drift_at_seconds=0.0025) == 0
    rows = pd.read_parquet(tmp_path / "out" / "served.parquet")
    assert (rows["drifted"] == (rows["request"] >= 3)).all() and set(rows.loc[rows["drifted"], "workload"]) == {"verse"}
    for wrong, message in [
        ({"drift_at_seconds": 0.5}, "not after the last one, at 0.006 s"),
        ({"drift_at_seconds": 0.0025, "arrivals": "all"}, "set poisson or file"),
        ({"drift_at_seconds": 0.0025, "drift_at": 2}, "set one of them to null"),
        ({"drift_at_seconds": 0.0025, "drift": None}, r"prompts@task\.drift"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(tmp_path / "wrong", **(options | wrong))
    assert not (tmp_path / "wrong").exists()


class Forgetting(Repeat):
    """Counts how often it is asked to forget."""

    times = 0
    shared_store = "counts"

    def forget(self) -> None:
        self.times += 1


def test_a_stream_shows_tau_and_acceptance_before_and_after_its_change(tmp_path):
    out, console, learns = tmp_path / "out", quiet(), Forgetting()
    assert run(out, console, lab(proposer=learns), drift=OTHERS, drift_window=2) == 0
    rows = pd.read_parquet(out / "served.parquet")
    assert learns.times == 0, "what was learned stays across segments and the change"
    workloads = dict(zip(rows["request"], rows["workload"], strict=True))
    assert [workloads[number] for number in range(7)] == ["toy"] * 5 + ["verse"] * 2
    assert (rows["drifted"] == (rows["request"] >= 5)).all()
    assert (rows["emitted"] == rows["tokens"] - 1).all() and (rows["decode_steps"] == rows["steps"] - 1).all()
    drafted = rows[rows["arm"] == "repeat"]
    assert (drafted["emitted"] <= drafted["accepted"] + drafted["decode_steps"]).all()
    assert (rows.loc[rows["arm"] == "baseline", "drafted"] == 0).all()
    drift = json.loads((out / "summary.json").read_text())["drift"]
    assert (drift["at"], drift["window"], [*drift["arms"]]) == (5, 2, ["repeat"])
    assert [(row["first"], row["last"]) for row in drift["arms"]["repeat"]] == [(0, 0), (1, 2), (3, 4), (5, 6)]
    late = drafted[drafted["request"] >= 5]
    tau = late["emitted"].sum() / late["decode_steps"].sum()
    assert drift["arms"]["repeat"][-1]["tau_pooled"]["mean"] == pytest.approx(tau)
    section = results.result(out).sections[-1]
    assert section.title in console.file.getvalue()
    assert [axes.get_ylabel() for axes in section.figures["tau_drift"]().axes] == ["tau"]
    with pytest.raises(ValueError, match="holds another run"):
        run(out, drift=OTHERS[:1], drift_window=2)


def test_a_stream_that_resumes_with_empty_stores_says_so(tmp_path, monkeypatch):
    out, served = tmp_path / "out", module.serve_with_every_arm

    def interrupted(arms, segment, *given):
        if segment.number == 1:
            raise KeyboardInterrupt
        return served(arms, segment, *given)

    monkeypatch.setattr(module, "serve_with_every_arm", interrupted)
    parts, options = lab(proposer=Forgetting()), {"drift": OTHERS, "segment": 4}
    assert run(out, parts=parts, **options) == 130
    monkeypatch.setattr(module, "serve_with_every_arm", served)
    assert run(out, parts=parts, **options) == 0
    assert json.loads((out / "summary.json").read_text())["drift"]["emptied_stores"] == [1]
    assert "resumed with segment 1 (from 0)" in " ".join(results.result(out).warnings)
