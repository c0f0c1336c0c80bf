"""The memory that decoding needs: computed by hand, measured on tiny models, and what fits in less."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from spec_lab.core.draft import Draft, empty
from spec_lab.core.shape import chain
from spec_lab.runners.adaptors import has_alibi
from spec_lab.runners.attention import recurrent_layers
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.kv_cache import allocated
from spec_lab.runners.memory_need import Decoding, ModelMemory, StateMemory, largest, need, what_fits
from spec_lab.runners.mixers import state_tensors
from tests import recurrent
from tests.models import families
from tests.tiny import tiny_model

MODEL = ModelMemory(
    weights=0, cell=10, kv_itemsize=4, itemsize=4, probabilities=4, vocabulary=100, width=50, hidden=8, chunk=512
)  # fmt: skip
RUN = Decoding(prompts=[10, 300, 700, 20], batch_size=2, max_new_tokens=100, context=2000)


def test_the_kv_cache_is_that_of_the_longest_prompts_decoded_together_in_blocks():
    assert RUN.together() == [700, 300]
    assert need(MODEL, RUN).kv_cache == (1024 + 512) * 10 * 4
    assert need(MODEL, replace(RUN, cells=300)).kv_cache == (1280 + 768) * 10 * 4
    assert need(MODEL, replace(RUN, context=750)).kv_cache == (768 + 512) * 10 * 4
    assert need(replace(MODEL, uniform=True, kv_itemsize=2), RUN).kv_cache == 2 * 1024 * 10 * 2
    assert need(MODEL, replace(RUN, prefix_cache=2048)).kv_cache == (1024 + 512 + 2048) * 10 * 4
    texts = need(replace(MODEL, uniform=True), replace(RUN, prefix_cache=2048)).kv_cache
    assert texts == allocated([1024] * (2 + 8), uniform=True) * 10 * 4, "each of eight kept texts may have a stream"


def test_logits_are_those_of_all_rows_of_a_step():
    assert need(MODEL, replace(RUN, rows=3)).logits == 2 * 4 * 100 * (4 + 4 + 4)


def test_activations_are_those_of_the_larger_forward():
    prefill = ((512 + 300) * 50 + 512 * 700) * 4 + 4 * 512 * 700  # the prompt of 300 tokens needs no mask
    assert need(MODEL, RUN).activations == prefill
    short = replace(RUN, prompts=[1, 1], rows=9)
    assert need(MODEL, short).activations == (20 * 50 + 2 * 10 * 101) * 4 + 4 * 10 * 101
    kept = replace(RUN, states=3)
    assert need(MODEL, kept).activations == prefill + (512 + 300) * 3 * 8 * 4, "hidden states of all rows"


def test_recurrent_states_have_a_snapshot_and_inputs_where_drafts_may_be_rejected():
    model = replace(MODEL, recurrent=StateMemory(states=1000, inputs=10, kept=16))
    assert need(model, RUN).recurrent_states == 2 * 1000
    drafts = need(model, replace(RUN, rows=4))
    assert drafts.recurrent_states == 2 * (2 * 1000 + (16 + 4) * 10)
    assert drafts.total == need(MODEL, replace(RUN, rows=4)).total + drafts.recurrent_states
    assert "recurrent states 4.3 KiB" in str(drafts)


def test_outputs_of_captured_steps_are_kept():
    model, run = replace(MODEL, graphs=True), replace(RUN, rows=3, states=2)
    assert need(model, run).graphs == 4 * 2 * 4 * (100 + 2 * 8) * 4
    assert need(model, run).total - need(model, run).graphs == need(MODEL, run).total


def test_no_narrower_kv_cache_is_advised_where_the_model_refuses_it():
    most = need(MODEL, RUN).total
    advised = [what_fits(replace(MODEL, narrower=narrower), RUN, most - 1) for narrower in (True, False)]
    assert set(advised[0]) - set(advised[1]) == {"target.kv_dtype=bfloat16"}


def test_a_proposers_own_kv_cache_is_asked_for_the_lengths_of_its_sequences():
    memory = need(MODEL, RUN, lambda positions: 7 * sum(positions))
    assert memory.draft_kv_cache == 7 * (800 + 400)
    assert memory.total == sum((memory.kv_cache, memory.draft_kv_cache, memory.logits, memory.activations))
    assert "KV cache of draft models 8.2 KiB" in str(memory)


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_what_is_said_to_fit_fits_and_no_more(batch_size):
    run = replace(RUN, batch_size=batch_size, prefix_cache=1000)
    most = need(MODEL, run).total
    assert not what_fits(MODEL, run, most)
    changed = {"prompts": None}
    for option in what_fits(MODEL, run, most - 1):
        name, _, value = option.partition("=")
        if name == "target.kv_dtype":
            assert need(replace(MODEL, kv_itemsize=2), run).total < most
        elif name == "prefix_cache":
            assert need(MODEL, replace(run, prefix_cache=0)).total < most
        elif name == "max_prompt_tokens":
            changed = [replace(run, prompts=[min(length, int(value) + n) for length in run.prompts]) for n in (0, 1)]
            assert need(MODEL, changed[0]).total < most <= need(MODEL, changed[1]).total
        else:
            changed = [replace(run, **{name: int(value) + n}) for n in (0, 1)]
            assert need(MODEL, changed[0]).total < most <= need(MODEL, changed[1]).total
    assert any(fit.startswith("target.kv_dtype") for fit in what_fits(MODEL, run, most - 1))
    assert not what_fits(MODEL, run, 1)


def test_the_largest_number_that_fits():
    assert [largest(lambda n, most=most: n <= most, 9) for most in (0, 1, 8, 9, 20)] == [0, 1, 8, 9, 9]
    assert largest(lambda n: True, -3) == largest(lambda n: True, 0) == 0


@pytest.mark.parametrize("attention", ["per_sequence", "dense_mask"])
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.float32), ("qwen3", torch.float64), ("gpt2", torch.float32)]
)
def test_a_models_kv_cache_is_as_large_as_stated(family, dtype, attention):
    lm = CausalLM(tiny_model(family, dtype), attention)
    reserves = [300, 20, 600]
    caches = [lm.open(reserve) for reserve in sorted(reserves, reverse=True)]
    lm.forward(caches, [[1], [2], [3]], empty(3))
    held = sum(span.nbytes for layer in lm.cells.views for store in layer for span in store)
    assert lm.memory.kv_bytes(reserves) == held
    assert lm.memory.weights == sum(parameter.nbytes for parameter in lm.model.parameters())


@pytest.mark.each_value
@pytest.mark.parametrize("attention", ["per_sequence", "dense_mask"])
@pytest.mark.parametrize("make", [
    partial(families.tiny_family, "gemma2"), partial(families.tiny_family, "gemma4_text with shared keys and values"),
    partial(families.tiny_family, "gpt_oss"),
    partial(families.tiny_family, "deepseek_v2-dense"),
    partial(families.tiny_family, "falcon"), partial(families.tiny_family, "bloom"),
    partial(families.tiny_family, "falcon-alibi-grouped"),
    recurrent.FAMILIES["lfm2"], recurrent.FAMILIES["falcon_h1"],
])  # fmt: skip
def test_so_is_that_of_windows_latents_biases_and_layers_without_cells(make, attention):
    model = make()
    if attention == "dense_mask" and (has_alibi(model) or recurrent_layers(model.config)):
        pytest.skip("refused")
    lm = CausalLM(model, attention)
    caches = [lm.open(length) for length in (300, 20)]
    lm.forward(caches, [[1], [2]], empty(2))
    held = sum(span.nbytes for layer in lm.cells.views for store in layer for span in store)
    assert lm.memory.kv_bytes([20, 300]) == held
    if attention == "per_sequence" and lm.work is not None and not getattr(model.config, "num_kv_shared_layers", 0):
        assert sum(layer.kv_bytes for layer in lm.work.attention) == lm.memory.cell * lm.memory.kv_itemsize


@pytest.mark.parametrize("name", ["lfm2", "falcon_h1"])
def test_recurrent_states_are_as_large_as_stated(name):
    """Steps whose drafts are rejected keep a snapshot, and the inputs of tokens that may be computed again."""
    lm = CausalLM(recurrent.FAMILIES[name]())
    layers, sequence, stated = recurrent_layers(lm.model.config), lm.open(300), lm.memory.recurrent
    lm.forward([sequence], [[1, 2, 3]], empty(1))
    states = sequence.states
    assert bytes_of(states.cache.layers[layer] for layer in layers) == stated.bytes(0) > 0
    most = 0
    for step in range(40):
        lm.forward([sequence], [[step]], Draft(chain(4), torch.arange(4)))
        sequence.accept()
        assert bytes_of(states.snapshots.values()) == stated.states
        most = max(most, sum(state.nbytes for state in states.inputs.values()))
    assert 0.7 * (stated.bytes(4) - 2 * stated.states) < most <= stated.bytes(4) - 2 * stated.states


def bytes_of(layers):
    return sum(tensor.nbytes for layer in layers for tensor in state_tensors(layer))


def test_a_model_on_several_devices_states_nothing():
    lm = CausalLM(tiny_model())
    lm.model.hf_device_map = {"model": "cpu", "lm_head": "meta"}
    assert lm.memory is None
