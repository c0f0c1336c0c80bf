"""From logits to the probabilities that are sampled.

The same ``logits_to_probs`` serves the target, a draft model and the autoregressive baseline, once, in this order:
logit bias and banned words, repetition penalty, frequency and presence penalty, constraint mask, temperature, top-k,
top-p, min-p (the order of vLLM; of transformers where both have a step, the mask before the temperature). Temperature 0
is one-hot at the arg max.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.history import History
from spec_lab.core.options import Number, Share, Temperature, Whole, WrongOption, brief, check_fields
from spec_lab.core.upload import upload

TopK = Annotated[int, Whole(0, 2**31 - 1)]
TopP = Annotated[float, Number(0, 1, above=True)]
Penalty = Annotated[float, Number(0.01, 100)]
"""Beyond these bounds logits overflow."""
AddedPenalty = Annotated[float, Number(-2, 2)]
LogitBias = Mapping[Any, Annotated[float, Number(-100, 100)]]
TokenLists = Sequence[Sequence[Annotated[int, Whole(0)]]]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one request.

    Args:
        temperature: 0: greedy.
        top_k: likeliest tokens kept, with ties of the last; 0: all.
        top_p: mass of the likeliest tokens kept, the smallest set with at least this mass; 1: all.
        min_p: minimum probability, relative to the likeliest token's; 0: all.
        repetition_penalty: positive logits of tokens seen before, prompt included, are divided by it, negative ones
            multiplied (CTRL, 1909.05858); 1: none.
        presence_penalty: taken from the logit of every token that was generated before, once; prompts do not count, as
            in vLLM and OpenAI's API; 0: none.
        frequency_penalty: taken from a token's logit as often as it was generated before; prompts do not count; 0:
            none.
        logit_bias: numbers added to the logits of tokens, by token id, such as {262: -5}.
        bad_words_ids: lists of token ids that are not generated, such as [[262], [1263, 373]]: the last token of each
            is banned where the others stand before it, prompt included (as in transformers; vLLM reads generated tokens
            only). Texts are banned by constraint=controller_banned.

    Penalties, biases and banned words are part of the target distribution: at every node of a draft tree they read the
    text and the path to that node, so verification under them is as exact as without.

    Within these bounds the distribution is never NaN for logits up to 1e30 in size, in float32 as in float64.

    Raises:
        ValueError: a parameter of the wrong type or out of its range; names it.
    """

    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: Share = 0.0
    repetition_penalty: Penalty = 1.0
    presence_penalty: AddedPenalty = 0.0
    frequency_penalty: AddedPenalty = 0.0
    logit_bias: LogitBias | None = field(default=None, hash=False)
    bad_words_ids: TokenLists = field(default=(), hash=False)

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "bad_words_ids", tuple(tuple(word) for word in self.bad_words_ids))
        if not all(self.bad_words_ids):
            raise WrongOption("bad_words_ids must have no empty list: it would ban every token")
        if self.logit_bias is not None:
            wrong = [token for token in self.logit_bias if not re.fullmatch(r"\d{1,12}", str(token), re.ASCII)]
            if wrong:
                raise WrongOption(f"logit_bias must have token ids as its names, not {brief(wrong[0])}")
            biases = {int(token): float(bias) for token, bias in self.logit_bias.items()}
            object.__setattr__(self, "logit_bias", biases or None)

    def check_tokens(self, vocabulary: int) -> None:
        """Refuse tokens that a target does not have.

        Raises:
            WrongOption: ``logit_bias`` or ``bad_words_ids`` names one, or ``bad_words_ids`` can ban every token.
        """
        banned = [token for word in self.bad_words_ids for token in word]
        for name, tokens in (("logit_bias", self.logit_bias or ()), ("bad_words_ids", banned)):
            if (largest := max(tokens, default=0)) >= vocabulary:
                raise WrongOption(
                    f"{name} names token {largest}, but the target has tokens 0 to {vocabulary - 1}: use ids of the "
                    "target's tokenizer"
                )
        if len({word[-1] for word in self.bad_words_ids}) >= vocabulary:
            raise WrongOption("bad_words_ids ends with every token of the target, so no token might be left")

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p can remove a token."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @cached_property
    def untruncated(self) -> Sampling:
        """The same penalties, biases and banned words at temperature 1, without top-k, top-p and min-p."""
        return replace(self, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)

    @cached_property
    def without_penalties(self) -> Sampling:
        """The same temperature, top-k, top-p and min-p alone."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    def at(self, temperature: float) -> Sampling:
        """The same parameters at another temperature."""
        return _at_temperature(self, temperature)

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty depends on how often a token was generated."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def biases(self) -> bool:
        """Whether anything is added to logits, -inf for banned tokens included."""
        return bool(self.logit_bias or self.bad_words_ids)

    @property
    def penalized(self) -> bool:
        """Whether penalties, biases or banned words change the logits: a ``History`` is needed."""
        return self.repetition_penalty != 1 or self.counts_tokens or self.biases

    @cached_property
    def token_biases(self) -> dict[int, float]:
        """The numbers added to the logits of tokens, whatever the text: -inf for banned ones."""
        banned = {word[0]: -math.inf for word in self.bad_words_ids if len(word) == 1}
        return {**(self.logit_bias or {}), **banned}


@lru_cache(maxsize=1024)
def _at_temperature(sampling: Sampling, temperature: float) -> Sampling:
    """Return parameters at another temperature: drafters ask for the same ones in every forward."""
    return replace(sampling, temperature=temperature)


def logits_to_probs(
    logits: Tensor,  # [R, V]
    sampling: Sequence[Sampling],  # [R], or one for all rows
    history: History | None = None,
    mask: Tensor | None = None,  # [R, V] bool
    scratch: Tensor | None = None,  # [>= R, V]
) -> Tensor:
    """Return the distribution sampled at each row, ``[R, V]`` float32 (float64 for float64 logits); rows sum to 1.

    Nothing is read back from the logits' device.

    Args:
        logits: raw logits; -inf is no mass. Some of each row are finite, none is NaN or +inf.
        sampling: parameters of each row; a single one serves all rows.
        history: of the rows; needed where penalties, biases or banned words are set.
        mask: tokens that a constraint allows. A row that allows none with a finite logit, banned words left out, is
            dead: its probabilities are all zero, never NaN.
        scratch: memory for the result, of its dtype; the result is then a view of it and lives until the next use. The
            logits may stand there already, and are then overwritten.
            (Fresh megabytes cost more than the arithmetic: every page of them faults.)

    Raises:
        ValueError: parameters for another number of rows; penalties, biases or banned words without ``history``.
    """
    rows = list(sampling)
    if len(rows) not in (1, len(logits)):
        raise ValueError(f"sampling parameters of {len(rows)} rows for {len(logits)} rows of logits")
    if scratch is None:
        x = logits.to(probs_dtype(logits.dtype), copy=True)
    else:
        x = scratch[: len(logits)]
        if x.data_ptr() != logits.data_ptr():
            x.copy_(logits)
    if any(s.penalized for s in rows):
        x = _penalized(x, rows, history)
    dead = None
    if mask is not None:
        x = x.masked_fill_(~mask, -torch.inf)
    if mask is not None or any(s.bad_words_ids for s in rows):
        dead = x.amax(-1, keepdim=True) == -torch.inf
    if all(s.temperature == 0 for s in rows):
        p = one_hot_(argmax(x), x)
    else:
        cold = any(s.temperature == 0 for s in rows)
        coldest = argmax(x) if cold else None
        p = _softmax_(x, rows)
        if any(s.truncates for s in rows):
            p = _truncate(p, rows)
        if coldest is not None:
            greedy = _column([s.temperature == 0 for s in rows], p, torch.bool)
            p = torch.where(greedy, torch.zeros_like(p).scatter_(-1, coldest[:, None], 1.0), p)
    return p if dead is None else p.masked_fill_(dead, 0.0)  # NaN until here


def _penalized(x: Tensor, rows: Sequence[Sampling], history: History | None) -> Tensor:
    """Return logits ``x`` with biases and penalties; a new tensor."""
    seen, counts, bias = history or History()
    if any(s.biases for s in rows):
        if bias is None:
            raise ValueError("logit biases and banned words need the history's biases")
        x = x + bias
    if any(s.repetition_penalty != 1 for s in rows):
        if seen is None:
            raise ValueError("a repetition penalty needs the tokens seen before")
        penalty = _column([s.repetition_penalty for s in rows], x)
        x = torch.where(seen, torch.where(x > 0, x / penalty, x * penalty), x)
    if any(s.counts_tokens for s in rows):
        if counts is None:
            raise ValueError("presence and frequency penalties need the counts of generated tokens")
        frequency = _column([s.frequency_penalty for s in rows], x)
        x = x - frequency * counts - _column([s.presence_penalty for s in rows], x) * (counts > 0)
    return x


def finite(logits: Tensor) -> tuple[Tensor, Tensor | None]:  # [n, V] -> [n, V], [n] bool
    """``finite_`` of a copy; on the CPU the same tensor where every row has a distribution."""
    if logits.device.type == "cpu" and math.isfinite(float(logits.sum())):
        return logits, None
    copy = logits.clone()
    return copy, finite_(copy)


def finite_(logits: Tensor) -> Tensor | None:  # [n, V] -> [n] bool
    """Set rows without a distribution to zero, and return which they are; on the CPU None where there are none.

    -inf is no mass, and is fine as long as some token has a finite logit. NaN, +inf or a row of only -inf is broken.
    """
    if logits.device.type == "cpu" and math.isfinite(float(logits.sum())):  # so are all its parts
        return None
    broken = ~torch.isfinite(logits.amax(-1))  # NaN wins, then +inf; -inf is the largest only of its own kind
    if logits.device.type == "cpu" and not broken.any():  # tokens without mass, as beyond a draft vocabulary
        return None
    logits.masked_fill_(broken[:, None], 0.0)
    return broken


def probs_dtype(logits: torch.dtype) -> torch.dtype:
    """Probabilities are float32, float64 where the logits are."""
    return torch.float64 if logits == torch.float64 else torch.float32


def argmax(x: Tensor) -> Tensor:  # [R, V] -> [R]
    """Arg max of each row, the first of equals. On the CPU NumPy's is ten times faster than torch's."""
    if x.device.type == "cpu":
        return torch.from_numpy(x.numpy().argmax(-1))
    return x.argmax(-1)


def argmax_of_finite(x: Tensor | np.ndarray) -> tuple[Tensor | np.ndarray, Tensor | np.ndarray | None]:
    """Arg max ``[R]`` of each row of ``x`` ``[R, V]``, and bool ``[R]``, the rows without a distribution (``finite_``).

    On the CPU both are arrays, and the second is None where every row has a distribution.

    The largest number of a row tells: NaN is larger than all others, and -inf is the largest only of its own kind.
    """
    if isinstance(x, Tensor):
        if x.device.type != "cpu":
            token = x.argmax(-1)
            return token, ~torch.isfinite(x.gather(-1, token[:, None])[:, 0])
        converts = x.dtype != probs_dtype(x.dtype)
        if converts and x.numel() > CHUNK and len(x) > 1:  # a few rows at a time reuse their memory
            parts = [argmax_of_finite(rows) for rows in x.split(max(1, CHUNK // x.shape[-1]))]
            wrong = [np.zeros(len(best), dtype=bool) if bad is None else bad for best, bad in parts]
            without = np.concatenate(wrong)
            return np.concatenate([best for best, _ in parts]), without if without.any() else None
        x = x.to(probs_dtype(x.dtype)).numpy()
    token = x.argmax(-1)
    fine = [math.isfinite(x.item(row, best)) for row, best in enumerate(token.tolist())]
    return token, None if all(fine) else ~np.array(fine)


CHUNK = 2**19
"""Numbers that are converted at once."""


def likeliest(x: Tensor, width: int) -> Tensor:  # [R, V] -> [R, width]
    """The ``width`` largest of each row, the largest first."""
    if x.device.type != "cpu":
        return x.topk(width, -1).indices
    return torch.from_numpy(likeliest_of(x.to(probs_dtype(x.dtype)).numpy(), width))


def likeliest_of(x: np.ndarray, width: int) -> np.ndarray:  # [R, V] -> [R, width]
    """``likeliest`` of an array. A few are found faster by as many arg max."""
    if width > FEW:
        return torch.from_numpy(x).topk(width, -1).indices.numpy()
    if width == 1:
        return x.argmax(-1, keepdims=True)
    values = x.copy()
    rows, tokens = np.arange(len(values)), np.empty((len(values), width), dtype=np.int64)
    for rank in range(width):
        tokens[:, rank] = best = values.argmax(-1)
        if rank == width - 1 and (values[rows, best] == -np.inf).any():  # what was found before is -inf as well
            order = np.argsort(-x, axis=-1, kind="stable")  # of equals the first, as above
            return order[:, :width]
        values[rows, best] = -np.inf
    return tokens


FEW = 6


def one_hot_(token: Tensor, p: Tensor) -> Tensor:  # [R], [R, V] -> [R, V]
    """The distribution that is certain of ``token``, written over ``p``."""
    if p.device.type == "cpu":  # NumPy writes a few numbers three times as fast
        p.zero_().numpy()[np.arange(len(p)), token.numpy()] = 1.0
        return p
    return p.zero_().scatter_(-1, token[:, None], 1.0)


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:  # [R or 1, 1]
    return _parameters(tuple(values), dtype or like.dtype, like.device)[:, None]


@lru_cache(maxsize=256)
def _parameters(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device, kept: a batch decodes many steps with the same parameters. Equal ones need no upload."""
    if len(set(values)) == 1:
        return torch.full((len(values),), values[0], dtype=dtype, device=device)
    return upload(device, torch.tensor(values, dtype=dtype).numpy())[0]


