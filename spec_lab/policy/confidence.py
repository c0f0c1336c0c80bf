"""Confidences: how likely a drafted token is accepted if its parent is, known before it is drawn.

Each is a function of the row that the token is drawn from, never of the token: so whether a node is verified may depend
on it (``policy.batch_budget``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from torch import Tensor

ConfidenceName = Literal["head", "margin", "q"]
"""Where confidences come from."""

MAX_MARGIN = 30.0
"""Largest margin that is told from larger ones; tokens without mass have an infinite one."""

MAX_OBSERVATIONS, MIN_OBSERVATIONS = 2000, 50
"""Most observations of a level that are kept, the latest ones, and the fewest with which its model is refitted."""

PENALTY = 1e-3
"""L2 penalty on both parameters of a model, beside the sum of the log losses."""

START = 1.5
"""The bias b of a model before its first fit: a confidence of 0.82 at every margin."""

NEWTON_STEPS = 25


def margin(probs: Tensor) -> Tensor:  # [n, V] -> [n]
    """Return the difference of the two largest logits of each row."""
    two = probs.topk(2, -1).values.log()
    return (two[:, 0] - two[:, 1]).clamp_max(MAX_MARGIN)


def largest_probability(probs: Tensor) -> Tensor:  # [n, V] -> [n]
    """Return the largest probability of each row."""
    return probs.amax(-1)


@dataclass
class LevelModel:
    """P(accepted | margin m) = sigmoid(w m + b) for the nodes of one level whose parents were accepted.

    Args:
        weight: w, at least 0.
        bias: b.
        seen: (margin, accepted) of nodes that were verified and whose parents were accepted.
        fits: so far.
    """

    weight: float = 0.0
    bias: float = START
    seen: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=MAX_OBSERVATIONS))
    fits: int = 0

    def refit(self) -> None:
        """Fit both parameters by Newton's method; b alone where w would be negative."""
        self.fits += 1
        margins, accepted = np.array(self.seen, dtype=np.float64).T
        for inputs in (np.stack([margins, np.ones_like(margins)], 1), np.ones((len(margins), 1))):
            fitted = _newton(inputs, accepted)
            self.weight, self.bias = (float(fitted[0]) if len(fitted) > 1 else 0.0), float(fitted[-1])
            if self.weight >= 0:
                return


def _newton(inputs: np.ndarray, accepted: np.ndarray) -> np.ndarray:  # [n, k], [n] -> [k]
    """Return the parameters of the smallest penalised log loss; steps that raise it are halved."""

    def loss(parameters: np.ndarray) -> float:
        scores = inputs @ parameters
        return float(np.logaddexp(0, scores).sum() - scores @ accepted + PENALTY / 2 * parameters @ parameters)

    parameters = np.zeros(inputs.shape[1])
    for _ in range(NEWTON_STEPS):
        probability = _sigmoid(inputs @ parameters)
        gradient = inputs.T @ (probability - accepted) + PENALTY * parameters
        weighted = inputs * (probability * (1 - probability))[:, None]
        change = np.linalg.solve(inputs.T @ weighted + PENALTY * np.eye(len(parameters)), gradient)
        before = loss(parameters)
        while np.abs(change).max() > 1e-9 and loss(parameters - change) > before:
            change /= 2
        parameters = parameters - change
        if np.abs(change).max() <= 1e-9:
            break
    return parameters


def _sigmoid(scores: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(scores, -500, 500)))


@dataclass
class OnlineConfidence:
    """A model for each level, refitted while the run goes on.

    Source: vLLM's adaptive verification (#52228, #52992): logistic regression of each depth on the margin of the two
    largest draft logits, by Newton's method, w >= 0, L2 1e-3, every 100 steps, at least 50 observations, 3 refits
    before the first use.

    Args:
        refit_steps: steps between refits.
        warm_up: fits of the first level after which it is used.
        first: the weight and the bias of a model before its first fit.
        fewest: observations of a level with which its model is refitted.
        levels: the models by level, from 0.
        steps: so far.
    """

    refit_steps: int
    warm_up: int
    fewest: int = MIN_OBSERVATIONS
    first: tuple[float, float] = (0.0, START)
    levels: dict[int, LevelModel] = field(default_factory=dict)
    steps: int = 0

    def fresh(self) -> OnlineConfidence:
        """Return one that has seen nothing."""
        return replace(self, levels={}, steps=0)

    @property
    def ready(self) -> bool:
        """Whether enough was seen for its confidences to be used."""
        return (self.levels[0].fits if 0 in self.levels else 0) >= self.warm_up

    def __call__(self, margins: np.ndarray, levels: np.ndarray) -> np.ndarray:  # [n], [n] -> [n]
        """Return the confidence of nodes by the margins of their parents and by their levels."""
        models = [self.levels.get(level) or LevelModel(*self.first) for level in levels.tolist()]
        weights, biases = (np.array([getattr(model, name) for model in models]) for name in ("weight", "bias"))
        return _sigmoid(weights * margins + biases) if models else margins

    def learn(self, level: int, margin: float, accepted: bool) -> None:
        """Count a node that was verified and whose parent was accepted."""
        self.levels.setdefault(level, LevelModel(*self.first)).seen.append((margin, accepted))

    def step(self) -> None:
        """Count a step, and refit after every ``refit_steps``."""
        self.steps += 1
        if self.steps % self.refit_steps == 0:
            for model in self.levels.values():
                if len(model.seen) >= self.fewest:
                    model.refit()
