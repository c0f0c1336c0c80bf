"""Draft models whose vocabulary differs from the target's: drafting is restricted to the tokens that both have.

Source: token-level intersection, algorithm 4 of "Accelerating LLM Inference with Lossless Speculative Decoding
Algorithms for Heterogeneous Vocabularies" (2502.05202); transformers calls it universal assisted decoding.

What is drafted. An ordinary token is shared if some token of the draft model has the same bytes, whatever marks the two
tokenizers spell them with; a special token, if one has the same text and the same role. The draft model's logits at
shared tokens become logits over the target's V tokens, all others are -inf. q is computed from these, so it is
restricted to shared tokens and renormalised before it is sampled and stated, which keeps verification exact.

What the draft model reads is a function of the sequence's tokens alone: the tokens that its own tokenizer produces for
the text so far (``Retokenized``). Drafted nodes are shared tokens and are read below it one to one, even where the
tokenizer would merge them with what precedes. Once they are accepted they are part of the text, which is tokenized
again: the KV cache keeps the longest common prefix (``DraftCache.follow``), and what was merged is computed again.

Two tokenizers with the same ordinary tokens, which differ only in added tokens or in the padding of the models'
embeddings, need no text: every token is read as its counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from logging import getLogger
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_lab.constrain.vocabulary import FastTokenizer
from spec_lab.core.options import WrongOption
from spec_lab.drafters.draft_layers import drafted_facts
from spec_lab.drafters.draft_model.retokenized import Retokenized, Tokens
from spec_lab.models.gguf_tokenizer import PROBES
from spec_lab.models.target import Target
from spec_lab.propose.expansion import Computed, DraftedLogits

log = getLogger(__name__)

FEWEST, MIN_SHARE = 16, 1 / 200
"""An intersection of fewer tokens, or of a smaller share of the target's tokens, is refused."""

SPELLED = "It is 2024; f(x) = y.\n  End"
"""A text that the bytes of a tokenizer's tokens must spell."""


class SameTokens:
    """Translates between the tokens of a target and those of a draft model, which are the same here."""

    same = True
    """Whether both have the same tokens, so that any token of the target can be read as a node."""

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the translation, for ``Part.facts`` of the proposer; none here."""
        return {}

    def read(self, tokens: list[int]) -> list[int]:
        """Return the draft model's tokens for a sequence of the target's. Empty: it cannot draft there."""
        return tokens

    def nodes(self, token: np.ndarray) -> np.ndarray:
        """Drafted tokens ``[n]`` in the draft model's ids."""
        return token

    def logits(self, computed: Computed) -> Computed:
        """The draft model's logits as logits over the target's tokens ``[n, V]``."""
        return computed

    def toy(self, vocabulary: int) -> SameTokens:
        """The same kind between two toy models over so many tokens."""
        return self


class SharedTokens(SameTokens):
    """The tokens that a target and a draft model share. See ``SameTokens``.

    Args:
        pairs: ``[S, 2]`` the shared tokens in the target's and in the draft model's ids.
        vocabulary: V, the width of the target's logits.
        reading: what the draft model reads, as in ``SameTokens.read``.
        tokens: number of tokens that the target's tokenizer has.
        trimmed: whether the draft model has logits of the shared tokens only, in the order of ``pairs``.
    """

    same = False

    def __init__(
        self,
        pairs: Sequence[tuple[int, int]],
        vocabulary: int,
        reading: Callable[[list[int]], list[int]],
        tokens: int,
        trimmed: bool = False,
    ) -> None:
        self.count, self.vocabulary, self.tokens, self.trimmed = len(pairs), vocabulary, tokens, trimmed
        self.pairs, self._reading = dict(pairs), reading
        table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        self._target, self._draft = torch.from_numpy(table[:, 0].copy()), torch.from_numpy(table[:, 1].copy())
        # Where a draft's logits are broken, any token may be drawn before the tree is dropped: it needs some id.
        self._ids = np.full(vocabulary, table[0, 1])
        self._ids[table[:, 0]] = table[:, 1]

    @property
    def facts(self) -> dict[str, Any]:
        """The number of shared tokens, and their share of the target's."""
        drafted = drafted_facts(self.count, self.vocabulary) if self.trimmed else {}
        shared = {"shared_tokens": self.count, "shared_share": self.count / self.tokens}
        return {"vocabularies": "intersect", **shared, **drafted}

    def read(self, tokens: list[int]) -> list[int]:
        """See ``SameTokens``."""
        return self._reading(tokens)

    def nodes(self, token: np.ndarray) -> np.ndarray:
        """See ``SameTokens``."""
        return self._ids[token]

    def logits(self, computed: Computed) -> Computed:
        """See ``SameTokens``."""
        draft_logits = computed.logits
        self._target, self._draft = self._target.to(draft_logits.device), self._draft.to(draft_logits.device)
        shared = draft_logits if self.trimmed else draft_logits.index_select(1, self._draft)
        return DraftedLogits(shared, self._target, self.vocabulary)

    @property
    def rows(self) -> Tensor:
        """``[S]`` the shared tokens in the draft model's ids."""
        return self._draft

    def only(self, tokens: Tensor) -> SharedTokens:
        """Return those of these tokens ``[n]`` of the target that are shared, between it and a trimmed draft model.

        Raises:
            WrongOption: none is shared.
        """
        kept = set(tokens.tolist())
        pairs = [(token, counterpart) for token, counterpart in self.pairs.items() if token in kept]
        if not pairs:
            raise WrongOption(f"tokens names none of the {self.count} tokens that the draft shares with the target")
        return SharedTokens(pairs, self.vocabulary, self._reading, self.tokens, trimmed=True)

    def toy(self, vocabulary: int) -> SharedTokens:
        """Ids in reverse order, and a last token that is not shared but can be read."""
        counterparts = [vocabulary - 1 - token for token in range(vocabulary)]
        pairs = list(enumerate(counterparts[:-1]))
        return SharedTokens(pairs, vocabulary, one_to_one(dict(enumerate(counterparts))), vocabulary)


