"""The page about one run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_lab.analysis import figures, metrics
from spec_lab.analysis.metrics import Tables, frames
from spec_lab.analysis.metrics.frames import Ranks
from spec_lab.analysis.names import names_in_manifest, renamed, with_names
from spec_lab.analysis.report.facts import facts, read_summary, temperature
from spec_lab.analysis.report.page import Page, render
from spec_lab.analysis.report.run_tables import arms_table, bounds_table, peers_table
from spec_lab.analysis.roofline_text import roofline_notes
from spec_lab.analysis.text import accuracy_notes, losslessness, margin_notes
from spec_lab.core.roofline import Roofline
from spec_lab.engine.request import FINISHES
from spec_lab.propose import trees
from spec_lab.results import sweep
from spec_lab.results.manifest import begun

MAX_PROMPTS = 50
MAX_LETTERS = 600_000
"""Most letters of all outputs shown; browsers open larger pages slowly."""
MAX_PROMPT_LETTERS = 600
MAX_PROMPT_LINES = 12

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

MARKS = {"accepted": "a", "forced": "f"}
"""The CSS class of each kind of span that is shaded."""


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
    prompts, prompts_shown = _prompts(tables, arms)
    content = Page(
        title=f"{manifest['config'].get('name', 'run')}: {folder.resolve().name}",
        lead=_lead(manifest, summary, tables),
        warnings=_warnings(manifest, summary, tables),
        drawn=figures.run_figures(tables, drafted, bounds),
        facts=facts(manifest, summary.get("constraint"), groups=f"{tables.requests['group'].nunique()}"),
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
            *accuracy_notes(figures_of),
            *margin_notes(renamed(summary.get("output_margins", {}), names)),
        ],
        peers=peers_table(tables),
        bounds=bounds_table(bounds),
        no_bounds=[(arm, one["needs"]) for arm, one in bounds.items() if one.get("needs")],
        names=arms,
        prompts=prompts,
        prompts_shown=prompts_shown,
        constrained=summary.get("constraint", "none") != "none",
    )


def _refuse_other_task(folder: Path) -> None:
    """Refuse a directory without rows that is not a run's; a run whose first group is not finished has none yet.

    Raises:
        ValueError: another task wrote it, or it ended without rows; names the files there.
    """
    every = [file for place in (".", "parts", "figures") for file in (folder / place).glob("*.*") if file.is_file()]
    expected = re.compile(r"\.|(manifest|ended)\.json$|report\.html$|(rounds|steps|requests)[-.]")
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
        warnings.append("The last group has fewer prompts than the others: it is left out of the speed-ups.")
    errors = [error for error in tables.requests["error"].unique() if error]
    return warnings + errors[:5] + [f"and {len(errors) - 5} more errors"] * (len(errors) > 5)


def _prompts(tables: Tables, arms: list[str]) -> tuple[list[dict[str, Any]], str]:
    """Return the first prompts with every arm's output in spans, and a note on how many are shown."""
    every = list(dict.fromkeys(tables.requests["request"]))
    shown: list[dict[str, Any]] = []
    letters = 0
    for request in every[:MAX_PROMPTS]:
        of_request = (one[one["request"] == request] for one in (tables.steps, tables.requests))
        rows = Tables(tables.rounds, *of_request)
        letters += int(rows.requests["text"].str.len().sum())
        if shown and letters > MAX_LETTERS:
            break
        shown.append(_prompt(rows, arms))
    if len(shown) == len(every):
        return shown, f"All {len(every)} prompts."
    return shown, f"The first {len(shown)} of {len(every)} prompts; the others are in requests.parquet."


def _prompt(tables: Tables, arms: list[str]) -> dict[str, Any]:
    """Return one prompt with its outputs; ``tables`` holds the rows of its request."""
    first = tables.requests.iloc[0]
    outputs = []
    for number_of_arm, arm in enumerate(arms):
        rows = tables.requests[tables.requests["arm"] == arm].sort_values("sequence")
        steps = metrics.decode_steps(tables.steps, arm)
        for row in rows.to_dict("records"):
            spans = frames.spans(tables, row["request"], arm, row["sequence"])
            outputs.append({"arm": number_of_arm, "about": _about(row, steps, len(rows)), "spans": _marked(spans)})
    about = ", ".join(str(first[name]) for name in ("workload", "source") if first[name])
    prompt = str(first["prompt"])
    end = "\n".join(prompt.split("\n")[-MAX_PROMPT_LINES:])[-MAX_PROMPT_LETTERS:]
    return {
        "name": first["name"],
        "about": about,
        "end": prompt if len(end) == len(prompt) else f"…\n{end}",
        "outputs": outputs,
    }


def _about(row: Mapping[str, Any], steps: Any, sequences: int) -> str:
    """Return the facts of one output."""
    steps = steps[steps["sequence"] == row["sequence"]]
    fork = f"Sequence {row['sequence']}{'' if row['kept'] else ', not kept'}: " if sequences > 1 else ""
    parts = [
        f"{fork}{len(row['tokens'])} tokens",
        f"{len(steps)} steps after the prefill, tau {metrics.tau_pooled(steps):.2f}" if len(steps) else "",
        f"finished: {FINISHES.get(row['finish'], row['finish'])}" if row["finish"] else "",
        f"violates its constraint after {row['violated']} tokens" if row["violated"] >= 0 else "",
        _checked(row),
        row["error"],
    ]
    return ", ".join(part for part in parts if part)


def _checked(row: Mapping[str, Any]) -> str:
    """Return what the checker found; empty for an answer that is not checked."""
    if not row.get("checker") or row.get("correct") not in (True, False):
        return ""
    return f"{'correct' if row['correct'] else 'not correct'} (checker {row['checker']})"


def _marked(spans: list[frames.TextSpan]) -> list[tuple[str, str]]:
    """Return CSS class and text of each span; one that begins a step and is not shaded is marked 's'."""
    marked, last = [], -1
    for span in spans:
        begins = span.round != last and span.round > 0
        marked.append((MARKS.get(span.kind, "s" if begins else ""), span.text))
        last = span.round
    return marked
