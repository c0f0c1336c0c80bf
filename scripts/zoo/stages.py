"""The stages of training the bundled models, in their order; each reads and writes folders only.

corpus      hold-out list, tokenizer and token streams (existing files of the zoo are kept)
prompts     candidates for held-out prompts
target      pre-training of the target (long; resumes; ``control.json`` moves its phases)
draft       pre-training of the draft on plain text
generate    the target continues training text
states      the same, with the hidden states that EAGLE-3 and Hydra heads read
eagle3      an EAGLE-3 head learns from these (long; resumes)
hydra       Hydra heads learn from these (long; resumes)
drafters    every kind of drafter learns from some of these, for ``experiments/drafters`` (long; resumes)
lengths     EAGLE-3 heads learn from ever more of these, for ``experiments/drafters`` (long; resumes)
distill     draft and Medusa heads learn the target's distributions, on plain text and then on the target's own
export      bf16 weights, configs and tokenizer into the zoo
screen      choose the prompts after which the target's text has the fewest repeated 8-grams
calibrate   measure the heads' accuracies on held-out code, for the choice of a tree
card        measure the models on held-out text and write the model card
"""

import argparse
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from spec_lab.core.files import file_hash
from spec_lab.core.tensors import save_tensors
from spec_lab.drafters.medusa.files import read_medusa
from spec_lab.drafters.medusa.measure import measure
from spec_lab.drafters.medusa.train import export_medusa
from spec_lab.models.target import Target
from spec_lab.train.export import export_model
from spec_lab.train.fit import FitPlan, fit
from spec_lab.train.objectives import Measured
from spec_lab.train.recipe import Beginning, Recipe, TargetHead, settings_of
from spec_lab.train.texts import Texts
from spec_lab.train.trainer import Trainer

from . import card as cards
from . import corpus as texts
from . import distill as distillation
from . import generate as writing
from . import prompts as cuts
from . import tokens
from .pretrain import Control, load, pretrain, write_checkpoint
from .settings import ZOO, Settings

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one stage; options default to the settings of the shipped weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=list(STAGES))
    parser.add_argument("--work", type=Path, required=True, help="folder of streams, checkpoints and generated text")
    parser.add_argument("--zoo", type=Path, default=ZOO, help="folder of the shipped files")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--grow-step", type=int, default=Control.grow_step, help="steps at half depth")
    parser.add_argument("--stable-steps", type=int, default=Control.stable_steps, help="steps before the rates fall")
    parser.add_argument("--decay-steps", type=int, default=Control.decay_steps)
    parser.add_argument("--rate", type=float, default=Control.rate, help="factor of the target's learning rates")
    parser.add_argument("--parts", type=int, default=Settings.parts, help="parts of generated text")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32",
        help="of the stages from states to lengths; bfloat16 is faster on CPUs that have instructions for it",
    )  # fmt: skip
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    # Their threads compute parts of a batch in parallel.
    training = chosen.stage in ("target", "draft", "distill", "eagle3", "hydra", "drafters", "lengths")
    torch.set_num_threads(1 if training else chosen.threads)
    options = {"threads": chosen.threads} if training else {}
    control = Control(chosen.grow_step, chosen.stable_steps, chosen.decay_steps, chosen.rate)
    dtype = getattr(torch, chosen.dtype)
    STAGES[chosen.stage](
        Settings(chosen.work, chosen.zoo, control=control, parts=chosen.parts, dtype=dtype, options=options)
    )


def corpus(settings: Settings) -> None:
    """Choose the held-out documents and train the tokenizer, unless they exist; write token streams."""
    listed = settings.zoo / "holdout.json"
    if not listed.exists():
        listed.parent.mkdir(parents=True, exist_ok=True)
        listed.write_text(json.dumps(texts.choose_holdout(settings.hold_out), indent=1) + "\n")
    holdout = texts.load_holdout(listed)
    shipped = cuts.read(settings.zoo / "prompts")
    documents = list(texts.training(holdout, shipped, settings.packages, settings.records))
    if not (settings.zoo / "target" / "tokenizer.json").exists():
        made = tokens.train_tokenizer(tokens.sample_texts(documents), settings.vocab, settings.target.positions)
        for model in ("target", "draft"):
            made.save_pretrained(settings.zoo / model)
    tokenizer, reserved = settings.tokenizer(), texts.held_out(holdout, settings.packages)
    log.info("training %s", tokens.write_streams(documents, tokenizer, settings.work / "train", repeats=2))
    log.info("held out %s", tokens.write_streams(reserved, tokenizer, settings.work / "held_out"))


