"""Jobs on Ray, which keeps its worker processes between jobs, so that a short job starts fast."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # read by the import; else Ray drops the similar lines of other runs

import ray
from ray.exceptions import RayError, RayTaskError, TaskCancelledError

from spec_lab.cli.launchers import Job, JobEnded, Queued
from spec_lab.cli.refusals import Refused

SECONDS = 15
"""Seconds to wait for the cluster's answer."""


@dataclass(frozen=True)
class Ray:
    """Ray as a ``Backend``.

    Args:
        options: of each Ray task.
        fits: returns whether some node, if idle, is large enough for a job.
    """

    options: dict[str, Any]
    fits: Callable[[], bool]

    def living(self) -> Collection[str]:
        """See ``Backend``. Ray ends the jobs of a launcher that is gone."""
        return ()

    def launch(self, jobs: Sequence[Job], names: Sequence[str]) -> Iterator[Queued | JobEnded]:
        """See ``Backend``. Nothing is yielded when a job is accepted, since Ray's name of it is of no use later."""
        common = ray.put(jobs[0].common)
        call = ray.remote(**self.options)(_carry)
        waiting = {call.remote(common, job.overrides, job.number): n for n, job in enumerate(jobs)}
        warned = False
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=1)
            for reference in done:
                yield _result(waiting.pop(reference), reference)
            if not warned and not done and (warned := not self.fits()):
                print("No node of Ray is large enough for a job any more; waiting for one.", file=sys.stderr)


def engine(
    folder: Path,
    address: str | None = None,
    cpus: float = 2,
    gpus: float = 0,
    memory_gb: float | None = None,
    restarts: int = 3,
    grows: bool = False,
    env: dict[str, str] | None = None,
) -> Ray:
    """Connect to Ray, or start it on this machine.

    Args:
        folder: not used, since Ray keeps its own logs.
        address: of a running cluster; None uses ``RAY_ADDRESS`` if it is set, else starts Ray on this machine.
        cpus, gpus: number of each for a job.
        memory_gb: GiB of memory that a node must have free for a job; None for no requirement.
        restarts: how often a job is restarted after its worker or node was lost.
        grows: whether nodes may be added to the cluster, so that jobs wait for a node that is large enough.
        env: environment variables of the jobs, added to those of ``ray start``.

    Raises:
        ImportError: Ray is not installed.
        Refused: no cluster answers at the address; no node is large enough for a job.
    """
    where = address or os.environ.get("RAY_ADDRESS")
    if not ray.is_initialized():
        more = {} if where else {"include_dashboard": False}
        try:
            if where and where != "auto" and "://" not in where:  # Ray itself would try for minutes
                host, _, port = where.rpartition(":")
                socket.create_connection((host, int(port)), SECONDS).close()
            ray.init(address=where, logging_level="warning", runtime_env={"env_vars": env or {}}, **more)
        except (OSError, ValueError, RuntimeError) as error:
            raise Refused(
                f"spec_lab: hydra.launcher.address={where}: no Ray cluster answers there ({error}); start one, or "
                "correct the address"
            ) from error
    needs = {"CPU": cpus, "GPU": gpus, "memory": (memory_gb or 0) * 2**30}

    def nodes() -> list[dict[str, float]]:
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]

    def fits() -> bool:
        return grows or any(all(node.get(kind, 0) >= least for kind, least in needs.items()) for node in nodes())

    if not fits():
        largest = {kind: max((node.get(kind, 0) for node in nodes()), default=0) for kind in ("CPU", "GPU")}
        raise Refused(
            f"spec_lab: hydra/launcher=ray: no node is large enough for a job of {cpus:g} CPU, {gpus:g} GPU and "
            f"{memory_gb or 0:g} GB; the largest have {largest['CPU']:g} CPU, {largest['GPU']:g} GPU; request less, or "
            "set hydra.launcher.grows=true"
        )
    options = {"num_cpus": cpus, "num_gpus": gpus, "memory": needs["memory"] or None, "max_retries": restarts}
    return Ray(options, fits)


def _carry(common: Any, overrides: tuple[str, ...], number: int) -> Any:
    return Job(common, overrides, number)()


def _result(n: int, reference: Any) -> JobEnded:
    """Return how the task ended."""
    try:
        return JobEnded(n, ray.get(reference))
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        return JobEnded(n, error=cause)
    except TaskCancelledError:
        return JobEnded(n, failure="cancelled")
    except RayError as error:
        message = " ".join(str(error).split())
        return JobEnded(n, failure=f"{type(error).__name__}: {message.partition('. ')[0]}")
