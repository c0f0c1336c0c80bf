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
# # Add a proposer, start to finish
#
# A proposer of your own is one Python file and one YAML file, anywhere: nothing is registered, and nothing in spec_lab
# is changed. This notebook writes one into a temporary directory, tries it by hand, compares it with prompt lookup,
# certifies it, and packages it.

# %%
import os
import sys
import tempfile
from pathlib import Path

os.chdir(tempfile.mkdtemp())
sys.path.insert(0, os.getcwd())  # to import what we write; "python -m" looks into its directory anyway
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # "python" below is this one
os.environ["COLUMNS"] = "100"
Path("my_drafts/conf/proposer").mkdir(parents=True)
for package in ("my_drafts", "my_drafts/conf"):
    Path(package, "__init__.py").touch()

# %% [markdown]
# ## The file
#
# The idea: after each token draft the one that followed its last occurrence in the same text. A proposer has a `name`,
# declares how its siblings are `drawn` (here `deterministic`) and how many `nodes` it drafts at most. `propose`
# receives the live sequences and returns one tree for each: here a chain, which may be empty. `Proposer` has defaults
# for the rest: this proposer carries no state from step to step, and `requires` no hidden states or logits of the
# target.

# %%
# %%writefile my_drafts/recent.py
"""A proposer: each draft token is the one that followed the last occurrence of the token before it."""

from dataclasses import dataclass
from itertools import pairwise

import torch

from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.options import whole
from spec_lab.core.shape import chain, forest
from spec_lab.decode.proposer import Proposer
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target


@dataclass(frozen=True)
class Recent(Proposer):
    depth: int
    name: str = "recent"
    drawn: Drawn = "deterministic"  # the same text always gets the same draft, so it carries no probabilities q

    @staticmethod
    def load(target: Target, depth: int = 4) -> "Recent":
        return Recent(whole("proposer.depth", depth))  # raises an error that names the option

    @property
    def nodes(self) -> int:
        return self.depth

    def propose(self, batch: Batch) -> Draft:
        chains = [follow(sequence.tokens, self.depth) for sequence in batch.sequences]
        tokens = torch.tensor([token for drafted in chains for token in drafted], dtype=torch.long, device=batch.device)
        return Draft(forest(tuple(chain(len(drafted)) for drafted in chains)), tokens)


def follow(tokens: list[int], count: int) -> list[int]:
    after = dict(pairwise(tokens))  # later occurrences replace earlier ones
    text = tokens[-1:]
    while len(text) <= count and text[-1] in after:
        text.append(after[text[-1]])
    return text[1:]


# %% [markdown]
# Its YAML names the function that makes it and the scalar options. `target`, and other live objects that are parameters
# of the function, are passed by the run.

# %% language="bash"
# cat > my_drafts/conf/proposer/recent.yaml <<END
# _target_: my_drafts.recent.Recent.load
# depth: 4                   # most tokens drafted per step
# END

# %% [markdown]
# ## By hand
#
# Its drafts are a plain function of tokens, which can be tried and tested without a model.

# %%
from my_drafts import recent

print(recent.follow([5, 6, 5, 7, 8, 5], 3))  # 7 followed the last occurrence of 5
print(recent.follow([5, 6, 5, 7, 8, 5], 1))
print(recent.follow([1, 2, 3], 4))  # nothing has followed 3

# %% [markdown]
# ## Run
#
# `--config-dir` adds our YAML to the choices. Prompt lookup, which looks for longer matches first, and the baseline
# decode the same prompts in the same run.

# %%
import spec_lab

run = spec_lab.run(
    "--config-dir my_drafts/conf proposer=recent +proposer@arms.ngram=ngram arms.ngram.depth=10 "
    "prompts.limit=8 max_new_tokens=32 target.dtype=float32 threads=1 output_dir=measured"
)

# %% [markdown]
# Before decoding, the run checks that the verifier supports such drafts. At its end it enumerates a few steps of this
# proposer on toy models: *lossless, certified by enumeration*. In rows the arm of a proposer has its name.

# %%
import pandas as pd

from spec_lab.analysis import metrics

tables = metrics.load("measured")
steps = {arm: metrics.decode_steps(tables.steps, arm) for arm in ("recent", "ngram")}
pd.DataFrame(
    {
        arm: {
            "nodes per step": rows["nodes"].mean(),
            "acceptance rate": metrics.draft_token_rate(rows),
            "tau": metrics.tau_pooled(rows),
        }
        for arm, rows in steps.items()
    }
).round(2)

# %%
import matplotlib.pyplot as plt

from spec_lab.analysis import figures

# %matplotlib inline
plt.rcParams.update(figures.STYLE)
figures.acceptance(tables)

# %% [markdown]
# Is the difference significant? `compare` pairs the two arms by prompts.

# %%
from spec_lab.analysis import compare

changes = compare.as_frame(compare.compare([Path("measured")]))
changes = changes[changes["other_arm"] == "ngram"].set_index("figure")
changes[["reference_value", "other_value", "change", "simultaneous_low", "simultaneous_high", "verdict"]].round(2)

# %% [markdown]
# ## Certify
#
# With a lossless verifier, drafts change the speed and never the distribution of the output, provided that they were
# drawn as the proposer declares. `certify` tests both: on toy models by enumeration, on the real target by samples.

# %%
run = spec_lab.run(
    "--config-dir my_drafts/conf +experiment=certify proposer=recent "
    "task.samples=1000 task.tokens=128 prompts.limit=4 max_new_tokens=16 threads=1 output_dir=certified"
)

# %% [markdown]
# ## Package it
#
# Two `__init__.py` and this file make it a package that others can install:

# %% language="bash"
# cat > pyproject.toml <<END
# [build-system]
# requires = ["hatchling"]
# build-backend = "hatchling.build"
#
# [project]
# name = "my-drafts"
# version = "0.1.0"
# requires-python = ">=3.11"
# dependencies = ["spec-lab"]
# END

# %% [markdown]
# Where it is installed, `hydra.searchpath` names its configs and no path is needed. `--cfg job` prints what would run:

# %% language="bash"
# python -m spec_lab 'hydra.searchpath=[pkg://my_drafts.conf]' proposer=recent --cfg job --package proposer

# %% [markdown]
# ## Next
#
# - A proposer that samples: `drawn` is `iid` or `without_replacement`, and the draft carries the draft distributions
#   (`q`, `q_row` of `spec_lab/core/draft.py`). `certify` finds drafts that were not drawn from the `q` that they carry.
# - A proposer that learns from the target: `requires` names the hidden states or logits it needs, `init(request)` makes
#   the state of a sequence, and `observe` receives what each step computed; `spec_lab/decode/proposer.py` documents the
#   life cycle.
# - A proposer with weights: `load` receives the options of the YAML; a method `toy(target, draft, tree)` makes the same
#   proposer for a toy target, so that it can be enumerated.
# - Trees: `tree(((0,), (1,), (0, 0)))` instead of `chain(3)`.
# - A verifier or a constraint is added in the same way; `tests/extension` of spec_lab holds a package with all three.
