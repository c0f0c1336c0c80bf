"""Draws that enumerate: every outcome once, with its probability, in batches of any size."""

from collections import Counter

import numpy as np
import pytest
import torch

from spec_lab.core.randomness import CounterDraws, Key, Purpose
from spec_lab.tasks.certify.enumeration import (
    Continuous,
    Reused,
    Script,
    Scripts,
    TooMany,
    Watched,
    explore,
    side_by_side,
)

AFTER = np.array([[9.0, 9.0, 9.0], [0.5, 0.25, 0.25], [7.0, 0.0, 0.0]])
"""Weights of the next token after each token; a text begins as after 1. After 2 there is no choice."""


def keyed(request, number):
    return Key(request, 0, number, Purpose.EMIT)


def decode(draws, count):
    """Texts of ``count`` requests that end at 0 or three tokens; the weights depend on the last token."""
    texts = [[] for _ in range(count)]
    for number in range(3):
        live = [n for n, text in enumerate(texts) if not text or text[-1]]
        if live:
            weights = torch.tensor(np.array([AFTER[texts[n][-1] if texts[n] else 1] for n in live]))
            for n, token in zip(live, draws.pick(weights, [keyed(n, number) for n in live]), strict=True):
                texts[n].append(int(token))
    return [tuple(text) for text in texts]


BY_HAND = {
    (0,): 0.5,
    (1, 0): 0.25 * 0.5, (1, 1, 0): 0.25 * 0.25 * 0.5, (1, 1, 1): 0.25**3, (1, 1, 2): 0.25**3,
    (1, 2, 0): 0.25 * 0.25,
    (2, 0): 0.25,
}  # fmt: skip


@pytest.mark.parametrize("wide", [1, 2, 3, 256])
def test_every_outcome_comes_once_with_its_probability(wide):
    outcomes = list(side_by_side(decode, wide))
    assert Counter(text for _, text in outcomes) == Counter(list(BY_HAND))
    assert {text: mass for mass, text in outcomes} == pytest.approx(BY_HAND)
    assert sum(mass for mass, _ in outcomes) == pytest.approx(1, abs=1e-15)


def test_side_by_side_is_what_explore_finds_one_by_one():
    alone = sorted(explore(lambda draws: decode(draws, 1)[0]))
    for wide in (2, 5, 256):
        assert sorted((mass, outcome) for mass, outcome in side_by_side(decode, wide)) == alone


def test_the_width_limits_the_batch():
    sizes = []

    def play(draws, count):
        sizes.append(count)
        return [draws.pick(torch.ones((count, 3)), [keyed(n, 0) for n in range(count)])] * count

    assert len(list(side_by_side(play, wide=2))) == 3
    assert sizes == [1, 2]


def test_one_script_makes_the_choices_of_every_request():
    """``explore`` plays whole batches."""
    outcomes = list(explore(lambda draws: tuple(draws.pick(torch.ones((2, 2)), [keyed(7, 0), keyed(8, 0)]).tolist())))
    assert sorted(outcomes) == [(0.25, (a, b)) for a in (0, 1) for b in (0, 1)]


def test_weights_need_not_sum_to_one():
    weights = torch.tensor([[3.0, 0.0, 1.0]])
    masses = {int(outcome[0]): mass for mass, outcome in explore(lambda draws: draws.pick(weights, [keyed(0, 0)]))}
    assert masses == pytest.approx({0: 0.75, 2: 0.25})


def test_a_single_possibility_is_no_choice():
    """Whether it is drawn at all may depend on the other requests of the batch; a script must not count it."""
    script = Script((1,))
    assert script.choose(np.array([0.0, 5.0, 0.0]), keyed(0, 0)) == 1
    assert (script.chosen, script.probability) == ([], 1.0)
    assert script.choose(np.array([0.4, 0.6, 0.0]), keyed(0, 1)) == 1  # the prefix begins here
    assert (script.chosen, script.probability) == ([1], 0.6)


def test_a_key_that_is_used_twice_is_found_even_where_there_is_one_possibility():
    def play(draws):
        draws.pick(torch.ones((1, 2)), [keyed(0, 0)])
        draws.pick(torch.tensor([[1.0, 0.0]]), [keyed(0, 0)])

    with pytest.raises(Reused, match="is used for two choices"):
        list(explore(play))


def test_keys_of_other_purposes_steps_branches_and_indices_are_other_choices():
    script, first = Script(), keyed(0, 0)
    for changes in ({}, {"purpose": Purpose.STOP}, {"step": 1}, {"branch": 1}, {"index": 1}):
        script.choose(np.ones(2), first._replace(**changes))


def test_gumbel_noise_is_refused():
    with pytest.raises(Continuous, match="Gumbel noise cannot be enumerated"):
        Scripts([Script()]).race(3, [keyed(0, 0)])


@pytest.mark.parametrize("wide", [1, 2, 256])
def test_more_outcomes_than_allowed_are_refused_and_exactly_as_many_are_not(wide):
    def play(draws, count):
        pairs = [draws.pick(torch.ones((count, 3)), [keyed(n, k) for n in range(count)]) for k in range(2)]
        return list(zip(*pairs, strict=True))

    assert len(list(side_by_side(play, wide, max_outcomes=9))) == 9
    with pytest.raises(TooMany, match="more than 8 outcomes"):
        list(side_by_side(play, wide, max_outcomes=8))


def test_watched_draws_choose_the_same_and_refuse_a_key_used_before():
    draws, keys = Watched(CounterDraws(3)), [Key(0, 0, n, Purpose.EMIT) for n in range(3)]
    weights = torch.ones(3, 5)
    assert draws.pick(weights, keys).tolist() == CounterDraws(3).pick(weights, keys).tolist()
    race = Key(0, 0, 0, Purpose.RACE)
    assert (draws.race(4, [race]) == CounterDraws(3).race(4, [race])).all()
    for again in ([keys[1]], [race], [Key(1, 0, 0, Purpose.STOP)] * 2):
        with pytest.raises(Reused, match="is used for two choices"):
            draws.pick(torch.ones((len(again), 2)), again)


def test_weights_of_which_none_is_positive_are_named():
    with pytest.raises(ValueError, match="none .*positive"):
        Script().choose(np.array([0.0, np.nan]), Key(0, 0, 0, Purpose.EMIT))
