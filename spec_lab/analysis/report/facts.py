"""The configuration and the machine of a run, for its page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_lab.analysis.roofline_text import limits_in_words
from spec_lab.core.terminal import short_path
from spec_lab.results.old_names import target_dtype
from spec_lab.results.result import target_name


def facts(manifest: Mapping[str, Any], constraint: str | None = None, **more: Any) -> dict[str, Any]:
    """Return configuration and machine by name; empty values are for the page to leave out.

    Args:
        more: further facts, after those about the prompts.
    """
    config, machine, versions = manifest["config"], manifest.get("machine", {}), manifest.get("versions", {})
    sampling = manifest.get("sampling") or config.get("sampling") or {}
    sampling = {key: value for key, value in sampling.items() if key[0] != "_" and value not in (None, [])}
    chat = manifest.get("chat") or {}
    target, prompts = config.get("target") or {}, config.get("prompts") or {}
    proposers = manifest["proposers"]
    weights = (manifest.get("target") or {}).get("weights")  # of llama.cpp, which computes them as they are stored
    device = (weights or target_dtype(manifest), device_text(manifest), target.get("attention"))
    asked = (prompts.get("name"), short_path(prompts.get("path")))
    memory = f", {machine['memory_gib']} GiB" if machine.get("memory_gib") else ""
    return {
        "experiment": config.get("name"),
        "model": target_name(manifest),
        "precision, device, attention": ", ".join(str(fact) for fact in device if fact),
        "proposers": "; ".join(
            arm if facts.get("name") in (None, arm) else f"{arm}: {facts['name']}" for arm, facts in proposers.items()
        ),
        "constraint": constraint,
        "sampling": ", ".join(f"{key} {value}" for key, value in sampling.items()),
        "prompts": ", ".join(str(fact) for fact in asked if fact) or prompts.get("_target_"),
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


def device_text(manifest: Mapping[str, Any]) -> str | None:
    """Return where the target was; of older runs, whose manifests lack the device, the option (null was the CPU)."""
    target = manifest["config"].get("target") or {}
    if target.get("device_map"):
        return f"device map {target['device_map']}"
    if target.get("tensor_parallel"):
        return f"{manifest.get('ranks', 1)} ranks"
    return manifest.get("device") or (target["device"] or "cpu" if "device" in target else None)
