"""The reader of drafters' files: ``config.json`` and weights in safetensors.

All of it is untrusted input (``models.checkpoint``). Fields of a config that are not known are refused by name
(``Fields``), tensors that a family's table does not have too (``layouts``). Every message names the file or folder, and
the field or tensor. What a family adds is its tables, and how its settings follow from the config.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_lab.core.files import write_json
from spec_lab.core.options import WrongOption, brief
from spec_lab.core.reading import Convention, Reading, Source
from spec_lab.core.tensors import save_tensors
from spec_lab.drafters.draft_layers import N, load_weights
from spec_lab.drafters.layouts import Layout, misfits
from spec_lab.models.checkpoint import (
    SINGLE,
    open_weights,
    refuse_misfits,
    weight_files,
    weights_hash,
)
from spec_lab.models.hub import open_drafter
from spec_lab.models.target import Target

log = logging.getLogger(__name__)
FLOATS = {"F64", "F32", "F16", "BF16"}
"""Data types of weights, as safetensors names them."""


@dataclass(frozen=True, eq=False)
class DrafterFiles:
    """An opened folder of a drafter. All of it is untrusted input.

    Args:
        what: it holds, for messages: "Hydra heads", "an EAGLE head".
        folder: of config.json and the weights.
        held: the tensors, not yet read.
        options: by convention, how it is read whatever the files state; None where that is left to them.
        conventions: how they are read (``choose``).
    """

    what: str
    folder: Path
    config: dict[str, Any]
    held: Mapping[str, Any]
    target: Target
    options: Mapping[str, Any] = field(default_factory=dict)
    conventions: dict[str, Convention] = field(default_factory=dict)

    @staticmethod
    @contextmanager
    def open(
        path: str, what: str, target: Target, converts: bool = True, options: Mapping[str, Any] | None = None
    ) -> Iterator[DrafterFiles]:
        """Open a folder.

        Args:
            what, target, options: see the class.
            converts: whether ``spec-lab convert`` knows the layout.

        Raises:
            OSError: a file is missing, truncated or corrupt.
            ValueError: a config that cannot be read; weights in files that are not safetensors.
        """
        files, config = open_drafter(path, what, converts=converts)
        with open_weights(weight_files(files.folder)) as held:
            yield DrafterFiles(what, files.folder, config, held, target, options or {})

    def choose(
        self, convention: str, value: Any, source: Source, why: str, others: Mapping[str, Any] | None = None
    ) -> Any:
        """Settle how a convention is read, and record it; log one that is a guess.

        Args:
            convention: its name, which is that of the option.
            value: as the files are read without the option.
            source, why, others: see ``Convention``.

        Returns:
            The value of the option, or else ``value``.
        """
        others, given = dict(others or {}) if convention in self.options else {}, self.options.get(convention)
        if given is not None:
            others = {f"as without the option ({why})": value} | others
            value, source, why = given, "option", f"the option {convention} states it"
        others = {label: other for label, other in others.items() if other != value}
        self.conventions[convention] = Convention(value, source, why, others)
        if source == "guess":
            hints = [f"{convention}={_written(other)} ({label})" for label, other in others.items()]
            hint = f". If fewer tokens are accepted than its authors report, try {' or '.join(hints)}" if hints else ""
            log.warning("%s: %s is read as %s, a guess: %s%s", self.folder, convention, value, why, hint)
        return value

    @property
    def reading(self) -> Reading:
        """How the files are read.

        Raises:
            ValueError: an option sets a convention that these files do not have; names it.
        """
        given = {name for name, value in self.options.items() if value is not None}
        if unused := sorted(given - self.conventions.keys()):
            read = {name: _written(convention.value) for name, convention in self.conventions.items()}
            known = ", ".join(f"{name}={value}" for name, value in read.items()) or "none"
            raise WrongOption(
                f"{unused[0]} sets a convention that the files of {self.what} at {self.folder} do not have: leave it "
                f"null (conventions of these files, as they are read: {known})"
            )
        return Reading(dict(self.conventions), self.trained_context)

    @property
    def trained_context(self) -> int | None:
        """Most positions of its layers, as the config states them; None where it does not."""
        layers = self.config.get("transformer_layer_config")
        positions = (layers if isinstance(layers, dict) else self.config).get("max_position_embeddings")
        return positions if isinstance(positions, int) and not isinstance(positions, bool) else None

    @property
    def file(self) -> Path:
        """The config."""
        return self.folder / "config.json"

    @property
    def architectures(self) -> list[str]:
        """The names in ``architectures`` of config.json: classes with which the authors load the drafter.

        Raises:
            ValueError: no list of names.
        """
        names = self.config.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{self.file}: architectures must be a list of names, not {brief(names)}")
        return names

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor that is held."""
        return {name: tuple(tensor.get_shape()) for name, tensor in self.held.items()}

    def whole(
        self, name: str, default: int | None = None, minimum: int = 1, maximum: int = 2**31 - 1, config: Any = None
    ) -> int:
        """A whole number in the config, or in a mapping inside it; null is the default.

        Raises:
            ValueError: it is none from ``minimum`` to ``maximum``, or is missing and has no default.
        """
        value = (self.config if config is None else config).get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            what = f"a whole number from {minimum} to {maximum}"
            raise ValueError(f"{self.file}: {name} must be {what}, not {brief(value)}")
        return value

    def flag(self, name: str, default: bool = False, config: Any = None) -> bool:
        """A flag in the config, or in a mapping inside it; null is the default.

        Raises:
            ValueError: it is neither true nor false.
        """
        value = (self.config if config is None else config).get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ValueError(f"{self.file}: {name} must be true or false, not {brief(value)}")
        return value

    def expect(self, known: bool, names: str) -> None:
        """Refuse a folder that holds no such drafter, whose tensors include ``names``.

        Raises:
            ValueError: it is not ``known``; names some of its tensors.
        """
        if not known:
            examples = brief(", ".join(sorted(self.held)[:5]) or "none")
            raise ValueError(
                f"{self.folder} holds no {self.what.removeprefix('an ').removeprefix('a ')} of a known layout, whose "
                f"tensors include {names} (it holds: {examples})"
            )

    def check_target(self, hidden: Any = None, vocabulary: Any = None) -> None:
        """Refuse a drafter for a target of another hidden size or vocabulary.

        Args:
            hidden: H that the files state; None: not stated.
            vocabulary: V that they state; None: not stated.

        Raises:
            ValueError: names both sizes.
        """
        for kind, stated, size in (
            ("hidden size {}", hidden, self.target.services.hidden_size),
            ("a vocabulary of {} tokens", vocabulary, self.target.vocabulary),
        ):
            if stated is not None and stated != size:
                raise ValueError(
                    f"{self.folder} holds {self.what} for {kind.format(brief(stated))}, the target {self.target.name} "
                    f"has {size}"
                )

    def described(self, build: Callable[[], N]) -> N:
        """The network that the config describes, without weights; errors about its layers name the config.

        Raises:
            ValueError: of the type that ``build`` raised.
        """
        try:
            return build()
        except ValueError as error:
            if str(self.folder) in str(error):
                raise
            raise type(error)(f"{self.file}: {error}") from error

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """Read a tensor of finite numbers, in this data type.

        Raises:
            ValueError: a quantized tensor; a number that is NaN or infinite, or becomes infinite in ``dtype``.
        """
        if (kind := self.held[name].get_dtype()) not in FLOATS:
            raise ValueError(
                f"{self.folder}: '{name}' has data type {kind}; quantized weights are not supported: save them as "
                f"{', '.join(sorted(FLOATS))}"
            )
        tensor: Tensor = self.held[name][:].to(dtype)
        return self.finite(name, tensor)

    def finite(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor, whose numbers are finite.

        Raises:
            ValueError: one is NaN or infinite.
        """
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{self.folder}: '{name}' holds NaN or infinite values")
        return tensor

    def read(self, layout: Layout, build: Callable[[], N], dtype: torch.dtype | None = None, copies: int = 1) -> N:
        """Read a network, ready to draft for the target and on its device.

        Args:
            build: makes the network without weights.
            dtype: of the network; None: the target's.
            copies: how many the files hold of a tensor that is repeated.

        Raises:
            ValueError: a tensor is missing, surplus, misshapen, quantized, NaN or infinite; copies differ.
        """
        network, target = self.described(build), self.target
        network.reading, dtype = self.reading, dtype or target.lm.dtype
        parameters = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
        sizes = {"H": target.services.hidden_size, "V": target.vocabulary}
        wanted = layout.of_network(parameters, self.shapes, copies, **sizes)
        refuse_misfits(self.folder, misfits(wanted.shapes, self.shapes))
        for name, first, copy in ((name, names[0], copy) for name, names in wanted.names.items() for copy in names[1:]):
            if not torch.equal(self.held[first][:], self.held[copy][:]):
                raise ValueError(f"{self.folder}: '{copy}' differs from '{first}', but both are one layer ({name})")
        tensors = {name: self.tensor(names[0], dtype) for name, names in wanted.names.items()}
        return load_weights(network, tensors, target)


def _written(value: Any) -> str:
    """A value as an option on the command line."""
    return "".join(str(value).split()) if isinstance(value, list) else str(value).lower()


def draft_tables(ids: Tensor, vocabulary: int) -> dict[str, Tensor]:
    """Return ``d2t``, offsets from a draft token to the target's, and ``t2d``, which of the target's are drafted.

    Args:
        ids: ``[W]`` the target's number of each draft token.
        vocabulary: V.
    """
    kept, tokens = torch.zeros(vocabulary, dtype=torch.bool), ids.cpu()
    kept[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": kept}


def write_drafter(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, str],
    dtype: torch.dtype | None = None,
) -> str:
    """Write the weights of a drafter and then its config; return the SHA-256 of the weights.

    Args:
        folder: is made.
        tensors: the weights, by their published names.
        facts: for the metadata of the weights.
        dtype: of floating-point numbers in the file; None: their own.

    Raises:
        OSError: a file cannot be written; names it. None is left incomplete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cast = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    save_tensors(cast, folder / SINGLE, {"format": "pt", **facts})
    write_json(folder / "config.json", config)
    return weights_hash(str(folder))
