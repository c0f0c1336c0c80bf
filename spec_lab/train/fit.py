"""The training loop of every drafter: texts in a new order in each pass, checkpoints, learning curves.

A training that is stopped resumes to the same weights: the order of texts depends on the settings only, and a
checkpoint holds weights, optimisers and the number of the step.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from torch import Tensor

from spec_lab.core.files import write_text
from spec_lab.core.options import whole
from spec_lab.core.tensors import read_tensors, readable, save_tensors
from spec_lab.train.objectives import Measured, expected_length
from spec_lab.train.texts import Texts
from spec_lab.train.trainer import Plan, Trainer, schedule

log = logging.getLogger(__name__)

Objective = Callable[[Texts], tuple[Tensor, list[Measured]]]
"""The loss of some texts, and what each draft position achieves on them."""
CHECKPOINT = "checkpoint.safetensors"
"""Its file in the folder of a training."""


@dataclass(frozen=True)
class FitPlan:
    """The settings of a training.

    Args:
        passes: how often each text is seen.
        rows: texts of a step.
        part: texts that one thread computes.
        warmup: steps in which the learning rates rise; at most half of the steps before they fall.
        decay: share of all steps in which they fall.
        every: steps between two lines of the learning curve.
        save_seconds: seconds between two checkpoints.
    """

    passes: float = 1.0
    rows: int = 16
    part: int = 8
    warmup: int = 30
    decay: float = 0.4
    every: int = 20
    save_seconds: float = 120
    plan: Plan = field(default_factory=lambda: Plan(muon_rate=4e-3, adamw_rate=2e-3, weight_decay=0.1, seed=2))

    def __post_init__(self) -> None:
        for name, value in (("task.rows", self.rows), ("part", self.part), ("every", self.every)):
            whole(name, value)
        if self.rows % self.part:
            raise ValueError(f"task.rows must be a multiple of part={self.part}, not {self.rows}")


def order_of(parts: int, rows: int, batch: int, passes: float) -> list[tuple[int, int]]:
    """Return (part, first row) of every step: the parts in a new order in each pass, the rows of a part together."""
    steps = [
        (part, row)
        for epoch in range(int(np.ceil(passes)))
        for part in np.random.default_rng(epoch).permutation(parts)
        for row in range(0, batch - rows + 1, rows)
    ]
    return steps[: int(passes * parts * (batch // rows))]


def fit(
    trainer: Trainer[Any],
    objective: Objective,
    paths: Sequence[Path],
    out: Path,
    plan: FitPlan,
    facts: dict[str, Any],
    stop_after: int | None = None,
    tick: Callable[[int, int], None] = lambda done, total: None,
    wrote: Callable[[dict[str, Any]], None] = lambda line: None,
    measure: Callable[[], Mapping[str, Any]] | None = None,
    advance: Callable[[float], None] | None = None,
) -> None:
    """Train, or resume from the checkpoint in ``out``.

    Args:
        objective: computes losses; called in threads.
        paths: files of texts, all with the same number of texts.
        out: folder of the checkpoint and of ``learning.jsonl``.
        facts: other settings that change the result; a checkpoint with others is refused.
        stop_after: step at which to stop early, as after a kill; None for the last one.
        tick: called with the steps done and those in all.
        wrote: called with each new line of the learning curve.
        measure: measures the drafter on held-out texts, for the first line of the learning curve in each tenth of the
            steps and its last one (``held_out``); its time is no part of ``seconds``.
        advance: called before each step with the share of the steps that are done.

    Raises:
        ValueError: no texts; fewer in a file than a step needs; the checkpoint belongs to another training; the loss
            or its gradient is NaN or infinite. The checkpoint is then the last one before.
    """
    if not paths:
        raise ValueError("there are no texts to train on")
    batch = len(Texts.read(paths[0], hidden=False))
    order = order_of(len(paths), plan.rows, batch, plan.passes)
    if not order:
        raise ValueError(
            f"task.rows={plan.rows} is more than the {batch} texts of a file, or task.passes={plan.passes} is too small"
        )
    out.mkdir(parents=True, exist_ok=True)
    known = json.dumps({"files": len(paths), "plan": asdict(plan), **facts}, sort_keys=True, default=str)
    checkpoint, curve = out / CHECKPOINT, out / "learning.jsonl"
    if checkpoint.exists():
        _restore(trainer, checkpoint, known)
    lines = [line for line in _lines(curve) if line["step"] <= trainer.step]
    stable, share = int(len(order) * (1 - plan.decay)), plan.part / plan.rows
    warmup = max(1, min(plan.warmup, stable // 2))
    began = saved = time.monotonic()
    before, recent = (lines[-1]["seconds"] if lines else 0.0), list[list[list[float]]]()
    device = next(iter(trainer.weights.values())).device
    for step, pieces in _pieces(paths, order, plan, trainer.step):
        if step == stop_after:
            break
        if advance is not None:
            advance(step / len(order))
        seen: list[list[list[float]]] = []

        def loss_of(piece: Texts, seen: list[list[list[float]]] = seen) -> Tensor:
            loss, measured = objective(piece.to(device))
            seen.append(
                [
                    [float(position.loss.detach()), float(position.accepted), float(position.agreed)]
                    for position in measured
                ]
            )
            return loss * share

        factor = schedule(step, warmup, stable, len(order) - stable)
        trainer.update([partial(loss_of, piece) for piece in pieces], factor)
        recent += seen
        tick(step + 1, len(order))
        if (step + 1) % plan.every == 0 or step + 1 == len(order):
            means = np.mean(recent, 0)
            seconds = before + time.monotonic() - began
            line = _line(step + 1, (step + 1) * plan.rows, seconds, means)
            if measure is not None and (step + 1 == len(order) or _tenth(step + 1, order) > _measured(lines, order)):
                paused = time.monotonic()
                line["held_out"] = measure()
                began += time.monotonic() - paused
            lines.append(line)
            write_text(curve, "".join(json.dumps(written) + "\n" for written in lines))
            log.info("step %d of %d: %s", step + 1, len(order), lines[-1])
            wrote(lines[-1])
            recent.clear()
        if time.monotonic() - saved > plan.save_seconds:
            _save(trainer, checkpoint, known)
            saved = time.monotonic()
    _save(trainer, checkpoint, known)


def _tenth(step: int, order: Sequence[Any]) -> int:
    return 10 * step // len(order)


def _measured(lines: Sequence[Mapping[str, Any]], order: Sequence[Any]) -> int:
    """Return the last tenth of the steps in which the drafter was measured; -1 for none."""
    return max((_tenth(line["step"], order) for line in lines if "held_out" in line), default=-1)


def saved_steps(out: Path) -> int:
    """Return the number of training steps of the checkpoint in a folder; 0 without one."""
    if not (out / CHECKPOINT).exists():
        return 0
    with readable([out / CHECKPOINT]), safe_open(out / CHECKPOINT, "pt") as file:
        return int(file.metadata()["step"])


def saved_part(out: Path) -> int | None:
    """Return the number of texts that one thread computes in the training of the checkpoint in a folder."""
    if not (out / CHECKPOINT).exists():
        return None
    with readable([out / CHECKPOINT]), safe_open(out / CHECKPOINT, "pt") as file:
        return int(json.loads(file.metadata()["facts"])["plan"]["part"])


def _line(step: int, texts: int, seconds: float, means: np.ndarray) -> dict[str, Any]:
    """A line of the learning curve. ``means`` is ``[positions, 3]``: loss, accepted, agreed."""
    loss, accepted, agreed = np.round(means.T, 4).tolist()
    return {
        "step": step, "texts": texts, "seconds": round(seconds, 1), "loss": loss, "accepted": accepted,
        "agreed": agreed, "length_at_1": round(expected_length(accepted), 4),
        "length_greedy": round(expected_length(agreed), 4),
    }  # fmt: skip


def _lines(curve: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in curve.read_text().splitlines()] if curve.exists() else []


def _pieces(
    paths: Sequence[Path], steps: Sequence[tuple[int, int]], plan: FitPlan, first: int
) -> Iterator[tuple[int, list[Texts]]]:
    """Yield each step's texts from step ``first`` on, in pieces of ``plan.part``."""
    at, read = -1, None
    for step in range(first, len(steps)):
        part, row = steps[step]
        if part != at or read is None:
            read, at = Texts.read(paths[part]), part
        some = read.rows(slice(row, row + plan.rows))
        order = some.length.argsort(stable=True)  # texts of similar lengths are padded least
        yield step, [some.rows(order[start : start + plan.part]) for start in range(0, plan.rows, plan.part)]


def _save(trainer: Trainer[Any], path: Path, facts: str) -> None:
    save_tensors(trainer.tensors(), path, {"step": str(trainer.step), "facts": facts})


def _restore(trainer: Trainer[Any], path: Path, facts: str) -> None:
    tensors, metadata = read_tensors(path)
    if metadata.get("facts") != facts:
        raise ValueError(
            f"{path} belongs to a training with {metadata.get('facts')}, not {facts}: give another output_dir to "
            "start a new one"
        )
    trainer.restore(tensors, int(metadata["step"]), trainer.sequences)
