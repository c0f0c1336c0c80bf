"""The task: answers of the target, every reading of the drafter along them, tables, ``summary.json`` and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from rich.console import Console

from spec_lab.analysis.console import standard_output
from spec_lab.analysis.results import drafter_check
from spec_lab.core.options import Filled, Number, WrongOption, checked
from spec_lab.core.progress import Progress
from spec_lab.core.request import Request
from spec_lab.core.user_cache import default_folder
from spec_lab.decode.proposer import Proposer
from spec_lab.policy.adaptive import Adaptive
from spec_lab.propose import Null
from spec_lab.tasks.check_drafter.acceptance import by_depth, by_range, calibration
from spec_lab.tasks.check_drafter.along_text import Answer, Predicted, draft_depth, follows_tree, predicted
from spec_lab.tasks.check_drafter.kept_texts import KeptTexts
from spec_lab.tasks.check_drafter.readings import TriedReading, alike, try_readings
from spec_lab.tasks.lab import Lab, Settings
from spec_lab.tasks.shell import Done, Task
from spec_lab.tasks.training_answers import known_answers, sampled_otherwise, texts_hash
from spec_lab.text.answers import AnsweredText, check_source
from spec_lab.text.prompts import Prompt, check_one_turn
from spec_lab.train.record import answer


@checked
def check(
    lab: Lab,
    settings: Settings,
    config: Mapping[str, Any],
    console: Console | None = None,
    *,
    expect: Annotated[float, Number(1)] | None = None,
    answers_from: Filled | None = None,
) -> int:
    """Measure how well the drafter predicts the target's answers, under every reading that its files leave open.

    What was measured is kept: the same command with the same ``output_dir`` resumes there.

    Args:
        lab: the parts: target, proposer, prompts and sampling.
        settings: the scalars; ``batch_size`` answers are drafted along together.
        config: the configuration, for the manifest.
        console: prints the tables; default standard output.
        expect: published tokens of a step to compare with; None: none.
        answers_from: folder of an earlier run, or JSON lines of messages with answers of the target, along which is
            drafted; None: the target answers the prompts.

    Returns:
        The exit code: 0, or 130 after Ctrl-C.

    Raises:
        ValueError: no proposer that drafts; fewer than two prompts, or answers of one token; a constraint; answers of
            another target or sampling; a directory that holds another run.
        OSError: the directory cannot be written.
    """
    console = console or standard_output()
    proposer = lab.proposer.proposer if isinstance(lab.proposer, Adaptive) else lab.proposer
    if isinstance(proposer, Null) or not proposer.nodes:
        raise ValueError("task=check_drafter: no proposer drafts: choose one, such as proposer=eagle")
    if lab.applied is not None:
        raise ValueError("task=check_drafter does not support constraints: set constraint=none")
    check_source(answers_from)
    if answers_from is None:
        check_one_turn(lab.prompts, "task=check_drafter")
    elif other := sampled_otherwise(answers_from, lab.sampling):
        raise WrongOption(
            f"answers_from={answers_from} holds answers of {other}: figures are of answers that are sampled as the run "
            "samples; set it to the same, or name another run"
        )
    known = None if answers_from is None else known_answers(lab, settings, config, answers_from)
    if len(lab.prompts if known is None else {text.name for text in known}) < 2:
        raise ValueError("task=check_drafter requires two prompts or conversations: its intervals are over them")
    depth, prompts = draft_depth(proposer), lab.prompts if known is None else ()
    kept, answers = KeptTexts(settings.output_dir / "readings"), list[Answer]()

    def measured(drafter: Proposer, others: Sequence[Prompt] | None) -> list[Predicted]:
        def measure() -> list[Predicted]:
            texts = answers if others is None else answered(replace(lab, prompts=others), settings)
            return predicted(lab.target, drafter, texts, settings.batch_size, lab.sampling, depth)

        return kept.of(drafter.reading, others, measure)

    def work(_: Mapping[str, Any]) -> Done:
        answers[:] = answered(lab, settings) if known is None else given(known, lab, settings)
        with Progress(desc=settings.name, unit="reading") as bar:

            def tick(done: int, total: int) -> None:
                bar.total = total
                bar.update(done)

            tried, best = try_readings(proposer, prompts, lab.target, lab.rebuild, measured, tick)
        return Done(summarise(lab, proposer, settings, tried, best, expect), drafter_check.result)

    def left() -> tuple[int, str]:
        return len(kept), f"{len(kept)} readings are measured in {kept.folder}"

    facts = {} if known is None else {"prompt_tokens_sha256": texts_hash(known)}
    leaves = "Summary, manifest and figures"
    return Task(lab, settings, config, [proposer.name], work, left, more=facts, leaves=leaves, resumes=True).run(
        console
    )


def answered(lab: Lab, settings: Settings) -> list[Answer]:
    """Return the target's answers to the first turns of all prompts.

    Raises:
        ValueError: a prompt that does not fit; no answer has a second token; an answer broke.
    """
    requests, folder = lab.requests(settings), (default_folder() or settings.output_dir) / "answers"
    texts = answer(lab.target, requests, settings.batch_size, settings.seed, lab.pieces, folder)
    return _long_enough([Answer(request, text.tokens) for request, text in zip(requests, texts, strict=True)])


def given(texts: Sequence[AnsweredText], lab: Lab, settings: Settings) -> list[Answer]:
    """Return answers that exist already.

    Raises:
        ValueError: no answer has a second token.
    """
    answers, conversations = list[Answer](), dict[str, int]()
    for text in texts:
        conversation = conversations.setdefault(text.name, len(conversations))
        for prompt, tokens in text.each():
            request = Request(len(answers), text.name, prompt, lab.sampling, settings.max_new_tokens, lab.target.ends)
            answers.append(Answer(request, (*prompt, *tokens), conversation))
    return _long_enough(answers)


def _long_enough(answers: list[Answer]) -> list[Answer]:
    if all(len(answer.tokens) - len(answer.request.tokens) < 2 for answer in answers):
        raise ValueError("task=check_drafter requires answers of two tokens or more: set a larger max_new_tokens")
    return answers


def summarise(
    lab: Lab, proposer: Proposer, settings: Settings, tried: Sequence[TriedReading], best: TriedReading,
    expect: float | None,
) -> dict[str, Any]:  # fmt: skip
    """Return the contents of ``summary.json``, of a drafter's readings, that in use first."""
    used, shown = tried[0], best.texts
    assert used.texts is not None and shown is not None
    trained = used.reading.trained_context
    texts = {"used": used.texts} | ({} if best is used else {"best": shown})
    known = [~np.isnan(by_depth(reading.texts, "agreed")) for reading in tried if reading.texts]
    drafted = np.any(known, axis=0).nonzero()[0]
    return {
        "experiment": settings.name,
        "target": lab.target.name,
        "proposer": lab.proposer.name,
        "temperature": lab.sampling.temperature,
        "depth": int(drafted.max()) + 1 if len(drafted) else draft_depth(proposer),
        "tree": follows_tree(proposer),
        "texts": len(used.texts),
        "tokens": sum(len(text.accepted) for text in used.texts),
        "trained_context": trained,
        "reading": used.reading.values,
        "best_reading": best.reading.values,
        "gain": best.tau.mean - used.tau.mean,
        "best": tried.index(best),
        "alike": [
            tried.index(other)
            for other in alike(best, tried[1:])
            if other is not best and other.helps and other.changed.keys() == best.changed.keys()
        ],
        "readings": [reading.facts() for reading in tried],
        "by_position": {name: by_range(along, False) for name, along in texts.items()},
        "by_context": {name: by_range(along, True, trained) for name, along in texts.items()},
        "calibration": {name: calibration(along) for name, along in texts.items()}
        | {f"{name}_head": facts for name, along in texts.items() if (facts := calibration(along, head=True))},
        "expected": None if expect is None else explained(expect, tried, best),
    }


