"""Tokenizers in GGUF files.

A GGUF file describes a tokenizer in llama.cpp's terms (``tokenizer.ggml.*``): tokens, merges, and the name of a
pre-tokenizer, which selects regular expressions that are part of llama.cpp. The optional key
``tokenizer.huggingface.json`` holds a whole ``tokenizer.json``; llama.cpp ignores it. Files that ``spec-lab convert``
writes have both, so that the tokenizer is exact even where llama.cpp has no name for its pre-tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from spec_lab.core.files import Unreadable
from spec_lab.models import checkpoint
from spec_lab.models.gguf_file import STOPS, GGUFFile
from spec_lab.models.tokenizer import MAX_TOKENS, check_vocabulary, read_tokenizer
from spec_lab.models.tokenizer_growth import check_growth

HF_JSON = "tokenizer.huggingface.json"
"""The metadata field that holds a whole ``tokenizer.json``."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""Types of tokens (``gguf.TokenType``)."""

_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _SHORT + "|" + _WORDS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _SHORT + "|" + _WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN35 = _SHORT + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_TITLE = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CAPITALS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_TEKKEN = _TITLE + "|" + _CAPITALS + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_GPT4O = f"{_TITLE}{_SHORT}?|{_CAPITALS}{_SHORT}?" + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class PreTokenizer(NamedTuple):
    """How llama.cpp splits a text before merges are applied (llama-vocab.cpp)."""

    patterns: tuple[str, ...]
    """Regular expressions, applied one after the other; each match is a piece, and so is what lies between matches."""
    ignore_merges: bool = False
    """True if a piece that is a token stays whole, whatever the merges."""


PRE_TOKENIZERS = {
    "llama-bpe": PreTokenizer((_LLAMA3,), True),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,)),
    "tekken": PreTokenizer((_TEKKEN,), True),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
    "gpt-2": PreTokenizer((_GPT2,)),
}
"""By the value of ``tokenizer.ggml.pre``."""

CONVERTED = ("llama", "t5", "gemma4")
"""Values of ``tokenizer.ggml.model`` that transformers converts."""

MAX_DEFAULT = 11
"""Largest id of a token that llama.cpp adds to texts where a file names none."""

ALIASES = {
    "llama3": "llama-bpe", "llama-v3": "llama-bpe", "falcon3": "llama-bpe", "pixtral": "llama-bpe", "lfm2": "llama-bpe",
    "dbrx": "smaug-bpe",
    "deepseek-r1-qwen": "qwen2", "megrez": "qwen2", "llama4": "gpt-4o", "kanana2": "gpt-4o", "starcoder": "smollm",
    "refact": "smollm", "command-r": "smollm", "codeshell": "smollm", "exaone": "smollm", "minerva-7b": "smollm",
    "mpt": "gpt-2", "olmo": "gpt-2", "jais": "gpt-2", "phi-2": "gpt-2", "jina-es": "gpt-2", "jina-de": "gpt-2",
    "mellum": "gpt-2", "exaone4": "gpt-2",
}  # fmt: skip
"""Other values with the same pre-tokenizer."""

