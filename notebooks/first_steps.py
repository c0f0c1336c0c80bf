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
# # First steps
#
# One experiment, from the command to the decoded text. Everything runs on the bundled models, on a CPU, in about half a
# minute; files go to a temporary directory.

# %%
import os
import sys
import tempfile
from pathlib import Path

os.chdir(tempfile.mkdtemp())
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # "python" below is this one
os.environ["COLUMNS"] = "100"

# %% [markdown]
# ## Run
#
# Medusa heads draft a tree of tokens (three candidates, two children of each, one child of each of those), and the
# target verifies all of them in one forward. Two arms decode eight held-out prompts that begin a JSON record: `medusa`,
# and the `baseline`, which decodes one token per forward.

# %%
import spec_lab

run = spec_lab.run(
    "+experiment=medusa_tree proposer.tree=3x2x1 prompts=json sampling=temperature_1 "
    "prompts.limit=8 max_new_tokens=32 target.dtype=float32 threads=1 output_dir=first"
)

# %% [markdown]
# ## The files
#
# `manifest.json` records the configuration, the code and the machine; `summary.json` holds every number above and more.
# All numbers and figures are computed from three tables: `forwards` has a row for each step of the batch, `steps` for
# each sequence in a step, `requests` for each prompt and arm. The arm of a proposer has its name.

# %%
from IPython.display import display

from spec_lab.analysis import metrics

print(*sorted(str(file) for file in Path("first").rglob("*") if file.is_file()), sep="\n")
tables = metrics.load("first")
display(tables.requests[["request", "arm", "prompt_tokens", "decode_tokens", "decode_seconds", "finish"]].head(4))
display(
    tables.steps[["request", "arm", "forward", "nodes", "path", "accepted", "emitted", "expected_accepted"]].head(4)
)

# %% [markdown]
# ## Was it faster?
#
# The arms alternate on each group of prompts (here a group is one prompt), so both decode the same prompts shortly
# after each other. The speed-up is a ratio of sums: total tokens per total seconds of `medusa` over those of the
# baseline. Its 95 % interval is over groups. It depends on the machine: drafting pays where a forward of
# several tokens costs little more than a forward of one. The weights are in float32 here, as many
# CPUs multiply bfloat16 slowly: there it costs several times as much, and the speed-up is below 1.

# %%
import matplotlib.pyplot as plt
import numpy as np

from spec_lab.analysis import figures

# %matplotlib inline
plt.rcParams.update(figures.STYLE)

speedup = metrics.speedup(tables.requests, "medusa")
print(f"speed-up (ratio of sums) {speedup.mean:.2f}, 95 % interval {speedup.low:.2f} to {speedup.high:.2f}")
figures.throughput(tables)

# %% [markdown]
# ## Acceptance by depth
#
# `survival` is the share of steps that accepted at least k draft tokens. `conditional` is the share that accepted the
# k-th, of the steps that reached depth k. Tau is the mean number of tokens per step: the accepted ones and one more,
# the bonus or recovered token. Untruncated tau is tau before stop tokens and limits cut.

# %%
steps = metrics.decode_steps(tables.steps, "medusa")
survival = metrics.survival(steps)
print("survival", survival.round(2), " untruncated tau", round(metrics.tau_pooled_raw(steps), 2))
figures.acceptance(tables)

# %% [markdown]
# ## Expected tau
#
# A verifier returns probabilities: for each node of a draft, that the accepted path ends there. So the expected number
# of accepted tokens of every step is known exactly, before one is sampled. Expected tau is computed from these
# expectations. The differences to the sampled numbers have mean zero.

# %%
difference = steps["accepted"] - steps["expected_accepted"]
error = difference.std() / len(difference) ** 0.5
print(f"untruncated tau {metrics.tau_pooled_raw(steps):.3f}, expected tau {metrics.expected_tau(steps):.3f}")
print(f"accepted - expected, per step: {difference.mean():.3f}, standard error {error:.3f}")

figure, axes = plt.subplots(figsize=(6, 2.8))
number = np.arange(1, len(difference) + 1)
axes.plot(number, difference.cumsum(), color=figures.colours(["medusa"])["medusa"], label="medusa")
axes.plot(number, np.zeros(len(number)), color=figures.GREY, linestyle="--", linewidth=1, label="expected")
spread = 2 * difference.std() * np.sqrt(number)
axes.fill_between(number, -spread, spread, color=figures.GREY, alpha=0.15, linewidth=0, label="two standard deviations")
axes.set(xlabel="steps", ylabel="tokens", title="Accepted - expected tokens, summed over steps: a random walk")
axes.legend(fontsize=8, loc="lower left")
figure.tight_layout()

# %% [markdown]
# ## Where the text comes from
#
# Rows record how many tokens of each step were accepted drafts, and where the characters of every token end. Green:
# drafted and accepted; the rest was sampled from the target.

# %%
from spec_lab.analysis.metrics import frames

spans = frames.spans(tables, request=1, arm="medusa")
output = tables.requests.query("request == 1 and arm == 'medusa'").iloc[0]
green = "\x1b[32m{}\x1b[0m".format
print(output["prompt"][-60:] + "".join(green(span.text) if span.kind == "accepted" else span.text for span in spans))

# %% [markdown]
# ## In Python, as a stream
#
# `spec_lab.generate` decodes without measuring, and yields text as soon as no later token can change it. Drafts are
# n-grams that occurred before in the text; accepted ones are green again.

# %%
from spec_lab.propose.ngram import Ngram

prompt = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n    def"
print(prompt, end="")
for update in spec_lab.generate(prompt, proposer=Ngram(depth=4, max_ngram=3, min_ngram=1), max_new_tokens=40):
    for share in update.shares:
        print(green(share.text) if share.origin == "accepted" else share.text, end="")

# %% [markdown]
# ## Next
#
# - `reading_a_sweep`: compare many runs.
# - `is_it_lossless`: why the output has the target's distribution, and how it is proved.
# - `add_a_proposer`: write a proposer of your own.
# - `python -m spec_lab report first` writes a page with all of this; `python -m spec_lab --help` lists the parts that
#   can be chosen.
