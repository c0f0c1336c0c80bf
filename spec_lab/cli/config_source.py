"""Config files that Hydra reads from folders, as by its own source, but checked before they are expanded."""

from __future__ import annotations

from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult

from spec_lab.cli.yaml_files import MAX_CONFIG, read_yaml
from spec_lab.core.files import read_text


class CheckedFiles(FileConfigSource):
    """A folder of config files."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a config.

        Raises:
            ValueError: its file is a pipe or a device, is too large, or its aliases stand for too many values.
        """
        file = Path(self.path, self._normalize_file_name(config_path))
        if file.exists() and "*" in read_text(file, MAX_CONFIG):  # YAML is read twice only where there may be an alias
            read_yaml(file)
        return super().load_config(config_path)


def check_config_files() -> None:
    """Let Hydra read the config files of folders by ``CheckedFiles``, in this process."""
    Plugins.instance()  # registers Hydra's own sources
    SourcesRegistry.instance().types["file"] = CheckedFiles
