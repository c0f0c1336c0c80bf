"""``spec-lab check``: build the parts that a config names for toys, and print whether they are what they declare."""

from __future__ import annotations

import sys
from textwrap import wrap
from typing import Any

from omegaconf import DictConfig

from spec_lab.cli.build import apply_constraint, build, under_policy
from spec_lab.cli.refusals import Refused, reason
from spec_lab.tasks.certify.check import COLUMNS, Rebuilt, check, toy_vocabulary
from spec_lab.tasks.certify.exact import MIN_TOKENS

NONE = "spec_lab.propose.Null.load"

NOT_ENUMERATED = "NOT CHECKED: Gumbel noise cannot be enumerated; +experiment=certify draws samples of it"


def check_parts(config: DictConfig) -> int:
    """Check the composed parts, and print the results; return the exit code: 0, or 1 where a part is not what it
    declares, or cannot be checked.

    Raises:
        Refused: a part cannot be built.
    """
    verifier = build(config, "verifier")
    applied, _ = apply_constraint(config, config, None, toy_vocabulary)
    results = check(verifier, _proposer(config), applied)
    print("\n".join(line for result in results for line in result.lines(COLUMNS)))
    left_out = verifier.accepts.intersection(["gumbel"]).difference(result.drawn for result in results)
    if left_out and config.proposer.get("_target_") == NONE:
        print("\n".join(wrap(f"drafts of a reference (gumbel) + {verifier.name}: {NOT_ENUMERATED}", COLUMNS)))
    if not results:
        print(f"verifier '{verifier.name}' accepts no way of drawing, so nothing can be checked: name some in accepts")
    return int(not results or any(result.failed for result in results))


def _proposer(config: DictConfig) -> Any:
    """Return the composed proposer under its policy: built for toys where it can be, else for the target; or None."""
    if config.proposer.get("_target_") == NONE:
        return None
    set_auto_depths(config.proposer)

    def make(target: Any) -> Any:
        return under_policy(config, "policy", build(config, "proposer", target=target), target=target)

    try:
        return Rebuilt.of(make)
    except Refused as error:
        name = config.target.get("path") or config.target.get("_target_")
        why = reason(error).removeprefix("spec_lab: ")
        print(f"Loading {name}, since the proposer cannot be built for a toy target ({why})", file=sys.stderr)
    return make(build(config, "target"))


def set_auto_depths(proposer: DictConfig) -> None:
    """Set depths that timing would choose, those of parts too, to the length of a toy model's drafts."""
    if proposer.get("depth") == "auto":
        proposer.depth = MIN_TOKENS
    for part in (*(proposer.get("parts") or {}).values(), proposer.get("inner")):
        if isinstance(part, DictConfig):
            set_auto_depths(part)
