"""The W&B view of a run: what it shows of the rows, live and replayed, read back from the files of offline runs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import wandb

from spec_lab.analysis import metrics
from spec_lab.analysis.metrics import Tables
from spec_lab.analysis.tracking import Files, Wandb, client, series, track, track_all
from spec_lab.analysis.tracking.dashboard import ARMS
from spec_lab.results import sweep
from spec_lab.results.writer import Recorder
from spec_lab.tasks.benchmark import run
from tests.labs import lab, settings

ROOT = Path(__file__).parents[2]
CONFIG = {"name": "toy", "max_new_tokens": 12, "tracker": {"api_key": "hush"}}


def views(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*"))


def read_back(folder: Path) -> dict[str, list[dict]]:
    """The records of an offline view by kind, as wandb's own reader prints them."""
    (run_folder,) = views(folder)
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run_folder)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout
    found: dict[str, list[dict]] = {}
    for line in printed.splitlines():
        record = json.loads(line)
        found.setdefault(record["type"], []).append(record[record["type"]])
    return found


def history(found: dict[str, list[dict]]) -> list[dict]:
    """The points, tables and figures logged, without when, and without the random names that wandb gives to tables."""
    apart = ("_runtime", "_timestamp", "artifact_path", "_latest_artifact_path")
    return [{k: v for k, v in one["item"].items() if not k.endswith(apart)} for one in found["history"]]


def summary(found: dict[str, list[dict]]) -> dict:
    """Its last state, nested names with dots."""
    flat = {}
    for one in found["summary"]:
        for name, value in one["update"].items():
            flat[name] = value
            flat |= {f"{name}.{inner}": what for inner, what in value.items()} if isinstance(value, dict) else {}
    return flat


def column(points: list[dict], name: str) -> list[float]:
    return [one[name] for one in points if name in one]


def table(folder: Path, name: str) -> pd.DataFrame:
    (file,) = folder.glob(f"wandb/offline-run-*/files/media/table/tables/{name}_*.table.json")
    held = json.loads(file.read_text())
    return pd.DataFrame(held["data"], columns=held["columns"])


@pytest.fixture(scope="module")
def tracked(tmp_path_factory) -> Path:
    """A run tracked while it went on, offline."""
    out = tmp_path_factory.mktemp("live") / "run"
    assert run(lab(tracker=Wandb(mode="offline")), settings(out), CONFIG) == 0
    return out


@pytest.fixture(scope="module")
def seen(tracked) -> dict[str, list[dict]]:
    return read_back(tracked)


def killed(tracked: Path, out: Path, groups: int = 99) -> Path:
    """What ``kill -9`` would have left of the run: manifest, and the rows of its first groups in parts."""
    out.mkdir(parents=True)
    shutil.copy(tracked / "manifest.json", out)
    tables, recorder = metrics.load(tracked), Recorder(out)
    for number in sorted(set(tables.requests["group"]))[:groups]:
        frames = (tables.rounds, tables.steps, tables.requests)
        recorder.write(number, *(one[one["group"] == number].to_dict("records") for one in frames))
    return out


# What a view shows -------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_live_view_shows_the_groups_first_then_every_series(tracked, seen):
    points, tables = history(seen), metrics.load(tracked)
    assert [(one["group"], sorted(one)[1:]) for one in points[:3]] == [
        (number, ["baseline/tokens_per_second", "group", "speculative/tokens_per_second"]) for number in range(3)
    ]
    for arm in ("speculative", "baseline"):
        speeds = metrics.group_speeds(tables.requests, arm)
        assert column(points, f"{arm}/tokens_per_second") == pytest.approx(speeds.tolist())
        steps = metrics.decode_steps(tables.steps, arm)
        assert column(points, f"{arm}/tau")[-1] == pytest.approx(metrics.tau_pooled(steps))
        assert sum(column(points, f"{arm}/accepted")) == steps["accepted"].sum()
        for phase, seconds in metrics.phase_seconds(tables.rounds, arm).items():
            assert sum(column(points, f"{arm}/seconds/{phase}")) == pytest.approx(seconds, abs=1e-12), phase
    paired = metrics.walltime_speedup_paired(tables.requests, "speculative")
    assert column(points, "speculative/speedup") == pytest.approx(paired.tolist())
    assert len(paired) == 2  # the third group is short


def test_a_series_has_an_axis_of_its_own(tracked, seen):
    axes = {one["name"]: one.get("step_metric") for one in seen["metric"]}
    logged = {name for one in history(seen) for name in one if name.startswith(("speculative/", "baseline/"))}
    assert {axes[name] for name in logged} == {"group", "step", "round"}
    assert all(axes[name] == axis for name, axis in series.keys(["speculative", "baseline"]).items())
    steps = [one for one in history(seen) if "speculative/tau" in one]
    assert [one["step"] for one in steps] == list(range(len(steps)))


