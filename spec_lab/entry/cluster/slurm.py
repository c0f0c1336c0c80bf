"""Jobs through Slurm, handed over by submitit, in arrays.

submitit writes the batch script, starts a job again that ran out of time or had to make room, and brings back what it
returned. What it does not tell (who was cancelled, what will never start) Slurm is asked for here.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError

from spec_lab.entry.cluster import Ended, Job, Queued
from spec_lab.entry.parts import Refused

ARRAY = 1000
"""Jobs handed over at once: one below what Slurm takes in an array by default (MaxArraySize)."""

HOPELESS = (
    "AccountNotAllowed", "AssocMaxCpuPerJobLimit", "AssocMaxGRESPerJob", "AssocMaxMemPerJob", "AssocMaxNodePerJobLimit",
    "AssocMaxWallDurationPerJobLimit", "BadConstraints", "InvalidAccount", "InvalidQOS", "PartitionNodeLimit",
    "PartitionTimeLimit", "QOSMaxCpuPerJobLimit", "QOSMaxGRESPerJob", "QOSMaxMemoryPerJob", "QOSMaxNodePerJobLimit",
    "QOSMaxWallDurationPerJobLimit", "QOSNotAllowed", "launch failed requeued held",
)  # fmt: skip
"""Why Slurm says that a job waits which will never start."""

USUAL = ("None", "Resources", "Priority", "BeginTime", "Dependency", "JobArrayTaskLimit", "Prolog", "Cleaning")
"""Why a job waits that will start by itself."""


@dataclass(frozen=True)
class Slurm:
    """See ``Engine``.

    Args:
        executor: submitit's.
        poll: seconds between two questions to Slurm.
        queue: what the queue held at first: jobs that still wait or run.
    """

    executor: submitit.SlurmExecutor
    poll: float
    queue: dict[str, tuple[str, str]]

    def living(self, id: str) -> bool:
        """See ``Engine``."""
        return id in self.queue

    def launch(self, jobs: Sequence[Job], ids: Sequence[str | None]) -> Iterator[Queued | Ended]:
        """See ``Engine``."""
        waiting = {n: submitit.SlurmJob(self.executor.folder, id) for n, id in enumerate(ids) if id is not None}
        new = [n for n, id in enumerate(ids) if id is None]
        for some in (new[first : first + ARRAY] for first in range(0, len(new), ARRAY)):
            for n, job in zip(some, self._submitted([jobs[n] for n in some]), strict=True):
                waiting[n] = job
                yield Queued(n, job.job_id)
        try:
            yield from self._ended(waiting)
        except KeyboardInterrupt:
            arrays = " ".join(sorted({job.job_id.partition("_")[0] for job in waiting.values()}))
            print(f"\n{len(waiting)} jobs go on in Slurm; scancel {arrays} ends them.", file=sys.stderr)
            raise

    def _submitted(self, jobs: Sequence[Job]) -> list[submitit.Job[Any]]:
        try:
            with self.executor.batch():
                return [self.executor.submit(_Again(job)) for job in jobs]
        except FailedJobError as error:
            said = "; ".join(line.removeprefix("sbatch: error: ") for line in str(error).strip().splitlines())
            raise Refused(f"spec_lab: hydra/launcher=slurm: Slurm does not take the jobs: {said}") from error

    def _ended(self, waiting: dict[int, submitit.Job[Any]]) -> Iterator[Ended]:
        """Each of the jobs as it ends, which empties ``waiting``."""
        asked, gone, told = time.monotonic(), set[int](), set[str]()
        while waiting:
            time.sleep(min(0.5, self.poll))
            for n in [n for n, job in waiting.items() if job.paths.result_pickle.exists()]:
                yield _result(n, waiting.pop(n))
            if time.monotonic() - asked < self.poll or (queue := _queue()) is None:
                continue  # a controller that does not answer may be starting anew
            asked = time.monotonic()
            missing = {n for n, job in waiting.items() if job.job_id not in queue}
            for n in missing & gone:  # twice: what a job wrote may take a while to be seen from here
                yield Ended(n, lost=_why(waiting.pop(n).job_id))
            gone = missing
            for n, job in list(waiting.items()):
                state, why = queue.get(job.job_id, ("", ""))
                if state == "PENDING" and why not in (*USUAL, *told):
                    told.add(why)
                    print(f"Slurm lets job {job.job_id} wait: {why}", file=sys.stderr, flush=True)
                if state == "PENDING" and why in HOPELESS:
                    job.cancel(check=False)
                    yield Ended(n, lost=f"cancelled, as it would never start: {why}")
                    del waiting[n]


class _Again:
    """A job that submitit may start again."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self) -> Any:
        return self.job()

    def checkpoint(self) -> Any:
        """What to start again: the job goes on from its finished groups."""
        return submitit.helpers.DelayedSubmission(self)


