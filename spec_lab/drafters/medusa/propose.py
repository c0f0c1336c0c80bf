"""Medusa: heads on the target's hidden state draft a static tree; no draft model is needed.

Source: Medusa (2401.10774). Calibrated trees are chosen for the machine as in Sequoia (2402.12374, section 4.3).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.inference import inference
from spec_lab.core.options import Count, DrafterPath, Filled, Temperature, WrongOption, checked
from spec_lab.core.probabilities import likeliest, probs_dtype
from spec_lab.core.reading import Reading
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape, forest
from spec_lab.core.shape import tree as shape_of
from spec_lab.core.upload import upload
from spec_lab.core.user_cache import default_folder
from spec_lab.decode.proposer import Observation, Proposer, Requires
from spec_lab.decode.sequence import Batch
from spec_lab.drafters.draft_layers import drafted_facts
from spec_lab.drafters.features import Features
from spec_lab.drafters.layer_conventions import Taps, WeightSource
from spec_lab.drafters.medusa.files import read_medusa
from spec_lab.drafters.medusa.network import Heads
from spec_lab.drafters.trimmed import Drafted, chosen_tokens
from spec_lab.models.hub import drafter_folder
from spec_lab.models.target import Target
from spec_lab.propose.accuracy import Accuracy
from spec_lab.propose.calibrate import Calibration, calibrate
from spec_lab.propose.cost_cache import CostCache
from spec_lab.propose.trees import Choices, TreeDepth, TreeNodes, TreeText, depth_of, grow, parse, width_of, write
from spec_lab.runners.runner import DraftRunner

log = logging.getLogger(__name__)


class Medusa(Proposer):
    """Drafts the same tree in each step: the child of rank r at depth d is the r-th likeliest token of head d - 1.

    The heads read the hidden state of the last computed token; heads with a trunk also read the token after it, which
    is the first pending one. With m pending tokens the first m - 1 heads predict pending tokens, so the tree begins
    with head m - 1 and is m - 1 levels shallower. A sequence without computed tokens gets no tree.

    Args:
        heads: at least as many as the tree's depth.
        tree: the tree.
        calibration: how a calibrated tree was chosen; None for other trees.
    """

    name = "medusa"
    drawn: Drawn = "deterministic"
    nodes: int
    branches: bool
    requires: Requires
    sha256: str | None

    def __init__(self, heads: Heads, tree: Choices, calibration: Calibration | None = None) -> None:
        self.heads = heads if len(heads) == depth_of(tree) else heads.first(depth_of(tree))
        self.tree = tree
        self.calibration = calibration
        self.sha256 = heads.sha256
        self.nodes = len(tree)
        self.branches = width_of(tree) > 1
        self.requires = Requires(hidden=heads.taps if tree else (), every_position=not tree)
        self._depth, self._width = depth_of(tree), width_of(tree)
        self._cut = [shape_of(tuple(path for path in tree if len(path) <= depth)) for depth in range(self._depth + 1)]
        self._plan = lru_cache(maxsize=256)(self._make_plan)

    @staticmethod
    @checked
    def load(
        target: Target,
        path: Annotated[str, DrafterPath("Medusa heads", ("hidden_size",), ("vocab_size",))],
        revision: Filled | None = None,
        tree: TreeText = "calibrated",
        batch_size: Count = 1,
        temperature: Temperature | None = 0.0,
        max_nodes: TreeNodes = 64,
        max_depth: TreeDepth | None = None,
        recalibrate: bool = False,
        cache: Filled | None = None,
        tokens: Drafted | None = None,
        taps: Taps | None = None,
        lm_head: WeightSource | None = None,
    ) -> Medusa:
        """Read heads and choose the tree.

        Args:
            target: whose hidden states the heads read.
            path: folder or hub name of heads: this package's, those of Medusa's authors, or vLLM's.
            revision: branch, tag or commit of a hub name; None: main.
            tree: calibrated: fastest on this machine; likeliest; none; paths of child ranks; widths (3x2x1); or a
                published tree's name: vicuna_7b_stage1. Calibrated: the tree with the most expected tokens per second,
                given the accuracies in the folder's calibration and the step costs measured on this machine; or
                "likeliest": the ``max_nodes`` nodes with the highest acceptance probability by those accuracies. Costs
                are measured once (some seconds) and cached, so that the same command chooses the same tree. If no tree
                is faster than decoding without a draft, nothing is drafted and a warning is logged. Published heads
                have no calibration: these two are refused until one is measured (``accuracy.measure``), since no other
                tree is what they name.
            batch_size: sequences decoded together, for the calibration.
            temperature: the target's, for the calibration.
            max_nodes: maximum nodes of a calibrated tree; nodes of the likeliest.
            max_depth: maximum depth of a calibrated or likeliest tree; None: the number of heads.
            recalibrate: measure the cost of steps again, even if it is cached and younger than 30 days.
            cache: folder of measured costs; None: $SPEC_LAB_CACHE, else the user's cache folder. That is
                ``$XDG_CACHE_HOME/spec_lab``, else ``~/.cache/spec_lab``.
            tokens: that are drafted: FILE, FILE:N (the N most frequent of a file) or N (the lowest numbers), and the
                target's stop tokens; None: all.
            taps: the number of the hidden state that published heads read: -1 after the final norm, L (of L layers)
                before it; None: -1.
            lm_head: of published heads: own or the target's; None: own.

        Raises:
            ValueError: the heads do not fit the target, the tree is deeper than the heads or wider than the vocabulary,
                or an option or file is malformed.
            OSError: a file is missing.
        """
        path = drafter_folder(path, revision)
        heads = read_medusa(path, target, {"taps": taps, "lm_head": lm_head})
        heads = heads if tokens is None else heads.trimmed(chosen_tokens(tokens, target), target)
        depth = len(heads) if max_depth is None else min(max_depth, len(heads))
        most = heads.tokens or target.vocabulary
        if tree in ("calibrated", "likeliest"):
            accuracy = Accuracy.read(path, temperature or 0.0)
            accuracy = replace(accuracy, accuracy=[ranks[:most] for ranks in accuracy.accuracy])
        if tree == "likeliest":
            ranks = min(map(len, accuracy.accuracy))
            grown = grow(accuracy.value, max_nodes, min(depth, len(accuracy.accuracy)), ranks)
            return Medusa(heads, parse([node for node, _ in grown]))
        if tree == "calibrated":
            first = lru_cache(heads.first)  # trees of one depth share their heads' memory
            calibrated = calibrate(
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
            if not calibrated.choices:
                log.warning(
                    "no Medusa tree is faster than decoding without a draft at batch size %d on this machine: nothing "
                    "will be drafted", batch_size,
                )  # fmt: skip
            return Medusa(heads, calibrated.choices, calibrated)
        choices = () if tree == "none" else parse(tree)
        if depth_of(choices) > len(heads):
            raise WrongOption(
                f"tree has depth {depth_of(choices)}, but there are only {len(heads)} Medusa heads at {path}: "
                "choose a shallower tree"
            )
        if width_of(choices) > most:
            raise WrongOption(
                f"tree has up to {width_of(choices)} children below a node, but the vocabulary of the heads "
                f"only has {most} tokens: choose a narrower tree"
            )
        return Medusa(heads, choices)

    def toy(self, target: Target, draft: DraftRunner, tree: Choices) -> Medusa:
        """Return the same proposer with random heads of the target's size and another tree."""
        lm_heads = self.heads.own_lm_heads
        heads = Heads.random(target, depth_of(tree), self.heads.trunk is not None, own_lm_heads=lm_heads is not None)
        if lm_heads is not None and lm_heads.tokens is not None:  # a toy that lacks its last token
            heads = heads.trimmed(torch.arange(target.vocabulary - 1), target)
        return Medusa(heads, tree)

    @property
    def facts(self) -> dict[str, Any]:
        """The tree and how it was chosen, for the manifest."""
        chosen = {} if self.calibration is None else self.calibration.facts
        lm_heads = self.heads.own_lm_heads
        drafted = (
            {}
            if lm_heads is None or lm_heads.tokens is None
            else drafted_facts(len(lm_heads.tokens), lm_heads.vocabulary)
        )
        facts = {"tree": write(self.tree) or "none", "nodes": self.nodes, "heads": len(self.heads), **drafted}
        return facts | chosen | {"reading": self.reading.facts}

    @property
    def reading(self) -> Reading:
        """See ``Proposer``."""
        return self.heads.reading

    def init(self, request: Request) -> Features:
        """Return an empty store of hidden states."""
        return Features()

    def observe(self, observed: Sequence[Observation]) -> None:
        """Store the hidden states of all computed positions: after a rewind an earlier one is the last."""
        for observation in observed:
            if observation.hidden is not None:
                state: Features = observation.sequence.state
                state.add(observation.start, observation.hidden)

    def rewind(self, state: Features, length: int) -> None:
        """Drop the hidden states from position ``length`` on."""
        state.rewind(length)

    def fork(self, state: Features) -> Features:
        """Return a copy that shares the hidden states; they are never written to."""
        return state.copy()

    @inference
    def propose(self, batch: Batch) -> Draft:
        """Draft the tree below every sequence with computed tokens."""
        lm, computed = batch.target.lm, [len(sequence.kv) for sequence in batch.sequences]
        last = [sequence.state.last(length) for sequence, length in zip(batch.sequences, computed, strict=True)]
        gaps = tuple(
            self._depth if hidden is None else len(sequence.tokens) - length - 1
            for sequence, length, hidden in zip(batch.sequences, computed, last, strict=True)
        )
        shape, active, index = self._plan(gaps)
        if not active:
            return Draft(shape, torch.empty(0, dtype=torch.long, device=lm.device))
        states = [hidden for tree in active if (hidden := last[tree]) is not None]
        hidden = states[0] if len(states) == 1 else torch.cat(states)
        following = np.array([batch.sequences[tree].tokens[computed[tree]] for tree in active])
        (pending,) = upload(lm.device, following)
        with batch.clock.phase("propose_forward"):
            logits = self.heads(hidden, pending).flatten(0, 1)  # [B * K, V]
        tokens = likeliest(logits, self._width)
        arrays = [tokens.view(-1)]
        if batch.recorded:
            arrays.append(logits.to(probs_dtype(logits.dtype)).softmax(-1).gather(-1, tokens).view(-1))
        token, *stated = arrays if index is None else [array.index_select(0, index) for array in arrays]
        return Draft(shape, token, greedy_q=stated[0] if stated else None)

    def _make_plan(self, gaps: tuple[int, ...]) -> tuple[Shape, list[int], Tensor | None]:
        """Plan a step whose tree b begins with head ``gaps[b]``.

        Returns:
            The forest; the trees with nodes; and for each node the index ``[M]`` of its token in the flattened
            ``[active, K, width]`` likeliest tokens, None where these are the nodes' tokens in order.
        """
        shapes = [self._cut[max(0, self._depth - gap)] for gap in gaps]
        active = [tree for tree, cut in enumerate(shapes) if cut.nodes]
        index = [np.empty(0, dtype=np.int64)]
        for number, tree in enumerate(active):
            cut = shapes[tree]
            which = number * self._depth + cut.depth[1:] - 1 + gaps[tree]
            index.append(which * self._width + cut.rank)
        every, shape = np.concatenate(index), forest(tuple(shapes))
        if np.array_equal(every, np.arange(len(active) * self._depth * self._width)):
            return shape, active, None
        return shape, active, upload(self.heads.weight.device, every)[0]
