"""Draws a forest: computes rows that a rule chooses, and draws the children of each."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import BROKEN, Draft, Drawn
from spec_lab.core.probabilities import (
    Sampling,
    finite,
    likeliest,
    likeliest_of,
    logits_to_probs,
    one_hot_,
    probs_dtype,
)
from spec_lab.core.randomness import Key, Purpose, upload_keys
from spec_lab.core.shape import Shape
from spec_lab.core.upload import upload
from spec_lab.decode.sequence import Batch, by_row, text_histories
from spec_lab.propose.expansion import Computed, Expand, columns_on_host
from spec_lab.propose.siblings import allow_, how_many, sample_siblings
from spec_lab.propose.stop_rules import Stop


class Children(NamedTuple):
    """Nodes drawn below some rows.

    Args:
        token: ``[n, K]`` the tokens of each row's children by rank. Those of children that do not exist mean nothing.
        counts: ``[n]`` how many there are; None: as many as the plan has below each row.
        stopped: ``[n]`` bool, at which rows drafting stops: the children get no children. None: nowhere.
        probability: ``[n, K]`` of each child, where the rule, the stop rule or a record reads it.
    """

    token: np.ndarray
    counts: np.ndarray | None = None
    stopped: np.ndarray | None = None
    probability: np.ndarray | None = None


@dataclass(eq=False)
class Grower(ABC):
    """A forest that grows: each forward of the drafter computes some rows, whose children are then drawn.

    A subclass is the rule: it names the rows that are computed next (``choose``) and adds what was drawn (``add``).

    Args:
        drawn: how siblings are drawn.
        batch: the sequences.
        shape: what is known of the forest.
        samplings: ``[B]`` how the drafter samples.
        stop: where nothing more is drafted; None: nowhere.
        lenient: see ``TreePlan.draft``.

    Attributes:
        token: ``[M]`` of the nodes of ``shape``, those drawn so far.
        greedy_q: ``[M]`` as in ``Draft``; None where nobody records it, and where tokens are sampled.
        live: ``[R]`` bool, the rows of the draft.
        kept: the tokens of the draft, when it is complete.
    """

    drawn: Drawn
    batch: Batch
    shape: Shape
    samplings: Sequence[Sampling]
    stop: Stop | None = None
    lenient: bool = False

    scored = False  # whether it needs the probability of every child, the likeliest included

    def __post_init__(self) -> None:
        batch, shape, samplings, stop = self.batch, self.shape, self.samplings, self.stop
        cold = self.drawn in ("iid", "without_replacement") and all(sampling.temperature == 0 for sampling in samplings)
        self.one_hot = cold and not self.scored and not shape.branches
        self.greedy = self.drawn == "deterministic" or self.one_hot  # the likeliest tokens, whatever the random choice
        self.token = self.kept = np.zeros(shape.nodes, dtype=np.int64)
        self.greedy_q = np.full(shape.nodes, np.nan) if batch.recorded and self.greedy else None
        self.broken: dict[int, str] = {}
        self.live = np.zeros(shape.rows, dtype=bool)
        self.live[: shape.roots] = True
        self.path = np.ones(shape.rows) if stop is not None and stop.rule.reads_path else None
        self.q: list[Tensor] = []
        self.noise: list[Tensor] = []
        self.measured: list[tuple[np.ndarray, np.ndarray]] = []  # rows, and what a policy measures there
        self.q_row = np.full(shape.rows, -1, dtype=np.int64)
        self.histories = text_histories(batch.sequences, samplings, batch.target.vocabulary, batch.device)

    @abstractmethod
    def choose(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Return rows ``[n]`` whose children are drawn next, roots first, and what is allowed there (``allowed``).

        All roots of which logits are given come in the first call. Without rows the draft is complete.
        """

    @abstractmethod
    def siblings(self, rows: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return for each rank the places in ``rows`` of the parents, and the numbers that key the draws."""

    @abstractmethod
    def add(self, rows: np.ndarray, children: Children) -> None:
        """Add what was drawn below ``rows``."""

    def grow(self, roots: Computed, expand: Expand) -> Draft:
        """Draw the whole forest.

        Args:
            roots: of the roots that have nodes below them, in order.
            expand: computes further rows.
        """
        rows, allowed = self.choose()
        while len(rows):
            computed = roots if rows[0] < self.shape.roots else self.compute(rows, expand)
            self.add(rows, self.draw(rows, computed, allowed))
            rows, allowed = self.choose()
        return self.draft(roots)

    def compute(self, rows: np.ndarray, expand: Expand) -> Computed:
        """Compute nodes ``rows``."""
        return expand(self.shape, rows, self.token[rows - self.shape.roots])

    def allowed(self, rows: np.ndarray) -> np.ndarray | None:
        """Return what a constraint allows below ``rows``, ``[n, V]`` bool; None for everything."""
        if self.batch.draft_masks is None or not len(rows):
            return None
        return self.batch.draft_masks(self.shape, rows, self.token)

    def paths(self, rows: np.ndarray) -> np.ndarray | None:
        """Return the probability of the path to each of ``rows``, ``[n]``; None where no stop rule reads it."""
        return None if self.path is None else self.path[rows]

    def draw(self, rows: np.ndarray, computed: Computed, allowed: np.ndarray | None) -> Children:
        """Draw the children of ``rows`` ``[n]`` from ``computed``, of which a constraint allows ``allowed``."""
        ranks = self.siblings(rows)
        if self._ranks_logits and self._on_host:
            host = self._on_cpu(rows, computed, allowed, len(ranks))
        else:
            host = self._compute(rows, computed.logits, allowed, ranks)
        if "measured" in host:
            self.measured.append((rows, host["measured"]))
        fine, without, stopped = host.get("possible"), host.get("without"), host.get("stopped")
        if without is not None:
            self.broken |= dict.fromkeys(self.shape.root[rows[without]].tolist(), BROKEN)
            if self.lenient:
                fine = ~without if fine is None else fine & ~without
        if stopped is not None and self.stop is not None and self.stop.rule.before:
            fine = ~stopped if fine is None else fine & ~stopped
        count = None if "support" not in host else how_many(host["support"], len(ranks), self.drawn)
        if fine is not None:
            count = np.where(fine, len(ranks) if count is None else count, 0)
        if not self.greedy:
            some = np.arange(len(rows)) if fine is None else np.flatnonzero(fine)
            self.q_row[rows[some]] = sum(map(len, self.q[:-1])) + some
        return Children(host["token"], count, stopped, host.get("probability"))

    @property
    def _on_host(self) -> bool:
        """Whether ``likeliest_on_host`` draws the likeliest tokens."""
        return self.batch.device.type == "cpu"

    def _on_cpu(
        self, rows: np.ndarray, computed: Computed, allowed: np.ndarray | None, width: int
    ) -> dict[str, np.ndarray]:
        """Draw the likeliest tokens on the host. See ``likeliest_on_host``."""
        probs, measure = list[Tensor](), self.batch.measure
        reads = self.scored or self.path is not None or self.greedy_q is not None
        array, ids = columns_on_host(computed, width if measure is None else self.batch.target.vocabulary)
        if allowed is not None and ids is not None:
            allowed = allowed[:, ids]

        def stops(logits: np.ndarray) -> np.ndarray:
            probs.append(torch.from_numpy(logits).softmax(-1))
            return np.zeros(len(rows), bool) if self.stop is None else self._stopped(probs[0], rows).numpy()

        (array,) = self.batch.read(array)
        asks = None if self.stop is None and measure is None else stops
        host = likeliest_on_host(array, width, allowed, asks, reads)
        if measure is not None:
            host["measured"] = measure(probs[0]).numpy()
        if self.scored:  # the largest first, so that those without mass are the last
            host["support"] = (host["probability"] > 0).sum(-1)
        if ids is not None:
            host["token"] = ids[host["token"]]
        return host

    def _stopped(self, probs: Tensor, rows: np.ndarray) -> Tensor:  # [n] bool
        """At which of ``rows`` drafting stops, given their draft probabilities ``[n, V]``."""
        assert self.stop is not None
        return self.stop(probs, self.shape.root[rows], self.paths(rows))

    def _compute(
        self,
        rows: np.ndarray,
        logits: Tensor,
        allowed: np.ndarray | None,
        ranks: Sequence[tuple[np.ndarray, np.ndarray]],
    ) -> dict[str, np.ndarray]:
        """Draw tokens on the device, and read all that the host needs by one copy; sampled, append q.

        Returns:
            As in ``likeliest_on_host``; ``probability`` ``[n, width]`` of each token, where somebody reads it.
        """
        width, ask = len(ranks), {}
        scores, without = finite(logits.to(probs_dtype(logits.dtype)))
        if without is not None:
            ask["without"] = without
        history = None if self.histories is None else self.histories.before(self.shape, self.token, rows)
        if scores is logits and (allowed is not None or not self._keeps_logits):
            scores = logits.clone()  # it is written to
        if history is not None and history.bias is not None:  # banned words can leave nothing of what is allowed
            scores, history = scores + history.bias, history._replace(bias=torch.zeros_like(history.bias))
            allowed = np.ones(scores.shape, dtype=bool) if allowed is None else allowed
        if allowed is not None:
            ask["possible"] = allow_(scores, allowed)
        measure, states = self.batch.measure, self.greedy_q is not None
        read = self.stop is not None or measure is not None or (states and self._keeps_logits)
        probs = scores.softmax(-1) if read else None
        if probs is not None and self.stop is not None:
            ask["stopped"] = self._stopped(probs, rows)
        if probs is not None and measure is not None:
            ask["measured"] = measure(probs)
        if self.greedy and allowed is not None and not self.scored:
            ask["support"] = (scores > -torch.inf).sum(-1)
        if not self._keeps_logits:
            plain = self.greedy  # ranked as penalised logits are, none of them truncated to zero
            samplings = [sampling.untruncated for sampling in self.samplings] if plain else self.samplings
            scores = logits_to_probs(scores, by_row(samplings, self.shape.root[rows]), history, scratch=scores)
        if not self.greedy:
            self.q.append(scores)
            if width > 1:
                ask["support"] = (scores > 0).sum(-1)
        if self.greedy or self.drawn == "gumbel":
            token = likeliest(scores if self.greedy else self._race(scores, rows), width)
        else:
            keys = [self._keys(rows[places], Purpose.DRAFT, numbers) for places, numbers in ranks]
            uploaded = upload_keys(self.batch.draws, scores.device, *keys)
            keyed = [(places, of_rank) for (places, _), of_rank in zip(ranks, uploaded, strict=True)]
            token = sample_siblings(self.batch.draws, self.drawn, scores, ask.get("support"), keyed)
        ask["token"] = token
        if self.scored or self.path is not None or states:
            ask["probability"] = (scores if self.scored or probs is None else probs).gather(-1, token)
        host = dict(zip(ask, self.batch.read(*ask.values()), strict=True))
        if self.scored and self.greedy:  # the largest first, so that those without mass are the last
            host["support"] = (host["probability"] > 0).sum(-1)
        return host

    @property
    def _ranks_logits(self) -> bool:
        """Whether tokens are ranked as their logits are."""
        return self.greedy and self.histories is None

    @property
    def _keeps_logits(self) -> bool:
        """Whether nobody needs probabilities either."""
        return self._ranks_logits and not self.scored

    def _race(self, q: Tensor, rows: np.ndarray) -> Tensor:  # [n, V]
        """Log q + g, with standard Gumbel noise g, drawn for each parent; tokens without mass come last."""
        keys = self._keys(rows, Purpose.RACE, self.shape.places[rows])
        noise = upload(q.device, self.batch.draws.race(q.shape[-1], keys))[0]
        self.noise.append(noise)
        return q.double().log() + noise

    def _keys(self, rows: np.ndarray, purpose: Purpose, numbers: np.ndarray) -> list[Key]:
        """Return the keys of what is drawn at ``rows``: numbers within a row's own tree, whatever the batch holds."""
        keys = [sequence.key for sequence in self.batch.sequences]
        roots: list[int] = self.shape.root[rows].tolist()
        return [Key(*keys[root], purpose, number) for root, number in zip(roots, numbers.tolist(), strict=True)]

    def draft(self, roots: Computed) -> Draft:
        """Return what was drawn as a draft.

        Args:
            roots: as in ``grow``.
        """
        shape, token, q_row, greedy_q = self.shape, self.token, self.q_row, self.greedy_q
        measured = None
        if self.batch.measure is not None:
            measured = np.full(shape.rows, np.nan)
            for rows, values in self.measured:
                measured[rows] = values
        if not self.live.all():
            shape, kept = shape.keep(self.live)
            both = np.concatenate([np.arange(shape.roots), shape.roots + kept])
            token, q_row = token[kept], q_row if self.drawn == "deterministic" else q_row[both]
            measured = None if measured is None else measured[both]
            greedy_q = None if greedy_q is None else greedy_q[kept]
        self.kept = token
        tokens, *stated = upload(self.batch.device, token, *([] if greedy_q is None else [greedy_q]))
        more: dict[str, Any] = {"broken": self.broken, "measured": measured, "greedy_q": stated[0] if stated else None}
        if self.drawn == "deterministic":
            return Draft(shape, tokens, **more)
        like = roots.logits
        nothing = like.new_empty(0, self.batch.target.vocabulary, dtype=probs_dtype(like.dtype))
        if self.one_hot:  # each row has one child at most, of which its q is certain
            q_row[shape.parent] = np.arange(shape.nodes)
            q = one_hot_(tokens, nothing.new_empty(shape.nodes, nothing.shape[1]))
            return Draft(shape, tokens, self.drawn, q, q_row, one_hot=True, **more)
        q = torch.cat(self.q) if self.q else nothing
        noise = None if self.drawn != "gumbel" else torch.cat(self.noise) if self.noise else nothing.double()
        return Draft(shape, tokens, self.drawn, q, q_row, noise, **more)


def likeliest_on_host(
    x: np.ndarray,
    width: int,
    allowed: np.ndarray | None = None,
    stops: Callable[[np.ndarray], np.ndarray] | None = None,
    scored: bool = False,
) -> dict[str, np.ndarray]:
    """Draw the likeliest tokens in few functions of NumPy (``runner.Output``).

    Args:
        x: ``[n, V]`` logits, float32 or float64; not written to.
        width: how many tokens of each row.
        allowed: ``[n, V]`` what a constraint allows; None for everything.
        stops: tells from the logits of what is allowed, ``[n, V]``, at which rows drafting stops; None: at none.
        scored: whether the tokens' probabilities are needed.

    Returns:
        ``token`` ``[n, width]``, the likeliest first. ``without`` ``[n]``, rows without a distribution, if there are
        any. With ``allowed``: ``possible`` ``[n]``, rows with an allowed token that has a probability, and ``support``
        ``[n]``, how many each has. With ``stops``: ``stopped`` ``[n]``. With ``scored``: ``probability``
        ``[n, width]`` of each token, among what is allowed.
    """
    host: dict[str, np.ndarray] = {}
    rows, best = np.arange(len(x)), x.argmax(-1)
    top = x[rows, best]
    if not all(map(math.isfinite, top.tolist())):  # NaN is larger than all others, and -inf the largest of its own kind
        fine = np.isfinite(top)
        host["without"] = ~fine
        x = np.where(fine[:, None], x, 0)
        best, top = np.where(fine, best, 0), np.where(fine, top, 0)
    if allowed is not None:
        x = np.where(allowed, x, -np.inf)
        best = x.argmax(-1)
        top = x[rows, best]
        host["possible"] = possible = top > -np.inf
        x[~possible, 0] = top[~possible] = 0
        host["support"] = (x > -np.inf).sum(-1)
    if stops is not None:
        host["stopped"] = stops(x)
    host["token"] = best[:, None] if width == 1 else likeliest_of(x, width)
    if scored:
        mass = np.exp(x - top[:, None])
        host["probability"] = mass[rows[:, None], host["token"]] / mass.sum(-1, keepdims=True)
    return host
