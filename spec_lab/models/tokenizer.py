"""A checkpoint's tokenizer, and whether its tokens are the model's."""

from __future__ import annotations

from collections.abc import Sequence
from logging import getLogger
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from spec_lab.core.files import read_json, read_text
from spec_lab.models import checkpoint
from spec_lab.models.tokenizer_growth import TooLong, check_growth

log = getLogger(__name__)

MAX_TOKENS = 2**53
"""In place of a tokenizer's own maximum length, above which it warns: longer than any text."""


def read_tokenizer(path: str, folder: Path, config: Any) -> Any:
    """Return the tokenizer.

    Args:
        path: the folder or hub name as given.

    Raises:
        ValueError: a file is missing or corrupt, or tokenizer_class names no tokenizer.
    """
    try:
        settings = read_json(folder / "tokenizer_config.json", any_number=True) or {}
        for name in (settings.get("tokenizer_class"), getattr(config, "tokenizer_class", None)):
            _check_tokenizer_class(name)
        for name in ("init_inputs", "fast_tokenizer_files"):  # arguments and files that the checkpoint chooses
            if settings.get(name):
                raise ValueError(f"tokenizer_config.json sets {name}")
        if (folder / "tokenizer.json").exists():
            check_growth(read_text(folder / "tokenizer.json", checkpoint.MAX_TOKENIZER), f"{path}/tokenizer.json")
        tokenizer = AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ValueError(f"tokenizer_config.json leads to a {type(tokenizer).__name__}")
        tokenizer.model_max_length = MAX_TOKENS  # the length of a prompt is checked against the target's context
        tokenizer.decode(tokenizer.encode("a b"), skip_special_tokens=True)
        return tokenizer
    except TooLong:
        raise
    except Exception as error:  # tokenizers raises plain Exceptions, transformers errors of many types
        raise ValueError(
            f"the tokenizer of {path} cannot be read ({checkpoint.one_line(error)}): its tokenizer_config.json or "
            "its tokenizer.json is missing or corrupt; copy or download it again"
        ) from error


def _check_tokenizer_class(name: Any) -> None:
    """Refuse the name of any class of transformers that is no tokenizer: its ``from_pretrained`` could read pickles."""
    if name is None:
        return
    if not isinstance(name, str):
        raise ValueError(f"tokenizer_class must be the name of a tokenizer, not {name!r}")
    for class_name in (name, name.removesuffix("Fast")):
        named = getattr(transformers, class_name, None)
        if named is not None and not (isinstance(named, type) and issubclass(named, PreTrainedTokenizerBase)):
            raise ValueError(f"tokenizer_class {name!r} is no tokenizer of transformers")


def check_vocabulary(path: str, tokenizer: Any, vocabulary: int) -> None:
    """Refuse a tokenizer whose own vocabulary exceeds the model's.

    An added token may lie beyond the model's vocabulary, as a padding token that was added later often does: it is
    never emitted, and a prompt that holds it is refused.

    Raises:
        ValueError: a token of its own lies beyond the vocabulary; the message names it.
    """
    added = tokenizer.get_added_vocab()
    beyond = {token: number for token, number in tokenizer.get_vocab().items() if number >= vocabulary}
    original = {token: number for token, number in beyond.items() if token not in added}
    token, largest = max((original or beyond).items(), key=lambda item: item[1], default=("", -1))
    if original:
        raise ValueError(
            f"the tokenizer of {path} has the token {token!r} with the id {largest}, but the model has {vocabulary} "
            "tokens, from 0: they do not belong together; use the tokenizer that came with the weights"
        )
    if beyond:
        more = f" (and {len(beyond) - 1} more)" if len(beyond) > 1 else ""
        log.warning(
            "the tokenizer of %s has the added token %r with the id %d%s, but the model has %d tokens: such a token is "
            "never emitted, and prompts that hold it are refused", path, token, largest, more, vocabulary,
        )  # fmt: skip


def check_stop_tokens(where: str, tokens: Sequence[int], vocabulary: int) -> list[int]:
    """Return the end-of-text tokens that lie below V; the others, which are never emitted, are ignored with a warning.

    Args:
        where: the file that names them.
        tokens: their ids.
        vocabulary: V, the number of the model's tokens.

    Raises:
        ValueError: all of the tokens lie beyond V.
    """
    held = [token for token in tokens if token < vocabulary]
    if tokens and not held:
        raise ValueError(
            f"{where}: eos_token_id {tokens[0]} is not a token: the model has {vocabulary}, from 0; correct it, or "
            "remove the field"
        )
    if len(held) < len(tokens):
        beyond = next(token for token in tokens if token >= vocabulary)
        log.warning(
            "%s: eos_token_id %d is ignored: the model has %d tokens and never emits it", where, beyond, vocabulary
        )
    return held
