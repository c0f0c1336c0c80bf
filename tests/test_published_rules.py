"""The rules of ``experiments/published_rules``: their distributions are those of the procedures they stand for."""

import numpy as np
import pytest
import torch

from experiments.published_rules.measure import Beside, on_toys
from experiments.published_rules.rules import PlainBonus, SampledPaths, last_tokens, next_tokens
from spec_lab.core.draft import Draft, Shape
from spec_lab.verify import Match

V = 5
SHAPE = Shape(1, np.array([0, 0, 1, 1, 2]))  # two children; two below the first, one below the second
TOKENS = [1, 3, 0, 2, 4]


def example():
    p = torch.from_numpy(np.random.default_rng(3).dirichlet(np.ones(V), SHAPE.rows))
    return Draft(SHAPE, torch.tensor(TOKENS)), p


def drawn(p, random):
    """One step as the published code takes it: (row at which the path ends, the token after it)."""
    paths, best = ([0, 1, 3], [0, 1, 4], [0, 2, 5]), [0]
    for path in paths:
        length = 0
        while length < 2 and random.choice(V, p=p[path[length]]) == TOKENS[path[length + 1] - 1]:
            length += 1
        best = max(best, path[: length + 1], key=len)  # the first of equals
    return best[-1], random.choice(V, p=p[best[-1]])


@pytest.mark.nightly
def test_the_rule_of_sampled_paths_has_the_distribution_of_its_procedure():
    draft, p = example()
    verdict, random, count = SampledPaths()(draft, p), np.random.default_rng(0), 20_000
    ends = np.bincount([drawn(p.numpy(), random)[0] for _ in range(count)], minlength=SHAPE.rows) / count
    assert verdict.stop == pytest.approx(ends, abs=0.015)
    assert verdict.stop.sum() == pytest.approx(1.0)
    for row in range(SHAPE.rows):
        assert last_tokens(verdict, row) == pytest.approx(p[row].numpy())


def test_the_next_token_of_a_lossless_rule_has_the_target_s_distribution():
    draft, p = example()
    assert next_tokens(Match()(draft, p), SHAPE, TOKENS, 0, V) == pytest.approx(p[0].numpy())
    assert np.abs(next_tokens(SampledPaths()(draft, p), SHAPE, TOKENS, 0, V) - p[0].numpy()).sum() > 0.1


def test_a_bonus_from_raw_logits_differs_at_the_ends_of_paths_only():
    draft, p = example()
    verdict = PlainBonus(0.5)(draft, p)
    assert next_tokens(verdict, SHAPE, TOKENS, 0, V) == pytest.approx(p[0].numpy())
    raw = p[3].sqrt() / p[3].sqrt().sum()
    assert last_tokens(verdict, 3) == pytest.approx(raw.numpy())
    assert PlainBonus(1.0)(draft, p).residual(np.array([3]))[0].numpy() == pytest.approx(p[3].numpy())


@pytest.mark.nightly
def test_enumeration_finds_which_rules_are_lossless():
    found = on_toys(0.5).set_index("rule")["largest"]
    assert found[["token verification", "sample and match"]].max() < 1e-12
    assert found[["typical acceptance", "paths drawn apart", "bonus from raw logits"]].min() > 0.1


def test_measuring_beside_a_verifier_does_not_change_it():
    draft, p = example()
    beside = Beside({"sampled": SampledPaths(), "exact": Match()})
    assert beside(draft, p).stop == pytest.approx(Match()(draft, p).stop)
    assert beside.found["exact"][0][:2] == pytest.approx((0.0, 0.0), abs=1e-12)
    assert beside.found["sampled"][0][0] > 0.05
