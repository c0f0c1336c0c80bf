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
# # Your own model, and a head trained for it
#
# From a checkpoint on your disk to a drafter of its own: train Medusa heads on the model's own answers, measure them,
# and certify that the output keeps the model's distribution. The training takes about a minute on a CPU, which is far
# too little for a useful drafter; the steps and commands are the same for a long one.

# %%
import os
import sys
import tempfile
from pathlib import Path

os.chdir(tempfile.mkdtemp())
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # "python" below is this one
os.environ["COLUMNS"] = "100"

# %% [markdown]
# ## The checkpoint
#
# Any folder with a causal language model of transformers will do, such as one that `save_pretrained` wrote. Here a copy
# of the bundled target plays that part. Nothing in the folder names spec_lab.

# %%
import json
import shutil

import spec_lab

bundled = Path(spec_lab.__file__).parent / "zoo"
shutil.copytree(bundled / "target", "my_model")
config = json.loads(Path("my_model/config.json").read_text())
print(*sorted(file.name for file in Path("my_model").iterdir()))
print({name: config[name] for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")})

# %% [markdown]
# ## The prompts
#
# One JSON object in each line, with the key `prompt`. They should be like those that the model will be asked. Three
# quarters are for the training, the others for the measurement.

# %%
lines = [
    line
    for name in ("code", "json", "prose")
    for line in (bundled / "prompts" / f"{name}.jsonl").read_text().splitlines()
]
Path("learn.jsonl").write_text("\n".join(line for number, line in enumerate(lines) if number % 4) + "\n")
Path("measure.jsonl").write_text("\n".join(lines[::4]) + "\n")
print(f"{len(lines)} prompts, {len(lines[::4])} of them to measure")

# %% [markdown]
# ## Train
#
# The target answers the prompts, and two heads learn to predict the tokens two and three places ahead from its hidden
# states. Progress is in `trained`; after an interruption the same command resumes. Of these prompts some are held out
# as well (`task.held_out`): the table is about them.

# %% language="bash"
# python -m spec_lab train medusa target.path=my_model target.dtype=float32 prompts=jsonl prompts.path=learn.jsonl \
#     max_new_tokens=32 batch_size=32 task.rows=8 task.passes=20 task.recipe.heads=2 threads=1 output_dir=trained \
#     2>log.txt || cat log.txt

# %%
import matplotlib.pyplot as plt

from spec_lab.analysis import figures

# %matplotlib inline
plt.rcParams.update(figures.STYLE)

training = json.loads(Path("trained/summary.json").read_text())
curve = training["learning"]
step = [line["step"] for line in curve]
figure, panels = plt.subplots(1, 2, figsize=(7, 2.8))
for head in range(2):
    colour = figures.COLOURS[head]
    panels[0].plot(step, [line["loss"][head] for line in curve], color=colour, label=f"head {head + 1}")
    panels[1].plot(step, [line["accepted"][head] for line in curve], color=colour, label=f"head {head + 1}")
    panels[1].plot(step[-1], training["accepted"][head], "s", color=colour)
panels[0].set(xlabel="training step", ylabel="loss, nats", ylim=(0, None))
panels[1].set(xlabel="training step", ylabel="drafted token accepted", ylim=(0, 1))
panels[0].legend(fontsize=8)
panels[1].set_title("line: texts of the training; square: held out", fontsize=8)
figure.tight_layout()

# %% [markdown]
# The heads have learned the eighty answers nearly by heart: on these (lines) most drafted tokens are accepted, on
# held-out prompts (squares) few. More passes over the same answers do not help; more answers do.
#
# ## Measure
#
# On prompts that the training has not seen, three arms take turns with the baseline, which decodes one token per
# forward: the heads just trained, the heads that come with spec_lab for this target, which were trained for far longer,
# and prompt lookup, which needs no training. The heads draft a tree: three candidates, and two children of each.

# %% language="bash"
# python -m spec_lab target.path=my_model target.dtype=float32 prompts=jsonl prompts.path=measure.jsonl \
#     prompts.limit=12 proposer=medusa proposer.path=trained/drafter proposer.tree=3x2 \
#     +proposer@arms.bundled=medusa arms.bundled.tree=3x2 +proposer@arms.ngram=ngram arms.ngram.depth=2 \
#     sampling=temperature_1 max_new_tokens=32 threads=1 output_dir=measured 2>log.txt || cat log.txt

# %%
import pandas as pd

from spec_lab.analysis import metrics
from spec_lab.analysis.metrics.intervals import cluster_interval

tables = metrics.load("measured")
names = {"speculative": "one minute", "bundled": "bundled heads", "ngram": "prompt lookup"}
rows = {}
for arm, name in names.items():
    steps = metrics.decode_steps(tables.steps, arm)
    tau = cluster_interval(steps["emitted_kept"], steps["emitted_kept"] * 0 + 1, steps["request"])
    speedup = metrics.speedup(tables.requests, arm)
    rows[name] = {"tau": tau.mean, "tau, low": tau.low, "tau, high": tau.high}
    rows[name] |= {"speed-up": speedup.mean, "low": speedup.low, "high": speedup.high}
pd.DataFrame(rows).T.round(2)

# %%
figure, axes = plt.subplots(figsize=(6, 2.4))
for number, row in enumerate(rows.values()):
    errors = [row["tau"] - row["tau, low"]], [row["tau, high"] - row["tau"]]
    axes.errorbar(row["tau"], number, xerr=errors, fmt="o", capsize=3, color=figures.COLOURS[number])
axes.axvline(1, color=figures.GREY, linestyle="--", linewidth=1)
axes.set_yticks(range(len(rows)), rows)
axes.invert_yaxis()
axes.set(xlabel="tau, tokens per step (95 % interval; dashed: without drafts)", xlim=(0.9, None))
figure.tight_layout()

# %% [markdown]
# A step with a draft costs more than one without, so a speed-up needs a tau above that cost; where an interval of the
# speed-up contains 1, neither a gain nor a loss is shown. A minute of training gives a tau near that of prompt lookup,
# which is cheaper. What helps: more and longer answers (more prompts like your own, `task.answers`, `max_new_tokens`),
# and hours in place of a minute. `experiments/training_length` shows how the acceptance of EAGLE-3 heads for this
# target grows with the training: each doubling of the tokens still adds.
#
# ## Certify
#
# Untrained or not, drafts must never change the distribution of the output. `certify` enumerates the real code with
# these heads' tree on toy models, and tests samples of your model.

# %% language="bash"
# python -m spec_lab +experiment=certify target.path=my_model target.dtype=float32 prompts=jsonl \
#     prompts.path=measure.jsonl prompts.limit=4 proposer=medusa proposer.path=trained/drafter proposer.tree=3x2 \
#     task.samples=1000 task.tokens=128 max_new_tokens=16 threads=1 output_dir=certified 2>log.txt || cat log.txt

# %% [markdown]
# ## Next
#
# - `python -m spec_lab report measured` writes a page with every figure of the measurement, and the texts.
# - `tracker=wandb` shows a training on Weights & Biases while it goes on.
# - `trained/drafter` holds the heads as safetensors, with a `config.json`; `proposer.path` names it wherever this
#   target is decoded.
