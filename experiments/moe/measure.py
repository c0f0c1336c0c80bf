"""Measure rows and drafts on small mixtures of experts: python -m experiments.moe.measure.

Two models of the same shape are built here: one with random weights, and one that is trained for some hundred steps on
bundled texts, with the load-balancing loss of its family. Their weights are not kept. Of each the script measures

1. the experts that a forward reads and its seconds, by rows of a sequence and batch size: with rows of the text itself,
   as accepted drafts are, and with random tokens, as the worst rejected ones are;
2. what n-gram chains gain over autoregressive decoding, by length and batch size, with what the rejected rows read.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from experiments import plots, runs
from spec_lab.analysis.figures import GREY, STYLE
from spec_lab.core.draft import Draft
from spec_lab.core.draft import empty as no_draft
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.core.shape import chain, forest
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.decode.recording import Recording
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.propose.ngram import Ngram
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.verify import Token

EXPERTS, PER_ROW, LAYERS, HIDDEN, INNER, CONTEXT = 16, 2, 4, 128, 192, 512
ROWS, BATCHES = (1, 2, 4, 8, 16), (1, 4)
PROMPT = 64
"""Tokens of a prompt, and before the timed rows."""

CLAIM = "At batch 1 the experts that a chain's rows read cost about what it gains; in a batch of 4 a short chain pays"
"""The finding of the measurement that is stored; check it after a new one."""

HERE = Path(__file__).parent


def texts() -> tuple[list[list[int]], list[list[int]]]:
    """Return the tokens of the bundled texts that are trained on, and of every fourth prompt, which is not."""
    tokenizer = AutoTokenizer.from_pretrained(runs.ZOO / "target")
    lines = [
        json.loads(line)
        for file in sorted([*(runs.ZOO / "prompts").glob("*.jsonl"), *(runs.ZOO / "workloads").glob("*.jsonl")])
        for line in file.read_text().splitlines()
    ]
    encoded = [tokenizer(line["prompt"])["input_ids"] for line in lines if "prompt" in line]
    held_out = [tokens for tokens in encoded[::4] if len(tokens) > PROMPT + max(ROWS)]
    return [tokens for number, tokens in enumerate(encoded) if number % 4], held_out


def build(vocabulary: int, seed: int = 0) -> Any:
    """Return a random mixture of experts in float32."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=vocabulary, hidden_size=HIDDEN, intermediate_size=2 * INNER, moe_intermediate_size=INNER,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=4, head_dim=32, num_experts=EXPERTS,
        num_experts_per_tok=PER_ROW, norm_topk_prob=True, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        router_aux_loss_coef=0.01, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def train(model: Any, documents: Sequence[Sequence[int]], steps: int, batch: int = 8, length: int = 96) -> float:
    """Train a model on windows of the texts; return the mean loss of the last tenth of the steps."""
    stream = torch.tensor([token for tokens in documents for token in tokens])
    draw = np.random.default_rng(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=max(steps, 2))
    losses = []
    model.train()
    for number in range(steps):
        starts = draw.integers(0, len(stream) - length, batch)
        window = torch.stack([stream[start : start + length] for start in starts])
        output = model(window, labels=window, output_router_logits=True)
        optimiser.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(output.loss.item())
        if number % 50 == 0:
            print(f"step {number}: loss {losses[-1]:.3f}")
    model.eval()
    return float(np.mean(losses[-max(1, steps // 10) :]))


def rows_read(lm: CausalLM, held_out: Sequence[Sequence[int]], places: int, repeats: int) -> list[dict[str, Any]]:
    """Return the experts and seconds of forwards over rows that follow prompts, by kind of row.

    Args:
        lm: the model.
        held_out: texts.
        places: for each batch size, forwards after different prompts.
        repeats: timed forwards of each.
    """
    draw, measured = np.random.default_rng(1), []
    lm.count_experts(True)
    for batch, place in product(BATCHES, range(places)):
        some = [held_out[(place * batch + number) % len(held_out)] for number in range(batch)]
        sequences = [lm.open(CONTEXT) for _ in some]
        lm.forward(sequences, [tokens[:PROMPT] for tokens in some], no_draft(batch, lm.device))
        for rows, kind in product(ROWS, ("text", "random")):
            follow = [tokens[PROMPT + 1 : PROMPT + rows] for tokens in some]
            drafted = np.concatenate(follow).astype(np.int64) if rows > 1 else np.empty(0, dtype=np.int64)
            if kind == "random":
                drafted = draw.integers(0, lm.vocabulary, len(drafted))
            shapes = forest((chain(rows - 1),) * batch)
            seconds = []
            for _ in range(repeats):
                draft = Draft(shapes, torch.from_numpy(drafted)) if rows > 1 else no_draft(batch, lm.device)
                start = time.perf_counter()
                output = lm.forward(sequences, [[tokens[PROMPT]] for tokens in some], draft)
                seconds.append(time.perf_counter() - start)
                for sequence in sequences:
                    sequence.accept()
                    sequence.truncate(PROMPT)
            read = np.mean([len(layer.unique()) for layer in output.experts.numbers])
            measured.append({"batch": batch, "rows": rows, "kind": kind, "read": read, "seconds": min(seconds)})
        for sequence in sequences:
            sequence.close()
    lm.count_experts(False)
    return measured


def decoded(target: Target, depth: int, prompts: Sequence[Sequence[int]], new: int) -> dict[str, float]:
    """Decode groups of prompts greedily with n-gram chains, or with none; return tokens, seconds and experts of it."""
    proposer = Ngram.load(target, depth=depth) if depth else Null.load(target)
    arm = Arm(target, proposer, Token(), CounterDraws(0), record=Recording(experts=True))
    requests = [Request(number, f"p{number}", tuple(tokens), Sampling(), new) for number, tokens in enumerate(prompts)]
    infos = [info for info in fixed_group(arm, requests) if not any(info.prefill)]
    live = sum(len(info.sequences) for info in infos)
    counts = np.array([np.mean(info.experts, axis=1) for info in infos if info.experts is not None])
    return {
        "tokens": sum(got.count(kept=True) for info in infos for got in info.committed),
        "steps": live,
        "seconds": sum(info.seconds()["whole"] for info in infos),
        "forwards": len(infos),
        "read": counts[:, 0].sum(),
        "bytes": float(target.lm.work.read(np.ones(len(counts)), counts[:, 0]).sum()),
        "rejected_only": (counts[:, 0] - counts[:, 1]).sum(),
    }


def gains(
    target: Target, held_out: Sequence[Sequence[int]], groups: int, new: int, repeats: int
) -> list[dict[str, Any]]:
    """Return speed-up, tau and utility of n-gram chains by batch size and length, each beside autoregressive decoding.

    Utility is Cascade's (2506.20675), tokens gained over cost, here tau / (weights that a step reads / those of a plain
    step), which does not depend on the machine. ``cost`` is the same ratio of seconds.
    """
    measured = []
    for batch in BATCHES:
        totals: dict[int, list[dict[str, float]]] = {rows: [] for rows in ROWS}
        for repeat, group in product(range(repeats), range(groups)):
            chosen = [held_out[(group * batch + number) % len(held_out)][:PROMPT] for number in range(batch)]
            order = ROWS if (repeat + group) % 2 else ROWS[::-1]
            for rows in order:
                totals[rows].append(decoded(target, rows - 1, chosen, new))
        sums = {rows: pd.DataFrame(each).sum() for rows, each in totals.items()}
        plain = sums[1]
        for rows, total in sums.items():
            tau = total["tokens"] / total["steps"]
            cost, weights = (
                (total[name] / total["forwards"]) / (plain[name] / plain["forwards"]) for name in ("seconds", "bytes")
            )
            speed = (total["tokens"] / total["seconds"]) / (plain["tokens"] / plain["seconds"])
            measured.append(
                {
                    "batch": batch, "rows": rows, "tau": tau, "weights": weights, "utility": tau / weights,
                    "cost": cost, "speedup": speed,
                    "read": total["read"] / total["forwards"],
                    "rejected_only": total["rejected_only"] / total["forwards"],
                }
            )  # fmt: skip
    return measured


def uniform(rows: Any) -> Any:
    """Return the expected experts of independent uniform choices (MoESD, 2505.19645)."""
    return EXPERTS * (1 - (1 - PER_ROW / EXPERTS) ** rows)


def draw(curve: pd.DataFrame, gain: pd.DataFrame) -> Figure:
    """Draw experts by rows of a forward, and the utility of chains by their rows."""
    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    left, *others = figure.subplots(1, 1 + len(BATCHES))
    every = np.arange(1, max(ROWS) * max(BATCHES) + 1)
    left.plot(every, uniform(every), color=GREY, linestyle="--", label="uniform choices")
    look = {"random": {"linestyle": ":", "marker": "s"}, "trained": {"linestyle": "-", "marker": "o"}}
    colour = plots.colours(["ngram"])["ngram"]
    for model, style in look.items():
        of_text = curve[(curve["model"] == model) & (curve["kind"] == "text")]
        means = of_text.assign(total=of_text["rows"] * of_text["batch"]).groupby("total")["read"].mean()
        left.plot(means.index, means, color="black", markersize=4, label=f"{model} weights", **style)
    left.set(xscale="log", xlabel="rows of the forward", ylabel=f"experts read, of {EXPERTS} in a layer")
    totals = sorted({rows * batch for rows, batch in product(ROWS, BATCHES)})
    left.set_xticks(totals, [str(total) for total in totals])
    left.minorticks_off()
    left.legend()
    for axes, batch in zip(others, BATCHES, strict=True):
        for model, style in look.items():
            here = gain[(gain["model"] == model) & (gain["batch"] == batch)]
            axes.plot(here["rows"], here["utility"], color=colour, markersize=4, label=f"{model} weights", **style)
        plots.no_gain(axes)
        axes.set(
            xscale="log", xlabel="rows of a sequence", ylabel="utility (tau / weights read)", title=f"batch {batch}"
        )
        axes.set_xticks(ROWS, [str(rows) for rows in ROWS])
        axes.minorticks_off()
    others[0].legend()
    return figure


def table(curve: pd.DataFrame, gain: pd.DataFrame) -> str:
    """Return the tables of the README."""
    head = ["model", "batch", "rows", "uniform", "text rows", "random rows"]
    rows = [head]
    read = curve.groupby(["model", "batch", "rows", "kind"])["read"].mean()
    for model, batch, count in product(("random", "trained"), BATCHES, ROWS):
        experts = (uniform(count * batch), *(read.loc[(model, batch, count, kind)] for kind in ("text", "random")))
        rows.append([model, str(batch), str(count), *(f"{number:.1f}" for number in experts)])
    names = {
        "tau": "tau",
        "read": "experts",
        "rejected_only": "for rejected rows alone",
        "weights": "weights",
        "utility": "utility",
    }
    gained = [["model", "batch", "rows", *names.values()]]
    for row in gain.to_dict("records"):
        gained.append([row["model"], row["batch"], row["rows"], *(f"{row[name]:.2f}" for name in names)])
    return f"{plots.markdown(rows)}\n\n{plots.markdown(gained)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write results, figure and tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE, help="where results, figure and README are")
    parser.add_argument("--steps", type=int, default=300, help="of training (300)")
    parser.add_argument("--places", type=int, default=8, help="forwards after different prompts (8)")
    parser.add_argument("--groups", type=int, default=4, help="groups of prompts that are decoded (4)")
    parser.add_argument("--new", type=int, default=48, help="tokens emitted for each prompt (48)")
    parser.add_argument("--repeats", type=int, default=3, help="of everything that is timed (3)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--redraw", action="store_true", help="draw the figure from the results, without measuring")
    chosen = parser.parse_args(arguments)
    files = chosen.folder / "results.csv", chosen.folder / "gain.csv"
    if not chosen.redraw:
        torch.set_num_threads(chosen.threads)
        trained_on, held_out = texts()
        vocabulary = max(max(tokens) for tokens in [*trained_on, *held_out]) + 1
        curve, gain = [], []
        for name in ("random", "trained"):
            model = build(vocabulary)
            if name == "trained":
                print(f"loss after training: {train(model, trained_on, chosen.steps):.3f}")
            target = Target(CausalLM(model), None, name, CONTEXT, "", 0.0)
            read = rows_read(target.lm, held_out, chosen.places, chosen.repeats)
            curve += [{"model": name, **row} for row in read]
            gained = gains(target, held_out, chosen.groups, chosen.new, chosen.repeats)
            gain += [{"model": name, **row} for row in gained]
        for file, rows in zip(files, (curve, gain), strict=True):
            pd.DataFrame(rows).to_csv(file, index=False, float_format="%.4g")
    frames = [pd.read_csv(file) for file in files]
    with rc_context(STYLE):
        plots.save(draw(*frames), chosen.folder / "moe.png", CLAIM)
    text = table(*frames)
    plots.fill(chosen.folder / "README.md", text)
    print(text)


if __name__ == "__main__":
    main()
