"""Each kind of part that users write: its config group, what it is given, its contract, a small example."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class Contract(NamedTuple):
    """A kind of part that users write.

    Args:
        name: as ``spec-lab explain contract NAME`` has it.
        group: where its config stands.
        given: the live objects that it is given by their names; empty for none.
        kind: dotted path of its base class, or of what it consists of; empty where it is a config alone.
        page: of docs/reference/api that describes it.
        example: a small one, a file of the repository.
        further: dotted paths of what its members are given and return.
    """

    name: str
    group: str
    given: str
    kind: str
    page: str
    example: str
    further: tuple[str, ...] = ()


BATCH = ("spec_lab.decode.sequence.Batch", "spec_lab.decode.sequence.SequenceState")
DRAFT = ("spec_lab.core.draft.Draft", "spec_lab.core.shape.Shape")
CONTRACTS = (
    Contract(
        "proposer", "proposer", "target", "spec_lab.decode.proposer.Proposer", "decode", "spec_lab/propose/jacobi.py",
        ("spec_lab.decode.proposer.Requires", "spec_lab.decode.proposer.Observation", *BATCH, *DRAFT),
    ),
    Contract(
        "drafter", "proposer", "target", "spec_lab.propose.tree_proposer.TreeProposer", "propose",
        "docs/tutorials/write_a_hidden_state_drafter.md",
        (
            "spec_lab.propose.tree_proposer.Forwards", "spec_lab.propose.expansion.Expand",
            "spec_lab.propose.tree_plan.TreePlan", "spec_lab.models.services.TargetServices",
            "spec_lab.drafters.feature_drafter.FeatureDrafter", "spec_lab.core.clock.Clock",
        ),
    ),
    Contract(
        "verifier", "verifier", "", "spec_lab.verify.verdict.Verifier", "verify", "spec_lab/verify/relaxed.py",
        ("spec_lab.verify.verdict.Verdict", *DRAFT),
    ),
    Contract(
        "constraint", "constraint", "vocabulary", "spec_lab.constrain.protocol.Constraint", "constrain",
        "spec_lab/constrain/min_new_tokens.py",
        ("spec_lab.constrain.protocol.ConstraintState", "spec_lab.constrain.vocabulary.Vocabulary"),
    ),
    Contract(
        "controller", "constraint=controller", "vocabulary", "spec_lab.constrain.control.Controller", "constrain",
        "spec_lab/constrain/controllers/choices.py",
        ("spec_lab.constrain.control.Event", "spec_lab.constrain.control.Branch"),
    ),
    Contract(
        "policy", "policy", "proposer, target", "spec_lab.policy.policy.Policy", "propose", "spec_lab/policy/depths.py",
        ("spec_lab.policy.policy.DraftOutcome", "spec_lab.core.limit.Limit", "spec_lab.core.limit.StopRule"),
    ),
    Contract(
        "metric", "metrics", "tables, arm", "spec_lab.analysis.metrics.texts.distinct", "metrics",
        "docs/tutorials/write_a_metric.md", ("spec_lab.results.writer.Tables",),
    ),
    Contract("prompts", "prompts", "", "spec_lab.text.prompts.Prompt", "spec_lab", "spec_lab/text/prompts.py"),
    Contract(
        "tracker", "tracker", "", "spec_lab.analysis.tracking.tracker.Tracker", "metrics",
        "spec_lab/analysis/tracking/tracker.py",
    ),
    Contract(
        "recipe", "task.recipe of an experiment", "target, paths and seed in begin", "spec_lab.train.recipe.Recipe",
        "propose", "spec_lab/drafters/mtp/train.py",
        (
            "spec_lab.train.recipe.Beginning", "spec_lab.train.chain.ChainObjective", "spec_lab.train.chain.Drafts",
            "spec_lab.train.chain.Unrolled", "spec_lab.train.texts.Texts",
        ),
    ),
    Contract("experiment", "experiment", "", "", "", "conf/experiment/ngram_chain.yaml"),
)  # fmt: skip
"""Each kind of part that users write."""

TABLE = re.compile(r"(<!-- parts -->\n).*?(<!-- end -->)", re.DOTALL)


def find(name: str) -> Contract | None:
    """Return the contract of this name."""
    return next((contract for contract in CONTRACTS if contract.name == name), None)


def with_table(text: str) -> str:
    """Return docs/reference/extending.md with the table of all parts between its comments."""
    return TABLE.sub(lambda match: match[1] + "\n".join(_table()) + f"\n{match[2]}", text)


def _table() -> Iterator[str]:
    yield from ("| part | config group | is given | contract | small example |", "|---|---|---|---|---|")
    for contract in CONTRACTS:
        given = f"`{contract.given}`" if re.fullmatch(r"[\w, ]+", contract.given) else "nothing"
        label = contract.kind.rpartition(".")[2]
        kind = f"[`{label}`](api/{contract.page}.md#{label.lower()})" if label else "values for other options"
        file = contract.example
        example = (
            f"[`{file.rpartition('/')[2]}`]({file.replace('docs/', '../') if file[:5] == 'docs/' else f'../../{file}'})"
        )
        yield f"| {contract.name} | `{contract.group}` | {given} | {kind} | {example} |"
