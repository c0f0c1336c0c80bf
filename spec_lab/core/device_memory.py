"""How much memory a device has left, and how much this process uses at most."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
GROUPS = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")


def available(device: torch.device) -> int | None:
    """Return the bytes that this process can still allocate on a device; None if they are not known.

    On the CPU these are the memory that Linux can free without swapping, or what is left below the limit of a control
    group (a container, a Slurm job), where that is less. On a GPU they include what torch holds and does not use.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type != "cpu":
        return None
    rooms = [room for room in (_field(MEMINFO, "MemAvailable"), *group_room()) if room is not None]
    return max(min(rooms), 0) if rooms else None


def group_room(groups: Path = GROUPS, mount: Path = MOUNT) -> Iterator[int]:
    """Yield what is left below the limit of each control group of this process; page cache counts as left.

    Args:
        groups: the file that names its groups, of version 1 or 2.
        mount: where they are mounted.
    """
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, group = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        root = mount / "memory" if kinds else mount
        names = "memory.limit_in_bytes memory.usage_in_bytes" if kinds else "memory.max memory.current"
        prefix = "total_" if kinds else ""  # of the groups inside as well
        folder = root / group.lstrip("/")
        for ancestor in (folder, *folder.parents):
            with suppress(OSError, ValueError):  # no limit ("max"), or not visible from inside a container
                limit, used = (int((ancestor / name).read_text()) for name in names.split())
                stat = (ancestor / "memory.stat").read_text()
                cached = re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", stat, re.MULTILINE)
                yield limit - used + sum(map(int, cached))
            if ancestor == root:
                break


@dataclass(frozen=True)
class Peak:
    """The maximum memory that this process uses on a device from a moment on.

    Args:
        before: bytes in use at that moment; None if they are not known.
    """

    device: torch.device
    before: int | None

    @staticmethod
    def start(device: torch.device) -> Peak:
        """Begin to measure. Where Linux does not allow to reset the CPU's peak, it is that of the whole process."""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return Peak(device, torch.cuda.memory_allocated(device))
        with suppress(OSError):
            CLEAR.write_text("5")
        return Peak(device, _field(STATUS, "VmRSS"))

    def facts(self, decoded: bool = True) -> dict[str, int | None]:
        """Return the bytes in use before, and at most since then, for a record.

        Args:
            decoded: whether anything was; if not, there is no peak (a finished run's tables are written again).
        """
        if not decoded:
            return {"before_bytes": None, "peak_bytes": None}
        peak = _field(STATUS, "VmHWM")
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
        return {"before_bytes": self.before, "peak_bytes": peak}


def readable(size: float) -> str:
    """Return a number of bytes for a message."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB" if size < 1000 else f"{size:.0f} GiB"


def _field(file: Path, name: str) -> int | None:
    """Return a line's kibibytes as bytes; None where there is no such line."""
    with suppress(OSError):
        match = re.search(rf"^{name}:\s+(\d+) kB$", file.read_text(), re.MULTILINE)
        return int(match[1]) * 1024 if match else None
    return None
