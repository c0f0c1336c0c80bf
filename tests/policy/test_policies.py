"""Decisions of policies, given the outcomes of their drafts."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from spec_lab.core.limit import Limit
from spec_lab.core.randomness import CounterDraws
from spec_lab.policy.bandit import Bandit, Rewards, largest
from spec_lab.policy.costs import DraftCosts, drafter_of
from spec_lab.policy.depths import FixedDepth, Heuristic
from spec_lab.policy.gain import GainOverCost, Rate
from spec_lab.policy.goodput import Goodput
from spec_lab.policy.levels import Levels
from spec_lab.policy.policy import DraftOutcome
from spec_lab.policy.thresholds import Threshold
from spec_lab.propose.best_of import BestOf
from spec_lab.propose.jacobi import Jacobi
from spec_lab.propose.lookahead import Lookahead
from spec_lab.propose.ngram import Ngram, NgramTree
from spec_lab.propose.stop_rules import AdaEdl, Svip
from spec_lab.propose.suffix import Suffix
from spec_lab.propose.suffix_counts import SuffixRules

LINEAR = DraftCosts({200: {1: {0: 1.0, 4: 1.4, 8: 1.8}, 5: {0: 2.0, 4: 4.0, 8: 6.0}}})


def batch(count=1, step=0, seed=0, context=200):
    return SimpleNamespace(
        sequences=[SimpleNamespace(key=(n, 0, step), tokens=[0] * context) for n in range(count)],
        draws=CounterDraws(seed),
    )


def outcome(state, limit, drafted, accepted, live=1):
    return DraftOutcome(state, limit, drafted, drafted, accepted, live)


def play(policy, states, accepts, step=0, seed=0):
    """One step in which sequence n accepts as many tokens as ``accepts[n]`` gives for what is drafted."""
    limits = policy.decide(batch(len(states), step, seed), states)
    outcomes = []
    for state, limit, accepted in zip(states, limits, accepts, strict=True):
        depth = 8 if limit.depth is None else min(8, limit.depth)
        outcomes.append(outcome(state, limit, depth, min(depth, accepted), len(states)))
    policy.learn(outcomes)
    return limits


# Limits and rules


# Depths


def test_a_fixed_depth_is_the_same_in_every_step():
    assert FixedDepth.load(None, None, 3).decide(batch(2), [None, None]) == [Limit(3)] * 2


def test_the_heuristic_adds_two_after_a_draft_that_was_wholly_accepted_and_subtracts_one_after_another():
    policy = Heuristic.load(None, None, start=5, max_depth=8)
    state, depths = policy.init(None), []
    for accepted in (5, 3, 9, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0):
        (limit,) = play(policy, [state], [accepted])
        depths.append(limit.depth)
    assert depths == [5, 7, 6, 8, 8, 7, 6, 5, 4, 3, 2, 1, 1]


def test_a_step_without_a_draft_tells_the_heuristic_nothing():
    policy = Heuristic()
    state = policy.init(None)
    policy.learn([outcome(state, Limit(5), 0, 0)])
    assert policy.decide(batch(), [state]) == [Limit(5)]


# Thresholds


def test_the_controller_follows_the_equations_of_draft_and_verify():
    policy = Threshold.load(None, None, "confidence", 0.4, adapt=True)
    state = policy.init(None)
    threshold, rate = 0.4, None
    for drafted, accepted in [(4, 4), (5, 1), (2, 2), (8, 8), (8, 8), (8, 8), (8, 8)]:
        policy.learn([outcome(state, Limit(None, threshold), drafted, accepted)])
        rate = accepted / drafted if rate is None else 0.5 * rate + 0.5 * accepted / drafted
        threshold = 0.9 * threshold + 0.1 * (threshold + (0.01 if rate < 0.9 else -0.01))
        assert policy.decide(batch(), [state])[0].threshold == pytest.approx(threshold, abs=1e-15)


def test_a_threshold_that_stops_every_draft_falls_again():
    policy = Threshold(AdaEdl(), 0.9, adapt=True)
    state = policy.init(None)
    for _ in range(1000):
        policy.learn([outcome(state, Limit(), 0, 0)])
    assert policy.decide(batch(), [state])[0].threshold == pytest.approx(0.0, abs=1e-3)


# Costs


def test_costs_are_interpolated_between_what_was_timed_and_go_on_beyond_it():
    assert LINEAR.of(0) == 1.0
    assert LINEAR.of(2) == pytest.approx(1.2)
    assert LINEAR.of(16) == pytest.approx(2.6)
    assert LINEAR.of(4, 3) == pytest.approx((1.4 + 4.0) / 2)
    assert LINEAR.of(4, 9) == pytest.approx(4.0 + 2.6)


def test_costs_are_interpolated_between_contexts_and_go_on_beyond_them():
    costs = DraftCosts({100: {1: {0: 1.0, 4: 2.0}}, 200: {1: {0: 2.0, 4: 3.0}}})
    assert [costs.of(0, context=context) for context in (50, 100, 150, 300)] == [1.0, 1.0, 1.5, 3.0]
    assert costs.of(2, context=150) == pytest.approx(2.0)


# Goodput


def best_in_hindsight(costs, live, accept, most):
    """The depth of the most expected tokens per second if every level is accepted with the same probability."""
    tokens = lambda k: sum(accept**i for i in range(k + 1))  # noqa: E731
    return max(range(most + 1), key=lambda k: live * tokens(k) / costs.of(k, live))


@pytest.mark.parametrize("accept", [0.05, 0.4, 0.7, 0.95])
@pytest.mark.parametrize("live", [1, 4])
@pytest.mark.parametrize("scope", ["run", "request"])
@pytest.mark.each_value
def test_goodput_finds_the_depth_of_the_most_tokens_per_second(accept, live, scope):
    """Where acceptance is the same at every level, by simulation."""
    random = np.random.default_rng(0)
    policy = Goodput(LINEAR, 8, Levels.none(8), memory=0.995, scope=scope)
    states, chosen = [policy.init(None) for _ in range(live)], []
    for step in range(600):
        accepts = [int(np.argmin(np.append(random.random(8) < accept, False))) for _ in states]
        limits = play(policy, states, accepts, step)
        chosen += [limit.depth for limit in limits]
        if scope == "run":
            assert len(set(limits[1:])) <= 1, "one depth for the whole batch, but for a trial of a deeper one"
    alone = 1 if scope == "request" else live
    best = best_in_hindsight(LINEAR, alone, accept, 8)
    rate = lambda k: sum(accept**i for i in range(k + 1)) / LINEAR.of(k, alone)  # noqa: E731
    assert np.mean([rate(k) for k in chosen[len(chosen) // 2 :]]) > 0.96 * rate(best)


COSTLY = DraftCosts({200: {1: {0: 1.0, 1: 1.8, 4: 3.0}, 4: {0: 2.0, 1: 3.6, 4: 6.0}}})
"""As llama.cpp computes SmolLM2 in 4 bits on two cores."""


@pytest.mark.parametrize("scope", ["run", "request"])
def test_a_depth_that_was_given_up_is_tried_one_level_deep_after_waits_that_double(scope):
    policy = Goodput(COSTLY, 4, Levels.none(4), scope=scope)
    state, depths = policy.init(None), []
    for step in range(1500):
        depths.append(play(policy, [state], [0], step)[0].depth)
    tried = np.flatnonzero(depths)
    assert set(depths) == {0, 1}
    assert np.diff(tried).tolist() == [
        21,
        41,
        81,
        161,
        321,
        321,
        321,
    ]  # a hundredth of the time; at last a quarter of it
    spent = sum(COSTLY.of(depth) for depth in depths)
    assert spent < 1.01 * len(depths) * COSTLY.of(0)


def test_a_trial_is_deeper_where_the_first_row_costs_most():
    """One level alone would not pay unless it was always accepted."""
    costs = DraftCosts({200: {1: {0: 1.0, 1: 1.8, 4: 2.1, 8: 4.0}}})
    policy = Goodput(costs, 8, Levels.none(8), prior=0.1)
    state = policy.init(None)
    assert {play(policy, [state], [0], step)[0].depth for step in range(100)} == {0, 3}


def test_where_nothing_is_drafted_a_trial_drafts_for_one_sequence_of_a_batch():
    policy = Goodput(COSTLY, 4, Levels.none(4))
    states = [policy.init(None) for _ in range(4)]
    limits = [[limit.depth for limit in play(policy, states, [0] * 4, step)] for step in range(40)]
    assert {tuple(depths) for depths in limits} == {(0, 0, 0, 0), (1, 0, 0, 0)}


STEEP = DraftCosts({200: {1: {0: 1.0, 1: 1.2, 4: 2.4}, 4: {0: 2.0, 1: 2.4, 4: 4.8}}})
"""Where the first level is always accepted and the second never, one level is best: 2 / 1.2 tokens per second."""


def test_where_a_batch_drafts_a_trial_is_of_all_its_sequences_and_comes_as_many_times_later():
    policy = Goodput(STEEP, 4, Levels.none(4))
    states = [policy.init(None) for _ in range(4)]
    limits = [[limit.depth for limit in play(policy, states, [1] * 4, step)] for step in range(300)]
    assert {tuple(depths) for depths in limits} == {(1, 1, 1, 1), (2, 2, 2, 2)}
    deeper = np.flatnonzero([depths[0] == 2 for depths in limits]).tolist()
    assert deeper == [1, 17, 52, 120, 255], "step 1 is no trial; the waits are 4 x 1/8, 1/4, ... of 33 steps"


@pytest.mark.parametrize(("accepts", "pays"), [([2, 2, 1, 1], False), ([2, 2, 2, 1], True)])
def test_a_trial_of_a_batch_pays_by_the_tokens_of_all_its_sequences(accepts, pays):
    """10 or 11 tokens in 3.2 s, against 8 in 2.4 s."""
    policy = Goodput(STEEP, 4, Levels.none(4))
    states = [policy.init(None) for _ in range(4)]
    for step in range(17):
        play(policy, states, [1] * 4, step)
    assert [limit.depth for limit in play(policy, states, accepts, 17)] == [2] * 4
    assert policy.shared.trial.at_once == pays


def test_a_depth_that_follows_the_number_of_sequences_does_not_shorten_the_wait():
    """One sequence drafts four levels where four draft none."""
    costs = DraftCosts({200: {1: {0: 1.0, 4: 1.2}, 4: {0: 2.0, 4: 12.0}}})
    policy = Goodput(costs, 4, Levels.none(4))
    states = [policy.init(None) for _ in range(4)]
    policy.shared.trial.wait = 4.0
    depths = [policy.decide(batch(live), states[:live])[-1].depth for live in (4, 1, 4, 1)]
    assert depths == [0, 4, 0, 4]
    assert policy.shared.trial.wait == 4.0


def test_a_look_up_that_finds_nothing_is_no_trial():
    policy = Goodput(COSTLY, 4, Levels.none(4))
    state, depths = policy.init(None), []
    for _ in range(30):
        (limit,) = policy.decide(batch(), [state])
        depths.append(limit.depth)
        policy.learn([outcome(state, limit, 0, 0)])
    assert depths == [0] * 10 + [1] * 20


@pytest.mark.parametrize("scope", ["run", "request"])
def test_trials_that_pay_lead_to_the_best_depth_in_a_few_steps(scope):
    """The text changes: nothing of a draft was accepted, then all of it."""
    policy = Goodput(COSTLY, 4, Levels.none(4), scope=scope)
    state = policy.init(None)
    for step in range(400):
        play(policy, [state], [0], step)
    depths = [play(policy, [state], [4], step)[0].depth for step in range(400)]
    first = np.flatnonzero(depths)[0]
    assert depths[first + 20 :] == [4] * (380 - first)


def test_a_new_request_shortens_the_wait():
    policy = Goodput(COSTLY, 4, Levels.none(4))
    for request in range(3):
        state = policy.init(None)
        depths = [play(policy, [state], [0], step)[0].depth for step in range(300)]
        assert request == 0 or np.flatnonzero(depths)[0] <= 40


def test_levels_that_are_seldom_drafted_cost_little():
    """A look-up that finds nothing costs nothing, so that its depth need not be limited."""
    dear = DraftCosts({200: {1: {0: 1.0, 4: 1.8}}})
    policy = Goodput(dear, 4, Levels.none(4), prior=0.3, scope="request")
    often, seldom = policy.init(None), policy.init(None)
    for step in range(80):
        policy.learn([outcome(often, Limit(4), 4, 4 if step % 8 == 0 else 0)])
        policy.learn([outcome(seldom, Limit(4), 4 if step % 8 == 0 else 0, 4 if step % 8 == 0 else 0)])
    assert policy.best([often]) == 0
    assert policy.best([seldom]) >= 3


def test_a_run_forgets_what_it_has_learned():
    policy = Goodput(LINEAR, 4, Levels.none(4))
    before = policy.best([policy.init(None)])
    for step in range(30):
        play(policy, [policy.init(None)], [0], step)
    assert policy.best([policy.init(None)]) != before
    policy.forget()
    assert policy.best([policy.init(None)]) == before


def test_goodput_pays_for_the_levels_that_a_rule_lets_draft():
    """Where drafts mostly end early, deeper limits cost little, so they are chosen."""
    chosen = []
    for drafted in (1, 8):
        policy = Goodput(LINEAR, 8, Levels.none(8), memory=1.0, stop=Svip(), threshold=0.3)
        state = policy.init(None)
        for number in range(300):
            long = number % 10 == 0
            policy.learn([outcome(state, Limit(8, 0.3), 8 if long else drafted, 8 if long else 0)])
        (limit,) = policy.decide(batch(), [state])
        assert limit.threshold == 0.3
        chosen.append(limit.depth)
    assert chosen[0] > chosen[1]


# Gain


def test_the_threshold_of_a_gain_is_the_tokens_that_the_seconds_of_a_node_are_worth():
    costs = DraftCosts({200: {1: {0: 1.0, 1: 1.8}}})
    policy = GainOverCost(costs, 8, Rate(), scale=0.5, memory=1.0)
    state = policy.init(None)
    for _ in range(2000):
        policy.learn([outcome(state, Limit(), 4, 2)])
    (limit,) = policy.decide(batch(), [state])
    assert limit.depth is None
    assert limit.threshold == pytest.approx(0.1 * (3 / 1.4) / 0.5, rel=1e-2)


# Bandits


def arms(*depths):
    return tuple(Limit(depth) for depth in depths)


def bandit(*depths, **options):
    return Bandit(arms(*depths), {"": LINEAR}, Rewards.none(len(depths)), **options)


def simulate(policy, acceptance, steps=800, live=1, seed=0):
    """Pulls of each configuration where every drafted token is accepted with the same probability."""
    random, counts = np.random.default_rng(1), np.zeros(len(policy.arms), dtype=int)
    states = [policy.init(None) for _ in range(live)]
    for step in range(steps):
        accepts = random.geometric(1 - acceptance, live) - 1
        for limit in play(policy, states, accepts, step, seed):
            counts[policy.arms.index(limit)] += 1
    return counts


@pytest.mark.parametrize("rule", ["ucb", "thompson"])
@pytest.mark.parametrize("scope", ["run", "request"])
@pytest.mark.parametrize(("acceptance", "best"), [(0.05, 0), (0.5, 2), (0.95, 8)])  # speed-ups 1; 1.46; 4.1
@pytest.mark.each_value
def test_the_best_configuration_is_chosen_most_often(rule, scope, acceptance, best):
    counts = simulate(bandit(0, 2, 8, rule=rule, scope=scope), acceptance, 400)
    assert (0, 2, 8)[counts.argmax()] == best
    assert counts.max() > 0.7 * counts.sum()


def test_a_run_has_one_configuration_for_its_batch_and_requests_have_their_own():
    run, request = bandit(0, 2, 4), bandit(0, 2, 4, scope="request")
    for policy, chosen in ((run, [4, 4]), (request, [4, 0])):
        states = [policy.init(None) for _ in "ab"]
        states[1].add(2, 1, 1.4)
        states[1].add(1, 1, 1.2)
        assert [limit.depth for limit in policy.decide(batch(2), states)] == chosen


def test_a_step_also_tells_what_smaller_depths_with_its_threshold_would_have_brought():
    known = (Limit(1, 0.2), Limit(2, 0.2), Limit(4, 0.2), Limit(2, 0.5))
    policy = Bandit(known, {"": LINEAR}, Rewards.none(4), stop=AdaEdl())
    policy.learn([outcome(None, Limit(2, 0.2), 2, 2)])
    assert policy.shared.steps.tolist() == [1, 1, 0, 0]
    assert policy.shared.tokens.tolist() == [2, 3, 0, 0]
    assert policy.shared.cost.tolist() == pytest.approx([1.1, 1.2, 0, 0])
    policy.learn([outcome(None, Limit(4, 0.2), 3, 0)])  # the rule stopped it after three tokens
    assert policy.shared.steps.tolist() == [2, 2, 1, 0]
    assert policy.shared.tokens.tolist() == [3, 4, 1, 0]
    assert policy.shared.cost.tolist() == pytest.approx([2.2, 2.4, 1.3, 0])


def test_the_deepest_of_the_configurations_without_an_observation_is_chosen_first():
    policy = bandit(0, 8, 2)
    assert play(policy, [None], [8]) == [Limit(8)]
    assert policy.shared.steps.tolist() == [1, 1, 1]


def test_upper_confidence_bounds_count_the_steps_of_each_configuration():
    """With the steps of all of them in the denominator nothing would be explored."""
    policy = bandit(0, 8)
    for _ in range(2):
        policy.shared.add(1, 1, 1.0)
    for _ in range(98):
        policy.shared.add(0, 3, 2.0)
    index = [1.5 + 0.5 * math.sqrt(math.log(98) / 98), 1.0 + 0.5 * math.sqrt(math.log(98) / 2)]
    assert index[1] > index[0]
    assert policy.decide(batch(), [None]) == [Limit(8)]
    assert replace(policy, exploration=0.2).decide(batch(), [None]) == [Limit(0)]


def test_the_speed_up_of_a_configuration_is_its_tokens_over_its_seconds():
    policy = bandit(0, 4)
    for tokens, cost in ((1, 1.0), (5, 1.4), (3, 1.2)):
        policy.shared.add(1, tokens, cost)
    policy.shared.add(0, 1, 1.0)
    rate = 9 / 3.6
    residuals = np.array([1 - rate, 5 - 1.4 * rate, 3 - 1.2 * rate])
    assert policy.shared.speedup.tolist() == pytest.approx([1.0, rate])
    assert policy.shared.deviation.tolist() == pytest.approx([0.0, np.sqrt((residuals**2).mean()) / 1.2])


def test_the_probabilities_to_be_the_largest_are_those_of_samples():
    mean, spread = np.array([1.0, 1.3, 0.2]), np.array([0.5, 0.1, 1.5])
    samples = np.random.default_rng(0).normal(mean, spread, (200_000, 3)).argmax(1)
    assert largest(mean, spread) == pytest.approx(np.bincount(samples) / len(samples), abs=0.005)
    assert largest(np.array([0.0, 50.0]), np.array([0.1, 0.1])) == pytest.approx([0.0, 1.0])
    assert largest(np.array([2.0, 2.0]), np.array([0.3, 0.3])) == pytest.approx([0.5, 0.5])


def test_thompson_sampling_is_keyed_by_the_seed_of_the_run():
    first, again, other = (simulate(bandit(0, 2, 4, rule="thompson"), 0.5, 60, seed=seed) for seed in (0, 0, 1))
    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()


@pytest.mark.parametrize(
    ("load", "options", "named"),
    [
        (Heuristic, {"start": 30}, "start must be at most max_depth=20"),
        (Threshold, {"rule": "svip", "threshold": 0.2, "adapt": True}, "^adapt: "),
        (Threshold, {"rule": "confidence", "threshold": 0.2, "factor": 1.0}, "^factor is"),
        (Goodput, {"depth": 4, "stop": "svip"}, "^threshold is that of stop"),
        (Goodput, {"depth": 4, "threshold": 0.3}, "^threshold is that of stop"),
        (Bandit, {"depths": [3]}, "^depths, thresholds and parts"),
        (Bandit, {"depths": [1, 2], "thresholds": [0.1]}, "^thresholds are those of stop"),
        (Bandit, {"depths": list(range(65))}, "at most|64"),
        (Bandit, {"depths": [1, 1, 4]}, "^depths, thresholds and parts"),
    ],
    ids=str,
)
def test_wrong_options_are_named(load, options, named):
    with pytest.raises(ValueError, match=named):
        load.load(None, None, **options)


@pytest.mark.parametrize(
    ("proposer", "other"),
    [
        (Ngram(4, 3, 1), Ngram(4, 3, 2)),
        (Ngram(4, 3, 1), Ngram(4, 3, 1, "first")),
        (NgramTree(8, 4, 3, 1), NgramTree(8, 2, 3, 1)),
        (Lookahead(4, 3, 3), Lookahead(2, 4, 3)),
        (Suffix(SuffixRules(nodes=8)), Suffix(SuffixRules(nodes=8, min_share=0.5))),
        (BestOf.load(None, {"a": Ngram(4, 3, 1), "b": Jacobi(4)}), BestOf.load(None, dict(a=Jacobi(4), b=Jacobi(3)))),
    ],
    ids=lambda policy: policy.name,
)
def test_proposers_with_other_options_do_not_share_measured_costs(proposer, other):
    assert json.dumps(drafter_of(proposer), sort_keys=True) != json.dumps(drafter_of(other), sort_keys=True)


@pytest.mark.parametrize(
    ("load", "options", "says"),
    [
        (Bandit, {"depths": [1, 2], "parts": ["heads"]}, "names the part heads, but proposer 'ngram' does not choose"),
    ],
    ids=str,
)
def test_a_proposer_that_a_policy_cannot_guide_is_refused_before_costs_are_measured(load, options, says):
    with pytest.raises(ValueError, match=says):
        load.load(None, Ngram(4, 3, 1), **options)  # without a target nothing could be measured


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"depth": -1}', '{"depth": true}', '{"depth": 1.5}', '{"more": 1}', '{"part": 3}', None, 7]
)
def test_what_is_no_limit_is_refused(text):
    with pytest.raises(ValueError, match="not a policy's decision"):
        Limit.parse(text)
