"""The beginning of a run's page, its configuration and machine from its manifest, and the contents of its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_lab.analysis.figures import Figures
from spec_lab.analysis.names import arm_names, renamed
from spec_lab.analysis.report.page import Page, short_path
from spec_lab.analysis.roofline_text import limits_in_words
from spec_lab.core.files import Unreadable, expect, read_json


def read_summary(folder: Path, shape: Mapping[str, Any], name: str = "summary.json") -> dict[str, Any]:
    """Return the contents of a task's summary; empty where it has not ended.

    Args:
        folder: of the run.
        shape: what is read of it, for ``core.files.expect``.
        name: of the file.

    Raises:
        Unreadable: the contents are not those of this task.
    """
    file = folder / name
    try:
        summary = read_json(file) or {}
        if summary:
            expect(summary, shape, "")
    except ValueError as error:
        why = str(error) if str(file) in str(error) else f"{file} is not readable ({error})"
        raise Unreadable(f"{why}; run the same command again to write it anew") from error
    return summary


def ended_summary(folder: Path, shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of a task's summary.

    Raises:
        ValueError: the task has not ended.
        Unreadable: the contents are not those of this task.
    """
    summary = read_summary(folder, shape)
    if not summary:
        raise ValueError(
            f"{folder} has no summary.json: its task has not ended; run the same command again to resume it"
        )
    return summary


def temperature(manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> float:
    """Return the temperature of the requests; 0 where it is not recorded."""
    sampling = manifest.get("sampling") or manifest["config"].get("sampling") or {}
    return float(summary.get("temperature", sampling.get("temperature", 0.0)) or 0.0)


def page_of_run(
    folder: Path,
    manifest: Mapping[str, Any],
    lead: str,
    drawn: Figures,
    warnings: Sequence[str] = (),
    constraint: str | None = None,
    verdict: str = "",
    **more: Any,
) -> Page:
    """Return what every page about a run has: its name and folder, a lead, figures, configuration and machine.

    Args:
        folder: of the run.
        manifest: of the run.
        lead: the line below the heading.
        drawn: figures by name.
        warnings: what a reader must know first.
        constraint: its name; ``more``: further facts, both as of ``facts``.
        verdict: on its times; empty of a task without times.
    """
    title = f"{manifest['config'].get('name', 'run')}: {folder.resolve().name}"
    return Page(title, lead, warnings, drawn, facts(manifest, constraint, **more), verdict=[verdict] * bool(verdict))


def facts(manifest: Mapping[str, Any], constraint: str | None = None, **more: Any) -> dict[str, Any]:
    """Return configuration and machine by name; empty values are for the page to leave out.

    Args:
        manifest: of the run.
        constraint: its name.
        more: further facts, after those about the prompts.
    """
    config, machine, versions = manifest["config"], manifest.get("machine", {}), manifest.get("versions", {})
    sampling = manifest.get("sampling") or config.get("sampling") or {}
    sampling = {key: value for key, value in sampling.items() if key[0] != "_"}
    chat = manifest.get("chat") or {}
    target, prompts = config.get("target") or {}, config.get("prompts") or {}
    proposers = manifest["proposers"]
    names = arm_names({arm: one.get("name") for arm, one in proposers.items()})
    device = (target.get("dtype"), device_text(target, manifest.get("ranks", 1)), target.get("attention"))
    memory = f", {machine['memory_gib']} GiB" if machine.get("memory_gib") else ""
    return {
        "experiment": config.get("name"),
        "model": short_path(target.get("path")),
        "precision, device, attention": ", ".join(str(one) for one in device if one),
        "proposers": "; ".join(
            arm if one.get("name") in (None, arm) else f"{arm}: {one['name']}"
            for arm, one in renamed(proposers, names).items()
        ),
        "constraint": constraint,
        "sampling": ", ".join(f"{key} {value}" for key, value in sampling.items()),
        "prompts": short_path(prompts.get("path")) or prompts.get("_target_"),
        "chat": ", ".join(f"{key} {value}" for key, value in chat.items()),
        "prompts, SHA-256": manifest.get("prompts_sha256"),
        "batch size": config.get("batch_size"),
        "seed": str(manifest.get("seed", "")),
        **more,
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
