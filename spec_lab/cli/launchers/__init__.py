"""Sweeps on a cluster: ``hydra/launcher=slurm`` and ``hydra/launcher=ray``.

The engine (Slurm, Ray) schedules, runs and restarts jobs. A job is one run of the sweep, as on one machine, and records
in its folder how it ended. If it could not (it was cancelled, killed, or ran out of time), the launcher records the
reason there: such a run is pending, and the same command resumes it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from socket import gethostname
from typing import Any, NamedTuple, Protocol

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from spec_lab.cli.jobs import before
from spec_lab.cli.refusals import Refused, reason
from spec_lab.results import run_state, sweep


@dataclass(frozen=True)
class Common:
    """Shared by all jobs of a sweep, as Hydra passes it to a launcher.

    Args:
        context: Hydra's config loader and callbacks.
        state: Hydra's singletons.
        directory: the command's working directory, to which paths are relative.
    """

    context: HydraContext
    task: TaskFunction
    config: DictConfig
    state: Any
    directory: Path

    def compose(self, overrides: Sequence[str], number: int) -> DictConfig:
        """Return the config of the sweep's ``number``-th run, which has these overrides."""
        config = self.context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = f"{config.hydra.job.name}_{number}"
            config.hydra.job.num = number
        return config


@dataclass(frozen=True)
class Job:
    """One run, which can be sent to another process; each call resumes from the run's finished groups."""

    common: Common
    overrides: tuple[str, ...]
    number: int

    def __call__(self) -> Any:
        """Run it; return what the task returns.

        Raises:
            Refused: the sweep's working directory does not exist on this node.
            Exception: as the task.
        """
        try:
            os.chdir(self.common.directory)
        except OSError as error:
            raise Refused(
                f"spec_lab: {self.common.directory}, where the sweep was started, does not exist on {gethostname()}: "
                "start it on a disk that all nodes share"
            ) from error
        Singleton.set_state(self.common.state)
        setup_globals()
        config = self.common.compose(self.overrides, self.number)
        try:
            done = run_job(self.common.task, config, "hydra.sweep.dir", "hydra.sweep.subdir", self.common.context)
        except SystemExit as left:
            if isinstance(left.code, str):  # a refusal: engines pass on errors only
                raise Refused(left.code) from left
            raise
        return done.return_value


class Queued(NamedTuple):
    """A job that an engine has accepted.

    Args:
        number: the job's index in the list.
        id: the engine's name of the job.
    """

    number: int
    id: str


class JobEnded(NamedTuple):
    """A job that has ended.

    Args:
        number: the job's index in the list.
        failure: how it ended if it could not record that itself, such as "CANCELLED by 1000"; else empty.
    """

    number: int
    value: Any = None
    error: Exception | None = None
    failure: str = ""


class Backend(Protocol):
    """Schedules, runs and restarts jobs: ``slurm.Slurm``, ``ray.Ray``."""

    def living(self) -> Collection[str]:
        """Return the names of runs that an earlier launcher submitted and whose jobs are pending or running."""
        ...

    def launch(self, jobs: Sequence[Job], names: Sequence[str]) -> Iterator[Queued | JobEnded]:
        """Submit the jobs that are not living, and wait for all. Yield each when it is accepted and when it ends.

        Raises:
            Refused: the jobs cannot start; the message states why.
        """
        ...


def launch(
    engine: str, options: Mapping[str, Any], common: Common, job_overrides: Sequence[Sequence[str]], first: int
) -> list[JobReturn]:
    """Run every run that has not ended yet on a cluster.

    Args:
        engine: "slurm" or "ray": a module of this package, whose function ``engine`` builds a ``Backend`` from the
            folder for its own files and from the options.
        options: the engine's options; see ``conf/hydra/launcher``.
        first: number of the first run in the sweep.

    Raises:
        Refused: an unknown or invalid option; the engine is not installed, or does not accept the jobs.
    """
    out = Path(common.config.hydra.sweep.dir)
    jobs = [Job(common, tuple(overrides), first + n) for n, overrides in enumerate(job_overrides)]
    folders = sweep.folders(out, [job.overrides for job in jobs])
    ended = {n: _ended(job, folder) for n, (job, folder) in enumerate(zip(jobs, folders, strict=True))}
    if left := [n for n, known in ended.items() if known is None]:
        made, names = _engine(engine, out, options), [folders[n].name for n in left]
        queued = len({*names} & {*made.living()})
        known = f"{len(jobs) - len(left)} ended before, {queued} are queued already"
        _say(out, f"{len(jobs)} runs, of which {known}: submitting {len(left) - queued} to {engine}")
        for reported in made.launch([jobs[n] for n in left], names):
            n = left[reported.number]
            if isinstance(reported, Queued):
                run_state.queue(folders[n], engine, reported.id)
                continue
            ended[n] = reported
            if reported.error is None and run_state.ended(folders[n]) is None:
                run_state.fail_job(folders[n], engine, failure := reported.failure or "its job ended without a result")
                _say(out, f"{sweep.which_run(folders[n])}: its job failed ({failure}); the same command resumes it")
    return [_returned(job, ended[n]) for n, job in enumerate(jobs)]


def _engine(engine: str, out: Path, options: Mapping[str, Any]) -> Backend:
    try:
        made: Backend = import_module(f"{__name__}.{engine}").engine(out / f".{engine}", **options)
    except ImportError as error:
        raise Refused(
            f"spec_lab: hydra/launcher={engine} requires the extra {engine} ({error}): pip install 'spec-lab[{engine}]'"
        ) from error
    except (TypeError, ValueError) as error:
        raise Refused(f"spec_lab: hydra.launcher: {reason(error)}") from error
    return made


def _returned(job: Job, how: JobEnded | None) -> JobReturn:
    """Return the result for Hydra's sweepers. A pending run has no value; reading the value of a failed one raises."""
    value = (how.error or how.value) if how else None
    status = JobStatus.FAILED if how and how.error else JobStatus.COMPLETED
    return JobReturn(overrides=list(job.overrides), status=status, _return_value=value)


def _ended(job: Job, folder: Path) -> JobEnded | None:
    """Return how the run ended before; None if it must run."""
    if run_state.ended(folder) is None:
        return None
    config = job.common.compose(job.overrides, job.number)
    config = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    return JobEnded(job.number) if before(config, folder) else None


def _say(out: Path, what: str) -> None:
    print(f"{out}: {what}", file=sys.stderr, flush=True)
