"""Facts that the runs of one process share: expensive to find, and true as long as it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, eq=False)
class ProcessCache:
    """Facts that a process finds once. The command line owns one and passes it in; an empty one reuses nothing.

    Args:
        self_checks: what the self-check of a checkpoint found (``models.forests.Checked``), by weights and setting
            (``models.self_check.checked``). A sweep's next run does not check the same weights again.
        sources: versions and source hash of a top-level package (``results.sources.source``). A process runs the code
            that it imported, so an edit after the first look must not change what its runs record.
        digests: SHA-256 of files by path, names, sizes and times of modification (``results.sources.data``).
        certificates: summaries of the enumeration of a proposer with a verifier, by what the pair is made of
            (``tasks.benchmark``). A sweep's next run does not enumerate the same pair again.
    """

    self_checks: dict[tuple[str, ...], tuple[float, float, bool]] = field(default_factory=dict)
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    digests: dict[tuple[Path, tuple[tuple[str, int, int], ...]], str] = field(default_factory=dict)
    certificates: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)
