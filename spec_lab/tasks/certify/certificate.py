"""What is known of one pair of proposer and verifier, and how it came to be known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.faults import PartError
from spec_lab.core.probabilities import Sampling
from spec_lab.propose import Proposer
from spec_lab.tasks.certify.constrained import bound, examine
from spec_lab.tasks.certify.enumerate import Continuous, Reused, TooMany, Unrepeatable
from spec_lab.tasks.certify.exact import LOOPS, PLAIN, STEPS, WORLDS, Finding, Instance
from spec_lab.verify import Misfit, Token, Verdict, Verifier, chains_only

Tick = Callable[[int], object]

QUICK = (*(Instance(WORLDS[0], tree) for tree in ("1x1", "2", "2x1", "1x1x1")), *LOOPS[:2])
"""What every run enumerates of its own pair, in a fraction of a second."""


@dataclass(frozen=True)
class Proof:
    """The exact layer's result for one pair.

    Args:
        findings: what each instance showed.
        drafts: whose drafts were enumerated: the "proposer"'s own, or the "reference"'s, which draws the same way.
        missing: what was not enumerated, and why; empty for nothing.
    """

    findings: tuple[Finding, ...]
    drafts: Literal["proposer", "reference"]
    missing: tuple[str, ...]

    @property
    def worst(self) -> Finding | None:
        """The finding with the largest total variation."""
        return max(self.findings, key=lambda one: np.nan_to_num(one.tv, nan=np.inf), default=None)

    @property
    def failure(self) -> Finding | None:
        """The first finding that is not exact."""
        return next((one for one in self.findings if one.wrong), None)

    @property
    def aimed(self) -> float | None:
        """The largest total variation from the law that a lossy verifier says it is exact against."""
        aimed = [one.aimed for one in self.findings if one.aimed is not None]
        return float(np.max(aimed)) if aimed else None  # NaN where one is

    def also(self, other: Proof) -> Proof:
        """Both together: as good as the weaker."""
        drafts = self.drafts if self.drafts == "reference" else other.drafts
        return Proof(self.findings + other.findings, drafts, self.missing + other.missing)

    def facts(self) -> dict[str, Any]:
        """For ``certificate.json``."""
        return {
            "instances": len(self.findings),
            "outcomes": sum(one.outcomes for one in self.findings),
            "worst_tv": self.worst.tv if self.worst else None,
            "worst_instance": self.worst.instance if self.worst else None,
            "worst_mass_error": max((abs(one.mass - 1) for one in self.findings), default=None),
            "aimed_tv": self.aimed,
            "aimed_instances": sum(one.aimed is not None for one in self.findings),
            "drafted": sum(one.drafted for one in self.findings),
            "failure": self.failure and f"{self.failure.wrong} ({self.failure.instance})",
            "drafts": self.drafts,
            "missing": list(self.missing),
        }


def every() -> tuple[Instance, ...]:
    """All instances there are."""
    return STEPS + LOOPS + bound()


def prove(
    proposer: Proposer | Drawn,
    verifier: Verifier,
    instances: Sequence[Instance] | None = None,
    sampling: Sampling = PLAIN,
    tick: Tick = lambda _: None,
) -> Proof:
    """Enumerate the instances with the proposer's own drafts where it runs on a toy, else with the reference's.

    A proposer with ``toy(target, draft, tree)`` drafts by what that returns. One without is tried as it is on the toy
    target; if it fails there, a draft model that draws siblings the same way (the reference) drafts in its place, and
    ``missing`` says so.

    Args:
        proposer: or a way of drawing, for the reference.
        verifier: must accept the way of drawing.
        instances: what to enumerate; None: steps, loops, and loops under constraints. Of a verifier that declares
            ``chains_only`` those whose tree is a chain.
        sampling: how the toy requests are sampled.
        tick: told of each instance done.

    Raises:
        Misfit: the proposer drafts a tree, and the verifier verifies chains only.
        ValueError: the verifier fails on a toy, or the proposer after its first instance; drafts that cannot be
            repeated. Names the part, what went wrong and the instance.
    """
    instances = every() if instances is None else instances
    if chains_only(verifier):
        instances = [one for one in instances if one.chain]
        if not instances:
            return Proof((), "proposer", ())
    drawn: Drawn = proposer if isinstance(proposer, str) else proposer.drawn
    drafting: Proposer | Drawn = proposer
    missing: list[str] = []
    _try(instances[0], drawn, verifier, sampling)
    if drafting != drawn and (why := _unfit(instances[0], proposer, verifier, sampling)):
        missing.append(f"the proposer's own drafts: {why}")
        drafting = drawn
    whose: Literal["proposer", "reference"] = "reference" if isinstance(drafting, str) else "proposer"
    findings: list[Finding] = []
    for instance in instances:
        try:
            findings.append(examine(instance, drafting, verifier, sampling))
        except Reused as error:
            findings.append(Finding(instance.name, 1.0, 1.0, f"noise is used twice: {error}", 0.0, 0.0, 0))
        except TooMany as error:
            missing.append(f"{instance.name}: {error}")
        except Continuous as error:
            return Proof((), whose, (*missing, str(error)))
        except Misfit:
            raise
        except Exception as error:
            failure = _fails(instance, drafting, verifier, sampling, error)
            if not any(one.wrong for one in findings):
                raise failure from error
            missing.append(str(failure))  # that it is wrong is known
        tick(1)
    if not isinstance(drafting, str) and drafting.nodes and not any(one.drafted for one in findings):
        missing.append(f"proposer '{drafting.name}' drafted nothing on any toy")
    return Proof(tuple(findings), whose, tuple(missing))


def _try(instance: Instance, drafting: Proposer | Drawn, verifier: Verifier, sampling: Sampling) -> None:
    try:
        examine(instance, drafting, verifier, sampling)
    except (Reused, TooMany, Continuous):
        pass  # found again, and reported, later
    except Exception as error:
        raise _fails(instance, drafting, verifier, sampling, error) from error


def _fails(
    instance: Instance, drafting: Proposer | Drawn, verifier: Verifier, sampling: Sampling, error: Exception
) -> ValueError:
    """What went wrong on a toy, in words that name the part at fault."""
    by = f"drawn {drafting}" if isinstance(drafting, str) else f"drawn {drafting.drawn} by '{drafting.name}'"
    if isinstance(error, PartError):
        return ValueError(f"{error}, on a toy draft {by} ({instance.name})")
    if isinstance(error, Unrepeatable):
        whose = f"verifier '{verifier.name}' verifies"
        if not isinstance(drafting, str) and _repeats(instance, drafting.drawn, verifier, sampling):
            whose = f"proposer '{drafting.name}' drafts"
        return ValueError(
            f"{whose} differently when the same text is replayed ({instance.name}; {error}): what it returns must "
            "follow from the sequences, declared stores and the random choices of the batch (batch.draws) only; use no "
            "other source of chance and keep nothing else between steps"
        )
    return ValueError(f"verifier '{verifier.name}' and a toy draft {by} fail ({instance.name}): {_words(error)}")


def _repeats(instance: Instance, drawn: Drawn, verifier: Verifier, sampling: Sampling) -> bool:
    """Whether the reference's drafts can be repeated under this verifier, so that it is not at fault."""
    try:
        examine(instance, drawn, verifier, sampling)
    except Unrepeatable:
        return False
    except Exception:  # whatever else is wrong, it is not this
        return True
    return True


