"""Fuzzing: random inputs for everything that reads files or options of a user, within a budget of time.

An **input** is JSON: ``{"edits": [...], "arguments": [...]}``. The edits (``edits.py``) change a folder of valid files,
and a **target** (``targets.py``) is called in it with the arguments. The rule for every input of every target:

- it succeeds, or the exit code is 1 or 2 and one message says what is wrong: no traceback, no bare exception;
- a message names an edited file or its folder, or an option of the arguments;
- within ``CPU_SECONDS`` of CPU time, ``SECONDS`` of time, and ``MEMORY`` bytes;
- nothing is written or removed outside of the folder, no other program is run, and no control character is printed.

``corpus/TARGET/*.json`` holds inputs that once broke the rule, or that show a format; each is replayed in the short run
of the tests. The nightly run (``.ci/nightly``) tries random ones for ``SPEC_LAB_FUZZ_SECONDS`` a target (default 60;
0 skips them), from the seed ``SPEC_LAB_FUZZ_SEED`` (default 0; the nightly run sets the date). An input that breaks the
rule is made smaller and saved to ``SPEC_LAB_FUZZ_CORPUS`` (default: a temporary folder of pytest), laid out as the
corpus is and replayed with it; a mended one belongs into the corpus. To add a target, add it to ``targets.TARGETS``.
"""

import faulthandler
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from tempfile import gettempdir, gettempprefix
from typing import Any, NamedTuple

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.nightly.fuzzing.edits import OUTSIDE, apply

BUDGET = float(os.environ.get("SPEC_LAB_FUZZ_SECONDS", "60"))
SEED = os.environ.get("SPEC_LAB_FUZZ_SEED", "0")
SAVED = os.environ.get("SPEC_LAB_FUZZ_CORPUS")
CORPUS = Path(__file__).parents[1] / "corpus"

CPU_SECONDS, SECONDS = 40, 150
MEMORY = 2 * 2**30  # beyond the size of the process before
MAX_FAULTS = 8  # of a target; then its time is over
LONGEST = 4000  # characters of an error message

ENDED = "the process ended or hung: too long, too much memory, or a crash"

Input = dict[str, Any]


class Target(NamedTuple):
    """A function that is fuzzed, and its inputs.

    Args:
        make: writes the valid files into an empty folder, and warms up what is used later.
        inputs: the inputs, given that folder.
        feed: carries out the arguments of an input in the current folder, and returns an exit code; errors are printed.
    """

    make: Callable[[Path], None]
    inputs: Callable[[Path], st.SearchStrategy[Input]]
    feed: Callable[[list[Any]], int]


BARE = re.compile(
    r"^FAULT: .*|NoneType|has no attribute|is not subscriptable|unsupported operand|not iterable|unhashable"
    r"|cannot unpack|index out of range|not supported between|invalid literal|MemoryError|KeyError|panic:"
    r"|^spec_lab: ('[^' ]*'|\w*(Error|Exception)\b.*|.{0,12})$",
    re.MULTILINE,
)
"""Messages that say no more than what Python says. In parentheses, after what is wrong, they may."""

ERROR = re.compile(r"^[\w.]+(?:Error|Exception)\b.*", re.MULTILINE)
"""The last line of a traceback."""


def fault(code: int, output: str) -> str:
    """How an outcome breaks the rule; empty if it does not."""
    if "Traceback (most recent call" in output:
        return f"a traceback: {' '.join(ERROR.findall(output)[-1:])}"[:80]
    if match := BARE.search(re.sub(r"\(.*\)", "", output)):
        return f"a bare message: {match[0].strip()}"
    if any(ord(character) < 32 and character not in "\n\t\r" for character in output):
        return "control characters are printed"
    if code not in (0, 1, 2, 130):
        return f"exit code {code}"
    return f"no message of at most {LONGEST} characters" if code and not 20 < len(output.strip()) <= LONGEST else ""


