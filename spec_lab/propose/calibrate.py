"""Which static tree is fastest: how often heads are right on text, against what verifying costs on this machine.

Source: Sequoia's hardware-aware choice (2402.12374, section 4.3): the tree size that maximises expected tokens over
measured step time. ``measure`` and ``Accuracy.write`` run where heads are trained, ``calibrate`` whenever they load.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path as File

import numpy as np
import torch
from torch import Tensor

from spec_lab.draft import Draft, empty, forest
from spec_lab.draft import tree as shape_of
from spec_lab.law import Sampling, argmax, law, law_dtype
from spec_lab.propose.heads import Heads, read_json
from spec_lab.propose.trees import Choices, Path, by_rank, fastest, grow, parse, write
from spec_lab.target import Target

FILE = "calibration.json"
ENOUGH = 200  # samples for a conditional accuracy; below, the marginal one is taken
PRIOR = 20.0  # samples that a path's accuracy by rank is worth beside the path's own count
SIZES = (0, 1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)  # tree sizes timed


@dataclass(frozen=True)
class Accuracy:
    """How often heads are right, measured on the target's own continuations.

    Args:
        accuracy: ``[K][ranks]``: P(head k's token of rank r is right | all earlier heads held the right token among
            their ranks), where there are enough such samples; else regardless of earlier heads.
        paths: how often a whole path of ranks was right; rare ones may be missing.
        samples: places in the text; 0 when only ``accuracy`` is known.
    """

    accuracy: list[list[float]]
    paths: dict[Path, int]
    samples: int = 0

    def value(self, path: Path) -> float:
        """P(the node at ``path`` is right): its counts, shrunk towards its accuracies by rank.

        Heads are right together: where one found the text easy, the next does too. The counts know; their shrinkage
        keeps rare paths sober.
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
    def of(ranks: np.ndarray, width: int) -> Accuracy:
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
        paths: Counter[Path] = Counter()
        for row in ranks.tolist():
            for depth in range(heads):
                if row[depth] >= width:
                    break
                paths[tuple(row[: depth + 1])] += 1
        return Accuracy(accuracy, dict(paths), samples)

    def write(self, folder: str | File, rare: int = 2, **facts: object) -> None:
        """Write calibration.json beside the heads.

        Args:
            folder: of the heads.
            rare: paths seen less often are left out.
            facts: what else to keep in the file, such as which text it was.
        """
        frequent = sorted((item for item in self.paths.items() if item[1] >= rare), key=lambda item: -item[1])
        value = {
            **facts,
            "samples": self.samples,
            "accuracy": [[round(p, 6) for p in head] for head in self.accuracy],
            "paths": {write((path,)): count for path, count in frequent},
        }
        File(folder, FILE).write_text(json.dumps(value) + "\n")

    @staticmethod
    def read(folder: str | File) -> Accuracy:
        """Read calibration.json.

        Raises:
            OSError: there is none. ValueError: it is malformed.
        """
        file = File(folder, FILE)
        value = read_json(file, "calibration of Medusa heads (give proposer.tree=..., or measure one)")
        try:
            accuracy = [[float(p) for p in head] for head in value["accuracy"]]
            paths = {tuple(map(int, path.split("."))): int(count) for path, count in value.get("paths", {}).items()}
            samples = int(value.get("samples", 0)) if paths else 0
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{file} is malformed: {error!r}") from error
        if not accuracy or not all(accuracy) or not all(0 <= p <= 1 for head in accuracy for p in head):
            raise ValueError(f"{file} is malformed: 'accuracy' must hold lists of probabilities, one per head")
        return Accuracy(accuracy, paths, samples)


@dataclass(frozen=True)
class Calibration:
    """A tree and why it was chosen.

    Args:
        choices: the tree.
        expected_tokens: per step and sequence, on text like that measured on.
        expected_speedup: over decoding without a draft, by the seconds below.
        batch_size: sequences verified together.
        heads_seconds: of the heads' call.
        verify_seconds: of the target's forward and law for each tree size timed.
    """

    choices: Choices
    expected_tokens: float
    expected_speedup: float
    batch_size: int
    heads_seconds: float
    verify_seconds: dict[int, float]


@torch.inference_mode()
def measure(
    target: Target, heads: Heads, prompts: Sequence[Sequence[int]], tokens: int = 128, width: int = 10
) -> Accuracy:
    """Continue prompts greedily without a draft, and see which rank each head gave to the token that came.

    Args:
        target: continues.
        heads: are measured.
        prompts: token ids; decoded together, so give some dozens at a time.
        tokens: to emit per prompt.
        width: ranks told apart.

    Raises:
        ValueError: no prompts, or continuations too short for the heads.
    """
    lm = target.lm
    lm.keep_hidden(True)
    paths = [lm.cells.open(len(prompt) + tokens) for prompt in prompts]
    states, chosen = [], []  # per step: [B, H], [B]
    pending = [list(prompt) for prompt in prompts]
    try:
        for _ in range(tokens):
            logits = lm.forward(paths, pending, empty(len(paths), lm.device)).logits
            token = argmax(logits.float())
            states.append(torch.stack([lm.cells.last_hidden(path) for path in paths]))
            chosen.append(token)
            pending = [[one] for one in token.tolist()]
    finally:
        for path in paths:
            lm.cells.close(path)
        lm.keep_hidden(False)
    # The state that chose token t is the one from which head k foretells token t + 1 + k.
    ranks = [np.empty((0, len(heads)), dtype=np.int64)]
    for step in range(len(chosen) - len(heads)):
        right = torch.stack(chosen[step + 1 : step + 1 + len(heads)], 1)[..., None]  # [B, K, 1]
        logits = heads(states[step]).float()
        score = logits.gather(-1, right)
        ahead = (logits > score) | ((logits == score) & (torch.arange(logits.shape[-1], device=lm.device) < right))
        ranks.append(ahead.sum(-1).cpu().numpy())
    return Accuracy.of(np.concatenate(ranks), width)


