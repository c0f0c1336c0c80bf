"""The proof of one pair of proposer and verifier: which instances were enumerated, and what that certifies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.draft import Draft, Drawn
from spec_lab.core.faults import PartError
from spec_lab.core.probabilities import Sampling
from spec_lab.propose import Proposer
from spec_lab.tasks.certify.enumeration import Continuous, Reused, TooMany, Unrepeatable
from spec_lab.tasks.certify.exact import Finding, examine, toy_parts
from spec_lab.tasks.certify.instances import PLAIN, QUICK, TOGETHER, Instance, conditioned, constrained, every_instance
from spec_lab.tasks.certify.together import examine_together
from spec_lab.verify import Misfit, Token, Verdict, Verifier

Tick = Callable[[int], object]

CAUSES = (
    "Three causes are common: (1) rows of a batch influence each other, as where something is computed for the first "
    "sequence only or padded; (2) state is kept that is neither in the state of a sequence (init, fork, rewind) nor a "
    "shared_store that is declared and that forget() empties; (3) another source of randomness than batch.draws."
)
"""Why drafts or verdicts differ when the same text is replayed."""


@dataclass(frozen=True)
class Proof:
    """The result of enumeration for one pair.

    Args:
        findings: one for each enumerated instance.
        drafts: whose drafts were enumerated: the "proposer"'s own, or those of the "reference" that draws the same way.
        missing: what was not enumerated, and why; empty for nothing.
    """

    findings: tuple[Finding, ...]
    drafts: Literal["proposer", "reference"]
    missing: tuple[str, ...]

    @property
    def worst(self) -> Finding | None:
        """The finding with the largest total variation."""
        return max(self.findings, key=lambda finding: np.nan_to_num(finding.tv, nan=np.inf), default=None)

    @property
    def failure(self) -> Finding | None:
        """The first finding that is not exact."""
        return next((finding for finding in self.findings if finding.wrong), None)

    @property
    def own_target_tv(self) -> float | None:
        """The largest total variation from the distribution against which a lossy verifier declares to be exact."""
        distances = [finding.own_target_tv for finding in self.findings if finding.own_target_tv is not None]
        return float(np.max(distances)) if distances else None  # NaN where one is

    def also(self, other: Proof) -> Proof:
        """Return both proofs as one, which is as good as the weaker."""
        drafts = self.drafts if self.drafts == "reference" else other.drafts
        return Proof(self.findings + other.findings, drafts, self.missing + other.missing)

    def facts(self) -> dict[str, Any]:
        """Return the entry of ``certificate.json``."""
        return {
            "instances": len(self.findings),
            "outcomes": sum(finding.outcomes for finding in self.findings),
            "worst_tv": self.worst.tv if self.worst else None,
            "worst_instance": self.worst.instance if self.worst else None,
            "worst_mass_error": max((abs(finding.mass - 1) for finding in self.findings), default=None),
            "own_target_tv": self.own_target_tv,
            "own_target_instances": sum(finding.own_target_tv is not None for finding in self.findings),
            "drafted": sum(finding.drafted for finding in self.findings),
            "failure": self.failure and f"{self.failure.wrong} ({self.failure.instance})",
            "drafts": self.drafts,
            "missing": list(self.missing),
        }


def prove(
    proposer: Proposer | Drawn,
    verifier: Verifier,
    instances: Sequence[Instance] | None = None,
    sampling: Sampling = PLAIN,
    tick: Tick = lambda _: None,
) -> Proof:
    """Enumerate instances with the proposer's own drafts where it runs on a toy, else with the reference's.

    A proposer with a ``toy`` of its own drafts with that. Any other is tried as it is on the toy target; if it fails
    there, a draft model that draws siblings the same way (the reference) drafts in its place, and ``missing`` names the
    reason.

    Args:
        proposer: or a way of drawing, for the reference.
        verifier: must accept the way of drawing.
        instances: what to enumerate; None: ``every_instance``. For a verifier that is ``chains_only``, those whose tree
            is a chain.
        tick: called with 1 after each instance.

    Raises:
        Misfit: the proposer drafts a tree, and the verifier verifies chains only.
        ValueError: the verifier fails on a toy, or the proposer after its first instance; drafts that cannot be
            repeated. Names the part, the error and the instance.
    """
    instances = every_instance() if instances is None else instances
    if verifier.chains_only:
        instances = [instance for instance in instances if instance.chain]
        if not instances:
            return Proof((), "proposer", ())
    drawn: Drawn = proposer if isinstance(proposer, str) else proposer.drawn
    drafting: Proposer | Drawn = proposer
    missing: list[str] = []
    if wrong := _error(instances[0], drawn, verifier, sampling):  # the reference drafts: the verifier is at fault
        raise _fails(instances[0], drawn, verifier, sampling, wrong) from wrong
    if not isinstance(proposer, str) and (why := _unfit(instances[0], proposer, verifier, sampling)):
        missing.append(f"the proposer's own drafts: {why}")
        drafting = drawn
    whose: Literal["proposer", "reference"] = "reference" if isinstance(drafting, str) else "proposer"
    findings: list[Finding] = []
    for instance in instances:
        try:
            findings.append(_examined(instance, drafting, verifier, sampling))
        except Reused as error:
            findings.append(noise_reused(instance.name, error))
        except TooMany as error:
            missing.append(f"{instance.name}: {error}")
        except Continuous as error:
            return Proof((), whose, (*missing, str(error)))
        except Misfit:
            raise
        except Exception as error:
            failure = _fails(instance, drafting, verifier, sampling, error)
            if not any(finding.wrong for finding in findings):
                raise failure from error
            missing.append(str(failure))  # the pair is known to be wrong already
        tick(1)
    if not isinstance(drafting, str) and drafting.nodes and not any(finding.drafted for finding in findings):
        missing.append(f"proposer '{drafting.name}' drafted nothing on any toy")
    return Proof(tuple(findings), whose, tuple(missing))


def policy_of(proposer: Proposer) -> str:
    """Return the name of the policy that a proposer is under (``policy.adaptive``); empty for none."""
    policy = proposer.facts.get("policy")
    return str(policy["name"]) if isinstance(policy, Mapping) and "name" in policy else ""


def noise_reused(instance: str, error: Reused) -> Finding:
    """Return the finding of an instance in which one random key was used for two choices."""
    return Finding(instance, 1.0, 1.0, f"noise is used twice: {error}", 0.0, 0.0, 0)


def _examined(instance: Instance, drafting: Proposer | Drawn, verifier: Verifier, sampling: Sampling) -> Finding:
    """Enumerate an instance, of one request or of several that are decoded together."""
    if instance.requests == 1:
        return examine(instance, drafting, verifier, sampling)
    return examine_together(instance, toy_parts(instance, drafting, sampling), verifier, sampling)


def _error(instance: Instance, drafting: Proposer | Drawn, verifier: Verifier, sampling: Sampling) -> Exception | None:
    """Return the error of enumerating an instance; None for none, or for one that is a result of its own."""
    try:
        _examined(instance, drafting, verifier, sampling)
    except (Reused, TooMany, Continuous):
        return None
    except Exception as error:  # any error of a part
        return error
    return None


def _fails(
    instance: Instance, drafting: Proposer | Drawn, verifier: Verifier, sampling: Sampling, error: Exception
) -> ValueError:
    """Return an error that names the part at fault for an error on a toy."""
    by = f"drawn {drafting}" if isinstance(drafting, str) else f"drawn {drafting.drawn} by '{drafting.name}'"
    if isinstance(error, PartError):
        return ValueError(f"{error}, on a toy draft {by} ({instance.name})")
    if isinstance(error, Unrepeatable):
        whose, store = f"verifier '{verifier.name}' verifies", ""
        if not isinstance(drafting, str):  # the verifier's fault only if a replay of the reference's drafts differs too
            again = _error(instance, drafting.drawn, verifier, sampling)
            if not isinstance(again, Unrepeatable):
                policy = policy_of(drafting)
                whose = f"proposer '{drafting.name}' " + f"under policy '{policy}' " * bool(policy) + "drafts"
                shared = drafting.shared_store
                store = f" Its shared_store ('{shared}') is emptied by forget() before each replay." * bool(shared)
                store = store or (" Neither declares a shared_store." if policy else " It declares no shared_store.")
        return ValueError(
            f"{whose} differently when the same text is replayed ({instance.name}; {error}).{store} Results must "
            f"follow from the sequences, declared stores and batch.draws only. {CAUSES}"
        )
    return ValueError(f"verifier '{verifier.name}' and a toy draft {by} fail ({instance.name}): {_words(error)}")


def _unfit(instance: Instance, proposer: Proposer, verifier: Verifier, sampling: Sampling) -> str:
    """Return why a proposer without a toy version cannot draft for a toy target; empty where it can."""
    if type(proposer).toy is not Proposer.toy:
        return ""
    error = _error(instance, proposer, verifier, sampling)
    if isinstance(error, Misfit):
        raise error
    if error is None or isinstance(error, Unrepeatable):
        return ""
    return f"it has no toy(target, draft, tree) and fails on a toy target ({_words(error)})"


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, PartError) else f"{type(error).__name__}: {error}"


Grade = Literal["exact", "quick", "sampled"]


def grade(proof: Proof, lossless: bool, rejected: bool = False, sampled: bool = False) -> Grade | None:
    """Return what a pair is certified as.

    - "exact": every instance was enumerated with the proposer's own drafts and is exact. Drafts of a reference do not
      count: whether the proposer states the right q is then unknown.
    - "sampled": not all could be enumerated; no enumerated instance is wrong, and no statistical test rejects.
    - None: declared lossy, found wrong, or neither enumerated nor sampled enough.

    ("quick" is what a run calls "exact" of the few instances in ``QUICK``.)

    Args:
        lossless: what the verifier declares.
        rejected: whether a statistical test found a bias.
        sampled: whether a test of the pair's own drafts would have detected a bias that matters.
    """
    if not lossless or rejected or proof.failure is not None:
        return None
    if proof.findings and not proof.missing:
        return "exact"
    return "sampled" if sampled else None


def in_short(proposer: Proposer, verifier: Verifier, distribution: str | None = None) -> dict[str, Any]:
    """Return what a run records of its own pair, by enumerating ``QUICK``: "certified" (see ``grade``) and the proof.

    Args:
        distribution: as in ``AppliedConstraint``: loops under toy grammars are enumerated as well. None: the run has no
            constraint.
    """
    more = {None: (), "local": constrained()[:3:2], "global": conditioned()[:3:2]}[distribution]
    try:
        pairs = TOGETHER[:1] if proposer.shared_store else ()
        proof = prove(proposer, verifier, QUICK + more + pairs)
    except ValueError as error:
        return {"certified": None, "certificate": {"missing": [str(error)]}}
    exact = grade(proof, verifier.lossless) == "exact"
    return {"certified": "quick" if exact else None, "certificate": proof.facts()}


@dataclass(frozen=True)
class Control(Verifier):
    """A wrong verifier: token verification that emits from p after a rejection. Every test must find it biased."""

    name = "control: p after a rejection"
    accepts = Token.accepts
    lossless = True

    def __call__(self, draft: Draft, p: Tensor) -> Verdict:
        """Return the stops of ``Token`` with p in place of every residual."""
        return Verdict(Token()(draft, p).stop, lambda rows: p[torch.from_numpy(np.asarray(rows)).to(p.device)])
