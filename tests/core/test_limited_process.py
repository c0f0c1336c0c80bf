"""A process that answers requests within limits. The requests are templates, since these can do anything slowly."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from spec_lab.core import limited_process
from spec_lab.core.limited_process import LimitedProcess, LimitExceeded, ProcessLimits, RequestFailed

FREE = ProcessLimits(cpu_seconds=20.0, memory=2**30, seconds=100.0)
ENDLESS = "{% set n = range(90000) | list %}" + "{% for a in n %}" * 4 + "{% endfor %}" * 4


@pytest.fixture(scope="module")
def process():
    made = LimitedProcess("spec_lab.text.template_sandbox")
    yield made
    made.close()


def ask(process: LimitedProcess, source: str, limits: ProcessLimits = FREE, **given) -> str:
    return process.ask({"source": source, "given": given}, limits)


def test_one_process_answers_all_requests(process):
    texts = {ask(process, "{{ a }}é", a=text): text for text in ("x", "\ud800\n", "𝄞\x00")}
    assert texts == {f"{text}é": text for text in texts.values()}
    held = process._process.pid
    with pytest.raises(RequestFailed, match="division by zero"):
        ask(process, "{{ 1 / 0 }}")
    assert ask(process, "{{ a }}", a=[1]) == "[1]" and process._process.pid == held


@pytest.mark.parametrize(
    ("source", "limits", "why"),
    [
        (ENDLESS, ProcessLimits(0.2, 2**30, 100.0), "it runs for more than 0.2 seconds of CPU time"),
        (ENDLESS, ProcessLimits(20.0, 2**30, 0.2), "it does not end within 0.2 seconds"),
        ("{{ 'a' * 500000000 }}", ProcessLimits(20.0, 2**28, 100.0), "it needs more than 256 MiB of memory"),
        ("{{ 'a' * 3000000 }}", FREE, "it writes more than 2 MiB"),
    ],
)
def test_a_request_above_a_limit_ends_the_process_and_the_next_starts_another(
    process, source, limits, why, monkeypatch
):
    monkeypatch.setattr(limited_process, "MAX_REPLY", 2 * 2**20)
    ask(process, "a")
    before = process._process
    with pytest.raises(LimitExceeded, match=why):
        ask(process, source, limits)
    assert before.returncode is not None  # waited for: no zombie
    assert ask(process, "{{ 'a' * 1000000 }}") == "a" * 1000000


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import a_module_that_is_missing", "ModuleNotFoundError: No module named 'a_module_that_is_missing'"),
        ("raise SystemExit(3)", "its process ended with code 3"),
        ("print('another line', flush=True)\nimport time\ntime.sleep(100)", "its process ended by SIGKILL"),
    ],
)
def test_a_process_that_cannot_be_started_is_no_fault_of_the_request(tmp_path, monkeypatch, text, why):
    (tmp_path / "made_here.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    process = LimitedProcess("made_here")
    for _ in range(2):
        with pytest.raises(OSError, match="^the process of made_here cannot be started") as error:
            ask(process, "a")
        assert f"({why})" in str(error.value) and process._process is None


def test_threads_get_their_own_answers(process):
    answers = {}
    threads = [threading.Thread(target=lambda n=n: answers.update({n: ask(process, "{{ n }}", n=n)})) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: str(n) for n in range(8)}


def test_an_interrupted_request_leaves_no_answer_for_the_next(process, monkeypatch):
    def interrupted(_process, line):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(limited_process, "_exchange", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ask(process, "old")
    assert process._process is None and ask(process, "new") == "new"


SCRIPT = """
import json, os, signal, sys
from spec_lab.core.limited_process import *
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that began the tests in the background ignores it
process = LimitedProcess("spec_lab.text.template_sandbox")
def ask(source): return process.ask({"source": source, "given": {}}, ProcessLimits(60.0, 2**30, 100.0))
print(json.dumps([ask("a"), process._process.pid]), flush=True)
if "fork" in sys.argv and not (child := os.fork()):
    print(json.dumps([ask("b"), process._process.pid]), flush=True)
    process.close()
    os._exit(0)
if "fork" in sys.argv:
    os.waitpid(child, 0)
    print(json.dumps([ask("c"), process._process.pid]), flush=True)
if "leave" in sys.argv:
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
if "endless" in sys.argv:
    ask(sys.argv[-1])
if "wait" in sys.argv:
    sys.stdin.read()
"""


@pytest.fixture
def script():
    started = []

    def start(*arguments: str) -> subprocess.Popen:
        made = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        started.append(made)
        return made

    yield start
    for made in started:
        made.kill()
        made.communicate()


def ended(pid: int) -> bool:
    """Whether a process is gone within ten seconds; one that nothing has waited for counts as gone."""
    for _ in range(1000):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", ["exit", "SIGINT", "leave", "SIGKILL", "fork"])
def test_no_process_is_left(script, how):
    arguments = {"exit": ["wait"], "SIGINT": ["endless", ENDLESS], "leave": ["leave", "endless", ENDLESS],
                 "SIGKILL": ["endless", ENDLESS], "fork": ["fork"]}  # fmt: skip
    parent = script(*arguments[how])
    answers = [json.loads(parent.stdout.readline())]
    if how in ("SIGINT", "leave", "SIGKILL"):
        time.sleep(0.3)  # in the midst of the template; before it, the outcome is the same
        os.killpg(parent.pid, signal.SIGINT) if how != "SIGKILL" else parent.kill()  # Ctrl-C reaches the group
    output, errors = parent.communicate(timeout=60)
    answers += map(json.loads, output.splitlines())
    assert [text for text, _ in answers] == (["a", "b", "c"] if how == "fork" else ["a"])
    if how == "fork":
        (first, other, last) = (pid for _, pid in answers)
        assert first == last != other
    assert ("KeyboardInterrupt" in errors) == (how == "SIGINT") and "Error" not in errors
    assert all(ended(pid) for _, pid in answers)
