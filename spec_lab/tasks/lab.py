"""Composition of a run: its scalars, its parts, and its arms.

An arm is one way to decode. The baseline is the null proposer in the same loop.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import takewhile
from typing import Any, Protocol

import torch

from spec_lab.analysis.metrics import Metric
from spec_lab.analysis.tracking import Guarded, Tracker
from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.healing import heal
from spec_lab.core import machine_limits
from spec_lab.core.faults import attributed
from spec_lab.core.probabilities import Sampling
from spec_lab.core.protocols import Hashed
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.core.roofline import Roofline
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.decode.step import StepInfo
from spec_lab.models.target import Target
from spec_lab.propose import Null, Proposer
from spec_lab.results import writer
from spec_lab.results.old_names import MAIN_ARM
from spec_lab.results.writer import Outcome
from spec_lab.tasks.settings import Settings as Settings
from spec_lab.text.chat_template import template_facts
from spec_lab.text.detokenizer import Rules, plain
from spec_lab.text.prompts import Prompt, encode, encode_turn
from spec_lab.verify import Match, Verifier

LOG = logging.getLogger(__name__)

MAX_NODES = 2**14
"""Most nodes drafted in a step, for all sequences together: the tree attention mask has the square of their number."""


@dataclass(frozen=True)
class Turn:
    """One request of a conversation; a prompt that is no conversation has one.

    Args:
        conversation: number of its prompt among the lab's.
        number: which of the model's answers it asks for, from 1.
        prompt: as it is decoded: ``text`` is what the model continues, and ``checker`` that of this answer.
    """

    conversation: int
    number: int
    prompt: Prompt
    request: Request


@dataclass(frozen=True)
class Decoded:
    """Outcome of a group for one arm: every forward (none for arms that are not the project's loop), every outcome."""

    steps: list[StepInfo]
    outcomes: list[Outcome]


class GroupDecoder(Protocol):
    """One way to decode a group of requests: an arm of the project's loop, or a peer."""

    def decode(self, requests: Sequence[Request]) -> Decoded:
        """Decode all requests, measuring."""
        ...


@dataclass(frozen=True, eq=False)
class Loop(Arm):
    """An arm that the project's decode loop decodes groups of requests with, measuring."""

    def forget(self) -> None:
        """Forget what was learned and kept of earlier requests, as after a warm-up."""
        with attributed("proposer", self.proposer):
            self.proposer.forget()
        if self.prefix_cache is not None:
            self.prefix_cache.clear()

    def decode(self, requests: Sequence[Request]) -> Decoded:
        """See ``GroupDecoder``. Rows are built after the clock has stopped."""
        engine = fixed_group(self, requests)
        with torch.inference_mode():  # once, not in every step
            infos = [info.slim() for info in engine]
        self.target.lm.clock.synchronise()
        return Decoded(infos, writer.outcomes(engine.sequences, infos, engine.errors))


@dataclass(frozen=True)
class Lab:
    """Composed parts of a run.

    Args:
        proposer: drafts; the null proposer makes the run autoregressive, with the baseline as its only arm.
        more_proposers: further proposers to measure in the same run, by the name of their arm.
        peers: other implementations to measure in the same run, by the name of their arm.
        verifiers: further verifiers, by name, for the tasks that compare them.
        applied: the constraint, and what its masks apply to; None for none.
        pieces: the bytes of each token; needed for stop strings.
        rebuild: builds the proposer again, without a policy, with other values of its options; None where it was not
            built from options. It raises ValueError for a value that it cannot have.
        modes: builds the proposer of a mode, which the task chooses; None outside of the command line. It raises
            ValueError for one that cannot run.
        metrics: functions of the run's rows, by the name of their part.
    """

    target: Target
    proposer: Proposer
    verifier: Verifier
    sampling: Sampling
    prompts: Sequence[Prompt]
    tracker: Tracker
    more_proposers: Mapping[str, Proposer] = field(default_factory=dict)
    peers: Mapping[str, GroupDecoder] = field(default_factory=dict)
    verifiers: Mapping[str, Verifier] = field(default_factory=dict)
    applied: AppliedConstraint | None = None
    pieces: Sequence[bytes] | None = None
    rebuild: Callable[[Mapping[str, Any]], Proposer] | None = None
    modes: Callable[[Any], Proposer] | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.tracker, Guarded):  # an error in it must not end the run
            object.__setattr__(self, "tracker", Guarded(self.tracker))

    def arms(self, settings: Settings) -> dict[str, GroupDecoder]:
        """Every arm by name.

        Raises:
            ValueError: a proposer whose drafts the verifier does not support, or that refuses the sampling; more
                than ``MAX_NODES`` nodes a step; a name used twice; peers in a batch, under a constraint or with stop
                strings.
        """
        if settings.record == "replay" and self.applied is not None:
            raise ValueError(
                "record=replay supports no constraint yet, nor banned strings or a minimum length: replay does not "
                "know which tokens are forced or taken back. Set constraint=none, or record=drafts"
            )
        if settings.count_experts and (why := self.target.lm.why_no_expert_counts):
            raise ValueError(f"count_experts=true: {why}; set count_experts=false")
        baseline = self.arm(settings, Null.load(self.target), Match())
        baseline = replace(baseline, record=replace(settings.recording, top=0))
        arms: dict[str, GroupDecoder] = {}
        for name, proposer in self.proposers().items():
            arms[name] = self.arm(settings, proposer, self.verifier)
            if (nodes := settings.batch_size * proposer.nodes) > MAX_NODES:
                raise ValueError(
                    f"batch_size={settings.batch_size} with up to {proposer.nodes} nodes each ({proposer.name}) makes "
                    f"{nodes} nodes a step. Memory grows with their square, so at most {MAX_NODES} are possible: "
                    "draft fewer nodes, or decode fewer prompts together"
                )
        if self.peers and settings.batch_size > 1:
            raise ValueError(f"peers decode one prompt at a time; set batch_size=1, not {settings.batch_size}")
        if self.peers and (self.applied is not None or settings.stop_strings):
            raise ValueError(
                "peers support neither constraints nor stop strings; set constraint=none and stop_strings=[]"
            )
        arms |= self.peers
        if settings.baseline or not arms:
            arms["baseline"] = baseline
        return arms

    def proposers(self) -> dict[str, Proposer]:
        """Return the proposer of each arm, the main one first: its arm has its name. Null is the baseline, and no arm.

        Raises:
            ValueError: a name is used twice.
        """
        main = {} if isinstance(self.proposer, Null) else {self.proposer.name: self.proposer}
        for name in (*self.more_proposers, *self.peers):
            others = [*main, "baseline", *(self.peers if name in self.more_proposers else ())]
            if name in others:
                whose = "the arm of proposer=" if name in main else "another arm"
                raise ValueError(
                    f"two arms are called '{name}': {whose} has this name; rename the one under arms or peers"
                )
        if MAIN_ARM in {*main, *self.more_proposers, *self.peers}:
            raise ValueError(f"an arm is called '{MAIN_ARM}', as older versions called that of proposer=; rename it")
        return {**main, **self.more_proposers}

    def arm(self, settings: Settings, proposer: Proposer, verifier: Verifier) -> Loop:
        """Return the arm of a proposer and a verifier, with a prefix cache of its own if the settings ask for one.

        Raises:
            ValueError: as in ``Arm``; a proposer that refuses the sampling.
        """
        parts = CounterDraws(settings.seed), self.applied, self.pieces, settings.recording, settings.new_prefix_cache()
        made = Loop(self.target, proposer, verifier, *parts)
        proposer.check_sampling(self.sampling)
        return made

    def max_tokens(self, settings: Settings) -> int:
        """Most tokens that the arms of this project's loop emit in a benchmark: answers times arms times the limit."""
        arms = (not isinstance(self.proposer, Null)) + len(self.more_proposers) + settings.baseline
        return sum(prompt.turns for prompt in self.prompts) * max(1, arms) * settings.max_new_tokens

    def requests(self, settings: Settings) -> list[Request]:
        """The prompts as requests, of conversations the first. Errors as in ``first_turns``."""
        return [turn.request for turn in self.first_turns(settings)]

    def first_turns(self, settings: Settings) -> list[Turn]:
        """The first request of every prompt, numbered in order.

        Raises:
            ValueError: a prompt that does not fit the context, or that its template refuses; a constraint without a
                source; token healing for a target whose tokens' bytes are not known.
        """
        turns = [self.turn(settings, number) for number in range(len(self.prompts))]
        if self.prompts[0].template is not None and not self.prompts[0].template.of(self.target.tokenizer):
            LOG.warning("The tokenizer of %s has no chat template: messages are plain text", self.target.name)
        bare = next((turn.request.name for turn in turns if not turn.request.constraint), None)
        for part in () if self.applied is None else self.applied.constraint.parts:
            if part.source is None and bare is not None:
                raise ValueError(
                    f"constraint={part.name} has no source, and prompt '{bare}' has none: give one on the command "
                    "line, or a field 'constraint' in the prompt's line"
                )
        return turns

    def turn(self, settings: Settings, number: int, answers: Sequence[str] = ()) -> Turn:
        """The next request of a conversation.

        Args:
            number: of its prompt.
            answers: the model's answers so far.

        Raises:
            ValueError: as in ``first_turns``, without constraints.
        """
        prompt, pieces = self.prompts[number], self.pieces
        if settings.token_healing and pieces is None:
            raise ValueError("token_healing=true needs a target whose tokens' bytes are known")
        if answers:
            prompt = replace(prompt, name=f"{prompt.name}, turn {len(answers) + 1}")
        where = self.target.tokenizer, self.target.context, settings.max_prompt_tokens
        text, tokens = encode_turn(prompt, *where, answers)
        request = Request(
            number + len(answers) * len(self.prompts), prompt.name, tokens, self.sampling, settings.max_new_tokens,
            self.target.ends, prompt.constraint, stop_strings=tuple(settings.stop_strings),
            banned_strings=tuple(settings.banned_strings), min_new_tokens=settings.min_new_tokens,
        )  # fmt: skip
        if settings.token_healing and pieces:
            request = heal(request, pieces, begin=getattr(self.target.tokenizer, "bos_token_id", None))
        last = len(answers) == len(prompt.later)
        decoded = replace(prompt, text=text, checker=prompt.checker if last else "")
        return Turn(number, len(answers) + 1, decoded, request)

    def longest_prompts(self, settings: Settings, turns: Sequence[Turn]) -> list[int]:
        """Return how many tokens each prompt may have, of conversations the last turn's.

        Args:
            turns: as in ``first_turns``.
        """
        lengths = []
        for number, prompt in enumerate(self.prompts):
            length = len(turns[number].request.tokens) if not prompt.later else self._last_turn(settings, number)
            lengths.append(min(length, settings.max_prompt_tokens or length))
        return lengths

    def _last_turn(self, settings: Settings, number: int) -> int:
        """How many tokens the last prompt of a conversation may have."""
        answers = ["."] * len(self.prompts[number].later)
        return len(self.turn(settings, number, answers).request.tokens) + len(answers) * settings.max_new_tokens

    def check_later_turns(self, settings: Settings) -> None:
        """Refuse conversations whose last turn may not fit the context.

        Raises:
            ValueError: it may not; names the prompt.
        """
        if settings.max_prompt_tokens is not None:
            return
        for number, prompt in enumerate(self.prompts):
            if prompt.later:
                tokens = self._last_turn(settings, number)
                if tokens >= self.target.context:
                    raise ValueError(
                        f"prompt '{prompt.name}': its {prompt.turns} turns have up to {tokens} tokens and the context "
                        f"holds {self.target.context}, one of them for the output: set prompts.turns=1, a smaller "
                        "max_new_tokens, or max_prompt_tokens"
                    )

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
        """Facts that the proposers report, such as the tree they chose, by the name of their arm."""
        return {
            name: {"name": proposer.name, "drawn": proposer.drawn, "text_only": proposer.text_only}
            | {**shared_store(proposer), **proposer.facts}
            for name, proposer in self.proposers().items()
        }

    def chat_facts(self) -> dict[str, Any] | None:
        """Facts of conversations for the manifest; None where no prompt is one."""
        chats = [prompt for prompt in self.prompts if prompt.template is not None or prompt.messages or prompt.later]
        if not chats:
            return None
        templates = {(id(chat.template), bool(chat.tools)): chat for chat in chats}.values()
        return {
            "conversations": len(chats),
            "turns": max(chat.turns for chat in chats),
            **template_facts([(chat.template, bool(chat.tools)) for chat in templates], self.target.tokenizer),
        }

    def parts(self) -> list[Any]:
        """The objects that decode, and those that they are compared with."""
        each = (self.more_proposers, self.peers, self.verifiers)
        constraint = None if self.applied is None else self.applied.constraint
        return [
            self.target,
            self.proposer,
            self.verifier,
            constraint,
            *(part for some in each for part in some.values()),
        ]

    def roofline(self) -> Roofline | None:
        """Measure what bounds the target's forwards on this machine; None if its runner does not state its work."""
        lm = self.target.lm
        if (work := lm.work) is None:
            return None
        return Roofline(work, machine_limits.measure(work.weight_bytes, lm.dtype, lm.device, threads=lm.threads))

    def weights(self) -> dict[str, str]:
        """SHA-256 of each part's weights, if it has some, empty for those from the hub; of a constraint, its facts'."""
        parts: dict[str, Any] = {"target": self.target, "proposer": self.proposer, **self.more_proposers, **self.peers}
        hashes = {name: part.sha256 for name, part in parts.items() if isinstance(part, Hashed)}
        named = {name: digest for name, digest in hashes.items() if digest is not None}
        if self.applied is not None:  # its source may stand in a file
            named["constraint"] = sha256(
                json.dumps(self.applied.facts, sort_keys=True, default=str).encode()
            ).hexdigest()
        return named


def shared_store(proposer: Proposer) -> dict[str, str]:
    """Return what the manifest records of a store that requests share; empty without one."""
    return {"shared_store": proposer.shared_store} if proposer.shared_store else {}


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
