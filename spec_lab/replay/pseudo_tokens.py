"""Target and draft probabilities on the recorded tokens of each row and two pseudo tokens for all others.

What was not recorded of a row is the rest of its vocabulary, with a mass P of p and Q of q. One *shared* pseudo token
that holds both lets as much of the rest overlap as can: min(P, Q). Two pseudo tokens *apart*, one with P and one with
Q, let none of it overlap. The overlap of p and q, sum min(p, q), lies between the two. So does

- the acceptance of a chain's nodes, and of first siblings, which do not depend on the rest at all;
- every sum (p - theta q)+, from max(P - theta Q, 0) to P beyond the recorded tokens: so the rho of ``kseq``, and the
  weights of block verification, which rise with these sums;
- the acceptance of further siblings by recursive rejection. theta <- theta + l S(theta) / Z does not fall in theta,
  since S falls by no more than the mass of q that is not rejected yet, at most Z: so every theta lies between those of
  the two. And where a sibling is accepted with less than 1, P(c) / q_c(c) falls in theta and in the rest's part of S.

What follows for a whole tree is in ``recorded_steps``. At another temperature the mass of the rest is known up to
bounds, which add two evaluations each (``Variant``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from spec_lab.core.probabilities import Sampling
from spec_lab.replay.recorded_trees import NeedsModel, RecordedTrees

PSEUDO = 2
"""Pseudo tokens of each row."""


class Variant(NamedTuple):
    """One way to complete what is not recorded.

    Args:
        rest: whether the rests of p and q are "shared" or "apart".
        p: whether the rest of p has its "lower" or its "upper" bound; they differ at another temperature only.
        q: the same of q.
    """

    rest: Literal["shared", "apart"] = "shared"
    p: Literal["lower", "upper"] = "lower"
    q: Literal["lower", "upper"] = "lower"


@dataclass(frozen=True, eq=False)
class Reduced:
    """Probabilities on the recorded tokens, W, and what is known of the others.

    Args:
        top: ``[R, W]``, not normalised.
        lower, upper: ``[R]`` bounds of the mass of all other tokens, on the same scale.
    """

    top: np.ndarray
    lower: np.ndarray
    upper: np.ndarray

    @property
    def exact(self) -> bool:
        """Whether the mass of the others is known."""
        return bool((self.upper <= self.lower * (1 + 1e-9)).all())

    def complete(self, which: str, column: int) -> np.ndarray:  # [R, W + PSEUDO]
        """The normalised distributions, the others' mass at the pseudo token ``column``."""
        full = np.zeros((len(self.top), self.top.shape[1] + PSEUDO))
        full[:, :-PSEUDO] = self.top
        full[:, self.top.shape[1] + column] = self.lower if which == "lower" else self.upper
        total = full.sum(1, keepdims=True)
        return np.divide(full, total, out=full, where=total > 0)


def target(trees: RecordedTrees, sampling: Sampling | None = None) -> Reduced:
    """Return the target probabilities of every row under sampling parameters.

    Args:
        trees: the recorded trees; their p is at temperature 1.
        sampling: None for the recorded run's. Penalties, biases and banned words must be the recorded ones: they are
            applied already.

    Raises:
        NeedsModel: the recorded tokens do not settle what is sampled.
    """
    sampling = trees.sampling if sampling is None else sampling
    if sampling.untruncated != trees.sampling.untruncated:
        raise NeedsModel("other penalties, logit biases or banned words than the recorded ones need all logits")
    p_rest, max_p = trees.rest[:, 0], trees.rest[:, 2]
    if sampling.temperature == 0:
        if (trees.p.max(1) < max_p).any():
            raise NeedsModel("the likeliest token of a row is not recorded; set a larger record_top")
        top = (np.arange(trees.p.shape[1]) == trees.p.argmax(1)[:, None]) & (trees.p.max(1) > 0)[:, None]
        return Reduced(top.astype(float), 0 * p_rest, 0 * p_rest)
    masses = tempered(trees, trees.p, p_rest, max_p, 1.0 / sampling.temperature)
    if not sampling.truncates:
        return masses
    bound = np.where(p_rest > 0, max_p ** (1.0 / sampling.temperature), 0.0)
    return truncated(masses, bound, sampling)


def drafted(trees: RecordedTrees, temperature: float | None = None, top_k: int = 0) -> Reduced:
    """Return the draft probabilities of every row; zeros where there is no q.

    Args:
        temperature: the drafter's; None for the recorded one.
        top_k: keep so many likeliest tokens; 0 keeps all.

    Raises:
        NeedsModel: q at this temperature or width does not follow from the recorded one.
    """
    q_rest, max_q = trees.rest[:, 1], trees.rest[:, 3]
    exponent = 1.0
    if temperature is not None:
        recorded = trees.draft_temperature
        if recorded is None:
            raise NeedsModel("the temperature at which the drafts were drawn is not known")
        if temperature != recorded:
            if not recorded or not temperature:
                raise NeedsModel(f"drafts at temperature {recorded:g} do not show those at {temperature:g}")
            if trees.sampling.truncates:
                raise NeedsModel("the drafts were truncated by top-k, top-p or min-p at the recorded temperature")
            exponent = recorded / temperature
    masses = tempered(trees, trees.q, q_rest, max_q, exponent)
    if not top_k:
        return masses
    bound = np.where(q_rest > 0, max_q**exponent, 0.0)
    return truncated(masses, bound, Sampling(1.0, top_k=top_k))


