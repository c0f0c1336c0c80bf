"""Lenient token verification: it accepts more, at a computable distance from the target."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from spec_lab.core.shape import chain
from spec_lab.verify import Lenient, Token
from tests.distributions.tabular import Outputs, World
from tests.distributions.test_closed_forms import WORLDS, Constant
from tests.distributions.test_lossless import TREES, require_lossless
from tests.verify.test_twins import drafts, joint

DRAWN = pytest.mark.parametrize("drawn", ["iid", "without_replacement", "deterministic"])


class Two(Constant):
    pair = (np.array([0.2, 0.8]), np.array([0.5, 0.5]))


def test_the_distance_to_the_target_in_a_small_case():
    """l = 1/2: token 0 is accepted with 0.2 / 0.25 = 0.8, token 1 always; a rejection emits token 1: (0.4, 0.6)."""
    outputs = Outputs.of_forest(Two(0, v=2), Lenient(0.5), chain(1), "iid")
    first = outputs.exactly[1] + outputs.exactly[2].reshape(2, 2).sum(1)
    assert first == pytest.approx([0.4, 0.6], abs=1e-15)
    assert outputs.tv(1) == pytest.approx(0.2, abs=1e-15)
    assert outputs.accepted == pytest.approx(0.9, abs=1e-15)


@pytest.mark.parametrize("world", WORLDS, ids=lambda w: f"world{w.seed}")
@pytest.mark.parametrize("lenience", [0.2, 0.7])
def test_one_draft_is_accepted_with_the_overlap_of_q_and_p_over_l(world, lenience):
    outputs = Outputs.of_forest(world, Lenient(lenience), chain(1), "iid")
    assert outputs.accepted == pytest.approx(np.minimum(world.q(()), world.p(()) / lenience).sum(), abs=1e-12)


@pytest.mark.parametrize("name", ["[1]", "[2]", "[2,1]", "ragged"])
@DRAWN
@pytest.mark.each_value
def test_smaller_lenience_is_lossier_and_accepts_more(name, drawn):
    world = World(4, plain=True)
    runs = [Outputs.of_forest(world, Lenient(lenience), TREES[name], drawn) for lenience in (1.0, 0.7, 0.3)]
    tv, accepted = [run.tv() for run in runs], [run.accepted for run in runs]
    assert tv[0] < 1e-12 and 1e-3 < tv[1] < tv[2]
    assert accepted[0] + 1e-3 < accepted[1] and accepted[1] + 1e-3 < accepted[2]
    assert all(run.mass == pytest.approx(1, abs=1e-12) for run in runs)


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["[1,1]", "[2,2]"])
@DRAWN
def test_lenience_of_1_is_lossless(name, drawn):
    require_lossless(Outputs.of_forest(World(1), Lenient(1.0), TREES[name], drawn))


@settings(max_examples=100)
@given(case=drafts())
def test_lenience_of_1_equals_token(case):
    draft, p = case
    mine, other = Lenient(1.0)(draft, p), Token()(draft, p)
    np.testing.assert_allclose(joint(draft, mine), joint(draft, other), rtol=0, atol=1e-13)


def test_lenience_declares_whether_it_is_lossless():
    assert Lenient.name == "lenient" and Lenient(1.0).accepts == {"iid", "without_replacement", "deterministic"}
    assert Lenient(1.0).lossless and Lenient(1).lossless and not Lenient(0.999).lossless
