"""Selection finds planted speeds and drops losers; confirmation on other groups calls no mode faster by chance."""

from collections import Counter

import numpy as np
import pandas as pd
import pytest

from spec_lab.analysis.metrics.speed import speedup_of_totals
from spec_lab.tasks.recommend.confirm import SELECTION_LOOKS, confirm, paired_speed, select

LOOKS = (8, 12, 24)


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
            return []
        self.left -= 1
        for name in (*names, "baseline"):
            speed = self.speeds.get(name, 1.0)
            self.rows.append((name, number, 64.0, float(np.exp(self.rng.normal(0, self.noise)) / speed)))
            self.decoded[name] += 1
        return list(names)

    def speed(self, name, reference, level=0.95):
        frame = pd.DataFrame(self.rows, columns=["arm", "group", "tokens", "seconds"]).set_index("group")
        totals = [frame.loc[frame["arm"] == arm, ["tokens", "seconds"]] for arm in (name, reference)]
        return speedup_of_totals(*totals, level)

    def confirm(self, name="a"):
        return confirm(
            lambda number: bool(self.decode(number, [name])),
            lambda level: self.speed(name, "baseline", level),
            LOOKS,
        )


def test_the_fastest_of_several_modes_is_selected_and_slower_ones_end_early():
    machine = Machine({"a": 1.1, "best": 1.5, "c": 0.8, "d": 1.45, "e": 0.5}, noise=0.1)
    assert select(list(machine.speeds), machine.decode, machine.speed)[0] == "best"
    assert machine.decoded["a"] == machine.decoded["c"] == SELECTION_LOOKS[0] < machine.decoded["d"]


def test_selection_ends_where_no_other_mode_can_be_much_faster():
    machine = Machine({"a": 1.5, "b": 1.5}, noise=0.005)
    assert sorted(select(["a", "b"], machine.decode, machine.speed)) == ["a", "b"]
    assert machine.decoded["baseline"] == SELECTION_LOOKS[0]


@pytest.mark.parametrize("groups", [0, 3])
def test_the_end_of_the_time_leaves_the_fastest_so_far(groups):
    machine = Machine({"a": 1.1, "best": 1.6}, noise=0.0, groups=groups)
    assert select(["a", "best"], machine.decode, machine.speed) == (["best", "a"] if groups else ["a", "best"])


def test_the_slowest_are_dropped_where_the_look_does_not_fit_into_the_time_with_all():
    machine = Machine({"a": 1.1, "best": 1.6, "c": 0.7}, noise=0.01)
    ranked = select(
        list(machine.speeds), machine.decode, machine.speed, lambda number, count, names: count > 5 or len(names) < 2
    )
    assert (ranked, machine.decoded["a"], machine.decoded["c"]) == (["best"], 3, 3)


def test_modes_that_cannot_run_are_left_out():
    machine = Machine({"a": 1.1, "b": 1.2, "broken": 9.0})
    ranked = select(
        list(machine.speeds),
        lambda number, names: machine.decode(number, [name for name in names if name != "broken"]),
        machine.speed,
    )
    assert ranked == ["b"] or ranked == ["b", "a"]


@pytest.mark.parametrize(("speed", "ended"), [(1.5, "faster"), (0.8, "slower")])
def test_a_mode_that_is_faster_or_slower_is_confirmed_at_the_first_look(speed, ended):
    known, groups, level, why = Machine({"a": speed}).confirm()
    assert (groups, why) == (LOOKS[0], ended) and level == pytest.approx(1 - 0.05 / 3)
    assert known.mean == pytest.approx(speed, rel=0.1) and known.low <= known.mean <= known.high


@pytest.mark.nightly
def test_a_mode_as_fast_as_the_baseline_is_rarely_called_faster():
    called = sum(Machine({"a": 1.0}, seed=seed).confirm()[3] == "faster" for seed in range(60))
    assert called <= 4, "2.5 % over all looks: of 60, more than 4 with a probability below 2 %"


def test_fewer_than_eight_groups_confirm_nothing():
    known, groups, _, ended = Machine({"a": 1.5}, groups=5).confirm()
    assert (groups, ended) == (5, "time") and np.isnan(known.low) and known.mean == pytest.approx(1.5, rel=0.1)
    known, groups, _, ended = Machine({"a": 1.5}, groups=0).confirm()
    assert (groups, ended) == (0, "time") and np.isnan(known.mean)


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


def test_groups_of_the_same_prompts_are_one_unit_and_those_of_one_arm_none():
    rows = {group: {"a": 1.0 + 0.01 * group, "baseline": 2.0} for group in range(18)}
    alone = {18: {"baseline": 9.0}, 19: {"a": 9.0}, 20: {"b": 1.0, "baseline": 9.0}}
    measured = paired_speed(requests(rows | alone), "a", "baseline", 9)
    cluster = pd.Series({group: group % 9 for group in rows})
    totals = [
        pd.DataFrame({"tokens": 10.0, "seconds": [arms[arm] for arms in rows.values()]})
        .groupby(cluster.to_numpy())
        .sum()
        for arm in ("a", "baseline")
    ]
    assert measured == pytest.approx(speedup_of_totals(*totals))
