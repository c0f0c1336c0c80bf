"""Runs that do not fit the memory are refused before they decode, with what would fit."""

import json
from dataclasses import replace

import pytest

from spec_lab.core import device_memory
from spec_lab.core.process_cache import ProcessCache
from spec_lab.propose.ngram import Ngram
from spec_lab.propose.union import Union
from spec_lab.tasks import benchmark
from spec_lab.tasks.memory_check import check_memory
from tests.labs import lab, settings
from tests.propose.lab import draft_model


def checked(tmp_path, room=None, run=None, **changes):
    run = run or lab()
    options = settings(tmp_path, **changes)
    return check_memory(run, options, [len(request.tokens) for request in run.requests(options)], room)


def test_a_run_that_fits_records_what_it_needs(tmp_path):
    facts = checked(tmp_path, 2**30)
    parts = [
        f"{name}_bytes"
        for name in ("kv_cache", "draft_kv_cache", "recurrent_states", "graphs", "logits", "activations")
    ]
    assert facts["decoding_bytes"] == sum(facts[name] for name in parts) and facts["available_bytes"] == 2**30
    assert facts["kv_cache_bytes"] == 2 * 256 * (2 * 2 * 16) * 8, "two sequences, layers, heads of 8 keys and values"


def test_a_run_that_does_not_fit_is_refused_with_what_does(tmp_path):
    most = checked(tmp_path, 2**30)["decoding_bytes"]
    with pytest.raises(
        ValueError, match=r"batch_size=2, .* needs [\d.]+ KiB \(KV cache .*are available on cpu: set batch_size=1"
    ):
        checked(tmp_path, most - 1)
    checked(tmp_path, most - 1, batch_size=1)
    with pytest.raises(ValueError, match="no smaller batch_size or max_new_tokens fits"):
        checked(tmp_path, 1)


def test_the_kv_caches_of_all_draft_models_count(tmp_path):
    plain = lab(proposer=Ngram(3, 2, 1))
    changed = replace(plain, proposer=draft_model("1x1x1"))
    both = replace(
        changed, more_proposers={"hybrid": Union.load(changed.target, {"a": draft_model("1x1x1"), "b": Ngram(2, 2, 1)})}
    )
    sizes = [checked(tmp_path, 2**30, run)["draft_kv_cache_bytes"] for run in (plain, changed, both)]
    assert sizes[0] == 0 and sizes[2] == 2 * sizes[1] > 0


def test_a_benchmark_is_refused_before_it_claims_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(device_memory, "available", lambda _: 1000)
    with pytest.raises(ValueError, match="1000 bytes|of memory are available"):
        benchmark.run(lab(), settings(tmp_path / "run"), {})
    assert not (tmp_path / "run").exists()


def test_a_benchmark_records_estimate_and_peak(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "in_short", lambda *_: {"certified": None})
    run = settings(tmp_path / "run", overrides=[], max_new_tokens=2)  # a job of a sweep draws no figures
    laboratory = lab(("a",))
    laboratory = replace(
        laboratory, target=replace(laboratory.target, cache=ProcessCache())
    )  # certificates that are left out are not shared
    assert benchmark.run(laboratory, run, {}) == 0
    manifest, summary = (
        json.loads((tmp_path / "run" / f"{name}.json").read_text()) for name in ("manifest", "summary")
    )
    assert manifest["memory"]["decoding_bytes"] == summary["memory"]["decoding_bytes"] > 0
    assert {"before_bytes", "peak_bytes"} <= summary["memory"].keys()
