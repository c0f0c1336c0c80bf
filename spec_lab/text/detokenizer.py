"""The detokenizer: tokens are pushed in, text events come out. It knows neither a model nor a decoding loop.

Text is held back as long as a later token could change it: an unfinished UTF-8 character, the possible beginning of a
stop string, and all text while a banned string may have begun. Strings are compared as UTF-8 bytes: they match across
token borders, and U+FFFD in a string matches a genuine U+FFFD only, not the replacement of invalid bytes.
"""

from __future__ import annotations

import codecs
import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from spec_lab.text.strings import Strings, TextPosition, Watcher, check_strings


@dataclass(frozen=True)
class Text:
    """Emitted text: no later token changes it.

    Args:
        text: the text; empty where only tokens without text were completed.
        tokens: number of tokens that it completes: all of their bytes are emitted.
        logprobs: of these tokens.
    """

    text: str
    tokens: int
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Held:
    """The held-back text, in place of what was held back before; without an unfinished character."""

    text: str


@dataclass(frozen=True)
class Rewind:
    """A banned string was completed. Stream and caller remove the last ``tokens``; ``ban`` is then banned there."""

    tokens: int
    ban: int


@dataclass(frozen=True)
class Withdrawn:
    """The caller removed tokens whose text was emitted: the last ``text`` and completed ``tokens`` are withdrawn."""

    text: str
    tokens: int


@dataclass(frozen=True)
class Finish:
    """The end of the text.

    Args:
        reason: "stop", "stop_string", "length", or the reason that the caller gave.
        text: the stop string.
        tokens: number of tokens without emitted text: the stop token, or the tokens of the stop string and after it.
        logprobs: of these tokens.
    """

    reason: str
    text: str = ""
    tokens: int = 0
    logprobs: tuple[float, ...] = ()


Event = Text | Held | Rewind | Withdrawn | Finish


