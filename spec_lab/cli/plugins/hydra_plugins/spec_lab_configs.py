"""The configs of installed packages. It is here because Hydra searches ``hydra_plugins``."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from spec_lab.cli.bundled import ENTRY_POINTS, installed


class InstalledConfigs(SearchPathPlugin):
    """Appends the folders that the entry points ``spec_lab.conf`` name to the search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """See ``SearchPathPlugin``."""
        for folder in installed():
            search_path.append(ENTRY_POINTS, f"file://{folder}")
