"""The base class of runners of models in llama.cpp: one context, whose arrays hold the rows of one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from spec_lab.core.clock import Clock, Phase
from spec_lab.core.draft import Draft
from spec_lab.core.roofline import ForwardWork
from spec_lab.runners.llama_context import Context, LlamaSettings, Logits
from spec_lab.runners.llama_library import Model
from spec_lab.runners.runner import Runner


class LlamaRunner(Runner):
    """A GGUF model in llama.cpp.

    Logits that a forward returns are the library's memory: the next forward overwrites them. Cells and ids are
    allocated as they are needed.

    Args:
        work: what a forward reads and computes; None if it is not known.
    """

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, model: Model, settings: LlamaSettings | None = None, work: ForwardWork | None = None) -> None:
        self.model, self.settings, self._work = model, LlamaSettings() if settings is None else settings, work
        self.context = Context(model, self.settings)
        self.clock, self.vocabulary = Clock(self.device), model.vocabulary
        self._ready: object = None  # the forward whose rows are in the context's arrays

    @property
    def work(self) -> ForwardWork | None:
        """See ``runner.Runner``."""
        return self._work

    @property
    def threads(self) -> int:
        """See ``runner.Runner``."""
        return self.settings.threads

    @property
    def facts(self) -> dict[str, Any]:
        """See ``runner.Runner``."""
        return self.context.facts

    def close(self) -> None:
        """Free the KV cache."""
        self.context.close()

    def _require_ready(self, prepared: object) -> None:
        """Refuse a forward that was prepared before another one."""
        if prepared is not self._ready:
            raise RuntimeError("a forward of llama.cpp must be run before the next one is prepared")

    def _compute(
        self, rows: int, outputs: int, timed: Phase | None, cuts: Sequence[int] = ()
    ) -> tuple[Logits, np.ndarray | None, dict[str, np.ndarray]]:
        """``Context.decode`` of the first ``rows`` rows, timed."""
        self.forwards += 1
        with timed or self.clock.phase("target_forward"):
            return self.context.decode(rows, outputs, cuts)

    def _single_ids(
        self, every: Sequence[Any], tokens: Sequence[Sequence[int]], draft: Draft, trees: int, order: Sequence[int] = ()
    ) -> int:
        """Write the rows of a forward in which each sequence has one id into the context's arrays; return how many.

        Host work is a visible share of autoregressive decoding and of chains, so this uses few and small functions.

        Args:
            every: the sequences, of which the first ``trees`` have trees.
            tokens: the pending tokens of each.
            trees: see above.
            order: of the roots and nodes, which come after all other pending tokens; empty: as in the forest.
        """
        token: list[int] = []
        position: list[int] = []
        ids: list[int] = []
        shape, starts = draft.shape, [len(sequence) for sequence in every]
        for number, (sequence, new, start) in enumerate(zip(every, tokens, starts, strict=True)):
            before = len(new) - (number < trees)
            if before:
                token += new[:before]
                position += range(start, start + before)
                ids += [sequence.ids[0]] * before
        first, roots = len(token), [start + len(new) - 1 for start, new in zip(starts[:trees], tokens, strict=False)]
        token += [new[-1] for new in tokens[:trees]]
        position += roots
        ids += [sequence.ids[0] for sequence in every[:trees]]
        if shape.nodes:
            token += on_host(draft).tolist()
            for root, depth in zip(
                shape.root[shape.roots :].tolist(), shape.depth[shape.roots :].tolist(), strict=True
            ):
                position.append(roots[root] + depth)
                ids.append(every[root].ids[0])
        if len(order):
            for numbers in (token, position, ids):
                numbers[first:] = [numbers[first + row] for row in order]
        self.context.single_ids(token, position, ids, shape.rows)
        return len(token)


def on_host(draft: Draft) -> np.ndarray:
    """The tokens of a draft, which are where the runner's logits are."""
    assert draft.array is not None
    return draft.array
