"""Chains under a constraint that forces some tokens: forced tokens cost neither depth nor a forward of the draft."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn, chain, empty, forest
from spec_lab.core.probabilities import Sampling, finite_, logits_to_probs, probs_dtype
from spec_lab.core.randomness import Key, Purpose
from spec_lab.decode.rows import tokens_before, tokens_of
from spec_lab.decode.sequence import Batch, DraftMasks, by_row
from spec_lab.drafters.draft_model.cache import DraftCache, Tentative
from spec_lab.propose.growth import Stop
from spec_lab.propose.siblings import BROKEN, allow_
from spec_lab.runners.runner import DraftRunner

RUN = 24
"""Most forced tokens of one chain."""


class ForcedChains:
    """One chain below each root: tokens drawn from the draft model's masked q, and after each the forced ones.

    A forced token follows with certainty, so its q is one-hot. The draft model computes it together with the drawn
    token before it, when it computes q for the next free one; so ``depths`` counts drawn tokens only.

    Args:
        lm: the draft model.
        drawn: "iid", "without" or "point".
        batch: what is drafted for.
        masks: what the constraint allows the draft.
        depths: ``[B]`` most tokens drawn.
        samplings: ``[B]`` how the draft samples.
        caches: ``[B]`` the draft's KV caches; None where nothing is drafted.
        limits: ``[B]`` most nodes.
        stop: where nothing more is drawn; None: nowhere.
    """

    def __init__(
        self,
        lm: DraftRunner,
        drawn: Drawn,
        batch: Batch,
        masks: DraftMasks,
        depths: Sequence[int],
        samplings: Sequence[Sampling],
        caches: Sequence[DraftCache | None],
        limits: Sequence[int],
        stop: Stop | None = None,
    ) -> None:
        self.lm, self.drawn, self.batch, self.masks = lm, drawn, batch, masks
        self.samplings, self.caches, self.depths, self.stop = samplings, caches, depths, stop
        self.path = np.ones(
            len(caches)
        )  # of each tree, the product of the drawn tokens' probabilities at temperature 1
        self.timed = batch.clock.phase("propose_forward")
        lengths = [max(0, min(d + RUN, limit)) if d else 0 for d, limit in zip(depths, limits, strict=True)]
        self.shape = forest(tuple(map(chain, lengths)))
        texts = (sequence.tokens for sequence in batch.sequences)
        self.texts = tokens_of(texts, samplings, batch.target.vocabulary, lm.device)
        self.rows = [tree.tolist() for tree in self.shape.trees]  # of each tree, its root first
        self.ends = [0] * len(caches)  # of each tree, the place of its last drawn row in ``rows``
        self.token = np.zeros(self.shape.nodes, dtype=np.int64)
        self.computed = np.zeros(self.shape.rows, dtype=bool)
        self.broken: dict[int, str] = {}
        self.q: list[Tensor] = []
        self.q_row = np.full(self.shape.rows, -1, dtype=np.int64)
        self.allowed: dict[int, np.ndarray] = {}  # by tree: what may follow its last row

    def run(self) -> Draft:
        """Draw all chains. Afterwards the caches hold the computed nodes."""
        active = [tree for tree, cache in enumerate(self.caches) if cache is not None]
        if active:
            pending = [self._cache(tree).follow(self.batch.sequences[tree].tokens) for tree in active]
            caches = [self._cache(tree).kv for tree in active]
            logits = self.lm.forward(caches, pending, empty(len(active), self.lm.device), timed=self.timed).logits
            for tree in active:
                self.allowed[tree] = self._ask(tree)
        level = 0
        while active:
            level += 1
            grown, stopped = self._draw(active, logits)
            fresh = {tree: [self.rows[tree][self.ends[tree]]] for tree in grown}
            for tree in grown:
                fresh[tree] += self._forced(tree)
            full = {tree for tree in grown if self.ends[tree] + 1 == len(self.rows[tree])}
            active = [h for h in grown if h not in full and h not in stopped and level < self.depths[h]]
            active = [tree for tree in active if self.allowed[tree].any()]
            if active:
                logits = self._compute(active, fresh)
        return self._draft()

    def _cache(self, tree: int) -> DraftCache:
        cache = self.caches[tree]
        assert cache is not None
        return cache

    def _ask(self, tree: int) -> np.ndarray:  # [V]
        """Return which tokens are allowed after the last row of a tree."""
        return self.masks(self.shape, np.array([self.rows[tree][self.ends[tree]]]), self.token)[0]

    def _append(self, tree: int, token: int) -> None:
        self.ends[tree] += 1
        self.token[self.rows[tree][self.ends[tree]] - self.shape.roots] = token

    def _draw(self, active: list[int], logits: Tensor) -> tuple[list[int], set[int]]:
        """Draw one more token for each tree from logits ``[n, V]``; return trees that got one, and ended ones."""
        rows = np.array([self.rows[tree][self.ends[tree]] for tree in active])
        own, ask = logits.to(probs_dtype(logits.dtype), copy=True), {}
        if (without := finite_(own)) is not None:
            ask["without"] = without
        ask["possible"] = allow_(own, np.stack([self.allowed[tree] for tree in active]))
        if self.stop is not None:
            probs = own.softmax(-1)
            ask["stopped"] = self.stop(probs, np.array(active), self.path[active])
        samplings = by_row(self.samplings, np.array(active))
        seen = tokens_before(self.texts, self.shape, self.token, rows)
        if self.drawn == "point":
            if seen is not None:
                plain = [sampling.untruncated for sampling in samplings]
                own = logits_to_probs(own, plain, seen)
            ask["token"] = own.argmax(-1)
        else:
            own = logits_to_probs(own, samplings, seen, scratch=own)
            keys = [Key(*self.batch.sequences[tree].key, Purpose.DRAFT, self.ends[tree]) for tree in active]
            ask["token"] = self.batch.draws.pick(own, keys)
        if self.stop is not None and self.stop.rule.reads_path:
            ask["mass"] = probs.gather(-1, ask["token"][:, None])[:, 0]
        host = dict(zip(ask, self.batch.read(*ask.values()), strict=True))
        if "without" in host:
            self.broken |= dict.fromkeys(np.array(active)[host["without"]].tolist(), BROKEN)
        fine = host["possible"]
        if self.stop is not None and self.stop.rule.before:
            fine = fine & ~host["stopped"]
        if "mass" in host:
            self.path[active] *= host["mass"]
        if self.drawn != "point":
            self.q_row[rows[fine]] = sum(map(len, self.q)) + np.flatnonzero(fine)
            self.q.append(own)
        drawn, stopped = [], set()
        for place, tree in enumerate(active):
            if fine[place]:
                self._append(tree, int(host["token"][place]))
                drawn.append(tree)
                if self.stop is not None and host["stopped"][place]:
                    stopped.add(tree)
        return drawn, stopped

    def _forced(self, tree: int) -> list[int]:
        """Append the forced tokens; return their rows. ``allowed`` then holds what may follow them."""
        appended = []
        while self.ends[tree] + 1 < len(self.rows[tree]):
            allowed = self._ask(tree)
            self.allowed[tree] = allowed
            if allowed.sum() != 1:
                break
            token, row = int(allowed.argmax()), self.rows[tree][self.ends[tree]]
            if self.drawn != "point":
                self.q_row[row] = sum(map(len, self.q))
                self.q.append(torch.from_numpy(allowed)[None].to(self.lm.device, probs_dtype(self.lm.dtype)))
            self._append(tree, token)
            appended.append(self.rows[tree][self.ends[tree]])
        return appended

    def _compute(self, active: list[int], fresh: dict[int, list[int]]) -> Tensor:  # [n, V]
        """The draft's logits after the last row of each, with all its new rows computed."""
        rows = np.array([row for tree in active for row in fresh[tree]])
        caches = [None if cache is None else cache.kv for cache in self.caches]
        self.computed[rows] = True
        token = self.token[rows - self.shape.roots]
        logits = self.lm.extend(caches, self.shape, rows, token, self.timed).logits
        return logits[torch.from_numpy(np.cumsum([len(fresh[tree]) for tree in active]) - 1)]

    def _draft(self) -> Draft:
        shape = self.shape
        for tree, cache in enumerate(self.caches):
            if cache is not None:
                cache.tentative = Tentative(shape, tree, self.token, self.computed)
        live = np.zeros(shape.rows, dtype=bool)
        for rows, end in zip(self.rows, self.ends, strict=True):
            live[rows[: end + 1]] = True
        smaller, kept = shape.keep(live)
        token = torch.from_numpy(self.token[kept]).to(self.batch.device)
        if self.drawn == "point":
            return Draft(smaller, token, broken=self.broken)
        q_row = np.concatenate([self.q_row[: shape.roots], self.q_row[shape.roots :][kept]])
        nothing = torch.empty(0, self.batch.target.vocabulary, device=self.lm.device)
        return Draft(smaller, token, self.drawn, torch.cat(self.q) if self.q else nothing, q_row, broken=self.broken)
