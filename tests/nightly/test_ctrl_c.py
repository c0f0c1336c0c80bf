"""Ctrl-C, as a terminal sends it to a command and its workers, at many moments of real commands."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spec_lab.results import sweep
from tests import checkpoints

ROOT = Path(__file__).parents[2]
MOMENTS = 12
"""For each command."""

LONGEST = 15.0
"""Seconds: by then every command is working."""

COMMANDS = {
    "run": [],
    "multirun": ["--multirun", "seed=1,2"],
    "joblib": ["--multirun", "seed=1,2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "search": ["--multirun", "hydra/sweeper=search", "seed=range(0,9)", "hydra.sweeper.objective=tau_pooled"],
    "stream": ["+experiment=stream", "task.prompt='def f(x):'", "max_new_tokens=2000"],
    "state": ["state", "nowhere"],
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    short = checkpoints.short_runs(folder, checkpoints.TEXTS * 100)
    return [option for option in short if not option.startswith("max_new_tokens")]


@pytest.mark.nightly
@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_at_any_moment_is_one_line_and_130(name, tiny, tmp_path):
    options = {"stream": [], "state": []}.get(name, [*tiny, "max_new_tokens=100"])
    command = [sys.executable, "-m", "spec_lab", *COMMANDS[name], *options]
    generator = random.Random(0)
    for moment in sorted(generator.uniform(0.0, 1.0) ** 2 for _ in range(MOMENTS)):
        process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        time.sleep(0.5 + moment * LONGEST)  # before, the signal is Python's
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=60)
            assert process.returncode in (130, 0, 1), errors  # 0, 1: it had just ended
            assert "Traceback" not in errors, f"after {moment * LONGEST:.2f} s: {errors}"
            assert process.returncode != 130 or "Interrupted" in errors
        else:
            process.communicate()
        if sweep.is_sweep(tmp_path / "swept"):
            assert {run.state for run in sweep.runs(tmp_path / "swept")} <= {"pending", "done"}
