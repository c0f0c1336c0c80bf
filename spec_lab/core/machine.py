"""The machine that timings depend on: the processor, its cores, and their use by other processes."""

from __future__ import annotations

import os
import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")

SLACK = 0.3
"""Cores that other processes may use beyond those that are free, as an idle system's services do."""


def processor() -> str:
    """Return the processor's model name."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = re.findall(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if names:
            return str(names[0])
    return platform.processor() or platform.machine()


def allowed_cores() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(allowed_cores())


@dataclass(frozen=True)
class Usage:
    """Seconds of processor time used up to a moment.

    Args:
        wall: the moment, in seconds of a monotonic clock.
        machine: by all processes on the cores that this process may use, time stolen by the hypervisor included; None
            if not known.
        process: by this process. Processes that it started count as others: they take cores from it as others do.
    """

    wall: float
    machine: float | None
    process: float

    @staticmethod
    def now() -> Usage:
        """Return the usage up to now. Only Linux reports that of all processes."""
        times = os.times()
        return Usage(time.monotonic(), _machine_seconds(), times.user + times.system)


def other_load(start: Usage, end: Usage) -> float | None:
    """Return how many cores other processes used on average between two moments; None if not known.

    Over moments as short as the ticks that processor time is counted in, rounding may make it negative: means over
    many such moments are right only if it stays so.

    The load average of the last minute would include what this process did before ``start``.
    """
    if start.machine is None or end.machine is None or end.wall <= start.wall:
        return None
    return ((end.machine - start.machine) - (end.process - start.process)) / (end.wall - start.wall)


def crowded(load: float | None, threads: int, cores: int) -> bool:
    """Return whether other processes needed the cores that a process with so many threads needs.

    Args:
        load: ``other_load``; None if not known, which counts as no load.
        threads: of this process.
        cores: of the machine.
    """
    return load is not None and load + threads > cores + SLACK


def _machine_seconds() -> float | None:
    """Return ``Usage.machine``."""
    try:
        lines = [line.split() for line in STAT.read_text().splitlines() if line.startswith("cpu")]
        allowed = {f"cpu{core}" for core in allowed_cores()}
        counted = [line for line in lines if line[0] in allowed] or lines[:1]
        ticks = 0
        for line in counted:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, line[1:9])
            ticks += user + nice + system + irq + softirq + steal
    except (OSError, ValueError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK") if counted else None
