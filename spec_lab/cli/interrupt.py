"""Ctrl-C at any moment: print one line and exit with code 130.

At start-up (imports, composing configs, loading models) Ctrl-C ends the process at once, since a ``KeyboardInterrupt``
that is raised inside an import may be swallowed or turned into another error. While tokens are decoded it is raised as
usual, so that finished groups are gathered. Files are written so that a kill at any moment leaves them intact.

The only state is the process's handler of SIGINT. Without ``install`` (in a notebook, in tests) nothing here changes
what Ctrl-C does. This module imports little, since Ctrl-C prints a traceback until ``install`` is called.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Literal, NoReturn

CODE = 130
"""Exit code after Ctrl-C."""


class Leave:
    """A signal handler that ends the process at once.

    Args:
        message: printed on standard error; empty for nothing.
        folder: a directory to remove if it holds nothing but a run's lock; empty for none.
        stage: "start" of a process, in which other handlers may replace this one; "worker": a process whose parent
            prints the message; "interrupted": Ctrl-C was pressed before.
    """

    def __init__(
        self,
        message: str = "Interrupted.",
        folder: str = "",
        stage: Literal["start", "worker", "interrupted"] = "start",
    ) -> None:
        self.message = message
        self.folder = folder
        self.stage = stage

    def __call__(self, *_: object) -> None:
        """Print the message and end the process."""
        try:
            if self.folder and os.listdir(self.folder) in ([], [".lock"]):
                for name in os.listdir(self.folder):
                    os.unlink(os.path.join(self.folder, name))
                os.rmdir(self.folder)
            if self.message:
                os.write(2, f"\n{self.message}\n".encode(errors="replace"))
        finally:
            os._exit(CODE)


class Raise:
    """A handler that raises ``KeyboardInterrupt`` once; a second Ctrl-C ends the process at once.

    Args:
        within: the first part of the name of a module; outside of its functions, and of those that they call, Ctrl-C
            ends the process at once. Empty: it is raised everywhere.
    """

    def __init__(self, within: str = "", outside: Leave | None = None) -> None:
        self.within = within
        self.outside = outside or Leave()

    def __call__(self, _: object = None, frame: FrameType | None = None) -> None:
        """Install the handler of the next Ctrl-C, and raise."""
        if not _is_within(self.within, frame):
            self.outside()
        signal.signal(signal.SIGINT, Leave("Interrupted again.", stage="interrupted"))
        raise KeyboardInterrupt


def _is_within(module: str, frame: FrameType | None) -> bool:
    """Return whether a function of a module of this name, or one that it calls, is running."""
    while module and frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(module):
            return True
        frame = frame.f_back
    return not module


class Raising:
    """Context manager inside which the first Ctrl-C raises ``KeyboardInterrupt``."""

    def __enter__(self) -> None:
        self.before = signal.getsignal(signal.SIGINT)
        if _at(self.before, "start"):
            signal.signal(signal.SIGINT, Raise())

    def __exit__(self, *_: object) -> None:
        if _at(self.before, "start") and not interrupted():
            signal.signal(signal.SIGINT, self.before)


def install(handler: Leave) -> None:
    """Install a handler that ends this process at Ctrl-C; do nothing if SIGINT already has another handler."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)
        sys.unraisablehook = _unraisable
        atexit.register(
            signal.signal, signal.SIGINT, signal.SIG_IGN
        )  # runs last: SIGINT would kill a finalising Python


def change(handler: Leave | Raise) -> None:
    """Replace the handler that ``install`` set; do nothing if there is another one."""
    if _at(signal.getsignal(signal.SIGINT), "start"):
        signal.signal(signal.SIGINT, handler)


def keep_from_workers() -> None:
    """Block SIGINT in processes that are started after this call; this process still receives it.

    A terminal sends SIGINT to every process of the foreground job, and a worker that is starting would print a
    traceback. Child processes inherit the signals that the main thread blocks. Another thread of this process does not
    block SIGINT and receives it.
    """
    import threading
    from multiprocessing.resource_tracker import ensure_running

    ensure_running()  # called first, because it unblocks SIGINT when it starts
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def raises() -> bool:
    """Return whether Ctrl-C raises ``KeyboardInterrupt`` because ``change`` set ``Raise``."""
    return isinstance(signal.getsignal(signal.SIGINT), Raise)


def interrupted() -> bool:
    """Return whether Ctrl-C was pressed, even if a library caught the ``KeyboardInterrupt``."""
    return _at(signal.getsignal(signal.SIGINT), "interrupted")


def _at(handler: object, stage: str) -> bool:
    """Return whether a handler of SIGINT ends the process at this stage."""
    return isinstance(handler, Leave) and handler.stage == stage


def end() -> NoReturn:
    """End the process with exit code 130.

    ``sys.exit`` may end it by SIGINT instead: Python remembers a ``KeyboardInterrupt`` that went through ``exec``.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
    os._exit(CODE)


def _unraisable(error: sys.UnraisableHookArgs) -> None:
    """End the process after a ``KeyboardInterrupt`` in a destructor or a callback, which Python only reports."""
    if isinstance(error.exc_value, KeyboardInterrupt):
        Leave()()
    sys.__unraisablehook__(error)
