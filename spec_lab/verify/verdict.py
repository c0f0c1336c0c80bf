"""The result of every verifier, and the one function that samples it.

A verifier is a distribution, not a procedure. Given the draft and the target probabilities p it returns, for every row
of the forest, the probability that the accepted path ends there (``stop``), and for the rows asked about the
distribution of the one token emitted there (``residual``). So the exact expected acceptance of each step is known
without sampling.

Verifiers and ``choose`` read nothing back from p's device. Where p is on the CPU their results are NumPy arrays,
elsewhere tensors on p's device.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import SOME_WAYS, Draft, Drawn
from spec_lab.core.protocols import FACTS, FLAG, TEXT, Declared, Part, default
from spec_lab.core.randomness import Draws, Key, Purpose, upload_keys
from spec_lab.core.shape import Shape
from spec_lab.verify.arrays import CHUNK, Array, Arrays, parts, rows_of


@dataclass(frozen=True, eq=False)
class Verdict:
    """The distribution of one step. Arrays: NumPy on the CPU, else tensors on p's device.

    Args:
        stop: ``[R]`` float64, the probability that the accepted path ends at each row; sums to 1 over each tree.
        residual: maps rows ``[n]``, an array or a tensor, to the distribution of the token emitted when the path ends
            there, ``[n, V]``. Rows of the result need not sum to 1. In exact arithmetic they have positive mass
            wherever ``stop`` is positive; where rounding has left nothing, ``choose`` emits from p.
        given: what ``stop`` is conditional on: the "draft", or its "noise" as well, which leaves nothing to chance.
    """

    stop: Array  # [R]
    residual: Callable[[Array], Tensor]
    given: str = "draft"

    def expected_accepted(self, shape: Shape) -> Array:  # [B]
        """Return the exact expected number of accepted tokens of each tree, given the draft.

        Returns:
            ``[B]`` float64.
        """
        if isinstance(self.stop, Tensor):
            here = shape.on(self.stop.device)
            return in_trees(self.stop * here.depth, here.grid).sum(1)
        return np.bincount(shape.root, weights=self.stop * shape.depth, minlength=shape.roots)


def in_trees(values: Array, grid: Array) -> Array:  # [R], [B, L] -> [B, L]
    """Numbers of rows, tree by tree; 0 where ``grid`` is -1."""
    if isinstance(values, Tensor):
        return torch.cat([values, values.new_zeros(1)])[grid]
    padded = np.zeros(len(values) + 1)
    padded[:-1] = values
    return padded[grid]


@dataclass(frozen=True)
class Replayed:
    """Assumptions that hold for a verifier on recorded rows, of which some tokens are known by their mass only.

    Args:
        whole_rows: whether tokens that no node holds matter one by one, as in an entropy or a rank, not only by sums
            over tokens of a function of their p and q.
        top_down: whether the probability that a node is accepted depends neither on later siblings nor on what is below
            it, so that one verdict holds for all smaller trees.
        in_turn: whether the children of a row are tried in drawing order and the first that is accepted is taken.
        bounded: where what the two extreme completions of unrecorded tokens give bounds what every completion gives:
            never, on chains, or always.
    """

    whole_rows: bool = True
    top_down: bool = False
    in_turn: bool = False
    bounded: Literal["never", "chains", "always"] = "never"


DECLARED = {
    "name": TEXT,
    "accepts": SOME_WAYS,
    "lossless": FLAG,
    "invalid_text": FLAG,
    "accepts_mixed": FLAG,
    "chains_only": FLAG,
    "follows_argmax": FLAG,
    "replayed": Declared("spec_lab.verify.Replayed", lambda value: isinstance(value, Replayed)),
    "facts": FACTS,
}
"""The checks of a verifier's attributes."""


class Verifier(Part):
    """A pure function of (draft, p), vectorised over the forest, at least in float32."""

    @default
    @abstractmethod
    def accepts(self) -> frozenset[Drawn]:
        """The ways of drawing for which it is correct; any other draft is refused when the run is composed."""

    @default
    @abstractmethod
    def lossless(self) -> bool:
        """Whether the output has the target's distribution."""

    @default
    def invalid_text(self) -> bool:
        """Whether tokens are accepted whatever their probability, so that only times and counts mean anything."""
        return False

    @default
    def accepts_mixed(self) -> bool:
        """Whether nodes drawn in several of the ways it accepts may occur in one draft, also below one parent."""
        return False

    @default
    def chains_only(self) -> bool:
        """Whether it verifies chains only: no row of a draft may have more than one child."""
        return False

    @default
    def follows_argmax(self) -> bool:
        """Whether at temperature 0 it follows the arg max as ``match.greedy_path``, all nodes being deterministic."""
        return False

    @default
    def replayed(self) -> Replayed:
        """Assumptions that ``spec-lab replay`` may make; the default makes none and requires whole rows."""
        return Replayed()

    @abstractmethod
    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """Return the distribution of one step.

        Args:
            draft: the forest, its tokens, and the draft distributions.
            p: ``[R, V]`` target probabilities after every row, under masks and sampling parameters. Rows sum to 1,
                except below tokens that a constraint does not allow.

        Returns:
            Where the accepted path may end and what may be emitted there. ``draft`` and ``p`` are not changed.
        """

    def aim(self, draft: Draft, p: Tensor) -> Tensor | None:
        """Return the distribution that a lossy verifier is exact against in place of ``p``; None where there is none.

        Args:
            draft: as verified.
            p: ``[R, V]`` target probabilities.

        Returns:
            ``[R, V]``, that distribution for every row.
        """
        return None


class Misfit(ValueError):
    """The verifier does not support the way in which the proposer draws its tokens."""


