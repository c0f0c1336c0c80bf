# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Reading a sweep
#
# A sweep is one command that names several values of some options: each combination is a run in a folder of its own.
# This notebook starts a sweep of four runs, kills it, resumes it, and reads its results.

# %%
import os
import sys
import tempfile
from pathlib import Path

os.chdir(tempfile.mkdtemp())
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # "python" below is this one
os.environ["COLUMNS"] = "100"

# %% [markdown]
# ## A sweep that is killed
#
# Should a small model draft one token or five, at temperature 0 and at 1? Sixteen tokens for each of eight prompts are
# far too few for an answer, but enough to show how to find one. Normally you would type the command; here Python starts
# it in a process of its own, to kill that (`kill -9`) during the second run.

# %%
import shlex
import subprocess
import time

from spec_lab.results import sweep

folder = Path("depths")
options = f"""
    --multirun proposer=draft_chain proposer.depth=1,5 sampling=greedy,temperature_1
    proposer.confidence=0 prompts=json prompts.limit=8 max_new_tokens=16 warmup=8
    target.dtype=float32 threads=1 output_dir={folder}
"""


def groups_on_disk() -> int:
    """Finished groups of prompts, of all runs together; a group is one prompt here."""
    return sum(run.groups for run in sweep.runs(folder)) if sweep.is_sweep(folder) else 0


command = [sys.executable, "-m", "spec_lab", *shlex.split(options)]
with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
    while process.poll() is None and groups_on_disk() < 10:
        time.sleep(0.1)
    process.kill()
killed = sweep.runs(folder)

# %% [markdown]
# `state` prints the state of a sweep at any time, from any shell. A killed process holds no lock any more, so its run
# is not shown as running but as pending, like the runs that have not begun. Its finished groups are on disk.

# %% language="bash"
# python -m spec_lab state depths

# %% [markdown]
# The same command resumes the sweep: runs that are done are skipped, an interrupted run continues after its last
# finished group. `spec_lab.run` takes what you would type after `spec-lab`, and returns the sweep.

# %%
from contextlib import redirect_stderr

import spec_lab

with redirect_stderr(sys.stdout):  # where the end of each run is said
    swept = spec_lab.run(options)

# %% [markdown]
# ## One table
#
# All runs that are done, in one tidy table: a row for each run and arm, a column for each option that the sweep set,
# then the figures of `summary.json`. (`python -m spec_lab collect DIR` writes it as parquet and CSV.)
# The arm of a proposer has its name.

# %%
table = swept.table
columns = ["arm", "proposer.depth", "sampling", "tau_pooled", "expected_tau", "nodes_per_step"]
chains = table[table["arm"] == "draft_chain"]
print(f"{len(table)} rows, {len(table.columns)} columns")
chains[[*columns, "speedup", "speedup_low", "speedup_high"]].round(2)

# %% [markdown]
# ## Against the option
#
# Tau and the speed-up by depth; bars are 95 % intervals over groups of prompts. The speed-up is a ratio of sums: total
# tokens per total seconds over the baseline's. The dashed line is the baseline's speed. Where a verdict above is *not
# reliable*, it says why: speeds of such a run are examples only; tau does not depend on time.

# %%
import matplotlib.pyplot as plt

from spec_lab.analysis import figures

# %matplotlib inline
plt.rcParams.update(figures.STYLE)

figure, panels = plt.subplots(1, 2, figsize=(7, 2.8))
for axes, what, name in zip(panels, ("tau_pooled", "speedup"), ("tau, tokens per step", figures.SPEEDUP), strict=True):
    for number, (sampling, rows) in enumerate(chains.groupby("sampling")):
        value, low, high = rows[what], rows[f"{what}_low"], rows[f"{what}_high"]
        x = rows["proposer.depth"] + 0.1 * number  # else the bars would hide each other
        axes.errorbar(x, value, (value - low, high - value), fmt="o-", capsize=3, label=sampling)
    axes.set(xlabel="proposer.depth, tokens", ylabel=name, xticks=[1, 5], ylim=(0, None))
panels[1].axhline(1, color=figures.GREY, linestyle="--", linewidth=1)
panels[0].legend(fontsize=8, loc="lower right")
figure.tight_layout()

# %% [markdown]
# Every run keeps all of its rows, for questions that no summary answers. Here: how many tokens of each draft of the
# deepest chain were accepted?

# %%
from spec_lab.analysis import metrics

deepest = chains[chains["proposer.depth"] == 5].set_index("sampling")["run"]
figure, panels = plt.subplots(1, 2, figsize=(7, 2.6), sharey=True)
for axes, (sampling, run) in zip(panels, deepest.items(), strict=True):
    steps = metrics.decode_steps(metrics.load(folder / run).steps, "draft_chain")
    share = steps["accepted"].value_counts(normalize=True).sort_index()
    axes.bar(share.index, share, color=figures.colours(["draft_chain"])["draft_chain"])
    axes.set(xlabel="tokens accepted in a step", title=f"draft_chain, {sampling}", xticks=range(6))
panels[0].set_ylabel("share of steps")
figure.tight_layout()

# %% [markdown]
# ## Compare two runs
#
# `python -m spec_lab compare A B` prints the options in which runs differ and which changes are significant: acceptance
# prompt by prompt, speed group by group, all intervals together at 95 %. *Not significant* is no proof of equality; the
# smallest change that would have been significant is printed with it. Here from Python:

# %%
from rich.console import Console

from spec_lab.analysis import compare, console
from spec_lab.analysis.results.comparison import result

greedy = chains[chains["sampling"] == "greedy"].set_index("proposer.depth")["run"]
comparison = compare.compare([folder / greedy[1], folder / greedy[5]])
console.show(result(comparison), Console(width=100, force_jupyter=False))

# %%
changes = compare.as_frame(comparison).set_index("figure")
changes[["reference_value", "other_value", "change", "simultaneous_low", "simultaneous_high", "verdict"]].round(2)

# %% [markdown]
# ## Next
#
# `swept.report()` writes a page with all figures of the sweep (`python -m spec_lab report DIR`); `--multirun` also runs
# on other machines, with Hydra's launchers.
