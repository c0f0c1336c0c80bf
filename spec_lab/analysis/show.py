"""The table at a run's end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from spec_lab.analysis.metrics import PHASES


def show(summary: Mapping[str, Any], console: Console) -> None:
    """Print what ``summary.json`` says."""
    console.print(_arms(summary))
    if summary["against"]:
        console.print(_against(summary))
    if any(arm["survival"] for arm in summary["arms"].values()):
        console.print(_depths(summary))
    console.print(_time(summary))
    console.print(_notes(summary), highlight=False)


def chosen_trees(now: Mapping[str, Mapping[str, Any]], begun: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each arm whose draft tree was chosen by measured costs: the tree, and the option that repeats it.

    Args:
        now: what the proposers say of themselves, by arm.
        begun: what the manifest says of them; for a resumed run, what they said when it began.
    """
    lines = []
    for arm, facts in begun.items():
        if "costs_measured" not in facts:
            continue
        tree, option = facts["tree"], "proposer.tree" if arm == "speculative" else f"arms.{arm}.tree"
        depth = 0 if tree == "none" else max(path.count(".") + 1 for path in tree.split())
        busy = not facts.get("costs_steady", True)
        if "costs_measured" not in now.get(arm, {}):
            origin = "chosen when this run began" + (", calibrated on a busy machine" if busy else "")
        elif facts["costs"] == "cached":
            origin = f"step costs from the cache, measured {facts['costs_measured']}"
        else:
            origin = "step costs measured now" + (", calibrated on a busy machine and not kept" if busy else "")
        lines.append(
            f"{arm}: calibrated tree of {facts['nodes']} nodes, {depth} deep, expected tau "
            f"{facts['expected_tokens']:.2f} ({origin}); repeat it with {option}='{tree}'"
        )
    return lines


