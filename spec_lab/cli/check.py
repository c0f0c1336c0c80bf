"""``spec-lab check``: build the parts that a config names for toys, and print whether they are what they declare."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from textwrap import wrap
from typing import Any

from omegaconf import DictConfig

from spec_lab.cli.build import apply_constraint, build, under_policy
from spec_lab.cli.config_checks import chosen
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
        ValueError: a constraint that is built for the target alone has no toy version.
    """
    verifier = build(config, "verifier")
    load = cache(partial(build, config, "target"))
    applied = _applied(config, load)
    results = check(verifier, _proposer(config, load), applied)
    print("\n".join(line for result in results for line in result.lines(COLUMNS)))
    left_out = verifier.accepts.intersection(["gumbel"]).difference(result.drawn for result in results)
    if left_out and config.proposer.get("_target_") == NONE:
        print("\n".join(wrap(f"drafts of a reference (gumbel) + {verifier.name}: {NOT_ENUMERATED}", COLUMNS)))
    if not results:
        print(f"verifier '{verifier.name}' accepts no way of drawing, so nothing can be checked: name some in accepts")
    return int(not results or any(result.failed for result in results))


def _applied(config: DictConfig, load: Callable[[], Any]) -> Any:
    """Return the applied constraint: built for the tokens of toys where it can be, else for the target's; or None."""
    try:
        return apply_constraint(config, config, None, toy_vocabulary)[0]
    except Refused as error:
        _loading(config, "constraint", error)
        return apply_constraint(config, config, load())[0]


def _proposer(config: DictConfig, load: Callable[[], Any]) -> Any:
    """Return the composed proposer under its policy: built for toys where it can be, else for the target; or None."""
    if config.proposer.get("_target_") == NONE:
        return None
    set_auto_depths(config.proposer)

    def make(target: Any) -> Any:
        return under_policy(config, "policy", build(config, "proposer", target=target), target=target)

    try:
        return Rebuilt.of(make)
    except Refused as error:
        _loading(config, "proposer", error)
    return make(load())


def _loading(config: DictConfig, part: str, error: Refused) -> None:
    """Say that the target is loaded since a part cannot be built for toys; with ``verbose`` why it cannot."""
    target = "/".join(Path(str(config.target.get("path") or config.target.get("_target_"))).parts[-2:])
    why = f" (for a toy: {reason(error).removeprefix('spec_lab: ')})" if config.get("verbose") else ""
    name = chosen(part, str(config[part].get("_target_")))
    print(f"Loading {target} to build {name}, whose toy() is then checked{why}", file=sys.stderr)


def set_auto_depths(proposer: DictConfig) -> None:
    """Set depths that timing would choose, those of parts too, to the length of a toy model's drafts."""
    if proposer.get("depth") == "auto":
        proposer.depth = MIN_TOKENS
    for part in (*(proposer.get("parts") or {}).values(), proposer.get("inner")):
        if isinstance(part, DictConfig):
            set_auto_depths(part)