def engine(
    folder: Path,
    partition: str | None = None,
    account: str | None = None,
    qos: str | None = None,
    constraint: str | None = None,
    minutes: int = 60,
    cpus: int = 2,
    memory_gb: float = 8,
    gpus: int = 0,
    restarts: int = 10,
    at_once: int = 256,
    setup: Sequence[str] = (),
    sbatch: dict[str, Any] | None = None,
    poll: float = 10,
) -> Slurm:
    """Slurm as an engine.

    Args:
        folder: for submitit's scripts and logs; on a disk that all nodes share, as the sweep.
        partition, account, qos, constraint: as of ``sbatch``; None: the cluster's default.
        minutes: time limit of a job.
        cpus, memory_gb, gpus: of a job.
        restarts: how often a job that runs out of time is started again.
        at_once: most jobs that run at the same time.
        setup: lines of shell before Python.
        sbatch: further options of ``sbatch``, by their long names.
        poll: seconds between two questions to Slurm.

    Raises:
        ImportError: submitit is not installed.
        TypeError, ValueError: an option that there is not, or not so.
        Refused: there is no Slurm here, or it does not answer.
    """
    if shutil.which("sbatch") is None:
        raise Refused("spec_lab: hydra/launcher=slurm: there is no sbatch here; run this on a node that submits jobs")
    if (queue := _queue()) is None:
        raise Refused("spec_lab: hydra/launcher=slurm: Slurm does not answer (squeue fails); is its controller up?")
    executor = submitit.SlurmExecutor(folder.absolute() / "%j", max_num_timeout=restarts)
    executor.update_parameters(
        job_name="spec_lab", partition=partition, account=account, qos=qos, constraint=constraint, time=minutes,
        cpus_per_task=cpus, mem=f"{round(memory_gb * 1024)}M", gpus_per_node=gpus or None, array_parallelism=at_once,
        setup=list(setup), signal_delay_s=60, additional_parameters={"requeue": True, **(sbatch or {})},
    )  # fmt: skip
    return Slurm(executor, poll, queue)


def _queue() -> dict[str, tuple[str, str]] | None:
    """State and reason of each job of this user that waits or runs, by its id; None where Slurm does not answer."""
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i|%T|%r"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode:
        return None
    lines = (line.split("|", 2) for line in asked.stdout.splitlines())
    return {id: (state, why) for id, state, why in lines}


def _why(id: str) -> str:
    """What became of a job that left the queue without a result."""
    command = [
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        "--format=State,ExitCode,NodeList",
        f"--jobs={id}",
    ]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode or not asked.stdout.strip():
        return "it left the queue without a result, and sacct does not say why"
    state, code, nodes = asked.stdout.strip().splitlines()[-1].split("|")
    code, _, signal = code.partition(":")
    how = f", exit code {code}" * (code != "0") + f", signal {signal}" * (signal != "0")
    return state + how + f", on {nodes}" * (nodes != "None assigned")


def _result(n: int, job: submitit.Job[Any]) -> Ended:
    """What the job returned or raised."""
    failed = job.exception()
    if failed is None:
        return Ended(n, job.result())
    said = [line for line in str(failed).split("----------------------")[1].splitlines() if line.strip()][-1]
    kind, _, text = said.partition(": ")
    if kind.endswith("UncompletedJobError"):
        return Ended(n, lost=text.removeprefix("Job not requeued because: ").rstrip("."))
    return Ended(n, error=Refused(text if kind.endswith("Refused") else f"spec_lab: {said}"))
