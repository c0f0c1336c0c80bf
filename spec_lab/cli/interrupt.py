"""Ctrl-C: one line and exit code 130, whenever it comes.

While a command starts up (imports, composing configs, loading models), Ctrl-C ends the process at once: a
``KeyboardInterrupt`` that is raised inside an import may be swallowed there, or turned into another error. While tokens
are decoded, it is raised as usual, so that finished groups are gathered. Files are safe against a kill at any moment.

The state is the process's handler of SIGINT. Without ``install`` (in a notebook, in tests) nothing here changes what
Ctrl-C does. Few modules are imported here: until ``install`` is called, Ctrl-C prints a traceback.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

CODE = 130
"""Exit code after Ctrl-C."""


class Leave:
    """A handler that ends the process at once.

    Args:
        said: what is printed on standard error; empty for nothing.
        folder: a directory that is removed if it holds nothing but the lock of a run; empty for none.
    """

    def __init__(self, said: str = "Interrupted.", folder: str = "") -> None:
        self.said = said
        self.folder = folder

    def __call__(self, *_: object) -> None:
        """Print the line, and end the process."""
        try:
            if self.folder and os.listdir(self.folder) in ([], [".lock"]):
                for name in os.listdir(self.folder):
                    os.unlink(os.path.join(self.folder, name))
                os.rmdir(self.folder)
            if self.said:
                os.write(2, f"\n{self.said}\n".encode(errors="replace"))
        finally:
            os._exit(CODE)


class Silent(Leave):
    """The handler of a worker process, whose parent prints the line."""


class Raise:
    """A handler that raises ``KeyboardInterrupt`` once; a second Ctrl-C ends the process at once."""

    def __call__(self, *_: object) -> None:
        """Raise, and keep in mind that Ctrl-C was pressed."""
        signal.signal(signal.SIGINT, Again("Interrupted again."))
        raise KeyboardInterrupt


class Again(Leave):
    """The handler after the first Ctrl-C."""


class Raising:
    """While inside, the first Ctrl-C raises ``KeyboardInterrupt``."""

    def __enter__(self) -> None:
        self.before = signal.getsignal(signal.SIGINT)
        if type(self.before) is Leave:
            signal.signal(signal.SIGINT, Raise())

    def __exit__(self, *_: object) -> None:
        if type(self.before) is Leave and not interrupted():
            signal.signal(signal.SIGINT, self.before)


def install(handler: Leave) -> None:
    """Let Ctrl-C end this process at once from here on; nothing happens where somebody else handles it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)
        sys.unraisablehook = _unraisable
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # called last: Python itself would be killed


def change(handler: Leave | Raise) -> None:
    """Let Ctrl-C do something else from here on, where it would end the process at once."""
    if type(signal.getsignal(signal.SIGINT)) is Leave:
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
    """Whether Ctrl-C raises ``KeyboardInterrupt`` here because ``change`` was asked for it."""
    return isinstance(signal.getsignal(signal.SIGINT), Raise)


def interrupted() -> bool:
    """Whether Ctrl-C was pressed, even if a library caught the ``KeyboardInterrupt``."""
    return isinstance(signal.getsignal(signal.SIGINT), Again)


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
    """A ``KeyboardInterrupt`` in a destructor or a callback, which Python cannot raise, ends the process."""
    if isinstance(error.exc_value, KeyboardInterrupt):
        Leave()()
    sys.__unraisablehook__(error)
