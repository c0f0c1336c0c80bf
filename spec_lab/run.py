"""A run: groups of prompts decoded by every arm in turn, and what it leaves behind.

An arm is one way to decode. The baseline is the null proposer in the same loop; arms take turns group by group (AB,
BA), so that whatever drifts on the machine drifts for all of them. Rows are built and written between groups, never
while the clock runs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from tqdm import tqdm

from spec_lab import figures, metrics, record, report, text
from spec_lab.batch import Request
from spec_lab.decode import Group, Round
from spec_lab.law import CounterDraws, Sampling
from spec_lab.manifest import claim, finite, manifest, write_json
from spec_lab.propose import Null, Proposer
from spec_lab.record import Outcome, Recorder
from spec_lab.target import Target
from spec_lab.track import Tracker
from spec_lab.verify import Match, Verifier, check_pair

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


@dataclass(frozen=True)
class Settings:
    """A run's scalars.

    Args:
        out: the run's directory.
        name: the experiment's.
        batch_size: prompts decoded together.
        max_new_tokens: most tokens emitted for each.
        warmup: tokens each arm decodes before anything is measured; 0 for none.
        seed: of every random choice.
        threads: of torch on the CPU; None leaves torch's own choice.
        baseline: whether every group is decoded autoregressively as well.
    """

    out: Path
    name: str
    batch_size: int
    max_new_tokens: int
    warmup: int
    seed: int
    threads: int | None
    baseline: bool

    def __post_init__(self) -> None:
        least = {"batch_size": 1, "max_new_tokens": 1, "warmup": 0, "seed": 0, "threads": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if name == "threads" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{name} must be a whole number of {low} or more, not {value!r}")
        if not isinstance(self.baseline, bool):
            raise ValueError(f"baseline must be true or false, not {self.baseline!r}")
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name must be a text that is not empty, not {self.name!r}")

    def use_threads(self) -> None:
        """Set torch's threads. Do it before the parts are built: some measure the machine while they load."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)

    @staticmethod
    def names() -> list[str]:
        """The names of the scalars that a config gives: all but ``out``."""
        return [one.name for one in fields(Settings) if one.name != "out"]


@dataclass(frozen=True)
class Decoded:
    """What an arm made of a group: every forward (none for arms that are not the project's loop), every outcome."""

    rounds: list[Round]
    outcomes: list[Outcome]


class Arm(Protocol):
    """One way to decode a group of requests."""

    def decode(self, requests: Sequence[Request]) -> Decoded:
        """Decode all requests, measuring."""
        ...


@dataclass(frozen=True)
class Loop:
    """The project's decode loop with a proposer and a verifier."""

    target: Target
    proposer: Proposer
    verifier: Verifier
    seed: int

    def decode(self, requests: Sequence[Request]) -> Decoded:
        """See ``Arm``. Only rounds are kept while the clock runs."""
        group = Group(self.target, self.proposer, self.verifier, requests, CounterDraws(self.seed))
        rounds = [record.slim(done) for done in group]
        clock = self.target.lm.clock
        clock.synchronise()
        return Decoded(rounds, record.outcomes(rounds, clock, group.errors))


