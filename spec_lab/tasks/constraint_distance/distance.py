"""The distance between p_local (masked at every token) and p(x | valid), exact or estimated.

With w(x) = p(x) / p_local(x) for valid x, 0 for other outputs (a masked output is not valid where it reaches the length
limit or a dead end), and Z = p(L):

    Z = E_local w,   p(x | valid) = p_local(x) w(x) / Z,
    TV = E_local |1 - w / Z| / 2 = E_global (1 - Z / w)^+,
    KL(global || local) = E_global log w - log Z   (nats).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from spec_lab.analysis.metrics.intervals import Interval
from spec_lab.constrain import AppliedConstraint, ConstraintError
from spec_lab.constrain.potential import Prefixes, Text, log_potential
from spec_lab.constrain.potential_bounds import ExpectedFutures, LearnedConstraint
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.models.target import Target
from spec_lab.propose import Proposer
from spec_lab.tasks.constraint_distance.scores import Scores, rows_after
from spec_lab.verify import Verifier

SHOWN = 64
"""Most outputs whose probabilities an exact result lists, the most probable ones."""

RESAMPLES = 2000


@dataclass(frozen=True)
class Exact:
    """The exact distance.

    Args:
        outputs: every valid output.
        local: ``[K]`` p_local of each.
        conditional: ``[K]`` p(x | valid) of each.
    """

    outputs: Sequence[Text]
    local: np.ndarray
    conditional: np.ndarray
    log_z: float

    @property
    def tv(self) -> float:
        """Total variation; masked outputs that are not valid count as one outcome."""
        return 0.5 * float(np.abs(self.local - self.conditional).sum() + self.invalid)

    @property
    def invalid(self) -> float:
        """The probability that a masked output is not valid."""
        return max(0.0, 1.0 - float(self.local.sum()))

    @property
    def kl(self) -> float:
        """KL(global || local) in nats."""
        return _kl(self.conditional, self.local)

    @property
    def kl_local(self) -> float:
        """KL(local || global) in nats; infinite where a masked output may not be valid."""
        return _kl(self.local, self.conditional) if self.invalid < 1e-9 else float("inf")

    def facts(self) -> dict[str, Any]:
        """Return the entry of ``summary.json``."""
        order = np.argsort(-self.conditional, kind="stable")[:SHOWN].tolist()
        return {
            "method": "exact",
            "outputs": len(self.outputs),
            "z": float(np.exp(self.log_z)),
            "log_z": self.log_z,
            "local_invalid": self.invalid,
            "tv": self.tv,
            "kl": self.kl,
            "kl_local": self.kl_local,
            "probabilities": [
                {"tokens": list(self.outputs[n]), "local": float(self.local[n]), "global": float(self.conditional[n])}
                for n in order
            ],
        }


def _kl(a: np.ndarray, b: np.ndarray) -> float:
    some = a > 0
    with np.errstate(divide="ignore"):
        return float((a[some] * (np.log(a[some]) - np.log(b[some]))).sum())


def exact(target: Target, request: Request, prefixes: Prefixes) -> Exact:
    """Return the exact distance, from forwards over all prefixes of valid outputs.

    Raises:
        ConstraintError: no valid output has any probability.
    """
    rows = rows_after(target, request, prefixes.texts, prefixes.allowed)
    places = [np.searchsorted(row.tokens, tokens) for row, tokens in zip(rows, prefixes.tokens, strict=True)]
    log_p = [row.log_p[column] for row, column in zip(rows, places, strict=True)]
    log_local = [row.log_local[column] for row, column in zip(rows, places, strict=True)]
    log_z = float(log_potential(prefixes, log_p)[0])
    if log_z == -np.inf:
        raise ConstraintError("no output that the constraint allows has any probability under the model")
    outputs = [(*prefixes.texts[node], int(prefixes.tokens[node][column])) for node, column in prefixes.outputs]
    local, given = prefixes.path_sums(log_local), prefixes.path_sums(log_p) - log_z
    return Exact(outputs, np.exp(local), np.exp(given), log_z)


# Samples -------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Sampler:
    """Samples the masked distribution and that of valid outputs of one request, by speculative decoding.

    Args:
        verifier: lossless.
        sampler: of ``learned.SAMPLERS``.
        batch_size: outputs decoded together; what is learned from them serves the next batch.
    """

    target: Target
    proposer: Proposer
    verifier: Verifier
    applied: AppliedConstraint
    request: Request
    sampler: str
    seed: int
    batch_size: int
    scores: Scores = field(init=False)
    futures: ExpectedFutures = field(init=False)
    attempts: int = field(init=False, default=0)
    _ids: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        length = min(self.request.max_new_tokens, self.target.context - len(self.request.tokens))
        self.futures = ExpectedFutures(self.request.stop, length)
        self.scores = Scores(self.target, self.applied.constraint, self.request, self.futures.may_follow)

    def local(self, count: int) -> list[tuple[Text, bool]]:
        """Return ``count`` outputs of the masked distribution, and whether each is valid."""
        applied = replace(self.applied, distribution="local")
        drawn: list[tuple[Text, bool]] = []
        while len(drawn) < count:
            drawn += self._decoded(min(self.batch_size, count - len(drawn)), applied)
        return drawn

    def given_valid(self, count: int, max_attempts: int) -> list[Text]:
        """Return up to ``count`` outputs of p(x | valid), from at most ``max_attempts`` attempts.

        With the sampler "rejection" the first n accepted outputs are n independent samples of p(x | valid), for any n
        that is fixed beforehand: each attempt is accepted with a probability, and then has a distribution, that do not
        depend on earlier outputs but through the acceptance probability. How many attempts n outputs need does depend
        on them, through what was learned. So the outputs of a fixed number of attempts, of which fewer than ``count``
        were accepted, are not independent of their number, and their mean can be biased.
        """
        drawn: list[Text] = []
        while len(drawn) < count and self.attempts < max_attempts:
            some = min(self.batch_size, max_attempts - self.attempts)
            adaptive = LearnedConstraint(self.applied.constraint, self.futures, self.sampler)
            self.attempts += some
            drawn += [text for text, valid in self._decoded(some, AppliedConstraint(adaptive)) if valid]
        return drawn[:count]

    def _decoded(self, count: int, applied: AppliedConstraint) -> list[tuple[Text, bool]]:
        """Decode, score and learn from ``count`` outputs."""
        requests = [replace(self.request, id=self._ids + number) for number in range(count)]
        self._ids += count
        group = fixed_group(Arm(self.target, self.proposer, self.verifier, CounterDraws(self.seed), applied), requests)
        for _ in group:
            pass
        ended = sorted(group.sequences, key=lambda sequence: sequence.request.id)
        if broken := next((why for sequence, why in group.errors.items() if sequence.finish == "nan"), None):
            raise ValueError(broken)
        texts = [tuple(sequence.emitted) for sequence in ended]
        valid = self.scores.add(texts)
        for output in dict.fromkeys(texts):
            self._learn(output, valid[output])
        return [(text, valid[text]) for text in texts]

    def _learn(self, output: Text, valid: bool) -> None:
        for end in range(len(output) + 1):
            if (row := self.scores.seen.get(output[:end])) is None:  # from here on it is not allowed, or it has ended
                break
            self.futures.learn(output[:end], row.rest, {token: float(np.exp(log_p)) for token, log_p in row.p.items()})
        if valid:
            self.futures.add(output, float(np.exp(self.scores.log_probabilities(output)[0])))


def estimate(sampler: Sampler, samples: int, max_attempts: int) -> dict[str, Any]:
    """Return the entry of ``summary.json``: distances with 95 % bootstrap intervals over samples.

    Args:
        samples: outputs of each distribution.
        max_attempts: attempts at outputs of p(x | valid).
    """
    local = sampler.local(samples)
    log_w = np.array([_log_weight(sampler.scores, text) if valid else -np.inf for text, valid in local])
    given = sampler.given_valid(samples, max_attempts)
    of_given = np.array([_log_weight(sampler.scores, text) for text in given])
    exact_samples = sampler.sampler == "rejection"
    facts = {
        "method": "sampled",
        "sampler": sampler.sampler,
        "exact_samples": exact_samples,
        "local_samples": len(local),
        "global_samples": len(given),
        "attempts": sampler.attempts,
        "stopped_by_attempts": len(given) < samples,
        "local_invalid": float(np.mean(log_w == -np.inf)),
        "z_lower": sampler.futures.lower,
        "z_upper": sampler.futures.upper,
    }
    return facts | {name: interval._asdict() for name, interval in distances(log_w, of_given).items()}


def _log_weight(scores: Scores, output: Text) -> float:
    log_p, log_local = scores.log_probabilities(output)
    return log_p - log_local


def distances(local: np.ndarray, given: np.ndarray) -> Mapping[str, Interval]:
    """Return Z, TV by either sample, and KL(global || local).

    Args:
        local: ``[n]`` log w of masked outputs; -inf of those that are not valid.
        given: ``[m]`` log w of outputs of p(x | valid).
    """
    scale = local.max(initial=-np.inf)
    if scale == -np.inf:
        nothing = Interval(*[float("nan")] * 3)
        return dict.fromkeys(("z", "tv", "tv_global", "kl"), nothing)
    w, rng = np.exp(local - scale), np.random.default_rng(0)
    shares, other = _shares(rng, len(local)), _shares(rng, len(given))
    z = shares @ w  # [1 + RESAMPLES]
    off = [share @ np.abs(1 - w / mean) if mean > 0 else np.nan for share, mean in zip(shares, z, strict=True)]
    resampled = {"z": np.exp(scale) * z, "tv": 0.5 * np.array(off)}
    if len(given):
        with np.errstate(divide="ignore"):
            ratio = np.exp(np.log(z)[:, None] + scale - given[None])
            kl = other @ given - np.log(z) - scale
        resampled |= {"tv_global": (other * np.maximum(1 - ratio, 0)).sum(1), "kl": kl}
    return {name: _interval(values) for name, values in resampled.items()}


def _shares(rng: np.random.Generator, count: int) -> np.ndarray:  # [1 + RESAMPLES, count]
    """The share of each sample: once the samples themselves, then resamples."""
    if not count:
        return np.empty((1 + RESAMPLES, 0))
    each = np.full(count, 1 / count)
    return np.concatenate([each[None], rng.multinomial(count, each, RESAMPLES) / count])


def _interval(values: np.ndarray) -> Interval:
    low, high = np.nanquantile(values[1:], [0.025, 0.975])
    return Interval(float(values[0]), float(low), float(high))
