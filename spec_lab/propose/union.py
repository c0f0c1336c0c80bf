"""The union of several proposers' drafts: deterministic trees are merged, sampled nodes stand beside them.

Deterministic trees (n-grams, suffixes, the likeliest tokens of heads) are merged into one trie: any subset of its nodes
is verified exactly. At most one part samples its nodes. They stand behind the deterministic nodes below the same root,
and their draft distribution at the root leaves these out: what was rejected as a deterministic token is not drawn
again. Siblings are verified in drawing order, each by the distribution it was drawn from, which is exact for token and
traversal verification, and accepts more than q with the deterministic tokens in it (``core.draft.Draft``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from spec_lab.core.draft import ComputedOnly, Draft
from spec_lab.core.options import WrongOption, checked
from spec_lab.core.shape import Shape
from spec_lab.core.upload import upload, upload_tokens
from spec_lab.decode.proposer import Proposer
from spec_lab.decode.sequence import Batch, DraftMasks
from spec_lab.models.target import Target
from spec_lab.propose.continuations import Trie
from spec_lab.propose.hybrid import Hybrid, check_parts, join, note
from spec_lab.propose.trees import Choices, TreeNodes
from spec_lab.runners.runner import DraftRunner


@dataclass(frozen=True, eq=False)
class Excluding:
    """Masks for a draft below roots at which some tokens are drafted already. A ``DraftMasks``.

    Args:
        masks: of a constraint; None for none.
        tokens: ``[B]`` what is left out at each root.
        vocabulary: V.
    """

    masks: DraftMasks | None
    tokens: Sequence[Sequence[int]]
    vocabulary: int

    @property
    def forces(self) -> bool:
        """See ``DraftMasks``."""
        return self.masks is not None and self.masks.forces

    def __call__(self, shape: Shape, rows: np.ndarray, token: np.ndarray) -> np.ndarray:  # [n, V]
        """See ``DraftMasks``."""
        if self.masks is None:
            allowed = np.ones((len(rows), self.vocabulary), dtype=bool)
        else:
            allowed = self.masks(shape, rows, token)
        for number, row in enumerate(rows.tolist()):
            if row < shape.roots:
                allowed[number, list(self.tokens[row])] = False
        return allowed

    def view(self, roots: Sequence[int]) -> Excluding:
        """See ``DraftMasks``."""
        masks = None if self.masks is None else self.masks.view(roots)
        return Excluding(masks, [self.tokens[root] for root in roots], self.vocabulary)


@dataclass(frozen=True, eq=False)
class Union(Hybrid):
    """Drafts what all of its parts draft.

    Args:
        parts: at most one of them samples.
        max_nodes: of a tree, rows that are computed only left out; deterministic nodes beyond are dropped, the last
            part's first.
        exclude: whether sampled nodes leave the deterministic ones at their root out.
    """

    parts: Mapping[str, Proposer]
    max_nodes: int
    exclude: bool = True
    name: str = "union"
    branches = True  # two parts may begin differently

    @staticmethod
    @checked
    def load(
        target: Target, parts: Mapping[str, Proposer], nodes: TreeNodes | None = None, exclude: bool = True
    ) -> Union:
        """Return the union of proposers that are loaded already.

        Args:
            target: of all of them.
            parts: by name; in this order deterministic nodes are dropped last.
            nodes: maximum nodes of a tree; None: as many as the parts draft together.
            exclude: whether sampled nodes leave out what the others draft at their root.

        Raises:
            ValueError: fewer than two parts, more than one that samples, one that shares its noise with the verifier,
                or fewer nodes than the part that samples drafts.
        """
        check_parts(parts)
        sampled = {name: part for name, part in parts.items() if part.drawn != "deterministic"}
        if len(sampled) > 1 or any(len(part.draws - {"deterministic"}) > 1 for part in parts.values()):
            raise WrongOption(
                f"parts: {', '.join(sampled)} sample their drafts, and one root has one distribution: let all "
                "but one of them draft deterministic tokens (drawn=deterministic)"
            )
        all_nodes = sum(part.nodes for part in parts.values())
        max_nodes = all_nodes if nodes is None else nodes
        for name, part in sampled.items():
            if part.nodes > max_nodes:
                raise WrongOption(f"nodes is {max_nodes}, but part {name} samples {part.nodes}, which all must stay")
        return Union(dict(parts), max_nodes, exclude)

    @property
    def nodes(self) -> int:
        """Most rows below one root: all parts' rows, those that are computed only among them."""
        return sum(part.nodes for part in self.proposers)

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        return {"nodes": self.max_nodes, "exclude": self.exclude, "parts": self.part_facts}

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> Union:
        """See ``Proposer``."""
        parts = self.toy_parts(target, draft, tree)
        return replace(self, parts=parts, max_nodes=max(self.max_nodes, *(part.nodes for part in parts.values())))

    def propose(self, batch: Batch) -> Draft:
        """Draft the deterministic nodes of all parts, then the sampled nodes."""
        every = range(len(batch.sequences))
        fixed = {n: part.propose(self.view(batch, n)) for n, part in self._deterministic}
        sampled: dict[int, Draft] = {}
        tries, merged_nodes = self._merge(batch, fixed)
        for n, part in self._sampled:
            view = self.view(batch, n)
            if self.exclude:
                left_out = [
                    [] if sequence.request.sampling.temperature == 0
                    else [token for above, token in zip(trie.parent, trie.token, strict=True) if not above]
                    for sequence, trie in zip(batch.sequences, tries, strict=True)
                ]  # fmt: skip
                if any(left_out):
                    masks = Excluding(view.draft_masks, left_out, batch.target.vocabulary)
                    view = replace(view, draft_masks=masks)
            draft = part.propose(view)
            if draft.one_hot or draft.ways <= {"deterministic"}:  # as deterministic as the others
                fixed[n] = draft
                tries, merged_nodes = self._merge(batch, fixed)
            else:
                sampled[n] = draft
        shape, token = _forest(tries)
        drafts = [
            Draft(
                shape, upload_tokens(batch.device, token), broken=_broken(fixed.values()),
                greedy_q=_greedy_q(batch, fixed, tries, merged_nodes),
            )
        ]  # fmt: skip
        extras = {n: _without_nodes(draft) for n, draft in fixed.items() if draft.computed_only is not None}
        drafts += [*extras.values(), *sampled.values()]
        joined, numbers = join(batch, drafts, [every] * len(drafts))
        joined_nodes = {n: [nodes and [numbers[0][tree][node] for node in nodes] for tree, nodes in enumerate(trees)]
               for n, trees in merged_nodes.items()}  # fmt: skip
        for n, trees in zip([*extras, *sampled], numbers[1:], strict=True):
            joined_nodes[n] = [
                _added(first, more) for first, more in zip(joined_nodes.get(n, [[]] * len(trees)), trees, strict=True)
            ]
        known = [[tree for tree in every if joined_nodes[n][tree] is not None] for n in joined_nodes]
        note(batch, joined, list(joined_nodes), known, [[joined_nodes[n][tree] for tree in trees]
                                               for n, trees in zip(joined_nodes, known, strict=True)])  # fmt: skip
        return joined

    @property
    def _deterministic(self) -> list[tuple[int, Proposer]]:
        return [(n, part) for n, part in enumerate(self.proposers) if part.drawn == "deterministic"]

    @property
    def _sampled(self) -> list[tuple[int, Proposer]]:
        return [(n, part) for n, part in enumerate(self.proposers) if part.drawn != "deterministic"]

    def _merge(self, batch: Batch, drafts: Mapping[int, Draft]) -> tuple[list[Trie], dict[int, list[list[int] | None]]]:
        """Return each sequence's trie, and for each part and sequence its nodes as numbers within the trie."""
        ordered = sorted(drafts)
        tokens = batch.read(*(drafts[n].token for n in ordered)) if drafts else ()
        reserved = sum(part.nodes for n, part in self._sampled if n not in drafts)
        tries, nodes = [], {n: list[list[int] | None]() for n in ordered}
        for tree in range(len(batch.sequences)):
            trie = Trie()
            for n, token in zip(ordered, tokens, strict=True):
                shape = drafts[n].shape
                drafted = shape.trees[tree][1:] - shape.roots if shape.nodes else np.empty(0, dtype=np.int64)
                above = shape.parent[drafted]
                parent = np.where(above < shape.roots, 0, shape.places[above] + 1) if len(drafted) else drafted
                nodes[n].append(trie.add(parent.tolist(), token[drafted].tolist(), self.max_nodes - reserved))
            tries.append(trie)
        return tries, nodes


