"""The roofline model by hand-made numbers, and the measurement of a machine by a scripted clock."""

import json
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch

from spec_lab.core import machine_limits, roofline
from spec_lab.core.clock import Clock
from spec_lab.core.files import expect
from spec_lab.core.machine_limits import cache_bytes, measure
from spec_lab.core.roofline import AttentionWork, ExpertWork, ForwardWork, MachineLimits, Roofline

WORK = ForwardWork(1000, 100, 10, (AttentionWork(4, 2),))
LIMITS = MachineLimits(
    bandwidth=100.0, bandwidth_median=90.0, read_bytes=4096, peak=50.0, peak_median=45.0, peak_dtype="float32",
    cache_bytes=2**20, fits_cache=True, threads=2, cores=4, other_load=0.5, seconds=0.5,
)  # fmt: skip
CPU = torch.device("cpu")


def test_a_step_reads_the_weights_once_and_the_cache_of_every_sequence():
    """Two sequences share step 0: 8 and 11 positions with their nodes; step 1 has one of 6 positions."""
    read, compute = Roofline(WORK, LIMITS).seconds([0, 0, 1], [8, 9, 6], [1, 3, 1], [0, 2, 0])
    assert read.tolist() == [(1000 + 4 * (8 + 11)) / 100, (1000 + 4 * 6) / 100]
    first = 100 * (1 + 5) + 10 * (1 + 3) + 2 * (1 * 8 + 5 * 11)
    assert compute.tolist() == [first / 50, (100 + 10 + 2 * 6) / 50]


def test_layers_with_a_window_read_the_windows_of_all_rows_and_each_row_computes_with_its_own():
    """The root is position 19, its window begins at 15; two nodes follow."""
    work = replace(WORK, attention=(AttentionWork(4, 2), AttentionWork(8, 6, window=5)))
    (read,), (compute,) = Roofline(work, LIMITS).seconds([0], [20], [1], [2])
    assert read == (1000 + 4 * 22 + 8 * 7) / 100
    assert compute == (100 * 3 + 10 * 3 + 3 * (2 * 22 + 6 * 5)) / 50
    (read,), _ = Roofline(work, LIMITS).seconds([0], [20], [20], [0])
    assert read == (1000 + (4 + 8) * 20) / 100, "a prompt is read whole"


def test_layers_with_chunks_read_from_the_beginning_of_the_first_row_s_chunk():
    """Position 19 is in the chunk from 16 on; position 16 begins it."""
    work = replace(WORK, attention=(AttentionWork(8, 6, chunk=8),))
    read, compute = Roofline(work, LIMITS).seconds([0, 1], [20, 17], [1, 1], [2, 0])
    assert read.tolist() == [(1000 + 8 * 6) / 100, (1000 + 8) / 100]
    assert compute.tolist() == [(100 * 3 + 10 * 3 + 3 * 6 * 6) / 50, (100 + 10 + 6) / 50]


@pytest.mark.parametrize(("experts", "per_row", "rows"), [(2, 1, 3), (4, 2, 3), (5, 2, 2), (4, 4, 2), (6, 1, 4)])
def test_the_experts_that_rows_read_are_the_mean_over_all_independent_uniform_choices(experts, per_row, rows):
    choices = list(product(combinations(range(experts), per_row), repeat=rows))
    mean = sum(len(set().union(*chosen)) for chosen in choices) / len(choices)
    assert ExpertWork(1, experts, per_row, 1.0).expected(rows) == pytest.approx(mean)


def test_the_effective_number_of_experts_is_that_with_which_the_formula_reads_as_many():
    mixture = ExpertWork(1, 16, 2, 1.0)
    rows = [1, 4, 9]
    assert mixture.fitted(rows, replace(mixture, effective=7.5).expected(rows)) == pytest.approx(7.5)
    assert mixture.fitted(rows, mixture.expected(rows)) == pytest.approx(16)
    assert mixture.fitted(rows, [2, 2, 2]) == pytest.approx(2) and mixture.fitted(rows, [16, 16, 16]) == 16


def test_a_step_reads_the_experts_that_were_counted_and_else_as_many_as_uniform_choices():
    """Three layers of 8 experts with 10 bytes each. Step 0 has 6 rows in two sequences, step 1 has one, 2 of 8."""
    mixture = replace(WORK, experts=ExpertWork(3, 8, 2, 10.0))
    rows = [0, 0, 1], [8, 9, 6], [1, 3, 1], [0, 2, 0]
    cells = [4 * (8 + 11), 4 * 6]
    uniform = 8 * (1 - 0.75**6)
    read, compute = Roofline(mixture, LIMITS).seconds(*rows)
    assert read == pytest.approx([(1000 + 30 * (uniform - 2) + cells[0]) / 100, (1000 + cells[1]) / 100])
    counted, _ = Roofline(mixture, LIMITS).seconds(*rows, [5.0, float("nan")])
    assert counted == pytest.approx([(1000 + 30 * (5 - 2) + cells[0]) / 100, read[1]])
    assert (compute == Roofline(WORK, LIMITS).seconds(*rows)[1]).all(), "each row is multiplied with its own experts"


