"""The sweeper ``hydra/sweeper=search``: here, as Hydra takes sweepers from ``hydra_plugins`` alone."""

from typing import Any

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from spec_lab.cli.search import search


class Search(Sweeper):
    """Optuna's sweeper, which goes on from its storage. See ``spec_lab.cli.search.search``.

    Args:
        n_trials: wanted in all, with those of earlier commands.
        n_jobs: of them at once.
        direction: "maximize" or "minimize".
        storage: where Optuna keeps them, as a URL.
        study_name: their name there.
        sampler: chooses them.
        params: the range or the choices of each option that is searched.
    """

    def __init__(
        self,
        *,
        n_trials: int,
        n_jobs: int,
        direction: str,
        storage: str,
        study_name: str,
        sampler: Any,
        params: Any,
    ) -> None:
        """All are read from the config, as the door does before."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """See ``Sweeper``."""
        self.context, self.task, self.config = hydra_context, task_function, config

    def sweep(self, arguments: list[str]) -> None:
        """See ``Sweeper``."""
        search(self.context, self.task, self.config, arguments)
