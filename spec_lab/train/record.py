"""Texts to train on: the target answers prompts, and its hidden states are kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn, empty
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.decode.proposer import Observation, Proposer, Requires
from spec_lab.decode.sequence import Batch, SequenceState
from spec_lab.models.target import Target
from spec_lab.train.texts import Texts
from spec_lab.verify import Match

log = logging.getLogger(__name__)


class StateRecorder(Proposer):
    """Drafts nothing, and keeps the hidden states of every computed position.

    Args:
        states: their numbers.
    """

    name = "recorder"
    drawn: Drawn = "point"
    nodes = 0
    branches = False
    requires: Requires

    def __init__(self, states: tuple[int, ...]) -> None:
        self.requires = Requires(hidden=states)
        self.kept: dict[int, list[Tensor]] = {}

    def propose(self, batch: Batch) -> Draft:
        """No nodes."""
        return empty(len(batch.sequences), batch.device)

    def observe(self, observed: Sequence[Observation]) -> None:
        """Keep what was computed, in bfloat16 on the host."""
        for observation in observed:
            if observation.hidden is not None:
                kept = self.kept.setdefault(observation.sequence.request.id, [])
                kept.append(observation.hidden.to("cpu", torch.bfloat16))


def record(
    target: Target,
    requests: Sequence[Request],
    states: tuple[int, ...],
    folder: Path,
    rows: int,
    batch: int,
    seed: int,
    pieces: Sequence[bytes] | None = None,
    rest: bool = False,
    tick: Callable[[int], Any] = lambda done: None,
) -> list[Path]:
    """Let the target answer requests, and write files of ``rows`` texts each; files that exist are kept.

    Args:
        target: answers them, as each request samples.
        requests: prompts.
        states: numbers of the hidden states to keep.
        folder: of the files.
        rows: texts of a file.
        batch: requests answered together.
        seed: of all random choices.
        pieces: the bytes of each token; needed for stop strings.
        rest: whether the last requests, which do not fill a file, get a smaller one. Otherwise they are not answered.
        tick: called with the number of texts of each file that is there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths, more = [], len(requests) % rows
    if more and not rest:
        log.warning("The last %d of %d requests are not answered: a file has %d texts", more, len(requests), rows)
        requests = requests[:-more]
    for start in range(0, len(requests), rows):
        path, answered = folder / f"part-{start // rows:05d}.safetensors", requests[start : start + rows]
        paths.append(path)
        if not path.exists():
            _record(target, answered, states, batch, seed, pieces).write(path)
        tick(len(answered))
    return paths


def _record(
    target: Target,
    requests: Sequence[Request],
    states: tuple[int, ...],
    batch: int,
    seed: int,
    pieces: Sequence[bytes] | None,
) -> Texts:
    recorder, sequences = StateRecorder(states), list[SequenceState]()
    for start in range(0, len(requests), batch):
        answered = requests[start : start + batch]
        group = fixed_group(Arm(target, recorder, Match(), CounterDraws(seed), pieces=pieces), answered)
        for _ in group:
            pass
        sequences += group.sequences
    ended = sorted(sequences, key=lambda sequence: sequence.request.id)
    length = torch.tensor([len(sequence.tokens) for sequence in ended])
    first = torch.tensor([len(sequence.request.tokens) for sequence in ended])
    width = len(states) * target.services.hidden_size
    ids = torch.zeros(len(ended), int(length.max()), dtype=torch.long)
    hidden = torch.zeros(*ids.shape, width, dtype=torch.bfloat16)
    for row, sequence in enumerate(ended):
        ids[row, : len(sequence.tokens)] = torch.tensor(sequence.tokens)
        kept = torch.cat(recorder.kept[sequence.request.id])  # the last token is not computed
        hidden[row, : len(kept)] = kept
    return Texts(ids, first, length, hidden)