def test_a_view_holds_summary_figures_and_tables(tracked, seen):
    written = json.loads((tracked / "summary.json").read_text())
    last = summary(seen)
    assert last["tau_pooled"] == pytest.approx(written["tau_pooled"]) and last["experiment"] == "toy"
    assert not [name for name in last if name.startswith("speculative/")]  # a series' last point is no figure
    pictures = {name.split(".")[0] for one in history(seen) for name in one if name.startswith("figures/")}
    assert pictures == {f"figures/{path.stem}" for path in (tracked / "figures").glob("*.png")} != set()
    requests, tables = table(tracked, "requests"), metrics.load(tracked)
    assert len(requests) == len(tables.requests) and set(requests["arm"]) == {"repeat", "baseline"}
    first = requests[requests["arm"] == "repeat"].iloc[0]
    own = metrics.decode_steps(tables.steps, "speculative").query("request == 0")
    assert first["prompt"] == "the cat sat" and first["tau"] == pytest.approx(metrics.tau_pooled(own))
    depths = table(tracked, "depths").query("kind == 'survival'")
    assert set(depths["arm"]) == {"repeat"}
    assert depths["value"].tolist() == pytest.approx(written["survival"])


def test_a_view_says_what_the_run_was(tracked, seen):
    first, last = seen["run"][0], seen["run"][-1]
    assert (first["run_group"], first["job_type"], first["display_name"]) == ("toy", "toy", "run")
    assert last["tags"] == ["proposer=repeat", "verifier=token", "constraint=none", "lossless"]
    assert first["config"]["update"]["config"] == CONFIG | {"tracker": {"api_key": "***"}}
    assert first["config"]["update"]["prompts_sha256"]
    assert seen["exit"][-1].get("exit_code", 0) == 0


def test_the_runs_of_a_sweep_stand_together(tmp_path):
    sweep.plan(tmp_path / "heads", [["seed=1"]])
    assert series.group(tmp_path / "heads" / "seed=1", {"config": {"name": "toy"}}) == "heads"
    assert series.group(tmp_path / "seed=1", {"config": {"name": "toy"}}) == "toy"


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (
            {"proposer": "ngram", "verifier": "relaxed", "lossless": False},
            ["proposer=ngram", "verifier=relaxed", "lossy"],
        ),
        ({"proposer": None, "verifier": None, "lossless": None, "constraint": "none"}, ["constraint=none"]),
        ({"constraint": "c" * 99}, ["constraint=" + "c" * 53]),
    ],
)
def test_tags_name_the_parts_that_are_known(parts, expected):
    assert series.tags(parts) == expected


def test_long_series_are_averaged_in_bins_and_the_view_says_so():
    steps = pd.DataFrame(dict.fromkeys(("forced_emitted_kept", "forced_accepted", "round", "sequence"), 0), range(10))
    steps = steps.assign(arm="speculative", group=0, prefill=False, finish="", request=range(10))
    steps = steps.assign(emitted_kept=range(10), accepted=1, expected_accepted=[0.5] * 9 + [float("nan")])
    tables = metrics.load("nowhere")
    requests = pd.DataFrame({"arm": ["speculative"], "group": 0, "request": 0, "finish": "length"})
    requests = requests.assign(decode_tokens=45, decode_seconds=0.0, prefill_tokens=0, prefill_seconds=0.0)
    tables = Tables(tables.rounds, steps.sample(frac=1, random_state=0), requests)
    points = [one for one in series.points(tables, max_points=5) if "step" in one]
    assert [one["step"] for one in points] == [0, 2, 4, 6, 8]
    assert column(points, "speculative/emitted") == [0.5, 2.5, 4.5, 6.5, 8.5]
    assert column(points, "speculative/tau") == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert column(points, "speculative/expected") == [0.5] * 4  # no figure of what is not known
    assert series.rows_per_point(tables, max_points=5) == {"speculative/step": 2.0}
    assert [len(list(series.points(tables, max_points=most))) for most in (3, 10, 2000)] == [3, 10, 10]


def test_the_table_of_requests_is_bounded(tracked):
    tables = metrics.load(tracked)
    few = series.requests(tables, max_rows=5, max_letters=4)
    assert few["request"].tolist() == [0, 0, 1, 1]  # whole prompts
    assert few["prompt"].iloc[0] == "… sat" and len(few["text"].iloc[0]) == 5 and few["text"].iloc[0].endswith("…")
    assert series.requests(Tables(tables.rounds, tables.steps, tables.requests.iloc[:0])).empty


# Replayed ----------------------------------------------------------------------------------------------------------


