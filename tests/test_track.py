"""The W&B view of a run, read back from the files of an offline one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spec_lab.run import run
from spec_lab.track import Files, Wandb
from tests.labs import lab, settings


def read_back(folder: Path) -> dict[str, list[dict]]:
    """The records of an offline run by kind, as wandb's own reader prints them."""
    (run_folder,) = folder.glob("wandb/offline-run-*")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run_folder)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout
    found: dict[str, list[dict]] = {}
    for line in printed.splitlines():
        record = json.loads(line)
        found.setdefault(record["type"], []).append(record[record["type"]])
    return found


def test_an_offline_run_holds_what_the_files_hold(tmp_path):
    config = {"max_new_tokens": 12, "tracker": {"api_key": "hush"}}
    assert run(lab(tracker=Wandb(mode="offline")), settings(tmp_path), config) == 0
    found = read_back(tmp_path)
    logged = [row["item"] for row in found["history"] if "group" in row["item"]]
    assert [row["group"] for row in logged] == [0, 1, 2]
    assert all(row["speculative tokens/s"] > 0 and row["baseline tokens/s"] > 0 for row in logged)
    summary = json.loads((tmp_path / "summary.json").read_text())
    last = {key: value for one in found["summary"] for key, value in one["update"].items()}
    assert last["tau_pooled"] == pytest.approx(summary["tau_pooled"])
    assert last["experiment"] == "toy"
    assert any("figures/acceptance" in key for row in found["history"] for key in row["item"])
    (said,) = (one["config"]["update"] for one in found["run"])
    assert said["config"] == {"max_new_tokens": 12, "tracker": {"api_key": "***"}}
    assert said["prompts_sha256"]


def test_auto_is_offline_without_a_login(tmp_path):
    code = "from spec_lab.track import Wandb; print(Wandb().resolved_mode())"
    environment = {"HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1]), "NETRC": str(tmp_path / "none")}
    for extra, expected in (({}, "offline"), ({"WANDB_API_KEY": "a" * 40}, "online")):
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment | extra, capture_output=True, text=True, cwd=tmp_path
        )
        assert done.stdout.strip() == expected, done.stderr


def test_the_environment_decides_for_auto_only(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert Wandb().resolved_mode() == "disabled"
    assert Wandb(mode="online").resolved_mode() == "online"


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match=r"tracker\.mode must be one of auto, online, offline, disabled, not 'on'"):
        Wandb(mode="on")


def test_files_only_does_nothing(tmp_path):
    tracker = Files()
    tracker.start("name", {}, tmp_path)
    tracker.group(0, {})
    tracker.finish({}, [])
    tracker.close()
    assert not list(tmp_path.iterdir())
