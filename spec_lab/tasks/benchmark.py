"""A run: groups of prompts decoded by every arm, its tables, summary and figures.

The arms alternate group by group (AB, BA; ABC, BCA, CAB, then these backwards), so that a drift of the
machine's speed affects all of them alike. Rows are built and written between groups, never while the clock runs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from multiprocessing import current_process
from pathlib import Path
from statistics import median
from typing import Any, Literal

import pandas as pd
from rich.console import Console

from spec_lab.analysis import metrics, tracking
from spec_lab.analysis.console import say, standard_output
from spec_lab.analysis.policy_text import policy_note
from spec_lab.analysis.tree_text import chosen_trees
from spec_lab.core.device_memory import Peak
from spec_lab.core.options import WrongOption, checked
from spec_lab.core.progress import Progress
from spec_lab.core.request import Request
from spec_lab.core.roofline import Roofline
from spec_lab.decode.capacity import max_at_once
from spec_lab.decode.step_info import EXPERT_COLUMNS
from spec_lab.propose import Null
from spec_lab.replay.bounds import ArmBounds, for_summary
from spec_lab.results import sources
from spec_lab.results.result import Result
from spec_lab.results.schema import CHECK_COLUMNS, DRAFT_COLUMNS, TIMING_COLUMNS, TURN_COLUMNS
from spec_lab.results.writer import Recorder, write_metrics
from spec_lab.tasks.certify.certificate import in_short
from spec_lab.tasks.groups import BASELINE, attempts, check_repeats, decode_group, next_attempts
from spec_lab.tasks.lab import GroupDecoder, Lab, Loop, Settings, Turn
from spec_lab.tasks.memory_check import check_memory
from spec_lab.tasks.shell import Done, Task
from spec_lab.tasks.token_texts import TokenTexts, token_rows
from spec_lab.verify import Match

LOG = logging.getLogger(__name__)

DRAWN = ("acceptance", "throughput", "phases")
"""Figures that are drawn at the end of a run; the page has more."""

MAX_MARGINS = 32
"""Most outputs of an arm whose margin is computed, a prefill each."""


@checked
def run(
    lab: Lab,
    settings: Settings,
    config: Mapping[str, Any],
    console: Console | None = None,
    *,
    history: Literal["own", "baseline"] = "own",
    repeat_disturbed: bool = False,
) -> int:
    """Decode every group with every arm; leave tables, manifest, summary and figures in ``settings.output_dir``.

    A directory that already holds a part of the same run is resumed: its finished groups stay. The same run means
    the same configuration, code, packages, machine, threads, weights, prompts and draft trees; a proposer that chose
    its tree by timing must be built with the one it began with (``manifest.begun_trees``).

    Args:
        lab: the parts.
        settings: the scalars.
        config: the configuration, for the manifest.
        console: where the final table goes; default standard output.
        history: which answers later turns of conversations continue: each arm's own; baseline: the baseline's.
        repeat_disturbed: decode disturbed groups again, with every arm, at most three times in all. The rows of an
            attempt replace those of the one before; the column ``attempt`` counts them.

    Returns:
        The exit code: 0, or 130 after Ctrl-C.

    Raises:
        ValueError: parts that do not fit each other, prompts that do not fit, a directory that holds another run.
        OSError: a directory that cannot be written.
    """
    console = console or standard_output(quiet=settings.overrides is not None)
    check_repeats(repeat_disturbed, lab, settings)
    settings = settings.with_record(lab.max_tokens(settings))
    arms, turns = lab.arms(settings), lab.first_turns(settings)
    if history == BASELINE and BASELINE not in arms:
        raise WrongOption("history=baseline requires the baseline's answers: set baseline=true")
    lab.check_later_turns(settings)
    memory = check_memory(lab, settings, lab.longest_prompts(settings, turns))
    recorder = Recorder(settings.output_dir, _columns(lab, settings), settings.record or "")
    size = settings.batch_size
    groups = {start // size: turns[start : start + size] for start in range(0, len(turns), size)}
    decoding = _Groups(lab, settings, config, arms, groups, recorder, history, repeat_disturbed, console)
    named = {"overrides": settings.overrides, "groups": len(groups), "parts": _named(lab, next(iter(arms.values())))}
    if lab.chat_facts() is not None:  # a template may show the date, or be changed
        tokens = json.dumps([turn.request.tokens for turn in turns])
        named["prompt_tokens_sha256"] = sha256(tokens.encode()).hexdigest()
    roofline = lab.roofline()
    named |= {"roofline": None if roofline is None else roofline.facts(), "memory": memory}
    return Task(lab, settings, config, arms, decoding.work, decoding.left, recorder.parts, named).run(console)


def _columns(lab: Lab, settings: Settings) -> list[str]:
    """Return the optional columns that the run writes."""
    policies = any("policy" in facts for facts in lab.facts().values())
    checks = any(prompt.checker for prompt in lab.prompts)
    columns = [*DRAFT_COLUMNS * settings.records_drafts, *["policy"] * policies]
    columns += EXPERT_COLUMNS * settings.count_experts
    columns += [*TURN_COLUMNS * (lab.chat_facts() is not None), *CHECK_COLUMNS * checks]
    return columns + [*TIMING_COLUMNS, *["cached_tokens"] * (settings.prefix_cache is not None)]


@dataclass(frozen=True)
class _Groups:
    """The groups of a run, which every arm decodes.

    Args:
        groups: the first turns of each group's conversations, by its number.
        history: as in ``run``.
        repeat_disturbed: as in ``run``.
        console: prints what is not a result.
    """

    lab: Lab
    settings: Settings
    config: Mapping[str, Any]
    arms: Mapping[str, GroupDecoder]
    groups: Mapping[int, Sequence[Turn]]
    recorder: Recorder
    history: Literal["own", "baseline"]
    repeat_disturbed: bool
    console: Console

    @property
    def requests(self) -> list[Request]:
        """The requests of the first turns."""
        return [turn.request for group in self.groups.values() for turn in group]

    def work(self, facts: Mapping[str, Any]) -> Done:
        """Decode the groups that are not on disk, those that were disturbed again, and sum up."""
        lab, settings, arms, console = self.lab, self.settings, self.arms, self.console
        waiting = _waiting(arms, min(settings.batch_size, len(self.requests)))
        for line in (*chosen_trees(lab.facts(), facts["proposers"]), *waiting):
            say(console, line)
        finished = self.recorder.finished()
        todo = [number for number in self.groups if number not in finished]
        peak = Peak.start(lab.target.lm.device)
        self._decode(dict.fromkeys(todo, 0))
        repeated = 0
        while self.repeat_disturbed and (again := next_attempts(metrics.load(settings.output_dir), facts)):
            repeated += len(again)
            console.print(
                f"Decoding {len(again)} disturbed groups again: {', '.join(map(str, again))}", highlight=False
            )
            self._decode(again)
        used: dict[str, Any] = {"memory": {**(facts.get("memory") or {}), **peak.facts(bool(todo or repeated))}}
        tables = self.recorder.gather()
        if lab.chat_facts() is not None:  # of the arm whose answers the later turns continue
            arm = BASELINE if self.history == BASELINE else metrics.arms(tables)[0]
            answers = tables.requests[tables.requests["arm"] == arm]
            used["answers"] = {"limit": settings.max_new_tokens, **metrics.cut_answers(answers)}
        if settings.prefix_cache is not None:
            used["cached_prompt_shares"] = metrics.cached_prompt_shares(tables.requests)
        bounds = for_summary(settings.output_dir) if settings.record == "replay" else {}
        with Progress(total=len(arms), desc="certificates", unit="arm", leave=False, disable=one_of_several()) as bar:
            bar.set_postfix_str("metrics")
            computed = metrics.own_metrics(lab.metrics, tables, metrics.arms(tables))
            write_metrics(settings.output_dir, computed.rows)
            summary = _summary(lab, settings, arms, tables, self.config, facts.get("roofline"), bounds, computed, bar)
            bar.set_postfix_str("comparing outputs")
            summary |= margins(lab, self.requests, tables)
        summary |= metrics.run_verdict(tables, facts).summary()
        if settings.overrides is not None:  # of a sweep, which prints no result
            for failure in computed.failures:
                LOG.warning("%s", failure)
        return Done(summary | used, _result, tables, drawn=DRAWN if settings.overrides is None else ())

    def left(self) -> tuple[int, str]:
        """Return the number of groups on disk, and a sentence that states it."""
        done = len(self.recorder.finished())
        return done, f"the rows of {done} finished groups of {len(self.groups)} are in {self.settings.output_dir}"

    def _decode(self, numbers: Mapping[int, int]) -> None:
        """Decode groups, given by number with the number of the attempt, and write their rows."""
        lab, settings, arms = self.lab, self.settings, self.arms
        texts = TokenTexts.of(lab.target) if settings.records_drafts else None
        turns = sum(lab.prompts[turn.conversation].turns for number in numbers for turn in self.groups[number])
        with Progress(total=turns * len(arms), desc=settings.name, unit="answer", disable=one_of_several()) as bar:
            if numbers and settings.warmup:
                bar.set_postfix_str("warming up")
                _warm_up(arms, self.requests[: settings.batch_size], settings.warmup)
                bar.set_postfix_str("")
            for number, attempt in numbers.items():
                group = self.groups[number]
                rows = decode_group(lab, settings, arms, number, group, bar, self.history, attempt)
                tokens = token_rows(number, rows.steps, texts) if texts is not None else []
                if attempt:  # only now, so that a run that is stopped meanwhile keeps the attempt before
                    self.recorder.discard(number)
                self.recorder.write(number, rows.forwards, rows.steps, rows.requests, rows.replay, tokens)
                main = next((name for name, arm in arms.items() if isinstance(arm, Loop)), "")
                seen = tracking.group_figures(pd.DataFrame(rows.requests), main)
                if not self.repeat_disturbed:  # one that may be decoded again is logged at the end
                    lab.tracker.group(number, seen)
                speeds = {key.rpartition("/")[0] or main: speed for key, speed in seen.items()}
                bar.set_postfix_str(f"{main} {speeds[main]:.3g} tokens/s" if main in speeds else "")


def one_of_several() -> bool:
    """Return whether other processes of a sweep share the screen, so that bars would run into each other."""
    return current_process().name != "MainProcess"


def _waiting(arms: Mapping[str, GroupDecoder], size: int) -> Iterator[str]:
    """Yield a line for each arm that cannot decode ``size`` requests at once."""
    for name, arm in arms.items():
        if not isinstance(arm, Loop):
            continue
        most, leaves = max_at_once(arm.proposer, arm.target), arm.target.lm.capabilities.leaves
        if most is not None and most < size:
            yield (
                f"{name}: {most} of {size} requests are decoded at once, the others wait, since a draft tree may have "
                f"{arm.proposer.nodes} leaves, and the target's runner supports {leaves} in all"
            )


def _warm_up(arms: Mapping[str, GroupDecoder], requests: Sequence[Request], tokens: int) -> None:
    """Let every arm decode a little, unmeasured: memory is allocated and code paths are chosen on first use.

    What proposers have learned from these requests is forgotten, since the same ones are measured.
    """
    short = [replace(request, max_new_tokens=min(tokens, request.max_new_tokens)) for request in requests]
    for arm in arms.values():
        arm.decode(short)
        if isinstance(arm, Loop):
            arm.forget()


def _result(folder: Path) -> Result:
    from spec_lab.analysis.results.run import written

    return written(folder)


def _summary(
    lab: Lab,
    settings: Settings,
    arms: Mapping[str, GroupDecoder],
    tables: metrics.Tables,
    config: Mapping[str, Any],
    roofline: Mapping[str, Any] | None,
    bounds: Mapping[str, ArmBounds],
    computed: metrics.OwnMetrics,
    bar: Progress,
) -> dict[str, Any]:
    """The contents of ``summary.json``: what all arms share, the main arm's figures, and every arm's under "arms".

    ``roofline`` holds the facts of the manifest: of a resumed run, from when it began. ``bounds`` are those of arms
    whose distributions were recorded, ``computed`` the values of the run's own metrics. ``bar`` counts the arms.
    """
    made_of = [{part: config.get(part) for part in ("proposer", "arms", "verifier")}, lab.weights(), lab.facts()]
    known = lab.target.cache.certificates
    each: dict[str, dict[str, Any]] = {}
    for name in metrics.arms(tables):
        bar.set_postfix_str(name)
        each[name] = (
            _parts(arms[name], [name, *made_of], known)
            | metrics.summarise(tables, name, roofline=Roofline.of(roofline))
            | {"decisions": policy_note(tables.steps, name, lab.facts().get(name, {}))}
            | (bounds[name].figures() if name in bounds else {})
            | ({"metrics": computed.figures[name]} if lab.metrics else {})
        )
        bar.update()
    main = next(iter(each.values()))
    return {
        "experiment": settings.name,
        "target": lab.target.name,
        "constraint": "none" if lab.applied is None else lab.applied.constraint.name,
        "constraint_facts": {} if lab.applied is None else lab.applied.facts,
        "temperature": lab.sampling.temperature,
        "sampling": asdict(lab.sampling),
        "kv_dtype": (config.get("target") or {}).get("kv_dtype"),
        "batch_size": settings.batch_size,
        "roofline": roofline,
        "groups": tables.requests["group"].nunique(),
        "broken_groups": len(metrics.broken_groups(tables.requests)),
        "short_groups": len(metrics.short_groups(tables.requests)),
        "repeated_groups": {str(number): attempt for number, attempt in attempts(tables).items() if attempt},
        **main,
        "arms": each,
        "against": metrics.speedups_over_peers(tables),
        **({"bounds": {name: bound.summary() for name, bound in bounds.items()}} if bounds else {}),
        **({"own_metrics": _own(lab, config, computed.failures)} if lab.metrics else {}),
        "errors": tables.requests["error"][tables.requests["error"] != ""].tolist(),
    }


def _own(lab: Lab, config: Mapping[str, Any], failures: Sequence[str]) -> dict[str, Any]:
    """Return which metrics of one's own were computed, by which code, and what could not be.

    They are no part of the manifest: the rows do not depend on them, and a run that is resumed may have others.
    """
    named = {"metrics": config.get("metrics")}
    return {"config": named["metrics"], "code": sources.code(named, (), lab.target.cache), "failures": list(failures)}


def margins(lab: Lab, requests: Sequence[Request], tables: metrics.Tables) -> dict[str, Any]:
    """Return "output_margins" of ``summary.json``: by how much logits differ where greedy outputs first do.

    Of each arm with other outputs than the baseline's, over at most ``MAX_MARGINS`` of these outputs, of conversations
    only the first: the difference of the target's logits of the two tokens after the common text, by plain decoding.
    Rounding changes the arg max only where it is small.
    """
    margins: dict[str, Any] = {}
    if lab.sampling.temperature == 0 and not lab.sampling.penalized:
        lab.target.lm.capture(())
        prompts = {request.id: request.tokens for request in requests}
        firsts = tables.requests[tables.requests["request"].isin(prompts)]
        for arm in metrics.arms(tables):
            each = []
            for difference in metrics.first_differences(firsts, arm)[:MAX_MARGINS]:
                text = [*prompts[difference.request], *difference.before]
                try:
                    logits = lab.target.plain_logits(text, len(text))[0].float()
                except RuntimeError as error:  # out of memory: a forward of the whole text is larger than a step
                    LOG.warning("The difference of logits of %s is not known: %s", difference.request, error)
                    continue
                each.append(float((logits[difference.token] - logits[difference.expected]).abs()))
            if each:
                margins[arm] = {"outputs": len(each), "median": median(each), "largest": max(each)}
    return {"output_margins": margins}


def _named(lab: Lab, main: GroupDecoder) -> dict[str, Any]:
    """The parts that the main arm is made of, by name, as known before anything is decoded."""
    named: dict[str, Any] = {"constraint": "none" if lab.applied is None else lab.applied.constraint.name}
    if isinstance(main, Loop):
        verifier = main.verifier
        named |= {"proposer": main.proposer.name, "verifier": verifier.name, "lossless": verifier.lossless}
        named |= {"invalid_text": True} if verifier.invalid_text else {}
    return named


def _parts(arm: GroupDecoder, made_of: Sequence[Any], known: dict[tuple[Any, ...], dict[str, Any]]) -> dict[str, Any]:
    """Return an arm's proposer and verifier, and whether the pair is lossless; None for other implementations.

    Args:
        made_of: its name, and the options, weights and facts of all pairs of the run: they identify the pair.
        known: what ``in_short`` found before, by pair (``ProcessCache.certificates``).
    """
    if not isinstance(arm, Loop):
        return {"proposer": None, "verifier": None, "lossless": None, "certified": None}
    parts = {"proposer": arm.proposer.name, "verifier": arm.verifier.name, "lossless": arm.verifier.lossless}
    parts |= {"invalid_text": True} if arm.verifier.invalid_text else {}
    constrained = None if arm.applied is None else arm.applied.distribution
    proposer = type(arm.proposer), arm.proposer.name, arm.proposer.drawn, arm.proposer.nodes
    pair = (*proposer, type(arm.verifier), repr(arm.verifier), constrained)
    baseline = isinstance(arm.proposer, Null) and isinstance(arm.verifier, Match)
    key = (*pair, "" if baseline else json.dumps(made_of, sort_keys=True, default=str))
    if key not in known:
        known[key] = in_short(arm.proposer, arm.verifier, constrained)
    return parts | known[key]
