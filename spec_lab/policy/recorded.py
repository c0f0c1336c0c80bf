"""Repeats what the policy of another run decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from spec_lab.core.draft import DETERMINISTIC, Draft
from spec_lab.core.limit import Limit, StopRule
from spec_lab.core.options import Filled, WrongOption, brief, checked
from spec_lab.core.request import Request
from spec_lab.decode.proposer import Proposer
from spec_lab.decode.sequence import Batch
from spec_lab.models.target import Target
from spec_lab.policy import toys
from spec_lab.policy.policy import Policy
from spec_lab.propose.stop_rules import described, rule_of
from spec_lab.results.manifest import begun
from spec_lab.results.writer import load


@dataclass(frozen=True, eq=False)
class RecordedPolicy(Policy):
    """Replays the decisions of another run, for the same requests step by step.

    Args:
        limits: by request, of its steps in order.
        prompts: by request, its name and its number of tokens; a request without an entry is not checked.
        stop: the rule that stopped the drafts; None for none.
        source: the run, for records.
        otherwise: decisions for any request, in turn; empty: ``limits``.
    """

    limits: Mapping[int, Sequence[Limit]]
    prompts: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    stop: StopRule | None = None
    source: str = ""
    otherwise: Sequence[Limit] = ()
    name: str = "recorded"

    @staticmethod
    @checked
    def load(target: Target, proposer: Proposer, path: Filled, arm: str | None = None) -> RecordedPolicy:
        """Read the decisions of a finished run.

        Args:
            target: of this run.
            proposer: of this run.
            path: the other run's folder.
            arm: which of its proposers; None: the one of proposer=, its first.

        Raises:
            ValueError: no run there, no decisions of that arm, or a run with forks.
            OSError: a file that cannot be read.
        """
        if "\0" in path:
            raise WrongOption(f"path must name the folder of a run, not {brief(path)}")
        folder = Path(path)
        manifest = begun(folder)
        if manifest is None:
            raise WrongOption(f"path={path} is no folder of a run: it has no manifest.json")
        arm = next(iter(manifest["arms"]), "") if arm is None else arm
        tables = load(folder)
        steps = tables.steps
        rows = steps[steps["arm"] == arm]
        if "policy" not in rows or rows.empty or rows["policy"].isna().any():
            raise WrongOption(f"path={path} holds no decisions of an arm {brief(arm)}: name a run with a policy")
        policy = manifest["proposers"].get(arm, {}).get("policy")
        budget = isinstance(policy, Mapping) and policy.get("name") == "batch_budget"
        if budget and any(Limit.parse(text).rows is None for text in rows.loc[rows["nodes"] > 0, "policy"]):
            raise WrongOption(
                f"path={path} was run with policy=batch_budget before the rows that it verifies were recorded: run it "
                "again"
            )
        if (rows["parent_sequence"] >= 0).any():
            raise WrongOption(f"path={path} has forks, whose decisions cannot be repeated")
        ordered = rows.sort_values(["group", "forward"])
        limits = {int(n): [Limit.parse(text) for text in each] for n, each in ordered.groupby("request")["policy"]}
        rule = rule_of(policy if isinstance(policy, Mapping) else {})
        asked = tables.requests[tables.requests["arm"] == arm]
        prompts = {
            int(n): (str(name), int(length))
            for n, name, length in zip(asked["request"], asked["name"], asked["prompt_tokens"], strict=True)
        }
        chooses = any(limit.rows is not None for each in limits.values() for limit in each)
        return (RecordedRows if chooses else RecordedPolicy)(limits, prompts, rule, folder.name)

    @property
    def parts(self) -> tuple[str, ...]:
        """See ``Policy``."""
        return tuple(dict.fromkeys(limit.part for each in self.limits.values() for limit in each if limit.part))

    @property
    def facts(self) -> dict[str, Any]:
        """See ``Part``."""
        return {**described(self.stop), "source": self.source, "requests": len(self.limits)}

    def init(self, request: Request) -> None:
        """Check that the other run decoded the same prompt. Nothing is learned.

        Raises:
            ValueError: its request of this number had another name or length.
        """
        recorded = self.prompts.get(request.id)
        if recorded not in (None, (request.name, len(request.tokens))):
            raise ValueError(
                f"request {request.id} of {self.source} is prompt '{recorded[0]}' with {recorded[1]} tokens, not "
                f"'{request.name}' with {len(request.tokens)}: repeat the run with its prompts, in its order"
            )

    def decide(self, batch: Batch, states: Sequence[Any]) -> list[Limit]:
        """See ``Policy``.

        Raises:
            ValueError: a request or step that the run has not decoded, or a fork.
        """
        return [self._limit(*sequence.key) for sequence in batch.sequences]

    def _limit(self, request: int, branch: int, step: int) -> Limit:
        if self.otherwise:
            return self.otherwise[step % len(self.otherwise)]
        of_request = self.limits.get(request, ())
        if branch or step >= len(of_request):
            what = "a fork" if branch else f"step {step}"
            raise ValueError(
                f"{self.source} holds no decision for {what} of request {request}: repeat the run with its proposer, "
                "prompts, seed and constraint"
            )
        return of_request[step]

    def toy(self) -> RecordedPolicy:
        """See ``Policy``. The first different decisions for the first request are repeated in turn."""
        different = tuple(dict.fromkeys(next(iter(self.limits.values()), (Limit(),))))
        return replace(self, limits={}, prompts={}, otherwise=toys.limits(different[: toys.DEPTH], self.stop))


@dataclass(frozen=True, eq=False)
class RecordedRows(RecordedPolicy):
    """Replays the decisions of a policy that chooses which drafted rows are verified (``batch_budget``).

    Whatever is repeated with them, with the run's seed or another one, outputs follow the target: whether a row was
    admitted followed from earlier steps and from the random choices of rows admitted before it, of which the choice of
    its own token is independent. Sampled siblings are admitted together or not at all, as ``batch_budget`` does.
    """

    def admit(self, batch: Batch, states: Sequence[Any], draft: Draft) -> np.ndarray | None:
        """Admit the rows that the run has verified. See ``Policy``."""
        shape = draft.shape
        if not shape.nodes:
            return None
        admitted = np.ones(shape.rows, dtype=bool)
        for tree, limit in zip(shape.trees, self.decide(batch, states), strict=True):
            if limit.rows is not None:
                admitted[tree[1:]] = np.isin(shape.places[tree[1:]], limit.rows)
        # A sampled node without its earlier siblings would not follow the distribution that it is verified with.
        sampled = np.flatnonzero(draft.codes != DETERMINISTIC)
        families = shape.parent[sampled]
        split = np.isin(families, families[~admitted[shape.roots + sampled]])
        admitted[shape.roots + sampled[split]] = False
        return admitted

    def toy(self) -> RecordedRows:
        """See ``Policy``. Two nodes, none and all are verified in turn."""
        return replace(self, limits={}, prompts={}, otherwise=(Limit(rows=(0, 1)), Limit(rows=()), Limit()))
