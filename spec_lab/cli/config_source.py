"""Config files that Hydra reads from folders are checked before they are expanded."""

from __future__ import annotations

from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.plugins.config_source import ConfigResult

from spec_lab.cli.yaml_files import MAX_CONFIG, read_yaml
from spec_lab.core.files import read_text

READ = FileConfigSource.load_config


def load_checked(source: FileConfigSource, config_path: str) -> ConfigResult:
    """Return a config of a folder, as ``FileConfigSource.load_config``.

    Raises:
        ValueError: its file is a pipe or a device, is too large, or its aliases stand for too many values.
    """
    file = Path(source.path, source._normalize_file_name(config_path))
    if file.exists() and "*" in read_text(file, MAX_CONFIG):  # YAML is read twice only where there may be an alias
        read_yaml(file)
    return READ(source, config_path)


def check_config_files() -> None:
    """Let Hydra check the config files of folders, in this process.

    Its register of sources cannot hold a class of ours: it is copied to jobs, which register Hydra's own again.
    """
    FileConfigSource.load_config = load_checked
