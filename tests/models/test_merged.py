"""Linear layers that read the same input, merged: the same numbers from fewer products."""

import pytest
import torch

from spec_lab.models.merged import merge, plain_weights
from tests.tiny import FAMILIES, tiny_model

BOTH, MLP, NONE = 4, 2, 0  # merged modules of two layers


@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_model_has_the_logits_and_the_parameters_of_the_model(family):
    model = tiny_model(family)
    tokens = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    expected, count = model(tokens).logits, sum(parameter.numel() for parameter in model.parameters())
    changed = merge(model)
    torch.testing.assert_close(model(tokens).logits, expected, rtol=0, atol=1e-10)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    few = {"gpt2": NONE, "gpt_bigcode": NONE, "gpt_neox": NONE, "phi3": NONE}  # their layers are one matrix already
    few["falcon"] = NONE
    some = dict.fromkeys(["phi", "opt", "starcoder2", "biogpt", "gptj"], MLP)  # no gate
    assert changed == (few | some).get(family, BOTH)


def test_layers_with_other_inputs_other_classes_or_one_bias_stay():
    class Low(torch.nn.Linear):
        """A quantised layer would be such a class."""

    def attention(**changes):
        layers = {name: torch.nn.Linear(4, 4, bias=False) for name in ("q_proj", "k_proj", "v_proj")}
        return torch.nn.ModuleDict(layers | changes)

    assert merge(attention()) == 1
    for odd in (torch.nn.Linear(5, 4, bias=False), torch.nn.Linear(4, 4), Low(4, 4, bias=False)):
        module = attention(k_proj=odd)
        assert merge(module) == 0 and module["k_proj"] is odd


@pytest.mark.parametrize("calls", [("up_proj", "gate_proj"), ("gate_proj", "gate_proj", "up_proj")])
def test_layers_are_called_in_any_order_and_with_any_input(calls):
    layers = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in ("gate_proj", "up_proj")})
    x, other = torch.randn(2, 1, 4)
    inputs = [(name, tensor) for tensor in (x, x, other) for name in calls] + [("up_proj", other), ("gate_proj", x)]
    expected = [layers[name](tensor) for name, tensor in inputs]
    merge(layers)
    torch.testing.assert_close([layers[name](tensor) for name, tensor in inputs], expected)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_parameters_of_a_merged_module_have_their_names_from_before(family):
    model, merged = tiny_model(family), tiny_model(family)
    merge(merged)
    before = dict(model.named_parameters())
    after = plain_weights(merged)
    assert set(after) == set(before) and all(torch.equal(after[name], before[name]) for name in before)
