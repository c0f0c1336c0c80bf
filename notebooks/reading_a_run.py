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
# # Reading a run
#
# A run leaves three tables. Everything else, the summary and the figures included, is computed from them by
# `spec_lab.metrics`. This notebook reads one run and looks at it from three sides: was it faster, how deep were drafts
# accepted, and does the exact expectation agree with what was sampled?
#
# Make the run first: `python -m spec_lab +experiment=medusa_tree out=outputs/notebook`; another run's directory may be
# given in the environment variable `RUN`. `python scripts/render_notebooks.py outputs/notebook` executes the notebook
# and writes its outputs beside this source.

# %%
import os

import matplotlib.pyplot as plt
import numpy as np

from spec_lab import figures, metrics

# %matplotlib inline

run = os.environ.get("RUN", "../outputs/notebook")
tables = metrics.load(run)
arms = metrics.arms(tables)
arm = arms[0]
{name: len(getattr(tables, name)) for name in ("rounds", "steps", "requests")}

# %% [markdown]
# ## Was it faster?
#
# The unit of pairing is the group of prompts decoded together. Each group's ratio compares the same prompts in the same
# process, minutes apart at most.

# %%
speedup = metrics.interval(metrics.walltime_speedup_paired(tables.requests, arm))
print(f"speed-up {speedup.mean:.2f}, 95 % interval {speedup.low:.2f} to {speedup.high:.2f}")
figures.throughput(tables)

# %% [markdown]
# ## How deep?

# %%
steps = metrics.decode_steps(tables.steps, arm)
print(f"tau {metrics.tau_pooled(steps):.2f}, of which the token after the accepted path is 1")
figures.acceptance(tables)

# %% [markdown]
# ## Does the exact expectation agree?
#
# A verifier is a law, so every step knows the expected number of accepted tokens given its draft. Over all steps the
# difference between accepted and expected is noise around zero: at temperature 0 there is none.

# %%
difference = (steps["accepted"] - steps["expected_accepted"]).to_numpy()
error = difference.std() / np.sqrt(len(difference))
print(f"accepted - expected: {difference.mean():.4f} +- {error:.4f} a step")
assert abs(difference.mean()) <= 5 * error + 1e-9

fig, ax = plt.subplots(figsize=(6, 3.5))
ax.hist(steps["accepted"], bins=np.arange(-0.5, steps["accepted"].max() + 1), color="#1f6fb4", rwidth=0.9)
ax.set_xlabel("tokens accepted in a step")
ax.set_ylabel("steps")
fig.tight_layout()
