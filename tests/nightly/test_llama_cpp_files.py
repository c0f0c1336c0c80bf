"""llama.cpp reads the files of ``spec-lab convert``: its logits and tokens are those of transformers."""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spec_lab.models.gguf_export import FILE_TYPES, convert
from spec_lab.models.gguf_file import read_gguf
from spec_lab.models.gguf_tokenizer import PRE_TOKENIZERS, PROBES
from tests.gguf_files import FATAL, MODELS, TYPED, ZOO, tiny, typed, with_zoo_tokenizer

llama = pytest.importorskip("llama_cpp", reason="requires the extra llamacpp")
pytestmark = pytest.mark.nightly

LENGTH = 100


@contextmanager
def model(path: Any, vocabulary_only: bool = False) -> Iterator[Any]:
    llama.llama_backend_init()
    options = llama.llama_model_default_params()
    options.n_gpu_layers, options.vocab_only = 0, vocabulary_only
    opened = llama.llama_model_load_from_file(str(path).encode(), options)
    assert opened, f"llama.cpp does not load {path}"
    try:
        yield opened
    finally:
        llama.llama_model_free(opened)


def logits(path: Any, tokens: list[int]) -> np.ndarray:
    """llama.cpp's logits of every token, with a KV cache in float32: ``[tokens, V]``."""
    with model(path) as opened:
        options = llama.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = 128
        options.type_k = options.type_v = llama.GGML_TYPE_F32
        options.flash_attn_type = 0
        options.n_threads = options.n_threads_batch = 1
        context = llama.llama_init_from_model(opened, options)
        batch = llama.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for at, token in enumerate(tokens):
            batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, at, 1, 1
            batch.seq_id[at][0] = 0
        assert llama.llama_decode(context, batch) == 0
        width = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(opened))
        rows = np.ctypeslib.as_array(llama.llama_get_logits(context), (len(tokens), width)).copy()
        llama.llama_batch_free(batch)
        llama.llama_free(context)
        return rows


def tokens_of(path: Any, texts: list[str]) -> list[list[int]]:
    """llama.cpp's tokens of texts, special tokens included."""
    with model(path, vocabulary_only=True) as opened:
        vocabulary, ids = llama.llama_model_get_vocab(opened), []
        for text in texts:
            data = text.encode()
            buffer = (ctypes.c_int32 * (len(data) + 8))()
            count = llama.llama_tokenize(vocabulary, data, len(data), buffer, len(buffer), True, True)
            assert count >= 0
            ids.append(list(buffer[:count]))
        return ids


def assert_same_logits(folder: Any, out: Any, dtype: str = "f32", error: float = 1e-4) -> None:
    """Compare with transformers in float32; the error is in standard deviations of the logits."""
    convert(str(folder), out, dtype)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, plain.config.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = plain(input_ids=ids).logits[0].numpy()
    output = logits(out, ids[0].tolist())
    assert np.abs(output - expected).max() < error * expected.std()


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_has_transformers_logits_of_every_architecture(tmp_path, name):
    assert_same_logits(tiny(tmp_path / "checkpoint", name), tmp_path / "model.gguf")


@pytest.mark.parametrize(("dtype", "error"), [("f32", 1e-4), ("bf16", 0.05), ("q8_0", 0.15), ("q4_0", 2.0)])
def test_llama_cpp_has_transformers_logits_of_the_bundled_target(tmp_path, dtype, error):
    assert_same_logits(ZOO, tmp_path / "zoo.gguf", dtype, error)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_llama_cpp_tokenizes_as_transformers_does(tmp_path, pre):
    folder = with_zoo_tokenizer(tmp_path / "checkpoint", pre)
    convert(str(folder), tmp_path / "model.gguf")
    loaded, random = AutoTokenizer.from_pretrained(folder), np.random.default_rng(0)
    texts = [*PROBES, "<|endoftext|>a <|endoftext|>", *(
        json.loads(line)["prompt"] for file in (ZOO.parent / "prompts").glob("*.jsonl") for line in file.open()
    )]  # fmt: skip
    texts += ["".join(map(chr, random.integers(0x20, 0x3000, 60))) for _ in range(100)]
    texts += ["".join(map(chr, random.integers(0x20, 0x7F, 60))) for _ in range(100)]
    assert tokens_of(tmp_path / "model.gguf", texts) == [loaded(text)["input_ids"] for text in texts]


@pytest.mark.parametrize("dtype", ["bf16", "f16", "q8_0", "q4_0"])
def test_the_numbers_are_those_of_llama_cpp_s_own_quantizer(tmp_path, dtype):
    convert(str(ZOO), tmp_path / "f32.gguf", "f32")
    convert(str(ZOO), tmp_path / "ours.gguf", dtype)
    options = llama.llama_model_quantize_default_params()
    options.ftype, options.nthread = FILE_TYPES[dtype], 1
    llama.llama_backend_init()
    paths = (str(tmp_path / name).encode() for name in ("f32.gguf", "own.gguf"))
    assert llama.llama_model_quantize(*paths, ctypes.byref(options)) == 0
    ours, reference = read_gguf(tmp_path / "ours.gguf"), read_gguf(tmp_path / "own.gguf")
    other = {name for name in ours.tensors if ours.tensors[name].kind != reference.tensors[name].kind}
    assert other == ({"token_embd.weight"} if dtype == "q4_0" else set()), "q8_0 here, q6_k in llama.cpp's"
    for name in ours.tensors.keys() - other:
        assert torch.equal(ours.tensor(name), reference.tensor(name)), name


COMPUTES = """
import sys
from pathlib import Path
from spec_lab.core.draft import empty
from spec_lab.runners.llama_context import LlamaSettings
from spec_lab.runners.llama_cpp import LlamaCpp
from spec_lab.runners.llama_library import Model, load_library
from spec_lab.models.gguf_file import read_gguf

library = load_library()
for file in sys.argv[1:]:
    print(file, end=" ", flush=True)
    try:
        read_gguf(Path(file))
    except ValueError as error:
        print("refused", flush=True)
        continue
    try:
        lm = LlamaCpp(Model(library, file), LlamaSettings(1, "f16", 64))
    except ValueError as error:
        print("not loaded", flush=True)
        continue
    for rows in (1, 7, 40):
        lm.forward([lm.open()], [[*range(rows)]], empty(1))
    print("computed", flush=True)
"""


def test_no_data_type_of_any_tensor_ends_the_process(tmp_path):
    """In a process of its own: in the files that are not refused every type is computed by the real library."""
    kinds = [kind.name for kind in gguf.GGMLQuantizationType]
    every = {(name, kind) for name in ("token_embd.weight", "output.weight", "blk.0.attn_q.weight") for kind in kinds}
    every |= {(name, "F32") for name in TYPED} | {*FATAL}
    files = {str(typed(tmp_path / f"{n}.gguf", *field)): field for n, field in enumerate(sorted(every))}
    done = subprocess.run(
        [sys.executable, "-c", COMPUTES, *files], capture_output=True, text=True, timeout=600,
        env=os.environ | {"GGML_NO_BACKTRACE": "1"},
    )  # fmt: skip
    last = [line for line in done.stdout.splitlines() if line][-1:]
    assert done.returncode == 0, (done.returncode, [files.get(line.split()[0], line) for line in last])
    outcomes = {files[file]: what for file, what in (line.split(" ", 1) for line in done.stdout.splitlines())}
    assert {field for field, what in outcomes.items() if what == "refused"} == {*FATAL}
    assert {what for field, what in outcomes.items() if field not in FATAL} == {"computed"}