@dataclass(frozen=True)
class Lab:
    """What a run is made of.

    Args:
        target: the model.
        proposer: drafts; the null proposer makes the run autoregressive, with the baseline as its only arm.
        verifier: decides.
        sampling: how every arm samples.
        prompts: what is continued.
        tracker: watches.
        beside: further proposers to measure in the same run, by the name of their arm.
        peers: other implementations to measure in the same run, by the name of their arm.
    """

    target: Target
    proposer: Proposer
    verifier: Verifier
    sampling: Sampling
    prompts: Sequence[text.Prompt]
    tracker: Tracker
    beside: Mapping[str, Proposer] = field(default_factory=dict)
    peers: Mapping[str, Arm] = field(default_factory=dict)

    def arms(self, settings: Settings) -> dict[str, Arm]:
        """Every arm by name.

        Raises:
            ValueError: a proposer whose way of drawing the verifier cannot judge, a name used twice, peers in a batch.
        """
        null = Null.load(self.target)
        baseline = Loop(self.target, null, Match(), settings.seed)
        arms: dict[str, Arm] = {}
        proposers = {"speculative": self.proposer, **self.beside}
        if isinstance(self.proposer, Null):
            del proposers["speculative"]
        for name, proposer in proposers.items():
            check_pair(proposer.name, proposer.drawn, self.verifier)
            arms[name] = Loop(self.target, proposer, self.verifier, settings.seed)
        if self.peers and settings.batch_size > 1:
            raise ValueError(f"peers decode one prompt at a time; set batch_size=1, not {settings.batch_size}")
        taken = {"speculative", "baseline"} & {*self.beside, *self.peers} | {*self.beside} & {*self.peers}
        if taken:
            raise ValueError(f"two arms are called '{taken.pop()}'; rename one under beside or peers")
        arms |= self.peers
        if settings.baseline or not arms:
            arms["baseline"] = baseline
        return arms

    def requests(self, settings: Settings) -> list[Request]:
        """The prompts as requests.

        Raises:
            ValueError: a prompt that does not fit the context; named.
        """
        encoded = text.encode(self.prompts, self.target.tokenizer, self.target.context)
        stop = stop_tokens(self.target)
        return [
            Request(number, prompt.name, tokens, self.sampling, settings.max_new_tokens, stop)
            for number, (prompt, tokens) in enumerate(zip(self.prompts, encoded, strict=True))
        ]


def stop_tokens(target: Target) -> frozenset[int]:
    """The tokens that the model's generation config and the tokenizer call the end."""
    config = getattr(target.lm.model, "generation_config", None)
    named = [getattr(config, "eos_token_id", None), getattr(target.tokenizer, "eos_token_id", None)]
    flat = [token for one in named for token in (one if isinstance(one, list) else [one])]
    return frozenset(token for token in flat if token is not None)


