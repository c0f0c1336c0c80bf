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
# One experiment, from the command to the text it decoded. Everything runs on the bundled models, on a CPU, in about
# half a minute; files go to a temporary directory.

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
# Medusa heads draft a tree of tokens (here three, two below each, one below each of those), and the target looks at all
# of them in one forward. Eight held-out prompts that begin a JSON record are each decoded twice: by the experiment (arm
# `speculative`), and one token a forward (arm `baseline`).

# %% language="bash"
# python -m spec_lab +experiment=medusa_tree proposer.tree=3x2x1 prompts=json sampling=temperature_1 \
#     prompts.limit=8 max_new_tokens=32 threads=1 output_dir=first

# %% [markdown]
# ## The files
#
# `manifest.json` says what was run, on what; `summary.json` holds every number above and more. All numbers follow from
# three tables, and so does all that comes below: `rounds` has a row for each forward, `steps` for each sequence in a
# forward, `requests` for each prompt and arm.

# %%
from IPython.display import display

from spec_lab.analysis import metrics

print(*sorted(str(file) for file in Path("first").rglob("*") if file.is_file()), sep="\n")
tables = metrics.load("first")
display(tables.requests[["request", "arm", "prompt_tokens", "decode_tokens", "decode_seconds", "finish"]].head(4))
display(tables.steps[["request", "arm", "round", "nodes", "path", "accepted", "emitted", "expected_accepted"]].head(4))
assert metrics.arms(tables) == ["speculative", "baseline"]
assert len(tables.requests) == 2 * 8  # both arms decoded every prompt

# %% [markdown]
# ## Was it faster?
#
# The two arms take turns on each group of prompts (here a group is one prompt), so each ratio is of the same prompts,
# moments apart. The interval says what other prompts of this kind might have given.

# %%
import matplotlib.pyplot as plt
import numpy as np

from spec_lab.analysis import figures

# %matplotlib inline
plt.rcParams.update(figures.STYLE)

ratios = metrics.walltime_speedup_paired(tables.requests, "speculative")
speedup = metrics.speedup(tables.requests, "speculative")
print(f"speed-up {speedup.mean:.2f}, 95 % interval {speedup.low:.2f} to {speedup.high:.2f}")
assert len(ratios) == 8 and speedup.low <= speedup.mean <= speedup.high
figures.throughput(tables)

# %% [markdown]
# ## How deep?
#
# `survival` is the share of steps that accepted at least k drafted tokens, `conditional` the share of those that did
# among the steps that got to depth k. Tau, the tokens of a step, is one more than what was accepted: the target's own
# choice comes after it.

# %%
steps = metrics.decode_steps(tables.steps, "speculative")
survival = metrics.survival(steps)
print("survival", survival.round(2), " tau before cuts", round(metrics.tau_pooled_raw(steps), 2))
assert abs(1 + survival.sum() - metrics.tau_pooled_raw(steps)) < 1e-9  # accepted tokens, counted by depth
figures.acceptance(tables)

# %% [markdown]
# ## What was expected, and what was sampled
#
# A verifier is a law: for each draft it says how probably the accepted path ends at which token. So every step knows
# its expected number of accepted tokens, whatever was then sampled. The differences are luck, and their mean goes to
# zero.

# %%
luck = steps["accepted"] - steps["expected_accepted"]
error = luck.std() / len(luck) ** 0.5
print(f"tau before cuts {metrics.tau_pooled_raw(steps):.3f}, expected {metrics.expected_tau(steps):.3f}")
print(f"accepted - expected, a step: {luck.mean():.3f} +- {error:.3f}")
assert abs(luck.mean()) < 5 * error

figure, axes = plt.subplots(figsize=(6, 2.8))
number = np.arange(1, len(luck) + 1)
axes.plot(number, luck.cumsum(), color=figures.COLOURS[0], label="sampled")
axes.plot(number, np.zeros(len(luck)), color=figures.GREY, linestyle="--", linewidth=1, label="expected")
spread = 2 * luck.std() * np.sqrt(number)
axes.fill_between(number, -spread, spread, color=figures.GREY, alpha=0.15, linewidth=0, label="two standard deviations")
axes.set(xlabel="steps", ylabel="accepted - expected, summed", title="Luck adds up like a random walk")
axes.legend(fontsize=8, loc="lower left")
figure.tight_layout()

# %% [markdown]
# ## Whose words?
#
# Rows say how many tokens of each step were accepted drafts and where every token's characters end. In green: text that
# was drafted and accepted; the rest is the target's own choice.

# %%
from spec_lab.analysis.metrics import frames

spans = frames.spans(tables, request=1, arm="speculative")
own = tables.requests.query("request == 1 and arm == 'speculative'").iloc[0]
green = "\x1b[32m{}\x1b[0m".format
print(own["prompt"][-60:] + "".join(green(one.text) if one.kind == "accepted" else one.text for one in spans))
assert "".join(one.text for one in spans) == own["text"]
assert {"accepted", "bonus"} <= {one.kind for one in spans}

# %% [markdown]
# ## In Python, as it comes
#
# `spec_lab.generate` decodes without measuring, and says what has become certain as soon as it is. The drafts here are
# looked up in the text itself; in green again those that were accepted.

# %%
import spec_lab
from spec_lab.propose.ngram import Ngram
from spec_lab.text.detokenizer import Finish

prompt = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n    def"
print(prompt, end="")
origins = set()
for said in spec_lab.generate(prompt, proposer=Ngram(depth=4, max_ngram=3, min_ngram=1), max_new_tokens=40):
    for share in said.shares:
        print(green(share.text) if share.origin == "accepted" else share.text, end="")
        origins.add(share.origin)
assert isinstance(said.event, Finish)
assert origins == {"accepted", "emitted"}

# %% [markdown]
# ## Next
#
# - `reading_a_sweep`: many runs, one question.
# - `is_it_lossless`: why the output's law is the target's, and how it is proved.
# - `add_a_proposer`: your own drafts.
# - `python -m spec_lab report first` makes a page of all this, `python -m spec_lab --help` lists what can be swapped.