def nameless(tried: Input, output: str) -> bool:
    """Whether a message names neither an edited file nor its folder, nor an option of the arguments."""
    files = [Path(edit[1]) for edit in tried["edits"]]
    options = [text for text in tried["arguments"] if isinstance(text, str) and text.startswith("--")]
    options += [name for given in tried["arguments"] if isinstance(given, dict) for name in given]
    names = {*options, *(name for file in files for name in (file.name, file.parent.name) if name)}
    return bool(files) and not any(name in output for name in names)


class Worker:
    """A fork of this process that is given inputs one by one, and replaced when it ends.

    Args:
        target: what is called there.
        valid: the folder of valid files.
        place: an empty folder for the copies of it.
    """

    def __init__(self, target: Target, valid: Path, folder: Path) -> None:
        self.target, self.valid, self.place = target, valid, folder
        self.process: Any = None

    def try_out(self, tried: Input) -> tuple[str, str]:
        """How an input breaks the rule (empty if it does not), and the output."""
        case, log = self.place / "case", self.place / "output.txt"
        self._prepare(case)
        log.write_bytes(b"")
        if self.process is None:
            context = get_context("fork")
            self.pipe, inner = context.Pipe()
            self.process = context.Process(target=_work, args=(self.target, self.pipe, inner, case, log))
            self.process.start()
            inner.close()
        self.pipe.send(tried)
        try:
            code = self.pipe.recv() if self.pipe.poll(SECONDS) else None
        except EOFError:
            code = None
        if code is None:
            self.close()
        output = log.read_text(errors="replace")
        if self._outside() != {"mine": "mine", "folder": ""}:
            return "a file outside was changed", output
        how = ENDED if code is None else fault(code, output)
        if not how and code in (1, 2) and nameless(tried, output):
            how = "the message names neither an edited file nor an option"
        return how, output

    def close(self) -> None:
        """End the process, and all that it has started."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.join()
            self.process = None

    def _prepare(self, case: Path) -> None:
        outside = case / OUTSIDE
        for folder in (case, outside.resolve()):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.valid, case)
        (outside / "folder").mkdir(parents=True)
        (outside / "mine").write_text("mine")

    def _outside(self) -> dict[str, str]:
        return {path.name: path.read_text() if path.is_file() else "" for path in (self.place / "outside").iterdir()}


def _work(target: Target, outer: Any, pipe: Any, case: Path, log: Path) -> None:
    """The loop of a worker's process."""
    outer.close()
    os.setpgid(0, 0)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(stream := log.open("ab"), all_threads=False)
    faulthandler.register(signal.SIGXCPU, stream, all_threads=False, chain=True)
    sys.dont_write_bytecode = True
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):  # of a user, otherwise
        os.environ[name] = os.path.join(os.environ["SPEC_LAB_CACHE"], "wandb")
    sys.addaudithook(_watch(case.resolve(), log.resolve()))
    with suppress(EOFError):
        while True:
            message = pipe.recv()
            used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
            resource.setrlimit(resource.RLIMIT_CPU, (int(used) + CPU_SECONDS, resource.RLIM_INFINITY))
            os.chdir(case)
            stdout = os.open(log, os.O_WRONLY | os.O_APPEND)
            for number in (1, 2):
                os.dup2(stdout, number)
            os.close(stdout)
            sys.stdout = sys.stderr = open(1, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
            pipe.send(_outcome(target, message, case))
            os.chdir(case.parent)


def _outcome(target: Target, tried: Input, case: Path) -> int:
    """Carry out an input; the exit code as the interpreter's would be. What it prints is the output."""
    for edit in tried["edits"]:
        apply(edit, case)
    try:
        code: Any = target.feed(tried["arguments"])
    except SystemExit as left:
        code = left.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code)
        code = 1
    sys.stdout.flush()
    return int(code or 0)


