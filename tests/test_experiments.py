"""The experiments' own scripts, on tiny models."""

import importlib.util
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from spec_lab.metrics import Interval
from spec_lab.target import Target
from tests.checkpoints import zoo

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


@pytest.fixture(scope="module")
def batching():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("batching", EXPERIMENTS / "batching" / "measure.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_batching_measures_every_way_on_every_full_group(batching, tmp_path, monkeypatch):
    folder = zoo(tmp_path)
    target, heads, prompts = Target.load(str(folder / "target")), str(folder / "medusa"), folder / "prompts"
    plain, seen = batching.tokens_per_second, []

    def watched(target, proposer, groups):
        seen.append((proposer.name, [len(group) for group in groups]))
        return plain(target, proposer, groups)

    monkeypatch.setattr(batching, "tokens_per_second", watched)
    speeds = batching.measure(target, heads, prompts / "code.jsonl", batch=2, limit=4, new=6)
    assert list(speeds.columns) == ["one at a time", "batch of 2", "batch of 2, Medusa"]
    assert len(speeds) == 2
    assert np.isfinite(speeds).all(axis=None) and (speeds > 0).all(axis=None)
    ways = [("none", [1, 1]), ("none", [2]), ("medusa", [2])]
    assert seen == ways + ways + [*ways[1:], ways[0]]  # before the clock counts; then in turns
    short = batching.measure(target, heads, prompts / "code.jsonl", batch=3, limit=4, new=6)
    assert len(short) == 1  # the fourth prompt fills no group
    assert isinstance(speeds, pd.DataFrame)


def test_a_ratio_is_shown_with_its_interval(batching):
    assert batching.show(Interval(1.234, 1.1, 1.36)) == "1.23 [1.10, 1.36]"
