"""The union of several proposers' drafts: deterministic trees are merged, sampled nodes stand beside them.

Deterministic trees (n-grams, suffixes, the likeliest tokens of heads) are merged into one trie: any subset of points is
verified exactly. At most one part samples its nodes. They stand behind the points below the same root, and their draft
distribution at the root leaves the points out: what was rejected as a point is not drawn again. Siblings are verified
in drawing order, each by the distribution it was drawn from, which is exact for token and traversal verification, and
accepts more than q with the points in it (``core.draft.Draft``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from spec_lab.core.draft import ComputedOnly, Draft, Drawn, Shape
from spec_lab.core.options import true_or_false, whole
from spec_lab.core.probabilities import Sampling
from spec_lab.core.request import Request
from spec_lab.decode.proposer import Observation, Proposer, Requires, draws_of
from spec_lab.decode.sequence import Batch, DraftMasks
from spec_lab.models.target import Target
from spec_lab.propose.parts import PartStates, ProposerParts, join, note
from spec_lab.propose.trees import MOST_NODES, Choices
from spec_lab.runners.runner import DraftRunner


class Trie(NamedTuple):
    """Deterministic trees of one sequence, merged.

    Args:
        parent: ``[n]`` the row above each node; 0 is the root, node i has row i + 1.
        token: ``[n]`` its token; siblings have distinct ones.
    """

    parent: list[int]
    token: list[int]

    def add(self, row: dict[tuple[int, int], int], parent: list[int], token: list[int], most: int) -> list[int] | None:
        """Merge a tree, as long as the trie has fewer than ``most`` nodes.

        Args:
            row: of each child of the trie, by its parent's row and its token.
            parent, token: ``[m]`` of the tree, as of this class.
            most: nodes of the trie.

        Returns:
            ``[m]`` the nodes' numbers within the trie; None where some were left out.
        """
        rows = [0]  # within the trie, of each row of the tree; -1 where it was left out
        for above, own in zip(parent, token, strict=True):
            at = rows[above]
            child = row.get((at, own), -1) if at >= 0 else -1
            if child < 0 <= at and len(self.token) < most:
                self.parent.append(at)
                self.token.append(own)
                child = row[at, own] = len(self.token)
            rows.append(child)
        return None if -1 in rows else [one - 1 for one in rows[1:]]


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
        for place, row in enumerate(rows.tolist()):
            if row < shape.roots:
                allowed[place, list(self.tokens[row])] = False
        return allowed

    def view(self, roots: Sequence[int]) -> Excluding:
        """See ``DraftMasks``."""
        masks = None if self.masks is None else self.masks.view(roots)
        return Excluding(masks, [self.tokens[root] for root in roots], self.vocabulary)


@dataclass(frozen=True, eq=False)
class Union:
    """Drafts what all of its parts draft.

    Args:
        parts: at most one of them samples.
        most: nodes of a tree, rows that are computed only left out; points beyond are dropped, the last part's first.
        exclude: whether sampled nodes leave the points at their root out.
    """

    parts: ProposerParts
    most: int
    exclude: bool = True
    name: str = "union"

    @staticmethod
    def load(target: Target, parts: Mapping[str, Proposer], nodes: int | None = None, exclude: bool = True) -> Union:
        """Return the union of proposers that are loaded already.

        Args:
            target: of all of them.
            parts: by name; in this order points are dropped last.
            nodes: most nodes of a tree; None for as many as the parts draft together.
            exclude: leave points out of the distribution of the sampled nodes beside them.

        Raises:
            ValueError: fewer than two parts, more than one that samples, one that shares its noise with the verifier,
                or fewer nodes than the part that samples drafts.
        """
        own = ProposerParts(dict(parts))
        if len(own.all) < 2:
            raise ValueError("proposer.parts must name at least two proposers")
        sampled = {name: one for name, one in parts.items() if one.drawn != "point"}
        if len(sampled) > 1 or any(len(draws_of(one) - {"point"}) > 1 for one in parts.values()):
            raise ValueError(
                f"proposer.parts: {', '.join(sampled)} sample their drafts, and one root has one distribution: let all "
                "but one of them draft deterministic tokens (drawn=point)"
            )
        if "gumbel" in own.draws:
            raise ValueError("proposer.parts: a part drawn 'gumbel' shares its noise with the verifier; choose another")
        all_nodes = sum(one.nodes for one in own.all)
        most = all_nodes if nodes is None else whole("proposer.nodes", nodes, most=MOST_NODES)
        for name, one in sampled.items():
            if one.nodes > most:
                raise ValueError(f"proposer.nodes is {most}, but part {name} samples {one.nodes}, which all must stay")
        return Union(own, most, true_or_false("proposer.exclude", exclude))

    @property
    def drawn(self) -> Drawn:
        """How the part that samples does; "point" without one."""
        return self.parts.drawn

    @property
    def draws(self) -> frozenset[Drawn]:
        """See ``DrawsSeveralWays``."""
        return self.parts.draws

    @property
    def branches(self) -> bool:
        """Two parts may begin differently."""
        return True

    @property
    def nodes(self) -> int:
        """Most rows below one root: all parts' rows, those that are computed only among them."""
        return sum(one.nodes for one in self.parts.all)

    @property
    def forced_nodes(self) -> int:
        """See ``DraftsForcedTokens``."""
        return self.parts.forced_nodes

    @property
    def target_cells(self) -> int:
        """See ``UsesTargetCells``."""
        return self.parts.target_cells

    @property
    def requires(self) -> Requires:
        """What any part requires."""
        return self.parts.requires

    def kv_bytes(self, positions: Sequence[int]) -> int:
        """See ``HoldsKVCache``."""
        return self.parts.kv_bytes(positions)

    @property
    def sha256(self) -> str | None:
        """See ``Hashed``."""
        return self.parts.sha256

    @property
    def shared_store(self) -> str:
        """See ``LearnsAcrossRequests``."""
        return self.parts.shared_store

    @property
    def facts(self) -> dict[str, Any]:
        """What a record should keep."""
        return {"nodes": self.most, "exclude": self.exclude, "parts": self.parts.facts}

    def forget(self) -> None:
        """See ``LearnsAcrossRequests``."""
        self.parts.forget()

    def check_sampling(self, sampling: Sampling) -> None:
        """See ``ChecksSampling``."""
        self.parts.check_sampling(sampling)

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> Union:
        """See ``CertifiableProposer``."""
        parts = self.parts.toy(target, draft, tree)
        return replace(self, parts=parts, most=max(self.most, *(one.nodes for one in parts.all)))

    def init(self, request: Request) -> PartStates:
        """See ``Proposer``."""
        return self.parts.init(request)

    def observe(self, observed: Sequence[Observation]) -> None:
        """See ``Proposer``."""
        self.parts.observe(observed)

    def fork(self, state: PartStates) -> PartStates:
        """See ``Proposer``."""
        return self.parts.fork(state)

    def rewind(self, state: PartStates, length: int) -> None:
        """See ``Proposer``."""
        self.parts.rewind(state, length)

    def close(self, state: PartStates) -> None:
        """See ``Proposer``."""
        self.parts.close(state)

    def propose(self, batch: Batch) -> Draft:
        """Draft the points of all parts, then the sampled nodes."""
        every = range(len(batch.sequences))
        points = {n: one.propose(self.parts.view(batch, n)) for n, one in self._points}
        sampled: dict[int, Draft] = {}
        tries, found = self._merge(batch, points)
        for n, one in self._sampled:
            view = self.parts.view(batch, n)
            if self.exclude:
                left_out = [
                    [] if sequence.request.sampling.temperature == 0
                    else [token for above, token in zip(*trie, strict=True) if not above]
                    for sequence, trie in zip(batch.sequences, tries, strict=True)
                ]  # fmt: skip
                if any(left_out):
                    masks = Excluding(view.draft_masks, left_out, batch.target.vocabulary)
                    view = replace(view, draft_masks=masks)
            draft = one.propose(view)
            if draft.one_hot or draft.ways <= {"point"}:  # as deterministic as the others
                points[n] = draft
                tries, found = self._merge(batch, points)
            else:
                sampled[n] = draft
        shape, token = _forest(tries)
        drafts = [Draft(shape, torch.from_numpy(token).to(batch.device), broken=_broken(points.values()))]
        extras = {n: _without_nodes(draft) for n, draft in points.items() if draft.computed_only is not None}
        drafts += [*extras.values(), *sampled.values()]
        joined, numbers = join(batch, drafts, [every] * len(drafts))
        own = {n: [one and [numbers[0][tree][node] for node in one] for tree, one in enumerate(trees)]
               for n, trees in found.items()}  # fmt: skip
        for n, trees in zip([*extras, *sampled], numbers[1:], strict=True):
            own[n] = [_added(first, more) for first, more in zip(own.get(n, [[]] * len(trees)), trees, strict=True)]
        known = [[tree for tree in every if own[n][tree] is not None] for n in own]
        note(batch, joined, list(own), known, [[own[n][tree] for tree in trees]
                                               for n, trees in zip(own, known, strict=True)])  # fmt: skip
        return joined

    @property
    def _points(self) -> list[tuple[int, Proposer]]:
        return [(n, one) for n, one in enumerate(self.parts.all) if one.drawn == "point"]

    @property
    def _sampled(self) -> list[tuple[int, Proposer]]:
        return [(n, one) for n, one in enumerate(self.parts.all) if one.drawn != "point"]

    def _merge(self, batch: Batch, drafts: Mapping[int, Draft]) -> tuple[list[Trie], dict[int, list[list[int] | None]]]:
        """Return each sequence's trie, and for each part and sequence its nodes as numbers within the trie."""
        ordered = sorted(drafts)
        tokens = batch.read(*(drafts[n].token for n in ordered)) if drafts else ()
        reserved = sum(one.nodes for n, one in self._sampled if n not in drafts)
        tries, found = [], {n: list[list[int] | None]() for n in ordered}
        for tree in range(len(batch.sequences)):
            trie, row = Trie([], []), dict[tuple[int, int], int]()
            for n, token in zip(ordered, tokens, strict=True):
                shape = drafts[n].shape
                own = shape.trees[tree][1:] - shape.roots if shape.nodes else np.empty(0, dtype=np.int64)
                above = shape.parent[own]
                parent = np.where(above < shape.roots, 0, shape.places[above] + 1) if len(own) else own
                found[n].append(trie.add(row, parent.tolist(), token[own].tolist(), self.most - reserved))
            tries.append(trie)
        return tries, found


