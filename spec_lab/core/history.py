"""The text before a row, as penalties, logit biases and banned words read it. Nothing is read back from the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.shape import Shape
from spec_lab.core.upload import upload

if TYPE_CHECKING:
    from spec_lab.core.probabilities import Sampling

NO_TOKEN, ANY_TOKEN = -1, -2
"""Where a text is shorter than a banned word, and where a word is shorter than the longest."""


class History(NamedTuple):
    """The history of some rows; a field is None where no request needs it.

    Args:
        seen: ``[R, V]`` bool, the tokens that occurred before, prompt included.
        counts: ``[R, V]`` float32, how often each token was generated: in the text after the prompt and on the path.
        bias: ``[R, V]`` float32, what is added to the logits; -inf where the token would complete a banned word.
    """

    seen: Tensor | None = None
    counts: Tensor | None = None
    bias: Tensor | None = None

    def at(self, rows: Tensor) -> History:
        """Return the history of some rows ``[n]``."""
        return History(*(None if values is None else values[rows] for values in self))


@dataclass(frozen=True)
class _Words:
    """Banned words of two tokens and more.

    Args:
        tails: ``[B, L - 1]`` the last tokens of each text; ``NO_TOKEN`` before its beginning.
        prefixes: ``[W, L - 1]`` each word without its last token, ``ANY_TOKEN`` before it.
        last: ``[W]`` the last token of each.
        banned: ``[B, W]`` bool, which words each text's request bans.
    """

    tails: np.ndarray
    prefixes: np.ndarray
    last: np.ndarray
    banned: np.ndarray

    @staticmethod
    def of(texts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> _Words | None:
        """Return the words that some request bans; None without any."""
        words = sorted({tuple(word) for sampling in samplings for word in sampling.bad_words_ids if len(word) > 1})
        if not words:
            return None
        width = max(map(len, words)) - 1
        tails = np.full((len(texts), width), NO_TOKEN)
        for row, text in enumerate(texts):
            end = list(text[-width:])
            tails[row, width - len(end) :] = end
        prefixes = np.array([[ANY_TOKEN] * (width + 1 - len(word)) + list(word[:-1]) for word in words])
        banned = [[word in sampling.bad_words_ids for word in words] for sampling in samplings]
        return _Words(tails, prefixes, np.array([word[-1] for word in words]), np.array(banned))

    def completed(self, shape: Shape, token: Tensor, rows: np.ndarray, vocabulary: int) -> Tensor:  # [n, V] bool
        """Return the tokens that would complete a banned word at some rows."""
        lineage, depth, root = shape.lineage[rows], shape.depth[rows], shape.root[rows]
        back, width = np.arange(self.tails.shape[1])[::-1], self.tails.shape[1]  # tokens between it and the row's next
        on_path = back < depth[:, None]
        node = lineage[:, np.minimum(back, lineage.shape[1] - 1)] - shape.roots
        earlier = len(token) + root[:, None] * width + (width - 1 - (back - depth[:, None]))
        uploaded = upload(
            token.device, self.tails.ravel(), np.where(on_path, node, earlier), root,
            self.prefixes, self.last, self.banned,
        )  # fmt: skip
        tails, where, root, prefixes, last, banned = uploaded
        before = torch.cat([token, tails])[where][:, None]  # [n, 1, L - 1]
        complete = ((before == prefixes) | (prefixes == ANY_TOKEN)).all(-1) & banned[root]  # [n, W]
        hits = torch.zeros(len(rows), vocabulary, device=token.device)
        return hits.index_add_(1, last, complete.float()) > 0


@dataclass(frozen=True)
class TextHistories:
    """The histories of some texts, each with its request's sampling parameters; and of the rows of forests below them.

    Args:
        ends: at the end of each text, ``[B, V]``; words of several tokens left out.
        vocabulary: V.
        device: of ``ends``.
    """

    ends: History
    words: _Words | None
    vocabulary: int
    device: torch.device

    @staticmethod
    def of(
        texts: Iterable[Sequence[int]],
        prompts: Iterable[int],
        samplings: Sequence[Sampling],
        vocabulary: int,
        device: torch.device,
    ) -> TextHistories | None:
        """Return the histories of texts; None where no sampling reads any.

        Args:
            texts: ``[B]`` tokens, prompts included.
            prompts: ``[B]`` how many tokens of each are its prompt's.
            samplings: ``[B]``, or one for all.
            vocabulary: V.
        """
        if not any(sampling.penalized for sampling in samplings):
            return None
        texts, prompts = list(texts), list(prompts)
        samplings = list(samplings) * (len(texts) if len(samplings) == 1 else 1)
        shape, seen, counts, bias = (len(texts), vocabulary), None, None, None
        if any(sampling.repetition_penalty != 1 for sampling in samplings):
            seen = torch.zeros(shape, dtype=torch.bool, device=device)
            seen[_places(texts, device)] = True
        if any(sampling.counts_tokens for sampling in samplings):
            generated = [text[prompt:] for text, prompt in zip(texts, prompts, strict=True)]
            counts = torch.zeros(shape, device=device)
            counts.index_put_(_places(generated, device), counts.new_ones(()), accumulate=True)
        if any(sampling.biases for sampling in samplings):
            biases = [sampling.token_biases for sampling in samplings]
            values = np.fromiter(chain.from_iterable(bias.values() for bias in biases), dtype=np.float32)
            bias = torch.zeros(shape, device=device)
            bias[_places(biases, device)] = upload(device, values)[0]
        return TextHistories(History(seen, counts, bias), _Words.of(texts, samplings), vocabulary, device)

    def here(self) -> History:
        """Return the histories at the ends of the texts."""
        texts = next(len(values) for values in self.ends if values is not None)
        return self.before(Shape(texts, np.empty(0, dtype=np.int64)), np.empty(0, dtype=np.int64), np.arange(texts))

    def before(self, shape: Shape, token: Tensor | np.ndarray, rows: np.ndarray) -> History:
        """Return the histories of what is sampled at some rows of a forest.

        Args:
            token: the tokens of its nodes, of which those on the paths to ``rows`` are read.
            rows: ``[n]`` of the forest.
        """
        lineage = shape.lineage[rows]
        places, edges = np.nonzero(lineage >= shape.roots)
        root, row, node = upload(self.device, shape.root[rows], places, lineage[places, edges] - shape.roots)
        tokens = upload(self.device, token)[0] if isinstance(token, np.ndarray) else token
        seen, counts, bias = self.ends.at(root)
        if seen is not None:
            seen[row, tokens[node]] = True
        if counts is not None:
            counts.index_put_((row, tokens[node]), counts.new_ones(()), accumulate=True)
        if bias is not None and self.words is not None:
            bias.masked_fill_(self.words.completed(shape, tokens, rows, self.vocabulary), -torch.inf)
        return History(seen, counts, bias)


def _places(tokens: Sequence[Iterable[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the row and the token of each of some texts' tokens."""
    rows = [list(row) for row in tokens]
    row = np.repeat(np.arange(len(rows)), [len(some) for some in rows])
    token = np.fromiter(chain.from_iterable(rows), dtype=np.int64)
    on_device = upload(device, row, token)
    return on_device[0], on_device[1]
