"""The experiments' own scripts, on tiny models."""

import importlib.util
import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from experiments.gpu import timing
from spec_lab.analysis import metrics
from spec_lab.analysis.metrics import Interval
from spec_lab.models.target import Target
from spec_lab.propose import Null
from tests.checkpoints import zoo
from tests.propose.lab import decode, draft_model, requests
from tests.tiny import tiny_target

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def script(name):
    """An experiment's script as a module."""
    spec = importlib.util.spec_from_file_location(name, EXPERIMENTS / name / "measure.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def batching():
    return script("batching")


@pytest.mark.nightly
def test_batching_measures_every_way_on_every_full_group(batching, tmp_path, monkeypatch):
    folder = zoo(tmp_path)
    target, heads, prompts = Target.load(str(folder / "target")), str(folder / "medusa"), folder / "prompts"
    plain, seen = batching.tokens_per_second, []

    def watched(target, proposer, groups):
        seen.append((proposer.name, [len(group) for group in groups]))
        return plain(target, proposer, groups)

    monkeypatch.setattr(batching, "tokens_per_second", watched)
    speeds = batching.measure(target, heads, prompts / "code.jsonl", batch=2, limit=4, new=6)
    names = ["one at a time", "batch of 2", "batch of 2, Medusa"]
    assert list(speeds.columns) == [name + kind for name in names for kind in ("", batching.ALL_LIVE)]
    assert len(speeds) == 2
    assert np.isfinite(speeds).all(axis=None) and (speeds > 0).all(axis=None)
    ways = [("none", [1, 1]), ("none", [2]), ("medusa", [2])]
    assert seen == ways + ways + [*ways[1:], ways[0]]  # warm-up; then alternating
    short = batching.measure(target, heads, prompts / "code.jsonl", batch=3, limit=4, new=6)
    assert len(short) == 1  # the fourth prompt fills no group
    assert isinstance(speeds, pd.DataFrame)


def test_a_ratio_is_shown_with_its_interval(batching):
    assert batching.show(Interval(1.234, 1.1, 1.36)) == "1.23 [1.10, 1.36]"


def test_the_draft_s_share_is_measured_on_alternating_steps_of_both_models(tmp_path, monkeypatch):
    share = script("draft_share")
    folder = zoo(tmp_path)
    target, draft = (Target.load(str(folder / name)) for name in ("target", "draft"))
    plain, seen = share.Bare.decode, []

    def watched(self, requests):
        seen.append((self.target, requests[0].id))
        return plain(self, requests)

    monkeypatch.setattr(share.Bare, "decode", watched)
    steps = share.measure(target, draft, folder / "prompts" / "code.jsonl", limit=2, new=6)
    assert list(steps.columns) == ["target", "draft"] and len(steps) == 2
    assert (steps > 0).all(axis=None)
    assert seen == [(target, 0), (draft, 0), (target, 0), (draft, 0), (draft, 1), (target, 1)]


@pytest.mark.nightly
def test_gpu_times_both_ways_of_running_a_step_on_the_same_model(tmp_path, monkeypatch):
    """On the CPU, where nothing is captured."""
    gpu = script("gpu")
    given = "--device cpu --shapes tiny --dtype float32 --batches 1 2 --contexts 20 --nodes 0 5 --steps 8 --repeats 2"
    monkeypatch.setattr("sys.argv", ["measure.py", *given.split(), "--out", str(tmp_path)])
    gpu.main()
    found = json.loads((tmp_path / "results.json").read_text())
    assert (tmp_path / "forward.png").stat().st_size and not found["left_out"]
    decoding, forwards = pd.DataFrame(found["decoding"]), pd.DataFrame(found["forwards"])
    assert sorted(zip(decoding["way"], decoding["batch"], strict=True)) == [
        (way, batch) for way in sorted(gpu.WAYS) for batch in (1, 2)
    ]
    assert (
        (decoding["tokens_per_second"] > 0).all()
        and (decoding["roofline_share"] > 0).all()
        and decoding["overhead"].between(0, 1).all()
    )
    assert len(forwards) == 8 and (forwards["seconds"] > 0).all() and (forwards["share"] > 0).all()
    assert set(forwards["nodes"]) == {0, 5} and set(forwards["context"]) == {20}


def test_host_work_is_the_time_of_a_step_outside_module_calls():
    host = importlib.import_module("experiments.overhead.host")
    target, proposer = tiny_target(), draft_model("1x1")
    table = host.measure(target, {"baseline": Null(), "chain": proposer}, [(1, 2, 3), (4, 5)], 6)
    assert list(table.index) == ["baseline", "chain"] and (table > 0).all().all()
    _, steps = decode(target, proposer, requests(new=6))
    for info, following in pairwise(steps):
        found, seconds = host.host_seconds(info, following), info.seconds()
        outside = seconds["whole"] - seconds["target_forward"] - seconds["propose_forward"]
        assert found["whole"] == pytest.approx(outside + following.began - info.ended, abs=1e-4)


def test_a_balanced_tree_has_two_children_below_each_row():
    shape = timing.balanced(7)
    assert shape.parent.tolist() == [0, 0, 1, 1, 2, 2, 3]


@pytest.mark.nightly
def test_long_context_measures_every_way_at_every_length(monkeypatch):
    """Each way is left with the text of the length that is measured, whatever was decoded at the one before."""
    module = script("long_context")
    monkeypatch.setattr(module, "LENGTHS", (20, 700))
    ways = ("autoregressive", f"tree of {module.TREE.nodes}", "n-grams, 4", "draft model, 4")
    options = dict(layers=1, hidden=64, vocabulary=61, dtype="float32", steps=4, longest=700, cpu=True, ways=ways)
    extend, lengths = module.Ours.extend, []

    def watched(own, length):
        extend(own, length)
        lengths.append((length, len(own.sequence.kv)))
        assert own.sequence.tokens[:length] == own.tokens[:length]

    monkeypatch.setattr(module.Ours, "extend", watched)
    frame = module.measure(SimpleNamespace(**options))
    assert {kv - length for length, kv in lengths} <= {*range(12)} and len(lengths) == 2 * len(ways)
    assert list(frame["way"]) == [*ways, *ways] and (frame[["step", "forward"]] > 0).all(axis=None)
    grown = module.growth(frame)
    assert grown["ratio"].to_dict() == pytest.approx((grown["step"] / grown["forward"]).to_dict())


@pytest.mark.parametrize(("kind", "words", "right"), [("quiet", "rrd", 2), ("loaded", "rdn", 2)])
def test_the_study_of_the_verdict_counts_which_are_right(tmp_path, monkeypatch, capsys, kind, words, right):
    study, names = script("verdict"), {"r": "reliable", "d": "doubtful", "n": "not reliable"}
    found = iter(words)

    def measure(out, way, prompts, seed, seconds, options):
        return {"run": out.name, "way": way, "verdict": names[next(found)], "speedup": 1.5, "reasons": "why"}

    monkeypatch.setattr(study, "measure", measure)
    table = study.main([f"--{kind}", "--runs", "3", "--ways", "all", "stop", "--out", str(tmp_path)])
    assert table["way"].tolist() == (["quiet"] * 3 if kind == "quiet" else ["all", "stop", "all"])
    assert f"right: {right} of 3" in capsys.readouterr().out and len(pd.read_csv(tmp_path / "results.csv")) == 3


def test_the_study_of_the_verdict_keeps_the_quiet_runs_when_it_adds_loaded_ones(tmp_path, monkeypatch):
    study = script("verdict")
    row = {"verdict": "doubtful", "speedup": 1.5, "seconds": 2.0, "reasons": "why"}
    monkeypatch.setattr(study, "measure", lambda out, way, *rest: {"run": out.name, "way": way, **row})
    for kind in ("quiet", "loaded", "loaded"):
        study.main([f"--{kind}", "--runs", "4", "--out", str(tmp_path)])
    assert pd.read_csv(tmp_path / "results.csv")["way"].tolist() == ["quiet"] * 4 + [*study.WAYS]


@pytest.mark.parametrize(("threads", "cores"), [(1, 1), (2, 2), (1, 8), (6, 8), (16, 16)])
def test_some_busy_processes_are_enough_that_a_run_is_not_reliable(threads, cores):
    study = script("verdict")
    machine = metrics.Resources(threads, cores)
    groups = pd.DataFrame({"tokens": 1, "seconds": 1.0, "slowness": 0.0, "same_forwards": True}, index=range(8))
    found = metrics.timing_verdict({"a": groups.assign(other_cores=float(study.few(threads, cores)))}, machine)
    assert found.word != "reliable"
