"""The cache of measured step costs: reads, new measurements, and warnings."""

import json
import multiprocessing
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
import torch

from spec_lab.drafters.medusa.network import Heads
from spec_lab.drafters.medusa.propose import Medusa
from spec_lab.propose.accuracy import Accuracy
from spec_lab.propose.calibrate import calibrate
from spec_lab.propose.cost_cache import MAX_AGE, CostCache
from spec_lab.propose.step_costs import StepCosts
from spec_lab.propose.trees import parse
from tests.tiny import tiny_target

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
SIZES = (0, 1, 2, 4)
COSTS = StepCosts({0: 1.0, 1: 1.1, 2: 1.25}, {0: 0.0, 1: 0.02, 2: 0.01}, 18, 1, 0.25, 2)
UNDER = {"processor": "fast", "threads": 1, "versions": {"torch": "2"}}


class Timer:
    """Measures, and counts the measurements."""

    def __init__(self, costs=COSTS):
        self.costs, self.calls = costs, 0

    def __call__(self, *_):
        self.calls += 1
        return self.costs


@pytest.fixture
def timer():
    return Timer()


@pytest.fixture
def cache(tmp_path):
    return CostCache(tmp_path / "cache", lambda: NOON)


def files(cache):
    return sorted((cache.folder / "step_costs").glob("*.json"))


def test_costs_are_measured_once(cache, timer, caplog):
    first, second = (cache.costs(UNDER, SIZES, timer) for _ in range(2))
    assert timer.calls == 1
    assert first == replace(COSTS, measured=NOON.isoformat())
    assert second == replace(first, cached=True)
    assert not caplog.records
    assert os.listdir(cache.folder / "step_costs") != [], "the file and the lock"
    assert [file.suffix for file in files(cache)] == [".json"]


@pytest.mark.parametrize("change", [{"processor": "slow"}, {"threads": 2}, {"versions": {"torch": "3"}}, {"more": 1}])
def test_other_conditions_are_another_entry(cache, timer, change):
    for under in (UNDER, UNDER | change, UNDER, UNDER | change):
        cache.costs(under, SIZES, timer)
    assert timer.calls == 2
    assert len(files(cache)) == 2


def test_old_costs_are_measured_again(cache, timer):
    cache.costs(UNDER, SIZES, timer)
    for age, calls in ((MAX_AGE, 1), (MAX_AGE + timedelta(hours=1), 2)):
        costs = replace(cache, clock=lambda age=age: NOON + age).costs(UNDER, SIZES, timer)
        assert timer.calls == calls
        assert costs.cached is (calls == 1)
    replace(cache, clock=lambda: NOON - timedelta(days=2)).costs(UNDER, SIZES, timer)
    assert timer.calls == 3, "a date in the future is not believed"


def test_costs_are_measured_again_on_request(cache, timer):
    cache.costs(UNDER, SIZES, timer)
    later = replace(cache, clock=lambda: NOON + timedelta(hours=1))
    assert not later.costs(UNDER, SIZES, timer, again=True).cached
    assert timer.calls == 2
    assert later.costs(UNDER, SIZES, timer).measured == (NOON + timedelta(hours=1)).isoformat(), "they replace the old"


def test_a_measurement_on_a_busy_machine_is_not_kept(cache):
    busy = Timer(replace(COSTS, spread=dict.fromkeys(COSTS.spread, 0.5)))
    for calls in (1, 2):
        assert cache.costs(UNDER, SIZES, busy).seconds == COSTS.seconds
        assert busy.calls == calls
    assert files(cache) == []