def run(lab: Lab, settings: Settings, config: Mapping[str, Any], console: Console | None = None) -> int:
    """Decode every group with every arm; leave tables, manifest, summary and figures in ``settings.out``.

    A directory that already holds a part of this very run is gone on with: its finished groups stay.

    Args:
        lab: the parts.
        settings: the scalars.
        config: the resolved configuration, for the manifest.
        console: where the final table goes; default standard output.

    Returns:
        The exit code: 0, or 130 after Ctrl-C.

    Raises:
        ValueError: parts that do not fit each other, prompts that do not fit, a directory that holds another run.
        OSError: a directory that cannot be written.
    """
    console = console or Console()
    arms, requests = lab.arms(settings), lab.requests(settings)
    extra = {"arms": list(arms), "proposers": _facts(lab)}
    facts = manifest(config, settings.seed, _weights(lab), text.digest(lab.prompts), extra)
    recorder, size = Recorder(settings.out), settings.batch_size
    claim(settings.out, facts)
    groups = {start // size: requests[start : start + size] for start in range(0, len(requests), size)}
    finished = recorder.finished()
    todo = {number: group for number, group in groups.items() if number not in finished}
    try:
        lab.tracker.start(settings.name, facts, settings.out)
        _warm_up(arms, requests[:size], settings.warmup if todo else 0)
        with tqdm(total=len(todo) * len(arms), desc=settings.name, unit="group", disable=None) as bar:
            for number, group in todo.items():
                rows = _decode_group(lab, settings, arms, number, group, bar)
                recorder.write(number, *rows)
                seen = _group_figures(rows[2])
                lab.tracker.group(number, seen)
                bar.set_postfix({name: f"{value:.3g}" for name, value in seen.items()})
        tables = recorder.gather()
        summary = _summary(lab, settings, tables)
        write_json(settings.out / "summary.json", summary)
        drawn = figures.draw(tables, settings.out / "figures")
        lab.tracker.finish(summary, drawn)
    except KeyboardInterrupt:
        done = recorder.gather().requests["group"].nunique()
        print(
            f"\nInterrupted: the rows of {done} finished groups of {len(groups)} are in {settings.out}; "
            f"run the same command with out={settings.out} to go on.",
            file=sys.stderr,
        )
        return INTERRUPTED
    finally:
        lab.tracker.close()
    report.show(summary, console)
    console.print(f"Rows, summary, manifest and figures: {settings.out}", soft_wrap=True, highlight=False)
    return 0


def _warm_up(arms: Mapping[str, Arm], requests: Sequence[Request], tokens: int) -> None:
    """Let every arm decode a little, unmeasured: memory is allocated and code paths are chosen on first use."""
    if tokens:
        short = [
            Request(one.id, one.name, one.tokens, one.sampling, min(tokens, one.max_new_tokens), one.stop)
            for one in requests
        ]
        for arm in arms.values():
            arm.decode(short)


def _decode_group(
    lab: Lab, settings: Settings, arms: Mapping[str, Arm], number: int, group: Sequence[Request], bar: Any
) -> tuple[record.Rows, record.Rows, record.Rows]:
    """Every arm's rows of one group; the arms' order rotates from group to group."""
    names, clock = list(arms), lab.target.lm.clock
    shift = number % len(names)
    rounds: record.Rows = []
    steps: record.Rows = []
    requests: record.Rows = []
    for order, name in enumerate(names[shift:] + names[:shift]):
        decoded = arms[name].decode(group)
        rounds += record.round_rows(decoded.rounds, clock, number, name)
        steps += record.step_rows(decoded.rounds, number, name)
        for outcome in decoded.outcomes:
            prompt = lab.prompts[outcome.request.id]
            shown = lab.target.tokenizer.decode(outcome.tokens, skip_special_tokens=True)
            requests.append(record.request_row(outcome, prompt, shown, settings.seed, number, name, order))
            if outcome.error:
                bar.write(f"{name}: {outcome.error}", file=sys.stderr)
        bar.update()
    return rounds, steps, requests


def _group_figures(requests: record.Rows) -> dict[str, float]:
    """Tokens per second of each arm in one group."""
    seconds: dict[str, float] = {}
    tokens: dict[str, int] = {}
    for row in requests:
        seconds[row["arm"]] = max(seconds.get(row["arm"], 0.0), row["decode_seconds"])
        tokens[row["arm"]] = tokens.get(row["arm"], 0) + row["decode_tokens"]
    return {f"{arm} tokens/s": tokens[arm] / spent for arm, spent in seconds.items() if spent > 0}


def _summary(lab: Lab, settings: Settings, tables: metrics.Tables) -> dict[str, Any]:
    names = metrics.arms(tables)
    main, verifier = names[0], lab.verifier
    if main == "baseline":
        verifier = Match()
    summary = {
        "experiment": settings.name,
        "target": lab.target.name,
        "proposer": lab.proposer.name,
        "verifier": verifier.name,
        "constraint": "none",
        "lossless": verifier.lossless,
        "certified": None,
        "temperature": lab.sampling.temperature,
        "batch_size": settings.batch_size,
        **metrics.summarise(tables, main),
        "arms": {name: metrics.summarise(tables, name) for name in names},
        "errors": tables.requests["error"][tables.requests["error"] != ""].tolist(),
    }
    return finite(summary)


def _facts(lab: Lab) -> dict[str, Any]:
    """What proposers say of themselves, such as the tree they chose."""
    proposers = {"speculative": lab.proposer, **lab.beside}
    return {
        name: {"name": one.name, "drawn": one.drawn, **getattr(one, "facts", {})} for name, one in proposers.items()
    }


def _weights(lab: Lab) -> dict[str, str]:
    parts: dict[str, Any] = {"target": lab.target, "proposer": lab.proposer, **lab.beside, **lab.peers}
    return {name: part.sha256 for name, part in parts.items() if hasattr(part, "sha256")}
