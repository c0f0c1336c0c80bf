"""Find strings in a text that grows token by token and may be rewound.

Strings are compared as UTF-8 bytes: they match across token borders, and U+FFFD in a string matches a genuine U+FFFD
only, not the replacement of invalid bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

MAX_STRINGS, MAX_LENGTH, MAX_TOTAL = 256, 4096, 65536  # strings; bytes of one, of all together


def check_strings(what: str, strings: tuple[str, ...]) -> None:
    """Refuse strings that cannot be searched for.

    Raises:
        ValueError: not a sequence of strings; too many or too long strings; an empty one; a lone surrogate. Names it.
    """
    if isinstance(strings, str):
        raise ValueError(f"{what} must be a list of strings, not the single string {strings!r}: put it in a list")
    if len(strings) > MAX_STRINGS:
        raise ValueError(f"{what} holds {len(strings)} strings; the maximum is {MAX_STRINGS}")
    total = 0
    for index, string in enumerate(strings):
        if not string:
            raise ValueError(f"{what}[{index}] is empty, which matches everywhere: leave it out")
        try:
            size = len(string.encode())
        except UnicodeEncodeError:
            raise ValueError(f"{what}[{index}] {string!r} has a lone surrogate, which no text can hold") from None
        total += size
        if size > MAX_LENGTH:
            raise ValueError(f"{what}[{index}] has {size} bytes; the maximum is {MAX_LENGTH}")
    if total > MAX_TOTAL:
        raise ValueError(f"{what} has {total} bytes in all; the maximum is {MAX_TOTAL}")


class Strings:
    """An Aho-Corasick automaton over bytes that finds strings (Aho and Corasick, CACM 1975); it can be shared.

    A node stands for the longest suffix of the bytes read that is a prefix of some string; node 0 for none. For each
    node: ``depth``, the length of that suffix; ``live``, the length of the longest suffix that may still become a
    string; ``longest`` and ``shortest``, the index of the longest and shortest string that ends here, -1 for none.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        check_strings("strings", strings)
        self.strings = tuple(strings)
        self.bytes = [string.encode() for string in strings]
        self.depth, string_at = [0], [-1]
        self._next: dict[int, int] = {}  # node << 8 | byte -> node
        for index, data in enumerate(self.bytes):
            node = 0
            for byte in data:
                node = self._next.setdefault(node << 8 | byte, len(string_at))
                if node == len(string_at):
                    self.depth.append(0)
                    string_at.append(-1)
            string_at[node] = index
        self.longest, self.shortest = string_at, string_at.copy()
        self.live, self._shorter = self.depth.copy(), self.depth.copy()  # _shorter: the node of the next shorter suffix
        inner = {edge >> 8 for edge in self._next}
        nodes = [0]
        edges: dict[int, list[tuple[int, int]]] = {}
        for edge, child in self._next.items():
            edges.setdefault(edge >> 8, []).append((edge & 255, child))
        for node in nodes:  # grows while it is read: breadth first
            for byte, child in edges.get(node, ()):
                nodes.append(child)
                self.depth[child] = self.depth[node] + 1
                shorter = self._shorter[child] = self.step(self._shorter[node], byte) if node else 0
                self.live[child] = self.depth[child] if child in inner else self.live[shorter]
                self.longest[child] = string_at[child] if string_at[child] >= 0 else self.longest[shorter]
                self.shortest[child] = self.shortest[shorter] if self.shortest[shorter] >= 0 else self.shortest[child]

    def step(self, node: int, byte: int) -> int:
        """Return the node after one more byte."""
        while (child := self._next.get(node << 8 | byte)) is None:
            if not node:
                return 0
            node = self._shorter[node]
        return child


