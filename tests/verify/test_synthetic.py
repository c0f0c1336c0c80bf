"""Synthetic acceptance: the given rates exactly, a known distance from the target, and marks where text is shown."""

import numpy as np
import pytest

from spec_lab.analysis.text import losslessness
from spec_lab.core.options import WrongOption
from spec_lab.core.probabilities import Sampling
from spec_lab.core.shape import chain
from spec_lab.verify import Synthetic
from tests.distributions.tabular import Outputs, World
from tests.distributions.test_lossless import TREES
from tests.propose.lab import decode, draft_model, requests
from tests.tiny import tiny_target
from tests.verify.test_device import on_device
from tests.verify.test_fly import a_draft

RATES = (0.75, 0.5, 0.125)


def test_rates_are_met_whatever_p_and_q_are():
    for drawn in ("iid", "deterministic"):
        for name, accepted in (("[1]", 0.75), ("[1,1]", 1.25), ("[1,1,1]", 1.375), ("[2,2]", 1.25), ("ragged", 1.375)):
            outputs = Outputs.of_forest(World(4), Synthetic(RATES), TREES[name], drawn)
            assert outputs.accepted == pytest.approx(accepted, abs=1e-12)
            assert outputs.mass == pytest.approx(1, abs=1e-12)
    deep = Outputs.of_forest(World(6, support=4, plain=True), Synthetic((0.5,)), chain(3), "iid")
    assert deep.accepted == pytest.approx(0.5, abs=1e-12)


def test_the_code_for_devices_has_the_same_stops():
    draft, p = a_draft("iid")
    on_device(Synthetic(RATES), draft, p, np.arange(draft.shape.rows))


def test_the_first_token_is_off_by_the_rate_times_the_distance():
    world = World(6, support=4, plain=True)
    apart = 0.5 * np.abs(world.p(()) - world.q(())).sum()
    outputs = Outputs.of_forest(world, Synthetic(RATES), chain(1), "iid")
    assert outputs.tv(1) == pytest.approx(0.75 * apart, abs=1e-12)


def test_at_temperature_0_tokens_are_accepted_as_well():
    _, steps = decode(
        tiny_target(), draft_model("1x1x1", "deterministic"), requests(Sampling(), new=9), Synthetic((1, 1, 1))
    )
    drafted = [info.draft.shape.nodes for info in steps]
    accepted = [sum(len(done.path) for done in info.committed) for info in steps]
    assert accepted == drafted and sum(drafted) > 6


def test_its_text_is_marked_and_rising_rates_are_refused():
    arm = {"lossless": False, "invalid_text": True, "verifier": Synthetic.name, "certificate": {}}
    assert losslessness(arm)[0] == "INVALID TEXT" and Synthetic().invalid_text
    with pytest.raises(WrongOption, match="rates must not rise"):
        Synthetic((0.5, 0.6))
    with pytest.raises(WrongOption, match="rates.1. must be"):
        Synthetic((0.5, 1.6))