def _softmax_(x: Tensor, rows: list[Sampling]) -> Tensor:
    temperatures = [max(s.temperature, torch.finfo(x.dtype).tiny) if s.temperature else 1.0 for s in rows]
    if min(temperatures) < 0.01:
        x.sub_(x.amax(-1, keepdim=True))  # so that no logit overflows upwards
    if any(t != 1 for t in temperatures):
        x.div_(_column(temperatures, x))
    p = torch.softmax(x, -1, out=x)
    if p.shape[-1] > WIDE and p.dtype == torch.float32 and p.device.type == "cpu":
        p.div_(p.sum(-1, keepdim=True))  # softmax adds up less well than sum: at 131072 tokens its total is off by 1e-5
    return p


WIDE = 2**14


def _truncate(p: Tensor, rows: list[Sampling]) -> Tensor:
    """Top-k, then top-p of what is left, then min-p; renormalised."""
    if any(s.top_k for s in rows):
        sizes = [min(s.top_k or p.shape[-1], p.shape[-1]) for s in rows]
        k = _column(sizes, p, torch.long)
        kth = p.topk(max(sizes), -1).values.gather(-1, (k - 1).expand(len(p), 1))
        p = torch.where(p >= kth, p, 0.0)
        p = p / p.sum(-1, keepdim=True)
    if any(s.top_p < 1 for s in rows):
        ordered, order = p.sort(dim=-1, descending=True, stable=True)
        before = ordered.double().cumsum(-1) - ordered.double()
        ordered = torch.where(before < _column([s.top_p for s in rows], before), ordered, 0.0)
        full = _column([s.top_p >= 1 for s in rows], p, torch.bool)
        p = torch.where(full, p, torch.zeros_like(p).scatter_(-1, order, ordered))
    if any(s.min_p > 0 for s in rows):
        p = torch.where(p >= _column([s.min_p for s in rows], p) * p.amax(-1, keepdim=True), p, 0.0)
    return p / p.sum(-1, keepdim=True)
