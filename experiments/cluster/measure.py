"""What handing jobs to an engine costs: sweeps of jobs that only sleep, by their length and the number of workers.

    eval "$(python scripts/local_slurm.py start DIR)" && python experiments/cluster/measure.py slurm
    eval "$(python scripts/local_ray.py start DIR)" && python experiments/cluster/measure.py ray

Writes rows to results.csv beside it, in place of the engine's earlier ones. The jobs are handed over by the launcher
that sweeps use. Beyond a sweep's sleeping is the start of its command, the engine's work, and the start of workers.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import hydra
import pandas as pd
from tqdm import tqdm

import spec_lab.entry

HERE = Path(__file__).resolve().parent
JOBS = {0.0: 100, 1.0: 48, 4.0: 24}
"""Jobs of a sweep, by their seconds."""
WORKERS = (1, 2, 4, 8)
ROOM = {
    "slurm": ["hydra.launcher.cpus=1", "hydra.launcher.memory_gb=0.25", "hydra.launcher.poll=1"],
    "ray": [],
}


def nap(config) -> None:
    """The job."""
    time.sleep(config.seconds)


def sweep(engine: str, workers: int, seconds: float, jobs: int) -> float:
    """Seconds of a whole sweep's command."""
    # Slurm runs so many at once; of Ray's CPUs, eight in all, each job takes its share.
    room = {"slurm": [f"hydra.launcher.at_once={workers}"], "ray": [f"hydra.launcher.cpus={8 // workers}"]}[engine]
    numbers = ",".join(map(str, range(jobs)))
    with TemporaryDirectory(dir=HERE) as out:
        command = [sys.executable, __file__, "--multirun", f"hydra/launcher={engine}", *ROOM[engine], *room]
        began = time.perf_counter()
        subprocess.run(
            [*command, "~hydra.callbacks.door", f"+seconds={seconds}", f"seed={numbers}", f"out={out}"],
            check=True, capture_output=True,
        )  # fmt: skip
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ROOM)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    rows = []
    plan = [(length, workers) for length in JOBS for workers in WORKERS if length * JOBS[length] / workers < 60]
    for turn, (length, workers) in tqdm([(turn, one) for turn in range(given.repeats) for one in plan]):
        jobs, whole = JOBS[length], sweep(given.engine, workers, length, JOBS[length])
        beyond = (whole - length * jobs / workers) / jobs
        row = {"engine": given.engine, "turn": turn, "job_seconds": length, "workers": workers, "jobs": jobs}
        rows.append(row | {"sweep_seconds": round(whole, 2), "overhead_per_job": round(beyond, 3)})
    file = HERE / "results.csv"
    old = pd.read_csv(file) if file.exists() else pd.DataFrame({"engine": []})
    table = pd.concat([old[old["engine"] != given.engine], pd.DataFrame(rows)])
    table.to_csv(file, index=False)
    print(table.groupby(["engine", "job_seconds", "workers"])["overhead_per_job"].agg(["mean", "min", "max"]))


if __name__ == "__main__":
    if "--multirun" in sys.argv:
        sys.path.append(str(Path(spec_lab.__file__).parent / "plugins"))
        hydra.main(version_base="1.3", config_path=spec_lab.entry.conf(), config_name="config")(nap)()
    else:
        main()
