"""The files of a checkpoint or a drafter: of a local folder, or of the hub, downloaded into its cache.

A repository of the hub is opened by its ``config.json`` and the list of its files with their sizes. Other files are
downloaded when they are asked for, by name: JSON and tokenizer files within the bounds of ``checkpoint``, weights in
safetensors if they fit on the disk. Pickles are downloaded for ``spec-lab convert`` only, and code never.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from spec_lab.core.files import read_json
from spec_lab.core.options import WrongOption, brief
from spec_lab.models import checkpoint
from spec_lab.models.checkpoint import INDEX, SINGLE
from spec_lab.models.gguf_checkpoint import dequantised
from spec_lab.models.hub_name import HUB_NAME, check_folder_or_name

LOG = logging.getLogger(__name__)

CONFIG = "config.json"
TIMEOUT = 30.0
"""Time that the hub has to list a repository's files, in seconds."""


@dataclass(frozen=True)
class CheckpointFiles:
    """A folder of files, or a repository of the hub at one commit, whose files are downloaded into its cache.

    Args:
        path: the folder or hub name as given.
        commit: of a hub name; None of a folder.
        sizes: of each file of the repository, in bytes; None of a folder, and where the hub was not reached.
    """

    path: str
    folder: Path
    commit: str | None = None
    sizes: Mapping[str, int] | None = None

    @staticmethod
    def open(path: str, revision: str | None = None) -> CheckpointFiles:
        """Open a folder; or a repository of the hub, of which config.json is downloaded.

        Args:
            path: folder or hub name.
            revision: branch, tag or commit of a hub name; None: main.

        Raises:
            OSError: neither a folder nor a model of the hub; a repository without config.json; the hub cannot be
                reached, or denies access. Offline, config.json is not in the cache.
            WrongOption: the repository has no such revision; a folder has none.
        """
        if Path(path).exists():
            if revision is not None:
                raise WrongOption(f"revision is of a hub name, but {path} is a local folder: set revision=null")
            return CheckpointFiles(path, Path(path))
        check_folder_or_name(path)
        sizes = None
        try:
            if not is_offline_mode():
                listed = HfApi().model_info(path, revision=revision, files_metadata=True, timeout=TIMEOUT)
                sizes = {file.rfilename: file.size or 0 for file in listed.siblings or ()}
                checkpoint.check_size(f"{CONFIG} of {path}", CONFIG, sizes.get(CONFIG, 0))
            config = hf_hub_download(path, CONFIG, revision=revision)
        except ValueError:  # of ``check_size``
            raise
        except Exception as error:  # also those of the HTTP library
            cached = try_to_load_from_cache(path, CONFIG, revision=revision)
            if sizes is not None or not isinstance(cached, str):
                raise _refusal(path, CONFIG, revision, error) from error
            if not is_offline_mode():
                LOG.warning(
                    "the hub cannot be reached for %s (%s): its files in the cache are used, which may be older than "
                    "the hub's", path, checkpoint.one_line(error),
                )  # fmt: skip
            config = cached
        return CheckpointFiles(path, Path(config).parent, Path(config).parent.name, sizes)

    def fetch(self, name: str) -> bool:
        """Download a file unless it is there; return whether there is such a file.

        Offline, a file that is not in the cache counts as missing.

        Raises:
            OSError: the hub cannot be reached, denies access, or sent a part of the file only.
            ValueError: a JSON or tokenizer file that is too large.
        """
        if self.commit is None:
            return (self.folder / name).exists()
        known = try_to_load_from_cache(self.path, name, revision=self.commit)
        if known is not None:
            return isinstance(known, str)  # else the cache records that the hub has no such file
        checkpoint.check_size(f"{name} of {self.path}", name, (self.sizes or {}).get(name, 0))
        try:
            hf_hub_download(self.path, name, revision=self.commit)
        except Exception as error:  # also those of the HTTP library
            missing = isinstance(error, EntryNotFoundError)
            if missing and (is_offline_mode() or not isinstance(error, LocalEntryNotFoundError)):
                return False
            raise _refusal(self.path, name, self.commit, error) from error
        return True

    def fetch_weights(self) -> None:
        """Download the weights: of a repository those that ``checkpoint.shard_names`` names, else all in safetensors.

        Raises:
            OSError: they cannot be downloaded, or do not fit on the disk; an index without its files.
            ValueError: as for ``checkpoint.shard_names``.
        """
        if self.commit is None:
            return
        self._check_room([SINGLE])
        if self.fetch(SINGLE):
            return
        if self.fetch(INDEX):
            self.fetch_all(checkpoint.shard_names(self.folder))
        else:
            self.fetch_all(self.at_top("*.safetensors"))

    def at_top(self, *patterns: str) -> list[str]:
        """Return the names of the files outside of folders that match a pattern, as far as they are known; sorted."""
        names = self.sizes if self.sizes is not None else [file.name for file in self.folder.glob("*")]
        return sorted(name for name in names if "/" not in name and any(Path(name).match(glob) for glob in patterns))

    def fetch_all(self, names: Sequence[str]) -> None:
        """Download files.

        Raises:
            OSError: they cannot be downloaded, or do not fit on the disk.
        """
        self._check_room(names)
        for name in names:
            self.fetch(name)

    def _check_room(self, names: Sequence[str]) -> None:
        """Log how much is downloaded, and refuse more than the disk has room for."""
        missing = {name: (self.sizes or {}).get(name, 0) for name in names if not (self.folder / name).exists()}
        if not (size := sum(missing.values())):
            return
        free = shutil.disk_usage(self.folder).free
        if size > free:
            raise OSError(
                f"the weights of {self.path} have {size / 2**30:.1f} GiB, but the disk of the hub's cache "
                f"({constants.HF_HUB_CACHE}) has {free / 2**30:.1f} GiB left: make room, or set HF_HOME to a folder on "
                "another disk"
            )
        LOG.info("Downloading %s of %s (%.2f GiB)", ", ".join(missing), self.path, size / 2**30)


