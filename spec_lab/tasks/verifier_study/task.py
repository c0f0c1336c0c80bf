"""The task: record texts, draft along them, verify with every verifier; write rows, a summary and figures."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
from rich.console import Console

from spec_lab.analysis.console import standard_output
from spec_lab.analysis.results.verifiers import result as verifiers_result
from spec_lab.core.options import Count, checked
from spec_lab.core.progress import Progress
from spec_lab.replay.bounds import for_summary
from spec_lab.results.study import load, parts
from spec_lab.results.table_parts import Rows
from spec_lab.tasks.lab import Lab, Settings
from spec_lab.tasks.shell import Done, Task
from spec_lab.tasks.verifier_study import pooled
from spec_lab.tasks.verifier_study.recorded import of_prompt, pairs, proposers_of
from spec_lab.text.prompts import check_one_turn


@checked
def study_verifiers(
    lab: Lab,
    settings: Settings,
    config: Mapping[str, Any],
    console: Console | None = None,
    *,
    every: Count = 4,
    repeats: Count = 5,
) -> int:
    """Draft along texts of the target with all proposers, and verify the same drafts with all verifiers.

    Rows are written prompt by prompt; the same command with the same directory resumes a stopped run.

    Args:
        lab: the parts: all proposers, and ``verifiers`` (without any: the one verifier).
        settings: the scalars.
        config: the configuration, for the manifest.
        console: for the final tables; default standard output.
        every: tokens between two drafts.
        repeats: how often each verification is timed.

    Returns:
        The exit code: 0, or 130 after Ctrl-C.

    Raises:
        ValueError: parts that do not fit each other, prompts that do not fit, a directory that holds another run.
        OSError: a directory that cannot be written.
    """
    console = console or standard_output()
    if settings.batch_size > 1:
        raise ValueError(
            f"batch_size must be 1 (got {settings.batch_size}): the verifier study drafts for one prompt at a time"
        )
    check_one_turn(lab.prompts, "task=verifier_study")
    proposers, requests = proposers_of(lab), lab.requests(settings)
    verifiers = dict(lab.verifiers) or {lab.verifier.name: lab.verifier}
    fitting, left_out = pairs(proposers, verifiers)
    facts = lab.facts()
    tables = parts(settings.output_dir, settings.record == "replay")

    def finished() -> set[int]:
        return set(load(settings.output_dir, "texts")["request"])

    def work(_: Mapping[str, Any]) -> Done:
        before = finished()
        todo = [request for request in requests if request.id not in before]
        if todo and settings.warmup:
            short = replace(todo[0], max_new_tokens=min(settings.warmup, settings.max_new_tokens))
            of_prompt(lab, proposers, fitting, short, settings.seed, every, repeats)
        for request in Progress(todo, desc=settings.name, unit="prompt"):
            options = settings.seed, every, repeats, replace(settings.recording, drafts=False)
            text, rows, replay = of_prompt(lab, proposers, fitting, request, *options)
            tables.write(f"{request.id:06d}", {"replay": replay, "recorded": rows, "texts": [text]})
            lab.tracker.group(request.id, _means(rows))
            if text["error"]:
                Progress.write(text["error"], file=sys.stderr)
        gathered = tables.gather()
        recorded, texts = gathered["recorded"], gathered["texts"]
        summary = {
            "experiment": settings.name,
            "target": lab.target.name,
            "temperature": lab.sampling.temperature,
            "every": every,
            "repeats": repeats,
            **pooled.summarise(recorded, texts, list(verifiers), {name: facts[name] for name in proposers}),
            "left_out": left_out,
        }
        if settings.record == "replay" and len(recorded):
            summary["bounds"] = {name: bound.summary() for name, bound in for_summary(settings.output_dir).items()}
        return Done(summary, verifiers_result)

    def left() -> tuple[int, str]:
        done = len(finished())
        return done, f"the rows of {done} of {len(requests)} prompts are in {settings.output_dir}"

    return Task(lab, settings, config, proposers, work, left, tables).run(console)


def _means(rows: Rows) -> dict[str, float]:
    """Return the mean expected accepted tokens of each pair, for the tracker."""
    if not rows:
        return {}
    each = pd.DataFrame(rows).groupby(["proposer", "verifier"])["expected_accepted"].mean()
    return {f"{proposer} {verifier} accepted": float(value) for (proposer, verifier), value in each.items()}
