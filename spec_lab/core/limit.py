"""Limits that a policy sets for a proposer: a depth for each sequence and step, a rule that stops a draft early."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Limit:
    """Limits of what is drafted below one root in one step. They follow from what was known before anything was drawn.

    Args:
        depth: the deepest level; 0 drafts nothing. None: as deep as the proposer drafts.
        threshold: of the rule that stops drafts (``StopRule``), where the policy has one.
        part: name of the part that drafts, of a proposer that chooses one of several. Empty: it chooses itself.
        rows: of a policy that chooses which drafted nodes are verified, for records: these, numbered within the tree.
            None of other policies.
    """

    depth: int | None = None
    threshold: float = 0.0
    part: str = ""
    rows: tuple[int, ...] | None = None

    def as_json(self) -> str:
        """As in the table of steps."""
        return json.dumps({name: value for name, value in asdict(self).items() if name != "rows" or value is not None})

    @staticmethod
    def parse(text: Any) -> Limit:
        """Read what ``as_json`` writes.

        Raises:
            ValueError: it is something else.
        """
        try:
            limit = Limit(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a policy's decision: {str(text)[:100]!r}") from error
        depth, threshold = limit.depth, limit.threshold
        rows: Any = limit.rows
        fine = (depth is None or _is_number(depth)) and (rows is None or isinstance(rows, list))
        if not fine or not isinstance(threshold, int | float) or not isinstance(limit.part, str):
            raise ValueError(f"not a policy's decision: {text[:100]!r}")
        if rows is not None and not all(map(_is_number, rows)):
            raise ValueError(f"not a policy's decision: {text[:100]!r}")
        return replace(limit, threshold=float(threshold), rows=None if rows is None else tuple(rows))


def _is_number(value: Any) -> bool:
    """Return whether a value is a whole number of 0 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class StopRule(Protocol):
    """Where drafting stops, told from the draft distributions and from what is drafted already, never from tokens that
    are then left out: every node that was drawn stays. So verification remains exact, for sampled nodes too.
    """

    @property
    def name(self) -> str:
        """As in records."""
        ...

    @property
    def before(self) -> bool:
        """Whether nothing is drawn at a row where it stops; False: what is drawn there is the last of its path."""
        ...

    @property
    def reads_path(self) -> bool:
        """Whether it reads ``path``; ones are passed otherwise."""
        ...

    def __call__(self, probs: Tensor, path: Tensor, threshold: Tensor) -> Tensor:
        """Return at which rows drafting stops, ``[n]`` bool.

        Args:
            probs: ``[n, V]`` draft probabilities at temperature 1, below what a constraint allows.
            path: ``[n]`` the product of such probabilities along the path to each row; 1 at a root.
            threshold: ``[n]`` of each row's sequence (``Limit.threshold``).
        """
        ...
