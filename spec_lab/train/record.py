"""Texts to train on: the target answers prompts, and its hidden states along its answers are kept.

Answers are kept between runs, so that a second drafter for a target, or a run that was ended, does not wait for them
again: they are a function of the target's weights, the prompts, the sampling and the seed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn, empty
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import BROKEN, Request
from spec_lab.core.tensors import read_tensors, save_tensors
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.decode.proposer import Observation, Proposer, Requires
from spec_lab.decode.sequence import Batch, SequenceState
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.text.answers import AnsweredText
from spec_lab.train.texts import Texts
from spec_lab.verify import Match

log = logging.getLogger(__name__)

Tick = Callable[[int, bool], Any]

VERSION = 1
"""Part of the names of kept answers; a change of decoding that changes tokens raises it."""


class StateRecorder(Proposer):
    """Drafts nothing, and keeps the hidden states of every computed position.

    Args:
        states: their numbers.
    """

    name = "recorder"
    drawn: Drawn = "deterministic"
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


def answer(
    target: Target,
    requests: Sequence[Request],
    batch: int,
    seed: int,
    pieces: Sequence[bytes] | None = None,
    kept: Path | None = None,
    tick: Tick = lambda done, kept: None,
) -> list[AnsweredText]:
    """Let the target answer requests, as each samples.

    Args:
        batch: requests answered together.
        pieces: the bytes of each token; needed for stop strings.
        kept: a folder of earlier answers, to which new ones are added; None: nothing is kept. It is not used for a
            target without a SHA-256.
        tick: called with the number of requests of each group that is answered, and whether their answers were kept.

    Raises:
        ValueError: an answer broke: logits that are NaN or infinite.
        OSError: kept answers are damaged; names the file.
    """
    texts = list[AnsweredText]()
    for start in range(0, len(requests), batch):
        group = requests[start : start + batch]
        file = None if kept is None or not target.sha256 else kept / f"{_key(target, group, seed)}.safetensors"
        there = file is not None and file.exists()
        if file is None or not there:
            answers = _answered(target, group, seed, pieces)
            if file is not None:
                _keep(answers, file)
        else:
            held, _ = read_tensors(file)
            try:
                answers = [part.tolist() for part in held["tokens"].split(held["lengths"].tolist())]
            except (KeyError, RuntimeError) as error:  # RuntimeError: lengths that do not add up
                raise OSError(f"{file} is damaged ({error}): remove it, so that it is answered again") from error
        for request, tokens in zip(group, answers, strict=True):
            begin, whole = len(request.tokens), (*request.tokens, *tokens)
            texts.append(AnsweredText(request.name, whole, ((begin, len(whole)),)))
        tick(len(group), there)
    return texts


def _keep(answers: Sequence[Sequence[int]], file: Path) -> None:
    """Write the tokens of answers; a folder that cannot be written is a warning, since they are in memory."""
    flat = torch.tensor([token for tokens in answers for token in tokens], dtype=torch.int32)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_tensors({"tokens": flat, "lengths": torch.tensor([*map(len, answers)])}, file)
    except OSError as error:
        log.warning("answers are not kept for other drafters: %s; set SPEC_LAB_CACHE to a folder", error)


def _answered(
    target: Target, group: Sequence[Request], seed: int, pieces: Sequence[bytes] | None
) -> list[Sequence[int]]:
    engine = fixed_group(Arm(target, Null(), Match(), CounterDraws(seed), pieces=pieces), group)
    for _ in engine:
        pass
    sequences = {sequence.request.id: sequence for sequence in engine.sequences}
    for sequence in sequences.values():
        if sequence.finish in BROKEN:
            raise ValueError(engine.errors.get(sequence, f"the answer to '{sequence.request.name}' broke"))
    return [sequences[request.id].emitted for request in group]


def _key(target: Target, group: Sequence[Request], seed: int) -> str:
    """Return the SHA-256 of everything that the answers of a group depend on."""
    lm = target.lm
    computed = [target.sha256, type(lm).__name__, str(lm.dtype), lm.quantization, dict(lm.facts)]
    fields = [asdict(request) | {"stop": sorted(request.stop), "healed": request.healed.hex()} for request in group]
    return sha256(json.dumps([VERSION, seed, computed, fields], sort_keys=True, default=str).encode()).hexdigest()


def record(
    target: Target,
    texts: Sequence[AnsweredText],
    states: tuple[int, ...],
    folder: Path,
    rows: int,
    batch: int,
    rest: bool = False,
    tick: Tick = lambda done, kept: None,
) -> list[Path]:
    """Compute the target's hidden states along texts, and write files of ``rows`` texts each; files there are kept.

    A text that fills the context is cut by its last token, since a prompt leaves room for a token.

    Args:
        texts: with the target's answers. Those whose prompts leave room for no answer are left out.
        states: numbers of the hidden states to keep.
        rows: texts of a file.
        batch: texts computed together.
        rest: whether the last texts, which do not fill a file, get a smaller one. Otherwise they are left out.
        tick: called with the number of texts of each file, and whether it was there before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    given, longest = len(texts), target.context - 1
    fitting = (text if len(text.tokens) <= longest else text.cut(longest, longest) for text in texts)
    texts = [text for text in fitting if text.answers]
    if len(texts) < given:
        log.warning(
            "%d of %d texts are left out: their prompts fill the context of %d tokens", given - len(texts), given,
            target.context,
        )  # fmt: skip
    paths, more = list[Path](), len(texts) % rows
    if more and not rest:
        log.warning("The last %d of %d texts are left out: a file has %d texts", more, len(texts), rows)
        texts = texts[:-more]
    for start in range(0, len(texts), rows):
        path, some = folder / f"part-{start // rows:05d}.safetensors", texts[start : start + rows]
        paths.append(path)
        if not (there := path.exists()):
            _with_states(target, some, states, batch).write(path)
        tick(len(some), there)
    return paths


def _with_states(target: Target, texts: Sequence[AnsweredText], states: tuple[int, ...], batch: int) -> Texts:
    """Return texts with hidden states; each is computed as a prompt whose first new token is not read."""
    recorder, sequences = StateRecorder(states), list[SequenceState]()
    requests = [Request(number, text.name, text.tokens, max_new_tokens=1) for number, text in enumerate(texts)]
    for start in range(0, len(requests), batch):
        group = fixed_group(Arm(target, recorder, Match(), CounterDraws(0)), requests[start : start + batch])
        for _ in group:
            pass
        sequences += group.sequences
    if broken := next((sequence for sequence in sequences if sequence.finish in BROKEN), None):
        raise ValueError(f"the target's logits after the text '{broken.request.name}' are NaN or infinite")
    length = torch.tensor([len(text.tokens) for text in texts])
    first = torch.tensor([text.answers[0][0] for text in texts])
    ids = torch.zeros(len(texts), int(length.max()), dtype=torch.long)
    written = torch.zeros(ids.shape, dtype=torch.bool)
    hidden = torch.zeros(*ids.shape, len(states) * target.services.hidden_size, dtype=torch.bfloat16)
    for row, text in enumerate(texts):
        ids[row, : len(text.tokens)] = torch.tensor(text.tokens)
        hidden[row, : len(text.tokens)] = torch.cat(recorder.kept[row])
        for begin, end in text.answers:
            written[row, begin:end] = True
    whole = all(len(text.answers) == 1 and text.answers[0][1] == len(text.tokens) for text in texts)
    return Texts(ids, first, length, hidden, None if whole else written)
