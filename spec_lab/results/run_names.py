"""Identity of a run of a sweep: its overrides, and the name of its folder."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from hashlib import sha256
from re import ASCII, sub

from spec_lab.results.redact import redacted

UNIDENTIFYING = ("output_dir", "tracker", "metrics", "retry", "overwrite", "verbose")
"""Options about where results go, what is computed from a run's rows, what is printed and retries: they do not make it
another run.
"""

MAX_NAME = 120  # characters of a folder's name

NAME = r"(?!\.+$)[\w.,=+@~-]{1,255}"
"""The pattern of ``folder_name``: the name of one folder inside the sweep's."""


def identifying(overrides: Iterable[str], further: Collection[str] = ()) -> tuple[str, ...]:
    """Return the overrides that identify a run, sorted, with secrets blanked; and those of ``further`` options."""
    left_out = {*UNIDENTIFYING}.difference(further)
    kept = (redacted(text) for text in overrides if key(text).partition(".")[0].partition("@")[0] not in left_out)
    return tuple(sorted(kept, key=lambda override: override.lstrip("+")))


def key(override: str) -> str:
    """Return the option that an override sets: the part before "=", without leading "+"."""
    return override.partition("=")[0].lstrip("+")


def folder_name(overrides: Iterable[str], hashed: bool = False) -> str:
    """Return the folder name of a run: no slashes, bounded length, different for different overrides.

    It ends with a hash where it must, or if it is to be ``hashed``.
    """
    kept = identifying(overrides)
    text = ",".join(override.lstrip("+") for override in kept) or "default"
    plain = sub(r"[^\w.,=+@~-]", "_", text, flags=ASCII)
    if len(plain) <= MAX_NAME and plain == text and not hashed:
        return plain
    whole = ",".join(kept) if hashed else text
    return f"{plain[: MAX_NAME - 13]}-{sha256(whole.encode()).hexdigest()[:12]}"
