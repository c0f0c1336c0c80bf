"""What every verifier returns, and the one function that samples it.

A verifier is a law, not a procedure. Given the draft and the target's law p it says, for every row of the forest, the
probability that the accepted path ends there (``stop``), and for the rows asked about the law of the one token emitted
there (``residual``). So the exact expected acceptance of each step is known without sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn, Shape
from spec_lab.core.randomness import Draws, Key, Purpose


@dataclass(frozen=True, eq=False)
class Verdict:
    """The law of one step.

    Args:
        stop: ``[R]`` float64, the probability that the accepted path ends at each row; sums to 1 over each tree.
        residual: maps rows ``[n]`` to the law of the token emitted when the path ends there, ``[n, V]``. Rows of the
            result need not sum to 1. In exact arithmetic they have positive mass wherever ``stop`` is positive; where
            rounding has left nothing, ``choose`` emits from p.
        given: what ``stop`` is a law given: the "draft", or its "noise" as well, which leaves nothing to chance.
    """

    stop: np.ndarray  # [R]
    residual: Callable[[np.ndarray], Tensor]
    given: str = "draft"

    def expected_accepted(self, shape: Shape) -> np.ndarray:  # [B]
        """Expected number of drafted tokens accepted in each tree, given the draft. Exact."""
        weighted = self.stop * shape.depth
        return np.bincount(shape.root, weights=weighted, minlength=shape.roots)


class Verifier(Protocol):
    """A pure function of (draft, p), vectorised over the forest, at least in float32.

    A lossy one may offer ``aim(draft, p)``: the distribution ``[R, V]`` that it is exact against in place of p.
    One whose code handles only one path below each root declares it (``ChainsOnly``).
    """

    @property
    def name(self) -> str:
        """As in configs and records."""
        ...

    @property
    def accepts(self) -> frozenset[Drawn]:
        """The ways of drawing for which it is correct; any other draft is refused when the run is composed."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether the output has the target's law."""
        ...

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """The law of one step for target law ``p`` ``[R, V]``."""
        ...


@runtime_checkable
class ChainsOnly(Protocol):
    """What a verifier may declare beside what ``Verifier`` needs."""

    @property
    def chains_only(self) -> bool:
        """Whether it verifies chains only: no row of a draft may have more than one child."""
        ...


def chains_only(verifier: Verifier) -> bool:
    """Whether the verifier declares that it verifies chains only."""
    return isinstance(verifier, ChainsOnly) and verifier.chains_only


class Misfit(ValueError):
    """A proposer and a verifier that do not go together."""


def misfit(proposer: str, drawn: Drawn, verifier: Verifier, branches: bool | None = None) -> str | None:
    """Why a verifier cannot verify a proposer's drafts; None where it can, as far as both declare.

    Args:
        proposer: its name.
        drawn: how it draws siblings.
        verifier: verifies the drafts.
        branches: whether its drafts may branch; None where it does not declare that. Each draft is then checked.
    """
    if drawn not in verifier.accepts:
        fits = ", ".join(sorted(verifier.accepts))
        return (
            f"verifier '{verifier.name}' supports drafts drawn {fits}; proposer '{proposer}' draws '{drawn}'. "
            f"Choose another verifier, or let the proposer draw one of: {fits}."
        )
    if branches and chains_only(verifier):
        return (
            f"verifier '{verifier.name}' verifies chains only; proposer '{proposer}' drafts trees. "
            "Choose another verifier, or let the proposer draft a chain."
        )
    return None


def check_pair(proposer: str, drawn: Drawn, verifier: Verifier, branches: bool | None = None) -> None:
    """Refuse a proposer whose drafts the verifier cannot verify. Arguments as of ``misfit``.

    Raises:
        Misfit: the pair is incompatible; names both and what would fit.
    """
    if why := misfit(proposer, drawn, verifier, branches):
        raise Misfit(why)


def check_draft(proposer: str, verifier: Verifier, shape: Shape) -> None:
    """Refuse a draft that branches where the verifier verifies chains only.

    Raises:
        Misfit: it does; names both.
    """
    if chains_only(verifier) and shape.branches:
        raise Misfit(
            f"verifier '{verifier.name}' verifies chains only; proposer '{proposer}' has drafted a tree. Choose "
            "another verifier, or let the proposer draft a chain."
        )


class Choice(NamedTuple):
    """One step, sampled.

    Args:
        row: ``[B]`` int64, where each accepted path ends.
        token: ``[B]`` int64, the token emitted there.
        empty: ``[B]`` bool, whether rounding had left nothing of the residual, so that the token came from p.
    """

    row: np.ndarray
    token: np.ndarray
    empty: np.ndarray


def choose(verdict: Verdict, shape: Shape, p: Tensor, draws: Draws, who: Sequence[tuple[int, int, int]]) -> Choice:
    """Sample one step: where each accepted path ends, and the token emitted there.

    In exact arithmetic no path ends where the residual is all zero. Rounding can give such a row a stop of the order of
    p's precision; p ``[R, V]`` is then a law that is off by no more than that, and the choice says so.

    Args:
        who: (request, branch, round) of each tree, which key its choices.
    """
    row = np.arange(shape.roots)
    if shape.nodes:
        grid = shape.grid
        stop = np.concatenate([verdict.stop, [0.0]])[grid]  # -1, which fills up the grid, finds the 0
        row = grid[row, draws.pick(stop, [Key(*one, Purpose.STOP) for one in who])]
    keys = [Key(*one, Purpose.EMIT) for one in who]
    token, empty = np.empty_like(row), np.zeros(shape.roots, dtype=bool)
    for part in parts(shape.roots, p, CHUNK):
        law = verdict.residual(row[part])
        if shape.nodes:
            mass = law.sum(-1).tolist()
            if 0.0 in mass:
                empty[part] = np.equal(mass, 0.0)
                bare = torch.from_numpy(empty[part, None]).to(p.device)
                law = torch.where(bare, p[torch.from_numpy(row[part]).to(p.device)], law)
        token[part] = draws.pick(law, keys[part])
    return Choice(row, token, empty)


CHUNK = 2**19
"""Numbers of laws worked on at a time: they stay in a processor's cache, and their memory is used again. (Megabytes
asked for afresh cost more than the arithmetic: every page of them faults.)"""


def parts(rows: int, p: Tensor, chunk: int) -> list[slice]:
    """The parts of ``rows`` laws as wide as p's that hold ``chunk`` numbers each; eight times as many on a GPU."""
    size = max(1, (chunk if p.device.type == "cpu" else 8 * chunk) // p.shape[-1])
    return [slice(start, start + size) for start in range(0, rows, size)]


def gather(p: Tensor, shape: Shape, token: Tensor) -> np.ndarray:  # [M]
    """p(token | parent) of every node, float64 on the host."""
    return gather_rows(p, shape.parent, token)


def gather_rows(x: Tensor, rows: np.ndarray, token: Tensor) -> np.ndarray:  # [R, V], [M], [M] -> [M]
    """``x[rows, token]``, float64 on the host. On the CPU NumPy's indexing costs a tenth of torch's."""
    if x.device.type == "cpu":
        return x.numpy()[rows, token.numpy()].astype(np.float64)
    return x.take(torch.from_numpy(rows * x.shape[-1]).to(x.device) + token).double().cpu().numpy()
