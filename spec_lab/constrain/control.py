"""Controllers: programs that steer a sequence token by token, and the constraint that runs them with drafts.

The Branch protocol follows AICI's ``mid_process``; this module says exactly what each field means. The autoregressive
driver, which calls ``step`` after each sampled token, defines the output distribution. Drafts change only the speed:

    branches = controller.step(Event())             # after the prompt
    repeat:
        no branch: the sequence ends ("constraint")
        fork sequence and controller for each branch but the first; then, for each branch on its own:
        remove ``backtrack`` tokens
        at the length limit: the sequence ends ("length")
        append ``ff[0]``, or a token sampled under the mask ``allow`` with the tokens that ``ff`` puts after it
        branches = controller.step(Event(index of the branch, backtrack, appended tokens))

A stop token or the limit ends the sequence at once, also inside an ``ff`` list; ``step`` is then not called again. If
no token may be sampled, or a controller raises an error, the sequence ends ("stuck"); the rest of the batch continues.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import numpy as np

from spec_lab.constrain.protocol import Constraint, ConstraintError, ConstraintState, Continuation, mask_of, width
from spec_lab.core.options import brief_repr
from spec_lab.core.request import Ended, Request

ANY: Final = "any"
"""Allows every token."""

Allow = Literal["any"] | Collection[int] | np.ndarray | None


@dataclass(frozen=True)
class Branch:
    """One continuation of a sequence.

    Args:
        backtrack: number of tokens to remove first from the sequence's end. The token just sampled counts, and so do
            the tokens fast-forwarded after it: 1 removes the sequence's last token, whatever put it there. Removing
            tokens of the prompt is an error.
        allow: the tokens that may be sampled next: ``ANY``, a collection of tokens, or a packed mask (``[W]`` uint32,
            see ``protocol``). None: no token is sampled, and ``ff`` holds exactly one list, which is appended.
        ff: fast-forward (jump-forward) tokens. With an ``allow``: lists of tokens, no two with the same first token. If
            the sampled token is the first of a list, the whole list is appended, the sampled token once; otherwise the
            sampled token alone. A list whose first token is not allowed is never used. No list is empty.

    Raises:
        ConstraintError: an empty or ambiguous list, a wrong number of lists, a negative ``backtrack``.
    """

    backtrack: int = 0
    allow: Allow = ANY
    ff: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        firsts = [tokens[0] for tokens in self.ff if len(tokens)]
        if len(firsts) < len(self.ff):
            raise ConstraintError("a Branch has an empty list of tokens to fast-forward")
        if self.allow is None and len(self.ff) != 1:
            raise ConstraintError(f"a Branch without allow needs exactly one list of tokens in ff, not {len(self.ff)}")
        if len(set(firsts)) < len(firsts):
            raise ConstraintError("a Branch has two lists to fast-forward that begin with the same token")
        if self.backtrack < 0:
            raise ConstraintError(f"a Branch has the negative backtrack {self.backtrack}")


@dataclass(frozen=True)
class Event:
    """Outcome of a branch of the last step, as the engine decided it.

    Args:
        branch: its index in the list that ``step`` returned. Branch 0 keeps the sequence, its KV cells and its random
            stream; every other branch is a fork, which shares the cells and has a random stream of its own.
        backtrack: number of tokens that were removed.
        append: tokens that were appended after that: sampled, fast-forwarded, or both. Empty only in the first event,
            before any token is emitted.
    """

    branch: int = 0
    backtrack: int = 0
    append: tuple[int, ...] = ()


class Controller(Protocol):
    """Steers one sequence.

    With drafts, ``step`` is also called on forks, for draft tokens that may be rejected: its result must depend on the
    events alone, and it must have no effect outside the controller. A controller that cannot be forked is decoded
    without drafts (``ControllerConstraint.supports_drafts``). An error that it raises ends its own sequence only.
    """

    def step(self, event: Event) -> Sequence[Branch]:
        """Return what to do next; an empty list ends the sequence."""
        ...

    def fork(self) -> Controller:
        """Return an independent copy."""
        ...


@dataclass(frozen=True)
class ControllerConstraint(Constraint):
    """Requests steered by controllers. See ``Constraint``.

    Args:
        make: returns a new controller for a request.
        vocabulary: V.
        name: as in configs and records.
        supports_drafts: whether controllers can be forked; without forks nothing is drafted.
        facts: what the manifest records.
        keep: as in ``Constraint``.
        reads_logprobs: whether ``keep`` reads log-probabilities.
    """

    make: Callable[[Request], Controller]
    vocabulary: int
    name: str = "controller"
    supports_drafts: bool = True
    facts: Mapping[str, Any] = field(default_factory=dict)
    keep: Callable[[Sequence[Ended]], Collection[int]] | None = None
    reads_logprobs: bool = False

    has_actions = True

    def start(self, request: Request) -> ControllerState:
        """See ``Constraint``."""
        try:
            controller = self.make(request)
        except Exception as error:
            raise ConstraintError(f"controller '{self.name}' cannot be made: {_message(error)}") from error
        if not hasattr(controller, "step"):
            raise ConstraintError(
                f"controller '{self.name}' cannot be made: {brief_repr(controller)} was returned for the request "
                f"'{request.name}', not a controller with a method step: return one for each request"
            )
        state = ControllerState(self, controller, Branch())
        state.step(Event())
        return state


class ControllerState(ConstraintState):
    """A controller between two of its steps. See ``ConstraintState``.

    Args:
        of: the constraint that made the controller.
        controller: after its last step.
        branch: the branch of that step which this sequence follows.
        number: its index in what the step returned.
    """

    def __init__(self, of: ControllerConstraint, controller: Controller, branch: Branch, number: int = 0) -> None:
        self.of, self.controller = of, controller
        self.appended: tuple[int, ...] = ()
        self.forced: tuple[int, ...] = ()
        self.pending: tuple[Continuation, ...] | None = None
        self._follow(branch, number)

    def fork(self) -> ConstraintState:
        """See ``ConstraintState``. A controller that cannot be forked is a barrier to drafts, not an error."""
        try:
            controller = self.controller.fork()
        except Exception as error:
            return FailedState(ConstraintError(f"controller '{self.of.name}' cannot be forked: {_message(error)}"))
        twin = ControllerState(self.of, controller, self.branch, self.number)
        twin.appended, twin.forced = self.appended, self.forced
        if self.pending is not None:
            twin.pending = tuple(
                Continuation(continuation.backtrack, continuation.state.fork()) for continuation in self.pending
            )
        return twin

    def advance(self, token: int) -> None:
        """See ``ConstraintState``."""
        self.appended += (token,)
        if self.forced:
            self.forced = self.forced[1:]
        else:
            self.forced = next((tuple(tokens[1:]) for tokens in self.branch.ff if tokens[0] == token), ())
        if not self.forced:
            try:
                self.step(Event(self.number, self.branch.backtrack, self.appended))
            except ConstraintError as error:
                self.pending = FailedState(error).action()

    def mask(self) -> np.ndarray | None:
        """See ``ConstraintState``."""
        allow = self.forced[:1] or self.branch.allow
        if allow is None or isinstance(allow, str):
            return None
        return allow if isinstance(allow, np.ndarray) else mask_of(allow, self.of.vocabulary)

    def action(self) -> tuple[Continuation, ...] | None:
        """See ``ConstraintState``."""
        return self.pending

    def step(self, event: Event) -> None:
        """Call the controller's ``step`` and follow its branches.

        Raises:
            ConstraintError: it raised an error, or returned no valid branches; names it and the event.
        """
        try:
            branches = self._checked(self.controller.step(event))
            controllers = [self.controller, *(self.controller.fork() for _ in branches[1:])]
        except Exception as error:
            raise ConstraintError(f"controller '{self.of.name}' at {event}: {_message(error)}") from error
        if len(branches) == 1 and not branches[0].backtrack:
            self._follow(branches[0])
            return
        self.pending = tuple(
            Continuation(branch.backtrack, ControllerState(self.of, controller, branch, number))
            for number, (controller, branch) in enumerate(zip(controllers, branches, strict=False))
        )

    def _follow(self, branch: Branch, number: int = 0) -> None:
        self.branch, self.number, self.appended = branch, number, ()
        self.forced = tuple(branch.ff[0]) if branch.allow is None else ()

    def _checked(self, branches: Any) -> tuple[Branch, ...]:
        """Return what a step returned after checking all of it, since nothing is checked later."""
        if not isinstance(branches, list | tuple) or not all(isinstance(branch, Branch) for branch in branches):
            raise ConstraintError(f"step must return a list of Branch, not {branches!r:.200}")
        for branch in branches:
            tokens = [token for run in branch.ff for token in run]
            if isinstance(branch.allow, np.ndarray):
                if branch.allow.dtype != np.uint32 or branch.allow.shape != (width(self.of.vocabulary),):
                    raise ConstraintError(
                        f"a packed mask is [{width(self.of.vocabulary)}] uint32, "
                        f"not {[*branch.allow.shape]} {branch.allow.dtype}"
                    )
            elif isinstance(branch.allow, str):
                if branch.allow != ANY:
                    raise ConstraintError(
                        f"a Branch has allow={branch.allow!r}: give tokens, a packed mask, ANY or None"
                    )
            elif branch.allow is not None:
                tokens += branch.allow
            wrong = [token for token in tokens if not 0 <= token < self.of.vocabulary]
            if wrong:
                raise ConstraintError(f"a Branch holds the token {wrong[0]}, outside 0 to {self.of.vocabulary - 1}")
        return tuple(branches)


class FailedState(ConstraintState):
    """A controller that raised an error. See ``ConstraintState``.

    It is a barrier: draft tokens up to it are verified as usual, and the error is raised only if its token is committed
    and the action is taken.
    """

    def __init__(self, error: ConstraintError, noticed: bool = False) -> None:
        self.error, self.noticed = error, noticed

    def fork(self) -> FailedState:
        """See ``ConstraintState``."""
        return self

    def advance(self, token: int) -> None:
        """See ``ConstraintState``."""

    def mask(self) -> np.ndarray | None:
        """See ``ConstraintState``."""
        raise self.error

    def action(self) -> tuple[Continuation, ...] | None:
        """See ``ConstraintState``."""
        if self.noticed:
            raise self.error
        return (Continuation(0, FailedState(self.error, True)),)


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, ConstraintError) else f"{type(error).__name__}: {error}"
