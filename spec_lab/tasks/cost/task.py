"""The task: time rounds at every batch size and context, and leave rows, a summary and a figure behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from rich.console import Console
from tqdm import tqdm

from spec_lab.analysis.names import names_in_manifest
from spec_lab.core.options import whole
from spec_lab.propose import branches, draws_of
from spec_lab.tasks.cost import show
from spec_lab.tasks.cost.tables import parts
from spec_lab.tasks.cost.turns import Fixed, room, take_turns, texts
from spec_lab.tasks.lab import Lab, Loop, Settings
from spec_lab.tasks.shell import Done, Task
from spec_lab.text.prompts import encode
from spec_lab.verify import check_pair


def measure(
    lab: Lab,
    settings: Settings,
    config: Mapping[str, Any],
    console: Console | None = None,
    *,
    nodes: Sequence[int] = (0, 1, 2, 4, 8, 16, 26, 32, 64),
    batches: Sequence[int] = (1, 2, 4, 8),
    contexts: Sequence[int] = (64, 256, 1024),
    turns: int = 5,
    rounds: int = 6,
) -> int:
    """Time the rounds of fixed trees of so many nodes below each sequence, and of the lab's own arms.

    A place is a batch size with a context. In each turn every arm decodes some rounds at every place, so that what is
    timed at a place is spread over the whole measurement. The texts are the lab's prompts, joined and repeated. Rows
    reach the disk turn by turn and place by place; the same command with the same directory goes on where it stopped.

    Args:
        lab: the parts; the proposers are the arms, and the baseline.
        settings: the scalars; ``batch_size``, ``max_new_tokens`` and ``warmup`` say nothing here.
        config: the configuration, for the manifest.
        console: where the final table goes; default standard output.
        nodes: of the fixed trees; 0, the baseline's, is always among them.
        batches: sequences decoded together.
        contexts: tokens of each sequence.
        turns: of every arm at every place.
        rounds: timed in each turn.

    Returns:
        The exit code: 0, or 130 after Ctrl-C.

    Raises:
        ValueError: options that make no sense, a context beyond the model's, a constraint, parts that do not fit each
            other, prompts that do not fit, a directory that holds another run.
        OSError: a directory that cannot be written.
    """
    console = console or Console()
    nodes = sorted({0, *_sizes("task.nodes", nodes, 0)})
    batches, contexts = _sizes("task.batches", batches), _sizes("task.contexts", contexts)
    whole("task.turns", turns)
    whole("task.rounds", rounds)
    arms = _arms(lab, settings, nodes)
    longest = lab.target.context - room(arms, rounds)
    if contexts[-1] > longest:
        raise ValueError(
            f"task.contexts may go up to {longest}, not {contexts[-1]}: the model's context holds {lab.target.context} "
            f"tokens, of which the drafts of {rounds} rounds may need {lab.target.context - longest}"
        )
    prompts = encode(lab.prompts, lab.target.tokenizer, lab.target.context, settings.max_prompt_tokens)
    tables = parts(settings.output_dir)
    visits = list(product(range(turns), batches, contexts))

    def finished() -> set[tuple[int, int, int]]:
        return set(tables.load()["cost"][["turn", "batch", "context"]].itertuples(index=False, name=None))

    def work(facts: Mapping[str, Any]) -> Done:
        before = finished()
        todo = [visit for visit in visits if visit not in before]
        for turn, batch, context in tqdm(todo, desc=settings.name, unit="place", disable=None):
            requests = texts(lab.target, prompts, lab.sampling, batch, context)
            rows = take_turns(arms, requests, turn, rounds)
            tables.write(f"{turn:04d}-{batch:04d}-{context:06d}", {"cost": rows})
            none = next(row for row in rows if row["arm"] == "nodes 0")
            lab.tracker.group(visits.index((turn, batch, context)), {"seconds without nodes": none["whole"]})
        frame = tables.gather()["cost"]
        summary = {"experiment": settings.name, "target": lab.target.name, "temperature": lab.sampling.temperature}
        summary |= {"turns": turns, "rounds": rounds, **show.summarise(frame)}
        names = names_in_manifest(facts)

        def tell(found: Mapping[str, Any]) -> None:
            arms = [{**one, "arm": names.get(one["arm"], one["arm"])} for one in found["arms"]]
            show.tell({**found, "arms": arms}, console)

        return Done(summary, lambda: show.draw(frame, settings.output_dir / "figures"), tell)

    def left() -> tuple[int, str]:
        done = len(finished())
        return done, f"{done} of {len(visits)} visits to a place are in {settings.output_dir}"

    return Task(lab, settings, config, arms, work, left, tables).run(console)


def _arms(lab: Lab, settings: Settings, nodes: Sequence[int]) -> dict[str, Loop]:
    """The fixed trees, and the arms that a run of this lab would have."""
    if lab.binding is not None:
        raise ValueError("costs are measured without a constraint; set constraint=none")
    if lab.peers:
        raise ValueError(f"costs are measured by the project's loop, which peers have not; leave out {[*lab.peers]}")
    wide = lab.target.vocabulary
    fixed = {f"nodes {n}": Loop(lab.target, Fixed(n, wide), lab.verifier, settings.seed) for n in nodes}
    own = {name: arm for name, arm in lab.arms(settings).items() if isinstance(arm, Loop)}
    if both := set(fixed) & set(own):
        raise ValueError(f"an arm is called '{both.pop()}', as a fixed tree is; rename it under arms")
    arms = fixed | own
    for arm in arms.values():  # before anything is written
        check_pair(arm.proposer.name, draws_of(arm.proposer), arm.verifier, branches(arm.proposer))
    return arms


def _sizes(name: str, values: Sequence[int], least: int = 1) -> list[int]:
    """The values, rising.

    Raises:
        ValueError: no list of whole numbers; names the option.
    """
    if isinstance(values, str) or not isinstance(values, Sequence) or not len(values):
        raise ValueError(f"{name} must be a list of whole numbers such as [1,2,4], not {values!r}")
    return sorted({whole(name, value, least) for value in values})