def test_a_killed_run_replayed_shows_what_the_live_one_showed(tracked, seen, tmp_path):
    out = killed(tracked, tmp_path / "run")
    where = track(out, mode="offline")
    assert str(views(out)[0]) in where and "wandb sync" in where
    found = read_back(out)
    assert history(found) == history(seen)
    assert found["run"][0]["run_id"] == seen["run"][0]["run_id"]
    assert found["run"][-1]["tags"] == seen["run"][-1]["tags"]
    assert {"tau_pooled", "speedup.mean"} <= summary(found).keys() & summary(seen).keys()
    assert found["exit"][-1]["exit_code"] == 1  # it did not come to its end
    for name in ("requests", "depths"):
        pd.testing.assert_frame_equal(table(out, name), table(tracked, name))


@pytest.mark.nightly
def test_a_run_tracked_again_has_one_view(tracked, tmp_path):
    out = killed(tracked, tmp_path / "run", groups=1)
    track(out, mode="offline")
    (before,) = views(out)
    (tmp_path / "run" / "wandb" / "offline-run-1-another").mkdir()
    track(out, mode="offline")
    after = views(out)
    assert before not in after and "offline-run-1-another" in [one.name for one in after] and len(after) == 2


@pytest.mark.nightly
def test_a_sweep_is_tracked_run_by_run(tracked, tmp_path):
    sweep.plan(tmp_path / "sweep", [["seed=1"], ["seed=2"], ["seed=3"]])
    killed(tracked, tmp_path / "sweep" / "seed=1", groups=1)
    killed(tracked, tmp_path / "sweep" / "seed=2", groups=0)
    lines = list(track_all(tmp_path / "sweep", mode="offline"))
    assert ["offline-run" in one for one in lines] == [True, False, False]
    assert "is finished" in lines[1] and "does not exist" in lines[2]
    assert read_back(tmp_path / "sweep" / "seed=1")["run"][0]["run_group"] == "sweep"
    assert [one.partition(": ")[0] for one in track_all(tmp_path / "sweep" / "seed=1", mode="offline")]


def test_what_cannot_be_tracked_is_refused_by_name(tracked, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"manifest\.json"):
        track(tmp_path, mode="offline")
    with pytest.raises(ValueError, match="nowhere does not exist"):
        track(tmp_path / "nowhere", mode="offline")
    out = killed(tracked, tmp_path / "run", groups=1)
    with pytest.raises(ValueError, match="mode .*auto, online, offline, disabled .*'on'"):
        track(out, mode="on")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with pytest.raises(ValueError, match="disabled"):
        track(out)
    with sweep.holding(out), pytest.raises(sweep.Locked, match="locked by another process"):
        track(out, mode="offline")
    (out / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=r"summary\.json is not readable"):
        track(out, mode="offline")
    assert not views(out)


