"""The reader of drafters' files: ``config.json`` and weights in safetensors.

All of it is untrusted input (``models.checkpoint``). Fields of a config that are not known are refused by name
(``Fields``), tensors that a family's table does not have too (``layouts``). Every message names the file or folder, and
the field or tensor. What a family adds is its tables, and how its settings follow from the config.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from spec_lab.core.files import write_json
from spec_lab.core.options import Whole, WrongOption, brief
from spec_lab.core.reading import Convention, Reading, Source
from spec_lab.core.tensors import save_tensors
from spec_lab.drafters.draft_layers import N, load_weights
from spec_lab.drafters.layouts import Layout, misfits
from spec_lab.models.checkpoint import (
    SINGLE,
    check_counts,
    open_weights,
    refuse_misfits,
    weight_files,
    weights_hash,
)
from spec_lab.models.hub import open_drafter
from spec_lab.models.target import Target

log = logging.getLogger(__name__)

OF_LAYERS = (
    "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias", "rope_theta", "rope_scaling", "rope_parameters",
)  # fmt: skip
"""Fields of a config that describe the decoder layers of Llama and Qwen."""


def _because(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


IRRELEVANT: Mapping[str, str] = (
    _because(
        "names classes or files of other packages", "architectures auto_map name_or_path _name_or_path _commit_hash"
    )
    | _because("the target's name", "base_model_name_or_path target_model_type")
    | _because("a version", "transformers_version speculators_version version")
    | _because("the run has its own data type", "dtype torch_dtype")
    | _because("quantized weights are refused by their data types", "quantization_config compression_config")
    | _because(
        "the run has its own attention implementation and KV cache",
        "attn_implementation _attn_implementation _attn_implementation_autoset use_cache",
    )
    | _because(
        "a drafter's tokens are the target's",
        "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id tokenizer_class",
    )
    | _because("the tensors of the files tell", "tie_word_embeddings")
    | _because(
        "concerns training",
        "initializer_range initializer_factor attention_dropout hidden_dropout dropout_rate pretraining_tp ttt_steps "
        "embed_requires_grad enable_sp_ulysses confidence_head_alpha max_anchors num_anchors gradient_checkpointing",
    )
    | _because(
        "has no effect without layers with windows, which are refused",
        "sliding_window swa_window_size max_window_layers sliding_window_non_causal",
    )
    | _because(
        "the run's own options state how much is drafted and how it is sampled",
        "num_speculative_tokens n_predict speculators_config max_length min_length max_new_tokens do_sample "
        "temperature top_k top_p typical_p num_beams num_beam_groups diversity_penalty early_stopping length_penalty "
        "repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
        "forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens remove_invalid_values "
        "exponential_decay_length_penalty",
    )
    | _because(
        "bookkeeping of transformers",
        "output_attentions output_hidden_states output_scores return_dict return_dict_in_generate use_return_dict "
        "torchscript use_bfloat16 tf_legacy_loss is_decoder is_encoder_decoder add_cross_attention "
        "cross_attention_hidden_size tie_encoder_decoder pruned_heads prefix problem_type finetuning_task "
        "task_specific_params num_labels id2label label2id chunk_size_feed_forward has_no_defaults_at_init",
    )
)
"""Fields of a config that change nothing in what any drafter computes, and why."""

Meanings = Mapping[str, tuple[tuple[Any, ...], str]]
"""The supported values of fields, and why no other."""
MEANINGS: Meanings = {
    "use_sliding_window": ((False,), "layers with windows are not supported"),
    "use_swa": ((False,), "layers with windows are not supported"),
    "attention_sink_bias": ((False,), "attention sinks are not supported"),
    "rope_is_neox_style": ((True,), "rotary embeddings of interleaved numbers are not supported"),
    "is_neox_style": ((True,), "rotary embeddings of interleaved numbers are not supported"),
    "partial_rotary_factor": ((1.0,), "rotary embeddings of a part of the numbers are not supported"),
    "qkv_bias": ((False,), "biases of queries, keys and values alone are not supported"),
    "decoder_sparse_step": ((1,), "layers with experts are not supported"),
}
"""Fields of which one meaning is supported, which is that of a config without the field: its values, and why no other.
"""


@dataclass(frozen=True)
class Fields:
    """The known fields of a family's configs; any other field is refused, as a surplus tensor is.

    Args:
        what: they describe.
        read: names of the fields whose values are used or checked, whatever ``MEANINGS`` and ``IRRELEVANT`` say.
        meanings: as ``MEANINGS``, beside these.
        irrelevant: as ``IRRELEVANT``, beside these, whatever ``MEANINGS`` says.
    """

    what: str
    read: Collection[str]
    meanings: Meanings = field(default_factory=dict)
    irrelevant: Mapping[str, str] = field(default_factory=dict)

    def reading(self, more: Collection[str]) -> Fields:
        """These fields where others are read as well, whatever their meanings elsewhere."""
        return replace(self, read={*self.read, *more})

    def check(self, file: Path, config: Mapping[str, Any], inside: str = "") -> None:
        """Refuse fields that may change what is computed, and of which that is not known or not supported.

        Args:
            file: the config.
            config: its fields; null is a missing field.
            inside: a mapping in it, whose fields are checked as well.

        Raises:
            ValueError: names the fields and their values.
        """
        inner = config.get(inside)
        if not isinstance(inner, dict | None):
            raise ValueError(f"{file}: {inside} must be a mapping, not {brief(inner)}")
        fields = [(name, name, value) for name, value in config.items() if name != inside]
        fields += [(f"{inside}.{name}", name, value) for name, value in (inner or {}).items()]
        problems, unknown, meanings = [], [], {**MEANINGS, **self.meanings}
        for path, name, value in fields:
            if value is None or name in self.read or name in self.irrelevant:
                continue
            if name in meanings:
                allowed, why = meanings[name]
                if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed):
                    only = " or ".join(map(brief, allowed)) or "null"
                    problems.append(f"{path} is {brief(value)}, and only {only} is supported ({why})")
            elif name not in IRRELEVANT:
                unknown.append(f"{path} ({brief(value)})")
        if unknown:
            more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
            problems.append(f"it is not known what {', '.join(unknown[:8])}{more} mean")
        if problems:
            raise ValueError(
                f"{file}: of {self.what} {'; '.join(problems)}. Read otherwise than its authors mean it, it would "
                "draft worse tokens: choose another drafter, or remove from the file what changes nothing"
            )


LAYER = Fields(
    "a drafter's layers",
    {*OF_LAYERS, "num_hidden_layers", "max_position_embeddings", "vocab_size", "layer_types"},
)
"""Fields of a mapping that describes decoder layers."""
PLAIN_THETA = 10000.0
"""Base of the rotary embeddings of RoPE's authors, which many classes use where a config states none."""
MAX_TAPS = 64
"""Maximum number of hidden states of the target that a drafter reads."""
Taps = Sequence[Annotated[int, Whole(-1)]]
"""An option: the numbers of the hidden states that a drafter reads, in this order."""
Rope = Literal["neox", "interleaved"]
Ends = Literal["own", "target"]
FLOATS = {"F64", "F32", "F16", "BF16"}
"""Data types of weights, as safetensors names them."""