def prompts(settings: Settings) -> None:
    """Cut candidates for prompts from held-out documents."""
    holdout = texts.load_holdout(settings.zoo / "holdout.json")
    reserved = texts.held_out(holdout, settings.packages)
    candidates = cuts.candidates(reserved, settings.tokenizer(), per_document=3)
    training = texts.training(holdout, [], settings.packages, settings.records)
    cuts.write(cuts.choose(candidates, training, settings.candidates), settings.work / "prompts")


def target(settings: Settings) -> None:
    """Train the target until its decay has ended."""
    train, held_out, work = (settings.work / name for name in ("train", "held_out", "target"))
    pretrain(settings.target, settings.plan, train, held_out, work, settings.control, **settings.options)


def draft(settings: Settings) -> None:
    """Train the draft on plain text."""
    train, held_out, work = (settings.work / name for name in ("train", "held_out", "draft"))
    pretrain(settings.draft, settings.draft_plan, train, held_out, work, settings.draft_control, **settings.options)


def generate(settings: Settings) -> None:
    """Let the target continue training text."""
    model = settings.trained_target().eval()
    writing.generate(model, settings.work / "train", settings.work / "generated", settings.generation, settings.parts)


def states(settings: Settings) -> None:
    """Let the target continue training text, and keep the hidden states that EAGLE-3 and Hydra heads read."""
    model = settings.trained_target().eval()
    if settings.dtype == torch.float32:
        model = model.float()
    else:
        model.set_attn_implementation("eager")  # torch's fused attention of one row is several times as slow there
    plan = replace(settings.generation, states=settings.states())
    writing.generate(model, settings.work / "train", settings.work / "states", plan, settings.parts)


def eagle3(settings: Settings) -> None:
    """Train the EAGLE-3 head, and write it into the zoo."""
    _learn(settings, settings.eagle3, settings.work / "eagle3", settings.zoo / "eagle3")


def hydra(settings: Settings) -> None:
    """Train the Hydra heads, and write them into the zoo."""
    _learn(settings, settings.hydra, settings.work / "hydra", settings.zoo / "hydra")


def drafters(settings: Settings) -> None:
    """Train every kind of drafter on the same tokens, for ``experiments/drafters``; they go into the work folder."""
    for name, recipe in settings.drafters.items():
        folder = settings.work / "drafters" / name
        _learn(settings, [(recipe, settings.drafters_fit)], folder / "training", folder)


def lengths(settings: Settings) -> None:
    """Train an EAGLE-3 head on ever more of the text, for ``experiments/drafters``, into the work folder."""
    for passes in settings.lengths:
        folder = settings.work / "lengths" / f"{passes:g}"
        plan = replace(settings.drafters_fit, passes=passes)
        _learn(settings, [(settings.drafters["eagle3"], plan)], folder / "training", folder)


def _learn(settings: Settings, phases: Sequence[tuple[Recipe, FitPlan]], training: Path, out: Path) -> None:
    """Train a drafter on the text of the stage ``states``, and write it.

    What the target did not write itself counts too: its distributions after it are known.

    Args:
        settings: of all stages.
        phases: one after the other, each from the weights of the one before; the recipes differ in their losses only.
        training: folder of the checkpoints.
        out: folder of the drafter.
    """
    loaded = Target.load(str(settings.zoo / "target"), dtype="float32")
    target = replace(loaded, name="spec_lab/zoo/target")  # which the drafters' configs state
    paths = sorted((settings.work / "states").glob("part-*.safetensors"))
    held, weights, tokens = settings.states(), None, 0
    for number, (recipe, plan) in enumerate(phases):
        begun = recipe.begin(target, paths, plan.plan.seed)
        known = settings_of(recipe, target, begun) | {"dtype": str(settings.dtype)}
        if weights is not None:
            begun.module.load_state_dict(weights, strict=False)  # masters name tied weights once
            known["began_from"] = sha256(save({name: weight.clone() for name, weight in weights.items()})).hexdigest()
        read = [held.index(state) for state in recipe.states(target)]

        def objective(text: Texts, begun: Beginning = begun, read: list[int] = read) -> tuple[Tensor, list[Measured]]:
            assert text.hidden is not None
            hidden = text.hidden.unflatten(-1, (len(held), -1))[..., read, :].flatten(-2)
            return begun.objective(replace(text, first=torch.zeros_like(text.first), hidden=hidden))

        trainer = Trainer(begun.module, plan.plan, settings.options.get("threads", 1), settings.dtype)
        fit(trainer, objective, paths, training / str(number), plan, known)
        weights = {name: master.detach() for name, master in trainer.masters.items()}
        tokens += trainer.step * plan.rows * settings.generation.length
    facts = {
        "target_sha256": file_hash(settings.zoo / "target" / "model.safetensors"),
        "seed": str(phases[0][1].plan.seed),
        "texts": str(len(paths) * settings.generation.batch * settings.generation.length),
        "tokens": str(tokens),
    }
    recipe.write(begun.module.eval(), target, out, facts)