SCRIPT = """
import sys
from pathlib import Path
from spec_lab.tasks.benchmark import run
from spec_lab.analysis.tracking import Wandb
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
        limit = time.monotonic() + 60
        while len(list(out.glob("parts/requests-*"))) < 3:
            assert process.poll() is None and time.monotonic() < limit, process.communicate()[1]
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    (live,) = views(out)
    finished = sorted(set(metrics.load(out).requests["group"]))
    assert 3 <= len(finished) < 200 and not (out / "summary.json").exists()
    track(out, mode="offline")
    found = read_back(out)
    assert [one["group"] for one in history(found) if "baseline/tokens_per_second" in one] == finished
    assert column(history(found), "speculative/tau") and not live.exists()
    assert found["exit"][-1]["exit_code"] == 1
    files = [one for one in out.rglob("*") if one.is_file()]
    assert files and not [one for one in files if b"hush" in one.read_bytes()]


# While the run goes on ---------------------------------------------------------------------------------------------


class Broken:
    """A wandb run whose service dies at its ``at``-th call."""

    id, tags, offline = "id", (), True

    def __init__(self, at: int = 99) -> None:
        self.calls: list[dict] = []
        self.at, self.closed = at, False

    def log(self, point: dict) -> None:
        self.calls.append(point)
        if len(self.calls) >= self.at:
            raise ConnectionResetError("Connection lost")

    def finish(self, exit_code: int) -> None:
        self.closed = True


def test_while_a_run_goes_on_only_its_groups_are_logged(tmp_path, monkeypatch):
    fake = Broken()
    monkeypatch.setattr(client, "begin", lambda *_: fake)
    tracker, before = Wandb(mode="offline"), []
    monkeypatch.setattr(client, "replay", lambda *_: before.extend(fake.calls))
    monkeypatch.setattr(client, "end", lambda *_: "")
    assert run(lab(tracker=tracker), settings(tmp_path), CONFIG) == 0
    assert [one["group"] for one in before] == [0, 1, 2]
    assert all(one.keys() == {"group", *series.group_figures(metrics.load(tmp_path).requests)} for one in before)


@pytest.mark.parametrize("at", [1, 4])
def test_a_run_outlives_weights_and_biases_and_says_so(tmp_path, monkeypatch, capsys, at):
    monkeypatch.setattr(client, "begin", lambda *_: Broken(at))
    assert run(lab(tracker=Wandb(mode="offline")), settings(tmp_path), CONFIG) == 0
    output = capsys.readouterr().err
    assert output.count("Weights & Biases failed") == 1 and f"spec-lab track {tmp_path}" in output
    assert len(metrics.load(tmp_path).requests) == 10 and (tmp_path / "summary.json").is_file()


def test_a_task_without_rows_shows_its_summary(tmp_path, monkeypatch):
    tracker = Wandb(mode="offline")
    tracker.start("proof", {"config": {"name": "proof"}}, tmp_path)
    tracker.group(0, {"distance": 0.5})
    tracker.finish({"lossless": True}, [])
    tracker.close()
    found = read_back(tmp_path)
    assert summary(found)["lossless"] is True and history(found) == [{"_step": 0, "group": 0, "distance": 0.5}]


@pytest.mark.nightly
def test_auto_is_online_only_with_a_login(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name, value in (("HOME", tmp_path), ("NETRC", tmp_path / "none"), ("WANDB_CONFIG_DIR", tmp_path)):
        monkeypatch.setenv(name, str(value))
    wandb.teardown()  # it reads the environment once
    assert client.resolved_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    wandb.teardown()
    assert client.resolved_mode("auto") == "online"
    monkeypatch.undo()
    wandb.teardown()


def test_the_environment_decides_for_auto_only(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert client.resolved_mode("auto") == "disabled"
    assert client.resolved_mode("online") == "online"


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match=r"tracker\.mode .*auto, online, offline, disabled"):
        Wandb(mode="on")


def test_files_only_does_nothing(tmp_path):
    tracker = Files()
    tracker.start("name", {}, tmp_path)
    tracker.group(0, {})
    tracker.finish({}, [])
    tracker.close()
    assert not list(tmp_path.iterdir())


# The dashboard -----------------------------------------------------------------------------------------------------


def test_the_dashboard_shows_the_arms_of_a_run_unless_others_are_named(tracked):
    assert [*ARMS] == metrics.arms(metrics.load(tracked))


def test_the_dashboard_names_only_what_a_view_logs(tracked, seen):
    pytest.importorskip("wandb_workspaces")
    from spec_lab.analysis.tracking.dashboard import dashboard

    made = dashboard("project", "entity")
    spec = json.loads(made._to_model().model_dump_json(by_alias=True))["spec"]["section"]
    sections = {one["name"]: one["panels"] for one in spec["panelBankConfig"]["sections"]}
    assert list(sections) == ["speed", "acceptance", "time", "texts"]
    assert spec["runSets"][0]["grouping"] == [{"section": "run", "name": "group"}]
    logged = {name for one in history(seen) for name in one} | {
        name.split(".")[0] for one in history(seen) for name in one
    }
    in_summary = {f"summary_metrics.{name}" for name in summary(seen)}
    named = set()
    for panel in (one for panels in sections.values() for one in panels):
        config = panel["config"]
        if panel["viewType"] == "Weave":
            named.add(config["panel2Config"]["exp"]["fromOp"]["inputs"]["key"]["val"])
        else:
            named |= {*config.get("metrics", ()), *config.get("mediaKeys", ()), config.get("xAxis", "group")}
    assert {"speculative/tau", "group", "summary_metrics.tau_pooled", "figures/phases", "tables/requests"} <= named
    assert named <= logged | in_summary


def test_the_dashboard_is_refused_by_name(monkeypatch):
    from spec_lab.analysis.tracking import dashboard

    monkeypatch.setattr(client, "resolved_mode", lambda *_: "offline")
    if pytest.importorskip("wandb_workspaces"):
        with pytest.raises(OSError, match="wandb login"):
            dashboard.save("project", "entity")
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    with pytest.raises(OSError, match=r"pip install 'spec-lab\[dashboard\]'"):
        dashboard.dashboard("project", "entity")


@pytest.mark.parametrize("name", [True, 3, "", "a/b", "x" * 129, ["a"], "a\nb"])
def test_names_that_weights_and_biases_would_refuse_later_are_refused(name):
    with pytest.raises(ValueError, match=r"tracker\.project must be"):
        Wandb(project=name)
    with pytest.raises(ValueError, match=r"tracker\.entity must be"):
        Wandb(entity=name)
