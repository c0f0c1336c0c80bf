"""Drafters that learn from a toy target's own texts agree with it more on texts that they have not seen."""

import pytest
import torch

from spec_lab.train.texts import Texts
from spec_lab.train.trainer import Plan, Trainer
from tests.tiny import VOCABULARY
from tests.train.test_recipes import RECIPES, target  # noqa: F401

STEPS = 40


def own_texts(target, count, length, seed, states):  # noqa: F811
    """Texts that the target samples after a first token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (count, 1), generator=generator)
    with torch.no_grad():
        while ids.shape[1] < length:
            p = target.model(input_ids=ids, use_cache=False).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(p, 1, generator=generator)], 1)
        every = target.model.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    ones = torch.ones(count, dtype=torch.long)
    return Texts(ids, ones, length * ones, torch.cat([every[state] for state in states], -1))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith(("block", "peagle"))])
def test_agreement_on_held_out_texts_grows(name, target):  # noqa: F811
    recipe = RECIPES[name]
    states = recipe.states(target)
    learned, held_out = own_texts(target, 24, 40, 1, states), own_texts(target, 8, 40, 2, states)
    training = recipe.begin(target, [], 0)
    plan = Plan(muon_rate=2e-2, adamw_rate=1e-2, weight_decay=0.0)
    trainer = Trainer(training.module, plan, 1, torch.float32)

    @torch.no_grad()
    def measured():
        levels = training.objective(held_out)[1]
        return [[float(level.agreed), float(level.accepted)] for level in levels]

    before = measured()
    for step in range(STEPS):
        if training.advance is not None:
            training.advance(step / STEPS)
        part = learned.rows(slice(8 * (step % 3), 8 * (step % 3) + 8))
        trainer.update([lambda part=part: training.objective(part)[0]], min(1, (step + 1) / 5))
    for (agreed, accepted), (agreed_before, accepted_before) in zip(measured(), before, strict=True):
        assert agreed > agreed_before + 0.05 and accepted > accepted_before + 0.1


@pytest.mark.parametrize("name", ["peagle", "block of dspark", "block of dflash2", "mtp"])
def test_gradients_under_autocast_are_those_of_float32_roughly(name, target):  # noqa: F811
    recipe = RECIPES[name]
    text, gradients = own_texts(target, 4, 12, 3, recipe.states(target)), []
    for autocast in (None, torch.bfloat16):
        training = recipe.begin(target, [], 0)
        trainer = Trainer(training.module, Plan(clip=1e9), 1, torch.float32, autocast)
        trainer.update([lambda training=training: training.objective(text)[0]], 0.0)
        state = trainer.tensors()
        gradients.append(torch.cat([state[key].flatten() for key in sorted(state) if "momentum" in key]))
    plain, rounded = gradients
    assert torch.isfinite(rounded).all() and not torch.equal(plain, rounded)
    assert float(torch.cosine_similarity(plain, rounded, 0)) > 0.98
