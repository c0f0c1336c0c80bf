"""A Python process beside this one that answers requests, each within limits of time and memory.

A program that a checkpoint brings can run for ever, or fill the memory, inside one operation of the interpreter, which
no thread can stop from outside. A process can be ended. It is started with the first request, as a new interpreter
(a fork is unsafe while threads of torch run), answers one request after another, and is replaced once it was ended.

A request is one line of JSON, ``[limits, request]``, and so is its reply, ``{"result": ...}`` or ``{"error": ...}``.
Before the first one the process writes the line ``READY``: without it, it has failed for a reason of its own.
This module is imported on both sides, and imports only what is light.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

READY = b"ready\n"
"""First line of a process that can answer requests."""

OUT_OF_MEMORY = 70
"""Exit code of a process that needed more memory than it may."""

MAX_REPLY = 64 * 2**20
"""Maximum size of a reply, in bytes: more than a text of 10 million characters has."""

MAX_ERROR = 2000
"""Maximum length of an error's text, in characters."""


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of one request.

    Args:
        cpu_seconds: CPU time.
        memory: address space of the process in bytes, where the system can limit it (Linux).
        seconds: wall-clock time, after which the process is ended.
    """

    cpu_seconds: float
    memory: int
    seconds: float


class LimitExceeded(Exception):
    """A request exceeded a limit, or ended its process; the text says which, with "it" for the request."""


class RequestFailed(Exception):
    """A request raised an error in its process; the text is the error's."""


class LimitedProcess:
    """Requests to a module that calls ``serve``.

    Args:
        module: its name; the process runs it, with the same module search path as this one.
    """

    def __init__(self, module: str) -> None:
        self.module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def ask(self, request: Any, limits: ProcessLimits) -> Any:
        """Return the reply to a request.

        Args:
            request: a value of JSON.

        Raises:
            LimitExceeded: it exceeded a limit, or ended the process.
            RequestFailed: it raised an error.
            OSError: the process cannot be started; names the module, and why.
        """
        if self._owner != os.getpid():  # after a fork: the process belongs to the parent
            self._owner, self._process, self._lock = os.getpid(), None, threading.Lock()
        line = json.dumps([asdict(limits), request]).encode() + b"\n"
        with self._lock:
            if self._process is not None and self._process.poll() is not None:  # ended since, by whatever
                self._end()
            starts = self._process is None
            process = self._process = self._process or self._start()
            late = threading.Event()

            def stop() -> None:
                late.set()
                process.kill()

            timer = threading.Timer(limits.seconds, stop)
            timer.daemon = True
            timer.start()
            try:
                if starts and (errors := _errors_of_start(process)) is not None:
                    slow = f"it is not ready within {limits.seconds:g} seconds" if late.is_set() else ""
                    why = errors or slow or _reason(self._end(), 0, False, limits)
                    raise OSError(
                        f"the process of {self.module} cannot be started ({why}): see what is wrong with "
                        f"{sys.executable} -m {self.module}"
                    )
                reply = _exchange(process, line)
            except BaseException:  # such as Ctrl-C: the next reply would be that to this request
                self.close()
                raise
            finally:
                timer.cancel()
            if not reply.endswith(b"\n"):
                raise LimitExceeded(_reason(self._end(), len(reply), late.is_set(), limits))
        answer = json.loads(reply.decode("utf-8", "surrogatepass"))
        if "error" in answer:
            raise RequestFailed(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """End the process if there is one; the next request starts another."""
        if self._process is not None and self._owner == os.getpid():
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        atexit.unregister(self.close)
        atexit.register(self.close)
        paths = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
        return subprocess.Popen(
            [sys.executable, "-S", "-P", "-m", self.module],  # -S: its .pth files need not be read again
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths))},
        )  # fmt: skip

    def _end(self) -> int:
        """End the process, leave no zombie, and return its exit code, or minus the signal that ended it."""
        process, self._process = self._process, None
        assert process is not None and process.stdin is not None and process.stdout is not None
        process.kill()  # one that has ended already keeps its exit code
        process.stdout.close()
        if process.stderr is not None:
            process.stderr.close()
        with suppress(OSError):  # the rest of a request that it did not read
            process.stdin.close()
        return process.wait()


def _errors_of_start(process: subprocess.Popen[bytes]) -> str | None:
    """Wait until a process can answer requests; return None, or the last line of its errors if it cannot."""
    assert process.stdout is not None and process.stderr is not None
    if process.stdout.readline(len(READY)) == READY:
        process.stderr.close()
        return None
    process.kill()
    lines = process.stderr.read().decode(errors="replace").split("\n")
    return next((" ".join(line.split())[:MAX_ERROR] for line in reversed(lines) if line.strip()), "")


def _exchange(process: subprocess.Popen[bytes], line: bytes) -> bytes:
    """Send a request and return the line of its reply; what there is of it if the process ended or wrote too much."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except OSError:  # it has ended
        return b""
    return process.stdout.readline(MAX_REPLY)


def _reason(code: int, size: int, late: bool, limits: ProcessLimits) -> str:
    """Return the reason why there is no reply."""
    if size >= MAX_REPLY:
        return f"it writes more than {MAX_REPLY // 2**20} MiB"
    if late:
        return f"it does not end within {limits.seconds:g} seconds"
    if code == OUT_OF_MEMORY:
        return f"it needs more than {limits.memory // 2**20} MiB of memory"
    if code == -signal.SIGPROF:
        return f"it runs for more than {limits.cpu_seconds:g} seconds of CPU time"
    return f"its process ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended with code {code}"


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer the requests of a ``LimitedProcess``, in its process, until the parent closes the stream or ends.

    Args:
        answer: returns the result of a request, a value of JSON; what it raises is the reply's error.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes, and the parent ends this one
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stderr.fileno())  # which the parent reads until it is ready
    os.close(nowhere)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        given, request = json.loads(line)
        try:
            reply = _reply(answer, request, ProcessLimits(**given))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.buffer.flush()


def _reply(answer: Callable[[Any], Any], request: Any, limits: ProcessLimits) -> bytes:
    """Return the reply to a request. Above the limit of CPU time the system ends the process."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or hard > limits.memory:
        with suppress(ValueError, OSError):  # macOS
            resource.setrlimit(resource.RLIMIT_AS, (limits.memory, hard))
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
    _end_with_parent(True)
    try:
        try:
            reply = {"result": answer(request)}
        except MemoryError:
            raise
        except Exception as error:  # of any type: it is a program of a checkpoint
            reply = {"error": (" ".join(str(error).split()) or type(error).__name__)[:MAX_ERROR]}
        return json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        _end_with_parent(False)


def _end_with_parent(whether: bool) -> None:
    """Let the system end this process, busy as it is, when the parent has ended: SIGIO tells that its stream is closed.

    Meanwhile the parent writes nothing to it.
    """
    fcntl.fcntl(sys.stdin, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(sys.stdin, fcntl.F_GETFL)
    fcntl.fcntl(sys.stdin, fcntl.F_SETFL, flags | os.O_ASYNC if whether else flags & ~os.O_ASYNC)
