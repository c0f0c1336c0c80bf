"""Compose configs once per process: children that are forked later need not."""

import os
import pickle
import sys
from contextlib import suppress
from pathlib import Path


def remember_compositions() -> None:
    """Let Hydra compose each config of this process and its forks once."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl

    compose, composed = ConfigLoaderImpl.load_configuration, {}

    def remembered(self, config_name, overrides, *more, **given):
        key = (config_name, tuple(overrides), str(more), str(given))
        if key not in composed:
            composed[key] = pickle.dumps(compose(self, config_name, overrides, *more, **given))
        return pickle.loads(composed[key])

    ConfigLoaderImpl.load_configuration = remembered


def compose(folder: Path, arguments: list[str]) -> None:
    """Compose every job of a sweep in the new directory ``place``, and run none."""
    from spec_lab.cli import main

    folder.mkdir()
    before = os.getcwd()
    os.chdir(folder)
    job, main.job, sys.argv = main.job, lambda _: None, ["spec-lab", *arguments]
    with suppress(SystemExit), open(os.devnull, "w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        main.main()
    sys.stdout, sys.stderr, main.job = sys.__stdout__, sys.__stderr__, job
    os.chdir(before)
