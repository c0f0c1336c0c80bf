"""The law of what is put out, and how it differs from the law that was wanted.

A step puts out an accepted path and one more token. Extend its output with exact target samples to a fixed length: the
step is lossless iff the extended output has the target's law. Locally: with A_s the probability that the output begins
with s and D_s that it is exactly s, lossless means A_sa = (A_s - D_s) p(a | s) for all s and a. The first s for which
this fails is where the fault lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from spec_lab.tasks.certify.worlds import text_of

EXACT = 1e-12
"""What rounding in float64 may leave."""

Laws = Sequence[np.ndarray]
"""The wanted law after every text of 0, 1, .. tokens, each ``[V ** length, V]``."""


@dataclass(eq=False)
class Outputs:
    """For each length the probability of putting out exactly each text, ``[V ** length]``.

    Args:
        v: V.
        longest: tokens of the longest output.
    """

    v: int
    longest: int
    exactly: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        self.exactly = [np.zeros(self.v**length) for length in range(self.longest + 1)]

    @property
    def mass(self) -> float:
        """Total probability."""
        return float(sum(part.sum() for part in self.exactly))

    def begins(self) -> list[np.ndarray]:
        """A: for each length the probability of beginning with each text."""
        begins = [part.copy() for part in self.exactly]
        for k in range(self.longest, 0, -1):
            begins[k - 1] += begins[k].reshape(-1, self.v).sum(-1)
        return begins

    def extended(self, laws: Laws, length: int | None = None) -> np.ndarray:
        """The law of the first ``length`` tokens (default: of the longest output) when shorter outputs go on with
        exact samples from ``laws``, ``[V ** length]``.
        """
        length = self.longest if length is None else length
        extended = self.exactly[0]
        for k in range(length):
            extended = (extended[:, None] * laws[k]).ravel() + self.exactly[k + 1]
        for k in range(length + 1, self.longest + 1):  # longer outputs are cut
            extended = extended + self.exactly[k].reshape(self.v**length, -1).sum(-1)
        return extended

    def tv(self, laws: Laws, length: int | None = None) -> float:
        """Total variation between the extended output and the wanted law of as many tokens."""
        length = self.longest if length is None else length
        return 0.5 * float(np.abs(self.extended(laws, length) - autoregressive(laws, length, self.v).exactly[-1]).sum())

    def first_failure(self, laws: Laws, tolerance: float = EXACT) -> str | None:
        """The shortest text s for which A_sa != (A_s - D_s) p(a | s) for some a, in words; None for a lossless step."""
        begins = self.begins()
        for k in range(self.longest):
            wanted = (begins[k] - self.exactly[k])[:, None] * laws[k]
            found = begins[k + 1].reshape(-1, self.v)
            error = np.abs(found - wanted)
            if not error.max() <= tolerance:
                number, token = np.unravel_index(int(np.nan_to_num(error, nan=np.inf).argmax()), error.shape)
                return (
                    f"after {list(text_of(int(number), k, self.v))} token {token} has probability "
                    f"{unlike(found[number, token], wanted[number, token])}"
                )
        return None

    def distance(self, other: Outputs) -> float:
        """Total variation between two laws of whole outputs."""
        return 0.5 * float(sum(np.abs(a - b).sum() for a, b in zip(self.exactly, other.exactly, strict=True)))

    def first_difference(self, other: Outputs, tolerance: float = EXACT) -> str | None:
        """The shortest text that one begins with, or ends with, more often than the other, in words."""
        for k, (mine, theirs) in enumerate(zip(self.begins(), other.begins(), strict=True)):
            for what, a, b in (("begin with", mine, theirs), ("are exactly", self.exactly[k], other.exactly[k])):
                error = np.abs(a - b)
                if not error.max() <= tolerance:
                    number = int(np.nan_to_num(error, nan=np.inf).argmax())
                    text = list(text_of(number, k, self.v))
                    return f"outputs {what} {text} with probability {unlike(a[number], b[number])}"
        return None


def unlike(found: float, wanted: float) -> str:
    """Two probabilities that should agree, in words."""
    if not abs(found - wanted) < 1e-6:
        return f"{found:.6g}, not {wanted:.6g}"
    return f"{found:.6g}, off by {abs(found - wanted):.1e}: float32 where p is float64?"


def autoregressive(laws: Laws, length: int, v: int, stop: frozenset[int] = frozenset()) -> Outputs:
    """What decoding token by token puts out: ``length`` tokens, or fewer with a stop token at the end."""
    outputs = Outputs(v, length)
    alive = np.ones(1)
    for k in range(length):
        reached = alive[:, None] * laws[k]
        if k + 1 == length:
            outputs.exactly[k + 1] = reached.ravel()
            break
        for token in stop:
            outputs.exactly[k + 1].reshape(-1, v)[:, token] = reached[:, token]
            reached[:, token] = 0.0
        alive = reached.ravel()
    if length == 0:
        outputs.exactly[0][0] = 1.0
    return outputs
