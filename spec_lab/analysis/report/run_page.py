"""The page about one run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_lab.analysis import figures, metrics
from spec_lab.analysis.metrics import Tables
from spec_lab.analysis.metrics.frames import Ranks
from spec_lab.analysis.names import names_in_manifest, renamed, with_names
from spec_lab.analysis.policy_text import policy_note
from spec_lab.analysis.report.facts import page_of_run, read_summary, temperature
from spec_lab.analysis.report.page import render
from spec_lab.analysis.report.run_tables import arms_table, bounds_table, peers_table
from spec_lab.analysis.report.token_view import token_view, verifications
from spec_lab.analysis.roofline_text import roofline_notes
from spec_lab.analysis.text import accuracy_notes, losslessness, margin_notes, verdict_line
from spec_lab.core.roofline import Roofline
from spec_lab.propose import trees
from spec_lab.results import sweep
from spec_lab.results.manifest import begun

PARTS = {
    "?proposer": (str, None),
    "?verifier": (str, None),
    "?constraint": (str, None),
    "?lossless": (bool, None),
    "?certified": (str, bool, None),
    "?certificate": (None, {"?failure": (str, None), "?missing": [str]}),
}
"""What is read of ``summary.json``."""

VALUE = {"mean": (float, None), "low": (float, None), "high": (float, None)}
BOUNDS = {
    "?needs": str,
    "?kind": str,
    "?depth": (float, None),
    "?optimum": VALUE,
    "?verifiers": {
        str: {"used": bool, "lossless": bool, "tau": VALUE, "share": VALUE, "share_first": VALUE, "lost": {str: VALUE}}
    },
}
"""What is read of an arm's ``bounds``."""

MARGIN = {"median": float, "largest": float}

SUMMARY = {**PARTS, "?arms": {str: PARTS}, "?output_margins": {str: MARGIN}, "?bounds": {str: BOUNDS}}


def page(folder: Path) -> str:
    """Return the page's text; writes the figures to ``figures/`` as well.

    Raises:
        ValueError: the directory holds no rows of a run and will hold none; files that are not readable.
    """
    manifest = begun(folder)
    if manifest is None:
        raise ValueError(f"{folder} holds no run (no manifest.json)")
    summary, tables = read_summary(folder, SUMMARY), metrics.load(folder)
    if not len(tables.requests):
        _refuse_other_task(folder)
    names = names_in_manifest(manifest)
    manifest = {**manifest, "proposers": renamed(manifest["proposers"], names)}
    tables = with_names(tables, names)
    arms, recorded = metrics.arms(tables), renamed(summary.get("arms", {}), names)
    states = {arm: recorded.get(arm, {}) for arm in arms}
    roofline = Roofline.of(manifest.get("roofline"))
    figures_of = {arm: metrics.summarise(tables, arm, roofline=roofline) for arm in arms}
    drafted = {arm: tree for arm, facts in manifest["proposers"].items() if (tree := _tree(facts.get("tree")))}
    bounds = renamed(summary.get("bounds", {}), names)
    decisions = {arm: policy_note(tables.steps, arm, facts) for arm, facts in manifest["proposers"].items()}
    content = page_of_run(
        folder,
        manifest,
        lead=_lead(manifest, summary, tables),
        warnings=_warnings(manifest, summary, tables),
        drawn=figures.run_figures(tables, drafted, bounds),
        constraint=summary.get("constraint"),
        verdict=verdict_line(metrics.run_verdict(tables, manifest).summary()),
        groups=f"{tables.requests['group'].nunique()}",
    )
    return render(
        "run",
        content,
        folder,
        arms=arms_table(figures_of, states, manifest, temperature(manifest, summary)),
        noise=any(one["expected_kind"] == "noise" for one in figures_of.values()),
        explanations=[
            (arm, why)
            for arm, state in states.items()
            if (why := losslessness(state)[1]) and not state.get("certified")
        ],
        notes=[
            *roofline_notes(figures_of, manifest.get("roofline")),
            *(f"Policy of {arm}: {note}." for arm, note in decisions.items() if note),
            *accuracy_notes(figures_of),
            *margin_notes(renamed(summary.get("output_margins", {}), names)),
        ],
        peers=peers_table(tables),
        bounds=bounds_table(bounds),
        no_bounds=[(arm, one["needs"]) for arm, one in bounds.items() if one.get("needs")],
        names=arms,
        view=token_view(folder, tables, arms, verifications(manifest, states, temperature(manifest, summary))),
        scripts=("page.js", "tokens.js"),
        styles=("page.css", "tokens.css"),
    )


def _refuse_other_task(folder: Path) -> None:
    """Refuse a directory without rows that is not a run's; a run whose first group is not finished has none yet.

    Raises:
        ValueError: another task wrote it, or it ended without rows; names the files there.
    """
    every = [file for place in (".", "parts", "figures") for file in (folder / place).glob("*.*") if file.is_file()]
    expected = re.compile(r"\.|(manifest|ended)\.json$|report\.html$|(rounds|steps|requests|tokens|replay)[-.]")
    others = sorted(str(file.relative_to(folder)) for file in every if not expected.match(file.name))
    ended = sweep.ended(folder)
    if others or (ended and ended["state"] == "done"):
        files = ", ".join(others[:6]) + f" and {len(others) - 6} more" * (len(others) > 6)
        raise ValueError(
            f"{folder} holds no rows of a run, which a report requires; "
            + (f"its task wrote {files}" if others else "its task wrote nothing but manifest.json")
        )


def _tree(text: Any) -> tuple[Ranks, ...]:
    """Return the draft tree of a manifest; empty where ``trees.parse`` cannot read it."""
    try:
        return trees.parse(text) if isinstance(text, str) and text else ()
    except ValueError:  # proposers of other packages may write their trees in another notation
        return ()


def _lead(manifest: Mapping[str, Any], summary: Mapping[str, Any], tables: Tables) -> str:
    config, requests = manifest["config"], tables.requests
    names = [one.get("name") for one in manifest["proposers"].values()]
    proposer = summary.get("proposer") or next(iter(names), "none")
    workloads = ", ".join(sorted(set(requests["workload"])))
    parts = [
        f"proposer {proposer}",
        f"verifier {summary['verifier']}" if summary.get("verifier") else "",
        f"constraint {summary['constraint']}" if summary.get("constraint", "none") != "none" else "",
        f"temperature {temperature(manifest, summary):g}" if "sampling" in config else "",
        f"batch size {config['batch_size']}" if "batch_size" in config else "",
        f"{requests['request'].nunique()} prompts ({workloads})" if len(requests) else "",
        f"at most {config['max_new_tokens']} new tokens" if "max_new_tokens" in config else "",
    ]
    return ", ".join(part for part in parts if part)


def _warnings(manifest: Mapping[str, Any], summary: Mapping[str, Any], tables: Tables) -> list[str]:
    warnings = []
    groups = tables.requests["group"].nunique()
    if not summary:
        of = f" of {manifest['groups']}" if manifest.get("groups") else ""
        warnings.append(
            f"This run has not ended: {groups}{of} groups of prompts are finished and shown here. Verifiers and "
            "certificates are known when it ends."
        )
    if broken := len(metrics.broken_groups(tables.requests)):
        warnings.append(f"In {broken} of {groups} groups a request broke: they are left out of speeds.")
    if metrics.short_groups(tables.requests):
        warnings.append("The last group has fewer prompts than the others: it is left out of all speeds.")
    errors = [error for error in tables.requests["error"].unique() if error]
    return warnings + errors[:5] + [f"and {len(errors) - 5} more errors"] * (len(errors) > 5)
