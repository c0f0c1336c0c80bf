"""The cost of a job on Slurm or Ray: sweeps of jobs that only sleep, by their length and the number of workers.

    eval "$(python scripts/local_slurm.py start DIR)" && python experiments/overhead/cluster.py slurm
    eval "$(python scripts/local_ray.py start DIR)" && python experiments/overhead/cluster.py ray

Writes rows to cluster.csv in this folder, in place of the engine's earlier ones. The jobs are submitted by the launcher
that sweeps use. The time beyond the sleep is the start of the command, the engine's work, and the start of workers.
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

import spec_lab.cli.main

HERE = Path(__file__).resolve().parent
PLAN = {0.0: (100, (1, 2, 4, 8)), 1.0: (32, (2, 8)), 4.0: (16, (2, 8))}
"""By seconds of a job: the number of jobs of a sweep, and the numbers of workers."""
ROOM = {
    "slurm": ["hydra.launcher.cpus=1", "hydra.launcher.memory_gb=0.25", "hydra.launcher.poll=1"],
    "ray": [],
}


def nap(config) -> None:
    """The job."""
    time.sleep(config.seconds)


def sweep(engine: str, workers: int, seconds: float, jobs: int) -> float:
    """Return the seconds of a sweep's command."""
    # Slurm runs so many at once; of Ray's CPUs, four on each of two nodes, each job takes its share.
    room = {"slurm": [f"hydra.launcher.at_once={workers}"], "ray": [f"hydra.launcher.cpus={8 // workers}"]}[engine]
    numbers = ",".join(map(str, range(jobs)))
    with TemporaryDirectory() as out:
        command = [sys.executable, __file__, "--multirun", f"hydra/launcher={engine}", *ROOM[engine], *room]
        began = time.perf_counter()
        subprocess.run(
            [*command, "~hydra.callbacks.preflight", f"+seconds={seconds}", f"seed={numbers}", f"output_dir={out}"],
            check=True, capture_output=True,
        )  # fmt: skip
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ROOM)
    parser.add_argument("--repeats", type=int, default=2)
    given = parser.parse_args()
    rows = []
    least = {"slurm": 1, "ray": 2}[given.engine]
    plan = [(length, jobs, workers) for length, (jobs, each) in PLAN.items() for workers in each if workers >= least]
    for turn, (length, jobs, workers) in tqdm([(turn, case) for turn in range(given.repeats) for case in plan]):
        whole = sweep(given.engine, workers, length, jobs)
        beyond = (whole - length * jobs / workers) / jobs
        row = {"engine": given.engine, "turn": turn, "job_seconds": length, "workers": workers, "jobs": jobs}
        rows.append(row | {"sweep_seconds": round(whole, 2), "overhead_per_job": round(beyond, 3)})
    file = HERE / "cluster.csv"
    old = pd.read_csv(file) if file.exists() else pd.DataFrame({"engine": []})
    table = pd.concat([old[old["engine"] != given.engine], pd.DataFrame(rows)])
    table.to_csv(file, index=False)
    print(table.groupby(["engine", "job_seconds", "workers"])["overhead_per_job"].agg(["mean", "min", "max"]))


if __name__ == "__main__":
    if "--multirun" in sys.argv:
        sys.path.append(str(Path(spec_lab.__file__).parent / "cli" / "plugins"))
        hydra.main(version_base="1.3", config_path=spec_lab.cli.main.conf(), config_name="config")(nap)()
    else:
        main()
