"""Jobs through Ray: its workers are kept from job to job, so that a short job costs little."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # read by the import: every run says its own line

import ray
from ray.exceptions import RayError, RayTaskError, TaskCancelledError

from spec_lab.cli.build import Refused
from spec_lab.cli.launchers import Job, JobEnded, Queued

SECONDS = 15
"""How long a cluster may take to answer."""


@dataclass(frozen=True)
class Ray:
    """See ``Backend``.

    Args:
        options: of each task.
        fits: whether some node is large enough for a job, if it were idle.
    """

    options: dict[str, Any]
    fits: Callable[[], bool]

    def living(self) -> Collection[str]:
        """See ``Backend``. Ray ends the jobs of a launcher that is gone."""
        return ()

    def launch(self, jobs: Sequence[Job], names: Sequence[str]) -> Iterator[Queued | JobEnded]:
        """See ``Backend``. What Ray calls a job is of use to nobody, so that none is yielded as taken on."""
        common = ray.put(jobs[0].common)
        call = ray.remote(**self.options)(_carry)
        waiting = {call.remote(common, job.overrides, job.number): n for n, job in enumerate(jobs)}
        warned = False
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=1)
            for reference in done:
                yield _result(waiting.pop(reference), reference)
            if not warned and not done and (warned := not self.fits()):
                print("No node of Ray is large enough for a job any more: it waits for one.", file=sys.stderr)


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
    """Ray as an engine.

    Args:
        folder: of no use: Ray keeps its own logs.
        address: of a cluster that runs; None: what ``RAY_ADDRESS`` says, else a Ray of its own on this machine.
        cpus, gpus: of a job.
        memory_gb: that a node must have left for a job; None: any.
        restarts: how often a job is started again whose worker or node was lost.
        grows: whether nodes may be added to the cluster, so that a job waits which none is large enough for.
        env: environment variables of the jobs; what else they have, they have of ``ray start``.

    Raises:
        ImportError: Ray is not installed.
        Refused: no cluster answers there; no node is large enough for a job.
    """
    where = address or os.environ.get("RAY_ADDRESS")
    if not ray.is_initialized():
        own = {} if where else {"include_dashboard": False}
        try:
            if where and where != "auto" and "://" not in where:  # Ray itself takes minutes to give up
                host, _, port = where.rpartition(":")
                socket.create_connection((host, int(port)), SECONDS).close()
            ray.init(address=where, logging_level="warning", runtime_env={"env_vars": env or {}}, **own)
        except (OSError, ValueError, RuntimeError) as error:
            raise Refused(f"spec_lab: hydra/launcher=ray: no cluster answers at address={where} ({error})") from error
    needs = {"CPU": cpus, "GPU": gpus, "memory": (memory_gb or 0) * 2**30}

    def nodes() -> list[dict[str, float]]:
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]

    def fits() -> bool:
        return grows or any(all(node.get(one, 0) >= least for one, least in needs.items()) for node in nodes())

    if not fits():
        most = {one: max((node.get(one, 0) for node in nodes()), default=0) for one in ("CPU", "GPU")}
        raise Refused(
            f"spec_lab: hydra/launcher=ray: no node is large enough for a job of {cpus:g} CPU, {gpus:g} GPU and "
            f"{memory_gb or 0:g} GB; the largest have {most['CPU']:g} CPU, {most['GPU']:g} GPU; ask for less, or set "
            "hydra.launcher.grows=true"
        )
    options = {"num_cpus": cpus, "num_gpus": gpus, "memory": needs["memory"] or None, "max_retries": restarts}
    return Ray(options, fits)


def _carry(common: Any, overrides: tuple[str, ...], number: int) -> Any:
    return Job(common, overrides, number)()


def _result(n: int, reference: Any) -> JobEnded:
    """What the task returned or raised."""
    try:
        return JobEnded(n, ray.get(reference))
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        return JobEnded(n, error=cause)
    except TaskCancelledError:
        return JobEnded(n, lost="cancelled")
    except RayError as error:
        said = " ".join(str(error).split())
        return JobEnded(n, lost=f"{type(error).__name__}: {said.partition('. ')[0]}")
