"""Forests of draft trees that a self-check decodes, and by how much their logits differ from expected ones.

Two measures: the largest difference of a logit, where rounding is negligible, and the root mean square (rms) of the
differences of a row, to compare errors by rounding. Both are in standard deviations of the row's expected logits. The
largest of a row's differences by rounding grows with the vocabulary and cannot be told from a fault; the rms can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isfinite
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft
from spec_lab.core.shape import Shape
from spec_lab.runners.runner import Runner

TREES = (2, (0, 0, 3, 1, 5), (1, 2)), (2, (0, 0, 2, 1, 1, 6), ()), *((1, (), ()),) * 5, (1, (0, 0, 1), ())
CHAINS = (2, (0, 1, 2, 3, 4), ()), (2, (0, 2, 1, 3), (0, 1)), (2, (1, 0), ()), (1, (), ()), (1, (0, 1), ())
"""Forests: how many trees, the parents of their nodes, and the nodes of the first tree that are accepted.

Of chains, for recurrent layers, one step has one row: transformers' own updates of a state by one token after the other
differ from its forward over a text by 1e-3 standard deviations in Nemotron-H and Zamba2.
"""
LONG = 24
"""Tokens before a chain, more than recurrent layers compute again after a rejection."""

RATIO = 1.5
"""Largest rounding error of decoded forests, as a multiple of that of plain forwards.

Measured over 24 seeds of tokens in bfloat16 on a model with 30 layers: 0.94 to 1.09.
"""

Plain = Callable[[list[int], int], Tensor]
"""Returns the logits ``[n, V]`` of the last n tokens of a text, computed without drafts."""


class Rows(NamedTuple):
    """Logits that were decoded.

    Args:
        text: the tokens up to the last row's.
        logits: ``[n, V]`` of its last n tokens.
        alone: whether each row was computed by a forward of one row, as in autoregressive decoding.
    """

    text: list[int]
    logits: Tensor
    alone: bool

    def plain(self, plain: Plain) -> Tensor:
        """Return the same rows' logits ``[n, V]`` computed without drafts."""
        return plain(self.text, len(self.logits)).to(self.logits.device)

    def split(self) -> list[Rows]:
        """Return the same, row by row."""
        first = len(self.text) - len(self.logits) + 1
        return [Rows(self.text[: first + n], row[None], self.alone) for n, row in enumerate(self.logits)]


class Checked(NamedTuple):
    """The result of a self-check.

    Args:
        error: of the logits, in standard deviations.
        allowed: the largest error that is allowed.
        in_float32: whether masks and positions were checked in float32 or float64, where rounding is negligible.
    """

    error: float
    allowed: float
    in_float32: bool = False

    @property
    def passed(self) -> bool:
        """True for an error that is finite and at most what is allowed."""
        return isfinite(self.error) and self.error <= self.allowed


@torch.inference_mode()
def decode_forests(lm: Runner, seed: int = 0) -> list[Rows]:
    """Return the logits of some steps whose nodes are partly rejected, each row once.

    Args:
        lm: decodes the forests, of chains if it requires them.
        seed: of the tokens; the shapes of forwards are those of every other one.
    """
    generator = np.random.default_rng(seed)

    def random_tokens(count: int) -> list[int]:
        return generator.integers(0, lm.vocabulary, count).tolist()

    chains = lm.capabilities.rollback is not None
    pending, rows = [random_tokens(LONG if chains else 7), random_tokens(4)], list[Rows]()
    opened = [lm.open() for _ in pending]
    sequences, texts = opened, [list[int]() for _ in pending]
    # The rejected nodes leave holes in the KV cache, so the cells of the second forest are scattered.
    # Then one sequence alone is decoded, without a draft and with one: fewer rows get logits, in other ways.
    for trees, parents, accepted in CHAINS if chains else TREES:
        sequences, texts, pending = sequences[:trees], texts[:trees], pending[:trees]
        draft = Draft(
            Shape(trees, np.array(parents, dtype=np.int64)),
            torch.tensor(random_tokens(len(parents)), dtype=torch.int64, device=lm.device),
        )
        logits = lm.run(lm.prepare(sequences, pending, draft)).logits.clone()
        texts = [done + more for done, more in zip(texts, pending, strict=True)]
        step = rows_of(texts, draft, logits)
        if rows and rows[-1].alone and step[0].alone:  # one text for all rows of autoregressive decoding
            step[0] = step[0]._replace(logits=torch.cat([rows.pop().logits, step[0].logits]))
        rows += step
        for sequence, nodes in zip(sequences, (accepted, ()), strict=False):
            sequence.accept(nodes)
        texts[0] = texts[0] + draft.token[draft.shape.trees[0][1:][[*accepted]] - trees].tolist()
        pending = [random_tokens(1), random_tokens(2)]
    for sequence in opened:
        sequence.close()
    return rows


