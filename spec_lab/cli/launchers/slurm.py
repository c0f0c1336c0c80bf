"""Jobs on Slurm, submitted in arrays with submitit.

submitit writes the batch script, requeues a job that ran out of time or was preempted, and returns a job's result. What
it does not report (cancelled jobs, jobs that will never start) is read from squeue and sacct here.

Each array has a folder, which is also the comment of its jobs in Slurm. ``runs.json`` there names its runs and is
written before the array is submitted, so that the next launcher finds the jobs of one that was killed at any moment.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError, UncompletedJobError

from spec_lab.cli.launchers import Job, JobEnded, Queued
from spec_lab.cli.refusals import Refused
from spec_lab.core.faults import Passing
from spec_lab.core.files import read_json, write_json
from spec_lab.core.options import whole

ARRAY = 1000
"""Maximum number of jobs of an array: below Slurm's default limit (MaxArraySize)."""

HOPELESS = (
    "AccountNotAllowed", "AssocMaxCpuPerJobLimit", "AssocMaxGRESPerJob", "AssocMaxMemPerJob", "AssocMaxNodePerJobLimit",
    "AssocMaxWallDurationPerJobLimit", "BadConstraints", "DependencyNeverSatisfied", "InvalidAccount", "InvalidQOS",
    "PartitionNodeLimit", "PartitionTimeLimit", "QOSMaxCpuPerJobLimit", "QOSMaxGRESPerJob", "QOSMaxMemoryPerJob",
    "QOSMaxNodePerJobLimit", "QOSMaxWallDurationPerJobLimit", "QOSMinCpuNotSatisfied", "QOSMinGRES", "QOSMinMemory",
    "QOSNotAllowed", "ReservationDeleted", "launch failed requeued held",
)  # fmt: skip
"""Slurm's reasons for a pending job that will never start."""

USUAL = ("None", "Resources", "Priority", "BeginTime", "Dependency", "JobArrayTaskLimit", "Prolog", "Cleaning")
"""Slurm's reasons for a pending job that will start."""

MAY_REAPPEAR = ("COMPLETED", "NODE_FAIL", "PREEMPTED")
"""States of jobs outside the queue whose result may still appear on the disk, or which Slurm may start again."""

SECONDS = 60
"""Seconds to wait for Slurm's answer, and for a job's result file to appear on the shared disk."""

PATIENCE = 600
"""Seconds without an answer from Slurm after which the launcher gives up."""


class Known(NamedTuple):
    """A pending or running job in Slurm's queue: its state, the reason why it is pending, and its comment."""

    state: str
    why: str
    comment: str


