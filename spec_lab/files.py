"""JSON files that a kill never leaves half written, and files read within bounds."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MOST_BYTES = 64 * 2**20
"""Largest text or JSON file that is read, in bytes, where nothing else is said."""


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


def read_text(file: Path, most: int = MOST_BYTES) -> str:
    """Return the text of a regular file.

    A pipe, a device or a directory is refused without being read, so that no path makes the process hang.

    Args:
        file: the path; symbolic links are followed.
        most: largest size in bytes.

    Raises:
        OSError: there is no such file, or it is not readable.
        ValueError: not a regular file, more than ``most`` bytes, or not UTF-8. The message names the file.
    """
    _regular(file, os.stat(file).st_mode)  # before opening: opening a device can have effects of its own
    with open(os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as stream:
        _regular(file, os.fstat(stream.fileno()).st_mode)
        content = stream.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{file} is larger than {most} bytes, the most that is read of such a file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_json(file: Path, most: int = MOST_BYTES) -> dict[str, Any] | None:
    """What a file holds; None where there is none.

    Raises:
        ValueError: not a regular file, more than ``most`` bytes, or no mapping in JSON (one nested too deeply for
            Python's parser included).
    """
    try:
        found = json.loads(read_text(file, most))
    except FileNotFoundError:
        return None
    except RecursionError as error:
        raise ValueError(f"{file} is not readable (its JSON is nested too deeply)") from error
    except ValueError as error:
        raise ValueError(f"{file} is not readable ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} is not readable (it holds {type(found).__name__}, not a mapping)")
    return found


def _regular(file: Path, mode: int) -> None:
    """Refuse what is no regular file."""
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        raise ValueError(f"{file} is not a regular file ({kind})")
