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
# is changed. This notebook writes one into a temporary directory, tries it by hand, measures it beside prompt lookup,
# certifies it, and says what it needs to be shipped.

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
# The idea: after each token draft the one that came after it the last time, in this very text. A proposer has a `name`,
# declares how its siblings are `drawn` (here nothing is: `point`) and how many `nodes` it drafts at most. `propose`
# gets the live sequences, and returns one tree for each: here a chain, which may be empty. `Lifecycle` has defaults for
# the rest: this proposer carries no state from step to step, and `requires` no hidden states or logits of the target.

# %%
# %%writefile my_drafts/recent.py
"""A proposer: each drafted token is the one that came after the token before it the last time, in this very text."""

from dataclasses import dataclass
from itertools import pairwise

import torch

from spec_lab.core.draft import Draft, Drawn, chain, forest
from spec_lab.core.options import whole
from spec_lab.engine.proposer import Lifecycle
from spec_lab.engine.sequence import Batch
from spec_lab.models.target import Target


@dataclass(frozen=True)
class Recent(Lifecycle):
    depth: int
    name: str = "recent"
    drawn: Drawn = "point"  # the same text always gets the same draft, so it carries no probabilities q

    @staticmethod
    def load(target: Target, depth: int = 4) -> "Recent":
        return Recent(whole("proposer.depth", depth))  # refused by name if it is no whole number of 1 or more

    @property
    def nodes(self) -> int:
        return self.depth

    def propose(self, batch: Batch) -> Draft:
        chains = [follow(sequence.tokens, self.depth) for sequence in batch.sequences]
        tokens = torch.tensor([token for one in chains for token in one], dtype=torch.long, device=batch.device)
        return Draft(forest(tuple(chain(len(one)) for one in chains)), tokens)


def follow(tokens: list[int], count: int) -> list[int]:
    after = dict(pairwise(tokens))  # the last time wins
    found = tokens[-1:]
    while len(found) <= count and found[-1] in after:
        found.append(after[found[-1]])
    return found[1:]


# %% [markdown]
# Its YAML names what makes it, and gives the scalar options. `target`, and other live objects it may ask for by name,
# come from the run.

# %% language="bash"
# cat > my_drafts/conf/proposer/recent.yaml <<END
# _target_: my_drafts.recent.Recent.load
# depth: 4                   # most tokens drafted
# END

# %% [markdown]
# ## By hand
#
# What it drafts is a plain function of tokens, so that can be tried, and tested, without any model.

# %%
from my_drafts import recent

print(recent.follow([5, 6, 5, 7, 8, 5], 3))
assert recent.follow([5, 6, 5, 7, 8, 5], 3) == [7, 8, 5]  # 5 was followed by 6, but by 7 the last time
assert recent.follow([5, 6, 5, 7, 8, 5], 1) == [7]
assert recent.follow([1, 2, 3], 4) == []  # nothing has followed 3

# %% [markdown]
# ## Run
#
# `--config-dir` adds our YAML to what there is to choose from. Prompt lookup, which looks for longer matches first, and
# the baseline decode the same prompts in the same run.

# %% language="bash"
# python -m spec_lab --config-dir my_drafts/conf proposer=recent +proposer@arms.ngram=ngram \
#     prompts.limit=8 max_new_tokens=32 threads=1 output_dir=measured

# %% [markdown]
# Before anything was decoded, the run has checked that the pair fits (a verifier that cannot judge such drafts is
# refused by name), and enumerated a few toy steps with this very proposer: *lossless by enumeration on toys*.

# %%
import pandas as pd

from spec_lab.analysis import metrics

tables = metrics.load("measured")
steps = {arm: metrics.decode_steps(tables.steps, arm) for arm in ("speculative", "ngram")}
assert steps["speculative"]["depth"].max() == 4  # the depth of the YAML
assert metrics.tau_pooled_raw(steps["speculative"]) > 1  # some drafts are accepted
pd.DataFrame(
    {
        ("recent" if arm == "speculative" else arm): {
            "tokens drafted per step": own["nodes"].mean(),
            "accepted / drafted": metrics.draft_token_rate(own),
            "tau": metrics.tau_pooled(own),
        }
        for arm, own in steps.items()
    }
).round(2)

# %%
import matplotlib.pyplot as plt

from spec_lab.analysis import figures

# %matplotlib inline
plt.rcParams.update(figures.STYLE)
figures.acceptance(tables)

# %% [markdown]
# Is the difference significant? `compare` compares the two arms prompt by prompt.

# %%
from spec_lab.analysis import compare

found = compare.as_frame(compare.compare([Path("measured")]))
found = found[found["other_arm"] == "ngram"].set_index("figure")
assert found.loc["tau_pooled", "paired"]
assert found.loc["nodes_per_step", "units"] == 8  # prompts
found[["reference_value", "other_value", "change", "simultaneous_low", "simultaneous_high", "verdict"]].round(2)

# %% [markdown]
# ## Certify
#
# A draft can only cost time, never change the law of what comes out: that is what a lossless verifier promises, if the
# proposer tells the truth about how its tokens were drawn. `certify` tries both, on toys by enumeration and on the real
# target by samples.

# %% language="bash"
# python -m spec_lab --config-dir my_drafts/conf +experiment=certify proposer=recent \
#     task.samples=1000 task.tokens=128 prompts.limit=4 max_new_tokens=16 threads=1 output_dir=certified

# %%
import json

(pair,) = json.loads(Path("certified/certificate.json").read_text())["pairs"]
assert pair["certified"] == "exact"
assert pair["exact"]["drafts"] == "proposer"  # its own were enumerated, not those of a reference in its place
assert pair["exact"]["drafted"] > 100  # and there were some

# %% [markdown]
# ## Ship
#
# Two `__init__.py` and this make it a package, which others install beside spec_lab:

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
# Who has it installed needs no path, but the name of its configs. `--cfg job` prints what would run:

# %% language="bash"
# python -m spec_lab 'hydra.searchpath=[pkg://my_drafts.conf]' proposer=recent --cfg job --package proposer

# %% [markdown]
# Further on:
#
# - Draws at random? Then `drawn` is `iid` or `without`, and the draft carries the distributions it drew from (`q`,
#   `q_row` of `spec_lab/core/draft.py`); drafts that were not drawn from the `q` they state are what `certify` is for.
# - Learns from the target? `requires` names the hidden states or logits it needs, `init(request)` makes the state of a
#   sequence, and `observe` receives what each step computed; `spec_lab/engine/proposer.py` has the whole life cycle.
# - Needs weights? `load` gets what the YAML names; a method `toy(target, draft, tree)` makes the same proposer for a
#   toy target, so that it can be enumerated.
# - Trees: `tree(((0,), (1,), (0, 0)))` in place of `chain(3)`.
# - A verifier or a constraint is added in the same way; `tests/extension` of spec_lab holds a package with all three.
