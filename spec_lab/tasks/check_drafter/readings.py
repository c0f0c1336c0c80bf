"""Every reading that a drafter's files and its prompts leave open, tried on the target's texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spec_lab.analysis.metrics.intervals import Interval
from spec_lab.analysis.metrics.paired import change
from spec_lab.core.faults import PartError
from spec_lab.core.reading import Reading
from spec_lab.decode.proposer import Proposer
from spec_lab.models.target import Target
from spec_lab.tasks.check_drafter.acceptance import by_depth, mean_alpha, tau, totals
from spec_lab.tasks.check_drafter.along_text import Predicted
from spec_lab.text.chat_template import ChatTemplate, thinking_options
from spec_lab.text.prompts import Prompt

PROMPTS = "prompts."
"""How the conventions of prompts begin, as the options of a run do."""
ERROR = 0.05
"""Probability that chance alone makes a reading help."""


@dataclass(frozen=True, eq=False)
class TriedReading:
    """One reading, measured.

    Args:
        changed: values of the conventions that differ from the reading in use; empty of that itself.
        texts: what the drafter predicted under it; None where it could not be measured.
        gain: the expected tau minus that of the reading in use, paired by prompt.
        level: of the intervals of gain and tau, whose lower ends hold for all readings at once (``try_readings``).
    """

    changed: Mapping[str, Any]
    label: str
    reading: Reading = field(default_factory=Reading)
    texts: Sequence[Predicted] | None = None
    error: str = ""
    gain: Interval | None = None
    level: float = 1 - ERROR

    @property
    def tau(self) -> Interval:
        """The expected tau along its texts, of which there are some."""
        assert self.texts is not None
        return tau(self.texts, self.level)

    @property
    def helps(self) -> bool:
        """Whether it is better than the reading in use by more than chance explains."""
        return self.gain is not None and self.gain.low > 0

    @property
    def of_prompts(self) -> bool:
        """Whether it reads the prompts otherwise, so that the target answers other texts."""
        return any(name.startswith(PROMPTS) for name in self.changed)

    def facts(self) -> dict[str, Any]:
        """Return the entry of ``summary.json``."""
        facts: dict[str, Any] = {"changed": dict(self.changed), "label": self.label, "helps": self.helps}
        if self.texts is None:
            return facts | {"error": self.error}
        return facts | {
            "tau": self.tau._asdict(),
            "gain": None if self.gain is None else self.gain._asdict(),
            "agreed": by_depth(self.texts, "agreed"),
            "alpha": by_depth(self.texts, "alpha"),
        }


Build = Callable[[Mapping[str, Any]], Proposer]
"""Builds the drafter again with other values of its options."""

Measure = Callable[[Proposer, Sequence[Prompt] | None], list[Predicted]]
"""Measures a drafter along the texts of the prompts; None: those of the run."""


def try_readings(
    proposer: Proposer, prompts: Sequence[Prompt], target: Target, build: Build | None, measure: Measure,
    tick: Callable[[int, int], Any] = lambda *_: None,
) -> tuple[list[TriedReading], TriedReading]:  # fmt: skip
    """Measure the reading in use and every other one, each alone; then the best of them together with each of the rest.

    Readings of different conventions are combined as long as one improves on the best so far, except those that alone
    are worse than the reading in use. Of readings that cannot be told apart by tau the one with the largest alpha is
    taken, which varies less.

    Chance explains a gain unless its interval, at the level of all readings, is above 0: the probabilities that chance
    alone puts a lower end there add up to ``ERROR`` at most (Bonferroni). Readings alone share one half of it, and the
    first round of combinations half of the rest, the second half of what is then left, and so on, each divided by the
    comparisons of the round; a combination is compared with the reading in use and with the best so far. Where nothing
    can be combined, readings alone share all of it. The best reading's intervals are at its round's level, so that
    their lower ends hold although the same texts chose it.

    Args:
        prompts: of the run, which are sent otherwise as well; none of answers that exist already.
        target: whose chat template they may go through.
        build, measure: see there; without ``build`` no other reading of the drafter is tried.
        tick: called before the first reading and whenever one has been measured, with 0 or 1 and the number of all
            that are to be measured, to which combinations add.

    Returns:
        The readings that were tried, that in use first; and the best one of the drafter: that in use, unless another
        one helps.
    """
    others = proposer.reading.others if build is not None else []
    variants = prompt_variants(prompts, target) if prompts else []
    total = 1 + len(others) + len(variants)
    tick(0, total)
    used = TriedReading({}, "in use", proposer.reading, measure(proposer, None))
    tick(1, total)
    left = ERROR / 2 if len({convention for convention, *_ in others}) > 1 else 0.0
    level = 1 - 2 * (ERROR - left) / max(1, len(others) + len(variants))

    def measured(
        changed: Mapping[str, Any], label: str, level: float, prompts: Sequence[Prompt] | None = None
    ) -> TriedReading:
        try:
            other = proposer if prompts is not None or build is None else build(changed)
            texts = measure(other, prompts)
        except PartError:  # not a reading that the drafter refuses
            raise
        except ValueError as error:
            return TriedReading(changed, label, error=str(error))
        finally:
            tick(1, total)
        return TriedReading(changed, label, other.reading, texts, gain=_gain(used, texts, level), level=level)

    alone = [measured({convention: value}, label, level) for convention, label, value in others]
    tried, best, candidates = [used, *alone], used, alone
    while better := [other for other in candidates if other.texts and _gain(best, other.texts, other.level).low > 0]:
        leader = max(better, key=_mean_gain)
        best = max(alike(leader, better), key=lambda other: mean_alpha(other.texts or ()))
        added = [
            other
            for other in alone
            if other.gain is not None and other.gain.high > 0 and not other.changed.keys() & best.changed.keys()
        ]
        left /= 2
        total += len(added)
        round_level = 1 - 2 * left / max(1, 2 * len(added))
        candidates = [
            measured({**best.changed, **other.changed}, f"{best.label}; {other.label}", round_level) for other in added
        ]
        tried += candidates
    tried += [measured(changed, label, level, read) for changed, label, read in variants]
    return tried, best


def alike(best: TriedReading, others: Sequence[TriedReading]) -> list[TriedReading]:
    """Return those of other readings that are not worse than the best one by more than chance explains."""
    assert best.texts is not None
    return [other for other in others if other.texts is not None and not _gain(other, best.texts, 0.95).low > 0]


def _mean_gain(tried: TriedReading) -> float:
    return 0.0 if tried.gain is None else tried.gain.mean


def _gain(reference: TriedReading, texts: Sequence[Predicted], level: float) -> Interval:
    assert reference.texts is not None
    return change(totals(reference.texts), totals(texts), paired=True).interval(level)


def prompt_variants(prompts: Sequence[Prompt], target: Target) -> list[tuple[dict[str, Any], str, list[Prompt]]]:
    """Return the other ways to send prompts to a target with a chat template: with or without it, thinking or not.

    Returns:
        For each way the options of ``prompts`` that set it, a label, and the prompts.
    """
    template = prompts[0].template
    source = (template or ChatTemplate()).of(target.tokenizer)
    if not source:
        return []
    if template is None:
        through = [replace(prompt, template=ChatTemplate()) for prompt in prompts]
        return [({f"{PROMPTS}template": "checkpoint"}, "prompts through the target's chat template", through)]
    variants: list[tuple[dict[str, Any], str, list[Prompt]]] = [(
        {f"{PROMPTS}template": "none"}, "prompts as plain text", [replace(prompt, template=None) for prompt in prompts]
    )]  # fmt: skip
    names = thinking_options(source)
    for thinking in (True, False) if names else ():
        options = dict.fromkeys(names, thinking)
        if not options.items() <= template.options.items():
            other = replace(template, options={**template.options, **options})
            label = f"prompts with thinking {'on' if thinking else 'off'}"
            variants.append(
                ({f"{PROMPTS}thinking": thinking}, label, [replace(prompt, template=other) for prompt in prompts])
            )
    return variants
