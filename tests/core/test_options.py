"""Checks of options: each has a lower and an upper bound, and a message that stays short."""

from dataclasses import replace

import pytest

from spec_lab.constrain.controllers import candidates, template
from spec_lab.core.options import MAX_CHARACTERS, MAX_STRINGS, strings, whole
from spec_lab.decode.proposer import Proposer
from spec_lab.tasks.lab import MOST_NODES, Lab
from spec_lab.verify import Lenient, Relaxed
from tests.constrain.parts import toy
from tests.labs import lab, settings

HUGE = 10**5000


def test_a_whole_number_may_have_an_upper_bound():
    assert whole("x", 3, most=3) == 3 and whole("x", HUGE) == HUGE
    with pytest.raises(ValueError, match="x .*at most 3.* 4"):
        whole("x", 4, otherwise=", or null", most=3)
    with pytest.raises(ValueError, match="x .*at most 3.* 16610 bits"):
        whole("x", HUGE, most=3)


def test_lists_of_texts_are_bounded():
    assert len(strings("x", ["a"] * MAX_STRINGS)) == MAX_STRINGS
    for value in (["a"] * (MAX_STRINGS + 1), ["a" * (MAX_CHARACTERS + 1)]):
        with pytest.raises(ValueError, match="^x has .* at most") as error:
            strings("x", value)
        assert len(str(error.value)) < 200
    with pytest.raises(ValueError, match="^x .*list") as error:
        strings("x", "a" * 10**6)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("name", ["batch_size", "max_new_tokens", "warmup", "max_prompt_tokens", "threads", "seed"])
@pytest.mark.parametrize("value", [-1, 2**63, HUGE, 1.5, "8"], ids=["-1", "2**63", "huge", "1.5", "text"])
def test_a_run_s_sizes_are_bounded(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        replace(settings(tmp_path), **{name: value})


def test_the_nodes_of_a_step_are_bounded(tmp_path):
    made = lab()
    wide = replace(made, proposer=Many())
    assert isinstance(wide, Lab)
    wide.arms(replace(settings(tmp_path), batch_size=MOST_NODES // Many.nodes))
    with pytest.raises(ValueError, match="batch_size=17 .*1024 nodes"):
        wide.arms(replace(settings(tmp_path), batch_size=17))


class Many(Proposer):
    name, drawn, nodes = "many", "point", 1024


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: Relaxed(top=HUGE, delta=0.5), r"verifier\.top"),
        (lambda: Lenient(1e-300), r"verifier\.lenience"),
        (lambda: candidates.load(toy(), count=65), r"constraint\.count must be at most 64"),
        (lambda: template.load(toy(), ["a"] * 1001), r"constraint\.parts has 1001 parts"),
        (lambda: template.load(toy(), "abc"), r"constraint\.parts must be a list"),
        (lambda: template.load(toy(), [{"most": HUGE}]), r"constraint\.parts\[0\]\.most must be at most"),
        (lambda: template.load(toy(), ["a" * 200_000]), r"constraint\.parts has 200000 characters"),
    ],
)
def test_options_of_verifiers_and_controllers_are_bounded(make, option):
    with pytest.raises(ValueError, match=f"^{option}"):
        make()
