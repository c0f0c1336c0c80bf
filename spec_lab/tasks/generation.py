"""Text as it is decoded: every branch of every prompt, event by event, each token with where it came from."""

from __future__ import annotations

import codecs
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from spec_lab.analysis.tracking import Files
from spec_lab.constrain import AppliedConstraint
from spec_lab.constrain.load import combine
from spec_lab.constrain.protocol import Constraint
from spec_lab.constrain.vocabulary import Vocabulary, text_bytes
from spec_lab.core.options import brief_repr
from spec_lab.core.probabilities import Sampling
from spec_lab.core.request import BROKEN
from spec_lab.decode.engine import Engine, fixed_group
from spec_lab.decode.prefix_cache import PrefixCache
from spec_lab.decode.recording import Recording
from spec_lab.decode.sequence import SequenceState
from spec_lab.decode.step import StepInfo
from spec_lab.models.target import Target
from spec_lab.propose import Null, Proposer
from spec_lab.tasks.lab import Lab, Settings
from spec_lab.tasks.memory_check import check_memory
from spec_lab.text.conversations import conversation_prompt
from spec_lab.text.detokenizer import Event, Finish, Held, Text, Withdrawn
from spec_lab.text.prompts import Prompt
from spec_lab.verify import Token as TokenVerifier
from spec_lab.verify import Verifier


@dataclass(frozen=True)
class OutputToken:
    """A token of a text.

    Args:
        id: its number.
        logprob: its log-probability under the target at temperature 1, among the tokens that the constraint allows.
        origin: "accepted", "forced", "recovered" or "bonus" (``sequence.ORIGINS``).
    """

    id: int
    logprob: float
    origin: str


@dataclass(frozen=True)
class Share:
    """A part of a text that one token brought. A character belongs to the token of its last byte.

    Args:
        text: the part.
        index: of the token among those of its branch.
        origin: as in ``OutputToken``.
    """

    text: str
    index: int
    origin: str


@dataclass(frozen=True)
class Dropped:
    """The branch has finished, and its constraint, asked once all had, kept others of the prompt."""


@dataclass(frozen=True)
class SequenceEvent:
    """An event of one branch of one prompt.

    Args:
        prompt: its place among the prompts.
        branch: which fork of which fork it is (``SequenceState.lineage``): empty for a prompt's first sequence; a fork
            of branch ``b`` is called ``(*b, n, m)``, the m-th that came of ``b``'s n-th forking. A fork begins with a
            ``Text`` with all text of its parent so far.
        event: the event.
        tokens: those that a ``Text`` completes; with a ``Finish``, those that belong to no text.
        shares: of a ``Text``, which token each part came with; together they are its text.
        error: with a ``Finish`` for "nan" or "stuck", what broke.
    """

    prompt: int
    branch: tuple[int, ...]
    event: Event | Dropped
    tokens: tuple[OutputToken, ...] = ()
    shares: tuple[Share, ...] = ()
    error: str = ""


Messages = Sequence[Mapping[str, Any]]
"""A conversation: messages with their role and content, the last of which is answered."""


