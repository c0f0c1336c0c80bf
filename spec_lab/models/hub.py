"""The files of a checkpoint: of a local folder, or of the hub, from where they are downloaded into its cache."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import hf_hub_download, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from transformers.utils import cached_file

from spec_lab.models import checkpoint


def folder_of(path: str) -> tuple[Path, str | None]:
    """Return the folder of a checkpoint after checking its files, and the revision of a hub name.

    For a hub name it is the folder in the cache; every file but the weights is downloaded before it is checked.

    Raises:
        OSError: there is no config.json, or the hub cannot be reached.
        ValueError: as for ``checkpoint.check_files``.
    """
    if Path(path).exists():
        folder, revision = Path(path), None
    else:
        config = cached_file(path, "config.json")
        if config is None:
            raise OSError(f"{path} holds no config.json: give the hub name of a model written by save_pretrained")
        folder = Path(config).parent
        revision = folder.name
        for name in ("generation_config.json", "adapter_config.json", *checkpoint.TOKENIZER_FILES):
            _fetched(path, name, revision)
    checkpoint.check_files(folder)
    return folder, revision


def loaded_folder(path: str) -> Path | None:
    """Return the folder of a checkpoint that was loaded; in the cache for a hub name. None if it is not there."""
    if Path(path).exists():
        return Path(path)
    config = try_to_load_from_cache(path, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def _fetched(path: str, name: str, revision: str) -> bool:
    """Download a file of a model of the hub into the cache; return whether the model has such a file.

    Offline, a file that is not in the cache counts as missing from the model.

    Raises:
        OSError: the hub cannot be reached, or denies access.
    """
    known = try_to_load_from_cache(path, name, revision=revision)
    if known is not None:
        return isinstance(known, str)  # else the cache records that the hub has no such file
    try:
        hf_hub_download(path, name, revision=revision)
    except Exception as error:  # also those of the HTTP library
        missing = isinstance(error, EntryNotFoundError)
        if missing and (is_offline_mode() or not isinstance(error, LocalEntryNotFoundError)):
            return False
        raise OSError(
            f"{name} of {path} cannot be fetched from the hub ({checkpoint.one_line(error)}): try again when the hub "
            "can be reached, or set HF_HUB_OFFLINE=1 to use only the files in the cache"
        ) from error
    return True


def fetch_weights(path: str, folder: Path, revision: str | None) -> None:
    """Download the weight files of a hub name into the cache.

    Raises:
        OSError: there are none, or they cannot be downloaded.
        ValueError: as for ``checkpoint.shard_names``.
    """
    if revision is None or _fetched(path, checkpoint.SINGLE, revision):
        return
    _fetched(path, checkpoint.INDEX, revision)
    for name in checkpoint.shard_names(folder):
        _fetched(path, name, revision)
