"""``task=recommend``: check the options, run the stages, write the summary and the preset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from rich.console import Console

from spec_lab.analysis import metrics
from spec_lab.analysis.console import standard_output
from spec_lab.analysis.metrics.intervals import MIN_CLUSTERS
from spec_lab.analysis.results import recommendation
from spec_lab.core.options import Count, Filled, Number, WrongOption, checked
from spec_lab.core.progress import Progress
from spec_lab.propose import Null, Proposer
from spec_lab.replay.recorded_trees import VERIFIERS
from spec_lab.results.schema import CHECK_COLUMNS, TIMING_COLUMNS, TURN_COLUMNS
from spec_lab.results.writer import Recorder, Tables
from spec_lab.tasks.groups import BASELINE
from spec_lab.tasks.lab import Lab, Settings
from spec_lab.tasks.memory_check import check_memory
from spec_lab.tasks.recommend.confirm import Confirmed
from spec_lab.tasks.recommend.limits import TimeLimit, why_no_small_cache
from spec_lab.tasks.recommend.modes import SMALL_CACHE, WITHOUT_FILES, SpeculativeMode, families_of
from spec_lab.tasks.recommend.stages import Stages
from spec_lab.tasks.recommend.summary import check_projection, summarise
from spec_lab.tasks.shell import Done, Task


@checked
def recommend(
    lab: Lab,
    settings: Settings,
    config: Mapping[str, Any],
    console: Console | None = None,
    *,
    minutes: Annotated[float, Number(0, 10080, above=True)] = 10.0,
    drafters: Sequence[str | Mapping[str, Any]] = (),
    hardware: Filled = "h100-sxm",
    model: Filled | None = None,
    batches: Sequence[Count] = (1, 8, 32),
) -> int:
    """Recommend a speculative mode, or none, for a target, prompts and this machine.

    Args:
        lab: the parts, without a proposer.
        settings: the scalars; outputs are shortened where the time does not hold ``max_new_tokens``.
        config: the configuration, for the manifest.
        console: prints the tables; default standard output.
        minutes: time that all of it may take, from when the target is loaded.
        drafters: tried beside the modes that need no files: NAME or NAME:PATH of a proposer, such as eagle:DIR, or a
            mapping of a proposer and its options.
        hardware: device, or CSV file of devices, that measured modes are projected to, with model.
        model: the target's size there: a name, such as llama-3.1-8b, or the folder of a checkpoint; None: no
            projection.
        batches: batch sizes of the projection.

    Returns:
        The exit code: 0, or 130 after Ctrl-C.

    Raises:
        ValueError: an invalid option, a proposer, further arms, a constraint, a verifier that replay does not have, too
            few prompts, or a directory that holds another run.
        OSError: the directory cannot be written.
    """
    console = console or standard_output()
    families = [*WITHOUT_FILES, *families_of(drafters)]
    build = _check(lab, settings)
    if model is not None:
        check_projection(hardware, model)
    turns = lab.first_turns(settings)
    size = settings.batch_size
    order = np.random.default_rng(settings.seed).permutation(len(turns) // size)
    groups = [list(range(number * size, (number + 1) * size)) for number in order.tolist()]
    lab.check_later_turns(settings)
    lengths = lab.longest_prompts(settings, turns)
    memory = check_memory(lab, settings, lengths)
    context = float(np.mean(lengths)) + settings.max_new_tokens
    too_short = why_no_small_cache(lab.target.lm.work, size, context, SMALL_CACHE.mode.options["budget"])
    columns = [*TURN_COLUMNS * (lab.chat_facts() is not None), "policy", *TIMING_COLUMNS]
    columns += [*CHECK_COLUMNS * any(prompt.checker for prompt in lab.prompts)]
    recorder = Recorder(settings.output_dir, columns, "replay")

    def work(facts: Mapping[str, Any]) -> Done:
        limit = TimeLimit(minutes * 60)
        with Progress(total=round(limit.seconds), desc=settings.name, unit="second", clock=True) as bar:
            refused = {SMALL_CACHE.mode.name: too_short} if too_short else {}
            long = lab.target.lm.work is not None and not too_short
            stages = Stages(lab, settings, families, build, groups, recorder, limit, bar, refused, long_contexts=long)
            stages.measure_costs()
            stages.record()
            bar.set_postfix_str("judging")
            judged = stages.judge()
            few, confirmed = stages.confirm(judged)
            stages.keep()
        projected = None if model is None else (hardware, model, batches)
        summary = summarise(stages, judged, few, confirmed, settings.given, projected)
        tables = recorder.gather()
        return Done(summary | _times(tables, facts, stages.first, confirmed), recommendation.result)

    def left() -> tuple[int, str]:
        done = len(recorder.finished())
        return done, f"the rows of {done} groups are in {settings.output_dir}"

    more = {"memory": memory}
    leaves = "Rows, summary, manifest and the preset"
    return Task(lab, settings, config, [BASELINE], work, left, recorder.parts, more, leaves=leaves).run(console)


def _check(lab: Lab, settings: Settings) -> Callable[[SpeculativeMode], Proposer]:
    """Return what builds modes; refuse what a recommendation does not support.

    Raises:
        ValueError: names the option and what to set.
    """
    if not isinstance(lab.proposer, Null) or lab.more_proposers:
        raise ValueError(
            "task=recommend chooses the proposer: set proposer=none and arms={}, and name drafters in task.drafters "
            "(spec-lab recommend does so)"
        )
    if lab.peers or not settings.baseline:
        raise ValueError("task=recommend compares with the baseline alone: set baseline=true and peers={}")
    if lab.applied is not None:
        raise ValueError(
            "task=recommend supports no constraint, since replay supports none: set constraint=none, and leave out "
            "banned_strings, min_new_tokens and token_healing"
        )
    if lab.verifier.name not in VERIFIERS or not lab.verifier.lossless:
        raise ValueError(
            f"task=recommend judges modes by replay, with a lossless verifier; {lab.verifier.name} is not: set "
            "verifier=token"
        )
    if (groups := len(lab.prompts) // settings.batch_size) < MIN_CLUSTERS:
        raise WrongOption(
            f"prompts must hold at least {MIN_CLUSTERS * settings.batch_size} prompts, {MIN_CLUSTERS} groups of "
            f"batch_size={settings.batch_size}, over which intervals are computed; there are {groups} groups"
        )
    if lab.modes is None:
        raise ValueError("task=recommend builds its proposers from conf/: run it from the command line")
    return lab.modes


def _times(tables: Tables, facts: Mapping[str, Any], first: int, confirmed: Confirmed) -> dict[str, Any]:
    """Return the verdict on the times of the leader and the baseline; empty where it was not measured."""
    if not confirmed.groups.get(name := confirmed.leader):
        return {}
    groups = tables.requests.loc[(tables.requests["arm"] == name) & (tables.requests["group"] >= first), "group"]
    frames = (tables.forwards, tables.steps, tables.requests)
    kept = [rows[rows["group"].isin(groups) & rows["arm"].isin([name, BASELINE])] for rows in frames]
    return dict(metrics.run_verdict(Tables(*kept), facts).summary())
