"""What is said before a training: its length and memory, and which tau pays."""

import shutil
from collections import namedtuple

import pytest

from spec_lab.core.probabilities import Sampling
from spec_lab.drafters.medusa.train import MedusaRecipe
from spec_lab.tasks import train_forecast as said
from spec_lab.train.estimate import TrainingNeed
from tests.tiny import tiny_target
from tests.train.test_recipes import RECIPES
from tests.train.texts import files


def test_texts_are_bounded_by_prompts_turns_and_new_tokens():
    texts = said.bounded([(10, 1), (20, 2)], 8, 30, known=False)
    assert texts == said.PlannedTexts(answers=3, new_tokens=24, tokens=18 + 28 + 30, longest=30)
    assert said.bounded([(10, 1), (20, 1)], 8, 30, known=True) == said.PlannedTexts(2, 0, 30, 20)


def test_times_follow_from_the_measured_rate_and_the_disk_from_the_states(tmp_path, monkeypatch):
    monkeypatch.setattr(said, "step_seconds", lambda *_: {0: 0.5})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(100))
    lines = [*said.forecast(said.PlannedTexts(6, 3600, 50, 20), None, 4, Sampling(), 10, tmp_path / "texts")]
    assert "8 tokens per second" in lines[0] and "0:07:30" in lines[0]
    assert "500 bytes" in lines[1] and "100 bytes are free" in lines[1] and len(lines) == 3
    kept = said.forecast(said.PlannedTexts(6, 0, 5, 2), None, 4, Sampling(), 10, tmp_path)
    assert len([*kept]) == 1  # answers that exist take no time
    sentence = said.training_sentence(TrainingNeed(fixed=100, text=50, tokens=20, seconds=4.0), 90, 2, 3, 16)
    assert (
        "10 tokens per second" in sentence and "0:03:00" in sentence and "400 bytes" in sentence and "6 of" in sentence
    )


@pytest.mark.parametrize(("slow", "words"), [(1.5, "1.50 (of 2) with 1, 1.50 (of 3) with 2"), (9.0, "cannot pay")])
def test_the_tau_that_pays_is_the_cost_of_a_step_over_that_without_a_draft(slow, words, monkeypatch):
    target, recipe = tiny_target(), MedusaRecipe(heads=2)
    sizes = []

    def seconds(_, proposers, batch, sampling):
        sizes.extend(proposer.nodes for proposer in proposers.values())
        return {size: 2 * slow if size else 2.0 for size in proposers}

    module = recipe.begin(target, [], 0).module
    with monkeypatch.context() as patch:
        patch.setattr(said, "step_seconds", seconds)
        assert words in said.paying_sentence(recipe, module, target, Sampling())
    assert sizes == [0, 1, 2] and module.training


@pytest.mark.parametrize("name", ["eagle1", "kangaroo", "mtp", "hydra with prefix", "block", "peagle"])
def test_steps_with_an_untrained_drafter_are_timed_after_a_context_that_it_observed(name, tmp_path):
    target, recipe = tiny_target(), RECIPES[name]
    module = recipe.begin(target, files(target, tmp_path / "texts", states=recipe.states(target)), 0).module
    needed = said.paying_lengths(recipe, module, target, Sampling())
    assert max(needed) == recipe.depth and all(tau >= 1 for tau in needed.values())
