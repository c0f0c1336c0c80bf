"""``+experiment=stream``: print texts and answers while they are decoded, shaded by the origin of each token."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text as Line

from spec_lab.analysis.console import standard_output
from spec_lab.constrain.vocabulary import text_bytes
from spec_lab.core.options import Filled, checked
from spec_lab.core.request import BROKEN
from spec_lab.core.terminal import CONTROLS
from spec_lab.decode.engine import Engine
from spec_lab.decode.prefix_cache import PrefixCache
from spec_lab.decode.sequence import ORIGINS
from spec_lab.decode.step import StepInfo
from spec_lab.results.run_state import INTERRUPTED
from spec_lab.tasks.generation import SequenceEvent, Share, engine_with_events, steps_with_events
from spec_lab.tasks.lab import Lab, Settings
from spec_lab.text.chat_template import ChatTemplate
from spec_lab.text.conversations import check_said, conversation_prompt
from spec_lab.text.detokenizer import Finish, Text, Withdrawn
from spec_lab.text.prompts import Prompt

BROKE = 1
"""Exit code if the request failed."""

SHADES = {
    "accepted": (Style.parse("black on #b7e4b0"), Style.parse("black on #94d38c")),
    "forced": (Style.parse("black on #b5d3f5"), Style.parse("black on #8fbbec")),
    "recovered": (Style(), Style()),
    "bonus": (Style(), Style()),
}
"""Two alternating shades for each origin, so that neighbouring tokens can be told apart."""

TAKEN_BACK = Style(color="red", strike=True)
QUIET = Style(dim=True)


@checked
def stream(
    lab: Lab,
    settings: Settings,
    config: Mapping[str, Any],
    console: Console | None = None,
    errors: Console | None = None,
    *,
    prompt: Filled | None = None,
    chat: bool = False,
    messages: Sequence[Mapping[str, Any]] | None = None,
) -> int:
    """Continue a text, or answer messages: print text as soon as no later token can change it, and a line of figures.

    On a terminal with colours the prompt is dim and tokens are shaded by origin; text that a constraint withdraws after
    it was printed is printed again, struck through. Elsewhere only the text is printed; if the constraint may withdraw
    text, a branch is printed when it has finished. Each fork is printed under a heading after the branches before it.

    Args:
        lab: the parts.
        settings: the scalars; nothing is written to ``output_dir``.
        config: not read.
        console: prints the text; default standard output.
        errors: prints the figures; default standard error.
        prompt: the text to continue; None: the run's prompts, one after the other, with all turns of conversations.
        chat: true: the prompt is a message of the user, written by the target's chat template.
        messages: a conversation in place of the prompt, which the target answers: [{role: user, content: "Hi"}].

    Returns:
        The exit code: 0; 1 if a request failed; 130 after Ctrl-C.

    Raises:
        ValueError: an empty prompt, or one that does not fit the context; incompatible parts or options.
    """
    console, errors = console or standard_output(), errors or Console(stderr=True)
    pieces = text_bytes(lab.target) if lab.pieces is None else lab.pieces
    prompts, cache, code = _prompts(lab, prompt, chat, messages), settings.new_prefix_cache(), 0
    lab, settings = replace(lab, prompts=prompts, pieces=pieces), replace(settings, batch_size=1)
    try:
        for conversation in prompts:
            answers = list[str]()
            while not code and len(answers) < conversation.turns:
                said = tuple(conversation.conversation(answers)) if answers or conversation.messages else ()
                turn = replace(
                    conversation, text=conversation.later[len(answers) - 1] if answers else conversation.text,
                    messages=said, later=(), checker="", answer="",
                )  # fmt: skip
                code, answer = _stream_one(replace(lab, prompts=[turn]), settings, cache, console, errors)
                answers.append(answer)
            if code:
                break
    finally:
        if settings.output_dir.absolute() != Path.cwd():
            with suppress(OSError):
                settings.output_dir.rmdir()  # Hydra made it
    return code


def _prompts(
    lab: Lab, prompt: str | None, chat: bool, messages: Sequence[Mapping[str, Any]] | None
) -> Sequence[Prompt]:
    """Return what is streamed. Arguments and errors as in ``stream``."""
    check_said(prompt, chat, messages)
    if messages is not None:
        return [conversation_prompt("messages", messages)]
    if prompt is None:
        return lab.prompts
    return [Prompt("prompt", prompt, template=ChatTemplate() if chat else None)]


def _stream_one(
    lab: Lab, settings: Settings, cache: PrefixCache | None, console: Console, errors: Console
) -> tuple[int, str]:
    """Print the continuation of the lab's only prompt; return the exit code and the text."""
    group = engine_with_events(lab, settings, cache)
    acts = lab.applied is not None and lab.applied.constraint.has_actions
    page = _Page(console, lab.prompts[0], whole=acts and not console.is_terminal)
    done, code, began = [], 0, time.perf_counter()
    try:
        with closing(steps_with_events(group)) as decoding:
            for outcome, events in decoding:
                done += [] if outcome is None else [outcome]
                page.add(events)
    except KeyboardInterrupt:
        code = INTERRUPTED
    seconds = time.perf_counter() - began
    page.end()
    for why in group.errors.values():
        errors.print(Line(why, "red"), soft_wrap=True)
        code = code or BROKE * any(sequence.finish in BROKEN for sequence in group.sequences)
    errors.print(_figures(group, done, seconds), soft_wrap=True)
    first = group.sequences[0]
    return code, lab.shown(first.request, first.emitted)


