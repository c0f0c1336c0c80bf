"""The settings of the training stages; the defaults are those of the shipped weights."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from spec_lab.drafters.draft_model.train import DraftRecipe
from spec_lab.drafters.eagle.train import Eagle3Recipe
from spec_lab.drafters.eagle.train_eagle1 import Eagle1Recipe
from spec_lab.drafters.hydra.train import HydraRecipe
from spec_lab.drafters.medusa.train import MedusaRecipe
from spec_lab.drafters.mtp.train import MtpRecipe
from spec_lab.drafters.pard.train import PardRecipe
from spec_lab.train.fit import FitPlan
from spec_lab.train.recipe import Recipe
from spec_lab.train.trainer import Plan

from . import corpus
from .distill import Distillation
from .generate import Generation
from .pretrain import DRAFT, TARGET, Control, Shape, grow, load

ZOO = Path(__file__).parents[2] / "spec_lab" / "zoo"
# Modules held out of each package.
HOLD_OUT = {"stdlib": 36, "numpy": 5, "pandas": 6, "scipy": 6, "networkx": 8, "matplotlib": 5, "torch": 8}
HOLD_OUT |= {"sympy": 3, "rich": 3, "huggingface_hub": 3}
TAPS = 1, 3, 5
POSITIONS = 4
"""Tokens that drafters are trained to draft, where they are compared."""
RATES = Plan(muon_rate=1.2e-2, adamw_rate=1.5e-3, weight_decay=0.2, seed=2)
"""Without weight decay the queries and keys of an EAGLE-3 head grow until each attends to one position only."""


def eagle3(unrolls: int) -> Eagle3Recipe:
    """Return the recipe of the bundled EAGLE-3 head, but for the tokens drafted in training."""
    return Eagle3Recipe(unrolls, draft_vocab_size=1536, taps=TAPS, from_target=True)


EAGLE3 = [
    (eagle3(1), FitPlan(passes=1.5, decay=0.0, plan=RATES)),
    (eagle3(3), FitPlan(passes=0.95, decay=0.7, plan=RATES)),
]
HYDRA = [(HydraRecipe(heads=4, identity_skip=True), FitPlan(passes=1.0, plan=RATES))]
DRAFTERS: dict[str, Recipe] = {
    "eagle3": Eagle3Recipe(POSITIONS, draft_vocab_size=1536, taps=TAPS),
    "eagle1": Eagle1Recipe(),
    "mtp": MtpRecipe(POSITIONS),
    "hydra": HydraRecipe(POSITIONS),
    "medusa": MedusaRecipe(POSITIONS),
    "pard": PardRecipe(depth=POSITIONS, layers=1),
    "draft": DraftRecipe(layers=1),
}


@dataclass(frozen=True)
class Settings:
    """The settings of all stages.

    Args:
        work: folder of streams, checkpoints and generated text.
        zoo: folder of the shipped files.
        packages: maximum bytes of each package.
        records: number of generated records.
        hold_out: number of held-out modules of each package.
        candidates: maximum number of prompts that are cut for each workload.
        prompts: number of shipped prompts of each workload.
        eagle3, hydra: the phases of training the EAGLE-3 head and the Hydra heads.
        taps: numbers of the hidden states that the EAGLE-3 head reads.
        drafters, drafters_fit: the drafters of ``experiments/drafters``, and the training of each.
        lengths: passes over the text of the heads of ``experiments/drafters``.
        parts: number of parts of generated text.
        dtype: in which the stages from ``states`` to ``lengths`` compute; master weights are float32.
        windows: maximum number of windows of each held-out stream that the card measures.
        tokens: length of each continuation that the card measures.
        screened: length of the continuations in which repeated 8-grams are counted.
        calibration: length of prefixes, tokens after each, number of prefixes.
        options: of ``pretrain.pretrain``, such as ``save_seconds``.
    """

    work: Path
    zoo: Path = ZOO
    packages: dict[str, int] = field(default_factory=lambda: corpus.PACKAGES)
    records: int = 9_000
    hold_out: dict[str, int] = field(default_factory=lambda: HOLD_OUT)
    candidates: dict[str, int] = field(default_factory=lambda: {"code": 999, "json": 96, "prose": 999})
    prompts: dict[str, int] = field(default_factory=lambda: {"code": 40, "json": 48, "prose": 40})
    vocab: int = 4096
    target: Shape = TARGET
    draft: Shape = DRAFT
    plan: Plan = field(default_factory=Plan)
    draft_plan: Plan = field(default_factory=lambda: Plan(grown_batch=8, seed=1))
    control: Control = field(default_factory=Control)
    draft_control: Control = field(default_factory=lambda: Control(0, 1050, 300, 1.0))
    generation: Generation = field(default_factory=Generation)
    distillation: Distillation = field(default_factory=Distillation)
    eagle3: Sequence[tuple[Recipe, FitPlan]] = field(default_factory=lambda: EAGLE3)
    hydra: Sequence[tuple[Recipe, FitPlan]] = field(default_factory=lambda: HYDRA)
    taps: tuple[int, ...] = TAPS
    drafters: Mapping[str, Recipe] = field(default_factory=lambda: DRAFTERS)
    drafters_fit: FitPlan = FitPlan(passes=0.25, part=8, plan=RATES)
    lengths: tuple[float, ...] = (0.03125, 0.0625, 0.125, 0.25, 0.5)
    parts: int = 241
    dtype: torch.dtype = torch.float32
    windows: int = 1_000_000
    tokens: int = 96
    screened: int = 64
    calibration: tuple[int, int, int] = (128, 64, 96)
    options: dict[str, Any] = field(default_factory=dict)

    def states(self) -> tuple[int, ...]:
        """Return the numbers of the hidden states that EAGLE-3 and Hydra heads read."""
        return (*self.taps, -1)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the shipped tokenizer."""
        return AutoTokenizer.from_pretrained(self.zoo / "target")

    def trained_target(self) -> LlamaForCausalLM:
        """Return the target in bfloat16 with all its layers; the shipped one if it was not trained here."""
        model = self._trained("target", self.target, self.plan)
        model.set_attn_implementation("sdpa")
        return model

    def pretrained_draft(self) -> LlamaForCausalLM:
        """Return the draft model after training on plain text; the shipped one if it was not trained here."""
        return self._trained("draft", self.draft, self.draft_plan)

    def _trained(self, name: str, shape: Shape, plan: Plan) -> LlamaForCausalLM:
        checkpoint = self.work / name / "checkpoint.safetensors"
        if not checkpoint.exists():
            return AutoModelForCausalLM.from_pretrained(self.zoo / name, dtype=torch.bfloat16)
        trainer = load(checkpoint, shape, plan)
        if trainer.model.config.num_hidden_layers < shape.layers:
            trainer = grow(trainer, shape)
        return trainer.model

    def history(self) -> dict[str, Any]:
        """Return the training history for the card, and write it to ``training.json`` in the zoo.

        It holds the tokens of each model, the target's control, and every distillation of the draft model (the heads'
        is the last).
        """
        file, facts = self.zoo / "training.json", {}
        if file.exists():
            facts = json.loads(file.read_text())
        for name, plan in (("target", self.plan), ("draft", self.draft_plan)):
            checkpoint = self.work / name / "checkpoint.safetensors"
            if checkpoint.exists():
                with safe_open(checkpoint, "pt") as opened:
                    facts[f"{name}_tokens"] = int(opened.metadata()["sequences"]) * plan.length
        if (self.work / "target" / "checkpoint.safetensors").exists():
            control = self.control.read(self.work / "target")
            facts["control"] = vars(control)
            facts["half_depth_tokens"] = control.grow_step * self.plan.batch * self.plan.length
        distilled = self.work / "distilled" / "facts.json"
        if distilled.exists():
            anew = (
                self.work / "draft" / "checkpoint.safetensors"
            ).exists()  # otherwise training resumed from the shipped draft
            before, now = [] if anew else facts.get("distilled", []), json.loads(distilled.read_text())
            facts["distilled"] = [entry for entry in before if entry.get("draft_sha256") != now["draft_sha256"]] + [now]
        file.write_text(json.dumps(facts, indent=1) + "\n")
        return facts