def _refusal(path: str, name: str, revision: str | None, error: Exception) -> OSError | WrongOption:
    """Return the error that says why a file of the hub cannot be had, and what to do."""
    no_folder = f"there is no folder {path} here, and " * (name == CONFIG)  # the first file that is asked for
    if isinstance(error, RevisionNotFoundError):
        return WrongOption(f"revision must be a branch, tag or commit of {path}, which has no {brief(revision)}")
    if isinstance(error, GatedRepoError):
        return OSError(
            f"{path} is gated on the hub: accept its conditions on its page, and set HF_TOKEN to a token of that "
            "account or log in (hf auth login)"
        )
    if isinstance(error, RepositoryNotFoundError):
        return OSError(
            f"there is no folder {path}, and the hub has no such model, or it is private: correct the name, or set "
            "HF_TOKEN to a token of an account that may read it"
        )
    if is_offline_mode():
        return OSError(
            f"{no_folder}{name} of {path} is not in the hub's cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE=1 "
            "allows no download: run once without it, or name another cache by HF_HOME"
        )
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return OSError(f"{path} holds no {name}: give the hub name of a model or drafter whose files lie at its top")
    return OSError(
        f"{no_folder}{name} of {path} cannot be fetched from the hub ({checkpoint.one_line(error)}): try again when "
        "the hub can be reached, or set HF_HUB_OFFLINE=1 to use only the files in the cache"
    )


def open_checkpoint(path: str, revision: str | None = None) -> CheckpointFiles:
    """Open a checkpoint and check its files, after downloading every one but the weights, or dequantising a GGUF file.

    Raises:
        OSError, WrongOption: as for ``CheckpointFiles.open``.
        ValueError: as for ``checkpoint.check_files``, and for ``dequantised``.
    """
    if Path(path).suffix == ".gguf" and Path(path).is_file():
        if revision is not None:
            raise WrongOption(f"revision is of a hub name, but {path} is a file: set revision=null")
        files = CheckpointFiles(path, dequantised(Path(path)))
    else:
        files = CheckpointFiles.open(path, revision)
    if files.commit is not None:
        for name in ("generation_config.json", "adapter_config.json", *checkpoint.TOKENIZER_FILES):
            files.fetch(name)
    checkpoint.check_files(files.folder)
    return files


def cached_folder(path: str, revision: str | None = None) -> str:
    """Return the folder of the hub's cache that a hub name was opened in last; nothing is asked of the hub.

    Any other path is returned as it is. Arguments as in ``CheckpointFiles.open``.
    """
    if Path(path).exists() or not HUB_NAME.fullmatch(path):
        return path
    config = try_to_load_from_cache(path, CONFIG, revision=revision)
    return str(Path(config).parent) if isinstance(config, str) else path


def open_drafter(
    path: str, what: str, revision: str | None = None, converts: bool = True
) -> tuple[CheckpointFiles, dict[str, Any]]:
    """Open a drafter, and return its files and its config.json, before any weights are downloaded or read.

    Args:
        path: the folder or hub name.
        what: it should hold, for messages: "Hydra heads", "an EAGLE head".
        revision: branch, tag or commit of a hub name; None: main.
        converts: whether ``spec-lab convert`` knows the layout.

    Raises:
        OSError, WrongOption: as for ``CheckpointFiles.open``; a folder without config.json.
        ValueError: a malformed config; weights in pickles only.
    """
    files = CheckpointFiles.open(path, revision)
    config = read_json(files.folder / CONFIG)
    if config is None:
        raise OSError(f"{path} holds no {what.removeprefix('an ').removeprefix('a ')}: config.json is missing")
    checkpoint.refuse_pickles(path, files.at_top("*"), converts)
    return files, config


def drafter_folder(path: str, revision: str | None = None) -> str:
    """Return the folder of a drafter's files; those of a hub name are downloaded. Arguments as in ``open_drafter``.

    Raises:
        OSError, WrongOption: as for ``CheckpointFiles.open`` and ``CheckpointFiles.fetch_weights``.
        ValueError: weights in pickles only.
    """
    files = CheckpointFiles.open(path, revision)
    checkpoint.refuse_pickles(path, files.at_top("*"), None)
    files.fetch_weights()
    files.fetch_all(files.at_top("calibration*.json"))
    return str(files.folder)
