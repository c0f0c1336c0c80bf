"""The whole engine on a tiny transformer, every choice of one request enumerated in float64.

The truth is autoregressive decoding by plain forwards of the same model over whole texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch

from spec_lab.constrain import AppliedConstraint
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws, Key
from spec_lab.core.request import Request
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import Engine, Limits
from spec_lab.models.target import Target
from spec_lab.tasks.certify.enumeration import explore, side_by_side
from spec_lab.tasks.certify.ground_truth import truth
from spec_lab.tasks.certify.instances import END, Instance
from spec_lab.tasks.certify.toy_models import PROMPT
from tests.tiny import tiny_target

V = 5
SAMPLING = Sampling(1.0, top_k=2)  # two tokens have mass at every position, which bounds the enumeration
MATES = [Request(1000 + n, f"mate {n}", PROMPT[: 3 + 2 * n], Sampling(1.0), 2 + n, END) for n in range(3)]


def model(**changes: Any) -> Target:
    """Three layers over five tokens."""
    return tiny_target(num_hidden_layers=3, vocab_size=V, hidden_size=16, intermediate_size=16, **changes)


@dataclass(frozen=True)
class Plain:
    """The target's distributions after every text, by plain forwards: a toy model of ``certify`` without a draft."""

    target: Target
    v: int = V

    def probabilities(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """p after every text of ``length`` tokens, ``[V ** length, V]``, at temperature 1."""
        texts = torch.tensor([[*PROMPT, *text] for text in product(range(self.v), repeat=length)])
        with torch.inference_mode():
            p = self.target.lm.model(input_ids=texts, use_cache=False).logits[:, -1].softmax(-1).numpy()
        return p, p

    def __hash__(self) -> int:
        return id(self.target)


class Mixed:
    """Enumerates the choices of request 0; those of all others are fixed by their keys."""

    def __init__(self, enumerating: Any) -> None:
        self.enumerating, self.keyed = enumerating, CounterDraws(7)

    def pick(self, weights: Any, keys: Sequence[Key]) -> torch.Tensor:
        """See ``Draws``."""
        picked = []
        for number, key in enumerate(keys):
            draws = self.enumerating if key.request == 0 else self.keyed
            picked.append(int(draws.pick(weights[number : number + 1], [key])[0]))
        return torch.tensor(picked)


def decoded(
    target: Target,
    proposer: Any,
    verifier: Any,
    tokens: int,
    applied: AppliedConstraint | None = None,
    limits: Limits | None = None,
) -> tuple[dict, dict[str, int]]:
    """The distribution of a request's outputs, and the number of drafted nodes; with limits, in a batch with others.

    Without limits up to 256 copies of the request are decoded side by side, as one fixed group.
    """
    request = Request(0, "request", PROMPT, SAMPLING, tokens, END)
    seen = {"drafted": 0, "accepted": 0, "outcomes": 0}

    def play(draws: Any, count: int) -> list:
        engine = Engine(Arm(target, proposer, verifier, draws, applied), limits=limits or Limits())
        for number in range(count):
            engine.add(replace(request, id=number))
        for mate in MATES if limits is not None else ():
            engine.add(mate)
        for info in engine:
            seen["drafted"] += info.draft.shape.nodes
            seen["accepted"] += sum(len(got.path) for got in info.committed)
        assert not engine.errors, engine.errors
        each: list[list] = [[] for _ in range(count)]
        for sequence in engine.sequences:
            if sequence.request.id < 1000:
                each[sequence.request.id].append((sequence.lineage, tuple(sequence.emitted), sequence.finish))
        assert not target.lm.cells.references.any()  # everything was freed
        return [tuple((text, finish) for _, text, finish in sorted(every)) for every in each]

    masses: dict = {}
    if limits is None:
        outcomes = side_by_side(play)
    else:
        outcomes = explore(lambda draws: play(Mixed(draws), 1)[0])
    for probability, output in outcomes:
        seen["outcomes"] += 1
        masses[output] = masses.get(output, 0.0) + probability
    return masses, seen


def wanted(target: Target, tokens: int, applied: AppliedConstraint | None = None) -> dict:
    """The distribution of autoregressive decoding under the same constraint."""
    instance = Instance(Plain(target), "1", tokens, END, applied=applied)  # type: ignore[arg-type]
    return truth(instance, SAMPLING)


def distance(masses: dict, other: dict) -> float:
    """Total variation."""
    return 0.5 * sum(abs(masses.get(output, 0.0) - other.get(output, 0.0)) for output in {*masses, *other})
