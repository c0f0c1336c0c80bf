"""The manifest of a run: configuration, code, versions, weights, prompts and machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import reprlib
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from shutil import rmtree
from typing import Any, Literal

import torch

from spec_lab.core import files, roofline
from spec_lab.core.files import Unreadable, expect, read_json
from spec_lab.core.machine import processor
from spec_lab.core.process_cache import ProcessCache
from spec_lab.models import ranks
from spec_lab.results import sources
from spec_lab.results.old_names import arm_names, with_arms
from spec_lab.results.redact import without_secrets
from spec_lab.results.run_names import UNIDENTIFYING

PACKAGES = ("spec-lab", "torch", "transformers", "numpy", "hydra-core", "tokenizers", "safetensors")
MEDUSA = "spec_lab.drafters.medusa.propose.Medusa.load"
MEASURING = ("recalibrate", "cache")
"""Options of ``MEDUSA`` that only choose the tree when a run begins. The chosen tree itself is compared."""

FOLDERS = ("parts", "figures", "readings", "training", "texts", "drafter", "experiment", "versions")
FILES = (
    "*.parquet", "forwards.csv", "learning.jsonl", "summary.json", "certificate.json", "progress.json", "report.html",
    "ended.json", "summary.md",
)  # fmt: skip
"""Folders and files that a run writes into its directory, besides its manifest."""

JOBS = ("ended.json", "queued.json")
"""Files of a run's directory that are not results: a sweep's records of its jobs."""
SHAPE = {
    "config": {
        "?name": str,
        "?sampling": (None, {"?temperature": (float, None)}),
        "?target": (None, {}),
        "?prompts": (None, {}),
        "?proposer": (None, {}),
        "?task": (None, {}),
    },
    "seed": int,
    "arms": [str],
    "weights_sha256": {str: str},
    "prompts_sha256": str,
    "commit": (str, None),
    "versions": {str: (str, None)},
    "threads": int,
    "?ranks": int,
    "?device": str,
    "machine": {"processor": (str, None), "gpus": [str], "?cores": (int, None), "?memory_gib": (float, None)},
    "proposers": {str: {}},  # any contents: a proposer of another package may add its own
    "?groups": (int, None),
    "?overrides": (None, [str]),
    "?parts": {},
    "?code": {str: {}},
    "?files_sha256": {str: str},
    "?began": str,
    "?target": {"?quantization": (None, {}), "?dtype": str},
    "?roofline": (None, roofline.SHAPE),
    "?sampling": {"?temperature": (float, None)},
    "?chat": (None, {}),
    "?prompt_tokens_sha256": (str, None),
    "?emptied_stores": [int],
}
"""The shape of the part of ``manifest.json`` that is read."""

JUDGED = ("verdict", "verdict_reasons", "repeated_groups")
"""The entries of a run's summary that its manifest gets when it ends."""


def manifest(
    config: Mapping[str, Any],
    seed: int,
    weights: Mapping[str, str],
    prompts: str,
    arms: Sequence[str],
    proposers: Mapping[str, Mapping[str, Any]],
    parts: Iterable[Any] = (),
    cache: ProcessCache | None = None,
) -> dict[str, Any]:
    """Return the contents of ``manifest.json``.

    Args:
        config: the configuration; values of keys that look like secrets are blanked.
        weights: SHA-256 of the weights of each part; empty for weights from the hub, since transformers does not report
            which commit it loaded: use a local folder if that matters.
        prompts: SHA-256 of the prompts.
        arms: names of the run's arms.
        proposers: the facts of each arm's proposer .
        parts: the objects that decode; the code of those from other packages is recorded (``sources``), and this
            package's own, which decides where git tells no commit.
        cache: what this process has hashed before; None starts with nothing.
    """
    made_of = {key: value for key, value in config.items() if key not in UNIDENTIFYING}
    cache = ProcessCache() if cache is None else cache
    return {
        "config": without_secrets(config),
        "seed": seed,
        "weights_sha256": {name: str(digest) for name, digest in weights.items()},
        "prompts_sha256": prompts,
        "commit": commit(Path(__file__).resolve().parent),
        "code": sources.code(made_of, parts, cache) | {sources.OWN: sources.source(sources.OWN, cache)},
        "files_sha256": sources.data(made_of, cache),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "ranks": ranks.size(),
        "arms": list(arms),
        "proposers": dict(proposers),
        "began": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }


def claim(
    out: Path, facts: Mapping[str, Any], anew: Literal["never", "if another", "always"] = "never"
) -> dict[str, Any]:
    """Write ``manifest.json`` into ``out``, or find that ``out`` already holds part of the same run.

    Args:
        facts: of ``manifest``.
        anew: whether a run that ``out`` holds is removed: only "if" it is "another", or "always".

    Returns:
        The contents of ``manifest.json``; for a resumed run, those from when it began.

    Raises:
        ValueError: it holds another run (the message says what differs), or rows without a manifest.
        OSError: it cannot be written.
    """
    facts = _as_read(facts)
    there = begun(out)
    if there is not None and (anew == "always" or (anew == "if another" and _other(there, facts))):
        remove_run(out)
        there = None
    if there is None:
        if rows := sorted([*out.glob("*.parquet"), *out.glob("parts/*.parquet")]):
            raise ValueError(
                f"{out} holds rows ({rows[0].relative_to(out)}) but no manifest.json that describes their run; "
                "choose another output_dir=DIR, or remove it"
            )
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "manifest.json", facts)
        return facts
    if different := _other(there, facts):
        what = "; ".join(different[:3] + ["and more"] * (len(different) > 3))
        raise ValueError(
            f"{out} already holds another run ({what}); choose another output_dir=DIR, or remove it, as overwrite=true "
            "does"
        )
    return there


