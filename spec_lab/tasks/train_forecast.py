"""Time, memory and disk of a training, and the tau that pays: printed before the answers, which may take hours."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from spec_lab.core.device_memory import readable
from spec_lab.core.probabilities import Sampling
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.propose.calibrate import visits
from spec_lab.train.estimate import TrainingNeed
from spec_lab.train.recipe import Recipe

VISITS = 3
"""Visits of each draft length; the fastest step counts."""


@dataclass(frozen=True)
class PlannedTexts:
    """The texts of a training before they are there.

    Args:
        answers: their number, held-out ones among them.
        new_tokens: that are written at most; 0 where the answers exist already.
        tokens: of all texts at most, without later turns' questions.
        longest: tokens of the longest at most.
    """

    answers: int
    new_tokens: int
    tokens: int
    longest: int


def forecast(
    texts: PlannedTexts, writer: Target, batch_size: int, sampling: Sampling, number_bytes: int, folder: Path
) -> Iterator[str]:
    """Yield sentences on the time of the answers and on the disk that hidden states take.

    Args:
        number_bytes: bytes of the hidden states of a token.
    """
    if texts.new_tokens:
        batch = min(batch_size, texts.answers)
        seconds = step_seconds(writer, {0: Null()}, batch, sampling)[0]
        rate = batch / seconds
        yield (
            f"{texts.answers} answers of {texts.new_tokens} tokens at most in all, at {rate:.0f} tokens per second "
            f"({batch} prompts together): about {spell(texts.new_tokens / rate)}, less where answers end early or are "
            "kept from an earlier run."
        )
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    free, needed = shutil.disk_usage(existing).free, texts.tokens * number_bytes
    yield f"Hidden states along them: at most {readable(needed)} in {folder}, where {readable(free)} are free."
    if needed > free:
        yield "That may not fit: set max_new_tokens or task.answers to less, or output_dir to another disk."


def training_sentence(needed: TrainingNeed, texts: int, threads: int, part: int, rows: int) -> str:
    """Return a sentence on the rate, the time and the memory of the gradients.

    Args:
        needed: of a text of the longest length.
        texts: that are seen in all.
        threads: that compute at the same time.
        part: texts that a thread computes together.
        rows: texts of a training step.
    """
    rate = needed.tokens * threads / max(needed.seconds, 1e-9)
    return (
        f"Training on {texts} texts of up to {needed.tokens} tokens at {rate:.0f} tokens per second: about "
        f"{spell(texts * needed.tokens / rate)} for gradients, and {readable(needed.bytes(part * threads))} of memory "
        f"beside the target, for {part * threads} of the {rows} texts of a step at a time."
    )


def paying_sentence(recipe: Recipe, module: Any, target: Target, sampling: Sampling) -> str:
    """Return a sentence on the accepted lengths at which drafting is as fast as not drafting, on this engine."""
    needed = paying_lengths(recipe, module, target, sampling)
    each = ", ".join(f"{tau:.2f} (of {depth + 1}) with {depth}" for depth, tau in needed.items())
    sentence = f"A drafter of this size pays on {target.name} here where tau, the mean tokens per step, is above {each}"
    lost = [depth for depth, tau in needed.items() if tau >= depth + 1]
    tokens = "drafted tokens" if len(needed) > 1 or [*needed] != [1] else "drafted token"
    if len(lost) == len(needed):
        return f"{sentence} {tokens}: it cannot pay at batch size 1, however good it is."
    return f"{sentence} {tokens} (a chain, batch size 1)."


def paying_lengths(recipe: Recipe, module: Any, target: Target, sampling: Sampling) -> dict[int, float]:
    """Return the tau at which a step with a draft costs as much per token as one without, by the drafted tokens.

    It is t(K) / t(0), where t(K) is the time of a step that drafts a chain of K tokens: drafting, the target's forward
    of K + 1 rows, and the commit; at least 1, since less is noise of the times. The weights do not matter, so an
    untrained drafter is timed.
    """
    depths = sorted({1, (recipe.depth + 1) // 2, recipe.depth})
    training = module.training
    with TemporaryDirectory() as folder:
        recipe.write(module.eval(), target, Path(folder), {})
        module.train(training)
        proposers = {depth: recipe.load(target, Path(folder), depth) for depth in depths}
        seconds = step_seconds(target, {0: Null(), **proposers}, 1, sampling)
    return {depth: max(1.0, seconds[depth] / seconds[0]) for depth in depths}


def step_seconds(target: Target, proposers: dict[int, Any], batch: int, sampling: Sampling) -> dict[int, float]:
    """Return the seconds of a step with each proposer, the fastest of ``VISITS`` interleaved visits."""
    best = dict.fromkeys(proposers, float("inf"))
    with visits(target, proposers, batch, sampling) as visit:
        for _ in range(VISITS):
            for size in proposers:
                best[size] = min(best[size], *visit(size))
    return best


def bounded(lengths: Sequence[tuple[int, int]], new_tokens: int, context: int, known: bool) -> PlannedTexts:
    """Return the texts of conversations: of each the tokens of its first prompt, and how often it is answered.

    Args:
        lengths: of each conversation; where answers exist already, those of the whole text, and 1.
        new_tokens: of an answer, at most.
        context: of the target.
        known: whether the answers exist already.
    """
    added = 0 if known else new_tokens
    texts = [min(prompt + (turn + 1) * added, context) for prompt, turns in lengths for turn in range(turns)]
    return PlannedTexts(len(texts), len(texts) * added, sum(texts), max(texts, default=2))


def spell(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))
