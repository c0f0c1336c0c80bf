"""The W&B view of a run: what it shows of the rows, live and replayed, read back from the files of offline runs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from spec_lab.analysis import metrics
from spec_lab.analysis.tracking import Wandb, client, series, track
from spec_lab.tasks.benchmark import run
from tests.analysis.tracking.views import CONFIG, column, history, killed, read_back, summary, table, views
from tests.labs import lab, settings

ROOT = Path(__file__).parents[3]


# What a view shows -------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_live_view_shows_the_groups_first_then_every_series(tracked, seen):
    points, tables = history(seen), metrics.load(tracked)
    assert [(point["prompt_group"], sorted(point)[1:]) for point in points[:3]] == [
        (number, ["baseline/tokens_per_second", "prompt_group", "tokens_per_second"]) for number in range(3)
    ]
    for arm, prefix in (("repeat", ""), ("baseline", "baseline/")):
        speeds = pd.Series([metrics.tokens_per_second(group, arm) for _, group in tables.requests.groupby("group")])
        assert column(points, f"{prefix}tokens_per_second") == pytest.approx(speeds.tolist())
        steps = metrics.decode_steps(tables.steps, arm)
        assert column(points, f"{prefix}tau")[-1] == pytest.approx(metrics.tau_pooled(steps))
        assert sum(column(points, f"{prefix}accepted_tokens")) == steps["accepted"].sum()
        for phase, seconds in metrics.phase_seconds(tables.forwards, arm).items():
            assert sum(column(points, f"{prefix}time/{phase}")) == pytest.approx(seconds, abs=1e-12), phase
    paired = metrics.walltime_speedup_paired(tables.requests, "repeat")
    assert column(points, "speedup") == pytest.approx(paired.tolist())
    assert len(paired) == 9  # the last group is short


def test_the_summary_has_the_runs_own_figure_under_the_name_of_each_series(tracked, seen):
    written, last, tables = json.loads((tracked / "summary.json").read_text()), summary(seen), metrics.load(tracked)
    for key in {name for point in history(seen) for name in point} & series.keys(["repeat", "baseline"]).keys():
        _, _, figure = key.rpartition("/")
        assert (key in last) == (figure not in ("emitted_tokens", "accepted_tokens", "expected_accepted_tokens")), key
    assert last["tau"] == pytest.approx(written["tau_pooled"])
    assert last["speedup"] == written["speedup"]["mean"]
    assert last["speedup/low"] == written["speedup"]["low"]
    assert last["verdict"] == written["verdict"] and last["verdict_reasons"] == "; ".join(written["verdict_reasons"])
    assert last["baseline/tokens_per_second"] == written["baseline_tokens_per_second"]
    tables = metrics.of_timed_groups(tables)
    count = int((tables.forwards["arm"].eq("repeat") & ~tables.forwards["prefill"]).sum())
    assert last["time/verify"] == pytest.approx(written["phase_seconds"]["verify"] / count)


def test_a_view_holds_report_figures_and_tables(tracked, seen):
    written, tables = json.loads((tracked / "summary.json").read_text()), metrics.load(tracked)
    pictures = {name.split(".")[0] for point in history(seen) for name in point if name.startswith("figures/")}
    assert pictures == {f"figures/{path.stem}" for path in (tracked / "figures").glob("*.png")} != set()
    (page,) = tracked.glob("wandb/offline-run-*/files/media/html/report/page_*.html")
    assert page.read_bytes() == (tracked / "report.html").read_bytes() and b"the cat sat" in page.read_bytes()
    requests = table(tracked, "requests")
    assert len(requests) == len(tables.requests) and set(requests["arm"]) == {"repeat", "baseline"}
    first = requests[requests["arm"] == "repeat"].iloc[0]
    first_steps = metrics.decode_steps(tables.steps, "repeat").query("request == 0")
    assert first["prompt"] == "the cat sat" and first["tau"] == pytest.approx(metrics.tau_pooled(first_steps))
    steps = table(tracked, "steps")
    assert len(steps) == sum(len(metrics.decode_steps(tables.steps, arm)) for arm in ("repeat", "baseline"))
    depths = table(tracked, "depths").query("kind == 'survival'")
    assert set(depths["arm"]) == {"repeat"}
    assert depths["value"].tolist() == pytest.approx(written["survival"])


def test_no_file_of_a_view_holds_a_secret_or_a_path_of_the_machine(tracked, seen):
    (view,) = views(tracked)
    for file in (path for path in view.rglob("*") if path.is_file() and "logs" not in path.parts):
        content = file.read_bytes()
        assert b"hush" not in content and b"/absolute" not in content, file
        assert str(ROOT).encode() not in content, file


def points_of(records: dict[str, list[dict]]) -> list[dict]:
    """The points and media logged but the report, which says whether the run has ended."""
    return [point for point in history(records) if not any(name.startswith("report/") for name in point)]


# Replayed ----------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_killed_run_replayed_shows_what_the_live_one_showed(tracked, seen, tmp_path):
    out = killed(tracked, tmp_path / "run")
    where = track(out, mode="offline")
    assert str(views(out)[0]) in where and "wandb sync" in where
    read = read_back(out)
    assert points_of(read) == points_of(seen)
    assert read["run"][0]["run_id"] == seen["run"][0]["run_id"]
    assert read["run"][-1]["tags"] == seen["run"][-1]["tags"]
    assert {"tau", "speedup", "tokens_per_second/low"} <= summary(read).keys() & summary(seen).keys()
    assert read["exit"][-1]["exit_code"] == 1  # it did not come to its end
    for name in ("requests", "steps", "depths"):
        pd.testing.assert_frame_equal(table(out, name), table(tracked, name))


SCRIPT = """
import sys
from pathlib import Path
from spec_lab.tasks.benchmark import run
from spec_lab.analysis.tracking import Wandb
from tests.analysis.tracking.views import CONFIG, column, history, killed, read_back, summary, table, views
from tests.labs import lab, settings
config = {"name": "toy", "tracker": {"api_key": "hush-config"}}
run(lab(["the cat sat"] * 400, tracker=Wandb(mode="offline")), settings(Path(sys.argv[1]), max_new_tokens=40), config)
"""


@pytest.mark.nightly
def test_after_kill_9_nothing_of_the_files_is_missing_in_the_view(tmp_path):
    out = tmp_path / "run"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, str(out), "tracker.api_key=hush-argument"]
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        limit = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < limit and len(list(out.glob("parts/requests-*"))) < 3:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        errors = process.communicate()[1]
    assert process.returncode == -signal.SIGKILL, errors
    (live,) = views(out)
    finished = sorted(set(metrics.load(out).requests["group"]))
    assert 3 <= len(finished) < 200 and not (out / "summary.json").exists()
    track(out, mode="offline")
    read = read_back(out)
    assert [point["prompt_group"] for point in history(read) if "baseline/tokens_per_second" in point] == finished
    assert column(history(read), "tau") and not live.exists()
    assert read["exit"][-1]["exit_code"] == 1
    files = [path for path in out.rglob("*") if path.is_file()]
    assert files and not [file for file in files if b"hush" in file.read_bytes()]


# While the run goes on ---------------------------------------------------------------------------------------------


class Broken:
    """A wandb run whose service dies at its ``at``-th call."""

    id, tags, offline, disabled, url = "id", (), False, True, None

    def __init__(self, at: int = 99) -> None:
        self.calls: list[dict] = []
        self.at, self.closed = at, False

    def log(self, point: dict) -> None:
        self.calls.append(point)
        if len(self.calls) >= self.at:
            raise ConnectionResetError("Connection lost")

    def finish(self, exit_code: int) -> None:
        self.closed = True


@pytest.mark.parametrize("at", [1, 4])
def test_a_run_outlives_weights_and_biases_and_says_so(tmp_path, monkeypatch, capsys, at):
    monkeypatch.setattr(client, "begin", lambda *_: Broken(at))
    assert run(lab(tracker=Wandb(mode="offline")), settings(tmp_path), CONFIG) == 0
    output = capsys.readouterr().err
    assert output.count("Weights & Biases failed") == 1 and f"spec-lab track {tmp_path}" in output
    assert len(metrics.load(tmp_path).requests) == 10 and (tmp_path / "summary.json").is_file()


def test_a_training_shows_its_curve_as_it_goes_on_and_once(tmp_path, monkeypatch):
    lines = [
        {"step": step, "texts": 16 * step, "seconds": 1.0, "loss": [2.0, 4.0], "accepted": [0.5, 0.25],
         "agreed": [0.6, 0.3], "length_at_1": 0.625, "length_greedy": 0.78}
        for step in (20, 40)
    ]  # fmt: skip
    fake = Broken()
    fake.summary = {}
    monkeypatch.setattr(client, "begin", lambda *_: fake)
    tracker = Wandb(mode="offline")
    tracker.start({}, tmp_path)
    tracker.training(lines[0])
    tracker.training({**lines[0], "step": 30, "loss": []})  # a drafter without draft positions
    assert [(call["trainer/global_step"], call["train/loss"], call["train/tau"]) for call in fake.calls] == [
        (20, 3, 1.625)
    ]
    tracker.finish({"learning": lines, "accepted": [0.5, 0.25], "measured_length": 0.6, "estimated_length": 0.625}, [])
    assert [call["trainer/global_step"] for call in fake.calls] == [20, 40]
    assert fake.summary == {
        "eval/acceptance_rate/1": 0.5, "eval/acceptance_rate/2": 0.25, "eval/tau": 1.6, "eval/expected_tau": 1.625,
    }  # fmt: skip
