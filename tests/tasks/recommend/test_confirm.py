"""Paired runs with early ends: planted speeds are found, none is called faster by chance, and losers end early."""

from collections import Counter

import numpy as np
import pandas as pd
import pytest

from spec_lab.analysis.metrics.speed import speedup_of_totals
from spec_lab.tasks.recommend.confirm import LOOKS, confirm, paired_speedup


class Machine:
    """Groups whose seconds are drawn around planted speeds.

    Args:
        speeds: of each mode over the baseline.
        noise: standard deviation of the logarithm of a group's seconds.
        groups: that fit into the time.
        seed: of the noise.
    """

    def __init__(self, speeds, noise=0.05, groups=1000, seed=0):
        self.speeds, self.noise, self.left = speeds, noise, groups
        self.rng, self.rows, self.decoded = np.random.default_rng(seed), [], Counter()

    def decode(self, number, names):
        if not self.left:
            return False
        self.left -= 1
        for name in (*names, "baseline"):
            speed = self.speeds.get(name, 1.0)
            self.rows.append((name, number, 64.0, float(np.exp(self.rng.normal(0, self.noise)) / speed)))
            self.decoded[name] += 1
        return True

    def speedup(self, name, level):
        frame = pd.DataFrame(self.rows, columns=["arm", "group", "tokens", "seconds"]).set_index("group")
        totals = [frame.loc[frame["arm"] == arm, ["tokens", "seconds"]] for arm in (name, "baseline")]
        return speedup_of_totals(*totals, level)

    def confirm(self):
        return confirm(list(self.speeds), self.decode, self.speedup, LOOKS)


def test_the_fastest_of_several_modes_is_found_and_the_others_end_early():
    machine = Machine({"a": 1.1, "best": 1.5, "c": 0.8, "d": 1.2, "e": 0.5})
    done = machine.confirm()
    assert (done.fastest, done.ended) == ("best", "faster")
    assert done.speedups["best"].low > 1 and done.speedups["best"].mean == pytest.approx(1.5, rel=0.1)
    assert machine.decoded["c"] == machine.decoded["e"] == LOOKS[0] < machine.decoded["best"]
    assert done.groups["best"] == machine.decoded["baseline"]


def test_modes_that_are_slower_end_at_the_first_look():
    machine = Machine({"a": 0.8, "b": 0.6})
    done = machine.confirm()
    assert (done.fastest, done.ended) == ("", "slower")
    assert machine.decoded["baseline"] == LOOKS[0]


@pytest.mark.nightly
def test_modes_as_fast_as_the_baseline_are_rarely_called_faster():
    called = sum(bool(Machine({"a": 1.0, "b": 1.0, "c": 1.0}, seed=seed).confirm().fastest) for seed in range(40))
    assert called <= 4, "5 % over all modes and looks: of 40, more than 4 with a probability below 5 %"


@pytest.mark.parametrize(("groups", "fastest"), [(5, ""), (9, "a")])
def test_the_end_of_the_time_leaves_what_was_measured(groups, fastest):
    done = Machine({"a": 1.5}, groups=groups, noise=0.3 if groups == 9 else 0.0).confirm()
    if groups == 5:
        assert np.isnan(done.speedups["a"].low), "fewer than eight groups have no interval"
        assert (done.fastest, done.ended, done.groups["a"]) == ("", "time", 5)
    else:
        assert done.ended in ("time", "faster") and (done.fastest == "") == (done.speedups["a"].low <= 1)


def test_the_slowest_are_dropped_where_the_look_does_not_fit_into_the_time_with_all():
    machine = Machine({"a": 1.1, "best": 1.6, "c": 0.7}, noise=0.01)

    def fits(number, count, names):
        return number < 3 or len(names) < 2

    done = confirm(list(machine.speeds), machine.decode, machine.speedup, LOOKS, fits)
    assert (done.fastest, machine.decoded["a"], machine.decoded["c"]) == ("best", 3, 3)
    assert np.isnan(done.speedups["c"].low) and done.speedups["c"].mean == pytest.approx(0.7, rel=0.1)
    nothing = confirm(["a", "b"], lambda number, names: False, machine.speedup, LOOKS, lambda *given: False)
    assert nothing.ended == "time" and nothing.groups == {"a": 0, "b": 0}


def test_nothing_to_measure_is_no_error():
    done = confirm([], lambda number, names: True, lambda name, level: 1 / 0, LOOKS)
    assert (done.fastest, done.ended) == ("", "slower")


def requests(seconds):
    """Rows of two arms; ``seconds`` of each group and arm."""
    return pd.DataFrame(
        [
            {"group": group, "arm": arm, "request": 0, "turn": 1, "finish": "length", "decode_tokens": 10,
             "decode_seconds": second, "prefill_tokens": 1, "prefill_seconds": 1.0}
            for group, arms in seconds.items()
            for arm, second in arms.items()
        ]
    )  # fmt: skip


def test_groups_of_the_same_prompts_are_one_unit_and_recorded_ones_none():
    rows = {group: {"a": 1.0 + 0.01 * group, "baseline": 2.0} for group in range(4, 22)}
    alone = {0: {"baseline": 9.0}, 1: {"a": 9.0}, 22: {"b": 1.0, "baseline": 9.0}}
    measured = paired_speedup(requests(rows | alone), "a", 0.95, 4, 9)
    cluster = pd.Series({group: (group - 4) % 9 for group in rows})
    totals = [
        pd.DataFrame({"tokens": 10.0, "seconds": [arms[arm] for arms in rows.values()]})
        .groupby(cluster.to_numpy())
        .sum()
        for arm in ("a", "baseline")
    ]
    assert measured == pytest.approx(speedup_of_totals(*totals))