class _Page:
    """Prints one branch after the other.

    Args:
        prompt: printed first if the console has colours; a message with an empty line around it.
        whole: whether a branch is printed only when it has finished.
    """

    def __init__(self, console: Console, prompt: Prompt, whole: bool) -> None:
        self.console, self.whole = console, whole
        self.colour = console.is_terminal and console.color_system is not None and not console.no_color
        self.waiting: dict[tuple[int, ...], list[Share]] = {}
        self.finished: set[tuple[int, ...]] = set()
        self.shown: list[tuple[int, ...]] = []
        self.last = ""
        if self.colour:
            around = "\n" if prompt.template is not None or prompt.messages else ""
            self._write(f"{around}{prompt.text}{2 * around}", QUIET)

    def add(self, events: list[SequenceEvent]) -> None:
        """Add events, and print the text that can be printed."""
        for read in events:
            shares = self.waiting.setdefault(read.branch, [])
            if isinstance(read.event, Text):
                shares += read.shares
            elif isinstance(read.event, Withdrawn):
                self._withdraw(shares, read.event.text)
            elif isinstance(read.event, Finish):
                self.finished.add(read.branch)
        self._print(every=False)

    def end(self) -> None:
        """Print the rest after the last event."""
        self._print(every=True)
        if self.console.is_terminal and self.last not in ("", "\n"):
            self._write("\n")

    def _print(self, every: bool) -> None:
        for branch in sorted(self.waiting):
            over = every or branch in self.finished
            if branch not in self.shown:
                if self.shown and not (every or set(self.shown) <= self.finished):
                    continue  # branches are printed one at a time
                if self.shown:
                    self._heading(branch)
                self.shown.append(branch)
            if over or not self.whole:
                for share in self.waiting[branch]:
                    self._write(share.text, SHADES[share.origin][share.index % 2])
                self.waiting[branch].clear()

    def _heading(self, branch: tuple[int, ...]) -> None:
        newline = "" if self.last in ("", "\n") else "\n"
        self._write(f"{newline}── fork {'.'.join(map(str, branch))} ──\n", QUIET)

    def _withdraw(self, shares: list[Share], text: str) -> None:
        """Withdraw text: unprinted text is dropped, printed text is marked as taken back."""
        while text and shares:
            share = shares.pop()
            kept = share.text[: max(len(share.text) - len(text), 0)]
            text = text[: max(len(text) - len(share.text), 0)]
            if kept:
                shares.append(replace(share, text=kept))
        if text:
            self._write(text if self.colour else f"[taken back: {text}]", TAKEN_BACK)

    def _write(self, text: str, style: Style | None = None) -> None:
        """Print exactly this text; on a terminal, control characters as symbols. Line ends are not shaded."""
        if not text:
            return
        self.last = text[-1]
        if self.console.is_terminal:
            text = text.translate(CONTROLS)
        shade = style if self.colour else None
        parts = [Segment(part, None if part == "\n" else shade) for part in re.split("(\n)", text)]
        self.console.print(Segments(parts), end="", soft_wrap=True)


def _figures(group: Engine, done: list[StepInfo], seconds: float) -> Line:
    """Return the line of figures. Only tokens that were not withdrawn count; tau is ``metrics.tau_pooled``."""
    origins = Counter(
        origin
        for sequence in group.sequences
        for origin in sequence.origins[sequence.born - len(sequence.request.tokens) :]
    )
    tokens = origins.total()
    steps = [
        got for outcome in done for got, first in zip(outcome.committed, outcome.prefill, strict=True) if not first
    ]
    generated = sum(got.count(kept=True) - got.count(forced=True, kept=True) for got in steps)
    line = Line(f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f} tokens/s")
    line.append(f"; tau {generated / len(steps):.2f}" if steps else "")
    for origin in ORIGINS:
        line.append("; " if origin == "accepted" else ", ").append(f"{origin}", SHADES[origin][0])
        line.append(f" {origins[origin] / max(tokens, 1):.0%}")
    finishes = [
        (sequence.finish or "interrupted") + ("" if sequence.kept else " (dropped)") for sequence in group.sequences
    ]
    return line.append(f"; {', '.join(finishes)}")
