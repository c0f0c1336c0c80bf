"""Decode one group of prompts, or of conversations turn by turn, with every arm.

A conversation's later request is made when every arm has answered the one before, and continues either the arm's own
answers or the baseline's. All turns of a group are one unit of pairing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spec_lab.analysis import metrics
from spec_lab.core.machine import Usage, other_load
from spec_lab.core.request import BROKEN
from spec_lab.results import writer
from spec_lab.results.writer import Outcome
from spec_lab.tasks.lab import GroupDecoder, Lab, Settings, Turn, shared_store
from spec_lab.text.checkers import reply

BASELINE = "baseline"

MAX_ATTEMPTS = 3
"""Largest number of times that a group is decoded where disturbed ones are repeated."""


@dataclass
class GroupRows:
    """The rows of one group."""

    forwards: writer.Rows = field(default_factory=list)
    steps: writer.Rows = field(default_factory=list)
    requests: writer.Rows = field(default_factory=list)
    replay: writer.Rows = field(default_factory=list)


def decode_group(
    lab: Lab,
    settings: Settings,
    arms: Mapping[str, GroupDecoder],
    number: int,
    group: Sequence[Turn],
    bar: Any,
    history: str = "own",
    attempt: int = 0,
) -> GroupRows:
    """Decode a group with every arm, the arms in the group's order; return its rows.

    Args:
        group: the first turns of its conversations.
        bar: the progress bar; it counts requests, and prints why one broke.
        history: which answers later turns continue: "own", each arm its own, or "baseline".
        attempt: how often the group was decoded before and discarded.
    """
    rows, order = GroupRows(), arm_order(list(arms), number)
    todo = {name: list(group) for name in order}
    replies: dict[str, dict[int, list[str]]] = {name: {turn.conversation: [] for turn in group} for name in order}
    forwards = dict.fromkeys(order, 0)
    while any(todo.values()):
        for position, name in enumerate(order):
            if not todo[name]:
                continue
            turn = todo[name][0].number
            began = Usage.now()
            decoded = arms[name].decode([turn.request for turn in todo[name]])
            load = other_load(began, Usage.now())
            of_forwards, own_steps = writer.rows_of(decoded.steps, number, name, turn, forwards[name])
            rows.replay += writer.replay_rows_of(decoded.steps, number, name, lab.target.vocabulary, forwards[name])
            forwards[name] += len(of_forwards)
            rows.forwards += of_forwards
            rows.steps += own_steps
            by_request = {turn.request.id: turn for turn in todo[name]}
            for outcome in decoded.outcomes:
                answered = by_request[outcome.request.id]
                row = _row(lab, settings, outcome, answered, number, name, position, load, attempt)
                rows.requests.append(row)
                if outcome.error:
                    bar.write(f"{name}: {outcome.error}", file=sys.stderr)
                if len(replies[name][answered.conversation]) < turn and outcome.kept and outcome.finish not in BROKEN:
                    replies[name][answered.conversation].append(reply(row["text"], row["prompt"]))
            bar.update(len(todo[name]))
        for position, name in enumerate(order):
            answers = replies[name if history == "own" else BASELINE]
            todo[name], broken = _next_turns(lab, settings, todo[name], answers)
            for outcome, answered in broken:
                rows.requests.append(_row(lab, settings, outcome, answered, number, name, position, None, attempt))
                bar.write(f"{name}: {outcome.error}", file=sys.stderr)
                bar.update(1)
    return rows


def check_repeats(repeat_disturbed: bool, lab: Lab, settings: Settings) -> None:
    """Refuse to repeat groups where a repetition would profit from the attempt before.

    Raises:
        ValueError: names the option.
    """
    if not isinstance(repeat_disturbed, bool):
        raise ValueError(f"task.repeat_disturbed must be true or false, not {repeat_disturbed!r}")
    if not repeat_disturbed:
        return
    why = "an arm would decode a group again with what it kept of the first attempt"
    if settings.prefix_cache is not None:
        raise ValueError(f"task.repeat_disturbed=true does not support prefix_cache: {why}. Set prefix_cache=null")
    proposers = [lab.proposer, *lab.more_proposers.values()]
    if stores := [proposer.name for proposer in proposers if shared_store(proposer)]:
        raise ValueError(
            f"task.repeat_disturbed=true does not support proposers that learn across requests ({', '.join(stores)}): "
            f"{why}. Set task.repeat_disturbed=false"
        )


def attempts(tables: metrics.Tables) -> dict[int, int]:
    """Return how often each group was decoded before and discarded."""
    if "attempt" not in tables.requests:  # an older run
        return {}
    return {int(group): int(times) for group, times in tables.requests.groupby("group")["attempt"].max().items()}


def next_attempts(tables: metrics.Tables, facts: Mapping[str, Any]) -> dict[int, int]:
    """Return the number of the next attempt of each disturbed group that may be decoded again."""
    disturbed = metrics.disturbed(metrics.units_of_run(tables), metrics.Resources.of(facts))
    done = attempts(tables)
    return {group: done[group] + 1 for group in disturbed if done[group] + 1 < MAX_ATTEMPTS}


def arm_order(names: list[str], number: int) -> list[str]:
    """Return the arms' order in a group: rotated by one from group to group, every second full rotation backwards.

    Two arms only rotate, as the two orders are each other's reverse.
    """
    shift = number % len(names)
    order = names[shift:] + names[:shift]
    return order[::-1] if len(names) > 2 and number // len(names) % 2 else order


def _next_turns(
    lab: Lab, settings: Settings, turns: Sequence[Turn], replies: Mapping[int, Sequence[str]]
) -> tuple[list[Turn], list[tuple[Outcome, Turn]]]:
    """Return the next turn of each conversation that has one, and the outcomes of those that cannot be continued.

    A conversation whose turn broke has no next one: its group is left out of the figures.
    """
    following: list[Turn] = []
    broken: list[tuple[Outcome, Turn]] = []
    for turn in turns:
        answers = replies[turn.conversation]
        if turn.number == lab.prompts[turn.conversation].turns or len(answers) < turn.number:
            continue
        try:
            following.append(lab.turn(settings, turn.conversation, answers))
        except ValueError as error:  # too long for the context, or refused by the chat template
            number, name = turn.number + 1, lab.prompts[turn.conversation].name
            request = replace(turn.request, id=turn.request.id + len(lab.prompts), name=f"{name}, turn {number}")
            failed = Turn(turn.conversation, number, replace(turn.prompt, name=request.name, checker=""), request)
            broken.append((Outcome(request, [], "stuck", 0, 0, 0.0, 0.0, 0.0, error=str(error)), failed))
    return following, broken


def _row(
    lab: Lab,
    settings: Settings,
    outcome: Outcome,
    turn: Turn,
    group: int,
    arm: str,
    order: int,
    other_cores: float | None,
    attempt: int,
) -> dict[str, Any]:
    """Return the row of an outcome."""
    shown = lab.shown(outcome.request, outcome.tokens), lab.ends(outcome.request, outcome.tokens)
    return writer.request_row(
        outcome, turn.prompt, *shown, settings.seed, group, arm, order,
        lab.prompts[turn.conversation].name, turn.number, other_cores, attempt,
    )  # fmt: skip
