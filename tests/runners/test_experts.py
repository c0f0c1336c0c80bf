"""The experts that rows read, by hooks on the experts of a model, against a count by hand."""

import pytest
import torch

from spec_lab.core.draft import Draft, empty
from spec_lab.core.shape import chain, forest
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.experts import expert_modules, why_not_counted
from tests.models.families import EVERY, tiny_family
from tests.tiny import MIXTURES, tiny_mixture, tiny_model

TOKENS = [3, 14, 15, 9, 26, 5, 31]


def by_hand(model, tokens):
    """For each layer and token the experts of the largest router logits, by transformers' own forward."""
    with torch.inference_mode():
        routed = model(torch.tensor([tokens]), use_cache=False, output_router_logits=True).router_logits
    return [[{*row.topk(2).indices.tolist()} for row in layer] for layer in routed]


def chosen(output):
    return [[{*row} for row in layer] for layer in output.experts.numbers.tolist()]


@pytest.mark.parametrize("family", MIXTURES)
def test_the_experts_of_every_row_are_those_of_its_largest_router_logits(family):
    model = tiny_mixture(family)
    expected, lm = by_hand(model, TOKENS), CausalLM(model)
    lm.count_experts(True)
    sequence = lm.open()
    first = lm.forward([sequence], [TOKENS[:4]], empty(1, lm.device))
    assert first.experts.experts == 8
    assert chosen(first) == [layer[:4] for layer in expected]
    drafted = Draft(forest((chain(2),)), torch.tensor(TOKENS[5:]))
    second = lm.forward([sequence], [TOKENS[4:5]], drafted)
    assert chosen(second) == [layer[4:] for layer in expected]
    assert (second.pending_rows, second.node_rows) == ([slice(0, 1)], [slice(1, 3)])


def test_hooks_are_there_only_while_experts_are_counted():
    model = tiny_mixture()
    lm, modules = CausalLM(model), expert_modules(model)
    lm.count_experts(False)
    for on in (True, True, False):
        lm.count_experts(on)
        assert [len(module._forward_pre_hooks) for module in modules] == [on, on]
        output = lm.forward([lm.open()], [TOKENS], empty(1, lm.device))
        assert (output.experts is not None) == on


def test_rows_of_earlier_forwards_of_a_long_prompt_are_not_counted_as_this_one_s():
    lm = CausalLM(tiny_mixture(), chunk=4)
    lm.count_experts(True)
    assert lm.forward([lm.open()], [TOKENS], empty(1, lm.device)).experts is None


def test_calls_of_the_same_modules_by_another_runner_are_not_counted():
    model = tiny_mixture()
    lm, other = CausalLM(model), CausalLM(model)
    lm.count_experts(True)
    other.forward([other.open()], [TOKENS], empty(1, other.device))
    output = lm.forward([lm.open()], [TOKENS[:3]], empty(1, lm.device))
    assert output.experts.numbers.shape == (2, 3, 2)


@pytest.mark.parametrize(
    ("lm", "why"),
    [
        (lambda: CausalLM(tiny_model()), "'llama' has no layers with experts"),
        (lambda: CausalLM(tiny_mixture(), fixed=True), "fixed shapes"),
    ],
)
def test_what_cannot_be_counted_is_refused(lm, why):
    runner = lm()
    with pytest.raises(ValueError, match=why):
        runner.count_experts(True)
    runner.count_experts(False)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [name for name, family in EVERY.items() if "experts" in family.remark])
def test_families_with_experts_are_counted_but_for_llama_4_which_computes_all_experts_of_every_row(name):
    model = tiny_family(name)
    assert (name == "llama4_text") == ("has no layers with experts" in why_not_counted(model))
    if name != "llama4_text":
        lm = CausalLM(model)
        lm.count_experts(True)
        index = lm.forward([lm.open()], [TOKENS], empty(1, lm.device)).experts.numbers
        assert index.shape[0] == len(expert_modules(model)) and index.shape[1] == len(TOKENS)


def test_layers_without_experts_are_left_out():
    lm = CausalLM(tiny_mixture("qwen3_moe", mlp_only_layers=[0], num_hidden_layers=3))
    lm.count_experts(True)
    assert lm.forward([lm.open()], [TOKENS], empty(1, lm.device)).experts.numbers.shape == (2, len(TOKENS), 2)
