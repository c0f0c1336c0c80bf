"""The sweeper ``hydra/sweeper=search``. It is here because Hydra searches ``hydra_plugins``."""

from typing import Any

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from spec_lab.cli.search import search


class Search(Sweeper):
    """A search with Optuna. See ``spec_lab.cli.search.search``; ``conf/hydra/sweeper/search.yaml`` has the options."""

    def __init__(self, **_: Any) -> None:
        """``search`` reads the options from the config."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """See ``Sweeper``."""
        self.context, self.task, self.config = hydra_context, task_function, config

    def sweep(self, arguments: list[str]) -> None:
        """See ``Sweeper``."""
        search(self.context, self.task, self.config)
