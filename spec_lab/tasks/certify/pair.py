"""How pairs of proposer and verifier are examined (``Certifier``), and the results of one (``Pair``).

Each pair is enumerated on toys in float64 (``certificate.prove``), its texts of a toy are sampled in float32 and
tested, and its tokens with the real target are tested.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from spec_lab.analysis.results.certificate import JOINT_DISTRIBUTION
from spec_lab.constrain import ConstraintError
from spec_lab.core.draft import Drawn
from spec_lab.core.faults import attributed
from spec_lab.core.probabilities import Sampling
from spec_lab.core.request import Request
from spec_lab.propose import Proposer
from spec_lab.tasks.certify.certificate import Grade, Proof, grade, noise_reused, prove
from spec_lab.tasks.certify.enumeration import Reused
from spec_lab.tasks.certify.exact import Counts
from spec_lab.tasks.certify.instances import LOOPS, PLAIN, TOGETHER, Instance, every_instance, under
from spec_lab.tasks.certify.masks import MaskComparison, compare_masks
from spec_lab.tasks.certify.outputs import EXACT
from spec_lab.tasks.certify.sampled import joint, scores
from spec_lab.tasks.certify.significance import ALPHA, chi_square, distance, holm
from spec_lab.tasks.lab import Lab, Settings
from spec_lab.verify import Verifier

MUCH = 0.15
"""A statistical test that would not have detected this total variation certifies nothing."""

MORE = 4
"""Factor by which the samples grow when a rejection is confirmed."""


@dataclass(frozen=True)
class Check:
    """One statistical test.

    Args:
        samples: number of texts or tokens.
        statistic: chi-square or z.
        p_value: probability of a result at least as extreme if the distribution is right.
        detectable: the smallest total variation that would have been detected, per text for distributions of texts, per
            token for score tests.
        drafted: number of tokens drafted while they were decoded.
    """

    name: str
    samples: int
    statistic: float
    p_value: float
    detectable: float
    seed: int
    drafted: int


@dataclass
class Pair:
    """The results of one pair.

    Args:
        drafts: what drafted the sampled texts: the proposer, or the reference that draws the same way.
        texts: numbers of sampled texts of a toy; ``expected`` is their exact distribution ``[V ** tokens]``.
        checks: statistical tests, that of the texts first.
        rejected: tests that rejected twice.
    """

    proposer: Proposer
    verifier: Verifier
    proof: Proof
    drafts: Proposer | Drawn
    texts: np.ndarray
    expected: np.ndarray
    checks: list[Check] = field(default_factory=list)
    rejected: list[Check] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """The pair in words."""
        return f"{self.proposer.name} ({self.proposer.drawn}), {self.verifier.name}"

    def reject(self, again: list[Check]) -> None:
        """Record those of the repeated tests that reject again."""
        self.rejected += [check for check in again if check.p_value < ALPHA]

    @property
    def distance(self) -> float:
        """Total variation of the sampled texts from their exact distribution; noise included."""
        return distance(np.bincount(self.texts, minlength=len(self.expected)), self.expected)

    @property
    def certified(self) -> Grade | None:
        """See ``grade``. Samples count only if the proposer drafted in them, unless it declares never to draft."""
        sampled = any(
            check.detectable <= MUCH and (check.drafted or not self.proposer.nodes) for check in self.own_checks
        )
        return grade(self.proof, self.verifier.lossless, bool(self.rejected), sampled)

    @property
    def own_checks(self) -> list[Check]:
        """Tests of the proposer's own drafts: without the texts where the reference drafted them."""
        return self.checks if self.drafts is self.proposer else self.checks[1:]

    @property
    def drafted(self) -> int:
        """Number of tokens that the proposer itself drafted, enumerated and sampled."""
        enumerated = self.proof.facts()["drafted"] if self.proof.drafts == "proposer" else 0
        return int(enumerated) + sum(check.drafted for check in self.own_checks)

    @property
    def untested(self) -> str | None:
        """Why nothing was tested: a proposer that was run and drafted nothing, though it can; None otherwise."""
        ran = self.own_checks or (self.proof.findings and self.proof.drafts == "proposer")
        if not ran or self.drafted or not self.proposer.nodes:
            return None
        return (
            f"proposer '{self.proposer.name}' drafted no token, neither on the toy models nor in the sampled texts, so "
            "no draft was tested: choose options with which it drafts"
        )

    @property
    def failed(self) -> str | None:
        """Contradiction to the verifier's declaration; None for no contradiction."""
        if self.verifier.lossless:
            if self.proof.failure is not None:
                return f"{self.proof.failure.wrong} ({self.proof.failure.instance})"
            if self.rejected:
                worst = min(self.rejected, key=lambda check: check.p_value)
                return f"{worst.name}: rejected twice, then with p = {worst.p_value:.1e} of {worst.samples} samples"
        elif self.proof.own_target_tv is not None and not self.proof.own_target_tv <= EXACT:
            return (
                f"its output has a total variation of {self.proof.own_target_tv:.2g} from the distribution against "
                "which it declares to be exact (aim)"
            )
        return self.untested

    @property
    def result(self) -> str:
        """The result in a few words."""
        if self.failed:
            return "nothing drafted" if self.failed == self.untested else "FAILS"
        if self.certified:
            return {"exact": "lossless, proved", "sampled": "lossless, sampled"}[self.certified]
        worst = self.proof.worst
        biased = worst.tv > EXACT if worst else self.checks[0].p_value < ALPHA
        verdict = "lossy" if biased else "no bias found"
        return verdict if self.proof.own_target_tv is None else f"{verdict}, exact for its own target"

    def facts(self) -> dict[str, Any]:
        """Return the entry of ``certificate.json``."""
        return {
            "proposer": self.proposer.name,
            "drawn": self.proposer.drawn,
            "verifier": self.verifier.name,
            "options": {"proposer": dict(self.proposer.facts), "verifier": repr(self.verifier)},
            "declared_lossless": self.verifier.lossless,
            "chains_only": self.verifier.chains_only,
            "certified": self.certified,
            "failed": self.failed,
            "result": self.result,
            "exact": self.proof.facts(),
            "sampled_tv": self.distance,
            "sampled": [vars(check) for check in self.checks],
            "rejected": [vars(check) for check in self.rejected],
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class Certifier:
    """Examines pairs of a lab.

    Args:
        samples: texts of a toy that each pair decodes.
        tokens: tokens that each lossless pair decodes with the real target; 0 for none.
        mask_rows: masks that are compared; 0 for none.
    """

    lab: Lab
    settings: Settings
    samples: int
    tokens: int
    mask_rows: int
    sampling: Sampling

    def check(self) -> None:
        """Find errors that would otherwise occur later, before anything is written.

        Raises:
            ValueError: prompts that do not fit; a constraint on the output that refuses all of them; a proposer that
                cannot draft for the sampling.
        """
        for proposer in [self.lab.proposer, *self.lab.more_proposers.values()]:
            proposer.check_sampling(self.sampling)
        applied = self.lab.applied
        if applied is not None and not self.requests and applied.on_target:
            raise ValueError(
                f"constraint '{applied.constraint.name}' refuses every prompt, so nothing can be decoded under it: "
                f"{self.refused[0]}"
            )

    @cached_property
    def _started(self) -> tuple[list[Request], list[str]]:
        fit, refused = [], []
        for request in self.lab.requests(self.settings):
            try:
                if self.lab.applied is not None:
                    self.lab.applied.constraint.start(request)
                fit.append(request)
            except ConstraintError as error:
                refused.append(str(error))
        return fit, refused

    @property
    def requests(self) -> list[Request]:
        """The prompts at which the constraint can start; all of them without a constraint."""
        return self._started[0]

    @property
    def refused(self) -> list[str]:
        """The constraint's messages for the other prompts."""
        return self._started[1]

    @cached_property
    def own(self) -> tuple[Instance, ...]:
        """Instances under the run's own constraint."""
        return under(self.lab.applied)

    @property
    def parts(self) -> int:
        """The amount of work of a pair, in units of the progress bar."""
        return len(every_instance()) + len(self.own) + self.samples // 1000 + self.tokens // 100

    def masks(self, tick: Callable[[float], object]) -> MaskComparison | None:
        """Compare the masks of the run's own constraint with those of fresh states; None without a constraint."""
        applied = self.lab.applied
        if applied is None or not self.mask_rows:
            return None
        with attributed("constraint", applied.constraint):
            return compare_masks(
                applied, self.requests, self.mask_rows, self.settings.seed, self.lab.pieces, _scaled(tick, 1000)
            )

    def examine(self, proposer: Proposer, verifier: Verifier, tick: Callable[[float], object]) -> Pair:
        """Enumerate and test one pair."""
        start = time.perf_counter()
        proof = prove(proposer, verifier, tick=tick)
        if self.own and proof.findings:
            proof = proof.also(prove(proposer, verifier, instances=self.own, tick=tick))
        if self.sampling != PLAIN and proof.findings:
            proof = proof.also(prove(proposer, verifier, (*LOOPS, *self.own), self.sampling))
        if proposer.shared_store and proof.findings:
            proof = proof.also(prove(proposer, verifier, TOGETHER))
        drafts: Proposer | Drawn = proposer.drawn if proof.drafts == "reference" else proposer
        progress, counts = _scaled(tick, 1000), Counts()
        try:
            texts, expected = self.texts(drafts, verifier, self.settings.seed, 1, progress, counts=counts)
        except Reused as error:
            proof = replace(proof, findings=(*proof.findings, noise_reused("sampled texts", error)))
            counts = Counts()
            texts, expected = self.texts(drafts, verifier, self.settings.seed, 1, progress, False, counts)
        pair = Pair(proposer, verifier, proof, drafts, texts, expected)
        pair.checks.append(histogram(texts, expected, self.settings.seed, counts))
        acts = self.lab.applied is not None and self.lab.applied.constraint.has_actions
        if verifier.lossless and self.tokens and not acts:  # with actions, single tokens do not follow p
            pair.checks += self.scored(pair, self.settings.seed, 1, _scaled(tick, 100))
        pair.seconds = time.perf_counter() - start
        return pair

    def texts(
        self,
        drafts: Proposer | Drawn,
        verifier: Verifier,
        seed: int,
        times: int,
        tick: Callable[[int], object] = lambda _: None,
        watched: bool = True,
        counts: Counts | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sample texts of a toy; return them and their exact distribution."""
        return joint(
            drafts, verifier, times * self.samples, seed, self.sampling, tick=tick, watched=watched, counts=counts
        )

    def scored(self, pair: Pair, seed: int, times: int, tick: Callable[[int], object] = lambda _: None) -> list[Check]:
        """Run the score tests with the real target on the lab's prompts, repeated as often as the tokens require."""
        applied = self.lab.applied
        prompts = self.requests if applied is not None and applied.on_target else self.lab.requests(self.settings)
        count = -(-times * self.tokens // self.settings.max_new_tokens)
        requests = [replace(prompts[n % len(prompts)], id=n, sampling=self.sampling) for n in range(count)]
        size = self.settings.batch_size
        counts = Counts()
        by_test = scores(self.lab.target, pair.proposer, pair.verifier, requests, seed, size, tick, applied, counts)
        return [
            Check(name, score.tokens, score.z, score.bound, score.detectable_by_bound().tv, seed, counts.drafted)
            for name, score in by_test.items()
        ]

    def confirm(self, pairs: Sequence[Pair]) -> None:
        """Apply Holm's test to all checks of pairs that are declared lossless, and repeat what it rejects.

        A rejection counts if it occurs again with another seed and four times the samples. Nothing more is sampled
        where enumeration has found a fault, nor score tests where the texts have confirmed one.
        """
        checks = [(pair, check) for pair in pairs if pair.verifier.lossless for check in pair.checks]
        suspicious = [
            suspect for suspect, no in zip(checks, holm([check.p_value for _, check in checks]), strict=True) if no
        ]
        seed = self.settings.seed + 1
        for pair in pairs:
            names = {check.name for suspect, check in suspicious if suspect is pair}
            if pair.proof.failure is not None:
                continue
            if JOINT_DISTRIBUTION in names:
                counts = Counts()
                texts = self.texts(pair.drafts, pair.verifier, seed, MORE, watched=False, counts=counts)
                pair.reject([histogram(*texts, seed, counts)])
            if names - {JOINT_DISTRIBUTION} and not pair.rejected:
                pair.reject([check for check in self.scored(pair, seed, MORE) if check.name in names])


def histogram(texts: np.ndarray, expected: np.ndarray, seed: int, counts: Counts) -> Check:
    """Return the chi-square test of sampled texts against their exact distribution; ``counts`` is of the sampling."""
    test = chi_square(np.bincount(texts, minlength=len(expected)), expected)
    return Check(JOINT_DISTRIBUTION, test.samples, test.statistic, test.p_value, test.detectable, seed, counts.drafted)


def _scaled(tick: Callable[[float], object], size: int) -> Callable[[int], object]:
    """Return a function that counts in units of ``size``."""
    return lambda count: tick(count / size)