def rows_of(texts: Sequence[list[int]], draft: Draft, logits: Tensor) -> list[Rows]:
    """Return the rows of a step, path by path.

    Args:
        texts: of each tree, up to its root.
        logits: ``[R, V]`` of roots and nodes.
    """
    shape, seen, rows = draft.shape, set[int](), list[Rows]()
    for leaf in (row for row in range(shape.rows) if not len(shape.children[row])):
        root, nodes = int(shape.root[leaf]), [int(node) for node in shape.path(leaf)]
        new = [row for row in (root, *nodes) if row not in seen]  # the end of the path
        seen.update(new)
        path = [int(draft.token[node - shape.roots]) for node in nodes]
        rows.append(Rows(texts[root] + path, logits[new], shape.rows == 1))
    return rows


def largest_error(rows: Sequence[Rows], expected: Sequence[Tensor]) -> float:
    """Return the largest difference of a logit from the expected ones; infinity where one is NaN."""
    errors = [float(_in_deviations(row.logits, right).abs().max()) for row, right in zip(rows, expected, strict=True)]
    largest = float(np.max(errors))
    return largest if isfinite(largest) else inf


def rounding_error(
    rows: Sequence[Rows],
    expected: Sequence[Tensor],
    others: Sequence[Tensor],
    floor: float,
    robust: bool,
    ceiling: float = inf,
) -> Checked:
    """Compare the error of decoded rows with the error by rounding of plain forwards over the same rows.

    Rows of forwards of one row, which other kernels compute, are compared apart from the others. A number that is added
    to all logits of a row changes no probability and is left out.

    Args:
        rows: as they were decoded.
        expected: the most exact logits that are known.
        others: those of plain forwards that round as the decoding does.
        floor: what is always allowed.
        robust: whether the median row is compared, and not the rms over all rows. Some rows jump by chance, when
            rounding changes the choice of an expert, or moves an activation to another of 256 values.
        ceiling: what is never allowed.

    Returns:
        The kind of rows whose error is largest compared with what is allowed; infinity as the error where a row's error
        or rounding is not finite.
    """
    kinds = []
    for alone in {row.alone for row in rows}:
        same = [number for number, row in enumerate(rows) if row.alone == alone]
        errors = torch.cat([_rms(rows[number].logits, expected[number]) for number in same])
        noise = torch.cat([_rms(others[number], expected[number]) for number in same])
        error, rounding = (float(x.median() if robust else x.pow(2).mean().sqrt()) for x in (errors, noise))
        if errors.isfinite().all() and noise.isfinite().all():
            kinds.append(Checked(error, min(RATIO * rounding + floor, ceiling)))
        else:
            kinds.append(Checked(inf, floor))
    return max(kinds, key=lambda kind: (not kind.passed, kind.error / max(kind.allowed, 1e-300)))


def _in_deviations(logits: Tensor, expected: Tensor) -> Tensor:
    """Return the differences of logits ``[n, V]`` in standard deviations of each row; 0 where they are equal."""
    right = expected.double()
    difference = logits.double() - right
    return torch.where(difference == 0, 0.0, difference / right.std(-1, keepdim=True))


def _rms(logits: Tensor, expected: Tensor) -> Tensor:  # [n]
    centred = logits.double() - logits.double().mean(-1, keepdim=True)
    right = expected.double() - expected.double().mean(-1, keepdim=True)
    return _in_deviations(centred, right).pow(2).mean(-1).sqrt()