PROBES = (
    "def f(x):\n    return {'né': [x, 1.5]}  # 2024 naïve\n\n\n\tx  +=  1_000_000;\r\n",
    "It's 1, 12, 123, 1234 and 12345 o'clock; we'LL see, she'd say. \"Don't!\"   ",
    '{"id": 7021, "tags": ["a", "b"], "ratio": 0.3333, "ok": true}',
    "Ünïcödé: 東京都, Москва, عربى, हिन्दी, 한국어 😀👩‍👩‍👧 ½ ² ⅷ — “quotes” … \u00a0\u2003end",
)
"""Texts whose tokens show whether two tokenizers are the same."""


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
    settings = json.loads(backend.to_str())
    writer.add_string(HF_JSON, json.dumps(settings, ensure_ascii=False, separators=(",", ":")))
    if tokenizer.chat_template and isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
    for token, add in (
        (tokenizer.bos_token_id, writer.add_bos_token_id), (tokenizer.unk_token_id, writer.add_unk_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
    ):  # fmt: skip
        if token is not None and token < vocabulary:
            add(token)
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ends = [token for token in dict.fromkeys([*eos, *stops]) if token < vocabulary]
    for token, add in zip(
        ends, (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id), strict=False
    ):
        add(token)
    writer.add_array(STOPS, ends)  # the format names three
    given = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(bool(given) and given[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(bool(given) and given[-1] == tokenizer.eos_token_id)
    if not _byte_level(settings):
        writer.add_tokenizer_model("no_vocab")
        return "llama.cpp reads token ids only: it has no tokenizer of this kind"
    tokens = {number: token for token, number in backend.get_vocab(with_added_tokens=True).items()}
    added = backend.get_added_tokens_decoder()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([tokens.get(number, f"[PAD{number}]") for number in range(vocabulary)])
    writer.add_token_types([
        UNUSED if number not in tokens else NORMAL if number not in added
        else CONTROL if added[number].special else USER_DEFINED
        for number in range(vocabulary)
    ])  # fmt: skip
    merges = settings["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    name = pre_tokenizer_name(settings)
    if name is None:
        return "llama.cpp has no pre-tokenizer of this kind and splits some texts differently: give it token ids"
    writer.add_tokenizer_pre(name)
    return f"llama.cpp tokenizes as {name}"


def _byte_level(settings: Mapping[str, Any]) -> bool:
    """Return whether a ``tokenizer.json`` is byte-level BPE, which llama.cpp calls gpt2."""
    model, steps = settings["model"], _steps(settings["pre_tokenizer"])
    plain = not any(model.get(name) for name in (
        "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback",
    ))  # fmt: skip
    normalizer = settings["normalizer"] or {"type": "NFC"}  # Qwen's is NFC; llama.cpp leaves it out
    return bool(
        model["type"] == "BPE" and plain and normalizer["type"] == "NFC" and model["merges"] and steps[-1:] == [_BYTES]
    )


_BYTES = "bytes"
"""The step of ``_steps`` that maps each byte to a character."""


def pre_tokenizer_name(settings: Mapping[str, Any]) -> str | None:
    """Return llama.cpp's name of the pre-tokenizer of a ``tokenizer.json``; None if it has none."""
    *patterns, last = _steps(settings["pre_tokenizer"]) or [""]
    described = PreTokenizer(tuple(map(str, patterns)), bool(settings["model"].get("ignore_merges")))
    names = [name for name, known in PRE_TOKENIZERS.items() if known == described]
    return names[0] if names and last == _BYTES else None


def _steps(pre: Mapping[str, Any] | None) -> list[str | None]:
    """Return the regular expressions of a pre-tokenizer in order, then ``_BYTES``; None for a step of another kind."""
    if pre is None:
        return []
    if pre["type"] == "Sequence":
        return [step for inner in pre["pretokenizers"] for step in _steps(inner)]
    if pre["type"] == "Split" and pre["behavior"] == "Isolated" and not pre["invert"] and "Regex" in pre["pattern"]:
        return [pre["pattern"]["Regex"]]
    if pre["type"] == "Digits" and pre["individual_digits"]:
        return [r"\p{N}"]
    if pre["type"] == "ByteLevel" and not pre["add_prefix_space"]:
        return [_GPT2, _BYTES] if pre.get("use_regex", True) else [_BYTES]
    return [None]


def reads_as_llama_cpp(file: GGUFFile) -> bool:
    """Return whether llama.cpp's own tokenizer should yield the tokens of ``read_gguf_tokenizer`` for this file.

    It is not asked where it would abort the process: for a file without a vocabulary, and for one that adds a token to
    a text but does not name its id.
    """
    fields, tokens = file.metadata, file.tokens
    kind = fields.get("tokenizer.ggml.model")
    if tokens is None or not (kind in CONVERTED or (kind == "gpt2" and _known(file) is not None)):
        return False
    for name in ("bos", "eos"):
        number, adds = (fields.get(f"tokenizer.ggml.{key}") for key in (f"{name}_token_id", f"add_{name}_token"))
        named = isinstance(number, int) and 0 <= number < len(tokens)
        if kind == "gemma4" and name == "bos":
            adds = True  # whatever the file says
        if not named and (adds or (adds is None and len(tokens) <= MAX_DEFAULT)):
            return False
    return True


def _known(file: GGUFFile) -> PreTokenizer | None:
    """Return the pre-tokenizer that a file names; None for an unknown one."""
    name = str(file.metadata.get("tokenizer.ggml.pre"))
    return PRE_TOKENIZERS.get(ALIASES.get(name, name))


def read_gguf_tokenizer(file: GGUFFile, folder: str | None = None) -> Any:
    """Return the tokenizer of a GGUF file, as transformers' object.

    It is the ``tokenizer.json`` that the file holds; else it is built from the tokens and merges of byte-level BPE with
    a known pre-tokenizer; else transformers converts it.

    Args:
        folder: of a checkpoint or a tokenizer that is read instead.

    Raises:
        OSError: the folder cannot be read.
        ValueError: the tokenizer is of an unknown kind or corrupt, or its tokens are not those of the file.
    """
    if folder is not None:
        if not Path(folder).is_dir():
            raise OSError(f"there is no folder {folder}: give one that holds the tokenizer of {file.path}")
        checkpoint.check_sizes(Path(folder))
        tokenizer = read_tokenizer(folder, Path(folder), None)
    else:
        try:
            tokenizer = _of_file(file)
            tokenizer.decode(tokenizer.encode("a b"), skip_special_tokens=True)
        except Unreadable:
            raise
        except Exception as error:  # tokenizers raises plain Exceptions, transformers errors of many types
            raise Unreadable(
                f"the tokenizer of {file.path} cannot be read ({checkpoint.one_line(error)}): copy or download the "
                "file again, or name a folder with the tokenizer"
            ) from error
        tokenizer.model_max_length = MAX_TOKENS  # the length of a prompt is checked against the target's context
    check_vocabulary(folder or str(file.path), tokenizer, file.vocabulary)
    _check_tokens(file, tokenizer, folder or "tokenizer.json")
    return tokenizer


def _of_file(file: GGUFFile) -> Any:
    """Return the tokenizer that a GGUF file describes.

    Raises:
        Unreadable: one of an unknown kind.
        Exception: a corrupt one.
    """
    fields = file.metadata
    kind, known = fields.get("tokenizer.ggml.model"), _known(file)
    if isinstance(fields.get(HF_JSON), str):
        check_growth(fields[HF_JSON], f"{file.path}: {HF_JSON}")
        backend = Tokenizer.from_str(fields[HF_JSON])
    elif kind == "gpt2" and known is not None:
        backend = _byte_level_tokenizer(file, known)
    elif kind in CONVERTED:
        with TemporaryDirectory() as alone:  # beside a tokenizer.json, transformers would read that instead
            (Path(alone) / "model.gguf").symlink_to(file.path.resolve())
            return AutoTokenizer.from_pretrained(alone, gguf_file="model.gguf", trust_remote_code=False)
    else:
        raise Unreadable(
            f"{file.path} has a tokenizer of a kind that is not read from GGUF files (tokenizer.ggml.model {kind}, "
            f"tokenizer.ggml.pre {fields.get('tokenizer.ggml.pre')}): name a folder with the model's tokenizer"
        )
    named: dict[str, Any] = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        number = fields.get(f"tokenizer.ggml.{key}_token_id")
        token = backend.id_to_token(number) if isinstance(number, int) else None
        if token is not None:
            named[name] = token
    if isinstance(fields.get("tokenizer.chat_template"), str):
        named["chat_template"] = fields["tokenizer.chat_template"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **named)


def _byte_level_tokenizer(file: GGUFFile, pre: PreTokenizer) -> Tokenizer:
    """Build byte-level BPE from a file's tokens and merges."""
    fields, tokens = file.metadata, file.tokens or []
    types = dict(enumerate(_token_types(file)))
    vocabulary = {token: number for number, token in enumerate(tokens) if types.get(number) != UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre.ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([
        AddedToken(tokens[number], special=kind == CONTROL, normalized=False)
        for number, kind in types.items() if kind in (CONTROL, USER_DEFINED)
    ])  # fmt: skip
    begin = fields.get("tokenizer.ggml.bos_token_id")
    if fields.get("tokenizer.ggml.add_bos_token", pre.ignore_merges) and isinstance(begin, int) and begin < len(tokens):
        special, sequence = [(tokens[begin], begin)], f"{tokens[begin]}:0 $A:0"
        backend.post_processor = processors.TemplateProcessing(single=sequence, special_tokens=special)
    return backend


def _token_types(file: GGUFFile) -> list[int]:
    """Return the types of a file's tokens; an empty list if it names none."""
    types = file.metadata.get("tokenizer.ggml.token_type")
    return types.astype(int).tolist() if isinstance(types, np.ndarray) else []


def _check_tokens(file: GGUFFile, tokenizer: Any, source: str) -> None:
    """Refuse a tokenizer whose tokens are not those of the file."""
    types = _token_types(file)
    known = {number: token for token, number in tokenizer.get_vocab().items()}
    for number, token in enumerate(file.tokens or ()):
        unused = number < len(types) and types[number] == UNUSED
        if not unused and known.get(number) != token:
            raise Unreadable(
                f"{source} and {file.path} are not of the same model: token {number} is {known.get(number)!r} in the "
                f"former and {token!r} in the latter; name the folder of the model's own tokenizer"
            )