def _arms(summary: Mapping[str, Any]) -> Table:
    what = summary["experiment"]
    if summary["proposer"] is not None:
        what = f"{what}: {summary['proposer']}, verifier {summary['verifier']}"
    setting = f"temperature {summary['temperature']:g}, batch {summary['batch_size']}, {summary['requests']} prompts"
    table = _table(f"{what}, {setting}")
    table.add_column("arm")
    for name in ("tokens/s", "speed-up [95 %]", "tau", "uncut", "E tau", "nodes", "overhead", "loops"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, arm in summary["arms"].items():
        table.add_row(
            name,
            _number(arm["tokens_per_second"], ".1f"),
            "1" if name == "baseline" else _interval(arm["speedup"]),
            _number(arm["tau_pooled"], ".2f"),
            _number(arm["tau_pooled_raw"], ".2f"),
            _number(arm["expected_tau"], ".2f"),
            _number(arm["nodes_per_step"], ".1f"),
            _number(arm["overhead"], ".1%"),
            _number(arm["repeated_8gram_share"], ".1%"),
        )
    return table


def _against(summary: Mapping[str, Any]) -> Table:
    table = _table("Times the tokens/s of ... [95 %]")
    table.add_column("arm")
    for peer in summary["against"]:
        table.add_column(peer, justify="right")
    for arm in next(iter(summary["against"].values())):
        table.add_row(arm, *(_interval(ratios[arm]) for ratios in summary["against"].values()))
    return table


def _depths(summary: Mapping[str, Any]) -> Table:
    table = _table("Acceptance by depth")
    table.add_column("arm")
    table.add_column("")
    arms = {name: arm for name, arm in summary["arms"].items() if arm["survival"]}
    deepest = max(len(arm["survival"]) for arm in arms.values())
    for depth in range(1, deepest + 1):
        table.add_column(str(depth), justify="right")
    for name, arm in arms.items():
        for kind in ("survival", "conditional"):
            table.add_row(name if kind == "survival" else "", kind, *(_number(rate, ".2f") for rate in arm[kind]))
    return table


def _time(summary: Mapping[str, Any]) -> Table:
    table = _table("Where decode time goes: seconds and share")
    table.add_column("phase")
    arms = {name: arm for name, arm in summary["arms"].items() if arm["decode_seconds"]}
    for name in arms:
        table.add_column(name, justify="right")
    for phase, what in PHASES.items():
        if any(arm["phase_seconds"][phase] for arm in arms.values()):
            spent = [(arm["phase_seconds"][phase], arm["decode_seconds"]) for arm in arms.values()]
            table.add_row(what, *(f"{part:.2f} {part / whole:6.1%}" for part, whole in spent))
    return table


def _notes(summary: Mapping[str, Any]) -> str:
    lines = [
        f"{summary['tokens']} tokens in {summary['steps']} steps; prefill is left out of speed and tau. "
        "tau: tokens per step, the one after the accepted ones included. uncut: tau before stop tokens and limits cut. "
        "E tau: uncut as expected from the exact acceptance probabilities. nodes: drafted per step. "
        "loops: share of 8-grams that occurred before in the same output.",
        *_given_noise(summary),
        *_calibration(summary),
        _prefill(summary),
        *_certified(summary),
    ]
    if summary["temperature"] == 0:
        lines += _identical(summary)
    if summary["speedup"]["mean"] is None and len(summary["arms"]) == 1:
        lines.append("One arm only, so no speed-up was measured.")
    if summary["short_groups"] and any(arm["speedup"]["mean"] is not None for arm in summary["arms"].values()):
        lines.append("The last group has fewer prompts than the others: it is left out of the speed-ups.")
    if summary["broken_groups"]:
        lines.append(
            f"In {summary['broken_groups']} of {summary['groups']} groups a request broke: they are left out of speeds "
            "and of the comparison of outputs; see 'errors' in summary.json."
        )
    return "\n".join(lines)


def _identical(summary: Mapping[str, Any]) -> list[str]:
    """Whether the arms' outputs are the baseline's; nothing where none was compared."""
    shares = {name: arm["identical_outputs"] for name, arm in summary["arms"].items()}
    compared = {name: share for name, share in shares.items() if share is not None}
    less = [f"{name} {share:.1%}" for name, share in compared.items() if share < 1]
    if not less:
        return ["All outputs are identical to the baseline's."] if compared else []
    others = "; every other arm 100 %" if len(less) < len(compared) else ""
    return [f"Outputs identical to the baseline's: {', '.join(less)} of the prompts{others}."]


def _given_noise(summary: Mapping[str, Any]) -> list[str]:
    """Which arms' expectations are no expectations."""
    arms = [name for name, arm in summary["arms"].items() if arm["expected_kind"] == "noise"]
    return [f"E tau of {', '.join(arms)} is given the noise that draft and target share: it equals uncut."] * bool(arms)


def _calibration(summary: Mapping[str, Any]) -> list[str]:
    """What exact expectations are worth beside samples, and where the two disagree."""
    found = {name: arm["calibration"] for name, arm in summary["arms"].items()}
    factors = [f"{name} {one['variance_reduction']:.1f}" for name, one in found.items() if one["variance_reduction"]]
    lines = [f"Of E tau the variance over groups is smaller than of uncut, by a factor: {', '.join(factors)}."]
    off = [
        f"{name} {one['mean']:+.3f} [{one['low']:+.3f}, {one['high']:+.3f}]"
        for name, one in found.items()
        if one["low"] is not None and not one["low"] <= 0 <= one["high"]
    ]
    return lines * bool(factors) + [f"Uncut differs from E tau: {', '.join(off)}."] * bool(off)


def _certified(summary: Mapping[str, Any]) -> list[str]:
    """Whether the arms have the target's law."""
    lines, proved = [], []
    for name, arm in summary["arms"].items():
        certificate = arm.get("certificate")
        if certificate is None:
            continue
        failure = certificate.get("failure")
        if arm["certified"]:
            proved.append(name)
        elif failure and arm["lossless"]:
            lines.append(
                f"NOT LOSSLESS: {name} with verifier '{arm['verifier']}', which declares itself lossless: {failure}."
            )
        elif not arm["lossless"]:
            lines.append(f"Lossy: {name}; verifier '{arm['verifier']}' does not keep the target's law.")
        else:
            why = "; ".join(certificate["missing"])
            lines.append(f"Not enumerated: {name} ({why}); +experiment=certify tests it by samples.")
    if proved:
        lines.append(f"Lossless by enumeration on toys: {', '.join(proved)}. +experiment=certify proves more.")
    return lines


def _prefill(summary: Mapping[str, Any]) -> str:
    took, speedup = f"The prefill took {summary['prefill_seconds']:.2f} s", summary["speedup_with_prefill"]
    return f"{took}." if speedup["mean"] is None else f"{took}; counted in, the speed-up is {_interval(speedup)}."


def _table(title: str) -> Table:
    return Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False, padding=0)


def _interval(speedup: Mapping[str, float | None]) -> str:
    mean = _number(speedup["mean"], ".2f")
    return mean if speedup["low"] is None else f"{mean} [{speedup['low']:.2f}, {speedup['high']:.2f}]"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
