"""Numbers of the rows of a forest that a step needs besides p. Nothing is read back from the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spec_lab.constrain import Masks
from spec_lab.constrain.protocol import TokenWeights
from spec_lab.core.draft import DETERMINISTIC, Draft
from spec_lab.core.history import History
from spec_lab.core.probabilities import Sampling, logits_to_probs
from spec_lab.core.shape import Shape
from spec_lab.core.upload import upload
from spec_lab.verify import Verdict
from spec_lab.verify.arrays import Array, Arrays
from spec_lab.verify.verdict import in_trees


def without_token_(p: Tensor, draft: Draft, masks: Masks) -> Array:  # [R] bool
    """Rows at which nothing is emitted: barriers, and legal ones whose allowed tokens have no mass.

    A verifier needs a distribution at every row. There it gets all mass on the first token that no child holds, in
    place, so that a path that reaches the row ends there; the token itself is never emitted.
    """
    arrays = Arrays.like(p)
    no_token = arrays.index(masks.barrier) | (arrays.index(masks.legal) & arrays.read(p.sum(-1) == 0))
    if arrays.device is None and not no_token.any():
        return no_token
    table = arrays.tensor(arrays.shape(draft.shape).table)  # [R, K] rows of children
    rows, none = arrays.tensor(no_token), draft.token.new_full((1,), -1)
    below = torch.cat([none, draft.token])[(table - draft.shape.roots + 1).clamp_min(0)]  # [R, K] tokens of children
    taken = (below[:, :, None] == torch.arange(below.shape[1] + 1, device=p.device)).any(1)  # [R, K + 1]
    free = (~taken).to(torch.int8).argmax(-1, keepdim=True)  # [R, 1]
    p.masked_fill_(rows[:, None], 0.0)
    p.scatter_(-1, free, torch.where(rows[:, None], 1.0, p.gather(-1, free)))
    return no_token


def constrained_probs(
    logits: Tensor,
    sampling: Sequence[Sampling],
    history: History | None,
    allowed: Tensor | None,
    potential: Sequence[TokenWeights | None] | None,
    scratch: Tensor | None = None,
) -> Tensor:  # [R, V]
    """Return the target probabilities under a constraint: masked, or given a valid output where there are potentials.

    Top-k, top-p and min-p come after a mask that is the constraint's (``logits_to_probs``), and before a potential: p
    is then what is sampled without the constraint.

    Args:
        logits, sampling, history, scratch: as in ``logits_to_probs``.
        allowed: ``[R, V]`` bool, the masks; None without a constraint.
        potential: ``[R]`` as in ``Masks``.
    """
    truncated = potential is not None and any(row_sampling.truncates for row_sampling in sampling)
    p = logits_to_probs(logits, sampling, history, None if truncated else allowed, scratch=scratch)
    if potential is not None:
        condition_(p, potential)
    return p


def condition_(p: Tensor, potential: Sequence[TokenWeights | None]) -> None:
    """Turn p ``[R, V]`` into p(token | row) h(token) / sum of p h, in place: the distribution given a valid output.

    Args:
        p: as sampled without the constraint.
        potential: ``[R]`` h of the tokens after each row; None leaves a row as it is. A row without mass becomes zero.
    """
    rows = [row for row, weights in enumerate(potential) if weights is not None]
    given = [weights for weights in potential if weights is not None]
    if not rows:
        return
    row, token, weight = upload(
        p.device,
        np.repeat(rows, [len(weights.tokens) for weights in given]),
        np.concatenate([weights.tokens for weights in given]).astype(np.int64, copy=False),
        np.concatenate([weights.weight for weights in given]),
    )
    mass = p[row, token].double() * weight  # products of small numbers
    total = torch.zeros(len(p), dtype=mass.dtype, device=p.device).index_add_(0, row, mass)[row]
    p.index_fill_(0, upload(p.device, np.array(rows))[0], 0.0)
    p[row, token] = torch.where(total > 0, mass / total, 0.0).to(p.dtype)


def expected_counts(
    verdict: Verdict, shape: Shape, forced: np.ndarray | None, no_token: Array | None
) -> tuple[Array, Array]:
    """Expected accepted and emitted tokens of each tree ``[B]``, forced ones left out.

    Args:
        forced: ``[R]`` rows with a forced token; None without a constraint on the target.
        no_token: ``[R]`` rows at which nothing is emitted, as in ``without_token_``.
    """
    if forced is None or no_token is None:
        accepted = verdict.expected_accepted(shape)
        return accepted, accepted + 1.0
    free = np.append(~forced, False)  # the last entry is for -1 in the lineage
    depth = free[shape.lineage].sum(1) - free[:-1]  # of the path above each row
    if isinstance(no_token, np.ndarray):
        accepted, emitted = depth, depth + (~forced & ~no_token)
        return tuple(np.bincount(shape.root, weights=verdict.stop * what, minlength=shape.roots)
                     for what in (accepted, emitted))  # type: ignore[return-value]  # fmt: skip
    (here,) = upload(no_token.device, np.stack([depth, ~forced]))
    grid = shape.on(no_token.device).grid
    return in_trees(verdict.stop * here[0], grid).sum(1), in_trees(
        verdict.stop * (here[0] + here[1] * ~no_token), grid
    ).sum(1)


def logprobs_of(
    logits: Tensor, allowed: Tensor | None, draft: Draft, row: Array, token: Array
) -> tuple[Tensor, Tensor]:  # [M], [B]
    """Log-probabilities of all drafted tokens, and of the token emitted after each accepted path."""
    logprobs = logits if logits.dtype == torch.float64 else logits.float()
    if allowed is not None:
        logprobs = logprobs.masked_fill(~allowed, -torch.inf)
    logprobs = logprobs.log_softmax(-1)
    parent, end, last = (
        upload(logprobs.device, values)[0] if isinstance(values, np.ndarray) else values
        for values in (draft.shape.parent, row, token)
    )
    return logprobs[parent, draft.token], logprobs[end, last.clamp_min(0)]


def target_probabilities(draft: Draft, p: Tensor) -> Array:  # [M]
    """Target probability of every node's token below its parent."""
    arrays = Arrays.like(p)
    return arrays.read(p)[arrays.shape(draft.shape).parent, _tokens(draft, arrays)]


