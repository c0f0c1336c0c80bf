"""The folders and repositories that proposers and peers name: checked, and downloaded, before the target is loaded.

An option is such a path if it is declared as one (``options.DrafterPath``). The cheapest checks come first: config.json
of every drafter and its pair with the target's, then the names and sizes of weights, then their download.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from omegaconf import DictConfig, OmegaConf

from spec_lab.cli.config_checks import GGUF, SMOLLM2, TARGET
from spec_lab.cli.declarations import declared, package_sources, parts, qualified
from spec_lab.core.options import DraftedTokens, DrafterPath, WrongOption, bound_of
from spec_lab.drafters.pairs import check_kind, check_pair
from spec_lab.models.configs import ModelSizes, model_sizes
from spec_lab.models.gguf_file import read_gguf
from spec_lab.models.hub import CheckpointFiles, open_checkpoint, open_drafter
from spec_lab.models.smollm2 import smollm2_file

LOG = logging.getLogger(__name__)

B = TypeVar("B")


class Named(NamedTuple):
    """A path that a part names."""

    option: str
    """Its full name, such as ``proposer.path``."""
    options: dict[str, Any]
    """Options of the part."""
    path: str
    kind: DrafterPath


def check_drafters(config: DictConfig) -> None:
    """Check the drafters of a run with the target that it names, and download them.

    Nothing is checked if the target's own config.json cannot be read: loading the target refuses it at once.

    Raises:
        OSError, ValueError: of a path; the message begins with the option's full name.
    """
    for option, value in _token_files(config):
        file, _ = DraftedTokens.split(value)
        if not file.exists():
            raise FileNotFoundError(f"{option}={value}: there is no such file")
    named = list(_named(config))
    if not named:
        return
    LOG.info("Reading the files of drafters")
    try:
        sizes = _sizes(config.get("target") or {})
    except (OSError, ValueError):
        return
    opened = []
    for drafter in named:
        with _naming(drafter):
            opened.append((drafter, _opened(drafter, sizes)))
    for drafter, files in opened:
        with _naming(drafter):
            if drafter.kind.model and files.commit is not None:
                open_checkpoint(files.path, files.commit)
            files.fetch_weights()


def _sizes(target: Mapping[str, Any]) -> ModelSizes | None:
    """Return the sizes of the target that a config names; None of one that this package does not load."""
    kind, path = target.get("_target_"), str(target.get("path"))
    path = smollm2_file() if kind == SMOLLM2 else path
    if kind in (GGUF, SMOLLM2) or (kind == TARGET and path.endswith(".gguf")):
        file = read_gguf(Path(path))
        return ModelSizes(path, file.hidden_size, file.vocabulary, file.num_layers)
    if kind != TARGET:
        return None
    files = CheckpointFiles.open(path, target.get("revision"))
    return model_sizes(files.path, files.folder)


def _opened(drafter: Named, sizes: ModelSizes | None) -> CheckpointFiles:
    """Return the files of a drafter after a check of its config with the target's sizes."""
    path, revision, kind = drafter.path, drafter.options.get("revision"), drafter.kind
    if not kind.model:
        files, fields = open_drafter(path, kind.what, revision, kind.converts)
        check_kind(kind, fields)
        if sizes is not None:
            check_pair(kind, fields, sizes)
        return files
    files = CheckpointFiles.open(path, revision)
    held = model_sizes(path, files.folder)
    if sizes is not None and drafter.options.get("vocabularies", "same") == "same":
        check_pair(kind, {"vocab_size": held.vocabulary}, sizes)
    return files


@contextmanager
def _naming(drafter: Named) -> Iterator[None]:
    """Put the name of the option before what is refused."""
    part = drafter.option.rpartition(".")[0]
    try:
        yield
    except WrongOption as error:
        raise WrongOption(qualified(str(error), part, drafter.options)) from error
    except (OSError, ValueError) as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"{drafter.option}={drafter.path}: {error}") from error


def _named(config: DictConfig) -> Iterator[Named]:
    """Yield the paths of drafters that the parts of a run name."""
    for part, options, name, kind in _texts(config, DrafterPath):
        if not options[name].endswith(".gguf"):
            yield Named(f"{part}.{name}", options, options[name], kind)


def _token_files(config: DictConfig) -> Iterator[tuple[str, str]]:
    """Yield the options that name files of tokens, and their values."""
    for part, options, name, _ in _texts(config, DraftedTokens):
        yield f"{part}.{name}", options[name]


def _texts(config: DictConfig, kind: type[B]) -> Iterator[tuple[str, dict[str, Any], str, B]]:
    """Yield the texts that the parts of a run give for options of a kind: part, its options, name of one, its bound."""
    values: Any = OmegaConf.to_container(config, resolve=True)
    for part, options in parts(values):
        arguments, _ = declared(package_sources(), part.partition(".")[0], str(options["_target_"]))
        for name, argument in arguments.items():
            bound = bound_of(argument.hint, kind)
            if bound is not None and isinstance(options.get(name), str):
                yield part, dict(options), name, bound
