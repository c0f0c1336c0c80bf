"""Changes of figures: their size, their intervals' coverage, and what pairing is worth."""

import numpy as np
import pandas as pd
import pytest

from spec_lab.analysis import metrics
from spec_lab.analysis.metrics.paired import FIGURES, Totals, acceptance_totals, change

ONES = np.ones(4)


def totals(top, bottom) -> Totals:
    return Totals(np.asarray(top, dtype=float), np.asarray(bottom, dtype=float))


def prompts(random: np.random.Generator, ease: np.ndarray, gain: float = 1.0) -> Totals:
    """Tokens and steps of prompts of such ease: tau is skewed, lengths vary, luck is in it."""
    tau = 1 + gain * ease * np.exp(0.3 * random.normal(size=len(ease)))
    tokens = random.integers(20, 130, len(ease)).astype(float)
    return Totals(tokens, np.maximum(1, np.round(tokens / tau)))


def speeds(random: np.random.Generator, ease: np.ndarray) -> Totals:
    """Logarithms of speed-ups, with a stall now and then."""
    stall = (random.random(len(ease)) < 0.1) * random.random(len(ease))
    return Totals(ease + 0.1 * random.normal(size=len(ease)) - 0.3 * stall, np.ones(len(ease)))


def test_a_change_is_the_other_figure_minus_the_reference():
    difference = change(totals([4, 6], [2, 2]), totals([9, 3], [2, 2]), paired=True)
    assert (difference.reference, difference.other) == (2.5, 3.0)
    assert difference.interval().mean == 0.5


def test_of_units_that_weigh_alike_it_is_the_t_interval_of_the_differences():
    reference, other = [1.0, 2.0, 4.0, 3.0], [2.0, 2.5, 5.5, 3.0]
    steps = np.subtract(other, reference)
    half = 3.1824463 * steps.std(ddof=1) / 2  # t of 3 degrees of freedom at 97.5 %
    interval = change(totals(reference, ONES), totals(other, ONES), paired=True).interval()
    assert interval == pytest.approx((steps.mean(), steps.mean() - half, steps.mean() + half))


def test_of_unpaired_units_it_is_welchs():
    a, b = np.array([1.0, 2.0, 4.0, 3.0]), np.array([7.0, 5.0, 6.0])
    difference = change(totals(a, ONES), totals(b, np.ones(3)), paired=False)
    parts = a.var(ddof=1) / 4, b.var(ddof=1) / 3
    assert difference.error == pytest.approx(np.sqrt(sum(parts)))
    assert difference.freedom == pytest.approx(sum(parts) ** 2 / (parts[0] ** 2 / 3 + parts[1] ** 2 / 2))


def test_a_relative_change_is_a_factor_of_geometric_means():
    difference = change(totals(np.log([1, 4]), [1, 1]), totals(np.log([2, 8]), [1, 1]), paired=True, relative=True)
    assert (difference.reference, difference.other) == pytest.approx((2, 4))
    assert difference.interval() == pytest.approx((2, 2, 2))


def test_the_order_of_units_does_not_matter():
    random = np.random.default_rng(1)
    ease = random.gamma(2, 0.5, 12)
    sides = [prompts(random, ease), prompts(random, ease)]
    shuffled = [Totals(*(part[::-1] for part in side)) for side in sides]
    assert change(*sides, paired=True).interval() == pytest.approx(change(*shuffled, paired=True).interval())


def test_pairing_narrows_the_interval_where_prompts_differ_more_than_runs():
    random = np.random.default_rng(2)
    ease = random.gamma(2, 1.0, 40)
    sides = prompts(random, ease), prompts(random, ease)
    paired, unpaired = (change(*sides, paired=both).half_width() for both in (True, False))
    assert paired < 0.6 * unpaired


def test_units_of_which_neither_run_has_anything_do_not_count():
    difference = change(totals([2, 0, 3], [4, 0, 4]), totals([3, 0, 0], [4, 0, 4]), paired=True)
    assert difference.units == (2, 2)