def damaged(name, value):
    def change(text):
        entry = json.loads(text)
        entry["costs"][name] = value
        return json.dumps(entry)

    return change


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "{}",
        lambda text: "\udcff",
        lambda text: "[" * 100_000,
        lambda text: text + " " * 1_000_000,
        lambda text: text.replace("fast", "slow"),
        damaged("seconds", {}),
        damaged("seconds", {"1": 1.0}),
        damaged("seconds", {"0": 1.0, "1": -1.0, "2": 1.0}),
        damaged("seconds", {"0": 1.0, "1": float("nan"), "2": 1.0}),
        damaged("seconds", {"0": 1.0, "1": float("inf"), "2": 1.0}),
        damaged("seconds", {"0": 1.0, "1": 10**400, "2": 1.0}),
        damaged("seconds", {"0": 1.0, "1": "1.0", "2": 1.0}),
        damaged("seconds", {"0": 1.0, "1": 1.0, "3": 1.0}),
        damaged("seconds", {"0": 1.0, "9" * 5000: 1.0}),
        damaged("seconds", [1.0]),
        damaged("spread", {"0": 0.0}),
        damaged("spread", None),
        damaged("steps", "many"),
        damaged("other_load", "none"),
        damaged("measured", "yesterday"),
        damaged("measured", "2026-01-02T12:00:00"),
        damaged("measured", 3),
    ],
)
def test_a_damaged_entry_is_measured_again_with_a_warning(cache, timer, caplog, damage):
    good = cache.costs(UNDER, SIZES, timer)
    file = files(cache)[0]
    file.write_text(damage(file.read_text()), errors="surrogateescape")
    assert cache.costs(UNDER, SIZES, timer) == good
    assert timer.calls == 2
    assert [str(file) in record.getMessage() for record in caplog.records] == [True]
    assert cache.costs(UNDER, SIZES, timer).cached, "and repaired"


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, timer, caplog):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", None):
        caplog.clear()
        costs = CostCache(folder).costs(UNDER, SIZES, timer)
        assert costs.seconds == COSTS.seconds and not costs.cached
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "SPEC_LAB_CACHE" in caplog.text


def of_a_process(folder, log, under, start):
    """Read or measure costs in a process of its own, logging when measuring begins and ends."""

    def slow():
        with open(log, "a") as opened:
            opened.write("begin\n")
            opened.flush()
            start.wait(0.05)
            opened.write("end\n")
        return COSTS

    CostCache(folder).costs(under, SIZES, slow)


@pytest.mark.parametrize(("same", "measured"), [(True, 1), (False, 3)])
def test_processes_measure_one_after_the_other_and_share_what_they_find(tmp_path, same, measured):
    context = multiprocessing.get_context("fork")
    never = context.Event()
    jobs = [
        context.Process(
            target=of_a_process, args=(tmp_path, tmp_path / "log", UNDER | {"job": 0 if same else n}, never)
        )
        for n in range(3)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0, 0, 0]
    assert (tmp_path / "log").read_text().split() == ["begin", "end"] * measured


# Trees -------------------------------------------------------------------------------------------------------------

ACCURACY = Accuracy([[0.6, 0.2], [0.5, 0.1]], {})


@pytest.fixture
def chosen(cache):
    """Calibrate a tree for a target, with a timer in place of a clock."""

    def call(target, timing, batch_size=1, drafter="heads", accuracy=ACCURACY):
        heads = Heads.random(target, 2, trunk=False)
        drafting = partial(Medusa, heads)
        return calibrate(
            target, drafting, 2, accuracy, batch_size, max_nodes=4, cache=cache, drafter=drafter, timing=timing
        )

    return call


def of_load(factor):
    """Costs that would choose another tree for each load."""
    return Timer(StepCosts({0: 1.0, 1: 1.0, 2: 1.0, 3: 1 + factor, 4: 1 + factor}, dict.fromkeys(range(5), 0.0), 9))


def test_the_same_command_chooses_the_same_tree_and_computes_nothing(chosen, monkeypatch):
    target, quiet, loaded = tiny_target(), of_load(0.0), of_load(9.0)
    first = chosen(target, quiet)

    def forward(*_):
        raise AssertionError("nothing is computed")

    monkeypatch.setattr(target.lm, "run", forward)
    second = chosen(target, loaded)
    assert (quiet.calls, loaded.calls) == (1, 0)
    assert second.choices == first.choices == parse("0 1 0.0 1.0")
    assert (first.facts["costs"], second.facts["costs"]) == ("measured", "cached")
    assert second.facts["costs_measured"] == NOON.isoformat()
    json.dumps(second.facts)
    assert chosen(target, loaded, drafter="other heads").choices != first.choices


def changed(target, name):
    if name == "threads":
        torch.set_num_threads(2)
    elif name == "dtype":
        return tiny_target(dtype=torch.float32)
    elif name == "target":
        return replace(target, sha256="other")
    return target


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("target", {}),
        ("dtype", {}),
        ("threads", {}),
        ("batch", {"batch_size": 2}),
        ("heads", {"drafter": "other"}),
        ("trees", {"accuracy": Accuracy([[0.6, 0.2], [0.1, 0.1]], {})}),
        ("temperature", {"accuracy": replace(ACCURACY, temperature=1.0)}),
    ],
)
def test_each_condition_that_changes_the_costs_is_measured_separately(chosen, name, options):
    target, timer = tiny_target(), of_load(0.0)
    chosen(target, timer)
    chosen(changed(target, name), timer, **options)
    assert timer.calls == 2
