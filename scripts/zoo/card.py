"""The model card: measure the models on held-out text, and write the zoo's README."""

import json
import math
from collections.abc import Callable

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from spec_lab.core.files import file_hash
from spec_lab.drafters.medusa.files import read_medusa
from spec_lab.drafters.medusa.network import Heads
from spec_lab.models.target import Target

from . import acceptance, pretrain, prompts
from .generate import continue_text
from .settings import Settings

TEXT = """# Bundled models

A target, a draft model, Medusa heads, an EAGLE-3 head and Hydra heads that share one tokenizer, small enough for two
CPU cores; held-out prompts.

| folder | what | parameters | SHA-256 of `model.safetensors` |
| --- | --- | --- | --- |
{models}

**Data.** Python sources of the standard library and of installed packages ({packages});
generated JSON records (`scripts/zoo/records.py`); English paragraphs from their documentation strings and pydoc's
topics. All under the PSF, BSD, MIT or Apache-2.0 licences. **Licence** of weights, tokenizer and prompts: that of this
project; the prompts quote the packages named in their `source`, under those packages' licences.

**Training.** The target saw {target_tokens:.1f} M tokens in windows of {length} ({mix}), the first {grown:.1f}
M at half its depth; Muon and AdamW, warm-up-stable-decay, bf16 weights with float32 masters. The draft saw
{draft_tokens:.1f} M tokens of the same text. The draft was then distilled
({distilled}){last}. The target continued training prefixes, half greedily, half at temperature 1; every fifth part
is plain text. The draft learns the target's distributions; the heads also, in greedy parts, its likeliest tokens.

**Held-out loss** (whole held-out streams; nats per token, bits per byte):

| workload | target | draft |
| --- | --- | --- |
{losses}

**Heads and draft** on the target's own continuations of the shipped prompts ({tokens} tokens each; greedy,
alpha = E sum min(p, q) at temperature 1). Head k predicts the token k + 1 positions after the target's next one;
each cell has the shares of tokens that were its first to fourth choice.

{accuracies}

**EAGLE-3 and Hydra heads** learned later, from the target's hidden states on text of the same kinds, prefixes included;
EAGLE-3 by training-time test with one, then three unrolls. Acceptance by draft position, each after the target's own
text: agreement of the likeliest tokens (greedy), and alpha.

{positions}

**Hold-out.** `holdout.json` names the modules and topics that training never saw, with SHA-256 of their text; records
from seed 10 000 000 on are held out with their names. Near copies are dropped by shared lines, and documents that share
a run of 64 characters (160 within records) with a prompt; `tests/test_zoo.py` checks it. Shipped are the prompts after
which the target's greedy text repeats itself least (8-grams of {screened} tokens), since repetitive text is easy to
draft; the choice does not depend on any draft. The workloads are made of these prompts and generated records
(`python -m scripts.zoo.repetitive`, `scripts.zoo.workloads`).

**Commands** (each resumes; some hours on two cores in all{again}):

```
python scripts/train_zoo.py corpus   --work DIR
python scripts/train_zoo.py prompts  --work DIR
python scripts/train_zoo.py target   --work DIR {control}
python scripts/train_zoo.py draft    --work DIR
python scripts/train_zoo.py generate --work DIR --parts {parts}
python scripts/train_zoo.py distill  --work DIR
python scripts/train_zoo.py export   --work DIR
python scripts/train_zoo.py screen   --work DIR
python scripts/train_zoo.py calibrate --work DIR
python scripts/train_zoo.py states   --work DIR --parts {state_parts} --dtype {dtype}
python scripts/train_zoo.py eagle3   --work DIR --dtype {dtype}
python scripts/train_zoo.py hydra    --work DIR --dtype {dtype}
python scripts/train_zoo.py card     --work DIR --dtype {dtype}
```
"""


def bits_per_byte(nats_per_token: float, tokens: int, size: int) -> float:
    """Convert a mean loss in nats over ``tokens`` tokens, which are ``size`` bytes of text, to bits per byte."""
    return nats_per_token / math.log(2) * tokens / size


@torch.inference_mode()
def evaluate(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    heads: Callable[[Tensor, Tensor], Tensor],
    prompts: list[list[int]],
    tokens: int = 96,
) -> dict:
    """Measure on continuations of held-out prompts: heads' accuracies by rank and the draft's agreement (greedy), alpha
    (temperature 1). ``heads`` maps states ``[n, H]`` and the tokens after them ``[n]`` to logits ``[n, K, V]``.
    """
    shares: list[np.ndarray] = []  # per prompt [n, K, rank]
    agree, alpha = [], []
    for number, prompt in enumerate(prompts):
        prefix, start = torch.tensor([prompt]), len(prompt) - 1
        ids, hidden = continue_text(target, prefix, len(prompt) + tokens, 0.0, number)
        inputs, choices = hidden[0, start:], target.lm_head(hidden).argmax(-1)[0, start:]
        agree.append(float((draft(input_ids=ids).logits[0, start:].argmax(-1) == choices).float().mean()))
        logits = heads(inputs[:-1], ids[0, start + 1 :])
        beyond = ids[0, start + 2 :].unfold(
            0, logits.shape[1], 1
        )  # [n, K]; the last states' predictions lie beyond the text
        right = logits[: len(beyond)].topk(4).indices == beyond[..., None]
        shares.append(right.numpy())
        ids, hidden = continue_text(target, prefix, len(prompt) + tokens, 1.0, number)
        q = draft(input_ids=ids).logits[0, start:].float().softmax(-1)
        alpha.append(float(torch.minimum(target.lm_head(hidden)[0, start:].float().softmax(-1), q).sum(-1).mean()))
    return {
        "heads": np.concatenate(shares).mean(0).round(3).tolist(),
        "draft_agreement": round(float(np.mean(agree)), 3),
        "alpha": round(float(np.mean(alpha)), 3),
    }


