"""Speculative modes: what is tried, how a mode is written on a command line and as a preset, and which family has it.

A family is recorded once, with a large draft. Replay then judges its smaller drafts (``replay.subtrees``), and a
judged subtree is turned into the options that draft it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spec_lab.core.options import WrongOption, brief
from spec_lab.propose.trees import Choices, parse
from spec_lab.replay.subtrees import UNLIMITED, Subtree, short

NONE = "none"
"""The mode without speculation, as ``summary.json`` names it."""


@dataclass(frozen=True)
class SpeculativeMode:
    """A proposer with its options, under a policy.

    Args:
        proposer: name of a file of ``conf/proposer``.
        options: its options; ``parts`` names the proposer of each part of a hybrid that differs from the file's, with
            its options.
        policy: name of a file of ``conf/policy``.
        policy_options: its options.
    """

    proposer: str
    options: Mapping[str, Any] = field(default_factory=dict)
    policy: str = "none"
    policy_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name in tables and rows: what differs from the default of ``conf/``."""
        parts = [
            f"{slot}{'' if name == 'proposer' else f'.{name}'}={_value(value)}"
            for slot, part in self.options.get("parts", {}).items()
            for name, value in part.items()
        ]
        given = [f"{name}={_value(value)}" for name, value in self.options.items() if name != "parts"]
        policy = [] if self.policy == "none" else [f"policy={self.policy}"]
        policy += [f"{name}={_value(value)}" for name, value in self.policy_options.items()]
        return " ".join([self.proposer, *parts, *given, *policy]).replace("policy=fixed depth", "policy.depth")

    @property
    def overrides(self) -> list[str]:
        """The options of the command line."""
        lines = [f"proposer={self.proposer}"]
        for slot, part in self.options.get("parts", {}).items():
            lines.append(f"proposer@proposer.parts.{slot}={part['proposer']}")
            lines += [f"proposer.parts.{slot}.{name}={_value(part[name])}" for name in part if name != "proposer"]
        lines += [f"proposer.{name}={_value(value)}" for name, value in self.options.items() if name != "parts"]
        if self.policy != "none":
            lines.append(f"policy={self.policy}")
        return lines + [f"policy.{name}={_value(value)}" for name, value in self.policy_options.items()]

    def preset(self, comment: str) -> str:
        """Return the text of a file of ``conf/experiment`` that runs the mode.

        Args:
            comment: a sentence on the mode.
        """
        slots = self.options.get("parts", {})
        options = {name: value for name, value in self.options.items() if name != "parts"}
        inner = {slot: {name: part[name] for name in part if name != "proposer"} for slot, part in slots.items()}
        if any(inner.values()):
            options["parts"] = {slot: given for slot, given in inner.items() if given}
        lines = ["# @package _global_", f"# {comment}", "defaults:", "  - _self_",
                 f"  - override /proposer: {self.proposer}", f"  - override /policy: {self.policy}"]  # fmt: skip
        lines += [f"  - override /proposer@proposer.parts.{slot}: {part['proposer']}" for slot, part in slots.items()]
        lines += ["", "name: recommended"]
        lines += [f"proposer: {json.dumps(options)}"] * bool(options)
        lines += [f"policy: {json.dumps(dict(self.policy_options))}"] * bool(self.policy_options)
        return "\n".join([*lines, ""])


def _value(value: Any) -> str:
    """Return a value as the command line writes it; a text that reads as a number is quoted."""
    if isinstance(value, str):
        return f'"{value}"' if re.fullmatch(r"[\d.]+", value) else value
    return json.dumps(value)