def draft_probabilities(draft: Draft) -> Array | None:  # [M]
    """Draft probability of every node's token below its parent, NaN where it was not sampled; None if none was."""
    if draft.q is None or draft.q_row is None:
        return None
    arrays = Arrays.like(draft.q)
    q_row = draft.q_row[draft.shape.parent]
    sampled, q_row = (q_row >= 0) & (draft.codes != DETERMINISTIC), np.maximum(q_row, 0)
    if arrays.device is not None:
        sampled, q_row = upload(arrays.device, sampled, q_row)
    return arrays.where(sampled, arrays.read(draft.q)[q_row, _tokens(draft, arrays)], np.nan)


def probability_of(p: Tensor, row: Array, token: Array) -> Array:  # [B]
    """Target probability of the token emitted at each row; anything where there is none (-1)."""
    arrays = Arrays.like(p)
    return arrays.read(p)[arrays.index(row), arrays.at_least(arrays.index(token), 0)]


def _tokens(draft: Draft, arrays: Arrays) -> Array:  # [M]
    return draft.token if draft.array is None else arrays.index(draft.array[: draft.shape.nodes])


def at_temperature_1(
    logits: Tensor, rows: np.ndarray, samplings: Sequence[Sampling], history: History | None, allowed: Tensor | None
) -> Tensor:  # [n, V]
    """Target probabilities of some rows at temperature 1, without top-k, top-p and min-p.

    Args:
        logits: ``[R, V]``.
        rows: ``[n]`` of them.
        samplings: of every row, or one for all: penalties, biases and banned words apply.
        history, allowed: of every row, as in ``logits_to_probs``.
    """
    (here,) = upload(logits.device, rows)
    chosen = samplings if len(samplings) == 1 else [samplings[row] for row in rows]
    plain = [sampling.untruncated for sampling in chosen]
    before = None if history is None else history.at(here)
    return logits_to_probs(logits[here], plain, before, None if allowed is None else allowed[here])
