"""How often Medusa heads are right, measured on the target's own continuations and stored in the heads' folder.

``drafters.medusa.measure`` measures them; ``Accuracy.read`` runs whenever heads load.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path as File

import numpy as np

from spec_lab.core.files import expect, read_json, write_text
from spec_lab.models.checkpoint import one_line
from spec_lab.propose.trees import Ranks, by_rank, write

FILE = "calibration.json"
SHAPE = {"accuracy": [[float]], "?temperature": float, "?samples": int, "?paths": {str: int}}  # of the file
ENOUGH = 200  # samples for a conditional accuracy; below, the marginal one is taken
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
        files = sorted(File(folder).glob("calibration*.json")) or [File(folder, FILE)]
        return min(
            (Accuracy._read(file) for file in files), key=lambda accuracy: abs(accuracy.temperature - temperature)
        )

    @staticmethod
    def _read(file: File) -> Accuracy:
        value = read_json(file)
        if value is None:
            raise OSError(
                "proposer.tree=calibrated and proposer.tree=likeliest require accuracies measured for the heads, "
                f"but the folder {file.parent} holds no {file.name}: name a tree (proposer.tree=vicuna_7b_stage1, or "
                "widths such as 3x2x1), or measure once, in Python, with "
                "spec_lab.drafters.medusa.measure.measure(target, heads, prompts), and write() the result "
                "into that folder"
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
