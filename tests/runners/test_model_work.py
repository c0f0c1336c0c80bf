"""Bytes and FLOPs of a model's forward, against counts by hand and torch's counter of FLOPs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from spec_lab.core.roofline import AttentionWork, ExpertWork, ForwardWork
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.model_work import work_of
from tests.tiny import FAMILIES, MIXTURES, VOCABULARY, WINDOWED, tiny_mixture, tiny_model

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, DIM, DOUBLE = 32, 48, 2, 4, 2, 8, 8  # of the tiny Llama, in float64


def test_a_llama_reads_every_weight_but_the_embedding_table():
    matrices = LAYERS * (2 * HIDDEN * HEADS * DIM + 2 * HIDDEN * KV_HEADS * DIM + 3 * HIDDEN * FFN)
    norms, head = (2 * LAYERS + 1) * HIDDEN, VOCABULARY * HIDDEN
    cache, scores = LAYERS * 2 * KV_HEADS * DIM * DOUBLE, LAYERS * 2 * 2 * HEADS * DIM
    expected = ForwardWork((matrices + norms + head) * DOUBLE, 2 * matrices, 2 * head, (AttentionWork(cache, scores),))
    assert CausalLM(tiny_model()).work == expected


def test_an_lm_head_that_shares_the_embedding_table_is_read_once():
    assert CausalLM(tiny_model(tie_word_embeddings=True)).work == CausalLM(tiny_model()).work


def test_weights_of_half_the_width_are_half_the_bytes_and_the_same_flops():
    double, half = (CausalLM(tiny_model(dtype=dtype)).work for dtype in (torch.float64, torch.float32))
    assert half.weight_bytes * 2 == double.weight_bytes and half.row_flops == double.row_flops
    assert half.attention[0].kv_bytes * 2 == double.attention[0].kv_bytes


def test_layers_with_a_window_or_chunks_are_counted_apart():
    full, near = CausalLM(tiny_model("qwen2-windows")).work.attention
    assert (full.window, near.window) == (None, 5) and full.chunk is near.chunk is None
    assert (full.kv_bytes, full.flops) == (near.kv_bytes, near.flops), "one layer each"
    chunked, full = CausalLM(tiny_model("llama4_text")).work.attention
    assert (full.window, full.chunk, chunked.window, chunked.chunk) == (None, None, None, 4)
    assert chunked.kv_bytes == 3 * full.kv_bytes


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED])
def test_flops_are_those_that_torch_counts(family):
    """A plain forward has 7 rows, of which 3 get logits; windows are masks there, which save nothing."""
    model = tiny_model(family)
    work = CausalLM(model).work
    model.set_attn_implementation("eager")
    with torch.inference_mode(), FlopCounterMode(display=False) as counted:
        model(torch.arange(7)[None], use_cache=False, logits_to_keep=3)
    scores = 7 * 7 * sum(attention.flops for attention in work.attention)
    assert counted.get_total_flops() == 7 * work.row_flops + 3 * work.logits_flops + scores


@pytest.mark.parametrize("family", MIXTURES)
def test_of_a_mixture_of_experts_those_of_one_row_count(family):
    eight, four = (
        work_of(tiny_mixture(family, **{name: count}), {}) for name, count in (_experts(family, 8), _experts(family, 4))
    )
    router = LAYERS * HIDDEN * 4
    assert eight.row_flops - four.row_flops == 2 * router, "only the router grows with the number of experts"
    work = work_of(tiny_mixture(family, num_experts_per_tok=1), {})
    expert = 3 * HIDDEN * FFN * LAYERS
    assert eight.row_flops - work.row_flops == 2 * expert
    assert eight.weight_bytes - work.weight_bytes >= 4 * expert
    biases = 2 * FFN + HIDDEN if family == "gpt_oss" else 0
    assert eight.experts == ExpertWork(LAYERS, 8, 2, 4 * (3 * HIDDEN * FFN + biases))


def _experts(family, count):
    return ("num_experts" if family == "qwen3_moe" else "num_local_experts"), count


def test_of_a_model_on_several_devices_or_ranks_the_work_of_one_is_unknown():
    lm = CausalLM(tiny_model())
    lm.model._tp_size = 2
    assert lm.work is None
