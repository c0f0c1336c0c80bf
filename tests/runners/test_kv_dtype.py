"""Keys and values in a narrower dtype: logits are those of a plain forward with the same rounding."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from spec_lab.core.draft import empty
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.models.forests import decode_forests, largest_error
from spec_lab.models.placement import kv_dtype_of
from spec_lab.models.self_check import self_check
from spec_lab.models.support import Unsupported
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.kv_cache import Cells
from spec_lab.verify import Match, Traversal
from tests.checkpoints import saved
from tests.drafters.test_early_exit import early_exit
from tests.models import families
from tests.propose.lab import COLD, draft_model
from tests.tiny import tiny_model, tiny_target

BF16, F16, F8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def rounded(kv_dtype, attention="per_sequence", fixed=False, family="llama"):
    return CausalLM(tiny_model(family), attention, fixed=fixed, kv_dtype=kv_dtype)


@pytest.mark.each_value
@pytest.mark.parametrize("kv_dtype", [BF16, F16, F8], ids=str)
@pytest.mark.parametrize(("family", "attention", "fixed"), [
    ("llama", "per_sequence", False), ("llama", "dense_mask", False), ("llama", "per_sequence", True),
    ("gpt2", "per_sequence", False),
    ("falcon", "dense_mask", False),
])  # fmt: skip
def test_logits_are_those_of_a_plain_forward_with_rounded_keys_and_values(family, attention, fixed, kv_dtype):
    """In chunks of prompts, trees, scattered cells and batches."""
    lm = rounded(kv_dtype, attention, fixed, family)
    rows = decode_forests(lm)
    assert largest_error(rows, [row.plain(lm.plain_logits) for row in rows]) < 1e-9
    exact = CausalLM(lm.model, attention)
    text = list(range(20))
    assert not torch.allclose(lm.plain_logits(text, 3), exact.plain_logits(text, 3), atol=1e-6)
    assert {store.dtype for layer in lm.cells.views for spans in layer for store in spans} == {kv_dtype}


@pytest.mark.each_value
@pytest.mark.parametrize(("make", "attention", "fixed"), [
    (partial(families.tiny_family, "gemma2"), "per_sequence", False),
    (partial(families.tiny_family, "gemma2"), "dense_mask", False),
    (partial(families.tiny_family, "gemma2"), "per_sequence", True),
    (partial(families.tiny_family, "deepseek_v2-dense"), "per_sequence", False),
    (partial(families.tiny_family, "deepseek_v2-dense"), "dense_mask", False),
    (partial(families.tiny_family, "deepseek_v2-dense"), "per_sequence", True),
    (partial(families.tiny_family, "falcon"), "per_sequence", False),
    (partial(tiny_model, "llama4_text"), "per_sequence", False),
])  # fmt: skip
def test_so_are_those_of_layers_with_windows_chunks_soft_caps_and_latents(make, attention, fixed):
    model = make()
    check = self_check(model, attention, fixed, F8)
    assert 0 < check.error < check.allowed
    lm, text = CausalLM(model, attention, fixed=fixed, kv_dtype=F8), list(range(20))
    assert not torch.allclose(lm.plain_logits(text, 3), CausalLM(model, attention).plain_logits(text, 3), atol=1e-6)


def test_alibi_biases_are_not_rounded(tmp_path):
    """They are stored in keys, as numbers that grow with the position."""
    model = families.tiny_family("bloom")
    with pytest.raises(ValueError, match="ALiBi biases require keys and values in the model's own data type"):
        CausalLM(model, kv_dtype=BF16)
    saved(tmp_path, model)
    with pytest.raises(Unsupported, match=r"target\.kv_dtype does not support ALiBi biases \(model type 'bloom'\)"):
        Target.load(str(tmp_path), dtype="float32", kv_dtype="bfloat16")


@pytest.mark.parametrize("make", [
    lambda target: draft_model("0 1 0.0 1.0", "deterministic"), lambda target: early_exit(target, layers=1),
])  # fmt: skip
def test_speculative_and_autoregressive_decoding_have_the_same_target(make):
    target = replace(tiny_target(), lm=rounded(F8))
    requests = [Request(n, f"p{n}", tuple(range(3 + n, 12)), COLD, 12) for n in range(2)]
    texts = []
    for proposer, verifier in ((Null(), Match()), (make(target), Traversal())):
        group = fixed_group(Arm(target, proposer, verifier, CounterDraws(0)), requests)
        list(group)
        texts.append([sequence.emitted for sequence in group.sequences])
    assert texts[0] == texts[1]
    text = [*requests[0].tokens, *texts[0][0]]
    logits = target.plain_logits(text, len(requests[0].tokens))
    assert logits[:-1].argmax(-1).tolist() == texts[0][0]


@pytest.mark.parametrize("dtype", [torch.float64, BF16], ids=str)
def test_keys_and_values_that_are_rounded_more_than_in_a_plain_forward_are_refused(dtype, monkeypatch):
    model = tiny_model(dtype=dtype)
    check = self_check(model, "per_sequence", kv_dtype=F16)
    assert 1e-5 < check.error < check.allowed < 0.02
    right = Cells.write

    def write(cells, layer, key, value, places):
        key, value = ((tensor if cells.dtype is None else tensor.to(F8).to(tensor.dtype)) for tensor in (key, value))
        return right(cells, layer, key, value, places)

    monkeypatch.setattr(Cells, "write", write)
    with pytest.raises(Unsupported, match=r"wrongly .* with keys and values in torch\.float16 in ") as caught:
        self_check(model, "per_sequence", kv_dtype=F16)
    assert str(caught.value).endswith("; set target.kv_dtype=null, which works")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_dtype", [F16, F8], ids=str)
def test_models_in_single_and_half_precision_pass_the_self_check(dtype, kv_dtype):
    self_check(tiny_model(dtype=dtype), "per_sequence", kv_dtype=kv_dtype)


def test_what_is_computed_in_the_dtype_of_the_store_is_not_rounded():
    lm = CausalLM(tiny_model(dtype=torch.float32), kv_dtype=torch.float32)
    assert lm.kv_dtype is None and lm.cells.dtype is None and lm.facts["kv_dtype"] == "float32"


def test_the_kv_cache_takes_as_much_memory_as_stated():
    lm = rounded(F8)
    sequence = lm.open(300)
    lm.forward([sequence], [np.arange(9).tolist()], empty(1))
    assert lm.memory.kv_bytes([300]) == sum(
        span.nbytes for layer in lm.cells.views for store in layer for span in store
    )
    assert lm.facts["kv_dtype"] == "float8_e4m3fn"
    assert lm.work.attention[0].kv_bytes * 8 == CausalLM(lm.model).work.attention[0].kv_bytes


@pytest.mark.parametrize(("name", "dtype", "says"), [
    ("int8", "float32", r"target\.kv_dtype must be one of float32, bfloat16, float16, float8_e4m3fn, not 'int8'"),
    ("float32", "bfloat16", r"at most the bytes of target\.dtype=bfloat16 \(got float32\)"),
])  # fmt: skip
def test_other_dtypes_are_refused(name, dtype, says):
    with pytest.raises(ValueError, match=says):
        kv_dtype_of(name, dtype)


def test_the_models_own_dtype_is_none():
    assert kv_dtype_of("float32", "float32") is kv_dtype_of(None, "float64") is None
    assert kv_dtype_of("float16", "bfloat16") == F16
