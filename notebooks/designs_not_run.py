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
# # Designs that were not run
#
# A run with `record=replay` keeps the target's and the draft's probabilities at every row of its draft trees. From
# these follow, without the model: the tokens per step of other designs, how far a verifier is from the optimum, and
# what the acceptance is worth on other hardware. The runs below are small, so intervals are wide.

# %%
import os
import sys
import tempfile
from pathlib import Path

os.chdir(tempfile.mkdtemp())
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # "python" below is this one
os.environ["COLUMNS"] = "100"

# %% [markdown]
# ## Record
#
# First texts of the target at temperature 1, with the draft model's distributions at every position. Then a run of two
# arms, a chain of four and a tree, both drawn independently.

# %%
import spec_lab

texts = spec_lab.run(
    "task=verifier_study task.every=1 task.repeats=1 proposer=draft_chain proposer.depth=1 "
    "proposer.confidence=0 sampling=temperature_1 record=replay prompts=bundled prompts.limit=12 max_new_tokens=24 "
    "threads=1 output_dir=texts",
    quiet=True,
)

# %% language="bash"
# python -m spec_lab proposer=draft_chain proposer.depth=4 proposer.drawn=iid proposer.confidence=0 \
#     +proposer@arms.tree=draft_tree arms.tree.tree=3x2x1 arms.tree.drawn=iid sampling=temperature_1 record=replay \
#     prompts=bundled prompts.limit=12 max_new_tokens=24 warmup=0 threads=1 output_dir=run >log.txt 2>&1 || cat log.txt
# ls run

# %% [markdown]
# ## Replay
#
# A lossless design emits the target's texts. How often it accepts is known at each position of the recorded ones, so
# its tokens per step (tau) follow; the interval is the 95 % bootstrap interval over texts. Lossy designs emit other
# texts and are refused.

# %%
from spec_lab.replay.designs import Options
from spec_lab.replay.replay_tables import replay

chains = ["1", "1x1", "1x1x1", "1x1x1x1"]
trees = ["2", "2x2", "3x2x1"]
options = Options(verifiers=["token", "kseq"], shapes=[*chains, *trees], drawn=["iid"])
replayed = replay(Path("texts"), options)
known = replayed[(replayed["needs"] == "") & (replayed["method"] == "along")]
known[["verifier", "shape", "tau", "low", "high"]].round(2)

# %% [markdown]
# Is it so? A chain of three is run, with another seed, so on other texts of the same prompts.

# %%
short = spec_lab.run(
    "proposer=draft_chain proposer.depth=3 proposer.drawn=iid proposer.confidence=0 seed=1 "
    "baseline=false sampling=temperature_1 prompts=bundled prompts.limit=12 max_new_tokens=24 warmup=0 threads=1 "
    "output_dir=measured",
    quiet=True,
)

# %%
import numpy as np

from spec_lab.analysis import metrics
from spec_lab.analysis.metrics.intervals import cluster_interval

steps = metrics.decode_steps(metrics.load(Path("measured")).steps, "draft_chain")
measured = cluster_interval(steps["emitted_kept"], np.ones(len(steps)), steps["request"])
[predicted] = known[(known["verifier"] == "token") & (known["shape"] == "1x1x1")].to_dict("records")
print(f"predicted {predicted['tau']:.2f} [{predicted['low']:.2f}, {predicted['high']:.2f}]")
print(f"measured  {measured.mean:.2f} [{measured.low:.2f}, {measured.high:.2f}]")

# %%
import matplotlib.pyplot as plt

from spec_lab.analysis import figures

# %matplotlib inline
plt.rcParams.update(figures.STYLE)

figure, axes = plt.subplots(figsize=(6, 2.8))
for number, (verifier, rows) in enumerate(known.groupby("verifier", sort=False)):
    rows = rows.set_index("shape").loc[[*chains, *trees]]
    x = np.arange(len(rows)) + 0.12 * number
    errors = rows["tau"] - rows["low"], rows["high"] - rows["tau"]
    axes.errorbar(x, rows["tau"], errors, fmt="o", capsize=3, label=f"{verifier}, replayed")
errors = [measured.mean - measured.low], [measured.high - measured.mean]
axes.errorbar(2.3, measured.mean, errors, fmt="s", capsize=3, color=figures.GREY, label="token, measured")
axes.set_xticks(range(len([*chains, *trees])), [*chains, *trees])
axes.set(xlabel="children of each node, by level", ylabel="tau, tokens per step", ylim=(1, None))
axes.legend(fontsize=8)
figure.tight_layout()

# %% [markdown]
# `experiments/projection` compares 47 designs in this way.
#
# ## Bounds
#
# How much could another verifier accept of the same drafts? For chains the optimum is known (block verification,
# `traversal`, attains it); for trees a bound. What a step emits less than depth + 1 tokens is split into what is lost
# to the verifier, what no verifier here attains, what another tree would give, and the draft.

# %%
import pandas as pd

from spec_lab.replay import bounds

of_run = bounds.of_run(Path("run"))
shares = {}
for arm, arm_bounds in of_run.items():
    for bound in arm_bounds.verifiers:
        if bound.lossless:
            shares[(arm, bound.name)] = {"tau": bound.tau.mean, "of the optimum": bound.share.mean} | {
                f"lost: {part}": value.mean for part, value in bound.lost.items()
            }
pd.DataFrame(shares).T.round(2)

# %% [markdown]
# ## Projection
#
# The acceptance of this draft model, on hardware that is not here: a roofline of an H100 with a target of eight
# billion parameters and a draft model of one. Acceptance is that of the recorded models, so this says what such an
# acceptance would be worth, not what those models' acceptance is.

# %% language="bash"
# python -m spec_lab project run --hardware h100-sxm --model llama-3.1-8b --draft llama-3.2-1b --batch 1,4,16,64 2>&1

# %%
cells = pd.read_csv("run/projection/projection.csv")

figure, axes = plt.subplots(figsize=(6, 2.8))
for design, rows in cells.groupby("design"):
    best = rows.loc[rows.groupby("batch")["speedup"].idxmax()]
    errors = best["speedup"] - best["speedup_low"], best["speedup_high"] - best["speedup"]
    axes.errorbar(best["batch"], best["speedup"], errors, fmt="o-", capsize=3, label=f"{design}, best length")
axes.axhline(1, color=figures.GREY, linestyle="--", linewidth=1)
axes.set(xscale="log", xlabel="batch size", ylabel="projected speed-up", ylim=(0, None))
axes.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
axes.minorticks_off()
axes.legend(fontsize=8)
figure.tight_layout()

# %% [markdown]
# ## Next
#
# `docs/replay.md`, `docs/bounds.md` and `docs/projection.md` say what is computed, how exactly, and what is refused.