def _forest(tries: Sequence[Trie]) -> tuple[Shape, np.ndarray]:
    parents, tokens, start = [], [], len(tries)
    for root, trie in enumerate(tries):
        parents += [root if not above else start + above - 1 for above in trie.parent]
        tokens += trie.token
        start += len(trie.token)
    return Shape(len(tries), np.array(parents, dtype=np.int64)), np.array(tokens, dtype=np.int64)


def _without_nodes(draft: Draft) -> Draft:
    """Return the rows of a draft that are computed only.

    Raises:
        ValueError: some of them are below nodes, which a union may merge or drop.
    """
    extra, nodes, roots = draft.computed_only, draft.shape.nodes, draft.shape.roots
    assert extra is not None
    if ((extra.parent >= roots) & (extra.parent < roots + nodes)).any():
        raise ValueError("a part computes rows below its drafted nodes, which a union cannot place")
    parent = np.where(extra.parent < roots, extra.parent, extra.parent - nodes)
    none = draft.token[:0]
    return Draft(Shape(roots, np.empty(0, dtype=np.int64)), none, computed_only=ComputedOnly(parent, extra.token))


def _broken(drafts: Any) -> dict[int, str]:
    return {tree: why for one in drafts for tree, why in one.broken.items()}


def _added(first: list[int] | None, more: list[int]) -> list[int] | None:
    return None if first is None else first + more