def _unfit(instance: Instance, proposer: Any, verifier: Verifier, sampling: Sampling) -> str:
    """Why a proposer without a ``toy`` cannot draft for a toy target; empty where it can."""
    if hasattr(proposer, "toy"):
        return ""
    try:
        examine(instance, proposer, verifier, sampling)
    except (Reused, TooMany, Continuous, Unrepeatable):
        return ""
    except Misfit:
        raise
    except Exception as error:  # whatever a proposer trips over that was made for another target
        return f"it has no toy(target, draft, tree) and fails on a toy target ({_words(error)})"
    return ""


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, PartError) else f"{type(error).__name__}: {error}"


Grade = Literal["exact", "quick", "sampled"]


def grade(proof: Proof, lossless: bool, rejected: bool = False, sampled: bool = False) -> Grade | None:
    """What a pair is certified as: lossless by enumeration, lossless as far as samples tell, or not at all.

    "quick" are the few instances that every run enumerates.

    Exact is only what was enumerated whole, and with the proposer's own drafts: a reference in its place says nothing
    of the law that the proposer itself states.

    Args:
        proof: the exact layer's result.
        lossless: what the verifier declares.
        rejected: whether a statistical test found a bias.
        sampled: whether there was one, of the pair's own drafts, that would have seen much.
    """
    if not lossless or rejected or proof.failure is not None:
        return None
    if proof.findings and not proof.missing:
        return "exact"
    return "sampled" if sampled else None


def in_short(proposer: Proposer, verifier: Verifier, constrained: bool = False) -> dict[str, Any]:
    """What a run says of its own pair, by enumerating a few instances: "certified" (see ``grade``), and why (not).

    Under a constraint, loops under toy grammars are among them.
    """
    try:
        proof = prove(proposer, verifier, QUICK + bound()[:3:2] if constrained else QUICK)
    except ValueError as error:
        return {"certified": None, "certificate": {"missing": [str(error)]}}
    exact = grade(proof, verifier.lossless) == "exact"
    return {"certified": "quick" if exact else None, "certificate": proof.facts()}


@dataclass(frozen=True)
class Control:
    """A broken verifier: token verification that emits from p after a rejection. Every layer must find it biased."""

    name = "control: p after a rejection"
    accepts = Token.accepts
    lossless = True

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """Token's stops with p in place of every residual."""
        return Verdict(Token()(draft, p).stop, lambda rows: p[torch.from_numpy(np.asarray(rows)).to(p.device)])
