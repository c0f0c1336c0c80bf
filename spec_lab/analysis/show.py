"""The tables at a run's end, in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from spec_lab.analysis.metrics import PHASES
from spec_lab.analysis.names import arm_names, renamed
from spec_lab.analysis.roofline_text import roofline_notes
from spec_lab.analysis.text import (
    COLUMNS,
    WIDE,
    accuracy_notes,
    cache_notes,
    interval,
    kv_notes,
    losslessness,
    margin_notes,
    number,
    table,
    verdict_line,
)
from spec_lab.core.terminal import visible
from spec_lab.results.manifest import with_parts

Arm = Mapping[str, Any]
FIGURES = (
    "tokens_per_second", "speedup", "tau_pooled", "draft_token_rate", "time_to_first_token", "time_per_output_token",
)  # fmt: skip
MORE_FIGURES = ("tau_pooled_raw", "expected_tau", "nodes_per_step", "overhead", "repeated_8gram_share")


def show(summary: Mapping[str, Any], console: Console, verbose: bool = False) -> None:
    """Print the contents of ``summary.json``.

    Args:
        summary: the contents.
        console: where it is printed.
        verbose: print every column; a console of ``WIDE`` columns or more does so anyway.
    """
    names = arm_names({arm: figures.get("proposer") for arm, figures in summary["arms"].items()})
    against = {peer: renamed(speedups, names) for peer, speedups in (summary["against"] or {}).items()}
    by_arm = ("output_margins", "cached_prompt_shares", "bounds")
    renamed_too = {name: renamed(summary.get(name, {}), names) for name in by_arm}
    summary = {**summary, "arms": renamed(summary["arms"], names), "against": against, **renamed_too}
    verbose = verbose or console.width >= WIDE
    wide = console.width >= WIDE
    console.print(verdict_line(summary), highlight=False)
    console.print(_arms(_title(summary), (*FIGURES, *MORE_FIGURES) if wide else FIGURES, summary["arms"]))
    if verbose and not wide:
        console.print(_arms("More figures", MORE_FIGURES, summary["arms"]))
    if summary["against"]:
        console.print(_peers(summary))
    if any(arm["survival"] for arm in summary["arms"].values()):
        console.print(_depths(summary, verbose, console.width))
    for one in _phases(summary, verbose, console.width):
        console.print(one)
    console.print("\n".join(_notes(summary, verbose)), highlight=False)


def chosen_trees(now: Mapping[str, Arm], begun: Mapping[str, Arm]) -> list[str]:
    """Return a line for each arm, and each part of a hybrid, whose draft tree was chosen by measured costs, with the
    option that repeats it.

    Args:
        now: the proposers' facts, by arm, the main arm first.
        begun: the same in the manifest; of a resumed run, from when it began.
    """
    lines, names = [], arm_names({arm: facts.get("name") for arm, facts in begun.items()})
    main, now = next(iter(begun), ""), with_parts(now)
    for name, facts in with_parts(begun).items():
        if "costs_measured" not in facts:
            continue
        arm, dot, part = name.partition(".")
        tree, option = facts["tree"], f"{'proposer' if arm == main else f'arms.{arm}'}{dot}{part}.tree"
        depth = 0 if tree == "none" else max(path.count(".") + 1 for path in tree.split())
        busy = "" if facts.get("costs_steady", True) else ", on a busy machine"
        if "costs_measured" not in now.get(name, {}):
            origin = f"chosen when this run began{busy}"
        elif facts["costs"] == "cached":
            origin = f"step costs from the cache, measured {facts['costs_measured']}"
        else:
            origin = f"step costs measured now{busy}{' and not cached' if busy else ''}"
        lines.append(
            f"{names[arm]}{dot}{part}: calibrated tree of {facts['nodes']} nodes, depth {depth}, expected tau "
            f"{facts['expected_tokens']:.2f} ({origin}); repeat it with {option}='{tree}'"
        )
    return lines


def _title(summary: Mapping[str, Any]) -> str:
    parts = [f"temperature {summary['temperature']:g}", f"batch size {summary['batch_size']}"]
    if summary["proposer"] is not None:
        parts.insert(0, f"{summary['proposer']}, verifier {summary['verifier']}")
    return f"{summary['experiment']}: {', '.join(parts)}, {summary['requests']} prompts"


def _arms(title: str, names: Sequence[str], arms: Mapping[str, Arm]) -> Table:
    shown = table(visible(title))
    shown.add_column("arm", overflow="fold")
    for name in names:
        shown.add_column(COLUMNS[name].heading, justify="right")
    for arm, figures in arms.items():  # a summary of an older version may lack figures
        shown.add_row(visible(arm), *(COLUMNS[name].text(figures.get(name)) for name in names))
    return shown


def _peers(summary: Mapping[str, Any]) -> Table:
    shown = table("Speed-up over peers [95 %]")
    for name in ("arm", *summary["against"]):
        shown.add_column(name, justify="left" if name == "arm" else "right")
    for arm in next(iter(summary["against"].values())):
        shown.add_row(visible(arm), *(interval(speedups[arm]) for speedups in summary["against"].values()))
    return shown


def _depths(summary: Mapping[str, Any], verbose: bool, width: int) -> Table:
    kinds = ("survival", "conditional") if verbose else ("survival",)
    shown = table("Acceptance by depth: survival, the share of steps that accepted k tokens or more")
    shown.add_column("arm", overflow="fold")
    shown.add_column("")
    arms = {name: arm for name, arm in summary["arms"].items() if arm["survival"]}
    fitting = (width - 14 - max(map(len, arms))) // 5
    deepest = min(max(len(arm["survival"]) for arm in arms.values()), max(fitting, 1))
    for depth in range(1, deepest + 1):
        shown.add_column(str(depth), justify="right")
    for name, arm in arms.items():
        for kind in kinds:
            rates = (number(rate) for rate in arm[kind][:deepest])
            shown.add_row(visible(name) if kind == "survival" else "", kind, *rates)
    return shown


def _phases(summary: Mapping[str, Any], verbose: bool, width: int) -> Iterator[Table]:
    """Yield a table for as many arms as fit the width, then one for the next ones."""
    arms = {name: arm for name, arm in summary["arms"].items() if arm["decode_seconds"]}
    phases = {phase: label for phase, label in PHASES.items() if any(a["phase_seconds"][phase] for a in arms.values())}
    labels, column = max(map(len, phases.values()), default=0), max((6 + 6 * verbose, *map(len, arms))) + 2
    most = max(1, (width - labels) // column)
    for start in range(0, len(arms), most):
        shown = table("Decode time by phase" + ": seconds and share" * verbose + ", continued" * (start > 0))
        shown.add_column("phase")
        own = dict(list(arms.items())[start : start + most])
        for name in own:
            shown.add_column(visible(name), justify="right", overflow="fold")
        for phase, label in phases.items():
            parts = [(arm["phase_seconds"][phase], arm["decode_seconds"]) for arm in own.values()]
            shown.add_row(label, *(f"{part:.2f} " * verbose + f"{part / total:6.1%}" for part, total in parts))
        yield shown


def _notes(summary: Mapping[str, Any], verbose: bool) -> list[str]:
    """Return the definitions of the columns, and what a reader must know of this run."""
    arms, with_prefill = summary["arms"], summary["speedup_with_prefill"]
    measured = any(arm["speedup"]["mean"] is not None for arm in arms.values())
    prefill = f"The prefill took {summary['prefill_seconds']:.2f} s"
    lines = [
        "speed-up: total tokens/s over the baseline's on the same groups of prompts. tau: tokens per step, bonus "
        "included. acceptance rate: accepted / drafted tokens. TTFT, TPOT: mean time to the first token, per output "
        "token. Speed-up, tokens/s and tau leave out the prefill.",
        *(["untruncated tau: before stop tokens and limits cut. expected tau: untruncated, from the exact acceptance "
           "probabilities. overhead: share of decode time outside module calls. repeated 8-grams: share that occurred "
           "before in the same output."] * verbose),
        *(_estimates(arms) if verbose else []),
        f"{prefill}." if with_prefill["mean"] is None else
        f"{prefill}; with the prefill, the speed-up is {interval(with_prefill)}.",
        *kv_notes(summary.get("kv_dtype")),
        *cache_notes(summary.get("cached_prompt_shares", {})),
        *roofline_notes(arms, summary.get("roofline")),
        *(f"Policy of {name}: {visible(arm['decisions'])}." for name, arm in arms.items() if arm.get("decisions")),
        *_losslessness(arms),
        *_cut(summary.get("answers")),
        *accuracy_notes(arms),
        *bounds_notes(summary.get("bounds", {})),
        *(_identical(arms, summary.get("output_margins", {})) if summary["temperature"] == 0 else []),
    ]  # fmt: skip
    if not measured and len(arms) == 1:
        lines.append("One arm only, so no speed-up was measured.")
    if summary["short_groups"] and measured:
        lines.append("The last group has fewer prompts than the others: it is left out of all speeds.")
    if repeated := summary.get("repeated_groups"):
        lines.append(f"Decoded again, because they were disturbed: groups {', '.join(repeated)}.")
    if summary["broken_groups"]:
        lines.append(
            f"In {summary['broken_groups']} of {summary['groups']} groups a request broke: they are left out of speeds "
            "and of the comparison of outputs; see 'errors' in summary.json."
        )
    return lines


def _cut(answers: Mapping[str, int] | None) -> list[str]:
    """Return how many answers of conversations ended at the limit; nothing where none did."""
    if not answers or not answers["cut"]:
        return []
    continued = answers["continued"]
    later = f"; later turns continue {continued} of them as they were cut" if continued else ""
    return [
        f"{answers['cut']} of {answers['answers']} answers ended at max_new_tokens={answers['limit']}{later}. Raise "
        "max_new_tokens for whole answers."
    ]


def bounds_notes(bounds: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return why arms whose distributions were recorded have no bounds, from "bounds" of ``summary.json``."""
    return [f"No bounds of {arm}: {visible(one['needs'])}." for arm, one in bounds.items() if one.get("needs")]


