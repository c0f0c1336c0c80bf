"""Draws a forest of a known shape level by level."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn, Level, Shape
from spec_lab.core.limit import StopRule
from spec_lab.core.probabilities import (
    Sampling,
    finite,
    likeliest,
    likeliest_of,
    logits_to_probs,
    one_hot_,
    probs_dtype,
)
from spec_lab.core.randomness import Key, Purpose
from spec_lab.decode.rows import tokens_before, tokens_of
from spec_lab.decode.sequence import Batch, by_row
from spec_lab.propose.expansion import Computed, Expand
from spec_lab.propose.siblings import BROKEN, allow_, exists, sample_siblings


@dataclass(frozen=True)
class Stop:
    """A rule that stops drafts early, with its thresholds.

    Args:
        rule: the rule.
        threshold: ``[B]`` for each tree.
    """

    rule: StopRule
    threshold: np.ndarray

    def __call__(self, probs: Tensor, trees: np.ndarray, path: np.ndarray | None = None) -> Tensor:  # [n] bool
        """At which rows drafting stops, given draft probabilities ``[n, V]``, each row's tree, and ``path`` ``[n]``."""
        above = probs.new_ones(len(trees)) if path is None else torch.from_numpy(path).to(probs)
        return self.rule(probs, above, torch.from_numpy(self.threshold[trees]).to(probs))


