"""A pair of proposer and verifier, and all that was found out about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spec_lab.core.draft import Drawn
from spec_lab.propose import Proposer
from spec_lab.tasks.certify.certificate import Grade, Proof, grade
from spec_lab.tasks.certify.outputs import EXACT
from spec_lab.tasks.certify.statistics import ALPHA, distance
from spec_lab.verify import Verifier, chains_only

MUCH = 0.15
"""A test by samples that would not even have seen this total variation certifies nothing."""

MORE = 4
"""How many times the samples confirm a rejection."""


@dataclass(frozen=True)
class Check:
    """One statistical test.

    Args:
        name: what was tested.
        samples: how much of it.
        statistic: chi-square or z.
        p_value: of the law being right.
        detectable: the smallest total variation that would have been seen, per text for joint laws, per token else.
        seed: of the samples.
    """

    name: str
    samples: int
    statistic: float
    p_value: float
    detectable: float
    seed: int


@dataclass
class Pair:
    """What was found out.

    Args:
        proposer: drafts.
        verifier: decides.
        proof: the exact layer's result.
        drafts: who drafted in toy worlds: the proposer, or the reference that draws the same way.
        texts: sampled in a toy world, by number; ``law`` is what they should follow.
        checks: statistical tests, the joint law's first.
        rejected: tests that rejected twice.
        seconds: all this took.
    """

    proposer: Proposer
    verifier: Verifier
    proof: Proof
    drafts: Proposer | Drawn
    texts: np.ndarray
    law: np.ndarray
    checks: list[Check] = field(default_factory=list)
    rejected: list[Check] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.proposer.name} ({self.proposer.drawn}), {self.verifier.name}"

    def reject(self, again: list[Check]) -> None:
        """Keep of the tests done once more those that reject again."""
        self.rejected += [check for check in again if check.p_value < ALPHA]

    @property
    def distance(self) -> float:
        """Total variation of the sampled texts from their law; some of it is noise."""
        return distance(np.bincount(self.texts, minlength=len(self.law)), self.law)

    @property
    def certified(self) -> Grade | None:
        """See ``grade``. Where the reference drafted, its texts say nothing of the proposer's own drafts."""
        own = self.checks if self.drafts is self.proposer else self.checks[1:]
        seen = [check for check in own if check.detectable <= MUCH]
        return grade(self.proof, self.verifier.lossless, bool(self.rejected), bool(seen))

    @property
    def failed(self) -> str | None:
        """What is wrong with what the verifier declares; None for nothing."""
        if self.verifier.lossless:
            if self.proof.failure is not None:
                return f"{self.proof.failure.wrong} ({self.proof.failure.instance})"
            if self.rejected:
                worst = min(self.rejected, key=lambda check: check.p_value)
                return f"{worst.name}: rejected twice, then with p = {worst.p_value:.1e} of {worst.samples} samples"
        elif self.proof.aimed is not None and not self.proof.aimed <= EXACT:
            return f"its output is {self.proof.aimed:.2g} from the law it says it is exact against"
        return None

    def facts(self) -> dict[str, Any]:
        """For ``certificate.json``."""
        return {
            "proposer": self.proposer.name,
            "drawn": self.proposer.drawn,
            "verifier": self.verifier.name,
            "options": {"proposer": getattr(self.proposer, "facts", {}), "verifier": repr(self.verifier)},
            "declared_lossless": self.verifier.lossless,
            "chains_only": chains_only(self.verifier),
            "certified": self.certified,
            "failed": self.failed,
            "exact": self.proof.facts(),
            "sampled_tv": self.distance,
            "sampled": [vars(check) for check in self.checks],
            "rejected": [vars(check) for check in self.rejected],
            "seconds": self.seconds,
        }
