"""Finding strings in a text that comes token by token, and may go back again.

Strings are compared as UTF-8 bytes, so they match across any token borders, and U+FFFD in a string matches a genuine
one only, not the sign for broken bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

MAX_STRINGS, MAX_LENGTH, MAX_TOTAL = 256, 4096, 65536  # strings; bytes of one, of all together


def check_strings(what: str, strings: tuple[str, ...]) -> None:
    """Refuse strings that cannot be looked for.

    Raises:
        ValueError: not several strings, too many, too long, an empty one or one that no text can hold; names it.
    """
    if isinstance(strings, str):
        raise ValueError(f"{what} must be several strings, not the one string {strings!r}: put it in a tuple")
    if len(strings) > MAX_STRINGS:
        raise ValueError(f"{what} holds {len(strings)} strings; at most {MAX_STRINGS} are looked for")
    total = 0
    for place, string in enumerate(strings):
        if not string:
            raise ValueError(f"{what}[{place}] is empty, which is found everywhere: leave it out")
        try:
            size = len(string.encode())
        except UnicodeEncodeError:
            raise ValueError(f"{what}[{place}] {string!r} has a lone surrogate, which no text can hold") from None
        total += size
        if size > MAX_LENGTH:
            raise ValueError(f"{what}[{place}] has {size} bytes; at most {MAX_LENGTH} are looked for")
    if total > MAX_TOTAL:
        raise ValueError(f"{what} has {total} bytes in all; at most {MAX_TOTAL} are looked for")


class Strings:
    """An automaton (Aho and Corasick's) over bytes that finds strings; it can be shared.

    A node stands for the longest end of what was read that begins some string; node 0 for none. For each node:
    ``depth``, the length of that end; ``live``, the length of the longest end that can still grow into a string;
    ``longest`` and ``shortest``, the index of the longest and the shortest string that ends here, -1 for none.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        check_strings("strings", strings)
        self.strings = tuple(strings)
        self.bytes = [string.encode() for string in strings]
        self.depth, own = [0], [-1]
        self._next: dict[int, int] = {}  # node << 8 | byte -> node
        for index, data in enumerate(self.bytes):
            node = 0
            for byte in data:
                node = self._next.setdefault(node << 8 | byte, len(own))
                if node == len(own):
                    self.depth.append(0)
                    own.append(-1)
            own[node] = index
        self.longest, self.shortest = own, own.copy()
        self.live, self._shorter = self.depth.copy(), self.depth.copy()  # _shorter: the next shorter end, as a node
        inner = {edge >> 8 for edge in self._next}
        nodes = [0]
        edges: dict[int, list[tuple[int, int]]] = {}
        for edge, child in self._next.items():
            edges.setdefault(edge >> 8, []).append((edge & 255, child))
        for node in nodes:  # grows: shallow nodes first
            for byte, child in edges.get(node, ()):
                nodes.append(child)
                self.depth[child] = self.depth[node] + 1
                shorter = self._shorter[child] = self.step(self._shorter[node], byte) if node else 0
                self.live[child] = self.depth[child] if child in inner else self.live[shorter]
                self.longest[child] = own[child] if own[child] >= 0 else self.longest[shorter]
                self.shortest[child] = self.shortest[shorter] if self.shortest[shorter] >= 0 else self.shortest[child]

    def step(self, node: int, byte: int) -> int:
        """The node after one more byte."""
        while (found := self._next.get(node << 8 | byte)) is None:
            if not node:
                return 0
            node = self._shorter[node]
        return found


@dataclass(frozen=True)
class Match:
    """A string that came.

    Args:
        tokens: to take back, so that the token in which the string began is the last of them.
        ban: that token.
        end: where in the text's bytes the string ends.
        text: the string.
    """

    tokens: int
    ban: int
    end: int
    text: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Place:
    """A place between tokens; it never changes, so forks share what lies before.

    Args:
        before: the place one token earlier; None at the beginning.
        count: tokens so far.
        token: the one just before.
        piece: its bytes of text.
        start: bytes of text before it, counted below 0 through healed ones.
        end: bytes of text after it.
        node: of the automaton.
        bans: tokens that must not come next.
    """

    before: Place | None
    count: int
    token: int
    piece: bytes
    start: int
    end: int
    node: int = 0
    bans: frozenset[int] = frozenset()


class Watcher:
    """Follows tokens and tells when one of some strings is complete, and in which token it began.

    Args:
        pieces: the bytes of every token.
        strings: what to look for.
        healed: bytes that the tokens repeat first and that are no text.
        silent: tokens whose bytes are no text.
    """

    def __init__(
        self, pieces: Sequence[bytes], strings: Strings, healed: bytes = b"", silent: frozenset[int] = frozenset()
    ) -> None:
        self.pieces, self.strings, self.healed, self.silent = pieces, strings, healed, silent
        self.place = Place(None, 0, -1, b"", -len(healed), -len(healed))

    def push(self, token: int) -> Match | None:
        """``token`` comes next. The first string to be complete, of several at once the shortest; None for none.

        The token counts as come, match or not: it is for the caller to ``rewind``.

        Raises:
            ValueError: no such token; a token banned here; bytes other than the healed ones. Nothing has changed then.
        """
        last, strings = self.place, self.strings
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
        node, found, at = last.node, -1, 0
        if strings.strings:
            for place, byte in enumerate(piece, end - len(piece) + 1):
                node = strings.step(node, byte)
                if found < 0 and strings.shortest[node] >= 0:
                    found, at = strings.shortest[node], place
        self.place = Place(last, last.count + 1, token, piece, last.end, end, node)
        if found < 0:
            return None
        first = self._holding(at - len(strings.bytes[found]))
        return Match(self.place.count - first.count + 1, first.token, at, strings.strings[found])

    def rewind(self, count: int, ban: int | None = None) -> None:
        """The last ``count`` tokens are taken back, and ``ban`` must not come there.

        Bans of a place add up and are forgotten when a rewind goes before it.

        Raises:
            ValueError: there are not so many tokens.
        """
        if not 0 <= count <= self.place.count:
            raise ValueError(f"cannot take back {count} tokens of {self.place.count}")
        for _ in range(count):
            assert self.place.before is not None
            self.place = self.place.before
        if ban is not None:
            self.place = replace(self.place, bans=self.place.bans | {ban})

    def fork(self) -> Watcher:
        """An independent copy, at no cost."""
        return copy.copy(self)

    @property
    def bans(self) -> frozenset[int]:
        """Tokens that must not come next."""
        return self.place.bans

    @property
    def begun(self) -> bool:
        """Whether the text ends with the beginning of a string, so that tokens that came may have to go."""
        return self.strings.live[self.place.node] > 0

    def _holding(self, at: int) -> Place:
        """The place just after the token that holds this byte of the text."""
        place = self.place
        while place.start > at or place.end <= at:
            assert place.before is not None
            place = place.before
        return place
