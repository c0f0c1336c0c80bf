"""DIVERSED's static form is exact for its mixture, whose distance from the target and acceptance are known exactly."""

import numpy as np
import pytest
import torch

from spec_lab.core.shape import chain
from spec_lab.verify import Diversed
from spec_lab.verify.aimed import allowed
from tests.distributions.tabular import Outputs, World
from tests.distributions.test_lossless import TREES, WORLDS, require_lossless


def mixtures(world, weight, depth):
    """The distribution of each token, by length: the mixture at rows of a tree that are expanded, p at its leaves."""
    every = []
    for length in range(depth):
        p, q = (torch.from_numpy(values) for values in world.probabilities(length))
        every.append((weight * p + (1 - weight) * allowed(q, p)).numpy())
    return [*every, world.probabilities(depth)[0]]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("world", WORLDS, ids=lambda w: f"world{w.seed}")
@pytest.mark.parametrize("name", ["[1,1]", "[2]", "[2,2]"])
@pytest.mark.parametrize("drawn", ["iid", "without_replacement"])
def test_the_output_has_the_mixture_s_distribution(world, name, drawn):
    outputs = Outputs.of_forest(world, Diversed(0.3), TREES[name], drawn)
    outputs.distributions = mixtures(world, 0.3, int(TREES[name].depth.max()))
    require_lossless(outputs)


@pytest.mark.parametrize("weight", [0.0, 0.4, 1.0])
def test_distance_and_acceptance_are_those_of_the_paper(weight):
    world = World(6, support=4, plain=True)
    apart = 0.5 * np.abs(world.p(()) - world.q(())).sum()
    outputs = Outputs.of_forest(world, Diversed(weight), chain(1), "iid")
    assert outputs.tv(1) == pytest.approx((1 - weight) * apart, abs=1e-12)
    assert outputs.accepted == pytest.approx(1 - weight * apart, abs=1e-12)


def test_weight_1_is_lossless_and_says_so():
    assert Diversed(1.0).lossless and not Diversed(0.99).lossless
    require_lossless(Outputs.of_forest(World(1), Diversed(1.0), TREES["[2,1]"], "iid"))
