"""How often Medusa heads are right, measured on the target's own continuations and stored in the heads' folder.

``measure(target, heads, prompts).write(folder)`` measures published heads, and ``of_texts`` those that are trained by
``train``, on answers that were held out; ``Accuracy.read`` runs whenever heads load.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path as File

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn, empty
from spec_lab.core.files import expect, read_json, write_text
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.engine.engine import fixed_group
from spec_lab.engine.proposer import Lifecycle, Observation, Requires
from spec_lab.engine.request import Request
from spec_lab.engine.sequence import Batch
from spec_lab.engine.study import Capture
from spec_lab.models.checkpoint import one_line
from spec_lab.models.target import Target
from spec_lab.propose.heads import Heads
from spec_lab.propose.trees import Ranks, by_rank, write

FILE = "calibration.json"
SHAPE = {"accuracy": [[float]], "?temperature": float, "?samples": int, "?paths": {str: int}}  # of the file
ENOUGH = 200  # samples for a conditional accuracy; below, the marginal one is taken
SAMPLES = 64  # measured at once: their logits [S, K, V] are in memory together
PRIOR = 20.0  # samples that a path's accuracy by rank is worth next to the path's own count


@dataclass(frozen=True)
class Accuracy:
    """How often heads are right, measured on the target's own continuations.

    Args:
        accuracy: ``[K][ranks]``: P(head k's token of rank r is right | all earlier heads held the right token among
            their ranks), where there are enough such samples; else regardless of earlier heads.
        paths: how often a whole path of ranks was right; rare ones may be missing.
        samples: places in the text; 0 when only ``accuracy`` is known.
        temperature: at which the target continued.
    """

    accuracy: list[list[float]]
    paths: dict[Ranks, int]
    samples: int = 0
    temperature: float = 0.0

    def value(self, path: Ranks) -> float:
        """P(the node at ``path`` is right): its counts, shrunk towards its accuracies by rank.

        Heads are not independent: where one is right, the next is more likely to be right too. The counts of whole
        paths include this dependence; shrinkage limits their sampling error on rare paths.
        """
        if not self.samples:
            return by_rank(self.accuracy)(path)
        value, above = 1.0, self.samples
        for depth, rank in enumerate(path):
            count = self.paths.get(path[: depth + 1], 0)
            value *= (count + PRIOR * self.accuracy[depth][rank]) / (above + PRIOR)
            above = count
        return value

    @staticmethod
    def of(ranks: np.ndarray, width: int, temperature: float = 0.0) -> Accuracy:
        """From the rank ``[samples, K]`` that each head gave the right token; only ranks below ``width`` count.

        Raises:
            ValueError: no samples.
        """
        samples, heads = ranks.shape
        if not samples:
            raise ValueError("no samples to measure accuracies on: give longer continuations or more prompts")
        accuracy = []
        held = np.ones(samples, dtype=bool)  # every earlier head had the right token among its ranks
        for head in range(heads):
            known = held if held.sum() >= ENOUGH else np.ones(samples, dtype=bool)
            counts = np.bincount(ranks[known, head].clip(max=width), minlength=width + 1)[:width]
            accuracy.append((counts / known.sum()).tolist())
            held &= ranks[:, head] < width
        paths: Counter[Ranks] = Counter()
        for row in ranks.tolist():
            for depth in range(heads):
                if row[depth] >= width:
                    break
                paths[tuple(row[: depth + 1])] += 1
        return Accuracy(accuracy, dict(paths), samples, temperature)

    def write(self, folder: str | File, rare: int = 2, **facts: object) -> None:
        """Write a calibration next to the heads, one file for each temperature.

        Args:
            folder: of the heads.
            rare: paths seen less often are left out.
            facts: what else to keep in the file, such as which text it was.
        """
        frequent = sorted((item for item in self.paths.items() if item[1] >= rare), key=lambda item: -item[1])
        value = {
            **facts,
            "temperature": self.temperature,
            "samples": self.samples,
            "accuracy": [[round(p, 6) for p in head] for head in self.accuracy],
            "paths": {write((path,)): count for path, count in frequent},
        }
        name = FILE if self.temperature == 0 else f"calibration_{self.temperature:g}.json"
        write_text(File(folder, name), json.dumps(value) + "\n")

    @staticmethod
    def read(folder: str | File, temperature: float = 0.0) -> Accuracy:
        """The calibration next to the heads that was measured nearest to ``temperature``.

        Raises:
            OSError: there is none. ValueError: one is malformed.
        """
        found = sorted(File(folder).glob("calibration*.json")) or [File(folder, FILE)]
        return min((Accuracy._read(file) for file in found), key=lambda one: abs(one.temperature - temperature))

    @staticmethod
    def _read(file: File) -> Accuracy:
        value = read_json(file)
        if value is None:
            raise OSError(
                "proposer.tree=calibrated and proposer.tree=likeliest require accuracies measured for the heads, "
                f"but the folder {file.parent} holds no {file.name}: name a tree (proposer.tree=vicuna_7b_stage1, or "
                "widths such as 3x2x1), or measure once, in Python, with "
                "spec_lab.propose.accuracy.measure(target, heads, prompts), and write() the result into that folder"
            )
        try:
            expect(value, SHAPE, "")
            paths = {tuple(map(int, path.split("."))): count for path, count in value.get("paths", {}).items()}
        except ValueError as error:
            raise ValueError(f"{file} is malformed: {one_line(error)}") from error
        temperature = float(value.get("temperature", 0.0))
        accuracy = [list(map(float, head)) for head in value["accuracy"]]
        samples = value.get("samples", 0) if paths else 0
        if not (math.isfinite(temperature) and temperature >= 0 and samples >= 0):
            raise ValueError(f"{file} is malformed: 'temperature' and 'samples' must be finite and at least 0")
        if any(count < 0 or min(path) < 0 for path, count in paths.items()):
            raise ValueError(f"{file} is malformed: 'paths' must map paths of ranks to counts, both at least 0")
        if not accuracy or not all(accuracy) or not all(0 <= p <= 1 for head in accuracy for p in head):
            raise ValueError(f"{file} is malformed: 'accuracy' must hold lists of probabilities, one per head")
        return Accuracy(accuracy, paths, samples, temperature)


@torch.inference_mode()
def measure(
    target: Target,
    heads: Heads,
    prompts: Sequence[Sequence[int]],
    tokens: int = 128,
    width: int = 10,
    temperature: float = 0.0,
) -> Accuracy:
    """Continue prompts without a draft, and find the rank that each head gave to the token that followed.

    Args:
        target: continues.
        heads: are measured.
        prompts: token ids; decoded together, so pass some dozens at a time. The end of the context ends a text.
        tokens: to emit per prompt.
        width: ranks told apart.
        temperature: of the continuations.

    Raises:
        ValueError: no prompts, or continuations too short for the heads.
    """
    collect = Collect()
    requests = [
        Request(number, f"prompt {number}", tuple(prompt), Sampling(temperature), tokens)
        for number, prompt in enumerate(prompts)
    ]
    for _ in fixed_group(target, collect, Capture(), requests, CounterDraws(0)):
        pass
    texts = [tuple(zip(*text, strict=True)) for text in collect.texts if text]
    answers = [(torch.stack(hidden), torch.tensor(tokens, device=target.lm.device)) for hidden, tokens in texts]
    return of_texts(heads, answers, width, temperature)


@torch.inference_mode()
def of_texts(
    heads: Heads, answers: Iterable[tuple[Tensor, Tensor]], width: int = 10, temperature: float = 0.0
) -> Accuracy:
    """Find the rank that each head gave to the token that followed, in answers of the target.

    Args:
        heads: are measured.
        answers: of each answer the states after the final norm from which its tokens were chosen ``[n, H]``, and these
            tokens ``[n]``, both on the heads' device.
        width: ranks told apart.
        temperature: of the answers.

    Raises:
        ValueError: no answers, or answers too short for the heads.
    """
    ranks = [np.empty((0, len(heads)), dtype=np.int64)]
    for hidden, tokens in answers:
        samples = max(0, len(tokens) - len(heads))
        for start in range(0, samples, SAMPLES):
            end = min(start + SAMPLES, samples)
            # From the state that chose token t, head k predicts token t + 1 + k.
            right = tokens[start + 1 : end + len(heads)].unfold(0, len(heads), 1)[..., None]  # [S, K, 1]
            logits = heads(hidden[start:end], tokens[start:end]).float()
            score = logits.gather(-1, right)
            order = torch.arange(logits.shape[-1], device=logits.device)
            ahead = (logits > score) | ((logits == score) & (order < right))
            ranks.append(ahead.sum(-1).cpu().numpy())
    return Accuracy.of(np.concatenate(ranks), width, temperature)


class Collect(Lifecycle):
    """A null proposer that collects the hidden states from which tokens were chosen, and these tokens.

    It expects one emitted token for each sequence in each step. ``texts`` has a list for each sequence, also after it
    has ended: the state ``[H]`` and the token that was chosen from it, step by step.
    """

    name = "collect"
    drawn: Drawn = "point"
    nodes = 0
    requires = Requires(hidden=(-1,))

    def __init__(self) -> None:
        self.texts: list[list[tuple[Tensor, int]]] = []

    def init(self, request: Request) -> list[tuple[Tensor, int]]:
        """An empty list."""
        self.texts.append([])
        return self.texts[-1]

    def propose(self, batch: Batch) -> Draft:
        """An empty forest."""
        return empty(len(batch.sequences), batch.device)

    def observe(self, observed: Sequence[Observation]) -> None:
        """See ``Proposer``."""
        for one in observed:
            if one.hidden is not None:
                one.sequence.state.append((one.hidden[-1].clone(), one.tokens[-1]))
