"""Tokenizers in GGUF files.

A GGUF file describes a tokenizer in llama.cpp's terms (``tokenizer.ggml.*``): tokens, merges, and the name of a
pre-tokenizer, which selects regular expressions that are part of llama.cpp. The optional key
``tokenizer.huggingface.json`` holds a whole ``tokenizer.json``; llama.cpp ignores it. Files that ``spec-lab convert``
writes have both, so that the tokenizer is exact even where llama.cpp has no name for its pre-tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""Types of tokens (``gguf.TokenType``)."""

_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _SHORT + "|" + _WORDS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _SHORT + "|" + _WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_TITLE = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CAPITALS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_TEKKEN = _TITLE + "|" + _CAPITALS + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_GPT4O = f"{_TITLE}{_SHORT}?|{_CAPITALS}{_SHORT}?" + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class PreTokenizer(NamedTuple):
    """How llama.cpp splits a text before merges are applied (llama-vocab.cpp)."""

    patterns: tuple[str, ...]
    """Regular expressions, applied one after the other; each match is a piece, and so is what lies between matches."""
    whole: bool = False
    """Whether a piece that is a token stays whole, whatever the merges (``ignore_merges``)."""


PRE_TOKENIZERS = {
    "llama-bpe": PreTokenizer((_LLAMA3,), True),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2": PreTokenizer((_QWEN2,)),
    "tekken": PreTokenizer((_TEKKEN,), True),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
    "gpt-2": PreTokenizer((_GPT2,)),
}
"""By the value of ``tokenizer.ggml.pre``."""


def write_tokenizer(writer: Any, tokenizer: Any, vocabulary: int, stops: Sequence[int]) -> str:
    """Write a tokenizer's metadata.

    Args:
        writer: a ``gguf.GGUFWriter``.
        tokenizer: transformers'.
        vocabulary: V; tokens from V on are left out, ids without a token are marked unused.
        stops: end-of-text tokens of the checkpoint.

    Returns:
        What llama.cpp can do with it, for a message.

    Raises:
        ValueError: it is not based on the library tokenizers.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"a {type(tokenizer).__name__} has no tokenizer.json, which GGUF files hold: use a fast tokenizer"
        )
    whole = json.loads(backend.to_str())
    writer.add_string("tokenizer.huggingface.json", json.dumps(whole, ensure_ascii=False, separators=(",", ":")))
    if tokenizer.chat_template and isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
    for one, add in (
        (tokenizer.bos_token_id, writer.add_bos_token_id), (tokenizer.unk_token_id, writer.add_unk_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
    ):  # fmt: skip
        if one is not None and one < vocabulary:
            add(one)
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ends = [one for one in dict.fromkeys([*own, *stops]) if one < vocabulary]
    for one, add in zip(
        ends, (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id), strict=False
    ):
        add(one)
    given = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(bool(given) and given[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(bool(given) and given[-1] == tokenizer.eos_token_id)
    if not _byte_level(whole):
        writer.add_tokenizer_model("no_vocab")
        return "llama.cpp reads token ids only: it has no tokenizer of this kind"
    tokens = {number: token for token, number in backend.get_vocab(with_added_tokens=True).items()}
    added = backend.get_added_tokens_decoder()
    unused = [f"[PAD{number}]" for number in range(vocabulary)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([tokens.get(number, unused[number]) for number in range(vocabulary)])
    writer.add_token_types([
        UNUSED if number not in tokens else NORMAL if number not in added
        else CONTROL if added[number].special else USER_DEFINED
        for number in range(vocabulary)
    ])  # fmt: skip
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in whole["model"]["merges"]])
    name = pre_tokenizer_name(whole)
    if name is None:
        return "llama.cpp has no pre-tokenizer of this kind and splits some texts differently: give it token ids"
    writer.add_tokenizer_pre(name)
    return f"llama.cpp tokenizes as {name}"


def _byte_level(whole: Mapping[str, Any]) -> bool:
    """Return whether a ``tokenizer.json`` is byte-level BPE, which llama.cpp calls gpt2."""
    model, steps = whole["model"], _steps(whole["pre_tokenizer"])
    plain = not any(model.get(name) for name in (
        "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback",
    ))  # fmt: skip
    normal = whole["normalizer"] is None or whole["normalizer"]["type"] == "NFC"  # Qwen's, which llama.cpp leaves out
    return bool(model["type"] == "BPE" and plain and normal and model["merges"] and steps[-1:] == [_BYTES])


_BYTES = "bytes"
"""The step of ``_steps`` that maps each byte to a character."""


def pre_tokenizer_name(whole: Mapping[str, Any]) -> str | None:
    """Return llama.cpp's name of the pre-tokenizer of a ``tokenizer.json``; None if it has none."""
    *patterns, last = _steps(whole["pre_tokenizer"]) or [""]
    found = PreTokenizer(tuple(map(str, patterns)), bool(whole["model"].get("ignore_merges")))
    names = [name for name, one in PRE_TOKENIZERS.items() if one == found]
    return names[0] if names and last == _BYTES else None


def _steps(pre: Mapping[str, Any] | None) -> list[str | None]:
    """Return the regular expressions of a pre-tokenizer in order, then ``_BYTES``; None for a step of another kind."""
    if pre is None:
        return []
    if pre["type"] == "Sequence":
        return [step for one in pre["pretokenizers"] for step in _steps(one)]
    if pre["type"] == "Split" and pre["behavior"] == "Isolated" and not pre["invert"] and "Regex" in pre["pattern"]:
        return [pre["pattern"]["Regex"]]
    if pre["type"] == "Digits" and pre["individual_digits"]:
        return [r"\p{N}"]
    if pre["type"] == "ByteLevel" and not pre["add_prefix_space"]:
        return [_GPT2, _BYTES] if pre.get("use_regex", True) else [_BYTES]
    return [None]
