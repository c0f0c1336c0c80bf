"""Records of one step: a row of the table ``forwards``, and for each sequence a row of the table ``steps``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spec_lab.core.clock import Clock, Mark, Span
from spec_lab.core.draft import WAYS, Draft
from spec_lab.decode.commit import Committed
from spec_lab.decode.expert_counts import ExpertCounts
from spec_lab.decode.recording import Distributions, Recorded, pack_ids
from spec_lab.decode.sequence import SequenceState

CAPTURE = "capture"
"""The phase of capturing forwards of fixed shape (``runners.graphs``), within a call of a model."""
PHASES = ("propose", "mask", "target", "wait", "probabilities", "verify", "commit")
"""Phases of a step's time, in order: masks are computed before the target's forward, or waited for after it.
"""

EXPERT_COLUMNS = ("experts", "experts_accepted", "experts_rejected")
"""The optional columns of ``forwards`` that ``Recording.experts`` adds: the fields of ``ExpertCounts``."""

Chunk = tuple[SequenceState, int]
"""A sequence whose prompt is computed in parts, and how many of its pending tokens this step computes."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StepInfo:
    """Record of one step: a row of the table ``forwards``, and for each sequence a row of the table ``steps``.

    Args:
        sequences: ``[B]`` those that were decoded, each with a draft tree.
        draft: what was drafted.
        codes: how each node was drawn, where ``slim`` has removed it from the draft.
        committed: ``[B]`` what was committed to each sequence.
        context: ``[B]`` tokens of each sequence when the step began; ``pending``: of them, those not computed.
        prefill: ``[B]`` whether the step computed the rest of the sequence's prompt, or of what a preemption had freed.
        expected: ``[B]`` expected accepted tokens, exact, forced ones left out.
        expected_emitted: ``[B]`` expected emitted tokens, likewise; forced ones that are appended later left out.
        given: what the expectation is conditional on: the "draft", or its "noise" as well.
        empty: ``[B]`` whether rounding left nothing of the residual distribution.
        attended: cells attended to in a layer with full attention, summed over the sequences.
        chunks: sequences that only computed a part of their prompt, and how many tokens.
        errors: error messages, by sequence.
        clock: of the target's runner; reads the marks.
        began, ended: when the step began and ended, as marks of the clock.
        spans: the phases, each from the end of the one before it, and the module calls of target and proposer.
        mask_busy: seconds spent on masks, wherever they ran; ``draft_masks``: of them, seconds inside propose.
        copies_before, copies_after: copies from the device to the host, before and after the target's forward.
        uploads: copies from the host to the device; none on the CPU.
        recorded: drafted and emitted tokens with their probabilities, where ``Arm.record`` asks for them.
        distributions: of the trees that ``Arm.record`` chooses; None of none.
        experts: that the forward read, where ``Arm.record`` asks for them and the runner counts them; else None.
    """

    sequences: list[SequenceState]
    draft: Draft
    committed: list[Committed]
    context: list[int]
    pending: list[int]
    prefill: list[bool]
    expected: np.ndarray
    expected_emitted: np.ndarray
    given: str
    empty: np.ndarray
    attended: int
    chunks: list[Chunk]
    errors: dict[SequenceState, str]
    clock: Clock
    began: Mark
    ended: Mark
    spans: list[Span]
    mask_busy: float = 0.0
    draft_masks: float = 0.0
    copies_before: int = 0
    copies_after: int = 0
    uploads: int = 0
    recorded: Recorded | None = None
    distributions: Distributions | None = None
    experts: ExpertCounts | None = None
    codes: np.ndarray | None = None

    def slim(self) -> StepInfo:
        """The step without its draft distributions, which take V numbers for every node."""
        if self.draft.q is None and self.draft.predict is None:
            return self
        draft = self.draft
        slim = Draft(draft.shape, draft.token, computed_only=draft.computed_only, limits=draft.limits)
        return replace(self, draft=slim, codes=draft.codes)

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase, of the module calls inside propose and target, of masks, and of the whole step.

        A phase lasts from the end of the one before it, so that the phases add up to the whole step. What captured
        forwards took is counted as "capture" alone, since they are captured once and replayed from then on. On a GPU,
        call it only after ``clock.synchronise``.
        """
        seconds = dict.fromkeys((*PHASES, "target_forward", "propose_forward", CAPTURE), 0.0)
        before, in_call, in_phase = self.began, 0.0, 0.0  # captures since the last call and phase, which contain them
        for name, start, end in self.spans:
            if name == CAPTURE:
                spent = self.clock.seconds(start, end)
                in_call, in_phase = in_call + spent, in_phase + spent
                seconds[name] += spent
            elif name in PHASES:
                seconds[name] += self.clock.seconds(before, end) - in_phase
                before, in_call, in_phase = end, 0.0, 0.0
            else:
                seconds[name] += self.clock.seconds(start, end) - in_call
                in_call = 0.0
        seconds["commit"] += self.clock.seconds(before, self.ended)
        seconds["propose"] -= self.draft_masks
        seconds["mask_busy"] = self.mask_busy
        seconds["mask_wait"] = self.draft_masks + seconds.pop("mask") + seconds.pop("wait")
        seconds["whole"] = self.clock.seconds(self.began, self.ended) - seconds[CAPTURE]
        return seconds

    def row(self) -> dict[str, Any]:
        """Columns of ``forwards``."""
        counts = self.experts
        experts = {} if counts is None else dict(zip(EXPERT_COLUMNS, counts, strict=True))
        return {
            "prefill": all(self.prefill),
            "live": len(self.sequences),
            "nodes": self.draft.shape.nodes,
            "cells": self.attended,
            "computed_only": int(self.draft.computed_only_nodes.sum()),
            "prefill_chunks": len(self.chunks),
            "copies_before": self.copies_before,
            "copies_after": self.copies_after,
            "uploads": self.uploads,
            "captures": sum(name == CAPTURE for name, _, _ in self.spans),
            **experts,
            **self.seconds(),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Columns of ``steps``, for each sequence."""
        shape, rows, extra = self.draft.shape, [], self.draft.computed_only_nodes
        for tree, (sequence, got) in enumerate(zip(self.sequences, self.committed, strict=True)):
            nodes, stop = shape.trees[tree], got.path[-1] if got.path else tree
            broken = sequence in self.errors and not got.tokens
            rows.append(
                {
                    "request": sequence.request.id,
                    "prefill": self.prefill[tree],
                    "pending": self.pending[tree],
                    "forced": got.forced,
                    "nodes": len(nodes) - 1,
                    "computed_only": int(extra[tree]),
                    "legal": got.legal,
                    "depth": int(shape.depth[nodes].max()),
                    "path": list(shape.ranks(stop)),
                    "stop_had_children": len(shape.children[stop]) > 0,
                    "accepted": len(got.path),
                    "emitted": got.count(),
                    "accepted_kept": got.count(accepted=True, kept=True),
                    "emitted_kept": got.count(kept=True),
                    "forced_accepted": got.count(accepted=True, forced=True),
                    "forced_accepted_kept": got.count(accepted=True, forced=True, kept=True),
                    "forced_emitted": got.count(forced=True),
                    "forced_emitted_kept": got.count(forced=True, kept=True),
                    "taken_back": got.removed,
                    "forks": len(got.forks),
                    "expected_accepted": float(self.expected[tree]),
                    "expected_emitted": float(self.expected_emitted[tree]),
                    "expected_kind": "" if broken else "exact" if self.given == "draft" else self.given,
                    "empty_residual": bool(self.empty[tree]),
                    "finish": "",
                    "context": self.context[tree],
                }
            )
            if self.draft.limits:
                rows[-1] |= {"policy": self.draft.limits[tree].as_json()}
        if self.recorded is None:
            return rows
        return [row | more for row, more in zip(rows, self.recorded.columns(shape, self.committed), strict=True)]

    def replay_rows(self) -> list[list[dict[str, Any]]]:
        """Columns of ``replay``, for each sequence: a list per row of its tree; empty where nothing is recorded."""
        columns: list[list[dict[str, Any]]] = [[] for _ in self.sequences]
        kept, shape = self.distributions, self.draft.shape
        if kept is None:
            return columns
        codes = self.draft.codes if self.codes is None else self.codes
        token = self.draft.token.tolist()
        for index, row in enumerate(kept.rows.tolist()):
            tree, node = int(shape.root[row]), row - shape.roots
            sequence, above = self.sequences[tree], -1 if node < 0 else int(shape.parent[node])
            rest = kept.rest[index].tolist()
            columns[tree].append(
                {
                    "request": sequence.request.id,
                    "position": self.context[tree],
                    "row": int(shape.places[row]) + 1,
                    "parent": -1 if node < 0 else int(shape.places[above]) + 1,
                    "token": kept.roots[tree] if node < 0 else token[node],
                    "way": "root" if node < 0 else WAYS[codes[node]],
                    "features": kept.features[tree],
                    "ids": pack_ids(kept.ids[index]),
                    "p": kept.p[index].astype("<f4").tobytes(),
                    "q": kept.q[index].astype("<f4").tobytes() if kept.expanded[index] else b"",
                    **dict(zip(("p_rest", "q_rest", "p_most", "q_most"), rest, strict=True)),
                }
            )
        return columns
