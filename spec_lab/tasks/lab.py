"""What a run is made of: its scalars, its parts, and its arms.

An arm is one way to decode. The baseline is the null proposer in the same loop.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import torch

from spec_lab.analysis.tracking import Tracker
from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.healing import heal
from spec_lab.constrain.protocol import Composite, PerRequestSource
from spec_lab.core import machine_limits
from spec_lab.core.options import brief, file_name, strings, whole
from spec_lab.core.probabilities import Sampling
from spec_lab.core.protocols import Hashed, Threaded, facts_of
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.roofline import Roofline
from spec_lab.engine.engine import fixed_group
from spec_lab.engine.prefix_cache import PrefixCache, check_prefix_cache
from spec_lab.engine.proposer import forget
from spec_lab.engine.request import Request
from spec_lab.engine.step import StepInfo
from spec_lab.models.target import Target
from spec_lab.propose import LearnsAcrossRequests, Null, Proposer, branches, check_requires, check_sampling, draws_of
from spec_lab.results import writer
from spec_lab.results.writer import Outcome
from spec_lab.text.detokenizer import Rules, plain
from spec_lab.text.prompts import Prompt, encode
from spec_lab.text.strings import check_strings
from spec_lab.verify import Match, Verifier, check_pair

MOST_NODES = 2**14
"""Most nodes drafted in a step, for all sequences together: the tree attention mask has the square of their number."""


@dataclass(frozen=True)
class Settings:
    """A run's scalars.

    Args:
        output_dir: the run's directory.
        name: the experiment's; at most 100 characters, without slashes.
        batch_size: prompts decoded together; at most 1024.
        max_new_tokens: most tokens emitted for each; at most 2**20.
        warmup: tokens each arm decodes before anything is measured; 0 for none, at most 2**20.
        seed: of every random choice, below 2**63.
        threads: of torch on the CPU, at most four for each core; None leaves torch's own choice.
        baseline: whether every group is decoded autoregressively as well.
        stop_strings: strings that end a text; at most 256, of 4096 bytes each and 65536 in all.
        banned_strings: strings that never appear; the same limits.
        min_new_tokens: before a text may end.
        token_healing: whether the prompts' last tokens are taken off and generated anew, beginning with the same bytes.
        max_prompt_tokens: of longer prompts the middle is left out; None leaves nothing out. At most 2**31 - 1.
        prefix_cache: most tokens of finished requests whose KV cache each arm keeps, for later ones that begin with the
            same tokens; at least 256, at most 2**31 - 1. None keeps none.
        record_drafts: whether the table ``steps`` keeps every drafted token with its target and draft probability.
        verbose: whether tables in the terminal have all their columns.
        overrides: of a job of a sweep, the options that differ between its jobs; None of a single run. A job of a sweep
            prints no table and draws no figures.
        config_sha256: SHA-256 of the resolved configuration without secrets: the configuration itself is written with
            the names of environment variables, not with their values.
    """

    output_dir: Path
    name: str
    batch_size: int
    max_new_tokens: int
    warmup: int
    seed: int
    threads: int | None
    baseline: bool
    stop_strings: Sequence[str] = ()
    banned_strings: Sequence[str] = ()
    min_new_tokens: int = 0
    token_healing: bool = False
    max_prompt_tokens: int | None = None
    prefix_cache: int | None = None
    record_drafts: bool = False
    verbose: bool = False
    overrides: Sequence[str] | None = None
    config_sha256: str = ""

    def __post_init__(self) -> None:
        whole("batch_size", self.batch_size, most=1024)
        whole("max_new_tokens", self.max_new_tokens, most=2**20)
        whole("warmup", self.warmup, 0, most=2**20)
        whole("seed", self.seed, 0)
        if self.max_prompt_tokens is not None:
            whole("max_prompt_tokens", self.max_prompt_tokens, most=2**31 - 1)
        self.new_prefix_cache()
        if self.threads is not None:
            whole("threads", self.threads)
        most = 4 * (os.cpu_count() or 1)
        if self.threads is not None and self.threads > most:
            raise ValueError(
                f"threads must be at most {most}, four for each core of this machine, not {brief(self.threads)}"
            )
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2**63, not {brief(self.seed)}")
        for name in ("baseline", "token_healing", "record_drafts", "verbose"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")
        check_strings("stop_strings", strings("stop_strings", self.stop_strings))
        check_strings("banned_strings", strings("banned_strings", self.banned_strings))
        if whole("min_new_tokens", self.min_new_tokens, 0) > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens}, larger than max_new_tokens, which is {self.max_new_tokens}"
            )
        file_name("name", self.name)

    def use_threads(self) -> None:
        """Set torch's threads, unless ``threads`` is None. Call it before the parts are built: some measure the machine
        while they load.
        """
        if self.threads is not None:
            torch.set_num_threads(self.threads)

    def new_prefix_cache(self) -> PrefixCache | None:
        """An empty prefix cache for one arm; None where none is kept."""
        return None if self.prefix_cache is None else PrefixCache(self.prefix_cache)

    @staticmethod
    def names() -> list[str]:
        """The names of the scalars that a config gives."""
        return [one.name for one in fields(Settings) if one.name not in ("output_dir", "overrides", "config_sha256")]


@dataclass(frozen=True)
class Decoded:
    """What an arm made of a group: every forward (none for arms that are not the project's loop), every outcome."""

    steps: list[StepInfo]
    outcomes: list[Outcome]


class Arm(Protocol):
    """One way to decode a group of requests."""

    def decode(self, requests: Sequence[Request]) -> Decoded:
        """Decode all requests, measuring."""
        ...


@dataclass(frozen=True)
class Loop:
    """The project's decode loop with a proposer, a verifier and a constraint."""

    target: Target
    proposer: Proposer
    verifier: Verifier
    seed: int
    applied: AppliedConstraint | None = None
    pieces: Sequence[bytes] | None = None
    record: bool = False
    prefix_cache: PrefixCache | None = None

    def forget(self) -> None:
        """Forget what was learned and kept of earlier requests, as after a warm-up."""
        forget(self.proposer)
        if self.prefix_cache is not None:
            self.prefix_cache.clear()

    def decode(self, requests: Sequence[Request]) -> Decoded:
        """See ``Arm``. Rows are built after the clock has stopped."""
        draws = CounterDraws(self.seed)
        parts = self.target, self.proposer, self.verifier, requests, draws, self.applied, self.pieces
        engine = fixed_group(*parts, record=self.record, prefix_cache=self.prefix_cache)
        with torch.inference_mode():  # once, not in every step
            infos = [info.slim() for info in engine]
        self.target.lm.clock.synchronise()
        return Decoded(infos, writer.outcomes(engine.sequences, infos, engine.errors))


@dataclass(frozen=True)
class Lab:
    """What a run is made of.

    Args:
        target: the model.
        proposer: drafts; the null proposer makes the run autoregressive, with the baseline as its only arm.
        verifier: decides.
        sampling: how every arm samples.
        prompts: what is continued.
        tracker: records the run's progress.
        more_proposers: further proposers to measure in the same run, by the name of their arm.
        peers: other implementations to measure in the same run, by the name of their arm.
        verifiers: further verifiers, by name, for the tasks that compare them.
        applied: the constraint, and what its masks apply to; None for none.
        pieces: the bytes of each token; needed for stop strings.
    """

    target: Target
    proposer: Proposer
    verifier: Verifier
    sampling: Sampling
    prompts: Sequence[Prompt]
    tracker: Tracker
    more_proposers: Mapping[str, Proposer] = field(default_factory=dict)
    peers: Mapping[str, Arm] = field(default_factory=dict)
    verifiers: Mapping[str, Verifier] = field(default_factory=dict)
    applied: AppliedConstraint | None = None
    pieces: Sequence[bytes] | None = None

    def arms(self, settings: Settings) -> dict[str, Arm]:
        """Every arm by name.

        Raises:
            ValueError: a proposer whose drafts the verifier does not support, or that refuses the sampling; more
                than ``MOST_NODES`` nodes a step; a name used twice; peers in a batch, under a constraint or with stop
                strings.
        """
        null = Null.load(self.target)
        own = settings.seed, self.applied, self.pieces, settings.record_drafts
        baseline = Loop(self.target, null, Match(), *own, settings.new_prefix_cache())
        arms: dict[str, Arm] = {}
        proposers = {"speculative": self.proposer, **self.more_proposers}
        if isinstance(self.proposer, Null):
            del proposers["speculative"]
        for name, proposer in proposers.items():
            check_pair(proposer.name, draws_of(proposer), self.verifier, branches(proposer))
            check_sampling(proposer, self.sampling)
            check_requires(proposer, self.target)
            if settings.prefix_cache is not None:
                check_prefix_cache(proposer, self.target)
            if (nodes := settings.batch_size * proposer.nodes) > MOST_NODES:
                raise ValueError(
                    f"batch_size={settings.batch_size} with up to {proposer.nodes} nodes each ({proposer.name}) makes "
                    f"{nodes} nodes a step. Memory grows with their square, so at most {MOST_NODES} are possible: "
                    "draft fewer nodes, or decode fewer prompts together"
                )
            arms[name] = Loop(self.target, proposer, self.verifier, *own, settings.new_prefix_cache())
        if self.peers and settings.batch_size > 1:
            raise ValueError(f"peers decode one prompt at a time; set batch_size=1, not {settings.batch_size}")
        if self.peers and (self.applied is not None or settings.stop_strings):
            raise ValueError(
                "peers support neither constraints nor stop strings; set constraint=none and stop_strings=[]"
            )
        taken = {"speculative", "baseline"} & {*self.more_proposers, *self.peers} | {*self.more_proposers} & {
            *self.peers
        }
        if taken:
            raise ValueError(f"two arms are called '{taken.pop()}'; rename one under arms or peers")
        arms |= self.peers
        if settings.baseline or not arms:
            arms["baseline"] = baseline
        return arms

    def requests(self, settings: Settings) -> list[Request]:
        """The prompts as requests. Errors as in ``requests_of``."""
        most = settings.max_new_tokens, settings.max_prompt_tokens
        requests = requests_of(self.target, self.prompts, self.sampling, *most)
        bare = next((one.name for one in requests if not one.constraint), None)
        constraint = None if self.applied is None else self.applied.constraint
        for part in constraint.parts if isinstance(constraint, Composite) else (constraint,):
            if isinstance(part, PerRequestSource) and part.source is None and bare is not None:
                raise ValueError(
                    f"constraint={part.name} has no source, and prompt '{bare}' has none: give one on the command "
                    "line, or a field 'constraint' in the prompt's line"
                )
        stop, pieces = tuple(settings.stop_strings), self.pieces
        if settings.token_healing and pieces is None:
            raise ValueError("token_healing=true needs a target whose tokens' bytes are known")
        begin = getattr(self.target.tokenizer, "bos_token_id", None)
        healed = [heal(one, pieces, begin=begin) if settings.token_healing and pieces else one for one in requests]
        text = dict(
            stop_strings=stop, banned_strings=tuple(settings.banned_strings), min_new_tokens=settings.min_new_tokens
        )
        return [replace(one, **text) for one in healed]  # type: ignore[arg-type]

    def shown(self, request: Request, tokens: Sequence[int]) -> str:
        """An output as text: without special tokens, without what was healed, cut where a stop string begins."""
        if self.pieces is not None and (request.healed or request.stop_strings):
            rules = Rules(request.stop, request.stop_strings, (), request.min_new_tokens)
            return plain(self.pieces, tokens, rules, request.healed)
        return str(self.target.tokenizer.decode(tokens, skip_special_tokens=True))

    def ends(self, request: Request, tokens: Sequence[int]) -> list[int]:
        """After each token of an output, how many characters of its text (``shown``) are settled."""
        text, settled = self.shown(request, tokens), []
        for n in range(len(tokens)):
            both = zip(self.shown(request, tokens[: n + 1]), text, strict=False)
            settled.append(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both)))
        return settled

    def facts(self) -> dict[str, Any]:
        """What the proposers report, such as the tree they chose, by the name of their arm."""
        own = {} if isinstance(self.proposer, Null) else {"speculative": self.proposer}
        proposers = {**own, **self.more_proposers}
        return {
            name: {"name": one.name, "drawn": one.drawn, **shared_store(one), **facts_of(one)}
            for name, one in proposers.items()
        }

    def parts(self) -> list[Any]:
        """The objects that decode, and those that they are compared with."""
        each = (self.more_proposers, self.peers, self.verifiers)
        constraint = None if self.applied is None else self.applied.constraint
        return [self.target, self.proposer, self.verifier, constraint, *(one for some in each for one in some.values())]

    def roofline(self) -> Roofline | None:
        """Measure what bounds the target's forwards on this machine; None if its runner does not state its work."""
        lm = self.target.lm
        if (work := lm.work) is None:
            return None
        threads = lm.threads if isinstance(lm, Threaded) else None
        return Roofline(work, machine_limits.measure(work.weight_bytes, lm.dtype, lm.device, threads=threads))

    def weights(self) -> dict[str, str]:
        """SHA-256 of each part's weights, if it has some, empty for those from the hub; of a constraint, its facts'."""
        parts: dict[str, Any] = {"target": self.target, "proposer": self.proposer, **self.more_proposers, **self.peers}
        hashes = {name: part.sha256 for name, part in parts.items() if isinstance(part, Hashed)}
        found = {name: own for name, own in hashes.items() if own is not None}
        if self.applied is not None:  # its source may stand in a file
            found["constraint"] = sha256(
                json.dumps(self.applied.facts, sort_keys=True, default=str).encode()
            ).hexdigest()
        return found


def shared_store(proposer: Proposer) -> dict[str, str]:
    """Return what the manifest records of a store that requests share; empty without one."""
    what = proposer.shared_store if isinstance(proposer, LearnsAcrossRequests) else ""
    return {"shared_store": what} if what else {}


def requests_of(
    target: Target, prompts: Sequence[Prompt], sampling: Sampling, max_new_tokens: int, longest: int | None = None
) -> list[Request]:
    """The prompts as requests to the target, numbered in order; ``longest`` as in ``prompts.encode``.

    Raises:
        ValueError: a prompt that does not fit the context; named.
    """
    encoded = encode(prompts, target.tokenizer, target.context, longest)
    stop = target.ends
    return [
        Request(number, prompt.name, tokens, sampling, max_new_tokens, stop, prompt.constraint)
        for number, (prompt, tokens) in enumerate(zip(prompts, encoded, strict=True))
    ]
