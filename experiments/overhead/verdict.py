"""Is the verdict right? Short benchmarks on a quiet machine, or under load on purpose, and the verdict of each.

Quiet runs should be reliable. Loaded ones should not; each in turn is loaded in one of four ways while it decodes:

- all: a busy process for every core, all the time;
- some: a busy process for each core that the run leaves idle and for every second one of the others, all the time;
- burst: two busy processes for every core, for some seconds (2) from a random moment on;
- stop: the run itself is stopped for as long at a random moment, as by a machine that swaps or a debugger.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

WAYS = ("all", "some", "burst", "stop")

OPTIONS = ("proposer=medusa", "proposer.tree=2x1", "max_new_tokens=64", "verbose=false", "record=none")
"""Options of each benchmark: the bundled model, with a tree that no measurement chooses."""


def busy(count: int) -> list[subprocess.Popen[bytes]]:
    """Start processes that use a core each."""
    return [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def finished(out: Path) -> int:
    """Return the number of groups that a run has decoded."""
    return len(list(out.glob("parts/requests-*.parquet")))


def few(threads: int, cores: int) -> int:
    """Return how many busy processes take half of its cores from a run: on idle cores, and on half of the others."""
    return max(cores - threads, 0) + (threads + 1) // 2


def threads_of(out: Path) -> int | None:
    """Return how many threads a run has; None before it has written its manifest."""
    file = out / "manifest.json"
    return int(json.loads(file.read_text())["threads"]) if file.is_file() else None


def disturb(run: subprocess.Popen[bytes], out: Path, way: str, group: int, delay: float, seconds: float) -> None:
    """Disturb a run, ``delay`` seconds after it has decoded ``group`` groups; return when it has ended."""
    cores, processes = len(os.sched_getaffinity(0)), []
    try:
        while way == "some" and run.poll() is None and threads_of(out) is None:
            time.sleep(0.005)
        while run.poll() is None and finished(out) < (group if way in ("burst", "stop") else 0):
            time.sleep(0.005)
        if way in ("burst", "stop"):
            time.sleep(delay)  # the next group's prefill is over
        if way == "all":
            processes = busy(cores)
        elif way == "some" and (threads := threads_of(out)) is not None:
            processes = busy(few(threads, cores))
        elif way == "burst":
            processes = busy(2 * cores)
            time.sleep(seconds)
            end(processes)
            processes = []
        elif way == "stop" and run.poll() is None:
            run.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            run.send_signal(signal.SIGCONT)
        run.wait()
    finally:
        end(processes)
        if run.poll() is None:
            end([run])


def measure(out: Path, way: str, prompts: int, seed: int, seconds: float, options: Sequence[str]) -> dict[str, object]:
    """Return the verdict of one run, and what it is of.

    Args:
        out: the run's directory.
        way: how it is disturbed; "quiet" for not at all.
        prompts: number of groups.
        seed: of the moment at which it is disturbed.
        seconds: of a burst or a stop.
        options: further options of the run.
    """
    draw = random.Random(seed)
    moment, delay = draw.randint(1, max(prompts - 3, 1)), draw.uniform(0.05, 0.3)
    command = [sys.executable, "-m", "spec_lab", *OPTIONS, f"prompts.limit={prompts}", f"output_dir={out}", *options]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        disturb(run, out, way, moment, delay, seconds)
    if run.returncode:
        raise SystemExit(f"the run in {out} ended with exit code {run.returncode}: {' '.join(command)}")
    summary = json.loads((out / "summary.json").read_text())
    speedup = summary["speedup"]
    return {
        "run": out.name,
        "way": way,
        "moment": moment if way in ("burst", "stop") else None,
        "verdict": summary["verdict"],
        "speedup": speedup["mean"],
        "low": speedup["low"],
        "high": speedup["high"],
        "seconds": time.monotonic() - began,
        "reasons": "; ".join(summary["verdict_reasons"]),
    }


def main(argv: Sequence[str] | None = None) -> pd.DataFrame:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--quiet", action="store_true", help="disturb no run")
    which.add_argument("--loaded", action="store_true", help="disturb every run")
    parser.add_argument("--runs", type=int, default=20, help="number of runs (20)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="how runs are disturbed, in turn (all)")
    parser.add_argument("--prompts", type=int, default=20, help="prompts of a run, a group each (20)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a burst or a stop (2)")
    parser.add_argument("--out", type=Path, default=Path("outputs/verdict"), help="where runs go (outputs/verdict)")
    parser.add_argument("options", nargs="*", help="further options of the runs")
    chosen = parser.parse_args(argv)
    ways = chosen.ways if chosen.loaded else ["quiet"]
    rows = []
    for number in range(chosen.runs):
        way = ways[number % len(ways)]
        folder = (chosen.out / f"{way}_{number:02d}").absolute()
        row = measure(folder, way, chosen.prompts, number, chosen.seconds, chosen.options)
        rows.append(row)
        print(f"{row['run']}: {row['speedup']:.2f}, {row['verdict']}: {row['reasons']}", flush=True)
    table = pd.DataFrame(rows)
    file, before = chosen.out / "verdict.csv", pd.DataFrame()
    if file.is_file():  # the other half stays
        before = pd.read_csv(file)
        before = before[before["way"].eq("quiet") if chosen.loaded else before["way"].ne("quiet")]
    pd.concat([before, table]).to_csv(file, index=False)
    for way, runs in table.groupby("way", sort=False):
        count = Counter(runs["verdict"])
        print(f"{way:>6}: {', '.join(f'{times} {word}' for word, times in count.items())}, of {len(runs)} runs")
    right = (table["verdict"] == "reliable") == chosen.quiet
    print(f"right: {right.sum()} of {len(table)}")
    return table


if __name__ == "__main__":
    main()