def _other(there: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Return how the run of a manifest differs from another, in words; nothing where it can be resumed."""
    different = _differences(*_of_known_code(_identity(there), _identity(facts)))
    if not different and there.get("config_sha256", here := facts.get("config_sha256", "")) != here:
        different = ["an environment variable that the configuration reads: one value there, another here"]
    return different


def remove_run(out: Path) -> None:
    """Remove the files of the run in ``out``, the manifest last. Others that are there stay.

    Raises:
        OSError: a file cannot be removed.
    """
    for name in FOLDERS:
        folder = out / name
        if folder.is_symlink():
            folder.unlink()
        elif folder.is_dir():
            rmtree(folder)
    for pattern in (*FILES, "manifest.json"):
        for file in out.glob(pattern):
            file.unlink()


def unclaim(out: Path, facts: Mapping[str, Any], error: Exception, decoded: bool) -> None:
    """Remove the manifest of a run that was refused before it decoded anything, and its folder if that is empty.

    So the corrected command can use the same directory. A run that has decoded, or that failed with another error than
    a refusal, keeps its manifest and with it the draft tree that it chose: the same command resumes it.

    Args:
        facts: as given to ``claim``. A run that was resumed began before them, and keeps its manifest.
        error: what the run failed with; a ``ValueError`` is a refusal.
        decoded: whether the target has computed anything since the claim.
    """
    if decoded or not isinstance(error, ValueError):
        return
    with suppress(ValueError, OSError):  # the run's own error is what the user must see
        there = begun(out)
        results = {file.name for kind in ("*.parquet", "parts/*.parquet", "*.json") for file in out.glob(kind)}
        if there is None or there.get("began") != facts["began"] or results - {"manifest.json", *JOBS}:
            return
        (out / "manifest.json").unlink()
        for folder in (out / "parts", out / "figures", out):
            with suppress(OSError):  # not empty, or not there
                folder.rmdir()


def begun(out: Path) -> dict[str, Any] | None:
    """Return the manifest of the run in ``out``; None if there is none.

    Raises:
        ValueError: the file is not a manifest.
    """
    file = out / "manifest.json"
    try:
        there = read_json(file)
        if there is not None:
            expect(there, SHAPE, "")
            there = with_arms(there, arm_names(there))
    except ValueError as error:
        raise Unreadable(f"{file} is not a manifest ({error}); choose another output_dir=DIR, or remove it") from error
    return there


def without_groups(out: Path, facts: Mapping[str, Any]) -> str:
    """Return why the run in ``out`` has no rows of groups of prompts: its task has none, or none is finished yet.

    Args:
        facts: the contents of its manifest; of a task with groups it holds their number.
    """
    if "groups" in facts:
        return f"no group of the run in {out} is finished: wait for its first group"
    task = (facts["config"].get("task") or {}).get("_target_", "another task")
    return (
        f"the run in {out} is one of {task}, whose rows are not of groups of prompts. Read the figures of its arms in "
        f"{out / 'summary.json'} (of a sweep: spec-lab collect), or decode the prompts with task=benchmark"
    )


def begun_trees(out: Path, config: Mapping[str, Any], config_sha256: str = "") -> dict[str, str | int]:
    """Return the draft trees of the run in ``out``, and the depths that it chose; empty unless it began with this
    configuration.

    They are named by their arm, those of a hybrid's parts ``arm.parts.name``, a cascade's ``arm.inner``.

    A tree or depth that is chosen by timing may come out differently the next time. A resumed run must decode with
    the one that it began with.

    Raises:
        ValueError: as ``begun``.
    """
    there = _begun_alike(out, config, config_sha256)
    if there is None:
        return {}
    proposers = with_parts(there["proposers"])
    depths = {
        name: facts["auto_depth"]["depth"]
        for name, facts in proposers.items()
        if isinstance(facts.get("auto_depth"), Mapping) and isinstance(facts["auto_depth"].get("depth"), int)
    }
    return depths | {name: facts["tree"] for name, facts in proposers.items() if isinstance(facts.get("tree"), str)}


def begun_dtype(out: Path, config: Mapping[str, Any], config_sha256: str = "") -> str | None:
    """Return the data type of the target in the run in ``out``, which timing may choose (``target.dtype=auto``); None
    unless it began with this configuration.

    Raises:
        ValueError: as ``begun``.
    """
    there = _begun_alike(out, config, config_sha256)
    return None if there is None else there.get("target", {}).get("dtype")


def _begun_alike(out: Path, config: Mapping[str, Any], config_sha256: str) -> dict[str, Any] | None:
    """Return the manifest of the run in ``out``; None unless it began with this configuration."""
    there = begun(out)
    if there is None or _configuration(there["config"]) != _configuration(_as_read(without_secrets(config))):
        return None
    return there if not config_sha256 or there.get("config_sha256", config_sha256) == config_sha256 else None


def with_parts(proposers: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the facts of all proposers, those inside other proposers too.

    Args:
        proposers: ``proposers`` of a manifest: facts by arm.

    Returns:
        The facts by name: ``ARM``; ``ARM.parts.NAME`` for a part of a hybrid; ``ARM.inner`` for the proposer inside a
        cascade. Each arm is followed by what is inside it.
    """
    known: dict[str, Mapping[str, Any]] = {}
    for name, facts in proposers.items():
        if isinstance(facts, Mapping):
            known[name] = facts
            parts = facts.get("parts")
            known |= (
                with_parts({f"{name}.parts.{part}": part_facts for part, part_facts in parts.items()})
                if isinstance(parts, Mapping)
                else {}
            )
            known |= with_parts({f"{name}.inner": facts["inner"]} if "inner" in facts else {})
    return known


def _identity(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must agree for a run to be resumed: everything that may change a token or a timing."""
    proposers = with_parts(facts["proposers"]).items()
    return {
        "config": _configuration(facts["config"]),
        **{name: facts[name] for name in ("seed", "arms", "weights_sha256", "prompts_sha256", "commit", "versions")},
        "target": {name: facts.get("target", {}).get(name) for name in ("quantization", "dtype")},
        "threads": facts["threads"],
        "ranks": facts.get("ranks", 1),
        "code": facts.get("code", {}),
        "files_sha256": facts.get("files_sha256", {}),
        "sampling": facts.get("sampling"),
        "chat": facts.get("chat"),
        "prompt_tokens_sha256": facts.get("prompt_tokens_sha256"),
        "drift": facts.get("drift"),
        "machine": {name: facts["machine"][name] for name in ("processor", "gpus")},
        "proposers": {arm: {name: facts.get(name) for name in ("name", "drawn", "tree")} for arm, facts in proposers},
    }


def _of_known_code(there: dict[str, Any], here: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two identities with this package's commits, or with the hashes of its source in their place.

    The hashes decide where a commit is unknown on either side: where git is not installed, or takes too long.
    """
    if there["commit"] and here["commit"]:
        return there | {"code": sources.foreign(there["code"])}, here | {"code": sources.foreign(here["code"])}
    return there | {"commit": None}, here | {"commit": None}


def same_code(facts: Mapping[str, Any], config: Mapping[str, Any], cache: ProcessCache) -> bool:
    """Return whether code of other packages, and files that their options name, are those that a manifest records.

    Args:
        facts: the manifest; an older one records no code.
        cache: what this process has hashed before.
    """
    if "code" not in facts:
        return True
    made_of = {key: value for key, value in config.items() if key not in UNIDENTIFYING}
    code = sources.foreign(facts["code"])
    known = {**code, **sources.code(made_of, (), cache)}
    same = all(sources.source(name, cache) == code.get(name) for name in known)
    return same and sources.data(made_of, cache) == facts.get("files_sha256", {})


def digest(config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a resolved configuration; see ``_configuration``."""
    plain = json.dumps(_configuration(_as_read(without_secrets(config))), sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()


def _configuration(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the configuration that must agree: without ``UNIDENTIFYING``, and Medusa's ``MEASURING``."""
    kept = {key: value for key, value in config.items() if key not in UNIDENTIFYING}
    if "proposer" in kept:
        kept["proposer"] = _without_measuring(kept["proposer"])
    if isinstance(arms := kept.get("arms"), Mapping):
        kept["arms"] = {name: _without_measuring(arm) for name, arm in arms.items()}
    return kept


def _without_measuring(proposer: Any) -> Any:
    """Return the options of a proposer without ``MEASURING``, if it is Medusa; so of a hybrid's parts."""
    if not isinstance(proposer, Mapping):
        return proposer
    if isinstance(parts := proposer.get("parts"), Mapping):
        return {**proposer, "parts": {name: _without_measuring(options) for name, options in parts.items()}}
    if proposer.get("_target_") != MEDUSA:
        return proposer
    return {key: value for key, value in proposer.items() if key not in MEASURING}


def _differences(there: Any, here: Any, name: str = "") -> list[str]:
    """Return where two trees of values differ, in words."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        inner = [(key, f"{name}.{key}" if name else str(key)) for key in {**there, **here}]
        return [difference for key, path in inner for difference in _differences(there.get(key), here.get(key), path)]
    return [] if there == here else [f"{name}: {reprlib.repr(there)} there, {reprlib.repr(here)} here"]


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` as JSON, NaN and infinities as null. Errors as in ``files.write_json``."""
    files.write_json(file, finite(value))


def _as_read(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same tree as it is read back from JSON."""
    return json.loads(json.dumps(finite(value), default=str))


def finite(value: Any) -> Any:
    """Return the same tree with NaN and infinities as None, as JSON requires."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def commit(folder: Path) -> str | None:
    """Return the git commit that contains ``folder``; None outside a repository.

    Where tracked files differ from it, "+" and eight digits of the SHA-256 of ``git diff HEAD`` follow.
    """

    def git(*command: str) -> bytes:
        return subprocess.run(
            ["git", "-C", str(folder), *command], capture_output=True, check=True, timeout=10
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", str(folder / "__init__.py"))  # not merely inside another repository
        head = git("rev-parse", "HEAD").decode()
        if not git("status", "--porcelain", "--untracked-files=no"):
            return head
        return f"{head}+{hashlib.sha256(git('diff', '--no-color', '--no-ext-diff', 'HEAD')).hexdigest()[:8]}"
    except (OSError, subprocess.SubprocessError):
        return None


def machine() -> dict[str, Any]:
    """Return processor, cores, memory in GiB, operating system and GPUs."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "system": platform.platform(),
        "gpus": gpus,
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
