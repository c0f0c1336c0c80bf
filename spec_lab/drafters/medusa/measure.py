"""Measure how often Medusa heads are right, on the target's own continuations.

``measure(target, heads, prompts).write(folder)`` measures published heads, and ``of_texts`` those that are trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn, empty
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.decode.proposer import Observation, Proposer, Requires
from spec_lab.decode.sequence import Batch
from spec_lab.decode.study import Capture
from spec_lab.drafters.medusa.network import Heads
from spec_lab.models.target import Target
from spec_lab.propose.accuracy import Accuracy

SAMPLES = 64  # measured at once: their logits [S, K, V] are in memory together


@torch.inference_mode()
def measure(
    target: Target,
    heads: Heads,
    prompts: Sequence[Sequence[int]],
    tokens: int = 128,
    width: int = 10,
    temperature: float = 0.0,
) -> Accuracy:
    """Continue prompts without a draft, and find the rank that each head gave to the token that followed.

    Args:
        target: continues.
        heads: are measured.
        prompts: token ids; decoded together, so pass some dozens at a time. The end of the context ends a text.
        tokens: to emit per prompt.
        width: ranks told apart.
        temperature: of the continuations.

    Raises:
        ValueError: no prompts, or continuations too short for the heads.
    """
    collect = Collect(heads.taps)
    requests = [
        Request(number, f"prompt {number}", tuple(prompt), Sampling(temperature), tokens)
        for number, prompt in enumerate(prompts)
    ]
    for _ in fixed_group(Arm(target, collect, Capture(), CounterDraws(0)), requests):
        pass
    texts = [tuple(zip(*text, strict=True)) for text in collect.texts if text]
    answers = [(torch.stack(hidden), torch.tensor(tokens, device=target.lm.device)) for hidden, tokens in texts]
    return of_texts(heads, answers, width, temperature)


@torch.inference_mode()
def of_texts(
    heads: Heads, answers: Iterable[tuple[Tensor, Tensor]], width: int = 10, temperature: float = 0.0
) -> Accuracy:
    """Find the rank that each head gave to the token that followed, in answers of the target.

    Args:
        answers: of each answer the states after the final norm from which its tokens were chosen ``[n, H]``, and these
            tokens ``[n]``, both on the heads' device.
        width: ranks told apart.

    Raises:
        ValueError: no answers, or answers too short for the heads.
    """
    ranks = [np.empty((0, len(heads)), dtype=np.int64)]
    for hidden, tokens in answers:
        samples = max(0, len(tokens) - len(heads))
        for start in range(0, samples, SAMPLES):
            end = min(start + SAMPLES, samples)
            # From the state that chose token t, head k predicts token t + 1 + k.
            right = tokens[start + 1 : end + len(heads)].unfold(0, len(heads), 1)[..., None]  # [S, K, 1]
            logits = heads(hidden[start:end], tokens[start:end]).float()
            score = logits.gather(-1, right)
            order = torch.arange(logits.shape[-1], device=logits.device)
            ahead = (logits > score) | ((logits == score) & (order < right))
            ranks.append(ahead.sum(-1).cpu().numpy())
    return Accuracy.of(np.concatenate(ranks), width, temperature)


class Collect(Proposer):
    """A null proposer that collects the hidden states from which tokens were chosen, and these tokens.

    It expects one emitted token for each sequence in each step. ``texts`` has a list for each sequence, also after it
    has ended: the state ``[H]`` and the token that was chosen from it, step by step.

    Args:
        taps: the number of the state.
    """

    name = "collect"
    drawn: Drawn = "deterministic"
    nodes = 0
    requires: Requires

    def __init__(self, taps: tuple[int, ...] = (-1,)) -> None:
        self.requires = Requires(hidden=taps)
        self.texts: list[list[tuple[Tensor, int]]] = []

    def init(self, request: Request) -> list[tuple[Tensor, int]]:
        """An empty list."""
        self.texts.append([])
        return self.texts[-1]

    def propose(self, batch: Batch) -> Draft:
        """An empty forest."""
        return empty(len(batch.sequences), batch.device)

    def observe(self, observed: Sequence[Observation]) -> None:
        """See ``Proposer``."""
        for observation in observed:
            if observation.hidden is not None:
                observation.sequence.state.append((observation.hidden[-1].clone(), observation.tokens[-1]))
