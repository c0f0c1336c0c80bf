"""Files of runs: written atomically, and read as untrusted input."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

MAX_BYTES = 64 * 2**20
"""Maximum size of a text file that is read: 64 MiB."""

MAX_DEPTH = 64
"""Maximum nesting of lists and mappings in a JSON file that is read."""

NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Unreadable(ValueError):
    """A file of a run with invalid contents; the message names the file."""


# Writing -----------------------------------------------------------------------------------------------------------


@contextmanager
def replacing(file: Path, tidy: bool = True) -> Iterator[BinaryIO]:
    """Open a stream whose contents replace ``file`` when the block ends without an error.

    A temporary file in the same folder is written and renamed. If ``file`` is a symlink, it is replaced, not followed.

    Args:
        tidy: also remove the temporary files for it that killed processes left, which lists the folder. Who writes many
            files into one folder calls ``remove_abandoned`` once instead.

    Raises:
        OSError: it cannot be written; names ``file``.
    """
    if tidy:
        remove_abandoned(file.parent, file.name)
    with _temporary(file) as (part, descriptor):
        with open(os.dup(descriptor), "wb") as stream:
            yield stream
        part.replace(file)


@contextmanager
def filling(out: Path) -> Iterator[Path]:
    """Make a folder whose files become those of ``out`` when the block ends without an error.

    Until then it is a temporary folder beside ``out``, or inside it if ``out`` exists, so that a shell in it stays in
    it.

    Args:
        out: a folder that does not exist, or is empty but for what a killed process left.

    Raises:
        OSError: ``out`` is something else, or cannot be written; names ``out``.
    """
    inner, exists = refuse_filled(out), out.is_dir()
    with _temporary(inner, folder=True, named=out) as (part, _):
        yield part
        if exists:
            _move_files(part, out)
        else:
            part.replace(out)


def refuse_filled(out: Path) -> Path:
    """Refuse a folder that ``filling`` cannot fill; return beside which path its temporary folder is made.

    Raises:
        OSError: as in ``filling``.
    """
    exists, absolute = out.is_dir(), out.absolute()
    inner = absolute / absolute.name if exists else absolute
    for file in (absolute, inner):
        remove_abandoned(file.parent, file.name)
    if out.is_symlink() or (out.exists() and (not exists or any(out.iterdir()))):
        what = "is a link" if out.is_symlink() else "is not empty" if exists else "is a file"
        raise FileExistsError(f"{out} {what}: name a folder that does not exist, or is empty")
    if not inner.parent.is_dir():
        raise FileNotFoundError(f"{out} cannot be made: {inner.parent} is no folder")
    return inner


def _move_files(part: Path, out: Path) -> None:
    """Move all files of a folder into another one, or none, and remove the folder."""
    names = sorted(file.name for file in part.iterdir())
    try:
        for name in names:
            (part / name).replace(out / name)
    except BaseException:
        for name in names:
            (out / name).unlink(missing_ok=True)
        raise
    part.rmdir()


@contextmanager
def _temporary(file: Path, folder: bool = False, named: Path | None = None) -> Iterator[tuple[Path, int]]:
    """Make a temporary file or folder beside ``file``; yield it and its descriptor.

    It has a random name, and is removed if the block ends with an error. A killed process leaves it behind: so it is
    locked while it is in use, and ``remove_abandoned`` removes those that nobody locks.

    Raises:
        OSError: names ``file``, or ``named`` if that is given, instead of the temporary file.
    """
    try:
        part, descriptor = _locked(file, folder)
        try:
            yield part, descriptor
        except BaseException:
            _remove(part)
            raise
        finally:
            os.close(descriptor)
    except OSError as error:
        if (about := _about(named or file, error, _names(file.name))) is error:
            raise
        raise about from error


def _locked(file: Path, folder: bool) -> tuple[Path, int]:
    """Make a temporary file or folder beside ``file``, locked until its descriptor is closed; return both."""
    while True:
        part = file.with_name(f".{file.name[:200]}.{secrets.token_hex(8)}.tmp")
        if folder:
            part.mkdir()
        kind = os.O_RDONLY if folder else os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            descriptor = os.open(part, kind | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            if folder:  # removed already, see below
                continue
            raise
        with suppress(OSError):  # some file systems have no locks: nothing is removed there
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if part.exists():
            return part, descriptor
        os.close(descriptor)  # another process took it for an abandoned one before it was locked


def remove_abandoned(folder: Path, name: str | None = None) -> None:
    """Remove the temporary files and folders in a folder that killed processes left.

    Args:
        folder: which may be missing.
        name: of the file that they were for; None for all.
    """
    names = _names(name)
    with suppress(OSError):
        for part in [part for part in folder.iterdir() if names.fullmatch(part.name)]:
            kind = os.O_RDONLY if part.is_dir() else os.O_WRONLY | os.O_NONBLOCK
            with suppress(OSError):
                descriptor = os.open(part, kind | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it is in use
                    _remove(part)
                finally:
                    os.close(descriptor)


def _names(name: str | None) -> re.Pattern[str]:
    """Return the pattern of the names of the temporary files and folders for a file of this name; None for any."""
    return re.compile(rf"\.{'.+' if name is None else re.escape(name[:200])}\.[0-9a-f]{{16}}\.tmp", re.DOTALL)


def _remove(part: Path) -> None:
    if part.is_dir() and not part.is_symlink():
        shutil.rmtree(part, ignore_errors=True)
    else:
        part.unlink(missing_ok=True)


def _about(file: Path, error: OSError, names: re.Pattern[str]) -> OSError:
    """Return the error about ``file`` if it is about nothing or a temporary file; with advice if the disk is full.

    Args:
        names: of temporary files.
    """
    parts = () if error.filename is None else Path(str(error.filename)).parts
    if error.errno is None or (parts and not any(map(names.fullmatch, parts))):
        return error
    hint = ""
    if error.errno in NO_SPACE:
        hint = "; no partial file was left: free some space, then run the same command again "
        hint += "(a sweep's with retry=true)"
    return OSError(error.errno, f"{error.strerror or os.strerror(error.errno)}{hint}", str(file))


def write_text(file: Path, text: str, errors: str = "strict") -> None:
    """Write UTF-8, as ``replacing`` does.

    Raises:
        OSError: it cannot be written; nothing is left behind.
        ValueError: a lone surrogate in ``text``, unless ``errors`` handles it.
    """
    data = text.encode("utf-8", errors)
    with replacing(file) as stream:
        stream.write(data)


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write a mapping atomically; values that JSON cannot hold are written as text.

    Raises:
        OSError: it cannot be written; nothing is left behind.
        ValueError: NaN or an infinity in it.
    """
    write_text(file, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n")


def own_folder(folder: Path) -> Path:
    """Make a folder inside a run's directory unless it exists; return it.

    Raises:
        OSError: it cannot be made.
        Unreadable: as ``refuse_link``.
    """
    refuse_link(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def refuse_link(folder: Path) -> None:
    """Refuse a folder inside a run's directory that is a symlink: files outside would be written or removed.

    Raises:
        Unreadable: it is one.
    """
    if folder.is_symlink():
        raise Unreadable(f"{folder} is a symlink; remove it, or put the folder itself in its place")


# Reading -----------------------------------------------------------------------------------------------------------


@contextmanager
def open_regular(file: Path) -> Iterator[BinaryIO]:
    """Open a regular file, or a symlink to one, for reading; never wait for a pipe.

    Raises:
        OSError: it does not exist, or cannot be opened.
        ValueError: it is a folder, pipe or device; the message names it.
    """
    if stat.S_ISDIR(os.stat(file).st_mode):
        raise Unreadable(f"{file} is not readable (it is a folder)")
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    with open(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Unreadable(f"{file} is not readable (it is no regular file)")
        yield stream


def file_hash(*files: Path) -> str:
    """Return the SHA-256 of regular files, one after another.

    Raises:
        OSError, ValueError: one cannot be read; is no regular file.
    """
    digest = hashlib.sha256()
    for file in files:
        with open_regular(file) as stream:
            while block := stream.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def read_text(file: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a regular file in UTF-8.

    Args:
        file: the file, or a symlink to one.
        max_bytes: maximum size of the file, in bytes.

    Raises:
        OSError: it does not exist, or cannot be opened.
        ValueError: it is not a regular file (but a pipe, device or folder), is larger, or is not UTF-8; names it.
    """
    with open_regular(file) as stream:
        data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise Unreadable(f"{file} is not readable (it is larger than {max_bytes} bytes)")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"{file} is not readable (not UTF-8: byte {error.start})") from error


def read_json(file: Path, max_bytes: int = MAX_BYTES, any_number: bool = False) -> dict[str, Any] | None:
    """Return the mapping in a JSON file; None if there is no file.

    Args:
        max_bytes: as in ``read_text``.
        any_number: also allow NaN, infinities and whole numbers of more than 64 bits (up to 1000 digits), which
            checkpoints hold: a tokenizer without a maximum length writes 10**30 for it.

    Raises:
        ValueError: it is not a JSON mapping, is nested deeper than ``MAX_DEPTH``, or holds NaN, an infinity, a whole
            number of more than 64 bits or a lone surrogate; names it.
        OSError: it cannot be opened.
    """
    try:
        text = read_text(file, max_bytes)
    except FileNotFoundError:
        return None
    try:
        if any_number:
            mapping = json.loads(text, parse_int=_long)
        else:
            mapping = json.loads(text, parse_constant=_refuse, parse_float=_finite, parse_int=_whole)
        if not isinstance(mapping, dict):
            raise ValueError(f"it holds {type(mapping).__name__}, not a mapping")
        _check(mapping)
    except RecursionError as error:
        raise Unreadable(f"{file} is not readable (nested deeper than {MAX_DEPTH} levels)") from error
    except ValueError as error:
        raise Unreadable(f"{file} is not readable ({error})") from error
    return mapping


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number in JSON")


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{digits[:24]} is out of range")
    return value


def _whole(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (value := int(digits)) < 2**64:
        raise ValueError(f"{digits[:24]} is out of range")
    return value


def _long(digits: str) -> int:
    if len(digits) > 1000:
        raise ValueError(f"{digits[:24]}... has {len(digits)} digits")
    return int(digits)


def _check(value: Any) -> None:
    """Refuse too deep nesting and texts that cannot be written as UTF-8."""
    left: list[tuple[Any, int]] = [(value, 1)]
    while left:
        item, depth = left.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(item, str):
            item.encode()
        elif isinstance(item, dict):
            left += [(inner, depth + 1) for pair in item.items() for inner in pair]
        elif isinstance(item, list):
            left += [(inner, depth + 1) for inner in item]


def expect(value: Any, shape: Any, name: str) -> None:
    """Check a value that was read from a file against a shape.

    Args:
        shape: a type, or a tuple of types and None, one of which it must have (a bool is no int, an int is a float);
            ``(None, shape)`` with one of the following shapes; a set of values that it may be; ``[shape]`` for a list
            of such; ``{"key": shape}`` for a mapping that has these keys, with ``"?key"`` for an optional one;
            ``{str: shape}`` for a mapping of any keys to such.
        name: what the value is called.

    Raises:
        ValueError: it has another shape; names the place.
    """
    if isinstance(shape, list):
        _of(value, (list,), name)
        for index, item in enumerate(value):
            expect(item, shape[0], f"{name}[{index}]")
    elif isinstance(shape, dict):
        _of(value, (dict,), name)
        for key, inner in shape.items():
            if key is str:
                for field, item in value.items():
                    expect(item, inner, f"{name}.{field}")
            elif key.lstrip("?") in value:
                expect(value[key.lstrip("?")], inner, f"{name}.{key.lstrip('?')}".lstrip("."))
            elif not key.startswith("?"):
                raise ValueError(f"{f'{name}.{key}'.lstrip('.')} is missing")
    elif isinstance(shape, set | frozenset):
        if not isinstance(value, str | int) or value not in shape:
            raise ValueError(f"{name} must be one of {', '.join(map(str, sorted(shape)))}, not {_short(value)}")
    elif isinstance(shape, tuple) and (inner := [kind for kind in shape if isinstance(kind, list | dict)]):
        if value is not None:  # the shape is (None, inner)
            expect(value, inner[0], name)
    else:
        _of(value, shape if isinstance(shape, tuple) else (shape,), name)


def _of(value: Any, kinds: tuple[Any, ...], name: str) -> None:
    if float in kinds:
        kinds = (*kinds, int)
    if type(value) not in {type(None) if kind is None else kind for kind in kinds}:
        words = dict.fromkeys(WORDS[kind] for kind in kinds if not (kind is int and float in kinds))
        raise ValueError(f"{name or 'it'} must be {' or '.join(words)}, not {_short(value)}")


WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a mapping",
    None: "null",
}


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."
