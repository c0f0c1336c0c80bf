"""What a step records of its distributions, so that other verifiers and trees can be evaluated without the model.

A recorded row holds p and q at the same tokens, those with the largest max(p, q), and what the rest of the vocabulary
has: its mass under either, and its largest probability under either. Children of the row are always among the tokens.
Probabilities are stored in float32, as they are computed: nothing is rounded further, and what is left out is bounded
by the four numbers of the rest.

p is the target distribution at temperature 1, after the repetition penalty and before top-k, top-p and min-p: the
request's sampling, and others, follow from it. q is the draft distribution that the draft states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft, upload
from spec_lab.core.randomness import Draws, Key, Purpose

ID_BYTES = 3
"""Bytes of a token's number: vocabularies are smaller than 2**24."""


@dataclass(frozen=True)
class Recording:
    """What the steps of a run record.

    Args:
        drafts: whether every drafted token is kept with its target and draft probability.
        top: tokens recorded of each row's distributions; all if the vocabulary is no larger. 0: no distributions.
        share: the share of steps whose distributions are recorded. Which ones is a counter-based choice, so that a
            resumed run records the same.
    """

    drafts: bool = False
    top: int = 0
    share: float = 1.0

    def chosen(self, draws: Draws, keys: Sequence[tuple[int, int, int]]) -> np.ndarray:  # [B] bool
        """Return which of the sequences with these keys (request, branch, step) record their distributions."""
        if not self.top or self.share == 1:
            return np.full(len(keys), self.top > 0)
        weights = torch.tensor([[1.0 - self.share, self.share]], dtype=torch.float64).expand(len(keys), 2)
        return draws.pick(weights, [Key(*one, Purpose.RECORD) for one in keys]).numpy() == 1


@dataclass(frozen=True, eq=False)
class Distributions:
    """Recorded distributions of rows of a forest. Arrays are the host's.

    Args:
        rows: ``[n]`` rows of the forest.
        ids: ``[n, K]`` the recorded tokens; ``[n, 0]`` where all V are, in order.
        p: ``[n, K]`` float32 target probabilities at temperature 1; zeros where the logits hold no distribution.
        q: ``[n, K]`` float32 draft probabilities; zeros where ``expanded`` is False.
        rest: ``[n, 4]`` float32: of all other tokens the mass of p, the mass of q, the largest p, the largest q.
        expanded: ``[n]`` whether the row has a q.
        roots: ``[B]`` the token of each root.
        features: ``[B]`` a hash of the hidden states that the step computed at each sequence's committed positions;
            empty where the proposer reads none.
    """

    rows: np.ndarray
    ids: np.ndarray
    p: np.ndarray
    q: np.ndarray
    rest: np.ndarray
    expanded: np.ndarray
    roots: list[int]
    features: list[str]


def recorded_numbers(rows: np.ndarray, draft: Draft, p: Tensor, top: int) -> Mapping[str, Tensor]:
    """Return what the host reads for ``Distributions``: ids, p, q, rest. Nothing is read back here.

    Args:
        rows: ``[n]`` rows of the forest.
        draft: its forest.
        p: ``[n, V]`` their target probabilities.
        top: tokens to record.
    """
    p = torch.nan_to_num(p, nan=0.0)
    q, has = torch.zeros_like(p), expanded(draft, rows)
    if draft.q is not None and draft.q_row is not None and has.any():
        here, there = upload(p.device, np.flatnonzero(has), draft.q_row[rows[has]])
        q[here] = draft.q[there].to(p.dtype)
    count = draft.shape.count[rows]
    width = max(top, int(count.max(initial=0)))
    if width >= p.shape[-1]:
        nothing = p.new_zeros(len(rows), 0, dtype=torch.int32)
        return {"ids": nothing, "p": p.float(), "q": q.float(), "rest": p.new_zeros(len(rows), 4, dtype=torch.float32)}
    score = torch.maximum(p, q)
    if draft.shape.nodes:
        place = np.full(draft.shape.rows, -1)
        place[rows] = np.arange(len(rows))
        below = place[draft.shape.parent]
        parent, node = upload(p.device, below[below >= 0], np.flatnonzero(below >= 0))
        score[parent, draft.token[node]] = 2.0
    ids = score.topk(width, -1).indices
    p_rest, q_rest = p.scatter(-1, ids, 0.0), q.scatter(-1, ids, 0.0)
    sums = [p_rest.sum(-1, dtype=torch.float64), q_rest.sum(-1, dtype=torch.float64), p_rest.amax(-1), q_rest.amax(-1)]
    rest = torch.stack([one.float() for one in sums], -1)
    return {"ids": ids.int(), "p": p.gather(-1, ids).float(), "q": q.gather(-1, ids).float(), "rest": rest}


def feature_hash(hidden: Tensor | None) -> str:
    """Return a hash of hidden states ``[n, H]``, as float32; empty of none. It reads them on the host."""
    if hidden is None:
        return ""
    return blake2b(hidden.float().cpu().contiguous().numpy().tobytes(), digest_size=8).hexdigest()


def expanded(draft: Draft, rows: np.ndarray) -> np.ndarray:  # [n] bool
    """Return which of the rows have a q."""
    return np.zeros(len(rows), dtype=bool) if draft.q_row is None else draft.q_row[rows] >= 0


def pack_ids(ids: np.ndarray) -> bytes:  # [K]
    """Return the tokens as ``ID_BYTES`` bytes each, the lowest first."""
    return np.ascontiguousarray(ids, dtype="<u4").view(np.uint8).reshape(-1, 4)[:, :ID_BYTES].tobytes()


def unpack_ids(packed: bytes) -> np.ndarray:  # [K]
    """Return what ``pack_ids`` has packed, as int64."""
    each = np.frombuffer(packed, dtype=np.uint8).reshape(-1, ID_BYTES)
    whole = np.zeros((len(each), 4), dtype=np.uint8)
    whole[:, :ID_BYTES] = each
    return whole.view("<u4")[:, 0].astype(np.int64)
