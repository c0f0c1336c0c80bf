"""JSON files that a kill never leaves half written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write a mapping, renamed into place once whole; what JSON does not know is written as text.

    Raises:
        OSError: it cannot be written; nothing is left behind.
        ValueError: NaN or an infinity in it.
    """
    part = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        part.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n")
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read_json(file: Path) -> dict[str, Any] | None:
    """What a file holds; None where there is none.

    Raises:
        ValueError: it is no mapping in JSON.
    """
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{file} is not readable ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} is not readable (it holds {type(found).__name__}, not a mapping)")
    return found
