"""Any dataset, of the hub or in a local folder: options name the file and the column that holds the prompts.

Files are JSON Lines or Parquet, untrusted input with the bounds of ``records``, the listed size of a file of the hub
included. A dataset's scripts are neither downloaded nor run.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Unpack

from huggingface_hub import HfApi, hf_hub_download, is_offline_mode

from spec_lab.core.options import Count, Filled, WrongOption, brief
from spec_lab.core.options import checked as check_arguments
from spec_lab.models.checkpoint import one_line
from spec_lab.models.hub import TIMEOUT
from spec_lab.models.hub_name import HUB_NAME
from spec_lab.text.conversations import ChatOptions, chat_options, turns_of
from spec_lab.text.prompts import Prompt
from spec_lab.text.records import MAX_FILE, records, text_of, word

ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")
"""Endings of the files that are read."""

MAX_ENTRIES = 100_000
"""Maximum number of files and folders below a local folder, which are listed to find the data."""

ROLES = ("system", "user", "assistant")
"""Roles of the messages of a row."""


@check_arguments
def load(
    path: Filled,
    column: Filled,
    file: Filled | None = None,
    answer: Filled | None = None,
    revision: Filled | None = None,
    limit: Count | None = None,
    every: Count = 1,
    **chat: Unpack[ChatOptions],
) -> list[Prompt]:
    """Read a column of a dataset.

    Args:
        path: a dataset of the hub, OWNER/NAME; or a file, or a folder.
        column: the column of the prompts: texts, lists of a user's messages, or lists of messages with role and
            content, of which the user's are sent, each after the answer to the one before.
        file: the file in the dataset, JSON Lines (also .gz) or Parquet; None: the only one.
        answer: column of the answers, for the checker; None: there are none.
        revision: branch, tag or commit on the hub; None: main.
        limit: number of rows, from the first; None: all.
        every: 8: only each eighth of these, from the first; 1: all.
        chat: see ``ChatOptions``.

    Raises:
        OSError: there is no such file, or the hub cannot be reached.
        ValueError: an invalid option, several files, a file in another format, a row without a prompt.
    """
    how = chat_options(**chat)
    data = _local(path, file, revision) if Path(path).exists() else _fetched(path, file, revision)
    source = path if HUB_NAME.fullmatch(path) else Path(path).name
    columns = (column,) if answer is None else (column, answer)
    prompts = {}
    for where, row, record in islice(records(data, limit, columns=columns), 0, None, every):
        asked, own_system = _asked(record, column, where)
        expected = None if answer is None or record.get(answer) is None else word(record, answer, where)
        name = f"{Path(data).name.partition('.')[0]}-{row}"
        prompts[row] = how.prompt(name, asked, "", source, expected, system=own_system, where=where)
    return how.all_of(prompts, data)


def _asked(record: Mapping[str, Any], column: str, where: str) -> tuple[list[str], str]:
    """Return the user's messages of a row, and its system prompt, which may be empty."""
    value = record.get(column)
    if not isinstance(value, list) or not any(isinstance(message, Mapping) for message in value):
        return (turns_of(record, column, where) if isinstance(value, list) else [text_of(record, column, where)]), ""
    sent: dict[str, list[Any]] = {"user": [], "system": []}
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise ValueError(f"{where}: '{column}[{number}]' must have role and content, as every message of the list")
        role = str(message["role"])
        if role not in ROLES:
            raise ValueError(
                f"{where}: '{column}[{number}]' has the role {brief(role)}, but {', '.join(ROLES)} are known: leave "
                "such rows out, or choose another column"
            )
        if role == "system" and number:
            raise ValueError(
                f"{where}: '{column}[{number}]' is a system prompt, which only the first message can be: leave such "
                "rows out, or choose another column"
            )
        if role in sent:
            sent[role].append(message["content"])
    if not sent["user"]:
        raise ValueError(f"{where}: '{column}' has no message whose role is user")
    system = [text_of({column: text}, column, where, f"the system prompt of '{column}'") for text in sent["system"]]
    return turns_of({column: sent["user"]}, column, where), "".join(system)


def _local(path: str, file: str | None, revision: str | None) -> str:
    """Return the file at ``path``, or ``file`` in that folder."""
    if revision is not None:
        raise WrongOption(f"revision is of a dataset of the hub, but {path} is local: set revision=null")
    if Path(path).is_file():
        if file is not None:
            raise WrongOption(f"file={brief(file)} is in a folder or in a dataset of the hub, but {path} is a file")
        return path
    entries = list(islice(Path(path).rglob("*"), MAX_ENTRIES + 1))
    if len(entries) > MAX_ENTRIES:
        raise WrongOption(
            f"path={brief(path)} holds more than {MAX_ENTRIES} files and folders: set it to the file, or to the folder "
            "of the data alone"
        )
    names = [entry.relative_to(path).as_posix() for entry in sorted(entries) if entry.is_file()]
    return str(Path(path) / _chosen(names, file, path))


def _chosen(names: list[str], file: str | None, path: str) -> str:
    """Return ``file`` if it is one of the files that are read; None stands for the only one."""
    readable = [name for name in names if name.endswith(ENDINGS)]
    if not readable:
        raise WrongOption(f"path={brief(path)} holds no {', '.join(ENDINGS)} file: convert its data to one of them")
    if file in readable:
        return file
    if file is None and len(readable) == 1:
        return readable[0]
    shown = ", ".join(readable[:8]) + f" and {len(readable) - 8} more" * (len(readable) > 8)
    raise WrongOption(f"file must name a file of {path}, not {brief(file)}: {shown}")


def _fetched(path: str, file: str | None, revision: str | None) -> str:
    """Return the dataset's file in the hub's cache, after downloading it."""
    if not HUB_NAME.fullmatch(path):
        raise OSError(f"there is no file or folder {path}, and it is not a hub name: set prompts.path to OWNER/NAME")
    if is_offline_mode() and file is None:
        raise WrongOption("file must be named where HF_HUB_OFFLINE=1 allows no list of the dataset's files")
    try:
        if not is_offline_mode():
            listed = HfApi().dataset_info(path, revision=revision, files_metadata=True, timeout=TIMEOUT)
            sizes = {entry.rfilename: entry.size or 0 for entry in listed.siblings or ()}
            file, revision = _chosen(sorted(sizes), file, path), listed.sha
            if sizes[file] > MAX_FILE:
                raise WrongOption(f"file={file} has {sizes[file]} bytes, more than {MAX_FILE}: choose a smaller one")
        return hf_hub_download(path, str(file), repo_type="dataset", revision=revision)
    except WrongOption:
        raise
    except Exception as error:  # also those of the HTTP library
        raise OSError(
            f"the dataset {path} cannot be fetched from the hub ({one_line(error)}): correct the name, set HF_TOKEN if "
            "it is gated or private, or download a file of it and set prompts.path to that"
        ) from error
