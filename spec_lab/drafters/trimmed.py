"""Trimmed vocabularies: a drafter drafts some of the target's tokens only, and computes no more rows of its LM head.

Source: FR-Spec (2502.14856): the LM head is most of what a small drafter reads, and few tokens make up most of a text.
q is computed over the tokens that are left, so verification stays exact; other tokens are the target's alone.

Which tokens, an option says (``Drafted``):

- ``FILE``: those of a file; ``FILE:N``: the N most frequent of them. A file holds a token's number on each line, the
  most frequent first, or the number and how often it occurs, in any order. A store that ``spec-lab index`` wrote will
  do too: the tokens of its texts are counted.
- ``N``: the N tokens with the smallest numbers. Tokenizers of byte pairs number tokens in the order in which they
  were merged, which is roughly that of their frequency; counts of similar texts are better.

The target's end-of-text tokens are always left.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.files import read_text
from spec_lab.core.options import DraftedTokens, Whole, WrongOption, brief
from spec_lab.drafters.draft_layers import N
from spec_lab.models.checkpoint import weights_hash
from spec_lab.models.target import Target
from spec_lab.propose.suffix_store import STORE, TokenStore

log = logging.getLogger(__name__)

Drafted = Annotated[str, DraftedTokens()] | Annotated[int, Whole(1)]
"""An option: which tokens are drafted, ``FILE``, ``FILE:N`` or ``N``."""
LINE = re.compile(r"\s*(\d{1,9})(?:[\s,]+(\d{1,18}))?\s*", re.ASCII)
"""A line of a file: a token's number, and perhaps how often it occurs."""


def chosen_tokens(tokens: str | int, target: Target) -> Tensor:  # [W], ascending
    """Return the tokens that are drafted.

    Raises:
        ValueError: more tokens than there are, no token that the target has, or a file of another form.
        OSError: the file cannot be read.
    """
    v = target.vocabulary
    if isinstance(tokens, int):
        order, count = np.arange(v), tokens
        log.info("tokens=%d: the tokens with the smallest numbers; counts of similar texts tell better", tokens)
    else:
        file, stated = DraftedTokens.split(tokens)
        order = _by_frequency(file, target)
        count = len(order) if stated is None else stated
    if count < 1:
        raise WrongOption(f"tokens={tokens} names no token: give 1 or more")
    if count > len(order):
        raise WrongOption(f"tokens={tokens} asks for {count} tokens, but there are only {len(order)}")
    kept = np.union1d(order[:count], list(target.ends)).astype(np.int64)
    log.info("%d of %d tokens are drafted, the target's %d end-of-text tokens included", len(kept), v, len(target.ends))
    return torch.from_numpy(kept)


def _by_frequency(file: Path, target: Target) -> np.ndarray:  # [n]
    """The tokens of a file, the most frequent first. Errors as in ``chosen_tokens``."""
    v = target.vocabulary
    if (file / STORE).exists():
        store = TokenStore.open(str(file), target)
        counts = np.bincount(store.tokens, minlength=v)[:v]
    elif file.is_dir():
        raise WrongOption(f"tokens={file} is a folder without {STORE}: name a file, or a store of spec-lab index")
    else:
        rows = [_row(file, number, line) for number, line in enumerate(_lines(file), start=1)]
        listed = np.array([token for token, _ in rows], dtype=np.int64)
        stated = [count for _, count in rows if count is not None]
        if not len(listed) or listed.max() >= v or len(np.unique(listed)) != len(listed):
            raise WrongOption(
                f"tokens={file} must list different tokens of the target {target.name}, numbers from 0 to {v - 1}"
            )
        if not stated:
            return listed
        if len(stated) < len(rows):
            raise WrongOption(f"tokens={file} must state how often each token occurs, or of none")
        counts = np.zeros(v, dtype=np.int64)
        counts[listed] = stated
    order = np.argsort(-counts, kind="stable")
    return order[: np.count_nonzero(counts)]


def _lines(file: Path) -> list[str]:
    lines = read_text(file).splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


def _row(file: Path, number: int, line: str) -> tuple[int, int | None]:
    """The token of a line, and how often it occurs."""
    match = LINE.fullmatch(line)
    if match is None:
        raise WrongOption(
            f"tokens={file} must hold a token's number on each line, and perhaps how often it occurs; line {number} is "
            f"{brief(line)}"
        )
    return int(match[1]), None if match[2] is None else int(match[2])


def trimmed(network: N, tokens: str | int | None, target: Target) -> N:
    """Return a network that drafts the tokens of the option only; None: as it is. The network itself is changed.

    Raises:
        ValueError: as in ``chosen_tokens``; the network drafts none of them.
        OSError: the file cannot be read.
    """
    if tokens is not None:
        network.trim(chosen_tokens(tokens, target))
    return network


def trimmed_hash(path: str, tokens: Tensor | None) -> str:
    """Return the hash of the weights at a path; of those that are left of a trimmed LM head."""
    return with_tokens(weights_hash(path), tokens)


def with_tokens(sha256: str, tokens: Tensor | Sequence[int] | None) -> str:
    """Return a hash of weights and of the tokens whose rows are left; None: all."""
    if tokens is None:
        return sha256
    return hashlib.sha256(sha256.encode() + np.asarray(tokens, dtype=np.int64).tobytes()).hexdigest()