@dataclass(frozen=True, eq=False)
class DrafterFiles:
    """An opened folder of a drafter. All of it is untrusted input.

    Args:
        what: it holds, for messages: "Hydra heads", "an EAGLE head".
        folder: of config.json and the weights.
        config: its fields.
        held: the tensors, not yet read.
        target: which the drafter should be for.
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
            path: of the folder.
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
            value, source, why = given, "option", f"proposer.{convention} states it"
        others = {label: other for label, other in others.items() if other != value}
        self.conventions[convention] = Convention(value, source, why, others)
        if source == "guess":
            hints = [f"proposer.{convention}={_written(other)} ({label})" for label, other in others.items()]
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
            known = ", ".join(self.conventions) or "none"
            raise WrongOption(
                f"{unused[0]} sets a convention that {self.what} at {self.folder} does not have: leave it null "
                f"(conventions of these files: {known})"
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

    def layer_fields(
        self, config: Mapping[str, Any], positions: int | None = None, windows: bool = False
    ) -> dict[str, Any]:
        """The fields that describe decoder layers, apart from windows.

        Args:
            config: of the layers.
            positions: that they have if the config states none; None: those of the target.
            windows: whether they may have windows, which ``windows`` reads.

        Raises:
            ValueError: layers with windows where they may have none; no hidden size; more layers than the files have
                tensors.
        """
        types, h = config.get("layer_types"), self.whole("hidden_size", config=config)
        full = types is None or (isinstance(types, list) and all(kind == "full_attention" for kind in types))
        if not (full or windows):
            raise ValueError(f"{self.file}: layer_types must be full_attention in every layer, not {brief(types)}")
        self.whole("num_hidden_layers", 1, config=config)
        check_counts(self.folder, config, len(self.held))
        fields = {name: config[name] for name in OF_LAYERS if name in config}
        self._choose_rotation(config, fields)
        if fields.get("head_dim") is None and isinstance(heads := config.get("num_attention_heads"), int) and heads:
            fields["head_dim"] = h // heads
        positions = max(self.target.context, 1) if positions is None else positions
        return fields | {"max_position_embeddings": self.whole("max_position_embeddings", positions, config=config)}

    def windows(self, config: Mapping[str, Any]) -> tuple[int | None, ...]:
        """The window W of each decoder layer, None of one with full attention.

        ``layer_types`` names the layers that have one; without it and with ``use_sliding_window`` they are those from
        ``max_window_layers`` on (Qwen2). ``sliding_window`` alone states nothing, since no Llama layer reads it.

        Raises:
            ValueError: layers of another type; fields that contradict each other; no window.
        """
        layers, types = self.whole("num_hidden_layers", 1, config=config), config.get("layer_types")
        if types is None:
            first = self.whole("max_window_layers", 28, 0, config=config)
            first = first if self.flag("use_sliding_window", config=config) else layers
            types = ["full_attention"] * min(first, layers) + ["sliding_attention"] * (layers - first)
        names = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != layers or any(kind not in names for kind in types):
            raise ValueError(
                f"{self.file}: layer_types must name one of {', '.join(names)} for each of {layers} layers, not "
                f"{brief(types)}"
            )
        if "sliding_attention" not in types:
            return (None,) * layers
        if not self.flag("use_sliding_window", True, config=config):
            raise ValueError(f"{self.file}: use_sliding_window is false, but layer_types has sliding_attention")
        window = self.whole("sliding_window", config=config)
        return tuple(window if kind == "sliding_attention" else None for kind in types)

    def _choose_rotation(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Settle how the layers rotate queries and keys, in their ``fields``.

        Sections of ``mrope`` are of images; of text their positions are the same, and it is plain RoPE.
        """
        stated, theta = _rope(config), config.get("rope_theta")
        if stated.get("rope_type", stated.get("type")) == "mrope":
            theta = stated.get("rope_theta", theta) or PLAIN_THETA
            fields["rope_scaling"] = fields["rope_parameters"] = None
            why = "SpecForge has trained heads with rope_scaling of type mrope both with rope_theta and with 10000"
            source: Source = "file" if theta == PLAIN_THETA else "guess"
            others = {"as some versions of SpecForge": PLAIN_THETA}
            fields["rope_theta"] = self.choose("rope_theta", theta, source, why, others)
        elif "rope_theta" in self.options and (given := self.options["rope_theta"]) is not None:
            fields["rope_theta"] = self.choose("rope_theta", theta or PLAIN_THETA, "file", "rope_theta of its config")
            if isinstance(fields.get("rope_parameters"), dict):
                fields["rope_parameters"] = fields["rope_parameters"] | {"rope_theta": given}
        if "rope_scaling" not in self.options:
            return
        model = getattr(self.target.lm, "hf_model", None)
        of_target = {} if model is None else dict(getattr(model.config, "rope_parameters", None) or {})
        scalings = {"without scaling": "none"} if _rope(fields) else {}
        if _rope({"rope_parameters": of_target}) and _rope({"rope_parameters": of_target}) != _rope(fields):
            scalings["the target's"] = "target"
        rope = self.choose("rope_scaling", "own", "file", "rope_scaling of its config", scalings)
        if rope == "none":
            fields |= {"rope_scaling": None, "rope_parameters": None}
        elif rope == "target":
            fields |= {"rope_scaling": None, "rope_parameters": of_target}

    def taps(self, where: str, named: Any, shift: int) -> list[int]:
        """The numbers of the hidden states that a drafter reads, as in ``runner.Capabilities``.

        Args:
            where: the field.
            named: its value, a list of layers.
            shift: what is added to each: 0 for numbers of hidden states, 1 for numbers of layers whose outputs are
                read.

        Raises:
            ValueError: no list of layers, or a layer that the target does not have.
        """
        last = self.target.lm.capabilities.hidden_layers
        plain = isinstance(named, list) and 0 < len(named) <= MAX_TAPS
        if not plain or any(isinstance(layer, bool) or not isinstance(layer, int) for layer in named):
            raise ValueError(f"{self.file}: {where} must be a list of layers, not {brief(named)}")
        if wrong := [layer for layer in named if not 0 <= layer + shift <= last]:
            raise ValueError(
                f"{self.file}: {where} names layer {wrong[0]}, but the target {self.target.name} has {last} layers, of "
                f"which {-shift} to {last - shift} can be named here: the drafter is for another target"
            )
        return [layer + shift for layer in named]

    def choose_taps(
        self, taps: list[int], source: Source, why: str, others: Mapping[str, list[int]] | None = None
    ) -> tuple[int, ...]:
        """``choose`` the hidden states that are read; among the other readings are those numbered one less or more.

        Published drafters read the last state either before or after the target's final norm, so that one is a guess.

        Raises:
            ValueError: the option names a state that the target does not have.
        """
        last = self.target.lm.capabilities.hidden_layers
        every = {**(others or {})}
        every |= {"each one less": [tap - 1 for tap in taps], "each one more": [tap + 1 for tap in taps]}
        exist = {label: other for label, other in every.items() if min(other) >= 0 and max(other) <= last}
        for before, after, label in ((last, -1, "after"), (-1, last, "before")):
            if before in taps:
                swapped = [after if tap == before else tap for tap in taps]
                exist[f"the last state {label} the final norm"] = swapped
                source = "guess" if source == "file" else source
        chosen = list(self.choose("taps", taps, source, why, exist))
        if wrong := [tap for tap in chosen if not -1 <= tap <= last]:
            raise WrongOption(
                f"taps names hidden state {wrong[0]}, but the target {self.target.name} has states 0 to {last}, and "
                "-1 after its final norm"
            )
        return tuple(chosen)

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
            layout: of the files.
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


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling of rotary embeddings that a config states, in either of transformers' fields; empty for none."""
    for stated in (config.get("rope_parameters"), config.get("rope_scaling")):
        if isinstance(stated, dict) and stated.get("rope_type", stated.get("type", "default")) != "default":
            return stated
    return {}


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
        config: for config.json.
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
