"""Medusa: heads on the target's hidden state draft a static tree, without a draft model.

Source: Medusa (2401.10774); trees chosen for the machine as in Sequoia (2402.12374, section 4.3).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn, Shape, forest
from spec_lab.core.draft import tree as shape_of
from spec_lab.core.options import temperature_or_none, whole
from spec_lab.core.probabilities import likeliest
from spec_lab.engine.causal_lm import CausalLM
from spec_lab.engine.proposer import Lifecycle, Observation, Requires
from spec_lab.engine.request import Request
from spec_lab.engine.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.propose.accuracy import Accuracy
from spec_lab.propose.calibrate import Calibration, calibrate
from spec_lab.propose.cost_cache import CostCache, default_folder
from spec_lab.propose.features import Features
from spec_lab.propose.heads import Heads
from spec_lab.propose.trees import MOST_DEPTH, MOST_NODES, Choices, depth_of, grow, parse, width_of, write

log = logging.getLogger(__name__)


class Medusa(Lifecycle):
    """Drafts the same tree each round: the child of rank r at depth d is head d's r-th likeliest token (heads from 0).

    The heads read the hidden state of the last computed token, from which the target chose the first pending token, and
    heads with a trunk read that token as well. Of m pending tokens m - 1 are beyond, so the tree begins with head m - 1
    and loses m - 1 levels. A sequence of which nothing is computed gets no tree.

    Args:
        heads: at least as many as the tree is deep.
        tree: the tree.
        calibration: how the tree was chosen; None for a named tree.
    """

    name = "medusa"
    drawn: Drawn = "point"

    def __init__(self, heads: Heads, tree: Choices, calibration: Calibration | None = None) -> None:
        self.heads = heads if len(heads) == depth_of(tree) else heads.first(depth_of(tree))
        self.tree = tree
        self.calibration = calibration
        self.sha256 = heads.sha256
        self.nodes = len(tree)
        self.branches = width_of(tree) > 1
        self.requires = Requires(hidden=(-1,) if tree else ())
        self._depth, self._width = depth_of(tree), width_of(tree)
        self._cut = [shape_of(tuple(path for path in tree if len(path) <= depth)) for depth in range(self._depth + 1)]
        self._plan = lru_cache(maxsize=256)(self._make_plan)

    @staticmethod
    def load(
        target: Target,
        path: str,
        tree: str = "calibrated",
        batch_size: int = 1,
        temperature: float = 0.0,
        max_nodes: int = 64,
        max_depth: int | None = None,
        recalibrate: bool = False,
        cache: str | None = None,
    ) -> Medusa:
        """Read heads, and choose the tree.

        Args:
            target: whose hidden states the heads read.
            path: folder of the heads.
            tree: as ``trees.parse`` reads it (at most 1024 nodes, 256 deep), "none" to draft nothing, or "calibrated":
                the most expected tokens per second for the accuracies in the folder's calibration and the measured
                cost of steps on this machine. Costs are measured once (some seconds) and kept in a cache, so that the
                same command chooses the same tree. Where no tree beats decoding without a draft, nothing is drafted,
                with a warning. Or "likeliest": the ``max_nodes`` nodes that are likeliest to be accepted by those
                accuracies.
            batch_size: sequences decoded together, for which the tree is calibrated.
            temperature: of the target; the calibration measured nearest to it is taken.
            max_nodes: largest calibrated tree; nodes of the likeliest. From 1 to 1024.
            max_depth: of the deepest calibrated or likeliest tree, from 1 to 256; None, or more than there are heads:
                as deep as there are heads.
            recalibrate: measure the costs of steps even if the cache has them, and replace them there. Costs older
                than 30 days are measured again in any case.
            cache: folder of the measured costs; None: ``$SPEC_LAB_CACHE``, else ``$XDG_CACHE_HOME/spec_lab``, else
                ``~/.cache/spec_lab``.

        Raises:
            ValueError: heads that do not fit the target; a tree deeper than the heads or wider than the vocabulary;
                a malformed option or file.
            OSError: files are missing.
        """
        whole("proposer.batch_size", batch_size)
        whole("proposer.max_nodes", max_nodes, most=MOST_NODES)
        if max_depth is not None:
            whole("proposer.max_depth", max_depth, 1, ", or null for as deep as there are heads", most=MOST_DEPTH)
        if not isinstance(recalibrate, bool):
            raise ValueError(f"proposer.recalibrate must be true or false, not {recalibrate!r}")
        if cache is not None and (not isinstance(cache, str) or not cache):
            raise ValueError(f"proposer.cache must be null or name a folder, not {cache!r}")
        heads = Heads.read(path, target)
        depth = len(heads) if max_depth is None else min(max_depth, len(heads))
        if tree in ("calibrated", "likeliest"):
            accuracy = Accuracy.read(path, temperature_or_none("proposer.temperature", temperature) or 0.0)
        if tree == "likeliest":
            ranks = min(target.vocabulary, *map(len, accuracy.accuracy))
            grown = grow(accuracy.value, max_nodes, min(depth, len(accuracy.accuracy)), ranks)
            return Medusa(heads, parse([node for node, _ in grown]))
        if tree == "calibrated":
            first = lru_cache(heads.first)  # trees of one depth share their heads' memory
            found = calibrate(
                target,
                lambda choices: Medusa(first(depth_of(choices)), choices),
                depth,
                accuracy,
                batch_size,
                max_nodes,
                cache=CostCache(default_folder() if cache is None else Path(cache)),
                drafter=heads.sha256,
                again=recalibrate,
            )
            if not found.choices:
                log.warning("no Medusa tree pays at batch size %d on this machine: nothing will be drafted", batch_size)
            return Medusa(heads, found.choices, found)
        choices = () if tree == "none" else parse(tree)
        if depth_of(choices) > len(heads):
            raise ValueError(f"the tree is {depth_of(choices)} deep, the Medusa heads at {path} are only {len(heads)}")
        if width_of(choices) > target.vocabulary:
            raise ValueError(f"a tree {width_of(choices)} wide does not fit a vocabulary of {target.vocabulary} tokens")
        return Medusa(heads, choices)

    def toy(self, target: Target, draft: CausalLM, tree: Choices) -> Medusa:
        """The same proposer with random heads of the target's size and another tree. See ``Proposer``."""
        return Medusa(Heads.random(target, depth_of(tree), self.heads.trunk is not None), tree)

    @property
    def facts(self) -> dict[str, Any]:
        """What a record should keep: the tree, and how it was chosen."""
        chosen = {} if self.calibration is None else self.calibration.facts
        return {"tree": write(self.tree) or "none", "nodes": self.nodes, "heads": len(self.heads), **chosen}

    def init(self, request: Request) -> Features:
        """No hidden states yet."""
        return Features()

    def observe(self, observed: Sequence[Observation]) -> None:
        """Keep the hidden states of all computed positions: after a rewind an earlier one is the last."""
        for one in observed:
            if one.hidden is not None:
                state: Features = one.sequence.state
                state.add(one.start, one.hidden)

    def rewind(self, state: Features, length: int) -> None:
        """Forget the states from ``length`` on."""
        state.rewind(length)

    def fork(self, state: Features) -> Features:
        """The same states; they are never written to."""
        return state.copy()

    @torch.inference_mode()
    def propose(self, batch: Batch) -> Draft:
        """The tree below every sequence of which something is computed."""
        lm, computed = batch.target.lm, [len(sequence.kv) for sequence in batch.sequences]
        last = [one.state.last(length) for one, length in zip(batch.sequences, computed, strict=True)]
        gaps = tuple(
            self._depth if hidden is None else len(one.tokens) - length - 1
            for one, length, hidden in zip(batch.sequences, computed, last, strict=True)
        )
        shape, active, index = self._plan(gaps)
        if not active:
            return Draft(shape, torch.empty(0, dtype=torch.long, device=lm.device))
        states = [hidden for tree in active if (hidden := last[tree]) is not None]
        hidden = states[0][None] if len(states) == 1 else torch.stack(states)
        pending = torch.tensor([batch.sequences[tree].tokens[computed[tree]] for tree in active], device=lm.device)
        with batch.clock.phase("propose_forward"):
            logits = self.heads(hidden, pending)  # [B, K, V]
        tokens = likeliest(logits.flatten(0, 1), self._width)
        return Draft(shape, tokens.view(-1).index_select(0, index))

    def _make_plan(self, gaps: tuple[int, ...]) -> tuple[Shape, list[int], Tensor]:
        """For trees that begin with head ``gaps[b]``: the forest, which have nodes, and where each token is found.

        The index ``[M]`` points into the flattened ``[active, K, width]`` likeliest tokens.
        """
        shapes = [self._cut[max(0, self._depth - gap)] for gap in gaps]
        active = [head for head, one in enumerate(shapes) if one.nodes]
        index = [np.empty(0, dtype=np.int64)]
        for place, head in enumerate(active):
            one = shapes[head]
            which = place * self._depth + one.depth[1:] - 1 + gaps[head]
            index.append(which * self._width + one.rank)
        return forest(tuple(shapes)), active, torch.from_numpy(np.concatenate(index)).to(self.heads.weight.device)
