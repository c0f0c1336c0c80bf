"""The check for a machine with a GPU: on a CPU, where it captures nothing, and with parts that crash or hang."""

import json
import re
import sys
import time
import tomllib
import warnings
from collections import Counter
from pathlib import Path
from weakref import ref

import pytest
import torch

from experiments.gpu.check import rows
from experiments.gpu.check.blocking_calls import watched
from experiments.gpu.check.part import Part
from experiments.gpu.check.proposers import PROPOSERS
from scripts import gpu_check

ROOT = Path(__file__).parents[1]
NOT_THERE = ("wandb", "matplotlib", "hydra", "omegaconf")
"""Packages that the parts do not import."""


def read(folder):
    return json.loads((folder / "gpu_check.json").read_text())


def test_a_chosen_part_runs_on_a_cpu(tmp_path):
    assert gpu_check.main(["--device", "cpu", "--parts", "4", "--output", str(tmp_path)]) == 0
    growth = read(tmp_path)["kv_growth"]["results"]
    assert growth["float32, first difference"] is None and growth["float32, captured"]["captures"]["draft"][0] > 0


@pytest.mark.nightly
def test_every_part_runs_on_a_cpu(tmp_path, monkeypatch, capsys):
    """Other packages cannot be imported there."""
    for name in NOT_THERE:
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} is imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert gpu_check.main(["--device", "cpu", "--output", str(tmp_path / "out")]) == 0
    entries = read(tmp_path / "out")
    assert list(entries) == ["machine", *(part.name for part in gpu_check.PARTS)]
    assert {entry["status"] for entry in entries.values()} == {"done"} and not any(
        entry["error"] for entry in entries.values()
    )
    tests, blocking, decoding, growth, rows, drafters, kernels = (
        entries[part.name]["results"] for part in gpu_check.PARTS
    )
    assert tests["files"] == ["tests/core/test_upload.py", "tests/runners/test_cuda.py"]
    assert sum(tests["counts"].values()) == len(tests["tests"]) > 0

    steps = blocking["eager, greedy"]
    assert set(steps) == set(PROPOSERS) and all(step["calls"] == 0 for step in steps.values())
    assert {name for name, step in steps.items() if not step["nodes"]} == {"null"}

    expected = [("tiny", batch, way) for batch in (1, 8) for way in ("eager", "captured")]
    assert [(row["shape"], row["batch"], row["way"]) for row in decoding["decoding"]] == expected
    assert all(row["tokens_per_second"] > 0 and row["roofline_share"] > 0 for row in decoding["decoding"])
    assert all(row["captures"] > 0 for row in decoding["captures"])

    assert growth["float32, first difference"] is None
    for cells in growth["float32, captured"]["streams_and_cells"].values():
        assert [capacity for _, capacity in cells] == [256, 512, 1024]
    assert 0 < growth["float32, captured"]["accepted"] < growth["float32, captured"]["drafted"]
    assert growth["float32, captured, logits error"] < 1e-4

    sizes = [(row["batch"], row["nodes"]) for row in rows["forwards"] if row["way"] == "captured"]
    assert sizes == [(batch, nodes) for batch in (1, 8) for nodes in (0, 5, 23)]
    assert all(row["step"] >= row["seconds"] > 0 and row["repeats"] >= 3 for row in rows["forwards"])
    names = ["EAGLE-3 level of 10 rows", "EAGLE-3 chain of 5"]
    assert list(drafters) == [*names, "tiny draft chain of 5, eager", "tiny draft chain of 5, captured"]
    assert all(row["whole_s"] >= row["host_s"] > 0 for row in drafters.values())
    steps = [("captured", 1), ("captured", 8), ("eager", 1), ("eager", 8)]
    assert [(row["way"], row["rows"]) for row in kernels["steps"]] == steps
    assert all(row["kernels"] >= sum(kernel["count"] for kernel in row["by_name"]) > 0 for row in kernels["steps"])
    assert {row["by"] for row in kernels["attention"]} == {"math", "products", "products in float32"}
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed[len(gpu_check.PARTS) : -2])) <= 80