@dataclass(frozen=True)
class Slurm:
    """Slurm as a ``Backend``.

    Args:
        folder: holds the arrays' folders.
        parameters: of submitit's executor.
        restarts: how often a job that runs out of time is restarted.
        poll: seconds between two calls of squeue.
        queue: the queue when the launcher started, by job id.
    """

    folder: Path
    parameters: dict[str, Any]
    restarts: int
    poll: float
    queue: dict[str, Known]

    def living(self) -> dict[str, str]:
        """See ``Backend``."""
        job_ids = {}
        for job_id, known in self.queue.items():
            array = Path(known.comment)
            if array.parent == self.folder:
                runs = (read_json(array / "runs.json") or {"runs": []})["runs"]
                job_ids.update(
                    {runs[index]: job_id for index in [int(job_id.partition("_")[2] or 0)] if index < len(runs)}
                )
        return job_ids

    def launch(self, jobs: Sequence[Job], names: Sequence[str]) -> Iterator[Queued | JobEnded]:
        """See ``Backend``."""
        living = self.living()
        waiting = {n: self._job(living[name]) for n, name in enumerate(names) if name in living}
        new = [n for n, name in enumerate(names) if name not in living]
        for first in range(0, len(new), ARRAY):
            batch = new[first : first + ARRAY]
            try:
                handed = self._handed([jobs[n] for n in batch], [names[n] for n in batch])
            except (FailedJobError, FailedSubmissionError) as error:
                why = "; ".join(line.removeprefix("sbatch: error: ") for line in str(error).strip().splitlines())
                if not waiting:
                    raise Refused(f"spec_lab: hydra/launcher=slurm: Slurm does not accept the jobs: {why}") from error
                yield from (JobEnded(n, failure=f"not accepted by Slurm: {why}") for n in new[first:])
                break
            for n, job in zip(batch, handed, strict=True):
                waiting[n] = job
                yield Queued(n, job.job_id)
        try:
            yield from self._ended(waiting)
        except KeyboardInterrupt:
            arrays = " ".join(sorted({job.job_id.partition("_")[0] for job in waiting.values()}))
            print(f"\n{len(waiting)} jobs keep running in Slurm; scancel {arrays} ends them.", file=sys.stderr)
            raise

    def _job(self, job_id: str) -> submitit.Job[Any]:
        return submitit.SlurmJob(Path(self.queue[job_id].comment) / "%j", job_id)

    def _handed(self, jobs: Sequence[Job], names: Sequence[str]) -> list[submitit.Job[Any]]:
        array = self.folder / uuid4().hex[:12]
        array.mkdir(parents=True)
        write_json(array / "runs.json", {"runs": list(names)})
        executor = submitit.SlurmExecutor(array / "%j", max_num_timeout=self.restarts)
        more = self.parameters["additional_parameters"] | {"comment": str(array)}
        executor.update_parameters(**self.parameters | {"additional_parameters": more})
        settings = {name: os.environ[name] for name in os.environ if name == "SLURM_CONF" or name.startswith("SBATCH_")}
        with submitit.helpers.clean_env():  # this process may itself run in a Slurm job or under torchrun
            os.environ.update(settings)  # the user's settings of the cluster
            with executor.batch():
                return [executor.submit(_Again(job)) for job in jobs]

    def _ended(self, waiting: dict[int, submitit.Job[Any]]) -> Iterator[JobEnded]:
        """Yield each job when it ends, and remove it from ``waiting``.

        Raises:
            Refused: Slurm has not answered for ``PATIENCE`` seconds.
        """
        answered, told = time.monotonic(), set[str]()
        gone: dict[int, float] = {}  # the time since which a job is not in the queue
        while waiting:
            time.sleep(self.poll)
            now = time.monotonic()
            if (queue := _queue()) is None:  # Slurm's controller may be restarting
                if now - answered > PATIENCE:
                    raise Refused(
                        f"spec_lab: hydra/launcher=slurm: Slurm has not answered for {PATIENCE} seconds; "
                        f"{len(waiting)} jobs were submitted, and the same command waits for them"
                    )
                continue
            answered = now
            gone = {n: gone.get(n, now) for n, job in waiting.items() if job.job_id not in queue}
            for n in [n for n in gone if waiting[n].paths.result_pickle.exists()]:
                del gone[n]
                yield _result(n, waiting.pop(n))
            why = _why({waiting[n].job_id for n, since in gone.items() if since < now})
            for n in [n for n in gone if waiting[n].job_id in why]:
                how = why[waiting[n].job_id]
                if not how.startswith(MAY_REAPPEAR) or now - gone[n] > SECONDS:
                    del gone[n], waiting[n]
                    yield JobEnded(n, failure=how)
            for n, job in list(waiting.items()):
                state, reason, _ = queue.get(job.job_id, Known("", "", ""))
                if state == "PENDING" and reason not in (*USUAL, *told):
                    told.add(reason)
                    print(f"Slurm job {job.job_id} is pending: {reason}", file=sys.stderr, flush=True)
                if state == "PENDING" and reason in HOPELESS:
                    job.cancel(check=False)
                    del waiting[n]
                    yield JobEnded(n, failure=f"cancelled, as it would never start: {reason}")


class NotRestarted(Passing):
    """The job ran out of time once more than it may be restarted."""


class QueuedAgain(BaseException):
    """The job was queued again and must end. Not a ``SystemExit``: that would be taken for one of a part's code."""


def _handle(handler: Callable[..., object], *given: object) -> None:
    """Call a handler of submitit's, whose error, at any place of the job's code, is not that of the part there.

    Raises:
        NotRestarted: in place of ``UncompletedJobError``.
        QueuedAgain: in place of ``SystemExit``.
    """
    try:
        handler(*given)
    except UncompletedJobError as error:
        raise NotRestarted(str(error)) from None
    except SystemExit:
        raise QueuedAgain from None


