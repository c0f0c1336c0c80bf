"""Controllers: programs that steer a sequence token by token, and the constraint that drives them with drafts.

The Branch protocol follows AICI's ``mid_process``; what each field means is settled here. The autoregressive driver,
which calls ``step`` after each sampled token, defines the law; drafts change how fast it is decoded, never the law:

    branches = controller.step(Event())             # at the end of the prompt
    repeat:
        no branches: the sequence ends ("constraint")
        one fork of sequence and controller for each branch but the first; then, for each branch on its own:
        take back ``backtrack`` tokens
        the limit is reached: the sequence ends ("length")
        append: ``ff[0]``, or a token sampled from the law under ``allow`` and what ``ff`` puts after it
        branches = controller.step(Event(number of the branch, backtrack, what was appended))

A stop token or a limit ends the sequence where it comes, within a list as well; the controller is then not asked again.
Nothing may be sampled, or a controller breaks: the sequence ends ("stuck"), its batch mates go on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import numpy as np

from spec_lab.constrain.protocol import Onward, State, Stuck, only, width
from spec_lab.engine.request import Ended, Request

ANY: Final = "any"
"""Every token."""

Allow = Literal["any"] | Collection[int] | np.ndarray | None


@dataclass(frozen=True)
class Branch:
    """One way on for a sequence.

    Args:
        backtrack: tokens to take back first, from the sequence's end. The token just sampled counts, and so do the
            tokens fast-forwarded after it: 1 takes back the very last token that the sequence has, whatever put it
            there. Tokens of the prompt stay: who reaches for them breaks.
        allow: what may be sampled next: ``ANY``, these tokens only, or a packed mask (``[W]`` uint32, see ``state``).
            None: nothing is sampled, and ``ff`` holds exactly one list, which is appended.
        ff: with an ``allow``: lists of tokens, no two with the same first one. If the sampled token is the first of a
            list, the whole list is appended, the sampled token once; else the sampled token alone. A list whose first
            token is not allowed is never used. No list is empty.

    Raises:
        Stuck: lists that are empty, ambiguous or not as many as needed; a negative ``backtrack``.
    """

    backtrack: int = 0
    allow: Allow = ANY
    ff: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        firsts = [tokens[0] for tokens in self.ff if len(tokens)]
        if len(firsts) < len(self.ff):
            raise Stuck("a Branch has an empty list of tokens to fast-forward")
        if self.allow is None and len(self.ff) != 1:
            raise Stuck(f"a Branch that samples nothing appends exactly one list of tokens, not {len(self.ff)}")
        if len(set(firsts)) < len(firsts):
            raise Stuck("a Branch has two lists to fast-forward that begin with the same token")
        if self.backtrack < 0:
            raise Stuck(f"a Branch takes back {self.backtrack} tokens")


@dataclass(frozen=True)
class Event:
    """What became of the last step's branch.

    Args:
        branch: its place in the list that ``step`` returned. Branch 0 keeps the sequence, its cells and its stream of
            random choices; every other one is a fork of it, which shares its cells and has a stream of its own.
        backtrack: tokens that were taken back.
        append: tokens that were appended then: sampled, fast-forwarded, or both. Empty in the first event only, which
            comes when nothing has been emitted yet.
    """

    branch: int = 0
    backtrack: int = 0
    append: tuple[int, ...] = ()


class Controller(Protocol):
    """Steers one sequence.

    With drafts, ``step`` is also called on forks, for tokens that may then be rejected: its result must follow from the
    events alone, and it must have no effect outside the controller. A controller that cannot be forked is decoded
    without drafts (``Controlled.peeks``). Whatever it raises ends its own sequence only.
    """

    def step(self, event: Event) -> Sequence[Branch]:
        """What to do next. No branch at all ends the sequence."""
        ...

    def fork(self) -> Controller:
        """An independent copy."""
        ...


@dataclass(frozen=True)
class Controlled:
    """Requests steered by controllers. See ``Constraint``.

    Args:
        make: a new controller for each request.
        vocabulary: V.
        name: as in configs and records.
        peeks: whether controllers can be forked; otherwise nothing is drafted.
        facts: what a record should keep.
        keep: as ``Constraint`` may offer it; None keeps every sequence.
        wants_logprobs: whether ``keep`` reads log-probabilities.
    """

    make: Callable[[Request], Controller]
    vocabulary: int
    name: str = "controller"
    peeks: bool = True
    facts: Mapping[str, Any] = field(default_factory=dict)
    keep: Callable[[Sequence[Ended]], Collection[int]] | None = None
    wants_logprobs: bool = False

    acts = True

    def start(self, request: Request) -> Steered:
        """See ``Constraint``."""
        try:
            controller = self.make(request)
        except Exception as error:
            raise Stuck(f"controller '{self.name}' cannot be made: {_words(error)}") from error
        state = Steered(self, controller, Branch())
        state.step(Event())
        return state


class Steered:
    """A controller between two of its steps. See ``State``.

    Args:
        of: whose controller.
        controller: as it is after its last step.
        branch: what that step said.
        number: its place in what the step returned.
    """

    def __init__(self, of: Controlled, controller: Controller, branch: Branch, number: int = 0) -> None:
        self.of, self.controller = of, controller
        self.appended: tuple[int, ...] = ()
        self.certain: tuple[int, ...] = ()
        self.wanted: tuple[Onward, ...] | None = None
        self._follow(branch, number)

    def fork(self) -> State:
        """See ``State``. A controller that cannot be forked is a barrier to drafts, and no error."""
        try:
            controller = self.controller.fork()
        except Exception as error:
            return Failed(Stuck(f"controller '{self.of.name}' cannot be forked: {_words(error)}"))
        twin = Steered(self.of, controller, self.branch, self.number)
        twin.appended, twin.certain = self.appended, self.certain
        if self.wanted is not None:
            twin.wanted = tuple(Onward(one.backtrack, one.state.fork()) for one in self.wanted)
        return twin

    def advance(self, token: int) -> None:
        """See ``State``."""
        self.appended += (token,)
        if self.certain:
            self.certain = self.certain[1:]
        else:
            self.certain = next((tuple(tokens[1:]) for tokens in self.branch.ff if tokens[0] == token), ())
        if not self.certain:
            try:
                self.step(Event(self.number, self.branch.backtrack, self.appended))
            except Stuck as error:
                self.wanted = Failed(error).action()

    def mask(self) -> np.ndarray | None:
        """See ``State``."""
        allow = self.certain[:1] or self.branch.allow
        if allow is None or isinstance(allow, str):
            return None
        return allow if isinstance(allow, np.ndarray) else only(allow, self.of.vocabulary)

    def action(self) -> tuple[Onward, ...] | None:
        """See ``State``."""
        return self.wanted

    def step(self, event: Event) -> None:
        """Ask the controller, and follow it.

        Raises:
            Stuck: it broke; names it and the event.
        """
        try:
            branches = self._checked(self.controller.step(event))
            controllers = [self.controller, *(self.controller.fork() for _ in branches[1:])]
        except Exception as error:
            raise Stuck(f"controller '{self.of.name}' at {event}: {_words(error)}") from error
        if len(branches) == 1 and not branches[0].backtrack:
            self._follow(branches[0])
            return
        self.wanted = tuple(
            Onward(branch.backtrack, Steered(self.of, controller, branch, number))
            for number, (controller, branch) in enumerate(zip(controllers, branches, strict=False))
        )

    def _follow(self, branch: Branch, number: int = 0) -> None:
        self.branch, self.number, self.appended = branch, number, ()
        self.certain = tuple(branch.ff[0]) if branch.allow is None else ()

    def _checked(self, branches: Any) -> tuple[Branch, ...]:
        """What a step returned, if it is as it must be: later nothing is looked at again."""
        if not isinstance(branches, list | tuple) or not all(isinstance(branch, Branch) for branch in branches):
            raise Stuck(f"step must return a list of Branch, not {branches!r:.200}")
        for branch in branches:
            tokens = [token for one in branch.ff for token in one]
            if isinstance(branch.allow, np.ndarray):
                if branch.allow.dtype != np.uint32 or branch.allow.shape != (width(self.of.vocabulary),):
                    raise Stuck(
                        f"a packed mask is [{width(self.of.vocabulary)}] uint32, "
                        f"not {[*branch.allow.shape]} {branch.allow.dtype}"
                    )
            elif isinstance(branch.allow, str):
                if branch.allow != ANY:
                    raise Stuck(f"a Branch allows {branch.allow!r}: give tokens, ANY or None")
            elif branch.allow is not None:
                tokens += branch.allow
            wrong = [token for token in tokens if not 0 <= token < self.of.vocabulary]
            if wrong:
                raise Stuck(f"a Branch names token {wrong[0]}; there are tokens 0 to {self.of.vocabulary - 1}")
        return tuple(branches)


class Failed:
    """A controller that broke. See ``State``.

    It shows as a barrier, so that drafts that come there are judged as if it were well: the error waits until the
    token is committed, and is raised only when the action is taken.
    """

    def __init__(self, error: Stuck, noticed: bool = False) -> None:
        self.error, self.noticed = error, noticed

    def fork(self) -> Failed:
        """See ``State``."""
        return self

    def advance(self, token: int) -> None:
        """See ``State``."""

    def mask(self) -> np.ndarray | None:
        """See ``State``."""
        raise self.error

    def action(self) -> tuple[Onward, ...] | None:
        """See ``State``."""
        if self.noticed:
            raise self.error
        return (Onward(0, Failed(self.error, True)),)


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, Stuck) else f"{type(error).__name__}: {error}"