def write(settings: Settings) -> dict:
    """Measure; write ``README.md`` into the zoo and the figures into the work folder; return the figures."""
    zoo, work = settings.zoo, settings.work
    tokenizer = settings.tokenizer()
    models = {name: AutoModelForCausalLM.from_pretrained(zoo / name).eval() for name in ("target", "draft")}
    target = Target.load(str(zoo / "target"), dtype="float32")
    writer = AutoModelForCausalLM.from_pretrained(zoo / "target", dtype=torch.float32).eval()
    heads = read_medusa(str(zoo / "medusa"), Target.load(str(zoo / "target")))
    others = acceptance.objectives(target, zoo)
    sizes = json.loads((work / "held_out" / "sizes.json").read_text())
    losses = {
        n: pretrain.held_out_loss(m, work / "held_out", settings.plan.length, settings.windows)
        for n, m in models.items()
    }
    rows = prompts.read(zoo / "prompts")
    figures: dict = {"loss": losses, "workloads": {}, "positions": {}}
    for workload in settings.prompts:
        ids = [tokenizer(r["prompt"]).input_ids for r in rows if r["workload"] == workload]
        figures["workloads"][workload] = evaluate(models["target"], models["draft"], heads, ids, settings.tokens)
        figures["positions"][workload] = {
            name: acceptance.by_position(writer, *other, ids, settings.tokens) for name, other in others.items()
        }
    folders = ("target", "draft", "medusa", *others)
    figures["sha256"] = {name: file_hash(zoo / name / "model.safetensors") for name in folders}
    (work / "figures.json").write_text(json.dumps(figures, indent=1))
    (zoo / "README.md").write_text(render(settings, figures, sizes, models, heads))
    return figures


def _told(facts: dict) -> str:
    """Describe a distillation in words."""
    plain = f"{facts['plain_tokens'] / 1e6:.2f} M tokens of plain text, then " if facts["plain_tokens"] else ""
    tokens = f"{facts['written_tokens'] / 1e6:.2f} M tokens"
    return f"{plain}{facts['passes']:g} passes over {tokens} that the target wrote or read"


def render(settings: Settings, figures: dict, sizes: dict, models: dict, heads: Heads) -> str:
    """Return the card as Markdown."""
    work, plan = settings.work, settings.plan
    history = settings.history()
    shapes = {"target": settings.target, "draft": settings.draft}
    kinds = {
        n: f"Llama, {s.layers} layer{'s' * (s.layers > 1)}, hidden {s.hidden}, vocabulary {s.vocab}, tied embeddings"
        for n, s in shapes.items()
    }
    count = {n: sum(p.numel() for p in m.parameters()) for n, m in models.items()} | {
        "medusa": sum(p.numel() for p in load_file(settings.zoo / "medusa" / "model.safetensors").values())
    }
    layers = heads.weight.shape[1]
    kinds["medusa"] = f"{len(heads)} heads of {layers} residual layer{'s' * (layers > 1)}, the target's unembedding"
    if heads.trunk:
        kinds["medusa"] += f"; a trunk of width {len(heads.trunk.inner[1])} mixes in the pending token"
    for name in sorted(figures["sha256"].keys() - kinds.keys()):
        kinds[name], count[name] = acceptance.described(settings.zoo, name)

    def cell(model: str, workload: str) -> str:
        loss, size = figures["loss"][model][workload], sizes[workload]
        return f"{loss:.3f}, {bits_per_byte(loss, size['tokens'], size['bytes']):.3f}"

    numbers = range(len(heads))
    lines = [f"| workload | {' | '.join(f'head {k}' for k in numbers)} |", "| --- " * (1 + len(heads)) + "|"]
    for workload, figure in figures["workloads"].items():
        cells = " | ".join(", ".join(f"{share:.2f}" for share in ranks) for ranks in figure["heads"])
        lines.append(f"| {workload} | {cells} |")
    lines += ["", "| workload | draft's greedy agreement | alpha |", "| --- | --- | --- |"]
    lines += [f"| {w} | {f['draft_agreement']:.3f} | {f['alpha']:.3f} |" for w, f in figures["workloads"].items()]
    parts = {name: len(list((work / name).glob("part-*.safetensors"))) for name in ("generated", "states")}
    return TEXT.format(
        models="\n".join(f"| `{n}` | {kinds[n]} | {count[n] / 1e6:.2f} M | `{figures['sha256'][n]}` |" for n in kinds),
        packages=", ".join(p for p in settings.packages if p != "stdlib"),
        target_tokens=history["target_tokens"] / 1e6,
        grown=history["half_depth_tokens"] / 1e6,
        length=plan.length,
        mix=", ".join(f"{w} {share:.0%}" for w, share in plan.mix),
        draft_tokens=history["draft_tokens"] / 1e6,
        distilled="; then again: ".join(map(_told, history["distilled"])),
        again="; earlier distillations of the draft took other parts and passes, as above"
        * (len(history["distilled"]) > 1),
        last=", the heads with it" if len(history["distilled"]) == 1 else ", the heads the last time only",
        losses="\n".join(f"| {w} | {cell('target', w)} | {cell('draft', w)} |" for w in sizes),
        tokens=settings.tokens,
        screened=settings.screened,
        accuracies="\n".join(lines),
        control=" ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in history["control"].items()),
        parts=parts["generated"] or settings.parts,
        state_parts=parts["states"],
        dtype=str(settings.dtype).removeprefix("torch."),
        positions="\n".join(acceptance.table(figures["positions"])),
    )