def test_one_unit_has_no_interval():
    difference = change(totals([2], [1]), totals([3], [1]), paired=True)
    assert difference.interval().mean == 1
    assert np.isnan(difference.interval().low)


def test_an_interval_of_two_units_at_a_high_level_has_no_end():
    difference = change(totals(np.log([1, 4]), [1, 1]), totals(np.log([2, 30]), [1, 1]), paired=True, relative=True)
    assert difference.interval(0.99999)[1:] == (0.0, np.inf)


def test_nothing_at_all_is_nan():
    difference = change(totals([], []), totals([], []), paired=True)
    assert np.isnan(difference.interval()).all() and not difference.identical


def test_the_same_rows_are_the_same_and_so_are_constants():
    sums = totals([2, 3], [1, 1])
    assert change(sums, sums, paired=True).identical
    assert not change(sums, sums, paired=False).identical
    assert change(totals([5, 10], [1, 2]), totals([15, 5], [3, 1]), paired=True).identical  # five each step, in both
    assert not change(totals([5, 10], [1, 2]), totals([5, 11], [1, 2]), paired=True).identical


def test_paired_runs_have_the_same_units():
    with pytest.raises(ValueError, match="2 and 1"):
        change(totals([1, 1], [1, 1]), totals([1], [1]), paired=True)


@pytest.mark.parametrize("count", [8, 12, 40])
def test_the_interval_of_a_true_change_covers_it_as_often_as_it_says(count):
    random = np.random.default_rng(count)
    ease = random.gamma(2, 0.5, 400_000)
    true = change(prompts(random, ease), prompts(random, ease, 1.4), paired=True).interval().mean
    covered = 0
    for _ in range(1000):
        some = random.gamma(2, 0.5, count)
        low, high = change(prompts(random, some), prompts(random, some, 1.4), paired=True).interval()[1:]
        covered += low <= true <= high
    assert covered / 1000 == pytest.approx(0.95, abs=0.02)  # three standard errors


@pytest.mark.parametrize("count", [8, 12, 40])
@pytest.mark.parametrize("kind", ["tau", "unpaired tau", "speed"])
@pytest.mark.each_value
def test_without_a_difference_no_more_intervals_exclude_it_than_they_say(kind, count):
    random = np.random.default_rng(count)
    false = {0.95: 0, 0.995: 0}
    for _ in range(1000):
        ease, again = random.gamma(2, 0.5, (2, count))
        make = speeds if kind == "speed" else prompts
        other = again if kind == "unpaired tau" else ease
        difference = change(make(random, ease), make(random, other), paired=kind != "unpaired tau")
        for level in false:
            low, high = difference.interval(level)[1:]
            false[level] += not low <= 0 <= high
    for level, times in false.items():
        luck = 3 * np.sqrt(level * (1 - level) / 1000)
        assert times / 1000 <= 1 - level + luck


def test_totals_of_prompts_add_up_to_the_published_figures():
    rows = [
        # request, emitted, accepted, nodes, expected
        (0, 3, 2, 4, 2.5),
        (0, 1, 0, 4, 1.9),
        (1, 5, 4, 4, 3.1),
    ]
    columns = ["request", "emitted_kept", "accepted", "nodes", "expected_emitted"]
    steps = pd.DataFrame(rows, columns=columns).assign(
        forced=0, forced_accepted=0, forced_emitted_kept=0, emitted=lambda t: t["emitted_kept"], forced_emitted=0
    )
    figures = {
        name: Totals(total["top"].to_numpy(), total["bottom"].to_numpy())
        for name, total in acceptance_totals(steps).items()
    }
    assert set(figures) == set(FIGURES)
    assert len(figures["tau_pooled"].top) == 2
    assert figures["tau_pooled"].figure() == metrics.tau_pooled(steps) == 3.0
    assert figures["expected_tau"].figure() == metrics.expected_tau(steps) == pytest.approx(2.5)
    assert figures["draft_token_rate"].figure() == metrics.draft_token_rate(steps) == 0.5
    assert figures["nodes_per_step"].figure() == 4.0