def generate(
    prompts: str | Prompt | Messages | Sequence[str | Prompt | Messages],
    target: Target | str | None = None,
    proposer: Proposer | None = None,
    verifier: Verifier | None = None,
    constraint: AppliedConstraint | Constraint | None = None,
    sampling: Sampling | None = None,
    max_new_tokens: int = 128,
    stop_strings: Sequence[str] = (),
    banned_strings: Sequence[str] = (),
    min_new_tokens: int = 0,
    token_healing: bool = False,
    seed: int = 0,
    vocabulary: Vocabulary | None = None,
    prefix_cache: PrefixCache | None = None,
) -> Generator[SequenceEvent, None, None]:
    """Continue prompts, yielding text as soon as it is certain.

    For each branch the texts, less those withdrawn, are what its tokens read as up to the stop; the last event is a
    ``Finish`` (after it, perhaps ``Dropped``). What breaks while decoding ends its own branch, with a ``Finish`` whose
    reason is "nan" or "stuck" and an error that states why; other prompts continue. The generator may be closed early.

    Args:
        prompts: one or several, decoded as one batch: texts to continue; lists of messages to answer, such as
            ``[{"role": "user", "content": "Hi"}]``, by the target's chat template; or ``Prompt`` objects, which may
            bring their own pattern, schema or grammar.
        target: the model; a path or hub name is loaded anew by every call. Default: the bundled one.
        proposer: drafts; default: none, which is autoregressive decoding.
        verifier: decides; default: ``verify.Token``.
        constraint: constrains the output. A bare one applies to target and draft, and appends forced tokens at once.
        sampling: default greedy; no option of it comes from the checkpoint (transformers' ``generate`` has top_k=50).
        max_new_tokens, stop_strings, banned_strings, min_new_tokens, token_healing, seed: as in ``lab.Settings``.
        vocabulary: of the target, if it is built already.
        prefix_cache: KV caches of earlier calls with the same target, as between the turns of a chat, which keep theirs
            in it (``decode.prefix_cache``). None: every prompt is computed.

    Raises:
        ValueError: at the call, an option that cannot be, parts that do not fit each other, or a prompt that does not
            fit the context.
        OSError: at the call, no model there.
    """
    several: list[Any] = [prompts]
    if isinstance(prompts, Iterable) and not isinstance(prompts, str | Prompt) and not _is_conversation(prompts):
        several = list(prompts)
    named = [_named(number, prompt) for number, prompt in enumerate(several)]
    if not named:
        raise ValueError("prompts is empty: pass at least one")
    if unused := next((prompt.name for prompt in named if prompt.later or prompt.checker), None):
        raise ValueError(
            f"generate decodes one answer and checks none, and prompt '{unused}' has later turns or a checker: pass "
            "dataclasses.replace(prompt, later=(), checker='')"
        )
    if len({prompt.name for prompt in named}) < len(named):
        raise ValueError("two prompts have the same name: give each one of its own")
    settings = Settings(
        output_dir=Path(), name="generate", batch_size=len(named), max_new_tokens=max_new_tokens, warmup=0, seed=seed,
        threads=None, baseline=False, stop_strings=stop_strings, banned_strings=banned_strings,
        min_new_tokens=min_new_tokens, token_healing=token_healing,
    )  # fmt: skip
    if not isinstance(target, Target):
        target = Target.load(str(Path(__file__).parents[1] / "zoo" / "target") if target is None else target)
    text = {"healing": token_healing, "banned": banned_strings, "at_least": min_new_tokens}
    if vocabulary is None and any(text.values()):
        vocabulary = Vocabulary.of(target)
    bare, options = constraint, {} if constraint is None else {"fast_forward": True}
    if isinstance(constraint, AppliedConstraint):
        bare, options = constraint.constraint, {k: v for k, v in vars(constraint).items() if k != "constraint"}
    applied = combine(cast("Constraint | None", bare), vocabulary, options, **cast(Any, text))
    lab = Lab(
        target, proposer or Null(), verifier or TokenVerifier(), sampling or Sampling(), named, Files(),
        applied=applied, pieces=text_bytes(target) if vocabulary is None else vocabulary.bytes,
    )  # fmt: skip
    group = engine_with_events(lab, settings, prefix_cache)
    return _events(group)


def _is_conversation(given: Any) -> bool:
    return isinstance(given, list | tuple) and bool(given) and all(isinstance(message, Mapping) for message in given)


def _named(number: int, given: Any) -> Prompt:
    """Return a text, messages or a ``Prompt`` as a prompt."""
    if isinstance(given, Prompt):
        return given
    if _is_conversation(given):
        return conversation_prompt(f"prompt {number}", given)
    if not isinstance(given, str):
        raise ValueError(f"prompts must be a text, messages, a Prompt, or a list of these, not {brief_repr(given)}")
    return Prompt(f"prompt {number}", given)


def _events(group: Engine) -> Generator[SequenceEvent, None, None]:
    with closing(steps_with_events(group)) as decoding:
        for _, events in decoding:
            yield from events


def engine_with_events(lab: Lab, settings: Settings, prefix_cache: PrefixCache | None = None) -> Engine:
    """Return an engine with all prompts as one group, whose sequences have events. Errors as in ``generate``."""
    if lab.pieces is None or len(lab.pieces) != lab.target.vocabulary:
        raise ValueError(f"text needs the bytes of each of the {lab.target.vocabulary} tokens of the target")
    arm = replace(lab.arm(settings, lab.proposer, lab.verifier), record=Recording(), prefix_cache=prefix_cache)
    requests = [replace(request, logprobs=True) for request in lab.requests(settings)]
    kept = settings.prefix_cache if prefix_cache is None else prefix_cache.max_tokens
    check_memory(lab, replace(settings, prefix_cache=kept), [len(request.tokens) for request in requests])
    return fixed_group(arm, requests, listen=True)


def steps_with_events(group: Engine) -> Generator[tuple[StepInfo | None, list[SequenceEvent]], None, None]:
    """Decode: yield each step with its events, and last, without a step, the events that no step caused."""
    readers: dict[SequenceState, _EventReader] = {}
    with closing(cast(Generator[StepInfo, None, None], iter(group))) as decoding:
        for done in decoding:
            yield done, _drain(group, readers)
    dropped = [
        SequenceEvent(sequence.request.id, sequence.lineage, Dropped())
        for sequence in group.sequences
        if not sequence.kept
    ]
    yield None, _drain(group, readers) + dropped