def _identical(arms: Mapping[str, Arm], margins: Mapping[str, Any]) -> list[str]:
    """Return whether the arms' outputs equal the baseline's, or by what margin of logits they do not; nothing where
    none was compared.
    """
    shares = {name: arm["identical_outputs"] for name, arm in arms.items() if arm["identical_outputs"] is not None}
    different = [f"{name} {share:.1%}" for name, share in shares.items() if share < 1]
    if not different:
        return ["All outputs are identical to the baseline's."] * bool(shares)
    others = "; every other arm 100 %" if len(different) < len(shares) else ""
    return [
        f"Outputs identical to the baseline's: {', '.join(different)} of the prompts{others}.",
        *margin_notes(margins),
    ]


def _estimates(arms: Mapping[str, Arm]) -> list[str]:
    """Return how expected and untruncated tau compare."""
    lines = []
    if noise := [name for name, arm in arms.items() if arm["expected_kind"] == "noise"]:
        lines.append(
            f"expected tau of {', '.join(noise)} is conditional on the noise that draft and target share: it equals "
            "untruncated tau."
        )
    calibration = {name: arm["calibration"] for name, arm in arms.items()}
    reductions = [(name, one["variance_reduction"]) for name, one in calibration.items() if one["variance_reduction"]]
    if reductions:
        factors = ", ".join(f"{name} {factor:.1f}" for name, factor in reductions)
        lines.append(f"Variance of untruncated tau over that of expected tau, over groups: {factors}.")
    if different := [
        f"{name} {interval(one, '+.3f')}"
        for name, one in calibration.items()
        if one["low"] is not None and not one["low"] <= 0 <= one["high"]
    ]:
        lines.append(f"Untruncated tau differs from expected tau: {', '.join(different)}.")
    return lines


def _losslessness(arms: Mapping[str, Arm]) -> list[str]:
    """Return which arms preserve the target distribution, and which do not or are not certified."""
    states = {name: losslessness(arm) for name, arm in arms.items() if arm.get("certificate") is not None}
    lines = [f"{word}: {name}; {why}." for name, (word, why) in states.items() if word not in ("", "lossless")]
    if certified := [name for name, (word, _) in states.items() if word == "lossless"]:
        lines.append(f"Lossless, certified by enumeration: {', '.join(certified)}; +experiment=certify proves more.")
    return lines