def _watch(*writable: Path) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that prints a fault for what is written elsewhere, for programs and for connections to others."""
    places = (*writable, os.environ["SPEC_LAB_CACHE"], "/dev", "/proc/self", Path(gettempdir(), gettempprefix()))
    allowed = tuple(os.path.realpath(path) for path in places)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        paths = []
        if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            paths = [arguments[0]]
        elif event in ("os.rename", "os.link"):
            paths = [arguments[0], arguments[1]]
        elif event in ("os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.truncate", "os.symlink"):
            paths = [arguments[event == "os.symlink"]] if event != "os.mkdir" or not os.path.isdir(arguments[0]) else []
        elif event in ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect") and not any(
            word in str(arguments) for word in ("wandb", "127.0.0.1", "spec_lab.text.template_sandbox")
        ):
            print(f"FAULT: {event} {arguments[:2]}", file=sys.stderr)
        for path in map(os.fsdecode, (path for path in paths if isinstance(path, str | bytes | os.PathLike))):
            folder, name = os.path.split(os.path.realpath(path) if event == "open" else os.path.abspath(path))
            if not (real := os.path.join(os.path.realpath(folder), name)).startswith(allowed):
                print(f"FAULT: {event} {real}", file=sys.stderr)

    return hook


def explore(name: str, worker: Worker, seconds: float, folder: Path) -> tuple[list[str], int]:
    """Try random inputs for some time; return the faults, and how many inputs were tried.

    Each input at fault is made smaller and saved.
    """
    ends, faults, tried = time.monotonic() + seconds, dict[str, str](), 0

    def attempt(candidate: Input) -> None:
        nonlocal tried
        if time.monotonic() > ends or len(faults) == MAX_FAULTS:
            return
        tried += 1
        how, output = worker.try_out(json.loads(json.dumps(candidate)))
        if how and (signature := f"{how} {_where(output)}") not in faults:
            small = candidate if how == ENDED else smaller(candidate, lambda other: worker.try_out(other)[0] == how)
            file = folder / name / f"{sha256(json.dumps(small).encode()).hexdigest()[:12]}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(small, indent=1))
            faults[signature] = (
                f"{how}\n{json.dumps(small)[:1500]}\n{output[-1500:]}\nReproduce: {command(name, folder)}"
            )

    batch = 0
    while time.monotonic() < ends and len(faults) < MAX_FAULTS:
        test = given(worker.target.inputs(worker.valid))(attempt)
        test = settings(
            max_examples=100, database=None, deadline=None, derandomize=False, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )(test)  # fmt: skip
        hypothesis.seed(f"{SEED} {name} {batch}")(test)()
        batch += 1
    print(f"{name}: seed {SEED}, {tried} inputs in {seconds:.0f} s, {len(faults)} faults")
    return list(faults.values()), tried


def _where(output: str) -> str:
    """The innermost place in the package that a traceback names, so that one fault is reported once."""
    places = re.findall(r'File "[^"]*(spec_lab/[^"]*)", line (\d+)', output)
    return ":".join(places[-1]) if places else ""


def smaller(candidate: Input, fails: Callable[[Input], bool]) -> Input:
    """The input without the edits that it fails without as well."""
    for index in reversed(range(len(candidate["edits"]))):
        other = candidate | {"edits": candidate["edits"][:index] + candidate["edits"][index + 1 :]}
        if fails(other):
            candidate = other
    return candidate


def command(name: str, folder: Path) -> str:
    """The command that replays what was saved."""
    return f"SPEC_LAB_FUZZ_CORPUS={folder} python -m pytest tests/nightly/test_fuzzing.py -k 'corpus and {name}'"


def corpus() -> list[tuple[str, Path]]:
    """Names of targets, and files of inputs for them."""
    return [
        (file.parent.name, file)
        for top in (CORPUS, *([Path(SAVED)] if SAVED else []))
        for file in sorted(top.glob("*/*.json"))
    ]