def _drain(group: Engine, readers: dict[SequenceState, _EventReader]) -> list[SequenceEvent]:
    events = []
    for sequence in group.sequences:
        if sequence.events or sequence not in readers:
            reader = readers.setdefault(sequence, _EventReader(sequence, group.arm.pieces or ()))
            events += reader.read(group.errors)
    return events


class _EventReader:
    """Converts one sequence's events to ``SequenceEvent``."""

    def __init__(self, sequence: SequenceState, pieces: Sequence[bytes]) -> None:
        self.sequence = sequence
        self.new = True
        self.tokens = self.characters = 0  # of events yielded and not withdrawn
        self.origins = _Characters(sequence, pieces)

    def read(self, errors: dict[SequenceState, str]) -> list[SequenceEvent]:
        """Return the sequence's events since the last call."""
        sequence = self.sequence
        events, sequence.events = net(sequence.events), []
        if self.new and sequence.lineage:  # its parent's events covered its past
            events = self._after_parent(events)
        self.new = False
        return [self._sequence_event(event, errors) for event in events]

    def _after_parent(self, events: list[Event]) -> list[Event]:
        """Return the first events of a fork: all text of its parent so far, held-back text, and its finish."""
        stream = self.sequence.stream
        assert stream is not None
        past = Text(stream.text, stream.completed, tuple(self.sequence.logprobs[: stream.completed]))
        texts = [past] if past.text or past.tokens else []
        held = [Held(stream.held)] if stream.held else []
        return [*texts, *held, *(event for event in events if isinstance(event, Finish))]

    def _sequence_event(self, event: Event, errors: dict[SequenceState, str]) -> SequenceEvent:
        sequence, request = self.sequence, self.sequence.request
        tokens: tuple[OutputToken, ...] = ()
        shares: tuple[Share, ...] = ()
        error = ""
        if isinstance(event, Withdrawn):
            self.tokens -= event.tokens
            self.characters -= len(event.text)
        elif isinstance(event, Text | Finish):
            emitted = slice(self.tokens, self.tokens + event.tokens)
            each = zip(sequence.emitted[emitted], sequence.logprobs[emitted], sequence.origins[emitted], strict=True)
            tokens = tuple(OutputToken(*fields) for fields in each)
            if isinstance(event, Text):
                shares = self.origins.shares(self.tokens, self.characters, event.text)
                self.characters += len(event.text)
            elif event.reason in BROKEN:
                error = errors.get(sequence, "")
            self.tokens += event.tokens
        return SequenceEvent(request.id, sequence.lineage, event, tokens, shares, error)


class _Characters:
    """Which token each character of a sequence's text came with."""

    def __init__(self, sequence: SequenceState, pieces: Sequence[bytes]) -> None:
        self.sequence, self.pieces = sequence, pieces
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.after: list[tuple[int, int, Any]] = []  # each token: characters, healed bytes to come, the decoder

    def shares(self, completed: int, begin: int, text: str) -> tuple[Share, ...]:
        """``text``, whose first character is number ``begin``, cut into what each token brought.

        Args:
            completed: tokens that were complete before it; those after them may have changed since they were read.
            begin: where it begins.
            text: it.
        """
        emitted, origins = self.sequence.emitted, self.sequence.origins
        del self.after[completed:]
        shares, left, index = [], text, completed
        while left and index < len(emitted):
            end = self._read(emitted[index])
            part, left = left[: max(end - begin, 0)], left[max(end - begin, 0) :]
            begin += len(part)
            if not left or index + 1 == len(emitted):  # an unfinished character that stays so is its last token's
                part, left = part + left, ""
            if part:
                shares.append(Share(part, index, origins[index]))
            index += 1
        return tuple(shares)

    def _read(self, token: int) -> int:
        """How many characters there are after one more token."""
        request = self.sequence.request
        count, healed, state = self.after[-1] if self.after else (0, len(request.healed), (b"", 0))
        piece = b"" if token in request.stop else self.pieces[token]
        self.decoder.setstate(state)
        count += len(self.decoder.decode(piece[healed:]))
        self.after.append((count, max(healed - len(piece), 0), self.decoder.getstate()))
        return count


def net(events: Sequence[Event]) -> list[Event]:
    """The events without what was withdrawn or replaced again among them."""
    kept: list[Event] = []
    for index, event in enumerate(events):
        if isinstance(event, Held) and any(isinstance(later, Held) for later in events[index + 1 :]):
            continue
        if isinstance(event, Withdrawn):
            text, tokens = event.text, event.tokens
            while text or tokens:  # what is withdrawn is always a number of whole texts, the last ones
                at = next((at for at in reversed(range(len(kept))) if isinstance(kept[at], Text)), None)
                if at is None:
                    kept.append(Withdrawn(text, tokens))
                    break
                last = cast(Text, kept.pop(at))
                text, tokens = text[: len(text) - len(last.text)], tokens - last.tokens
            continue
        kept.append(event)
    return kept