class Growth:
    """A forest that is drafted level by level, one packed forward of the drafter each.

    Args:
        drawn: how siblings are drawn.
        batch: the sequences.
        shape: the whole forest; nodes that are left out are cut at the end.
        samplings: ``[B]`` how the drafter samples.
        stop: where nothing more is drafted; None: nowhere.
        lenient: see ``TreePlan.draft``.
    """

    def __init__(
        self,
        drawn: Drawn,
        batch: Batch,
        shape: Shape,
        samplings: Sequence[Sampling],
        stop: Stop | None = None,
        lenient: bool = False,
    ) -> None:
        self.drawn, self.batch, self.shape, self.samplings, self.stop = drawn, batch, shape, samplings, stop
        self.lenient = lenient
        cold = drawn in ("iid", "without") and all(one.temperature == 0 for one in samplings)
        self.one_hot = cold and not shape.branches
        self.greedy = drawn == "point" or self.one_hot  # the likeliest tokens, whatever the random choice
        self.token = np.zeros(shape.nodes, dtype=np.int64)
        self.kept = self.token  # of the draft, when it is complete
        self.broken: dict[int, str] = {}
        self.live = np.zeros(shape.rows, dtype=bool)  # the rows that there are so far
        self.live[: shape.roots] = True
        self.path = np.ones(shape.rows) if stop is not None and stop.rule.reads_path else None
        self.probs: Tensor | None = None  # [n, V] of the newest level, at temperature 1
        self.q: list[Tensor] = []
        self.noise: list[Tensor] = []
        self.q_row = np.full(shape.rows, -1, dtype=np.int64)
        texts = (sequence.tokens for sequence in batch.sequences)
        self.texts = tokens_of(texts, samplings, batch.target.vocabulary, batch.device)

    def grow(self, roots: Computed, expand: Expand) -> Draft:
        """Draw every level.

        Args:
            roots: of the roots that have nodes below them, in order.
            expand: computes further rows.
        """
        shape, batch = self.shape, self.batch
        grows = self.live.copy()  # where something is drafted below
        for level in shape.levels:
            live = grows[level.parents]
            parents, allowed = level.parents[live], None
            if len(parents) and batch.draft_masks is not None:
                allowed = batch.draft_masks(shape, parents, self.token)
                if parents[0] >= shape.roots:  # roots are computed whatever is drafted
                    some = allowed.any(-1)
                    live[live], parents, allowed = some, parents[some], allowed[some]
            if not len(parents):
                break
            for nodes, above in level.ranks:
                self.live[nodes] = live[above]
            computed = roots if parents[0] < shape.roots else expand(shape, parents, self.token)
            stopped = self._draw(level, live, parents, computed, allowed)
            if stopped is not None:
                live[live] = ~stopped
            for nodes, above in level.ranks:
                grows[nodes] = self.live[nodes] & live[above]
        token, q_row = self.token, self.q_row
        if not self.live.all():
            shape, kept = shape.keep(self.live)
            token, q_row = token[kept], np.concatenate([q_row[: shape.roots], q_row[shape.roots :][kept]])
        self.kept = token
        tokens = torch.from_numpy(token).to(self.batch.device)
        if self.drawn == "point":
            return Draft(shape, tokens, broken=self.broken)
        nothing = roots.logits.new_empty(0, batch.target.vocabulary, dtype=probs_dtype(roots.logits.dtype))
        if self.one_hot:  # each row has one child at most, of which its q is certain
            q_row[shape.parent] = np.arange(shape.nodes)
            q = one_hot_(tokens, nothing.new_empty(shape.nodes, nothing.shape[1]))
            return Draft(shape, tokens, self.drawn, q, q_row, broken=self.broken, one_hot=True)
        q = torch.cat(self.q) if self.q else nothing
        noise = None if self.drawn != "gumbel" else torch.cat(self.noise) if self.noise else nothing.double()
        return Draft(shape, tokens, self.drawn, q, q_row, noise, self.broken)

    def _draw(
        self,
        level: Level,
        live: np.ndarray,
        parents: np.ndarray,
        computed: Computed,
        allowed: np.ndarray | None,
    ) -> np.ndarray | None:
        """Draw one level's nodes.

        Args:
            level: the level.
            live: which of its parents may have children.
            parents: ``[n]`` these.
            computed: at these.
            allowed: ``[n, V]`` what its constraint allows there; None for everything.

        Returns:
            ``[n]`` bool, the parents at which drafting stops; None without a rule.
        """
        width, below = len(level.ranks), level.ranks
        if len(parents) < len(live):
            places = live.cumsum() - 1  # of each of the level's parents among ``parents``
            below = [(nodes[live[above]], places[above[live[above]]]) for nodes, above in below]
        if self.greedy and self._on_host:
            array = computed.array
            if array is None:
                array = computed.logits.to(probs_dtype(computed.logits.dtype)).numpy()
            stops = None if self.stop is None else lambda x: self._stopped(torch.from_numpy(x), parents).numpy()
            host = likeliest_on_host(self.batch.read(array)[0], width, allowed, stops)
        else:
            host = self._compute(computed.logits, parents, allowed, below)
        if "without" in host:
            self.broken |= dict.fromkeys(self.shape.root[parents[host["without"]]].tolist(), BROKEN)
        fine, support, stopped = host.get("possible"), host.get("support"), host.get("stopped")
        if stopped is not None and self.stop is not None and self.stop.rule.before:
            fine = ~stopped if fine is None else fine & ~stopped
        if self.lenient and "without" in host:
            fine = ~host["without"] if fine is None else fine & ~host["without"]
        if not self.greedy:
            some = np.arange(len(parents)) if fine is None else np.flatnonzero(fine)
            self.q_row[parents[some]] = sum(map(len, self.q[:-1])) + some
        start = 0
        for rank, (nodes, above) in enumerate(below):
            token = host["token"][above, rank] if host["token"].ndim == 2 else host["token"][start : start + len(nodes)]
            start += len(nodes)
            if fine is not None or support is not None:
                drawn = np.ones(len(nodes), dtype=bool) if fine is None else fine[above]
                if support is not None:
                    drawn = drawn & exists(support[above], rank, self.drawn)
                self.live[nodes] = drawn
                nodes, above, token = nodes[drawn], above[drawn], token[drawn]
            self.token[nodes - self.shape.roots] = token
            if self.path is not None and self.probs is not None:
                (own,) = self.batch.read(self.probs[torch.from_numpy(above), torch.from_numpy(token)])
                self.path[nodes] = self.path[parents[above]] * own
        return stopped

    def _stopped(self, logits: Tensor, parents: np.ndarray) -> Tensor:  # [n] bool
        """At which of ``parents`` drafting stops, given their logits ``[n, V]``."""
        assert self.stop is not None
        probs = logits.softmax(-1)
        path = None if self.path is None else self.path[parents]
        self.probs = None if self.path is None else probs
        return self.stop(probs, self.shape.root[parents], path)

    @property
    def _on_host(self) -> bool:
        """Whether ``likeliest_on_host`` draws the likeliest tokens."""
        return self.texts is None and self.batch.device.type == "cpu"

    def _compute(
        self,
        logits: Tensor,
        parents: np.ndarray,
        allowed: np.ndarray | None,
        below: Sequence[tuple[np.ndarray, np.ndarray]],
    ) -> dict[str, np.ndarray]:
        """Draw one level's tokens on the device, and read all that the host needs by one copy; sampled, append q.

        Args:
            logits, parents, allowed: as of ``_draw``.
            below: for each rank the nodes, and of each node the place of its parent in ``parents``.

        Returns:
            As of ``likeliest_on_host``; ``token`` may also be ``[sum of nodes]``, rank by rank.
        """
        width, ask = len(below), {}
        own, without = finite(logits.to(probs_dtype(logits.dtype)))
        if without is not None:
            ask["without"] = without
        if own is logits and (allowed is not None or not self.greedy):
            own = logits.clone()  # it is written to
        if allowed is not None:
            ask["possible"] = allow_(own, allowed)
        if self.stop is not None:
            ask["stopped"] = self._stopped(own, parents)
        if self.greedy:
            if self.texts is not None:
                own = self._penalised(own.clone(), parents)
            support = (own > -torch.inf).sum(-1) if allowed is not None else None
        else:
            own = logits_to_probs(own, *self._warp(self.samplings, parents), scratch=own)
            self.q.append(own)
            support = (own > 0).sum(-1) if width > 1 else None
        if support is not None:
            ask["support"] = support
        if self.greedy or self.drawn == "gumbel":  # [n, width]
            ask["token"] = likeliest(own if self.greedy else self._race(own, parents), width)
        else:
            ranks = [(places, self._keys(nodes, Purpose.DRAFT)) for nodes, places in below]
            ask["token"] = torch.cat(sample_siblings(self.batch.draws, self.drawn, own, support, ranks))
        return dict(zip(ask, self.batch.read(*ask.values()), strict=True))

    def _race(self, q: Tensor, parents: np.ndarray) -> Tensor:  # [n, V]
        """Log q + g, with standard Gumbel noise g, drawn for each parent; tokens without mass come last."""
        noise = torch.from_numpy(self.batch.draws.race(q.shape[-1], self._keys(parents, Purpose.RACE))).to(q.device)
        self.noise.append(noise)
        return q.double().log() + noise

    def _keys(self, rows: np.ndarray, purpose: Purpose) -> list[Key]:
        """Return the keys of what is drawn at ``rows``: a row's place in its whole tree, whatever the batch holds."""
        roots: list[int] = self.shape.root[rows].tolist()
        places: list[int] = self.shape.places[rows].tolist()
        keys = [sequence.key for sequence in self.batch.sequences]
        return [Key(*keys[root], purpose, place) for root, place in zip(roots, places, strict=True)]

    def _warp(self, samplings: Sequence[Sampling], rows: np.ndarray) -> tuple[list[Sampling], Tensor | None]:
        """Return the arguments of ``logits_to_probs`` at ``rows``: parameters (one if they agree), and history."""
        seen = tokens_before(self.texts, self.shape, self.token, rows)
        return by_row(samplings, self.shape.root[rows]), seen

    def _penalised(self, logits: Tensor, rows: np.ndarray) -> Tensor:
        """Return probabilities that rank tokens as the penalised logits do, none of them truncated to zero."""
        plain = [sampling.untruncated for sampling in self.samplings]
        return logits_to_probs(logits, *self._warp(plain, rows), scratch=logits)


