r"""A template: fixed texts, and between them free parts that the model writes.

A part is a text, or a mapping: ``max_tokens``, the maximum number of tokens of a free part, and optionally ``stop``, a
string that ends it earlier. The stop string is not part of the output, so the next text repeats it if necessary:
``["Name: ", {max_tokens: 20, stop: "\n"}, "\nAge: ", {max_tokens: 3}]``. A token that ends texts can only end the last
part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from spec_lab.constrain.control import Branch, ControllerConstraint, Event
from spec_lab.constrain.protocol import mask_of, pack
from spec_lab.constrain.vocabulary import Vocabulary
from spec_lab.core.options import Form, Texts, WrongOption, accept, brief, checked, whole
from spec_lab.text.detokenizer import Strings, Watcher
from spec_lab.text.strings import check_strings

Part = bytes | tuple[int, Strings]

MAX_PARTS = 1000


class TemplateController:
    """Writes ``parts`` in order. In a free part, ``watcher`` finds its stop, and ``left`` counts its tokens down."""

    def __init__(self, of: Vocabulary, parts: tuple[Part, ...], watcher: Watcher | None = None, left: int = 0) -> None:
        self.of, self.parts, self.watcher, self.left = of, parts, watcher, left

    def fork(self) -> TemplateController:
        """See ``Controller``."""
        return TemplateController(self.of, self.parts, self.watcher and self.watcher.fork(), self.left)

    def step(self, event: Event) -> list[Branch]:
        """See ``Controller``."""
        if event.append and event.append[-1] in self.of.ends:
            return []
        if self.watcher is not None:
            self.left -= 1
            if (match := self.watcher.push(event.append[-1])) is not None:
                # Remove the token in which the stop began, and write again what it holds before the stop.
                self.watcher.rewind(match.tokens)
                before = match.end - len(match.text.encode()) - self.watcher.position.end
                return self._continue(match.tokens, self.of.bytes[match.ban][:before])
            if self.left:
                return [Branch(allow=self._words())]
        return self._continue()

    def _continue(self, backtrack: int = 0, text: bytes = b"") -> list[Branch]:
        self.watcher = None
        while self.parts and isinstance(self.parts[0], bytes):
            text, self.parts = text + self.parts[0], self.parts[1:]
        if text or (backtrack and not self.parts):
            return [Branch(backtrack, None, (self.of.engine.tokenize_bytes(text) or self.of.ends[:1],))]
        if not self.parts:
            return []
        free, self.parts = self.parts[0], self.parts[1:]
        assert isinstance(free, tuple)
        self.left, self.watcher = free[0], Watcher(self.of.bytes, free[1])
        return [Branch(backtrack, self._words())]

    def _words(self) -> np.ndarray:
        words = pack(np.array([bool(piece) for piece in self.of.bytes]))
        return words if self.parts else words | mask_of(self.of.ends, self.of.size)


@checked
def load(
    vocabulary: Vocabulary,
    parts: Sequence[str | Annotated[Mapping[str, object], Form("{max_tokens: TOKENS, stop: TEXT}")]],
) -> ControllerConstraint:
    r"""Return a constraint by which the output is ``parts``, with the free parts filled in.

    Args:
        vocabulary: the target's.
        parts: texts, and free parts of at most so many tokens and up to a stop string, such as ["Name: ",
            {max_tokens: 20, stop: ","}, ", age: ", {max_tokens: 3}]; on the command line a new line in a text is one
            that is typed, in a file "\n".

    Raises:
        ValueError: an invalid part, or too many of them.
    """
    if len(parts) > MAX_PARTS:
        raise WrongOption(f"parts has {len(parts)} parts; the maximum is {MAX_PARTS}")
    accept("parts", [part for part in parts if isinstance(part, str) and part], Texts)
    made: list[Part] = []
    for number, part in enumerate(parts):
        name = f"parts[{number}]"
        if isinstance(part, str):
            made.append(part.encode())
        elif isinstance(part, Mapping) and "max_tokens" in part and set(part) <= {"max_tokens", "stop"}:
            stops: list[Any] = [part["stop"]] if "stop" in part else []
            accept(f"{name}.stop", stops, Texts)
            check_strings(f"{name}.stop", tuple(stops))
            made.append((whole(f"{name}.max_tokens", part["max_tokens"], maximum=2**20), Strings(tuple(stops))))
        elif isinstance(part, Mapping) and "most" in part:
            raise WrongOption(f"{name}.most is now called {name}.max_tokens")
        else:
            raise WrongOption(f"{name} must be a text or {{max_tokens: TOKENS, stop: TEXT}}, not {brief(part)}")
    return ControllerConstraint(
        lambda _: TemplateController(vocabulary, tuple(made)), vocabulary.size, "template", facts={"parts": [*parts]}
    )
