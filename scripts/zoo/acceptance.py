"""Statements of the card on the EAGLE-3 head and the Hydra heads: what they are, and their acceptance by position."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from transformers import LlamaForCausalLM

from spec_lab.drafters.eagle.files import read_eagle
from spec_lab.drafters.eagle.network import Eagle3
from spec_lab.drafters.eagle.train import eagle3_objective
from spec_lab.drafters.hydra.files import read_hydra
from spec_lab.drafters.hydra.train import HydraDrafts
from spec_lab.models.target import Target
from spec_lab.train.chain import ChainObjective
from spec_lab.train.fit import Objective
from spec_lab.train.recipe import TargetHead
from spec_lab.train.texts import Texts

from .generate import continue_text
from .settings import POSITIONS

NAMES = {"eagle3": "EAGLE-3", "hydra": "Hydra"}


Measure = tuple[tuple[int, ...], Objective]
"""Numbers of the hidden states that a drafter reads, and its loss, which measures acceptance."""


def objectives(target: Target, zoo: Path) -> dict[str, Measure]:
    """Return how each bundled drafter that is there is measured."""
    made = {"eagle3": eagle3, "hydra": hydra}
    return {name: of(target, zoo / name) for name, of in made.items() if (zoo / name).is_dir()}


def eagle3(target: Target, folder: Path) -> Measure:
    """Return how an EAGLE-3 head is measured."""
    network = read_eagle(str(folder), target)
    assert isinstance(network, Eagle3)
    objective = eagle3_objective(network, TargetHead.of(target), torch.float32, POSITIONS)
    return (*network.settings.taps, -1), objective


def hydra(target: Target, folder: Path) -> Measure:
    """Return how Hydra heads are measured."""
    heads, target_head = read_hydra(str(folder), target), TargetHead.of(target)
    return (-1,), ChainObjective(heads, HydraDrafts(heads, target_head), target_head, torch.float32)


@torch.inference_mode()
def by_position(
    writer: LlamaForCausalLM, states: tuple[int, ...], objective: Objective, prompts: Sequence[list[int]], tokens: int
) -> dict[str, list[float]]:
    """Return by draft position, on the target's own continuations of the prompts: the share of greedy drafts that agree
    with the target ("agreed"), and sum min(p, q) at temperature 1 ("accepted").

    Args:
        writer: the target as transformers loads it, in float32; a ``Target`` has another attention.
        states, objective: of the drafter.
        prompts: tokens of each.
        tokens: of each continuation.
    """
    rows_of: dict[str, list[list[float]]] = {"agreed": [], "accepted": []}
    for number, prompt in enumerate(prompts):
        for name, temperature in (("agreed", 0.0), ("accepted", 1.0)):
            prefix = torch.tensor([prompt])
            length = len(prompt) + tokens
            ids, hidden = continue_text(writer, prefix, length, temperature, number, states)
            text = Texts(ids, torch.tensor([len(prompt)]), torch.tensor([length]), hidden)
            rows_of[name].append(
                [float(position.agreed if temperature == 0 else position.accepted) for position in objective(text)[1]]
            )
    return {name: np.mean(rows, 0).round(3).tolist() for name, rows in rows_of.items()}


def described(zoo: Path, name: str) -> tuple[str, float]:
    """Return what a drafter is, in words, and its number of parameters."""
    with safe_open(zoo / name / "model.safetensors", "pt") as file:
        facts, shapes = file.metadata() or {}, {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    config = json.loads((zoo / name / "config.json").read_text())
    if name == "hydra":
        layers = config["hydra_num_layers"]
        kind = f"{config['hydra_num_heads']} Hydra heads of {layers} layer{'s' * (layers > 1)}, the target's LM head"
        if config.get("identity_skip", False):
            kind += "; they add to the state itself (`identity_skip`), unlike published heads"
    else:
        kind = f"EAGLE-3 head in the format of speculators, which drafts {shapes['d2t'][0]} tokens"
    learned = (
        f"learned from {int(facts['tokens']) / 1e6:.1f} M tokens of {int(facts['texts']) / 1e6:.1f} M different ones"
    )
    return f"{kind}; {learned}", sum(map(prod, shapes.values()))


def table(figures: dict[str, dict[str, dict[str, list[float]]]]) -> list[str]:
    """Return the lines of the card's table: a row for each workload and drafter, with the shares of all positions."""
    lines = [f"| workload | drafter | greedy, positions 1 to {POSITIONS} | alpha |", "| --- | --- | --- | --- |"]
    for workload, drafters in figures.items():
        for name, drafter in drafters.items():
            cells = " | ".join(", ".join(f"{share:.2f}" for share in shares) for shares in drafter.values())
            lines.append(f"| {workload} | {NAMES[name]} | {cells} |")
    return lines