def distill(settings: Settings) -> None:
    """Train draft and heads on the target's text and distributions."""
    plan, teacher, out = settings.distillation, settings.trained_target(), settings.work / "distilled"
    threads = settings.options.get("threads", 1)
    student = Trainer(settings.pretrained_draft().float(), settings.draft_plan, threads)
    torch.manual_seed(plan.plan.seed)
    scale = TargetHead(teacher).embedding_scale
    fresh = distillation.HeadsInTraining(plan.heads, plan.layers, settings.target.hidden, plan.width, scale)
    heads = Trainer(fresh, plan.plan, threads)
    streams, generated = settings.work / "train", settings.work / "generated"
    distillation.distill(teacher, student, heads, streams, generated, out, plan, settings.generation)
    write_checkpoint(student, out / "draft.safetensors")
    save_tensors(distillation.shipped(heads.model), out / "heads.safetensors")
    row = settings.generation.length
    facts = {
        "plain_tokens": plan.plain_steps * plan.rows * row,
        "written_tokens": len(list(generated.glob("part-*.safetensors"))) * settings.generation.batch * row,
        "passes": plan.passes,
        "draft_sha256": file_hash(out / "draft.safetensors"),  # distinguishes distillations with the same settings
    }
    (out / "facts.json").write_text(json.dumps(facts))


def export(settings: Settings) -> None:
    """Write the three models into the zoo."""
    tokenizer, trained = settings.tokenizer(), settings.work / "distilled"
    sha256 = export_model(settings.trained_target(), tokenizer, settings.zoo / "target")
    student = load(trained / "draft.safetensors", settings.draft, settings.draft_plan)
    export_model(student.model, tokenizer, settings.zoo / "draft")
    heads = load_file(trained / "heads.safetensors")
    export_medusa(heads, settings.target.vocab, sha256, settings.zoo / "medusa")
    settings.history()


def screen(settings: Settings) -> None:
    """Choose the shipped prompts: repetitive text would be easy for any draft."""
    lm = Target.load(str(settings.zoo / "target"))
    rows = cuts.read(settings.work / "prompts")
    shares = cuts.repeated_8grams(lm, [row["prompt"] for row in rows], settings.screened)
    cuts.write(cuts.least(rows, shares, settings.prompts), settings.zoo / "prompts")
    named = {r["id"]: s for r, s in zip(rows, shares, strict=True)}
    (settings.work / "repeated_8grams.json").write_text(json.dumps(named))


def calibrate(settings: Settings) -> None:
    """Write the heads' calibrations, greedy and at temperature 1, from held-out code that is not among the prompts."""
    lm = Target.load(str(settings.zoo / "target"))
    heads = read_medusa(str(settings.zoo / "medusa"), lm)
    length, tokens, count = settings.calibration
    stream = np.fromfile(settings.work / "held_out" / "code.bin", dtype=np.uint16)
    starts = np.linspace(0, len(stream) - length, count).astype(int)
    prefixes = [stream[s : s + length].tolist() for s in starts]
    for temperature in (0.0, 1.0):
        calibration = measure(lm, heads, prefixes, tokens, temperature=temperature)
        calibration.write(
            settings.zoo / "medusa",
            text=f"{tokens} tokens after each of {count} windows of {length} tokens of held-out code",
            target_sha256=file_hash(settings.zoo / "target" / "model.safetensors"),
        )


def card(settings: Settings) -> None:
    """Measure the models of the zoo, and write its README."""
    cards.write(settings)


STAGES: dict[str, Callable[[Settings], None]] = {
    stage.__name__: stage
    for stage in (
        corpus,
        prompts,
        target,
        draft,
        generate,
        states,
        eagle3,
        hydra,
        drafters,
        lengths,
        distill,
        export,
        screen,
        calibrate,
        card,
    )
}
