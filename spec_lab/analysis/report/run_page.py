"""The page about one run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from spec_lab.analysis import figures, metrics
from spec_lab.analysis.metrics import Tables
from spec_lab.analysis.metrics.frames import Ranks
from spec_lab.analysis.names import names_in_manifest, renamed, with_names
from spec_lab.analysis.report.page import Cell, DataTable, Page, figure_cell, render, short_path
from spec_lab.analysis.report.token_view import token_view, verifications
from spec_lab.analysis.roofline_text import limits_in_words, roofline_notes
from spec_lab.analysis.text import COLUMNS, accuracy_notes, losslessness, margin_notes, number
from spec_lab.core.files import Unreadable, expect, read_json
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

BADGES = {"lossless": "good", "lossy": "warn", "NOT lossless": "bad", "not certified": "plain"}
FIGURES = (
    "tokens_per_second", "speedup", "speedup_with_prefill", "speedup_mean_of_groups", "time_to_first_token",
    "time_per_output_token", "tau_pooled", "tau_pooled_raw", "expected_tau", "draft_token_rate", "nodes_per_step",
    "overhead", "roofline_share", "roofline_share_end_to_end", "memory_bound_steps",
    "repeated_8gram_share",
)  # fmt: skip
"""Columns of the table of arms."""


def page(folder: Path) -> str:
    """Return the page's text; writes the figures to ``figures/`` as well.

    Raises:
        ValueError: the directory holds no rows of a run and will hold none; files that are not readable.
    """
    manifest = begun(folder)
    if manifest is None:
        raise ValueError(f"{folder} holds no run (no manifest.json)")
    summary, tables = _summary(folder), metrics.load(folder)
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
    content = Page(
        title=f"{manifest['config'].get('name', 'run')}: {folder.resolve().name}",
        lead=_lead(manifest, summary, tables),
        warnings=_warnings(manifest, summary, tables),
        drawn=figures.run_figures(tables, drafted, bounds),
        facts=_facts(manifest, summary, tables),
    )
    return render(
        "run",
        content,
        folder,
        arms=_arms(figures_of, states, manifest, _temperature(manifest, summary)),
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
        peers=_peers(tables),
        bounds=_bounds(bounds),
        no_bounds=[(arm, one["needs"]) for arm, one in bounds.items() if one.get("needs")],
        names=arms,
        view=token_view(folder, tables, arms, verifications(manifest, states, _temperature(manifest, summary))),
        scripts=("page.js", "tokens.js"),
        styles=("page.css", "tokens.css"),
        constrained=summary.get("constraint", "none") != "none",
    )


def _refuse_other_task(folder: Path) -> None:
    """Refuse a directory without rows that is not a run's; a run whose first group is not finished has none yet.

    Raises:
        ValueError: another task wrote it, or it ended without rows; names the files there.
    """
    every = [file for place in (".", "parts", "figures") for file in (folder / place).glob("*.*") if file.is_file()]
    expected = re.compile(r"\.|(manifest|ended)\.json$|report\.html$|(rounds|steps|requests|tokens)[-.]")
    others = sorted(str(file.relative_to(folder)) for file in every if not expected.match(file.name))
    ended = sweep.ended(folder)
    if others or (ended and ended["state"] == "done"):
        files = ", ".join(others[:6]) + f" and {len(others) - 6} more" * (len(others) > 6)
        raise ValueError(
            f"{folder} holds no rows of a run, which a report requires; "
            + (f"its task wrote {files}" if others else "its task wrote nothing but manifest.json")
        )


def _summary(folder: Path) -> dict[str, Any]:
    """Return the contents of ``summary.json``; empty for a run that has not ended.

    Raises:
        Unreadable: the contents are not those of a run.
    """
    file = folder / "summary.json"
    try:
        summary = read_json(file) or {}
        expect(
            summary, {**PARTS, "?arms": {str: PARTS}, "?output_margins": {str: MARGIN}, "?bounds": {str: BOUNDS}}, ""
        )
    except ValueError as error:
        why = str(error) if str(file) in str(error) else f"{file} is not readable ({error})"
        raise Unreadable(f"{why}; run the same command again to write it anew") from error
    return summary


def _temperature(manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> float:
    """Return the temperature of the requests; 0 where it is not recorded."""
    sampling = manifest.get("sampling") or manifest["config"].get("sampling") or {}
    return float(summary.get("temperature", sampling.get("temperature", 0.0)) or 0.0)


def _tree(text: Any) -> tuple[Ranks, ...]:
    """Return the draft tree of a manifest; empty where ``trees.parse`` cannot read it."""
    try:
        return trees.parse(text) if isinstance(text, str) and text else ()
    except ValueError:  # proposers of other packages may write their trees in another notation
        return ()


def _arms(
    summaries: Mapping[str, Mapping[str, Any]],
    states: Mapping[str, Mapping[str, Any]],
    manifest: Mapping[str, Any],
    temperature: float,
) -> DataTable:
    """Return the table of arms."""
    colours, rows = figures.colours(summaries), []
    reduced = any(isfinite(one["calibration"]["variance_reduction"]) for one in summaries.values())
    for arm, one in summaries.items():
        facts, state, (word, why) = manifest["proposers"].get(arm, {}), states[arm], losslessness(states[arm])
        drawn = f" ({facts['drawn']})" if facts.get("drawn") and facts.get("name") != "none" else ""
        reduction, identical = one["calibration"]["variance_reduction"], one["identical_outputs"]
        rows.append(
            [
                Cell(arm, colour=colours[arm]),
                Cell(f"{state.get('proposer') or facts.get('name', '')}{drawn}"),
                Cell(state.get("verifier") or ""),
                Cell(word, badge=BADGES.get(word, ""), title=why),
                *(figure_cell(name, one[name]) for name in FIGURES),
                *[Cell(number(reduction, ".1f"), reduction)] * reduced,
                Cell(f"n/a (temperature {temperature:g})" * (arm != "baseline"))
                if temperature
                else figure_cell("identical_outputs", identical),
            ]
        )
    columns = [(name, False) for name in ("arm", "proposer", "verifier", "losslessness")]
    columns += [(COLUMNS[name].heading, True) for name in FIGURES]
    return DataTable(
        columns + [("variance reduction", True)] * reduced + [("identical outputs", not temperature)], rows
    )


def _peers(tables: Tables) -> DataTable | None:
    """Return the speed-ups over peers; None without peers."""
    speedups = metrics.speedups_over_peers(tables)
    arms = list(next(iter(speedups.values()), ()))
    rows = [[Cell(arm), *(figure_cell("speedup", one[arm]) for one in speedups.values())] for arm in arms]
    return DataTable([("arm", False), *((peer, True) for peer in speedups)], rows) if rows else None


def _bounds(bounds: Mapping[str, Mapping[str, Any]]) -> DataTable | None:
    """Return the shares of the optimum and the parts of what is lost; None without."""
    rows = []
    for arm, one in bounds.items():
        for name, own in one.get("verifiers", {}).items():
            label = f"{name}{'' if own['lossless'] else ', lossy'}{' (used)' * own['used']}"
            shares = [_bound(own[share], ".1%") for share in ("share_first", "share")]
            lost = [_bound(own["lost"].get(part), ".3f") for part in ("verifier", "open", "tree", "draft")]
            most = _bound(one.get("optimum"), ".3f")
            rows.append([Cell(arm), Cell(label), _bound(own["tau"], ".3f"), most, Cell(one["kind"]), *shares, *lost])
    columns = [("arm", False), ("verifier", False), ("tau", True), ("optimal tau", True), ("which is", False)]
    columns += [("share, first level", True), ("share, tree", True)]
    columns += [(f"lost: {part}", True) for part in ("verifier", "open", "tree", "draft")]
    return DataTable(columns, rows) if rows else None


def _bound(value: Mapping[str, float | None] | None, form: str) -> Cell:
    """Return the cell of a mean with its interval."""
    if value is None or value["mean"] is None:
        return Cell("", float("nan"))
    ends = "" if value["low"] is None else f" [{value['low']:{form}}, {value['high']:{form}}]"
    return Cell(f"{value['mean']:{form}}{ends}", value["mean"])


def _lead(manifest: Mapping[str, Any], summary: Mapping[str, Any], tables: Tables) -> str:
    config, requests = manifest["config"], tables.requests
    names = [one.get("name") for one in manifest["proposers"].values()]
    proposer = summary.get("proposer") or next(iter(names), "none")
    workloads = ", ".join(sorted(set(requests["workload"])))
    parts = [
        f"proposer {proposer}",
        f"verifier {summary['verifier']}" if summary.get("verifier") else "",
        f"constraint {summary['constraint']}" if summary.get("constraint", "none") != "none" else "",
        f"temperature {_temperature(manifest, summary):g}" if "sampling" in config else "",
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


def _facts(manifest: Mapping[str, Any], summary: Mapping[str, Any], tables: Tables) -> dict[str, Any]:
    config, machine, versions = manifest["config"], manifest.get("machine", {}), manifest.get("versions", {})
    sampling = manifest.get("sampling") or config.get("sampling") or {}
    sampling = {key: value for key, value in sampling.items() if key[0] != "_"}
    chat = manifest.get("chat") or {}
    target, prompts = config.get("target") or {}, config.get("prompts") or {}
    device = (target.get("dtype"), device_text(target, manifest.get("ranks", 1)), target.get("attention"))
    memory = f", {machine['memory_gib']} GiB" if machine.get("memory_gib") else ""
    return {
        "experiment": config.get("name"),
        "model": short_path(target.get("path")),
        "precision, device, attention": ", ".join(str(one) for one in device if one),
        "proposers": "; ".join(
            arm if one.get("name") in (None, arm) else f"{arm}: {one['name']}"
            for arm, one in manifest["proposers"].items()
        ),
        "constraint": summary.get("constraint"),
        "sampling": ", ".join(f"{key} {value}" for key, value in sampling.items()),
        "prompts": short_path(prompts.get("path")) or prompts.get("_target_"),
        "chat": ", ".join(f"{key} {value}" for key, value in chat.items()),
        "prompts, SHA-256": manifest.get("prompts_sha256"),
        "batch size": config.get("batch_size"),
        "seed": str(manifest.get("seed", "")),
        "groups": f"{tables.requests['group'].nunique()}",
        "processor": f"{machine.get('processor', '')}, {machine.get('cores')} cores{memory}",
        "GPUs": ", ".join(machine.get("gpus") or ()),
        "threads": manifest.get("threads"),
        "limits of a forward": limits_in_words(manifest.get("roofline")),
        "system": machine.get("system"),
        "commit": manifest.get("commit"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    }


def device_text(target: Mapping[str, Any], ranks: int) -> str | None:
    """Return where the target was; null means what it means to ``Target.load``. None for a target without device."""
    if target.get("device_map"):
        return f"device map {target['device_map']}"
    if target.get("tensor_parallel"):
        return f"{ranks} ranks"
    return target["device"] or "cpu" if "device" in target else None
