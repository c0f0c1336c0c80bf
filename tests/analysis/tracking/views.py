"""Offline runs of wandb, read back from their files."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd

from spec_lab.analysis import metrics
from spec_lab.results.writer import Recorder

CONFIG = {
    "name": "toy",
    "max_new_tokens": 12,
    "target": {"path": "/absolute/models/toy", "dtype": "float32"},
    "proposer": {"depth": 2, "store": None},
    "tracker": {"api_key": "hush"},
}
"""A configuration; the lab of the tests is made without it."""


def views(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*"))


def read_back(folder: Path) -> dict[str, list[dict]]:
    """The records of an offline view by kind, as wandb's own reader prints them."""
    (run_folder,) = views(folder)
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run_folder)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout
    by_type: dict[str, list[dict]] = {}
    for line in printed.splitlines():
        record = json.loads(line)
        by_type.setdefault(record["type"], []).append(record[record["type"]])
    return by_type


def history(records: dict[str, list[dict]]) -> list[dict]:
    """The points and media logged, without when, and without the random names that wandb gives to tables."""
    apart = ("_runtime", "_timestamp", "artifact_path", "_latest_artifact_path")
    return [{k: v for k, v in record["item"].items() if not k.endswith(apart)} for record in records["history"]]


def summary(records: dict[str, list[dict]]) -> dict:
    """Its last state, nested names with dots."""
    flat = {}
    for record in records["summary"]:
        for name, value in record["update"].items():
            flat[name] = value
            flat |= {f"{name}.{inner}": what for inner, what in value.items()} if isinstance(value, dict) else {}
    return flat


def column(points: list[dict], name: str) -> list[float]:
    return [point[name] for point in points if name in point]


def table(folder: Path, name: str) -> pd.DataFrame:
    (file,) = folder.glob(f"wandb/offline-run-*/files/media/table/tables/{name}_*.table.json")
    held = json.loads(file.read_text())
    return pd.DataFrame(held["data"], columns=held["columns"])


def killed(tracked: Path, out: Path, groups: int = 99) -> Path:
    """Write the files that ``kill -9`` would have left: manifest, and the rows of its first groups in parts."""
    out.mkdir(parents=True)
    shutil.copy(tracked / "manifest.json", out)
    tables, recorder = metrics.load(tracked), Recorder(out)
    for number in sorted(set(tables.requests["group"]))[:groups]:
        frames = (tables.forwards, tables.steps, tables.requests)
        recorder.write(number, *(frame[frame["group"] == number].to_dict("records") for frame in frames))
    return out
