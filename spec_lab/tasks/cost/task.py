"""``task=cost``: time steps at every batch size and context; write rows, a summary and a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Annotated, Any

from rich.console import Console

from spec_lab.analysis.console import standard_output
from spec_lab.analysis.projection.costs import TABLE
from spec_lab.analysis.results import cost
from spec_lab.core.files import write_text
from spec_lab.core.options import Count, Whole, WrongOption, checked
from spec_lab.core.progress import Progress
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.roofline import Roofline
from spec_lab.propose import Null
from spec_lab.tasks.cost.predict import forwards
from spec_lab.tasks.cost.summary import summarise, verdict
from spec_lab.tasks.cost.tables import parts
from spec_lab.tasks.cost.timing import Fixed, room, texts, time_arms
from spec_lab.tasks.lab import Lab, Loop, Settings
from spec_lab.tasks.shell import Done, Task
from spec_lab.text.prompts import encode


@checked
def measure(
    lab: Lab,
    settings: Settings,
    config: Mapping[str, Any],
    console: Console | None = None,
    *,
    nodes: Sequence[Annotated[int, Whole(0)]] = (0, 1, 2, 4, 8, 16, 26, 32, 64),
    batches: Sequence[Count] = (1, 2, 4, 8),
    contexts: Sequence[Count] = (64, 320, 1024),
    repeats: Count = 3,
    steps: Count = 6,
) -> int:
    """Time the steps of fixed draft trees and of the lab's own arms, at every batch size and context.

    ``forwards.csv`` has the costs as ``spec-lab project --costs`` reads them.

    In each repeat ``steps`` steps of every arm are timed at every pair of batch size and context, so the timings of one
    pair are spread over the whole run. The texts are the lab's prompts, joined and repeated. The rows of a pair are
    written when it has been timed; the same command with the same ``output_dir`` resumes the measurement.

    Args:
        lab: the parts; the proposers and the baseline are the arms.
        settings: the scalars; ``batch_size``, ``max_new_tokens`` and ``warmup`` are not used.
        config: the configuration, for the manifest.
        console: prints the final tables; default standard output.
        nodes: draft nodes of each sequence.
        batches: batch sizes.
        contexts: tokens before the measured steps.
        repeats: measurements of every batch size and context.
        steps: timed steps of each arm in a measurement.

    Returns:
        The exit code: 0, or 130 after Ctrl-C.

    Raises:
        ValueError: an invalid option, a context beyond the model's, a constraint, an incompatible pair of proposer and
            verifier, prompts that do not fit, or a directory that holds another run.
        OSError: the directory cannot be written.
    """
    console = console or standard_output()
    for name, values in (("nodes", nodes), ("batches", batches), ("contexts", contexts)):
        if not values:
            raise WrongOption(f"{name} must hold a number, such as [1,2,4]")
    nodes, batches, contexts = sorted({0, *nodes}), sorted({*batches}), sorted({*contexts})
    arms = _arms(lab, settings, nodes)
    longest = lab.target.context - room(arms, steps)
    if contexts[-1] > longest:
        raise WrongOption(
            f"contexts must be at most {longest}, not {contexts[-1]}: the model's context holds "
            f"{lab.target.context} tokens, of which {steps} timed steps may need {lab.target.context - longest}"
        )
    prompts = encode(lab.prompts, lab.target.tokenizer, lab.target.context, settings.max_prompt_tokens)
    tables = parts(settings.output_dir)
    measurements = list(product(range(repeats), batches, contexts))

    def finished() -> set[tuple[int, int, int]]:
        return set(tables.load()["cost"][["turn", "batch", "context"]].itertuples(index=False, name=None))

    def work(facts: Mapping[str, Any]) -> Done:
        before = finished()
        todo = [measurement for measurement in measurements if measurement not in before]
        for repeat, batch, context in Progress(todo, desc=settings.name, unit="measurement"):
            requests = texts(lab.target, prompts, lab.sampling, batch, context)
            rows = time_arms(arms, requests, repeat, steps)
            tables.write(f"{repeat:04d}-{batch:04d}-{context:06d}", {"cost": rows})
            none = next(row for row in rows if row["arm"] == "nodes 0")
            number = measurements.index((repeat, batch, context))
            lab.tracker.group(number, {"seconds without nodes": none["whole"]})
        frame = tables.gather()["cost"]
        summary = {"experiment": settings.name, "target": lab.target.name, "temperature": lab.sampling.temperature}
        summary |= {"turns": repeats, "steps": steps, "roofline": facts.get("roofline")}
        summary |= summarise(frame, Roofline.of(facts.get("roofline")))
        summary |= verdict(frame, facts).summary()
        drafting = {name: (name, arm.proposer.name) for name, arm in arms.items()
                    if not isinstance(arm.proposer, Fixed | Null)}  # fmt: skip
        write_text(settings.output_dir / TABLE, forwards(frame, drafting).to_csv(index=False))
        return Done(summary, cost.result)

    def left() -> tuple[int, str]:
        done = len(finished())
        return done, f"{done} of {len(measurements)} measurements are in {settings.output_dir}"

    roofline = lab.roofline()
    more = {"roofline": None if roofline is None else roofline.facts()}
    return Task(lab, settings, config, arms, work, left, tables, more).run(console)


def _arms(lab: Lab, settings: Settings, nodes: Sequence[int]) -> dict[str, Loop]:
    """Return the fixed trees and the arms of a benchmark with this lab, by name."""
    if lab.applied is not None:
        raise ValueError("task=cost does not support constraints; set constraint=none")
    if lab.peers:
        raise ValueError(f"task=cost times spec_lab's own steps, which peers do not run; remove peers {[*lab.peers]}")
    wide = lab.target.vocabulary
    fixed = {f"nodes {n}": Loop(lab.target, Fixed(n, wide), lab.verifier, CounterDraws(settings.seed)) for n in nodes}
    loops = {name: arm for name, arm in lab.arms(settings).items() if isinstance(arm, Loop)}
    if both := set(fixed) & set(loops):
        raise ValueError(f"arms.{both.pop()} has the name of a fixed tree; choose another name")
    return fixed | loops