@dataclass(frozen=True)
class ModeFamily:
    """Modes that are judged on one recording.

    Args:
        mode: the recorded one.
        limits: limits of a subtree that are options, ``depth`` or ``nodes``. Another depth is limited by
            ``policy=fixed``, which drafts the same tree without its lower levels.
        tree: the option that names a static tree; empty for none.
    """

    mode: SpeculativeMode
    limits: Collection[str] = ()
    tree: str = ""

    def limited(self, subtree: Subtree) -> SpeculativeMode | None:
        """Return the mode that drafts only a subtree of what was recorded; None if no option does."""
        given = {name: limit for name, limit in subtree.limits.items() if limit != UNLIMITED}
        options = dict(self.mode.options)
        if self.tree:
            kept = _kept(parse(options[self.tree]), **given)
            return SpeculativeMode(self.mode.proposer, options | {self.tree: short(kept)}) if kept else None
        policy: tuple[Any, ...] = (self.mode.policy, self.mode.policy_options)
        for limit, value in given.items():
            if limit in self.limits:
                options[limit] = value
            elif limit == "depth":
                policy = ("fixed", {"depth": value})
            else:
                return None
        return SpeculativeMode(self.mode.proposer, options, *policy)


def _kept(tree: Choices, depth: int = UNLIMITED, children: int = UNLIMITED, nodes: int = UNLIMITED) -> Choices:
    """Return the nodes of a static tree within the limits of a subtree."""
    within = [path for path in tree if len(path) <= depth and max(path) < children]
    return tuple(within[:nodes])


def _family(proposer: str, **options: Any) -> ModeFamily:
    """Return the family of a mode: its depth is an option, or its tree as widths, or neither."""
    tree = "tree" * bool(re.fullmatch(r"[\dx]+", str(options.get("tree"))))
    limits = [name for name in ("depth", *["nodes"] * (proposer == "ngram_tree")) if options.get(name)]
    return ModeFamily(SpeculativeMode(proposer, options), limits, tree)


LOOKED_UP = {"suffix": {"proposer": "suffix", "depth": 8}, "heads": {"proposer": "recycling", "tree": "4x2x1"}}
"""The parts of the union that needs no files: text looked up, and the likeliest tokens of computed rows."""

SMALL_CACHE = _family("sparse_kv", budget=256, depth=4)
"""The target on a small KV cache, tried where the prompts are long enough (``limits.why_no_small_cache``)."""

WITHOUT_FILES = (
    _family("ngram", depth=16),
    _family("suffix", depth=16),
    _family("recycling", tree="4x2x1x1"),
    _family("ngram_tree", nodes=24, depth=8),
    _family("union", parts=LOOKED_UP),
    _family("early_exit", depth=4),
    _family("lookahead"),
    _family("pld_plus", depth=16),
    _family("skip", depth=4),
    _family("jacobi", depth=8),
    SMALL_CACHE,
)
"""Families that need no files, those first that cost least to record and are most often the fastest."""

VARIANTS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "draft_chain": [{"depth": 8, "confidence": confidence} for confidence in (0, 0.4, 0.7)],
    "medusa": [{"tree": "likeliest", "max_nodes": 32}, {"tree": "4x2x1"}, {"tree": "1x1x1x1"}],
    "eagle": [{}, {"nodes": None, "rerank": False, "depth": 6}],
}
"""How drafters that the user names are recorded; others once, as their files of ``conf/proposer`` have it."""


def families_of(drafters: Sequence[Any]) -> list[ModeFamily]:
    """Return the families of drafters that a user names.

    Args:
        drafters: each a name of ``conf/proposer``, such as "medusa", with a path, "eagle:PATH", or a mapping of the
            proposer and its options, {proposer: eagle, path: PATH, depth: 5}, which is taken as it is.

    Raises:
        WrongOption: something else.
    """
    families = []
    for number, drafter in enumerate(drafters):
        if isinstance(drafter, Mapping):
            given = {str(name): value for name, value in drafter.items()}
            named, variants = given.pop("proposer", None), [given]
        else:
            named, _, path = str(drafter).partition(":")
            variants = [{**({"path": path} if path else {}), **options} for options in VARIANTS.get(named, [{}])]
        if not isinstance(named, str) or not re.fullmatch(r"\w+", named):
            raise WrongOption(
                f"drafters[{number}] must be NAME, NAME:PATH or {{proposer: NAME, path: PATH}}, with the name of a "
                f"proposer such as eagle (got {brief(drafter)})"
            )
        families += [_family(named, **options) for options in variants]
    return families
