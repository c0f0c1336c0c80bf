"""The target's embedding, final norm and LM head compute what transformers' own modules compute."""

from typing import Any

import pytest
import torch

from spec_lab.models.services import ModelServices
from spec_lab.models.support import Unsupported
from spec_lab.models.target import Target
from tests.checkpoints import checkpoint
from tests.tiny import DENSE_ONLY, FAMILIES, tiny_model

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
SCALED = {"cohere", "granite"}
"""Families that scale the logits outside of the LM head."""


def run(model: Any, services: ModelServices) -> tuple[torch.Tensor, Any]:
    """The final norm's input, and transformers' output."""
    read: list[torch.Tensor] = []
    hook = services._final_norm().register_forward_pre_hook(lambda _, given: read.append(given[0]))
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        output = model(input_ids=TOKENS, output_hidden_states=True, use_cache=False)
    hook.remove()
    return read[0], output


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_loaded_checkpoint_offers_transformers_own_modules(tmp_path, family):
    services = Target.load(str(checkpoint(tmp_path, torch.float64, family=family)), dtype="float64").services
    assert isinstance(services, ModelServices)
    config = services.model.config
    assert (services.hidden_size, services.num_layers) == (config.hidden_size, config.num_hidden_layers) == (32, 2)
    read, output = run(services.model, services)
    assert torch.equal(services.embed(TOKENS), output.hidden_states[0])
    assert torch.equal(services.final_norm(read), output.hidden_states[-1])
    assert torch.equal(services.lm_head(output.hidden_states[-1]), output.logits)


@pytest.mark.parametrize("family", sorted(FAMILIES | DENSE_ONLY))
def test_final_norm_and_lm_head_are_found_in_every_family(family):
    model = tiny_model(family)
    services = ModelServices(model)
    read, output = run(model, services)
    logits = services.lm_head(services.final_norm(read))
    if family in SCALED:  # by one factor
        logits = logits * (output.logits[0, 0, 0] / logits[0, 0, 0])
    assert torch.allclose(logits, output.logits, rtol=1e-12)
    assert services.embed(TOKENS).shape == (*TOKENS.shape, services.hidden_size)


def test_a_model_without_a_known_final_norm_is_refused():
    model = tiny_model()
    del model.model.norm
    with pytest.raises(Unsupported, match="'llama' .*final norm"):
        ModelServices(model).final_norm(torch.zeros(1, 32))
