"""The terminal tables and the figures of the verifier study."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from spec_lab.analysis import figures
from spec_lab.analysis.figures.verifiers import OUTCOME
from spec_lab.analysis.names import arm_names, renamed
from spec_lab.analysis.show import bounds_notes


def print_summary(summary: Mapping[str, Any], console: Console) -> None:
    """Print ``summary.json`` as tables."""
    console.print(
        f"{summary['experiment']}: {summary['requests']} prompts, {summary['tokens']} tokens of the target at "
        f"temperature {summary['temperature']:g}, a draft every {summary['every']} tokens; 95 % intervals over prompts",
        style="bold",
        highlight=False,
    )
    proposers = {name: one for name, one in _by_shown_name(summary).items() if one["drafts"]}
    for name, one in proposers.items():
        console.print(_accepted(name, one))
    if proposers:
        console.print(_time(proposers))
    for line in (_notes(summary), *bounds_notes(renamed(summary.get("bounds", {}), _shown_names(summary)))):
        console.print(line, highlight=False)


def _by_shown_name(summary: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the numbers of each proposer, by the name under which its arm is shown."""
    return renamed(summary["proposers"], _shown_names(summary))


def _shown_names(summary: Mapping[str, Any]) -> dict[str, str]:
    return arm_names({arm: one["name"] for arm, one in summary["proposers"].items()})


def _accepted(name: str, proposer: Mapping[str, Any]) -> Table:
    kind = "" if name == proposer["name"] else f"{proposer['name']} "
    table = _table(
        f"{name}: {kind}drawn {proposer['drawn']}, {proposer['drafted_per_draft']:.3g} nodes, "
        f"{proposer['drafts']} drafts, bound {_interval(proposer['bound'])}"
    )
    table.add_column("verifier", no_wrap=True)
    for heading in ("expected accepted", f"minus {proposer['compared_with']}", "of the bound"):
        table.add_column(heading, justify="right", no_wrap=True)
    for verifier, one in proposer["verifiers"].items():
        table.add_row(
            figures.verifier_label(verifier, one),
            _interval(one["expected_accepted"]),
            "" if verifier == proposer["compared_with"] else _interval(one["difference"], "+.3f"),
            _interval(one["share_of_bound"]),
        )
    return table


def _time(proposers: Mapping[str, Mapping[str, Any]]) -> Table:
    table = _table("Microseconds of verification and choice, and their share of the target's forward")
    table.add_column("verifier", no_wrap=True)
    for name in proposers:
        table.add_column(name, justify="right")
    table.add_row("target", *(f"{one['target_forward_us']:.0f}" for one in proposers.values()))
    table.add_row(
        "probabilities",
        *(
            _spent(one["probabilities_us"], one["probabilities_us"] / one["target_forward_us"])
            for one in proposers.values()
        ),
    )
    for verifier in dict.fromkeys(key for one in proposers.values() for key in one["verifiers"]):
        each = [one["verifiers"].get(verifier) for one in proposers.values()]
        table.add_row(
            verifier,
            *("" if one is None else _spent(one["verify_us"]["median"], one["share_of_forward"]) for one in each),
        )
    return table


def _notes(summary: Mapping[str, Any]) -> str:
    lines = [
        "Expected accepted: tokens per draft, from the verifier's exact probabilities given the draft; mean "
        "over sampled drafts. bound: the largest probability that at least one token is accepted, by optimal "
        "transport; of the bound: the verifier's probability, as a share of it. Lossy verifiers may exceed the bound, "
        "lossless ones by the sampling error of the drafts only. Times are medians, with p in the processor's cache."
    ]
    every = [one for proposer in summary["proposers"].values() for one in proposer["verifiers"].values()]
    if any(one["kind"] == OUTCOME for one in every):
        lines.append(
            "*: a sampled outcome. The noise of the draft determines what is accepted, so these are means of outcomes "
            "rather than of probabilities, with a larger sampling error."
        )
    left_out: dict[str, list[str]] = {}
    names = _shown_names(summary)
    for one in summary["left_out"]:
        left_out.setdefault(f"{names[one['proposer']]} (drawn {one['drawn']})", []).append(one["verifier"])
    if left_out:
        pairs = "; ".join(f"{proposer}: {', '.join(names)}" for proposer, names in left_out.items())
        lines.append(f"Left out, as the verifiers do not support such drafts: {pairs}.")
    if summary["errors"]:
        lines.append(f"{len(summary['errors'])} prompts had errors: see 'errors' in summary.json.")
    return "\n".join(lines)


def _table(title: str) -> Table:
    return Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False, padding=0)


def _spent(microseconds: float, share: float) -> str:
    return f"{microseconds:.0f} ({share:.1%})"


def _interval(value: Mapping[str, float | None], form: str = ".2f") -> str:
    mean = _number(value["mean"], form)
    return mean if value["low"] is None else f"{mean} [{value['low']:{form}}, {value['high']:{form}}]"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def draw(summary: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw the figures for which there are data; return the files."""
    return figures.save(figures.verifier_figures(_by_shown_name(summary)), folder, ("png",))
