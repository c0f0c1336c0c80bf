"""Ctrl-C at any moment: one line, exit code 130, no traceback, and nothing recorded as failed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import checkpoints

ROOT = Path(__file__).parents[2]
AT_IMPORT = """
import os, signal, sys

def at(event, arguments):
    if event == "import" and arguments[0] == {module!r}:
        os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
sys.addaudithook(at)
from spec_lab.__main__ import main
main()
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return checkpoints.short_runs(tmp_path_factory.mktemp("tiny"))


def interrupted_at(module: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run the command line in a process that receives SIGINT while it imports a module."""
    command = [sys.executable, "-c", AT_IMPORT.format(module=module), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "module", ["spec_lab.cli.main", "hydra", "omegaconf", "torch", "spec_lab.tasks.lab", "transformers"]
)
def test_a_run_that_is_interrupted_during_an_import_ends_with_one_line(tiny, tmp_path, module):
    done = interrupted_at(module, tmp_path, *tiny)
    assert done.returncode == 130, done.stderr
    assert done.stderr.split() == ["Interrupted."]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("raise KeyboardInterrupt", 130),  # as raised by work that does not handle it
        ("os.kill(os.getpid(), signal.SIGINT)", 130),
        ("exec('os.kill(os.getpid(), signal.SIGINT)')", 130),  # after this Python would end itself by SIGINT
        (
            "try:\n        os.kill(os.getpid(), signal.SIGINT)\n    except BaseException: raise ImportError from None",
            130,
        ),
        ("sys.exit(3)", 3),
        ("sys.exit()", 0),
    ],
)
@pytest.mark.one_in(3)
def test_the_exit_code_is_130_whatever_became_of_the_exception(tmp_path, code, exit_code):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from spec_lab import __main__\n"
        "from spec_lab.cli import interrupt, main\n"
        f"def command_line():\n    interrupt.change(interrupt.Raise())\n    {code}\n"
        "main.main = command_line\n"
        "try:\n    __main__.main()\nexcept KeyboardInterrupt:\n    sys.exit(130)\n"
    )
    done = subprocess.run(
        [sys.executable, script], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == exit_code, done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_outside_of_a_launcher_ends_the_process_and_inside_is_raised(tmp_path):
    """Outside, where Hydra composes configs, a raised ``KeyboardInterrupt`` may be turned into another error."""
    script = tmp_path / "script.py"
    for module, exit_code, errors in (("launcher.core", 7, ""), ("composing", 130, "\nleft\n")):
        script.write_text(
            "import os, signal, sys, types\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "from spec_lab.cli import interrupt\n"
            "interrupt.install(interrupt.Leave())\n"
            "interrupt.change(interrupt.Raise('launcher', interrupt.Leave('left')))\n"
            f"module = types.ModuleType({module!r})\n"
            "exec('def work(then): then()', vars(module))\n"
            "try:\n    module.work(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
            "except KeyboardInterrupt:\n    os._exit(7)\n"
        )
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (exit_code, errors)
