"""The time of a sweep beyond its decoding: two workers against one, a job's overhead, reading a thousand runs.

``python experiments/overhead/sweeps.py`` takes some six minutes and writes sweeps.json into this folder.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from spec_lab.analysis import metrics
from spec_lab.results import sweep
from spec_lab.results.manifest import machine, write_json

JOB = ["proposer=draft_chain", "threads=1", "warmup=0"]
"""Options without warm-up and without a calibrated tree (some seconds of timing)."""

HERE = Path(__file__).parent


LEAST = "import torch; from transformers import LlamaForCausalLM"
"""The imports of every job in a process of its own."""


def python(*options: str) -> float:
    """Return the seconds of a Python process."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *options], check=True, capture_output=True, cwd=HERE.parents[1])
    return time.perf_counter() - began


def command(*options: str) -> float:
    """Return the seconds of a spec-lab command in a process of its own."""
    return python("-m", "spec_lab", *options)


def decoding(run: Path) -> float:
    """Return the seconds of a run inside the decode loops of all arms, prefill included."""
    forwards = metrics.load(run).forwards
    return float((forwards["start"] + forwards["whole"]).groupby([forwards["group"], forwards["arm"]]).max().sum())


def workers(folder: Path, jobs: int, prompts: int, repeats: int) -> dict:
    """Return the seconds of the same sweep with one joblib worker and with two, alternating."""
    took: dict[int, list[float]] = {1: [], 2: []}
    for turn in range(repeats):
        for count in (1, 2) if turn % 2 == 0 else (2, 1):
            out = folder / f"workers-{count}-{turn}"
            seeds = ",".join(map(str, range(jobs)))
            launch = ["--multirun", "hydra/launcher=joblib", f"hydra.launcher.n_jobs={count}"]
            took[count].append(command(*launch, *JOB, f"prompts.limit={prompts}", f"seed={seeds}", f"output_dir={out}"))
    ratios = np.array(took[1]) / np.array(took[2])
    return {"jobs": jobs, "prompts": prompts, "seconds": took, "throughput_ratio": ratios.tolist()}


def overhead(folder: Path, jobs: int, prompts: int) -> dict:
    """Return the seconds of a job beyond its decoding, in a process of its own and in a process that has run others.

    The first is a whole command less its decoding; the second a command of ``1 + jobs`` jobs less one of a single job,
    divided by ``jobs``.
    """

    def rest(name: str, count: int) -> float:
        out, seeds = folder / name, ",".join(map(str, range(count)))
        whole = command("--multirun", *JOB, f"prompts.limit={prompts}", f"seed={seeds}", f"output_dir={out}")
        return whole - sum(decoding(run.folder) for run in sweep.runs(out))

    fresh, more = (
        [rest(f"fresh-{turn}", 1) for turn in range(3)],
        [rest(f"reused-{turn}", 1 + jobs) for turn in range(3)],
    )
    reused = [(many - single) / jobs for single, many in zip(fresh, more, strict=True)]
    return {"fresh": fresh, "least": [python("-c", LEAST) for _ in range(3)], "reused": reused}


def thousand(folder: Path, count: int) -> dict:
    """Return the seconds to collect and to report a sweep of copies of a run, with different seeds and figures."""
    done = next(run.folder for run in sweep.runs(folder / "reused-0"))
    out, generator = folder / "thousand", np.random.default_rng(0)
    jobs = [
        (f"proposer.depth={depth}", f"sampling.temperature={heat}", f"seed={seed}")
        for depth in range(1, 11)
        for heat in (0, 0.25, 0.5, 1)
        for seed in range(count // 40)
    ]
    sweep.plan(out, jobs)
    for run in sweep.runs(out):
        shutil.copytree(done, run.folder)
        summary = json.loads((run.folder / "summary.json").read_text())
        for arm in summary["arms"].values():
            arm["tau_pooled"] *= generator.uniform(0.8, 1.2)
            if arm["speedup"]["mean"]:
                shift = generator.uniform(0.8, 1.2)
                arm["speedup"] = {end: value and value * shift for end, value in arm["speedup"].items()}
        write_json(run.folder / "summary.json", summary)
    return {"runs": len(jobs), "collect": command("collect", str(out)), "report": command("report", str(out))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=HERE / "sweeps.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = {
            "overhead": overhead(folder, 5, 4),
            "thousand": thousand(folder, given.runs),
            "workers": workers(folder, given.jobs, given.prompts, given.repeats),
            "machine": machine(),
        }
    write_json(given.out, results)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