def likeliest_on_host(
    x: np.ndarray,
    width: int,
    allowed: np.ndarray | None = None,
    stops: Callable[[np.ndarray], np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """What a level of likeliest tokens needs to know, in few functions of NumPy (``runner.Output``).

    Args:
        x: ``[n, V]`` logits, float32 or float64; not written to.
        width: how many tokens of each row.
        allowed: ``[n, V]`` what a constraint allows; None for everything.
        stops: tells from the logits of what is allowed, ``[n, V]``, at which rows drafting stops; None: at none.

    Returns:
        ``token`` ``[n, width]``, the likeliest first. ``without`` ``[n]``, rows without a distribution, if there are
        any. With ``allowed``: ``possible`` ``[n]``, rows with an allowed token that has a probability, and ``support``
        ``[n]``, how many each has. With ``stops``: ``stopped`` ``[n]``.
    """
    found: dict[str, np.ndarray] = {}
    rows, best = np.arange(len(x)), x.argmax(-1)
    top = x[rows, best]
    if not all(map(math.isfinite, top.tolist())):  # NaN is larger than all others, and -inf the largest of its own kind
        fine = np.isfinite(top)
        found["without"] = ~fine
        x = np.where(fine[:, None], x, 0)
        best, top = np.where(fine, best, 0), np.where(fine, top, 0)
    if allowed is not None:
        x = np.where(allowed, x, -np.inf)
        best = x.argmax(-1)
        top = x[rows, best]
        found["possible"] = possible = top > -np.inf
        x[~possible, 0] = top[~possible] = 0
        found["support"] = (x > -np.inf).sum(-1)
    if stops is not None:
        found["stopped"] = stops(x)
    found["token"] = best[:, None] if width == 1 else likeliest_of(x, width)
    return found