def certainty(trees: RecordedTrees) -> tuple[np.ndarray, np.ndarray]:  # [R], [R]
    """Return the least and the most that the largest draft probability of every row can be at temperature 1.

    The largest one is known, whether its token is recorded or not; at another temperature than the recorded one the
    mass of the rest is not.

    Raises:
        NeedsModel: as ``drafted``.
    """
    masses, rest, max_rest = drafted(trees, 1.0), trees.rest[:, 1], trees.rest[:, 3]
    power = trees.draft_temperature
    assert power is not None
    largest = np.maximum(masses.top.max(1), np.where(rest > 0, max_rest**power, 0.0))
    total = masses.top.sum(1)
    return largest / np.maximum(total + masses.upper, 1e-300), largest / np.maximum(total + masses.lower, 1e-300)


def tempered(trees: RecordedTrees, x: np.ndarray, rest: np.ndarray, largest: np.ndarray, power: float) -> Reduced:
    """Return x ** power on the recorded tokens, and the bounds of the sum of the others' powers.

    n others with the sum m and none above b have, for a power above 1, at least n (m / n)^power (all equal) and at most
    m b^(power - 1) (as many as can at b); below 1 the two are exchanged.
    """
    if power == 1:
        return Reduced(x.copy(), rest, rest)
    top = np.where(x > 0, np.maximum(x, 1e-300) ** power, 0.0)
    others = np.maximum(trees.vocabulary - (trees.ids >= 0).sum(1), 1)
    has_rest = rest > 0
    even = np.where(has_rest, others * (np.maximum(rest, 1e-300) / others) ** power, 0.0)
    peaked = np.where(has_rest, rest * np.maximum(largest, 1e-300) ** (power - 1), 0.0)
    return Reduced(top, np.minimum(even, peaked), np.maximum(even, peaked))


def truncated(masses: Reduced, bound: np.ndarray, sampling: Sampling) -> Reduced:
    """Return distributions after top-k, top-p and min-p, which must be settled by the recorded tokens.

    Args:
        masses: before.
        bound: ``[R]`` no other token has more, on the same scale.
        sampling: its temperature is applied already.

    Raises:
        NeedsModel: the kept tokens may include one that is not recorded.
    """
    top, rest = masses.top, masses.upper
    if sampling.top_k:
        if sampling.top_k < top.shape[1]:
            kth = -np.sort(-top, axis=1)[:, sampling.top_k - 1 : sampling.top_k]
            _check_settled(kth[:, 0], bound, rest, "top_k", sampling.top_k)
            top, rest = np.where(top >= kth, top, 0.0), 0 * rest
        elif (rest > 0).any():
            raise NeedsModel(f"top_k={sampling.top_k} keeps tokens that are not recorded; set a larger record_top")
    if sampling.top_p < 1:
        if (rest > 0).any() and not masses.exact:
            raise NeedsModel("top_p at another temperature needs the mass of the tokens that are not recorded")
        total = top.sum(1) + rest
        order = np.argsort(-top, axis=1, kind="stable")
        ordered = np.take_along_axis(top, order, 1) / np.maximum(total, 1e-300)[:, None]
        keep = np.cumsum(ordered, 1) - ordered < sampling.top_p
        lower = np.where(keep, np.take_along_axis(top, order, 1), np.inf).min(1)
        enough = np.where(keep, ordered, 0.0).sum(1) >= sampling.top_p - 1e-12
        _check_settled(np.where(enough, lower, -1.0), bound, rest, "top_p", sampling.top_p)
        kept = np.zeros_like(top)
        np.put_along_axis(kept, order, np.where(keep, np.take_along_axis(top, order, 1), 0.0), 1)
        top, rest = kept, 0 * rest
    if sampling.min_p > 0:
        lower = sampling.min_p * top.max(1)
        _check_settled(lower, bound, rest, "min_p", sampling.min_p)
        top, rest = np.where(top >= lower[:, None], top, 0.0), 0 * rest
    return Reduced(top, rest, rest)


def _check_settled(least: np.ndarray, bound: np.ndarray, rest: np.ndarray, name: str, value: float) -> None:
    open_ = (rest > 0) & (bound >= least)
    if open_.any():
        raise NeedsModel(
            f"{name}={value:g} may keep tokens that are not recorded, at {int(open_.sum())} of {len(open_)} rows; set "
            "a larger record_top"
        )


def variants(trees: RecordedTrees, p: Reduced, q: Reduced) -> list[Variant]:
    """Return the evaluations between which the exact value lies; one where all is recorded."""
    if not (p.upper > 0).any() or not (q.upper > 0).any():
        rests: list[Literal["shared", "apart"]] = ["shared"]
    else:
        rests = ["shared", "apart"]
    sizes: tuple[Literal["lower", "upper"], ...] = ("lower", "upper")
    return [
        Variant(rest, of_p, of_q)
        for rest in rests
        for of_p in (sizes[:1] if p.exact else sizes)
        for of_q in (sizes[:1] if q.exact else sizes)
    ]


def complete(p: Reduced, q: Reduced, variant: Variant) -> tuple[np.ndarray, np.ndarray]:  # [R, W + PSEUDO] each
    """Return p and q on the recorded tokens and the pseudo tokens."""
    return p.complete(variant.p, 0), q.complete(variant.q, 0 if variant.rest == "shared" else 1)
