"""Config files that Hydra reads from folders are checked before they are expanded."""

from __future__ import annotations

from functools import wraps
from pathlib import Path

from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource

from spec_lab.cli.yaml_files import MAX_CONFIG, read_yaml
from spec_lab.core.files import read_text


def check_config_files() -> None:
    """Let Hydra check the config files of folders, in this process: a pipe, a device, a file that is too large or whose
    aliases stand for too many values is a ValueError.

    Its register of sources cannot hold a class of ours: it is copied to jobs, which register Hydra's own again. That
    class, which Hydra loads by itself, reads checked.
    """
    Plugins.instance()  # registers Hydra's own sources
    kind = SourcesRegistry.instance().types["file"]
    if hasattr(kind.load_config, "__wrapped__"):
        return
    plain = kind.load_config

    @wraps(plain)
    def load_checked(source: ConfigSource, config_path: str) -> ConfigResult:
        file = Path(source.path, source._normalize_file_name(config_path))
        if file.exists() and "*" in read_text(file, MAX_CONFIG):  # YAML is read twice only where there may be an alias
            read_yaml(file)
        return plain(source, config_path)

    kind.load_config = load_checked