def _forest(tries: Sequence[Trie]) -> tuple[Shape, np.ndarray]:
    parents, tokens, start = [], [], len(tries)
    for root, trie in enumerate(tries):
        parents += [root if not above else start + above - 1 for above in trie.parent]
        tokens += trie.token
        start += len(trie.token)
    return Shape(len(tries), np.array(parents, dtype=np.int64)), np.array(tokens, dtype=np.int64)


def _greedy_q(
    batch: Batch, drafts: Mapping[int, Draft], tries: Sequence[Trie], nodes: Mapping[int, list[list[int] | None]]
) -> Tensor | None:
    """Return ``Draft.greedy_q`` of merged drafts: of each node that of the first part that states one.

    Args:
        batch: the sequences.
        drafts: by the number of their part.
        tries, nodes: as in ``Union._merge``.
    """
    stated = {n: drafts[n].greedy_q for n in sorted(drafts, reverse=True)}
    given = [q for q in stated.values() if q is not None]
    if not given:
        return None
    values, read = [np.full(len(trie.token), np.nan) for trie in tries], iter(batch.read(*given))
    for n, q in stated.items():
        if q is None:
            continue
        host, shape = next(read), drafts[n].shape
        for tree, numbers in enumerate(nodes[n]):
            if numbers:
                q_of_tree = host[shape.trees[tree][1:] - shape.roots]
                values[tree][numbers] = np.where(np.isnan(q_of_tree), values[tree][numbers], q_of_tree)
    return upload(batch.device, np.concatenate(values))[0]


def _without_nodes(draft: Draft) -> Draft:
    """Return the rows of a draft that are computed only."""
    extra, nodes, roots = draft.computed_only, draft.shape.nodes, draft.shape.roots
    assert extra is not None
    if ((extra.parent >= roots) & (extra.parent < roots + nodes)).any():
        raise ValueError("a part computes rows below its drafted nodes, which a union cannot place")
    parent = np.where(extra.parent < roots, extra.parent, extra.parent - nodes)
    none = draft.token[:0]
    return Draft(Shape(roots, np.empty(0, dtype=np.int64)), none, computed_only=ComputedOnly(parent, extra.token))


def _broken(drafts: Any) -> dict[int, str]:
    return {tree: why for draft in drafts for tree, why in draft.broken.items()}


def _added(first: list[int] | None, more: list[int]) -> list[int] | None:
    return None if first is None else first + more
