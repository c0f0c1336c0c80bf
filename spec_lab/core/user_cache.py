"""The user's cache: step costs, answers of targets, and GGUF files as checkpoints, kept between runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def default_folder(environment: Mapping[str, str] | None = None) -> Path | None:
    """``$SPEC_LAB_CACHE``, else ``$XDG_CACHE_HOME/spec_lab``, else ``~/.cache/spec_lab``; None without a home.

    Args:
        environment: variables by name; None: those of this process.
    """
    environment = os.environ if environment is None else environment
    if given := environment.get("SPEC_LAB_CACHE"):
        return Path(given).absolute()
    given = environment.get("XDG_CACHE_HOME", "")
    if Path(given).is_absolute():  # the XDG specification ignores relative paths
        return Path(given, "spec_lab")
    try:
        return Path.home() / ".cache" / "spec_lab"
    except RuntimeError:
        return None