@dataclass(frozen=True)
class Rules:
    """When a text ends, and which strings are banned.

    The text is cut where the first stop string begins: the match that begins earliest, not the one that is complete
    first; the shortest of those that begin at the same place. If a stop string lies inside another, the end waits until
    the outer one is complete or impossible. Of a stop string and a banned string, the one that is complete first takes
    effect; the stop string if both are complete at once.

    Args:
        stop_tokens: tokens that end the text and are not part of it.
        stop_strings: strings that end the text and are not part of it.
        banned_strings: strings that are removed as soon as they are complete.
        min_tokens: number of tokens that do not end the text: among them stop tokens are masked (and have neither
            effect nor text if they are pushed), and a stop string that one of them completes is ordinary text.
        max_tokens: maximum number of tokens; None for no limit.
    """

    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    banned_strings: tuple[str, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        check_strings("stop_strings", self.stop_strings)
        check_strings("banned_strings", self.banned_strings)
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be 0 or more, not {self.min_tokens}")
        if self.max_tokens is not None and self.max_tokens < max(self.min_tokens, 1):
            raise ValueError(
                f"max_tokens must be at least min_tokens and 1, not {self.max_tokens} ({self.min_tokens=})"
            )

    @cached_property
    def stops(self) -> Strings:
        """The stop strings as an automaton."""
        return Strings(self.stop_strings)

    @cached_property
    def banned(self) -> Strings:
        """The banned strings as an automaton."""
        return Strings(self.banned_strings)


@dataclass(frozen=True, slots=True)
class _Cut:
    """A complete stop string: where it begins, where the first complete one ended, and the string."""

    begin: int
    first: int
    text: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Step:
    """The state after a token; ``released`` bytes, ``parts`` of text and ``completed`` tokens are emitted."""

    before: _Step | None
    position: TextPosition
    logprob: float = math.nan
    node: int = 0
    cut: _Cut | None = None
    released: int = 0
    parts: int = 0
    completed: int = 0


class Stream:
    """The text of one sequence while it is generated.

    Args:
        pieces: the bytes of every token; empty for special tokens.
        rules: when the text ends, and which strings are banned.
        healed: bytes that token healing removed from the prompt's end. The first tokens repeat them; they are not part
            of the text.
    """

    def __init__(self, pieces: Sequence[bytes], rules: Rules, healed: bytes = b"") -> None:
        beyond = sorted(token for token in rules.stop_tokens if not 0 <= token < len(pieces))
        if beyond:
            raise ValueError(f"stop tokens {beyond} do not exist: there are {len(pieces)} pieces")
        self.rules = rules
        self.finished: str | None = None  # the finish reason; None before the end
        self._watcher = Watcher(pieces, rules.banned, healed, rules.stop_tokens)
        self._last = _Step(None, self._watcher.position)
        self._open: list[_Step] = []  # tokens not yet completed
        self._parts: list[str] = []
        self._shown = ""

    @property
    def text(self) -> str:
        """The text emitted so far."""
        return "".join(self._parts)

    @property
    def count(self) -> int:
        """Number of tokens, without removed ones."""
        return self._last.position.count

    @property
    def tokens(self) -> list[int]:
        """The tokens, without removed ones."""
        tokens, position = [], self._last.position
        while position.before is not None:
            tokens.append(position.token)
            position = position.before
        return tokens[::-1]

    @property
    def held(self) -> str:
        """The held-back text, without an unfinished character."""
        return self._shown

    @property
    def completed(self) -> int:
        """Number of tokens that the emitted text completes."""
        return self._last.completed

    @property
    def bans(self) -> frozenset[int]:
        """Tokens that are banned next. If no other token is allowed, the caller must ``end`` the stream."""
        return self._watcher.bans

    def push(self, token: int, logprob: float = math.nan) -> list[Event]:
        """Append ``token``; return the events that follow.

        Raises:
            ValueError: the stream has finished; an unknown or banned token; a token that does not repeat healed bytes.
        """
        self._check_growing()
        last, rules = self._last, self.rules
        match = self._watcher.push(token)
        position = self._watcher.position
        node, cut, sure = self._look(position)
        if match is not None and (cut is None or match.end < cut.first):
            self._watcher.rewind(match.tokens, match.ban)
            self._back(match.tokens - 1)  # withdraws nothing: all text is held back since the string began
            return [Rewind(match.tokens, match.ban), *self._hold()]
        self._last = replace(last, before=last, position=position, logprob=logprob, node=node, cut=cut)
        if token in rules.stop_tokens and last.position.count >= rules.min_tokens:
            return self._finish("stop", (logprob,))
        self._open.append(self._last)
        if sure or position.count == rules.max_tokens:
            return self._finish("length")
        if cut is None and self._watcher.begun:
            return self._hold()  # its tokens may be removed, and with them what they decided about the text before them
        end = max(position.end, 0)
        begin = end - rules.stops.live[node]  # of what may become a stop string
        # Strings begin with a whole character, so an unfinished character before one is final.
        return [*self._release(begin, final=begin < end), *self._hold()]

    def rewind(self, count: int) -> list[Event]:
        """Remove the last ``count`` tokens; the stream is then as it was before them.

        Raises:
            ValueError: the stream has finished, or has fewer tokens.
        """
        self._check_growing()
        self._watcher.rewind(count)
        return [*self._back(count), *self._hold()]

    def end(self, reason: str) -> list[Event]:
        """End the text: held-back text is emitted, an unfinished character as U+FFFD.

        If a complete stop string was only waiting for a longer one around it, the finish reason is "stop_string".

        Raises:
            ValueError: the stream has finished.
        """
        self._check_growing()
        return self._finish(reason)

    def fork(self) -> Stream:
        """Return an independent copy."""
        other = copy.copy(self)
        other._watcher, other._open, other._parts = self._watcher.fork(), self._open.copy(), self._parts.copy()
        return other

    def _check_growing(self) -> None:
        if self.finished is not None:
            raise ValueError(f"the stream has finished ({self.finished}): begin another, or fork before the end")

    def _look(self, position: TextPosition) -> tuple[int, _Cut | None, bool]:
        """Read the token's bytes.

        Returns:
            The automaton's node, the complete stop string that begins first, and whether no other can begin before it.
        """
        strings, node, cut = self.rules.stops, self._last.node, self._last.cut
        if not strings.strings:
            return node, cut, False
        for at, byte in enumerate(position.piece, position.end - len(position.piece) + 1):
            node = strings.step(node, byte)
            index = strings.longest[node]
            if index >= 0 and position.count > self.rules.min_tokens:
                begin = at - len(strings.bytes[index])
                if cut is None or begin < cut.begin:
                    cut = _Cut(begin, cut.first if cut else at, strings.strings[index])
            if cut is not None and at - strings.depth[node] >= cut.begin:
                return node, cut, True
        return node, cut, False

    def _waiting(self) -> bytes:
        """Return the bytes of text that are not emitted yet."""
        if not self._open:
            return b""
        return b"".join(step.position.piece for step in self._open)[
            self._last.released - max(self._open[0].position.start, 0) :
        ]

    def _release(self, upto: int, final: bool, closing: bool = False) -> list[Event]:
        """Emit the text up to a byte.

        Args:
            upto: the byte.
            final: whether a character that is unfinished there stays unfinished.
            closing: whether a token that begins before the byte counts as completed.
        """
        last = self._last
        text, pending = _decode(self._waiting()[: upto - last.released], final)
        released, done = upto - pending, 0
        for step in self._open:
            if step.position.end > released and not (closing and step.position.start < released):
                break
            done += 1
        if not text and not done:
            return []
        if text:
            self._parts.append(text)
        self._last = replace(last, released=released, parts=len(self._parts), completed=last.completed + done)
        logprobs = tuple(step.logprob for step in self._open[:done])
        del self._open[:done]
        return [Text(text, done, logprobs)]

    def _hold(self) -> list[Event]:
        text = _decode(self._waiting(), final=False)[0]
        changed, self._shown = text != self._shown, text
        return [Held(text)] if changed else []

    def _back(self, count: int) -> list[Event]:
        now = step = self._last
        for _ in range(count):
            assert step.before is not None
            step = step.before
        self._last, self._open = step, []
        text = "".join(self._parts[step.parts :])
        del self._parts[step.parts :]
        for _ in range(step.position.count - step.completed):
            self._open.append(step)
            assert step.before is not None
            step = step.before
        self._open.reverse()
        tokens = now.completed - self._last.completed
        return [Withdrawn(text, tokens)] if text or tokens else []

    def _finish(self, reason: str, silent: tuple[float, ...] = ()) -> list[Event]:
        cut, end = self._last.cut, max(self._last.position.end, 0)
        events = self._release(cut.begin if cut else end, final=True, closing=True)
        rest = tuple(step.logprob for step in self._open) + silent
        self._open = []
        self.finished = "stop_string" if cut else reason
        return [*events, *self._hold(), Finish(self.finished, cut.text if cut else "", len(rest), rest)]


def _decode(data: bytes, final: bool) -> tuple[str, int]:
    """Return the text of the bytes, and the number of last bytes that are an unfinished character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data, final)
    return text, len(decoder.getstate()[0])


def plain(pieces: Sequence[bytes], tokens: Sequence[int], rules: Rules, healed: bytes = b"") -> str:
    """Return the text of all tokens at once: the readable way, and the oracle of ``Stream`` without banned strings."""
    data, ends = b"", []
    for number, token in enumerate(tokens[: rules.max_tokens]):
        if token not in rules.stop_tokens:
            data += pieces[token]
        elif number >= rules.min_tokens:
            break
        ends.append(len(data))
    cuts = [len(data)]
    for string in (string.encode() for string in rules.stop_strings):
        begin = data.find(string, len(healed))
        while begin >= 0:
            before = sum(end < begin + len(string) for end in ends)  # tokens before the one that completes it
            if before >= rules.min_tokens:
                cuts.append(begin)
            begin = data.find(string, begin + 1)
    return data[len(healed) : min(cuts)].decode("utf-8", "replace")
