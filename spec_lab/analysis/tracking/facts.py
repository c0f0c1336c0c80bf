"""Facts of a run for Weights & Biases besides its figures: config, tags, group, job type and id, without wandb."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from spec_lab.core.terminal import short_path
from spec_lab.results import run_names, sweep
from spec_lab.results.manifest import JUDGED
from spec_lab.results.redact import without_secrets

MAX_LETTERS = 500
"""Most letters of a text in the config."""


def config(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a run: its options as they are set on the command line, what they led to, and where it ran.

    Columns and filters of the runs table are named like the options: ``proposer.depth``, ``sampling.temperature``,
    ``target.path``, ``prompts.limit``, ``arms.NAME.depth``, ``batch_size``, ``seed``. Added are ``experiment``,
    ``task.name``, ``proposer.name``, ``verifier.name``, ``constraint.name``, ``commit``, ``machine.processor``,
    ``machine.gpus``, ``versions.torch``. The config is nested, because Weights & Biases shows ``{"proposer": {"depth":
    4}}`` as ``proposer.depth``, while filters do not find a key that contains the dot itself. Without value are no
    entries, since the runs of a group without value are not listed there. Secrets are blanked, paths of the machine
    shortened (``core.terminal.short_path``); where files and the tracker are is left out.

    Args:
        manifest: the contents of ``manifest.json``.
    """
    given = without_secrets(dict(manifest["config"]))
    options = {name: value for name, value in given.items() if name not in (*run_names.UNIDENTIFYING, "name")}
    proposers = manifest.get("proposers", {})
    options["arms"] = {
        arm: {"name": proposers.get(arm, {}).get("name"), **_mapping(options)}
        for arm, options in _mapping(given.get("arms")).items()
    }
    main: Mapping[str, Any] = next((facts for arm, facts in proposers.items() if arm not in options["arms"]), {})
    drawn = {name: value for name, value in main.items() if name in ("drawn", "nodes")}
    parts = dict(manifest.get("parts", {}))
    for part in ("proposer", "verifier", "constraint", "policy", "task"):
        chosen = _mapping(given.get(part))
        known = job_type(manifest) if part == "task" else parts.get(part) or _name(chosen)
        options[part] = {"name": known, **(drawn if part == "proposer" else {}), **chosen}
    machine = dict(manifest.get("machine", {}))
    machine["gpus"] = ", ".join(machine.get("gpus") or ()) or "none"
    led_to = {
        "sampling": {**_mapping(given.get("sampling")), **_mapping(manifest.get("sampling"))},
        "threads": manifest.get("threads"),
        "machine": machine,
        "seed": manifest["seed"],
        **{name: manifest.get(name) for name in ("groups", "ranks", "commit", "began", "versions")},
        **{name: manifest.get(name) for name in ("prompts_sha256", "weights_sha256")},
    }
    return {"experiment": experiment(manifest), **_plain(options | led_to)}


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping; empty in place of another value, which the file of another program may hold."""
    return value if isinstance(value, Mapping) else {}


def _name(options: Mapping[str, Any]) -> str | None:
    """Return the name of a part whose name is not recorded: the class or function of its ``_target_``."""
    target = [word for word in str(options.get("_target_") or "").split(".") if word]
    return (target[-2] if target[-1:] == ["load"] and len(target) > 1 else target[-1]) if target else None


def _plain(value: Any) -> Any:
    """Return a tree of options without entries that are empty or whose key begins with an underscore."""
    if isinstance(value, Mapping):
        inner = {str(name): _plain(entry) for name, entry in value.items() if not str(name).startswith("_")}
        return {name: entry for name, entry in inner.items() if entry is not None and entry != {} and entry != []}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return short_path(value)[:MAX_LETTERS] if isinstance(value, str) else value


def experiment(manifest: Mapping[str, Any]) -> str:
    """Return the experiment's name."""
    return str(manifest["config"].get("name", "spec_lab"))


def job_type(manifest: Mapping[str, Any]) -> str:
    """Return the run's task: ``benchmark``, ``train``, ``certify``, ..., from the package or module of its function."""
    given = _mapping(manifest["config"].get("task")).get("_target_") or "spec_lab.tasks.benchmark.run"
    target = str(given).split(".")
    above = [word for word in target[:-1] if word != "task"]
    return above[-1] if above else target[-1]


def group(folder: Path, manifest: Mapping[str, Any]) -> str:
    """Return the group of a run: the name of its sweep's folder, else its experiment."""
    parent = folder.absolute().parent
    return parent.name if sweep.is_sweep(parent) else experiment(manifest)


def tags(parts: Mapping[str, Any]) -> list[str]:
    """Return tags for proposer, verifier, constraint and losslessness.

    Args:
        parts: ``proposer``, ``verifier``, ``constraint`` (names) and ``lossless``; each may be missing.
    """
    names = [
        f"{part}={parts[part]}"[:64]
        for part in ("proposer", "verifier", "constraint")
        if isinstance(parts.get(part), str) and parts[part]
    ]
    lossless = parts.get("lossless")
    return names + ([] if lossless is None else ["lossless" if lossless else "lossy"])


def identity(folder: Path, manifest: Mapping[str, Any]) -> str:
    """Return an id that is the same whenever this run is tracked, also after it was resumed: from its folder's name and
    what its manifest said when it began.
    """
    begun = {name: fact for name, fact in manifest.items() if name not in JUDGED}
    facts = json.dumps([folder.absolute().name, begun], sort_keys=True, default=str)
    return sha256(facts.encode()).hexdigest()[:16]


def is_offline_folder(name: str, run_id: str) -> bool:
    """Return whether wandb gives this name to an offline folder of the run with this id."""
    return re.fullmatch(rf"offline-run-\d+_\d+-{re.escape(run_id)}(-\d+)?", name) is not None
