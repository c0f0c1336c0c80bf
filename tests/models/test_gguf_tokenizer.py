"""The tokenizer of a GGUF file yields the tokens of the checkpoint's own tokenizer."""

import json
import random
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from spec_lab.core.files import Unreadable
from spec_lab.models.gguf_export import convert
from spec_lab.models.gguf_file import GGUFFile, read_gguf
from spec_lab.models.gguf_tokenizer import (
    HF_JSON,
    PRE_TOKENIZERS,
    PROBES,
    pre_tokenizer_name,
    read_gguf_tokenizer,
    reads_as_llama_cpp,
)
from tests.gguf_files import ZOO, with_zoo_tokenizer

TEXTS = [*PROBES, "", " ", "<|endoftext|>a <|endoftext|>", "\n\n \t", *(
    "".join(chr(random.Random(seed).randrange(0x20, 0x3000)) for seed in range(60 * number, 60 * number + 60))
    for number in range(20)
)]  # fmt: skip


def written(folder, pre=None, **changes) -> GGUFFile:
    convert(str(with_zoo_tokenizer(folder / "checkpoint", pre, **changes)), folder / "model.gguf")
    return read_gguf(folder / "model.gguf")


def without(file: GGUFFile, *names: str, **fields) -> GGUFFile:
    """The file as if some of its metadata were missing, and other were different."""
    kept = {name: value for name, value in file.metadata.items() if name not in names}
    return replace(file, metadata=kept | {f"tokenizer.ggml.{name}": value for name, value in fields.items()})


def assert_same(ours, other, texts=TEXTS):
    for text in texts:
        ids = other(text)["input_ids"]
        assert ours(text)["input_ids"] == ids and ours.decode(ids) == other.decode(ids)
    assert (ours.bos_token, ours.eos_token) == (other.bos_token, other.eos_token)


@pytest.mark.parametrize("pre", [None, *PRE_TOKENIZERS])
@pytest.mark.one_in(3)
def test_the_tokenizer_is_the_checkpoint_s_own(tmp_path, pre):
    file = written(tmp_path, pre)
    assert file.metadata.get("tokenizer.ggml.pre") == pre and reads_as_llama_cpp(file) == (pre is not None)
    assert_same(read_gguf_tokenizer(file), AutoTokenizer.from_pretrained(tmp_path / "checkpoint"))


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@pytest.mark.one_in(9)
def test_it_is_built_from_tokens_and_merges_where_the_file_holds_no_json(tmp_path, pre):
    file = without(written(tmp_path, pre, vocab_size=4100), HF_JSON)
    built, loaded = read_gguf_tokenizer(file), AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
    assert_same(built, loaded)
    assert built.get_vocab() == loaded.get_vocab(), "ids that are unused have no token"
    assert built.decode([0, 5], skip_special_tokens=True) == loaded.decode([5])


def test_a_begin_token_is_added_as_the_file_says(tmp_path):
    file = without(written(tmp_path, "llama-bpe"), HF_JSON, "tokenizer.ggml.add_bos_token", bos_token_id=0)
    plain = read_gguf_tokenizer(without(file, add_bos_token=False))("a b")["input_ids"]
    for told in (file, without(file, add_bos_token=True)):  # llama-bpe adds one unless the file says otherwise
        assert read_gguf_tokenizer(told)("a b")["input_ids"] == [0, *plain]


@pytest.mark.parametrize(("fields", "asked"), [
    ({"model": "no_vocab"}, False), ({"model": "none"}, False), ({"model": "bert"}, False), ({"model": 3}, False),
    ({"model": "llama"}, True), ({"model": "t5"}, True), ({"model": "t5", "add_bos_token": True}, False),
    ({"model": "gemma4"}, False), ({"model": "gemma4", "bos_token_id": 2}, True), ({"add_bos_token": True}, False),
    ({"add_bos_token": True, "bos_token_id": 4096}, False), ({"add_bos_token": True, "bos_token_id": 5}, True),
    ({"add_eos_token": True, "eos_token_id": "1"}, False), ({"tokens": ["a", "b"]}, False),
])  # fmt: skip
@pytest.mark.each_value
def test_llama_cpp_is_not_asked_for_tokens_where_it_would_abort(tmp_path, fields, asked):
    file = without(written(tmp_path, "qwen2"), *(f"tokenizer.ggml.{name}" for name in (
        "bos_token_id", "eos_token_id", "add_bos_token", "add_eos_token",
    )))  # fmt: skip
    assert reads_as_llama_cpp(without(file, **fields)) == asked


def test_a_folder_s_tokenizer_is_read_instead(tmp_path):
    file, loaded = written(tmp_path, "gpt-2"), AutoTokenizer.from_pretrained(ZOO)
    assert read_gguf_tokenizer(file)(PROBES[0])["input_ids"] != loaded(PROBES[0])["input_ids"]
    assert_same(read_gguf_tokenizer(file, str(ZOO)), loaded)
    with pytest.raises(OSError, match="missing"):
        read_gguf_tokenizer(file, str(tmp_path / "missing"))


def test_a_folder_with_other_tokens_is_refused_by_the_first_that_differs(tmp_path):
    file = written(tmp_path, "qwen2")
    whole = json.loads((tmp_path / "checkpoint/tokenizer.json").read_text())
    vocabulary = whole["model"]["vocab"]
    vocabulary["!"], vocabulary['"'] = vocabulary['"'], vocabulary["!"]
    (tmp_path / "checkpoint/tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(Unreadable, match="token 1 is"):
        read_gguf_tokenizer(file, str(tmp_path / "checkpoint"))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("fields", "named"), [
    ({"model": "bert"}, "kind that is not read.*bert"), ({"pre": "sarvam-moe"}, "kind that is not read.*sarvam-moe"),
    ({"merges": ["a b c", "x y"]}, "cannot be read"), ({"merges": None}, "cannot be read"),
    ({"tokens": ["a\udcff", "b"]}, "cannot be read"),
])  # fmt: skip
def test_an_unknown_or_corrupt_tokenizer_is_refused_with_the_file_s_name(tmp_path, fields, named):
    file = without(written(tmp_path, "qwen2"), HF_JSON, **fields)
    with pytest.raises(Unreadable, match=named) as refused:
        read_gguf_tokenizer(file)
    assert str(file.path) in str(refused.value)


@pytest.mark.parametrize("change", [
    lambda whole: whole["model"].update(ignore_merges=True),
    lambda whole: whole["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Whitespace"}),
    lambda whole: whole["pre_tokenizer"]["pretokenizers"].pop(),
    lambda whole: whole["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"),
    lambda whole: whole["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\p{N}{1,2}|\s+"),
    lambda whole: whole["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
    lambda whole: whole.update(pre_tokenizer=None),
])  # fmt: skip
def test_a_pre_tokenizer_has_llama_cpp_s_name_only_if_it_is_the_same(tmp_path, change):
    whole = json.loads((with_zoo_tokenizer(tmp_path, "qwen2") / "tokenizer.json").read_text())
    assert pre_tokenizer_name(whole) == "qwen2"
    change(whole)
    assert pre_tokenizer_name(whole) is None