def test_what_a_run_records_is_read_back_and_has_the_shape_that_manifests_are_checked_for():
    near = AttentionWork(8, 6, window=5), AttentionWork(8, 6, chunk=9)
    mixture = ExpertWork(2, 8, 2, 1.5)
    written = Roofline(replace(WORK, attention=(*WORK.attention, *near), experts=mixture), LIMITS)
    facts = json.loads(json.dumps(written.facts()))
    expect(facts, roofline.SHAPE, "roofline")
    assert Roofline.of(facts) == written
    newer = {part: {**values, "later": 1} for part, values in facts.items()}
    assert Roofline.of(newer) == written, "a later version may record more"
    assert Roofline.of(None) is None
    for fact_value in facts["work"]["attention"]:
        del fact_value["chunk"]
    expect(facts, roofline.SHAPE, "roofline")
    assert Roofline.of(facts) is not None, "an older version recorded no chunks"
    del facts["work"]["experts"]
    expect(facts, roofline.SHAPE, "roofline")
    assert Roofline.of(facts).work.experts is None, "nor experts"


# Measuring -----------------------------------------------------------------------------------------------------------


class ScriptedClock(Clock):
    """A clock on which every timed call takes the next of the given seconds, again and again."""

    def __init__(self, *seconds):
        super().__init__()
        self.script, self.marks, self.now = seconds, 0, 0.0
        self.mark = self.advance

    def advance(self):
        if self.marks % 2:
            self.now += self.script[self.marks // 2 % len(self.script)]
        self.marks += 1
        return self.now


@pytest.fixture
def small(monkeypatch):
    """Buffers of one page and products of 8 x 8."""
    monkeypatch.setattr(machine_limits, "MIN_READ", {"cpu": 4096})
    monkeypatch.setattr(machine_limits, "SIZES", {"cpu": (8,)})


def test_the_fastest_pass_counts_and_the_median_is_recorded_beside_it(small):
    limits = measure(4096 * 3, torch.float32, CPU, 0.01, ScriptedClock(2.0**-4, 2.0**-3, 2.0**-2))
    assert limits.read_bytes == 4096 * 3
    assert limits.bandwidth == limits.read_bytes * 16 and limits.peak == 2 * 8**3 * 16
    assert limits.bandwidth_median < limits.bandwidth and limits.peak_median < limits.peak
    assert (limits.threads, limits.peak_dtype) == (torch.get_num_threads(), "float32")


def test_the_threads_of_the_run_are_those_from_before(small):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert measure(4096, torch.float32, CPU, 0.0).threads == 2
        assert measure(4096, torch.float32, CPU, 0.0, threads=3).threads == 3 and torch.get_num_threads() == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_every_way_of_reading_reads_every_word():
    for name, read in machine_limits.reads(2 * 4096, CPU).items():
        total = read().sum()
        assert total == {"sum": 2048.0, "sums": 2048.0}.get(name, total) and total > 0


def test_weights_larger_than_any_cache_are_read_in_part(monkeypatch, small):
    monkeypatch.setattr(machine_limits, "MAX_READ", {"cpu": 16384})
    for cache, read in ((None, 16384), (4096, 16384), (12288, 24576)):
        monkeypatch.setattr(machine_limits, "cache_bytes", lambda device, cache=cache: cache)
        assert measure(10**12, torch.float32, CPU, 0.0).read_bytes == read


def caches(folder, core, *levels):
    for number, (level, kind, size, shared) in enumerate(levels):
        cache_folder = folder / f"cpu{core}" / "cache" / f"index{number}"
        cache_folder.mkdir(parents=True)
        for name, text in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", shared)):
            (cache_folder / name).write_text(f"{text}\n")


def test_the_last_level_caches_of_all_allowed_cores_count_once_each(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_limits, "allowed_cores", lambda: [0, 1, 5])
    for core, shared in ((0, "0-1"), (1, "0-1"), (5, "5")):
        levels = (1, "Data", "32K", core), (1, "Instruction", "64K", core), (3, "Unified", "16384K", shared)
        caches(tmp_path, core, *levels)
    assert cache_bytes(CPU, tmp_path) == 2 * 16 * 2**20


def test_weights_fit_the_cache_up_to_its_size(small, monkeypatch):
    monkeypatch.setattr(machine_limits, "cache_bytes", lambda _: 8192)
    fits = [measure(size, torch.float32, CPU, 0.0).fits_cache for size in (8192, 8193)]
    assert fits == [True, False]
    monkeypatch.setattr(machine_limits, "cache_bytes", lambda _: None)
    assert measure(8192, torch.float32, CPU, 0.0).fits_cache is None