def misfit(
    proposer: str, draws: Drawn | frozenset[Drawn], verifier: Verifier, branches: bool | None = None
) -> str | None:
    """Return why a verifier cannot verify a proposer's drafts; None where it can, as far as both declare.

    Args:
        draws: the ways in which it draws nodes, or the only one.
        branches: whether its drafts may branch; None where it does not declare that. Each draft is then checked.
    """
    if why := _unfit(f"proposer '{proposer}' draws", frozenset({draws}) if isinstance(draws, str) else draws, verifier):
        return f"{why} Choose another verifier, or another way of drawing."
    if branches and verifier.chains_only:
        return (
            f"verifier '{verifier.name}' verifies chains only; proposer '{proposer}' drafts trees. "
            "Choose another verifier, or let the proposer draft a chain."
        )
    return None


def _unfit(what: str, draws: frozenset[Drawn], verifier: Verifier) -> str | None:
    """Why nodes drawn so cannot be verified; None where they can."""
    if draws <= verifier.accepts and (len(draws) <= 1 or verifier.accepts_mixed):
        return None
    names = ", ".join(f"'{way}'" for way in sorted(draws))
    if not draws <= verifier.accepts:
        return (
            f"verifier '{verifier.name}' supports drafts drawn {', '.join(sorted(verifier.accepts))}; {what} {names}."
        )
    return (
        f"verifier '{verifier.name}' does not support drafts in which nodes are drawn in several ways; {what} {names}."
    )


def check_pair(
    proposer: str, draws: Drawn | frozenset[Drawn], verifier: Verifier, branches: bool | None = None
) -> None:
    """Refuse a proposer whose drafts the verifier cannot verify. Arguments as in ``misfit``.

    Raises:
        Misfit: the pair is incompatible; names both and what would fit.
    """
    if why := misfit(proposer, draws, verifier, branches):
        raise Misfit(why)


def check_draft(proposer: str, verifier: Verifier, draft: Draft) -> None:
    """Refuse a draft drawn in a way that the verifier does not accept, or one that branches where it verifies chains.

    A proposer may draft what it has not declared; this is checked in every step.

    Args:
        verifier: verifies the draft.
        draft: to be verified.

    Raises:
        Misfit: names both.
    """
    if not draft.shape.nodes:
        return
    if why := _unfit(f"proposer '{proposer}' has drafted nodes drawn", draft.ways, verifier):
        raise Misfit(why)
    if draft.shape.branches and verifier.chains_only:
        raise Misfit(
            f"verifier '{verifier.name}' verifies chains only; proposer '{proposer}' has drafted a tree. Choose "
            "another verifier, or let the proposer draft a chain."
        )


class Choice(NamedTuple):
    """One step, sampled: NumPy arrays on the CPU, else tensors on p's device.

    Args:
        row: ``[B]`` int64, where each accepted path ends.
        token: ``[B]`` int64, the token emitted there. On a device -1 where no distribution could be sampled (its sum is
            zero or not finite); on the CPU that raises at once.
        empty: ``[B]`` bool, whether rounding had left nothing of the residual, so that the token came from p.
    """

    row: Array
    token: Array
    empty: Array

    @staticmethod
    def check(token: np.ndarray) -> None:
        """Check the tokens of a choice made on a device, once they are on the host.

        Raises:
            ValueError: a distribution could not be sampled.
        """
        if (token < 0).any():
            trees = np.flatnonzero(token < 0).tolist()
            raise ValueError(
                f"a distribution to sample from has no finite positive mass, in trees {trees} of the batch"
            )


def choose(verdict: Verdict, shape: Shape, p: Tensor, draws: Draws, who: Sequence[tuple[int, int, int]]) -> Choice:
    """Sample one step: where each accepted path ends, and the token emitted there.

    In exact arithmetic no path ends where the residual is all zero. Rounding can give such a row a stop of the order of
    p's precision; p is then off by no more than that, and the choice reports it.

    Args:
        verdict: a verifier's.
        shape: of the draft, with B roots.
        p: ``[R, V]`` target probabilities, from which the token comes where rounding left nothing of the residual.
        draws: chooses.
        who: ``[B]`` (request, branch, step) of each tree, which key its choices.

    Returns:
        The row and the token of each tree ``[B]``.

    Raises:
        ValueError: the sum of a distribution is zero or not finite, on the CPU; see ``Choice.token``.
    """
    arrays = Arrays.like(p)
    row, every = arrays.range(shape.roots), parts(shape.roots, p, CHUNK)
    emits = [[Key(*key, Purpose.EMIT) for key in who[part]] for part in every]
    stops = [[Key(*key, Purpose.STOP) for key in who]] if shape.nodes else []
    keys = upload_keys(draws, p.device, *emits, *stops)
    if shape.nodes:
        grid = arrays.shape(shape).grid
        row = grid[row, arrays.read(draws.pick(arrays.tensor(in_trees(verdict.stop, grid)), keys[-1]))]
    tokens, empties = [], []
    for part, emit in zip(every, keys[: len(every)], strict=True):
        residual = verdict.residual(row[part])
        empty = arrays.read(residual.sum(-1)) == 0 if shape.nodes else arrays.full(len(residual), 0.0) > 0
        if shape.nodes and (arrays.device is not None or empty.any()):
            residual = torch.where(arrays.tensor(empty)[:, None], rows_of(p, row[part]), residual)
        tokens.append(arrays.read(draws.pick(residual, emit)))
        empties.append(empty)
    joined = np.concatenate if arrays.device is None else torch.cat
    token, none_left = (pieces[0] if len(pieces) == 1 else joined(pieces) for pieces in (tokens, empties))
    return Choice(row, token, none_left)