REPORTS = """
import json, os, sys, time
channel = os.fdopen(int(sys.argv[sys.argv.index("--channel") + 1]), "w")
for message in {"machine": {"torch": "0"}}, {"result": "speed", "value": 3}:
    print(json.dumps(message), file=channel, flush=True)
"""
ENDS = {
    "cuda_tests": "os.abort()",
    "blocking_calls": "time.sleep(60)",
    "decoding": """print('{"error": "no GPU"}', '{"ended": "failed"}', sep="\\n", file=channel, flush=True)""",
    "kv_growth": """print('{"line": "all well"}', '{"ended": "done"}', sep="\\n", file=channel, flush=True)""",
}


def test_a_crash_a_hang_and_an_error_leave_their_results_and_the_other_parts(tmp_path, monkeypatch, capsys):
    parts = tuple(part._replace(seconds=3) for part in gpu_check.PARTS[:4])
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    monkeypatch.setattr(gpu_check, "BEFORE_THE_END", 0.5)
    monkeypatch.setattr(gpu_check, "command", lambda part: [sys.executable, "-c", REPORTS + ENDS[part.name]])
    assert gpu_check.main(["--output", str(tmp_path), "--parts", "1,2,3,4"]) == 1
    entries = read(tmp_path)
    statuses = {name: entry["status"] for name, entry in entries.items()}
    assert statuses == {
        "machine": "done", "cuda_tests": "failed", "blocking_calls": "timed out", "decoding": "failed",
        "kv_growth": "done",
    }  # fmt: skip
    assert all(entries[part.name]["results"] == {"speed": 3} for part in parts)
    assert "code -6" in entries["cuda_tests"]["error"] and "3 seconds" in entries["blocking_calls"]["error"]
    assert entries["decoding"]["error"] == "no GPU" and entries["kv_growth"]["lines"] == ["all well"]
    assert 3 <= entries["blocking_calls"]["seconds"] < 10


def test_the_model_of_a_shape_is_freed_before_the_next_is_made(monkeypatch):
    made, llama = [], rows.llama
    monkeypatch.setattr(rows, "llama", lambda *given: made.append(ref(model := llama(*given))) or model)
    monkeypatch.setattr(rows, "BATCHES", (1,))
    part = Part(torch.device("cpu"), time.time() + 300, lambda message: None)
    with part.attempt("tiny"):
        rows.measure_shape(part, "tiny", [0, 1], 1, measured := [])
    assert not part.errors and len(measured) == 4 and [model() for model in made] == [None]


def test_a_blocking_call_is_counted_at_the_line_of_the_project_that_led_to_it():
    """Torch warns from within its own functions."""
    inner = compile("def cpu(message): warnings.warn(message)", "/site-packages/torch/_tensor.py", "exec")
    lines = "\n\ndef finish():\n    cpu('called a synchronizing CUDA operation')\n    cpu('anything else')"
    outer = compile(lines, str(ROOT / "spec_lab" / "runners" / "prepare.py"), "exec")
    names = {"warnings": warnings}
    exec(inner, names)
    exec(outer, names)
    calls = Counter()
    with watched(calls):
        for _ in range(3):
            names["finish"]()
    assert calls == {("spec_lab/runners/prepare.py:4 finish", "torch/_tensor.py:1 cpu"): 3}


def test_the_wheels_are_packages_of_the_project():
    script = (ROOT / "scripts" / "gpu_wheels.sh").read_text()
    names = re.search(r"^names=\((.*?)\)", script, re.M)[1].split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["dependencies"], *project["optional-dependencies"].values()
    assert set(names) <= {re.split("[<>=[]", requirement)[0] for group in groups for requirement in group}