class _Again:
    """A job that submitit can restart."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self) -> Any:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            if callable(handler := signal.getsignal(number)):
                signal.signal(number, partial(_handle, handler))
        try:
            return self.job()
        except QueuedAgain:
            sys.exit(-1)  # as submitit does

    def checkpoint(self) -> Any:
        """Return the submission of a restart: the job resumes from its finished groups."""
        return submitit.helpers.DelayedSubmission(self)


def engine(
    folder: Path,
    partition: str | None = None,
    account: str | None = None,
    qos: str | None = None,
    constraint: str | None = None,
    minutes: int = 240,
    cpus: int = 2,
    memory_gb: float | None = 8,
    gpus: int = 0,
    requeue: bool = True,
    restarts: int = 10,
    at_once: int = 256,
    setup: Sequence[str] = (),
    sbatch: dict[str, Any] | None = None,
    poll: float = 10,
) -> Slurm:
    """Connect to Slurm.

    Args:
        folder: for submitit's scripts and logs; on a disk that all nodes share, like the sweep.
        partition, account, qos, constraint: options of ``sbatch``; None for the cluster's default.
        minutes: time limit of a job.
        cpus, memory_gb, gpus: resources of a job; None for memory uses the cluster's default.
        requeue: whether Slurm may restart a job that was preempted or whose node failed.
        restarts: how often a job that runs out of time is restarted.
        at_once: maximum number of jobs of an array (1000 jobs) that run at the same time.
        setup: shell commands that run before Python.
        sbatch: further options of ``sbatch``, by their long names.
        poll: seconds between two calls of squeue.

    Raises:
        ImportError: submitit is not installed.
        TypeError, ValueError: an unknown option or an invalid value.
        Refused: this machine has no Slurm commands, or Slurm does not answer.
    """
    for name, number in (("minutes", minutes), ("cpus", cpus), ("at_once", at_once)):
        whole(f"hydra.launcher.{name}", number)
    if missing := [name for name in ("sbatch", "srun", "squeue") if shutil.which(name) is None]:
        raise Refused(
            f"spec_lab: hydra/launcher=slurm: the command {missing[0]} is missing; run this on a node that submits jobs"
        )
    if (queue := _queue()) is None:
        raise Refused("spec_lab: hydra/launcher=slurm: Slurm does not answer (squeue fails); check its controller")
    parameters = {
        "job_name": "spec_lab", "partition": partition, "account": account, "qos": qos, "constraint": constraint,
        "time": minutes, "cpus_per_task": cpus, "gpus_per_node": gpus or None, "array_parallelism": at_once,
        "mem": None if memory_gb is None else f"{round(memory_gb * 1024)}M", "signal_delay_s": 60,
        "setup": [f"export OMP_NUM_THREADS={cpus}", *setup],
        "srun_args": [f"--cpus-per-task={cpus}"],  # Slurm 22.05 to 23.02 would give the step one core
        "additional_parameters": {"requeue" if requeue else "no-requeue": True, **(sbatch or {})},
    }  # fmt: skip
    return Slurm(folder.absolute(), parameters, restarts, poll, queue)


def _asks(*command: str) -> str | None:
    """Return the output of a Slurm command; None if it fails."""
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if asked.returncode else asked.stdout


def _queue() -> dict[str, Known] | None:
    """Return this user's pending and running jobs by id; None if Slurm does not answer."""
    answer = _asks("squeue", "--me", "--noheader", "--array", "--format=%i|%T|%r|%k")
    if answer is None:
        return None
    lines = (line.split("|", 3) for line in answer.splitlines())
    return {job_id: Known(*known) for job_id, *known in lines}


def _why(ids: Collection[str]) -> dict[str, str]:
    """Return how jobs that left the queue without a result ended, by id."""
    if not ids:
        return {}
    shown = ["--noheader", "--parsable2", "--allocations", "--format=JobID,State,ExitCode,NodeList"]
    answer = _asks("sacct", *shown, f"--jobs={','.join(ids)}")
    if answer is None:
        return dict.fromkeys(ids, "left the queue without a result, and sacct does not answer")
    states = {}
    for job_id, state, exit_code, nodes in (line.split("|") for line in answer.splitlines()):
        code, _, signal = exit_code.partition(":")
        how = f", exit code {code}" * (code != "0") + f", signal {signal}" * (signal != "0")
        states[job_id] = state + how + f", on {nodes}" * (nodes != "None assigned")
    # sacct is some seconds behind squeue and may still list an ended job as running
    still = ("PENDING", "RUNNING", "REQUEUED")
    return {job_id: what for job_id, what in states.items() if not what.startswith(still)}


def _result(n: int, job: submitit.Job[Any]) -> JobEnded:
    """Return how the job ended: its result, its error, or why submitit has none."""
    failed = job.exception()
    if failed is None:
        return JobEnded(n, job.result())
    trace = str(failed).partition("----------------------")[2].rpartition("----------------------")[0]
    last_line = [line for line in trace.splitlines() if line.strip()][-1]
    kind, _, text = last_line.partition(": ")
    if kind.endswith(("UncompletedJobError", "NotRestarted")):
        return JobEnded(n, failure=text.removeprefix("Job not requeued because: ").rstrip("."))
    return JobEnded(n, error=Refused(text if kind.endswith("Refused") else f"spec_lab: {last_line}"))