@dataclass(frozen=True)
class StringMatch:
    """A string that was found.

    Args:
        tokens: number of last tokens from the one in which the string began.
        ban: the token in which it began.
        end: byte of the text after the string.
    """

    tokens: int
    ban: int
    end: int
    text: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TextPosition:
    """A position between tokens; it is immutable, so forks share earlier positions.

    Args:
        before: the position one token earlier; None at the beginning.
        count: number of tokens so far.
        token: the last token.
        piece: its bytes of text.
        start: byte of the text where it begins; negative within healed bytes.
        end: byte of the text after it.
        node: of the automaton.
        bans: tokens that are banned next.
    """

    before: TextPosition | None
    count: int
    token: int
    piece: bytes
    start: int
    end: int
    node: int = 0
    bans: frozenset[int] = frozenset()


class Watcher:
    """Follows tokens and reports when a string is complete, and in which token it began.

    Args:
        pieces: the bytes of every token.
        healed: bytes that the first tokens repeat; they are not part of the text.
        silent: tokens whose bytes are not part of the text.
    """

    def __init__(
        self, pieces: Sequence[bytes], strings: Strings, healed: bytes = b"", silent: frozenset[int] = frozenset()
    ) -> None:
        self.pieces, self.strings, self.healed, self.silent = pieces, strings, healed, silent
        self.position = TextPosition(None, 0, -1, b"", -len(healed), -len(healed))

    def push(self, token: int) -> StringMatch | None:
        """Append ``token``; return the string that it completes first (the shortest of several), None for none.

        The token stays after a match: the caller may ``rewind``.

        Raises:
            ValueError: an unknown token, a banned one, or one that does not repeat healed bytes; nothing changes then.
        """
        last, strings = self.position, self.strings
        if not 0 <= token < len(self.pieces):
            raise ValueError(f"token {token} does not exist: there are {len(self.pieces)} pieces")
        if token in last.bans:
            raise ValueError(f"token {token} is banned after {last.count} tokens: mask the tokens in bans")
        piece = b"" if token in self.silent else self.pieces[token]
        end = last.end + len(piece)
        if last.end < 0:
            wanted = self.healed[last.end :]
            if not (wanted.startswith(piece) or piece.startswith(wanted)):
                raise ValueError(
                    f"token {token} {piece!r} after {last.count} tokens does not repeat the healed bytes {wanted!r}: "
                    "mask the tokens that do not"
                )
            piece = piece[-last.end :]
        node, index, at = last.node, -1, 0
        if strings.strings:
            for position, byte in enumerate(piece, end - len(piece) + 1):
                node = strings.step(node, byte)
                if index < 0 and strings.shortest[node] >= 0:
                    index, at = strings.shortest[node], position
        self.position = TextPosition(last, last.count + 1, token, piece, last.end, end, node)
        if index < 0:
            return None
        first = self._holding(at - len(strings.bytes[index]))
        return StringMatch(self.position.count - first.count + 1, first.token, at, strings.strings[index])

    def rewind(self, count: int, ban: int | None = None) -> None:
        """Remove the last ``count`` tokens, and ban ``ban`` there.

        Bans of a position accumulate, and are forgotten by a rewind to an earlier position.

        Raises:
            ValueError: there are fewer tokens.
        """
        if not 0 <= count <= self.position.count:
            raise ValueError(f"cannot remove {count} tokens of {self.position.count}")
        for _ in range(count):
            assert self.position.before is not None
            self.position = self.position.before
        if ban is not None:
            self.position = replace(self.position, bans=self.position.bans | {ban})

    def fork(self) -> Watcher:
        """Return an independent copy."""
        return copy.copy(self)

    @property
    def bans(self) -> frozenset[int]:
        """Tokens that are banned next."""
        return self.position.bans

    @property
    def begun(self) -> bool:
        """Whether the text ends with a prefix of a string, so that its last tokens may have to be removed."""
        return self.strings.live[self.position.node] > 0

    def _holding(self, at: int) -> TextPosition:
        """Return the position after the token that holds a byte of the text."""
        position = self.position
        while position.start > at or position.end <= at:
            assert position.before is not None
            position = position.before
        return position
