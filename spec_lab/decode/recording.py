"""Records of a step's distributions, so that other verifiers and trees can be evaluated without the model.

A recorded row holds p and q at the same tokens, those with the largest max(p, q), and what the rest of the vocabulary
has: its mass under either, and its largest probability under either. Children of the row are always among the tokens.
Probabilities are stored in float32, as they are computed: nothing is rounded further, and what is left out is bounded
by the four numbers of the rest.

p is the target distribution at temperature 1, after the repetition penalty and before top-k, top-p and min-p: the
request's sampling, and others, follow from it. q is the draft distribution that the draft states.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.core.randomness import Draws, Key, Purpose
from spec_lab.core.shape import Shape
from spec_lab.core.upload import upload
from spec_lab.decode.commit import Committed

ID_BYTES = 3
"""Bytes of a token's number: vocabularies are smaller than 2**24."""


@dataclass(frozen=True)
class Recording:
    """Options of the records of a run's steps.

    Args:
        drafts: whether every drafted token is kept with its probabilities, and every emitted one (``Recorded``).
        top: tokens recorded of each row's distributions; all if the vocabulary is no larger. 0: no distributions.
        share: the share of steps whose distributions are recorded. Which ones is a counter-based choice, so that a
            resumed run records the same.
        experts: whether the experts that rows read are counted (``ExpertCounts``).
    """

    drafts: bool = False
    top: int = 0
    share: float = 1.0
    experts: bool = False

    def chosen(self, draws: Draws, keys: Sequence[tuple[int, int, int]]) -> np.ndarray:  # [B] bool
        """Return which of the sequences with these keys (request, branch, step) record their distributions."""
        if not self.top or self.share == 1:
            return np.full(len(keys), self.top > 0)
        weights = torch.tensor([[1.0 - self.share, self.share]], dtype=torch.float64).expand(len(keys), 2)
        return draws.pick(weights, [Key(*key, Purpose.RECORD) for key in keys]).numpy() == 1


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


@dataclass(frozen=True, eq=False)
class Recorded:
    """Drafted nodes, their probabilities, and the emitted tokens of a step. Arrays are the host's.

    Args:
        token: ``[M]`` the drafted tokens.
        p: ``[M]`` target probability of each node's token below its parent; None where the target's arg max settles it.
        q: ``[M]`` its draft probability, NaN where it was not sampled; None if none was.
        stop: ``[R]`` the verdict's; None where the target's arg max settles it.
        argmax: ``[R]`` the target's arg max of each row, where it settles p and stop.
        last: ``[B]`` the token emitted after each accepted path; -1 for none.
        last_p: ``[B]`` its target probability; None where the target's arg max settles it.
        legal: ``[R]`` whether the constraint allows each row; None without a constraint on the target.
        forced: ``[R]`` whether one token only is allowed after each row; None without a constraint on the target.
        broken: trees that were not verified, since their forward or draft failed.
        predicted: ``[M]`` the drafter's own prediction that each node is accepted (``Draft.predict``); None without it.
        greedy_q: ``[M]`` as in ``Draft``.
    """

    token: list[int]
    p: np.ndarray | None
    q: np.ndarray | None
    stop: np.ndarray | None
    argmax: np.ndarray | None
    last: np.ndarray
    last_p: np.ndarray | None
    legal: np.ndarray | None
    forced: np.ndarray | None
    broken: Collection[int] = ()
    predicted: np.ndarray | None = None
    greedy_q: np.ndarray | None = None

    def columns(self, shape: Shape, committed: Sequence[Committed]) -> list[dict[str, Any]]:
        """Return ``schema.DRAFT_COLUMNS`` of each tree."""
        parent, nodes = shape.parent, np.arange(shape.roots, shape.rows)
        stop, p = self.stop, self.p
        if self.argmax is not None:
            p = (self.argmax[parent] == self.token).astype(np.float64)
            stop = np.zeros(shape.rows)
            stop[[got.path[-1] if got.path else tree for tree, got in enumerate(committed)]] = 1.0
        accept = conditional_acceptance(shape, np.zeros(shape.rows) if stop is None else stop)
        forced = None if self.forced is None or self.legal is None else self.forced[parent] & self.legal[nodes]
        columns = []
        for tree, got in enumerate(committed):
            drafted = shape.trees[tree][1:] - shape.roots
            emits = bool(got.tokens) and self.last[tree] >= 0
            columns.append(
                {
                    "draft_tokens": [self.token[node] for node in drafted.tolist()],
                    "draft_parents": shape.places[parent[drafted]].tolist(),
                    "draft_p": _listed(p, drafted),
                    "draft_q": _listed(self.q, drafted),
                    "draft_accept": _listed(None if tree in self.broken else accept, drafted),
                    "draft_greedy_q": None if self.greedy_q is None else _listed(self.greedy_q, drafted),
                    "draft_confidence": None if self.predicted is None else _listed(self.predicted, drafted),
                    "draft_legal": None if self.legal is None else self.legal[drafted + shape.roots].tolist(),
                    "draft_forced": None if forced is None else forced[drafted].tolist(),
                    "emitted_tokens": [emitted.token for emitted in got.tokens],
                    "emitted_origins": [emitted.origin for emitted in got.tokens],
                    "emitted_p": None if not emits else 1.0 if self.last_p is None else float(self.last_p[tree]),
                }
            )
        return columns


def conditional_acceptance(shape: Shape, stop: np.ndarray) -> np.ndarray:  # [M]
    """Return the probability that each node is accepted given that its parent is; NaN where that cannot happen.

    A node is accepted where the path ends at it or below it. So the product along a path is the probability that the
    path is accepted, and what the children of its end leave of 1 is the share of it that stops there.

    Args:
        stop: ``[R]`` the probability that the accepted path ends at each row.
    """
    reach, parents = stop.tolist(), shape.parent.tolist()
    for node in range(shape.nodes - 1, -1, -1):  # parents come before their children
        reach[parents[node]] += reach[shape.roots + node]
    below = zip(parents, reach[shape.roots :], strict=True)
    return np.array([min(1.0, reached / reach[above]) if reach[above] else np.nan for above, reached in below])


def _listed(values: np.ndarray | None, nodes: np.ndarray) -> list[float | None]:
    """The numbers of some nodes, None for NaN."""
    if values is None:
        return [None] * len(nodes)
    return [None if np.isnan(value) else value for value in values[nodes].tolist()]


def recorded_numbers(rows: np.ndarray, draft: Draft, p: Tensor, top: int) -> Mapping[str, Tensor]:
    """Return what the host reads for ``Distributions``: ids, p, q, rest. Nothing is read back here.

    Args:
        rows: ``[n]`` rows of the forest.
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
        index = np.full(draft.shape.rows, -1)
        index[rows] = np.arange(len(rows))
        below = index[draft.shape.parent]
        parent, node = upload(p.device, below[below >= 0], np.flatnonzero(below >= 0))
        score[parent, draft.token[node]] = 2.0
    ids = score.topk(width, -1).indices
    p_rest, q_rest = p.scatter(-1, ids, 0.0), q.scatter(-1, ids, 0.0)
    sums = [p_rest.sum(-1, dtype=torch.float64), q_rest.sum(-1, dtype=torch.float64), p_rest.amax(-1), q_rest.amax(-1)]
    rest = torch.stack([total.float() for total in sums], -1)
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
