"""The answers that ``task=train`` learns from: the target's, those of a GGUF file of it, or some that exist already."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from spec_lab.core.options import WrongOption
from spec_lab.core.probabilities import Sampling
from spec_lab.core.request import Request
from spec_lab.core.user_cache import default_folder
from spec_lab.drafters.draft_model.loading import check_same_tokens
from spec_lab.models import gguf
from spec_lab.models.target import Target
from spec_lab.tasks.lab import Lab, Settings
from spec_lab.text.answers import AnsweredText, check_source, read_answers
from spec_lab.text.chat_template import ChatTemplate
from spec_lab.text.run_answers import is_run, run_facts
from spec_lab.train.record import Tick, answer

log = logging.getLogger(__name__)

UNCONSTRAINED = "spec_lab.constrain.load.none"
"""The constraint of a run without one, as its config names it."""

Conversation = tuple[int, int]
"""The number of a prompt, or of an answered text, and which answer to it this is, from 0."""


@dataclass(frozen=True)
class Answers:
    """The answers that are learned from and measured on.

    Args:
        lab: the prompts, and the target.
        writer: writes answers, with the target's tokens.
        known: texts with answers that exist already; None: the prompts are answered.
        learned: conversations that are learned from.
        rest: conversations that are only measured on.
    """

    lab: Lab
    settings: Settings
    writer: Target
    known: Sequence[AnsweredText] | None
    learned: Sequence[Conversation]
    rest: Sequence[Conversation]

    def facts(self) -> dict[str, Any]:
        """Entries of the manifest: the SHA-256s of what writes the answers, and of answers that exist already."""
        facts: dict[str, Any] = {}
        if self.writer is not self.lab.target:
            facts["answered_by_sha256"] = self.writer.sha256
        if self.known is not None:
            facts["prompt_tokens_sha256"] = texts_hash(self.known)
        return facts

    def count(self, conversations: Sequence[Conversation]) -> int:
        """Return how many texts conversations make: one for each turn that is answered, or those that are known."""
        if self.known is not None:
            return len(conversations)
        return sum(self.lab.prompts[number].turns for number, _ in conversations)

    def texts(self, conversations: Sequence[Conversation], tick: Tick) -> list[AnsweredText]:
        """Return the texts of conversations; those of later turns follow the first turns of all."""
        if self.known is not None:
            tick(len(conversations), True)
            return [self.known[number] for number, _ in conversations]
        texts, answers = list[AnsweredText](), {conversation: list[str]() for conversation in conversations}
        batch, seed, kept = self.settings.batch_size, self.settings.seed, kept_answers(self.settings)
        for turn in range(max(self.lab.prompts[number].turns for number, _ in conversations)):
            asking = [conversation for conversation in conversations if self.lab.prompts[conversation[0]].turns > turn]
            requests = [self._request(conversation, answers[conversation]) for conversation in asking]
            written = answer(self.writer, requests, batch, seed, self.lab.pieces, kept, tick)
            for conversation, request, text in zip(asking, requests, written, strict=True):
                answers[conversation].append(self.lab.shown(request, text.tokens[len(request.tokens) :]))
            texts += written
        return texts

    def lengths(self) -> list[tuple[int, int]]:
        """Return each conversation's tokens of its first prompt, and its answers; of a text that exists all, and 1."""
        every = [*self.learned, *self.rest]
        if self.known is not None:
            return [(len(self.known[number].tokens), 1) for number, _ in every]
        requests = self.first_requests(every)
        return [
            (len(request.tokens), self.lab.prompts[number].turns)
            for request, (number, _) in zip(requests, every, strict=True)
        ]

    def first_requests(self, conversations: Sequence[Conversation]) -> list[Request]:
        """Return the prompts of the first answers of conversations."""
        if self.known is None:
            return [self._request(conversation, []) for conversation in conversations]
        lab, new = self.lab, self.settings.max_new_tokens
        prompts = [(number, self.known[number].name, next(self.known[number].each())[0]) for number, _ in conversations]
        return [Request(number, name, prompt, lab.sampling, new, lab.target.ends) for number, name, prompt in prompts]

    def _request(self, conversation: Conversation, answers: Sequence[str]) -> Request:
        """Return the next request of a conversation; each answer to a prompt has random numbers of its own."""
        number, repeat = conversation
        request = self.lab.turn(self.settings, number, answers).request
        turns = max(prompt.turns for prompt in self.lab.prompts)
        return replace(request, id=request.id + repeat * turns * len(self.lab.prompts))


def kept_answers(settings: Settings) -> Path:
    """Return the folder in which answers are kept for other drafters."""
    return (default_folder() or settings.output_dir) / "answers"


