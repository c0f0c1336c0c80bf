"""Sweeps on a cluster: ``hydra/launcher=slurm`` and ``hydra/launcher=ray``.

An engine (Slurm, Ray) places, runs and restarts jobs; nothing here schedules. A job is one run of the sweep, as on one
machine, and what it leaves in its folder says how it ended. What it cannot say itself (it was cancelled, killed, or ran
out of time) is recorded there by the launcher: such a run is waiting, and the same command resumes it.
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

from spec_lab.cli.build import Refused, reason
from spec_lab.cli.jobs import before
from spec_lab.results import sweep


@dataclass(frozen=True)
class Common:
    """What all jobs of a sweep share, as Hydra hands it to a launcher.

    Args:
        context: how configs are composed, and who is told of jobs.
        task: what carries a composed config out.
        config: the sweep's.
        state: Hydra's singletons.
        place: the directory where the command was given, from which paths are named.
    """

    context: HydraContext
    task: TaskFunction
    config: DictConfig
    state: Any
    place: Path

    def compose(self, overrides: Sequence[str], number: int) -> DictConfig:
        """The config of the run with these overrides, the ``number``-th of the sweep."""
        config = self.context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = f"{config.hydra.job.name}_{number}"
            config.hydra.job.num = number
        return config


@dataclass(frozen=True)
class Job:
    """One run, for whichever process carries it out: each call resumes from its finished groups."""

    common: Common
    overrides: tuple[str, ...]
    number: int

    def __call__(self) -> Any:
        """Carry it out; returns what the task returns, and raises what it raises."""
        try:
            os.chdir(self.common.place)
        except OSError as error:
            raise Refused(
                f"spec_lab: {self.common.place}, where the sweep was started, is not on {gethostname()}: start it on a "
                "disk that every node shares"
            ) from error
        Singleton.set_state(self.common.state)
        setup_globals()
        config = self.common.compose(self.overrides, self.number)
        done = run_job(self.common.task, config, "hydra.sweep.dir", "hydra.sweep.subdir", self.common.context)
        return done.return_value


class Queued(NamedTuple):
    """A job that an engine has taken on.

    Args:
        number: the job's place in the list.
        id: what the engine calls it.
    """

    number: int
    id: str


class JobEnded(NamedTuple):
    """A job that has ended.

    Args:
        number: the job's place in the list.
        value: what it returned.
        error: what it raised.
        lost: how it ended where it could not say so itself, such as "CANCELLED by 1000"; else empty.
    """

    number: int
    value: Any = None
    error: Exception | None = None
    lost: str = ""


class Backend(Protocol):
    """Places, runs and restarts jobs: ``slurm.Slurm``, ``ray.Ray``."""

    def living(self) -> Collection[str]:
        """The names of runs that an earlier launcher handed over, and whose jobs still wait or run."""
        ...

    def launch(self, jobs: Sequence[Job], names: Sequence[str]) -> Iterator[Queued | JobEnded]:
        """Hand over the jobs that are not living, and wait for all. Yields each as it is taken on, and as it ends.

        Raises:
            Refused: they cannot start; says why.
        """
        ...


def launch(
    engine: str, options: Mapping[str, Any], common: Common, job_overrides: Sequence[Sequence[str]], first: int
) -> list[JobReturn]:
    """Carry out every run that has not ended yet, on a cluster.

    Args:
        engine: "slurm" or "ray": a module of this package, whose ``engine`` makes a ``Backend`` of the folder for its
            own files and of the options.
        options: the engine's; see ``conf/hydra/launcher``.
        common: what the jobs share.
        job_overrides: the runs.
        first: the first one's number in the sweep.

    Raises:
        Refused: an option that there is not; an engine that is not installed, or does not take the jobs.
    """
    out = Path(common.config.hydra.sweep.dir)
    jobs = [Job(common, tuple(one), first + n) for n, one in enumerate(job_overrides)]
    folders = [out / sweep.folder_name(job.overrides) for job in jobs]
    ended = {n: _ended(job, folder) for n, (job, folder) in enumerate(zip(jobs, folders, strict=True))}
    if left := [n for n, known in ended.items() if known is None]:
        made, names = _engine(engine, out, options), [folders[n].name for n in left]
        queued = len({*names} & {*made.living()})
        known = f"{len(jobs) - len(left)} ended before, {queued} are queued already"
        _say(out, f"{len(jobs)} runs, of which {known}: {len(left) - queued} go to {engine}")
        for one in made.launch([jobs[n] for n in left], names):
            n = left[one.number]
            if isinstance(one, Queued):
                sweep.queue(folders[n], engine, one.id)
                continue
            ended[n] = one
            if one.error is None and sweep.ended(folders[n]) is None:
                sweep.lose(folders[n], engine, lost := one.lost or "its job ended without a result")
                _say(out, f"{sweep.place(folders[n])}: lost ({lost}); the same command resumes it")
    return [_returned(job, ended[n]) for n, job in enumerate(jobs)]


def _engine(engine: str, out: Path, options: Mapping[str, Any]) -> Backend:
    try:
        made: Backend = import_module(f"{__name__}.{engine}").engine(out / f".{engine}", **options)
    except ImportError as error:
        raise Refused(
            f"spec_lab: hydra/launcher={engine} needs what is not installed ({error}): pip install 'spec-lab[{engine}]'"
        ) from error
    except (TypeError, ValueError) as error:
        raise Refused(f"spec_lab: hydra.launcher: {reason(error)}") from error
    return made


def _returned(job: Job, how: JobEnded | None) -> JobReturn:
    """For Hydra's sweepers. A run that was lost returned nothing; what it raised is raised by who reads the value."""
    value = (how.error or how.value) if how else None
    status = JobStatus.FAILED if how and how.error else JobStatus.COMPLETED
    return JobReturn(overrides=list(job.overrides), status=status, _return_value=value)


def _ended(job: Job, folder: Path) -> JobEnded | None:
    """How the run ended before; None of one that must be carried out."""
    if sweep.ended(folder) is None:
        return None
    config = job.common.compose(job.overrides, job.number)
    config = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    return JobEnded(job.number) if before(config, folder) else None


def _say(out: Path, what: str) -> None:
    print(f"{out}: {what}", file=sys.stderr, flush=True)