class TrimmedTokens(SharedTokens):
    """Some of the tokens that a target and a draft model both have, which alone are drafted. All of them are read.

    Args:
        ids: ``[W]`` the tokens.
        vocabulary: V.
        trimmed: as in ``SharedTokens``.
    """

    same = True

    def __init__(self, ids: Sequence[int], vocabulary: int, trimmed: bool = True) -> None:
        super().__init__([(token, token) for token in ids], vocabulary, list, vocabulary, trimmed)
        self._ids = np.arange(vocabulary)

    @property
    def facts(self) -> dict[str, Any]:
        """The number of drafted tokens."""
        return drafted_facts(self.count, self.vocabulary)

    def toy(self, vocabulary: int) -> TrimmedTokens:
        """All tokens but the last."""
        return TrimmedTokens(range(vocabulary - 1), vocabulary, trimmed=False)


def one_to_one(counterparts: Mapping[int, int]) -> Callable[[list[int]], list[int]]:
    """Return what reads every token as its counterpart, and leaves out tokens without one."""

    def read(tokens: list[int]) -> list[int]:
        return [counterparts[token] for token in tokens if token in counterparts]

    return read


def tokens_of(target: Target, option: str) -> Tokens:
    """Return the tokens of a target, for an option.

    Raises:
        ValueError: it has no tokenizer.
    """
    if target.tokenizer is None:
        raise ValueError(f"{option} requires the target's tokenizer, and {target.name} has none")
    return Tokens(target.tokenizer, target.vocabulary, target.ends, target.name)


def shared_pairs(target: Tokens, draft: Tokens, alike: bool, option: str) -> list[tuple[int, int]]:
    """Return the tokens that a target and a draft model share, in the ids of both.

    Args:
        alike: whether they are compared by their names.
        option: that compares them.

    Raises:
        ValueError: the tokens of one have no known bytes.
    """
    meanings = [vocabulary.by_meaning(_spelling(vocabulary, alike, option)) for vocabulary in (target, draft)]
    return sorted((token, meanings[1][key]) for key, token in meanings[0].items() if key in meanings[1])


def intersect(target: Target, draft: Tokens) -> SharedTokens:
    """Return the tokens that a target and a draft model share, and log how many there are.

    Raises:
        ValueError: the target has no tokenizer; the tokens of one have no known bytes; they share too few.
    """
    option = "proposer.vocabularies=intersect"
    mine = tokens_of(target, option)
    alike = mine.own == draft.own and all(mine.encode(text) == draft.encode(text) for text in PROBES)
    pairs = shared_pairs(mine, draft, alike, option)
    ordinary = sum(token not in mine.special for token, _ in pairs)
    least = max(FEWEST, round(MIN_SHARE * len(mine.names)))
    if ordinary < least:
        raise ValueError(
            f"{option}: the draft {draft.name} shares {ordinary} of the {len(mine.names)} tokens of the target "
            f"{target.name}, at least {least} are required; choose a draft model with a more similar tokenizer, or "
            "proposer.vocabularies=strings, which needs no shared tokens"
        )
    if alike:
        numbers = {token: number for number, token in draft.names.items()}
        counterparts = {number: numbers[token] for number, token in mine.names.items() if token in numbers}
        reading = one_to_one(counterparts)
    else:
        reading = Retokenized(
            mine, draft, {token: counterpart for token, counterpart in pairs if token in mine.special}
        )
    shared = SharedTokens(pairs, target.vocabulary, reading, len(mine.names))
    log.info(
        "%s: the draft %s shares %d of the %d tokens of the target (%.1f %%), and reads %s", option, draft.name,
        shared.count, shared.tokens, 100 * shared.facts["shared_share"],
        "each token as its own" if alike else "the text as its own tokenizer splits it",
    )  # fmt: skip
    return shared


def _spelling(tokens: Tokens, alike: bool, option: str) -> Callable[[int], Hashable]:
    """Return the function from an ordinary token to its spelling: its name if tokenizers are alike, else its bytes."""
    if alike:
        return tokens.names.__getitem__
    cannot = f"{option} cannot compare the tokens of {tokens.name} by their bytes"
    if not isinstance(tokens.tokenizer, FastTokenizer):
        raise ValueError(f"{cannot}: a {type(tokens.tokenizer).__name__} is no fast tokenizer")
    try:
        data = tokens.spell(SPELLED)
    except ValueError as error:
        raise ValueError(f"{cannot}: {error}") from error
    if data.removeprefix(b" ") != SPELLED.encode():
        raise ValueError(f"{cannot}: they spell {SPELLED!r} as {data!r}")
    return tokens.pieces.__getitem__
