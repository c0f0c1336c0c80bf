"""Texts to train on: the target answers prompts, and its hidden states are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn, empty
from spec_lab.core.randomness import CounterDraws
from spec_lab.engine.engine import fixed_group
from spec_lab.engine.proposer import Lifecycle, Observation, Requires
from spec_lab.engine.request import Request
from spec_lab.engine.sequence import Batch, SequenceState
from spec_lab.models.target import Target
from spec_lab.train.texts import Texts
from spec_lab.verify import Match


class StateRecorder(Lifecycle):
    """Drafts nothing, and keeps the hidden states of every computed position.

    Args:
        states: their numbers.
    """

    name = "recorder"
    drawn: Drawn = "point"
    nodes = 0
    branches = False

    def __init__(self, states: tuple[int, ...]) -> None:
        self.requires = Requires(hidden=states)
        self.kept: dict[int, list[Tensor]] = {}

    def propose(self, batch: Batch) -> Draft:
        """No nodes."""
        return empty(len(batch.sequences), batch.device)

    def observe(self, observed: Sequence[Observation]) -> None:
        """Keep what was computed, in bfloat16 on the host."""
        for one in observed:
            if one.hidden is not None:
                self.kept.setdefault(one.sequence.request.id, []).append(one.hidden.to("cpu", torch.bfloat16))


def record(
    target: Target,
    requests: Sequence[Request],
    states: tuple[int, ...],
    folder: Path,
    rows: int,
    batch: int,
    seed: int,
    tick: Callable[[int], Any] = lambda done: None,
) -> list[Path]:
    """Let the target answer requests, and write files of ``rows`` texts each; files that exist are kept.

    Args:
        target: answers them, as each request samples.
        requests: as many as fill files; a rest that fills none is left out.
        states: numbers of the hidden states to keep.
        folder: of the files.
        rows: texts of a file.
        batch: requests answered together.
        seed: of all random choices.
        tick: called with the number of texts of each file that is there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(len(requests) // rows):
        path = folder / f"part-{number:05d}.safetensors"
        paths.append(path)
        if not path.exists():
            _record(target, requests[number * rows : (number + 1) * rows], states, batch, seed).write(path)
        tick(rows)
    return paths


def _record(target: Target, requests: Sequence[Request], states: tuple[int, ...], batch: int, seed: int) -> Texts:
    recorder, sequences = StateRecorder(states), list[SequenceState]()
    for start in range(0, len(requests), batch):
        group = fixed_group(target, recorder, Match(), requests[start : start + batch], CounterDraws(seed))
        for _ in group:
            pass
        sequences += group.sequences
    ended = sorted(sequences, key=lambda one: one.request.id)
    length = torch.tensor([len(one.tokens) for one in ended])
    first = torch.tensor([len(one.request.tokens) for one in ended])
    width = len(states) * target.services.hidden_size
    ids = torch.zeros(len(ended), int(length.max()), dtype=torch.long)
    hidden = torch.zeros(*ids.shape, width, dtype=torch.bfloat16)
    for row, one in enumerate(ended):
        ids[row, : len(one.tokens)] = torch.tensor(one.tokens)
        kept = torch.cat(recorder.kept[one.request.id])  # the last token is not computed
        hidden[row, : len(kept)] = kept
    return Texts(ids, first, length, hidden)
