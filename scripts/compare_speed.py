"""Compare the decoding speed of this working tree with that of an earlier revision, side by side on this machine.

    python scripts/compare_speed.py                 # against HEAD~1
    python scripts/compare_speed.py v0.1.0 --pairs 10

The revision is checked out into a temporary worktree. Both trees decode the same bundled prompts with the same Python
environment, in pairs of runs, one right after the other and in alternating order, so that a slow drift of the machine
cancels. Each pair yields one ratio of tokens per second for each arm. The table shows the geometric mean of the ratios
and its 95 % interval (Student's t of their logarithms). The exit code is 1 if some arm's mean is below ``--bound`` and
its interval excludes 1; a mean below the bound with an interval that includes 1 is noise or needs more pairs.

Each tree is measured by its own copy of this script (``--measure``), so options may be renamed between the revisions.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import NamedTuple

from scipy.stats import t as student

ROOT = Path(__file__).resolve().parents[1]
# The tree is stated: a calibrated one depends on step costs that each run would measure anew.
WORKLOAD = "4 code prompts, 32 new tokens each, greedy, tree 2x1, batch size 1, one thread"  # change it with OPTIONS
OPTIONS = [
    "+experiment=medusa_tree", "proposer.tree=2x1", "prompts=code", "prompts.limit=4", "max_new_tokens=32",
    "sampling=greedy", "batch_size=1", "threads=1",
]  # fmt: skip
ARMS = {"autoregressive": -1, "medusa_tree": 0}  # name here: place of the arm in summary.json
BOUND = 0.9  # default of --bound
PAIRS = 6  # default of --pairs


class Ratio(NamedTuple):
    """Geometric mean of the ratios of the pairs of runs, with its 95 % interval."""

    mean: float
    low: float
    high: float

    def too_slow(self, bound: float) -> bool:
        """Return whether the speed is below ``bound`` and the interval excludes 1."""
        return self.mean < bound and self.high < 1


def ratio(ratios: Sequence[float]) -> Ratio:
    """Return the geometric mean of at least two ratios and its interval.

    The logarithms of the ratios are taken as independent and normal: ``exp(m +- t s / sqrt(n))``.
    """
    logs = [math.log(speed_ratio) for speed_ratio in ratios]
    half = student.ppf(0.975, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return Ratio(*(math.exp(fmean(logs) + shift) for shift in (0.0, -half, half)))


def compare(measures: Sequence[Callable[[], Mapping[str, float]]], pairs: int) -> dict[str, list[float]]:
    """Run two measurements in pairs and return each arm's ratios of speed, second to first.

    Args:
        measures: of the earlier and of this tree; each returns tokens per second by arm.
        pairs: number of pairs. Even pairs begin with the earlier tree, odd ones with this one.
    """
    ratios: dict[str, list[float]] = {}
    for pair in range(pairs):
        rates: list[Mapping[str, float]] = [{}, {}]
        for tree in (0, 1) if pair % 2 == 0 else (1, 0):
            rates[tree] = measures[tree]()
        for arm in rates[0]:
            ratios.setdefault(arm, []).append(rates[1][arm] / rates[0][arm])
        print(
            f"pair {pair + 1}/{pairs}:",
            *(f"{arm} {arm_ratios[-1]:.3f}" for arm, arm_ratios in ratios.items()),
            flush=True,
        )
    return ratios


def measure(tree: Path) -> dict:
    """Run the benchmark of a tree once; return its workload and tokens per second by arm."""
    with TemporaryDirectory() as folder:
        package = Path(run([sys.executable, "-c", "import spec_lab; print(spec_lab.__file__)"], tree, folder).strip())
        if tree not in package.parents:
            raise SystemExit(f"{tree} cannot be measured: python imports spec_lab from {package}")
        run([sys.executable, "-m", "spec_lab", *OPTIONS, "output_dir=measured"], tree, folder)
        arms = [*json.loads((Path(folder) / "measured" / "summary.json").read_text())["arms"].values()]
    return {
        "workload": WORKLOAD,
        "tokens_per_second": {a: arms[place]["tokens_per_second"] for a, place in ARMS.items()},
    }


def measured(tree: Path) -> dict:
    """``measure`` by the tree's own copy of this script, or by this one where the tree has none."""
    copy = tree / "scripts" / Path(__file__).name
    with TemporaryDirectory() as folder:
        script = copy if copy.exists() else Path(__file__)
        said = run([sys.executable, str(script), "--measure", str(tree)], tree, folder)
    return json.loads(said.splitlines()[-1])


def run(command: list[str], tree: Path, folder: str) -> str:
    """Run a command on a tree's package in a directory; return its stdout, or exit with what it printed."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "SPEC_LAB_CACHE": folder}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed in {tree}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def git(*arguments: str) -> str:
    """Run git in the repository; return its stdout, or exit with its message."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", default="HEAD~1", help="what to compare with (HEAD~1)")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"pairs of runs, at least 2 ({PAIRS})")
    parser.add_argument("--bound", type=float, default=BOUND, help=f"lowest ratio of speed that passes ({BOUND})")
    parser.add_argument("--measure", type=Path, metavar="TREE", help="measure one tree and print the result as JSON")
    given = parser.parse_args(arguments)
    if given.measure:
        print(json.dumps(measure(given.measure.resolve())))
        return 0
    if given.pairs < 2:
        parser.error(f"--pairs must be at least 2 (got {given.pairs}): one ratio has no interval")
    commit = git("rev-parse", "--verify", f"{given.revision}^{{commit}}")
    with TemporaryDirectory() as folder:
        earlier = Path(folder) / "tree"
        git("worktree", "add", "--detach", str(earlier), commit)
        try:
            trees = (earlier, ROOT)
            workloads = [measured(tree)["workload"] for tree in trees]  # also reads all files once
            if workloads[0] != workloads[1]:
                print(f"Nothing is compared, as the workload differs: {workloads[0]!r} and {workloads[1]!r}")
                return 0
            print(f"Speed of {ROOT.name} over {commit[:10]}: {WORKLOAD}")
            ratios = compare([lambda tree=tree: measured(tree)["tokens_per_second"] for tree in trees], given.pairs)
        finally:
            git("worktree", "remove", "--force", str(earlier))
    return report(ratios, given.bound)


def report(ratios_of: Mapping[str, Sequence[float]], bound: float) -> int:
    """Print each arm's ratio with its interval; return 1 if some arm is too slow, else 0."""
    slow = False
    for arm, ratios in ratios_of.items():
        mean_ratio = ratio(ratios)
        slow |= mean_ratio.too_slow(bound)
        verdict = f"  below {bound:g}, and the interval excludes 1" if mean_ratio.too_slow(bound) else ""
        interval = f"{mean_ratio.mean:.3f} [{mean_ratio.low:.3f}, {mean_ratio.high:.3f}]"
        print(f"{arm:>16}: {interval} of {len(ratios)} pairs{verdict}")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