def calibrate(
    target: Target, heads: Heads, accuracy: Accuracy, batch_size: int = 1, max_nodes: int = 64, seconds: float = 1.0
) -> Calibration:
    """The tree with the most expected tokens per second for this batch size on this machine.

    Args:
        target: verifies.
        heads: draft; the tree is no deeper than there are heads.
        accuracy: how often they are right.
        batch_size: sequences verified together.
        max_nodes: largest tree.
        seconds: to spend on timing, roughly.
    """
    depth = min(len(heads), len(accuracy.accuracy))
    ranks = min(target.vocabulary, *map(len, accuracy.accuracy))
    grown = grow(accuracy.value, max_nodes, depth, ranks)
    tokens = 1.0 + np.cumsum([0.0] + [value for _, value in grown])  # by size
    verify, draft = time_sizes(target, heads.first(depth), [path for path, _ in grown], tokens, batch_size, seconds)
    sizes, costs = np.array(list(verify)), np.array(list(verify.values()))

    def step(nodes: int) -> float:
        return float(np.interp(nodes, sizes, costs)) + draft

    choices, expected = fastest(grown[: int(sizes[-1])], step)
    speedup = expected / step(len(choices)) * costs[0]
    return Calibration(choices, expected, float(speedup), batch_size, draft, verify)


@torch.inference_mode()
def time_sizes(
    target: Target, heads: Heads, paths: Sequence[Path], tokens: np.ndarray, batch_size: int, seconds: float
) -> tuple[dict[int, float], float]:
    """Seconds of verifying the first n of ``paths`` below each sequence, for some n, and of the heads' call.

    Sizes take turns; each counts with its fastest turn, since other work on the machine only ever adds. A size costs
    at most what a larger one does. Sizes too large to win, by ``tokens`` ``[n + 1]``, are given up after two turns.
    """
    lm = target.lm
    context = max(1, min(200, target.context - len(heads) - 2))
    noise = np.random.default_rng(0)
    sizes = [size for size in SIZES if size < len(paths)] + [len(paths)]
    turns: dict[int, Callable[[], float]] = {}
    lm.keep_hidden(True)
    cells = [lm.cells.open(context + 1 + len(paths)) for _ in range(batch_size)]
    try:
        prompt = noise.integers(0, target.vocabulary, context).tolist()
        lm.forward(cells, [prompt] * batch_size, empty(batch_size, lm.device))
        memory = torch.empty((len(paths) + 1) * batch_size, target.vocabulary, device=lm.device)
        memory = memory.to(law_dtype(torch.empty(0, dtype=lm.dtype)))
        for size in sizes:
            shape = forest((shape_of(parse(list(paths[:size]))),) * batch_size)
            token = torch.from_numpy(noise.integers(0, target.vocabulary, shape.nodes)).to(lm.device)
            turns[size] = _verification(target, cells, Draft(shape, token), memory)
        hidden = torch.stack([lm.cells.last_hidden(path) for path in cells])
        turns[-1] = lambda: _timed(target, lambda: heads(hidden))
        best = _take_turns(turns, tokens, seconds)
    finally:
        for path in cells:
            lm.cells.close(path)
        lm.keep_hidden(False)
    draft = best.pop(-1)
    costs = np.minimum.accumulate(np.array(list(best.values()))[::-1])[::-1]
    return dict(zip(best, costs.tolist(), strict=True)), draft


def _take_turns(turns: dict[int, Callable[[], float]], tokens: np.ndarray, seconds: float) -> dict[int, float]:
    """Each size's fastest turn, within about ``seconds`` of timed work, at least two turns after a warm-up."""
    for turn in turns.values():
        turn()
    best, spent, done = dict.fromkeys(turns, np.inf), 0.0, 0
    while done < 2 or spent < seconds:
        for size in best:
            took = turns[size]()
            best[size] = min(best[size], took)
            spent += took
        done += 1
        if done == 2:
            rates = {size: tokens[size] / (best[size] + best[-1]) for size in best if size >= 0}
            winner = max(rates, key=lambda size: rates[size])
            last = max(size for size in rates if size <= winner or rates[size] > 0.7 * rates[winner])
            best = {size: took for size, took in best.items() if size <= last}
    return best


def _verification(target: Target, cells: list, draft: Draft, memory: Tensor) -> Callable[[], float]:
    lm, pending = target.lm, [[0]] * draft.shape.heads

    def turn() -> float:
        held: list = []

        def verify() -> None:
            output = lm.forward(cells, pending, draft)
            law(output.logits, [Sampling()], scratch=memory)
            held.extend(output.slots)

        took = _timed(target, verify)
        for path, slots in zip(cells, held, strict=True):
            lm.cells.drop(path, slots)
            lm.cells.backtrack(path, len(path) - 1)
        return took

    return turn


def _timed(target: Target, work: Callable[[], object]) -> float:
    clock = target.lm.clock
    clock.synchronise()
    start = clock.mark()
    work()
    end = clock.mark()
    clock.synchronise()
    return clock.seconds(start, end)