def explained(expect: float, tried: Sequence[TriedReading], best: TriedReading) -> dict[str, Any]:
    """Return what explains the difference between a published tau and that of the reading in use.

    Asked are, in this order: sampling, whether the interval over texts holds the published value; a reading of the
    drafter that helps; and the template and thinking mode of the prompts. A change explains the difference if its
    interval holds the value, and a part of it if the tau is nearer to it.

    Args:
        expect: the published tau.
        tried: all readings, that in use first.
    """
    used = tried[0].tau
    if used.low <= expect <= used.high:
        return {"value": expect, "by": "sampling", "changed": {}, "whole": True}
    reasons = [("reading", best)] if best is not tried[0] else []
    reasons += [("prompts", reading) for reading in tried if reading.of_prompts and reading.texts is not None]
    nearer: list[tuple[float, str, TriedReading]] = []
    for by, reading in reasons:
        mean, low, high = reading.tau
        if low <= expect <= high:
            return {"value": expect, "by": by, "changed": dict(reading.changed), "whole": True}
        if reading.gain is not None and (reading.gain.low > 0 or reading.gain.high < 0):
            nearer.append((abs(expect - mean), by, reading))
    away, by, reading = min(nearer, key=lambda reason: reason[0], default=(float("inf"), "", best))
    if away < abs(expect - used.mean):
        return {"value": expect, "by": by, "changed": dict(reading.changed), "whole": False}
    return {"value": expect, "by": "nothing", "changed": {}, "whole": False}
