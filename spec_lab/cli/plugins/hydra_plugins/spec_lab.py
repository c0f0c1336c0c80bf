"""The launchers ``hydra/launcher=slurm`` and ``=ray``. They are here because Hydra searches ``hydra_plugins``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from spec_lab.cli.launchers import Common, launch
from spec_lab.cli.refusals import Refused, refusing


class Cluster(Launcher):
    """Submits a sweep's runs to Slurm or Ray. See ``spec_lab.cli.launchers.launch``."""

    def __init__(self, engine: str, **options: Any) -> None:
        self.engine = engine
        self.options = options

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """See ``Launcher``."""
        self.common = Common(hydra_context, task_function, config, Singleton.get_state(), Path.cwd())

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """See ``Launcher``."""
        with refusing():
            jobs = launch(self.engine, self.options, self.common, job_overrides, initial_job_idx)
            for done in jobs:
                if done.status == JobStatus.FAILED and isinstance(done._return_value, Refused):
                    raise done._return_value
        return jobs