def answers_of(
    lab: Lab,
    settings: Settings,
    config: Mapping[str, Any],
    answers: int,
    answers_from: str | None,
    generate: str | None,
    held_out: float,
) -> Answers:
    """Return the answers that a drafter learns from and is measured on. Arguments and errors as in ``train.train``."""
    check_source(answers_from, generate, answers)
    known = None
    if answers_from is None:
        lab.first_turns(settings)
        lab.check_later_turns(settings)
        number = len(lab.prompts)
    else:
        if other := sampled_otherwise(answers_from, lab.sampling):
            log.warning(
                "task.answers_from=%s holds answers of %s: the drafter learns from them, and the estimate on held-out "
                "ones is of them; what is measured by decoding is not", answers_from, other,
            )  # fmt: skip
        known = known_answers(lab, settings, config, answers_from)
        number = len(known)
    first = number - max(1, round(held_out * number))
    while known is not None and first > 0 and known[first - 1].name == known[first].name:
        first -= 1  # the texts of one conversation stay together
    learned = [(text, repeat) for repeat in range(answers) for text in range(first)]
    rest = [(text, 0) for text in range(first, number)]
    return Answers(lab, settings, _writer(lab, generate), known, learned, rest)


def sampled_otherwise(path: str, sampling: Sampling) -> str:
    """Return how answers of a run were sampled otherwise than by ``sampling`` without a constraint.

    It is empty if they were not, or if it is not known, as of files of conversations.

    Raises:
        OSError, ValueError: the run's manifest cannot be read.
    """
    facts = run_facts(path)
    stated, config = (part if isinstance(part := facts.get(name), dict) else {} for name in ("sampling", "config"))
    for name, value in asdict(sampling).items():
        if name in stated and stated[name] != value:
            return f"sampling.{name}={stated[name]}, and this run has {value}"
    constraint = config.get("constraint")
    named = constraint.get("_target_", UNCONSTRAINED) if isinstance(constraint, dict) else UNCONSTRAINED
    if named != UNCONSTRAINED:
        return f"a constraint ({named}), and this run has none"
    masked = next((name for name in ("banned_strings", "min_new_tokens") if config.get(name)), "")
    return masked and f"{masked}={config[masked]}, and this run has none"


def texts_hash(texts: Sequence[AnsweredText]) -> str:
    """Return the SHA-256 of texts with answers."""
    return sha256(json.dumps([asdict(text) for text in texts]).encode()).hexdigest()


def known_answers(lab: Lab, settings: Settings, config: Mapping[str, Any], path: str) -> list[AnsweredText]:
    """Return answers that exist already, cut to the run's number of tokens and to the target's context.

    Args:
        lab: the target; its prompts' template writes messages, by default the checkpoint's.
        config: of the run, whose ``prompts.template`` may be none.
        path: as in ``read_answers``.

    Raises:
        ValueError: as in ``read_answers``; a token that the target does not have; no prompt leaves room for an answer.
    """
    target, plain = lab.target, (config.get("prompts") or {}).get("template") == "none"
    template = None if plain else next((prompt.template for prompt in lab.prompts if prompt.template), ChatTemplate())
    if not is_run(path) and (template is None or not template.of(target.tokenizer)):
        why = "prompts.template is none" if plain else f"the tokenizer of {target.name} has no chat template"
        log.warning("The messages of %s are plain text: %s", path, why)
    weights = {digest for digest in (target.sha256, target.source_sha256) if digest}
    read = read_answers(path, target.tokenizer, target.ends, template, weights)
    if wrong := next((text for text in read if max(text.tokens) >= target.vocabulary), None):
        raise WrongOption(
            f"answers_from={path}: '{wrong.name}' has the token {max(wrong.tokens)}, and the target has "
            f"{target.vocabulary}: name answers of this target"
        )
    texts = [text for text in (text.cut(settings.max_new_tokens, target.context - 1) for text in read) if text.answers]
    if len(texts) < len(read):
        log.warning(
            "%d of %d texts of %s are left out: their prompts fill the context of %d tokens", len(read) - len(texts),
            len(read), path, target.context,
        )  # fmt: skip
    if not texts:
        raise WrongOption(
            f"answers_from={path} has no prompt that leaves room for an answer: set target.context to more"
        )
    return texts


def _writer(lab: Lab, generate: str | None) -> Target:
    """Return the target that writes answers."""
    if generate is None:
        return lab.target
    path = lab.target.gguf_file if generate == "gguf" else generate
    if not path:
        raise WrongOption(
            f"generate=gguf is of a target in a GGUF file, and this one is {lab.target.name}: name a GGUF file of it, "
            "or set generate to null, so that the target answers itself"
        )
    writer = gguf.load(path, cache=lab.target.cache)
    check_same_tokens(lab.target, writer.vocabulary, writer.tokenizer, path, "; task.generate is a file of the target")
    return writer
