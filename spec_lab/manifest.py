"""What a run was: configuration, code, versions, weights, prompts and machine."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("spec-lab", "torch", "transformers", "numpy", "hydra-core", "tokenizers", "safetensors")
SECRET = re.compile(r"(^|_)(api_?key|auth|credentials?|password|passwd|secret|token)$", re.IGNORECASE)


def manifest(
    config: Mapping[str, Any], seed: int, weights: Mapping[str, str], prompts: str, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """The contents of ``manifest.json``.

    Args:
        config: the resolved configuration; values of keys that look like secrets are blanked.
        seed: the run's.
        weights: SHA-256 of the weights of each part that has some; empty for weights from the hub.
        prompts: SHA-256 of the prompts.
        extra: further facts, as they are.
    """
    return {
        "config": without_secrets(config),
        "seed": seed,
        "weights_sha256": dict(weights),
        "prompts_sha256": prompts,
        "commit": commit(Path(__file__).resolve().parent),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "machine": machine(),
        "threads": torch.get_num_threads(),
        **extra,
    }


def claim(out: Path, facts: Mapping[str, Any]) -> None:
    """Write ``manifest.json`` into ``out``, or find that ``out`` already holds a part of this very run.

    Raises:
        ValueError: it holds another run: another configuration, other weights or prompts.
        OSError: it cannot be written.
    """
    file = out / "manifest.json"
    if not file.is_file():
        out.mkdir(parents=True, exist_ok=True)
        write_json(file, facts)
        return
    try:
        there = json.loads(file.read_text())
        if _identity(there) == _identity(json.loads(json.dumps(finite(facts), default=str))):
            return
    except (ValueError, KeyError) as error:
        raise ValueError(f"{file} is no manifest ({error}); choose another out=DIR, or remove it") from error
    raise ValueError(f"{out} already holds another run; choose another out=DIR, or remove it")


def _identity(facts: Mapping[str, Any]) -> list[Any]:
    """What must agree for two runs to be one."""
    config = {key: value for key, value in facts["config"].items() if key not in ("out", "tracker")}
    return [config, facts["weights_sha256"], facts["prompts_sha256"]]


def write_json(file: Path, value: Any) -> None:
    """Write ``value`` as JSON, renamed into place once whole."""
    part = file.with_name(f".{file.name}.tmp")
    part.write_text(json.dumps(finite(value), indent=2, ensure_ascii=False, default=str) + "\n")
    part.replace(file)


def finite(value: Any) -> Any:
    """The same tree with NaN and infinities as None, as JSON wants it."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def without_secrets(value: Any) -> Any:
    """The same tree with the values of keys such as ``api_key`` or ``password`` blanked."""
    if isinstance(value, Mapping):
        return {
            key: "***" if SECRET.search(str(key)) and inner is not None else without_secrets(inner)
            for key, inner in value.items()
        }
    return [without_secrets(inner) for inner in value] if isinstance(value, list) else value


def commit(folder: Path) -> str | None:
    """The git commit that holds ``folder``, with "+" where files differ from it; None outside a repository."""

    def git(*command: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *command], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", str(folder / "__init__.py"))  # not merely inside somebody's repository
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def machine() -> dict[str, Any]:
    """Processor, cores, memory in GiB, operating system, GPUs."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "system": platform.platform(),
        "gpus": gpus,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = re.findall(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if names:
            return str(names[0])
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
