"""A causal LM of transformers, run over forests of tokens: any model whose layers are attention over earlier tokens.

Linear layers run packed over the new tokens of all sequences; attention runs sequence by sequence (``attention``), and
so do recurrent layers (``recurrent``), with which forests must be chains.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from spec_lab.core.clock import Clock, Phase
from spec_lab.core.draft import Draft
from spec_lab.core.inference import inference
from spec_lab.core.own_attention import own_attention
from spec_lab.core.roofline import ForwardWork
from spec_lab.core.shape import Shape
from spec_lab.runners.adaptors import adapt, has_alibi
from spec_lab.runners.attention import (
    SPANS,
    Attention,
    counting_layers,
    layer_kinds,
    layers_without_cells,
    recurrent_layers,
    spans,
)
from spec_lab.runners.causal_draft_pass import CausalDraftPass, continue_from
from spec_lab.runners.dense import DensePacker
from spec_lab.runners.draft_pass import Route, Sublayer
from spec_lab.runners.experts import why_not_counted
from spec_lab.runners.forward import Forward, ModelCall
from spec_lab.runners.graphs import Capture, CudaGraphs, Graphs, uncaptured
from spec_lab.runners.kv_cache import GRAIN, Cells, CellSequence
from spec_lab.runners.layer_ranges import LayerRanges, find_layers
from spec_lab.runners.memory_need import ModelMemory
from spec_lab.runners.model_work import memory_of, parameters_of, work_of
from spec_lab.runners.prepare import LevelsAhead, Packer, Prepared
from spec_lab.runners.quantized import recorded
from spec_lab.runners.recurrent import Recurrence
from spec_lab.runners.rounded import rounded_logits
from spec_lab.runners.runner import (
    Ability,
    Capabilities,
    DraftRunner,
    Extended,
    ModelSettings,
    Output,
    Runner,
    numbered,
)

if TYPE_CHECKING:
    from spec_lab.runners.sparse_kv import Selection, SparseLM


class CausalLM(DraftRunner):
    """A causal LM of transformers with a KV cache of its own.

    Args:
        model: a transformers model with a language-modelling head, in eval mode.
        attention: "per_sequence", over each sequence's own cells, or "dense_mask" (the oracle, and the only way for
            models without ``AttentionInterface``).
        chunk: longest part of a prompt computed in one forward.
        fixed: whether decoding steps run in fixed shapes (``graphs``), captured as CUDA graphs on a GPU.
        kv_dtype: in which keys and values are stored; None: in the model's.
    """

    def __init__(
        self,
        model: Any,
        attention: Attention = "per_sequence",
        chunk: int = 512,
        fixed: bool = False,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        config, dense, recurrent = model.config, attention == "dense_mask", bool(recurrent_layers(model.config))
        if recurrent and (fixed or dense):
            raise ValueError("recurrent layers require attention=per_sequence, without forwards of fixed shapes")
        self.kv_dtype = None if kv_dtype == model.dtype else kv_dtype
        if self.kv_dtype is not None and (why := why_no_kv_dtype(model)):
            raise ValueError(f"{why} require keys and values in the model's own data type")
        self._use_attention(model, dense)
        devices = getattr(model, "hf_device_map", None) or {}
        split = len({str(device) for device in devices.values()}) > 1
        if fixed and (split or dense):
            raise ValueError("forwards of fixed shapes require attention=per_sequence, and all layers on one device")
        self.model, self.attention, self.fixed = model, attention, fixed
        self.model_settings = ModelSettings(attention, chunk, fixed, self.kv_dtype)
        self.dtype, self.device, self.layers = model.dtype, model.device, int(config.num_hidden_layers)
        self.vocabulary = int(model.get_output_embeddings().weight.shape[0])
        self.clock, self.call = Clock(self.device), ModelCall(model)
        self.cells = self._store(layers_without_cells(config), fixed or dense)
        shares = bool(getattr(config, "num_kv_shared_layers", 0))
        self._packer = (DensePacker if dense else Packer)(
            self.cells, layer_kinds(config), self.layers, self.device, self.dtype, chunk, split, counting_layers(model),
            shares,
        )  # fmt: skip
        capture: Capture = CudaGraphs(self.device) if self.device.type == "cuda" else uncaptured
        self.graphs = Graphs(self._packer, capture, self.clock)
        self.recurrence = Recurrence(model, self._packer, inference(self.run)) if recurrent else None
        self._asked: tuple[int, ...] = ()

    def _store(self, unused: frozenset[int], uniform: bool) -> Cells:
        """Return the empty store of keys and values. Arguments as in ``Cells``."""
        return Cells(unused, uniform, self.kv_dtype)

    @staticmethod
    def _use_attention(model: Any, dense: bool) -> None:
        """Let a model compute attention over cells, or with a mask."""
        known = "transformers.modeling_utils" in sys.modules  # else it is a toy, which needs no registration
        wanted = own_attention(model) if dense else spans() if known else SPANS
        attends = len(layers_without_cells(model.config)) < model.config.num_hidden_layers
        if attends and (dense or getattr(model, "_can_set_attn_implementation", lambda: True)()):
            model.set_attn_implementation(wanted)
        if dense and has_alibi(model):
            raise NotImplementedError("its ALiBi biases require target.attention=per_sequence")
        adapted = attends and not dense and adapt(model)
        if attends and not dense and not adapted and model.config._attn_implementation != wanted:
            raise NotImplementedError("it does not compute attention by transformers' AttentionInterface")

    @property
    def facts(self) -> dict[str, Any]:
        """Everything that the seconds of a forward depend on, for records."""
        parameters, head = list(self.model.parameters()), self.model.get_output_embeddings().weight
        copied = head.is_mkldnn and self.model.config.tie_word_embeddings  # from the embedding (``models.packed``)
        devices = sorted({parameter.device for parameter in parameters} | {torch.device(self.device)}, key=str)
        return {
            "devices": [
                torch.cuda.get_device_name(device) if device.type == "cuda" else str(device) for device in devices
            ],
            "parameters": parameters_of(self.model) - (head.numel() if copied else 0),
            "dtype": str(self.dtype).removeprefix("torch."),
            "kv_dtype": str(self.kv_dtype or self.dtype).removeprefix("torch."),
            "attention": self.attention,
            "graphs": self.fixed,
            "packed": any(parameter.is_mkldnn for parameter in parameters),
            **({} if self.quantization is None else {"quantization": self.quantization}),
        }

    @property
    def hf_model(self) -> Any:
        """See ``runner.Runner``."""
        return self.model

    @property
    def quantization(self) -> dict[str, Any] | None:
        """See ``runner.Runner``."""
        return recorded(self.model)

    @property
    def capabilities(self) -> Capabilities:
        """See ``runner.Runner``."""
        if self.recurrence is not None:
            layers = self.layers if self.recurrence.hidden_states else 0
            return Capabilities(layers, abilities=frozenset({"state_snapshots"}), rollback=sys.maxsize)
        abilities: set[Ability] = {"shared_prefix"}
        if not self.why_no_layer_ranges:
            abilities.add("layer_ranges")
        if not self.why_no_sparse_kv:
            abilities.add("sparse_kv")
        if (getattr(self.model, "tp_size", None) or 1) == 1:  # other ranks are told of forwards only
            abilities.add("copied_prefix")
        return Capabilities(self.layers, sequences=None, abilities=frozenset(abilities))

    @property
    def max_pending(self) -> int:
        """See ``runner.Runner``."""
        return self._packer.chunk

    @cached_property
    def why_no_layer_ranges(self) -> str:
        """Why it lacks the ability ``layer_ranges``; empty where it has it."""
        if self.attention == "dense_mask":
            return "it computes attention=dense_mask"
        if self.recurrence is not None:
            return "it has recurrent layers"
        if self.fixed:
            return "its forwards have fixed shapes (graphs=true)"
        if self._packer.split or (getattr(self.model, "tp_size", None) or 1) > 1:
            return "it is split over devices or ranks"
        if getattr(self.model.config, "num_kv_shared_layers", 0):
            return "its last layers share keys and values"
        try:
            find_layers(self.model)
        except (AttributeError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    @cached_property
    def why_no_sparse_kv(self) -> str:
        """See ``runner.Runner``."""
        if self.attention == "dense_mask":
            return "it computes attention=dense_mask, which reads a mask of all cells"
        if self.recurrence is not None or self.cells.unused:
            return "it has layers without keys and values"
        if self._packer.kinds or self._packer.indexed:
            return "it has layers with windows or chunks, or layers that share keys and values"
        if self._packer.split or (getattr(self.model, "tp_size", None) or 1) > 1:
            return "it is split over devices or ranks"
        return ""

    def sparse(self, selection: Selection) -> SparseLM:
        """See ``runner.Runner``."""
        from spec_lab.runners.sparse_kv import SparseLM

        return SparseLM(self, selection)

    @cached_property
    def _ranges(self) -> LayerRanges:
        return LayerRanges(self.call, self._packer)

    @property
    def sublayers(self) -> frozenset[Sublayer]:
        """See ``runner.Runner``."""
        return self._ranges.sublayers

    def draft_pass(self, route: Route, logits: bool = True) -> CausalDraftPass:
        """See ``runner.Runner``."""
        if route.first or not (route.end is None or 0 < route.end < self.layers) or route.skipped - self.sublayers:
            raise ValueError(f"{route} is no route of a draft pass: the model has {self.layers} layers")
        return CausalDraftPass(
            self._packer, self._ranges, route, () if route.end is None else self._taps(route.end), logits
        )

    def _taps(self, end: int) -> tuple[int, ...]:
        """Which of the captured hidden states are inputs of layers below ``end``, ascending."""
        return tuple(sorted({layer for layer in self.call.layers if layer < end}))

    @property
    def work(self) -> ForwardWork | None:
        """See ``runner.Runner``. None of a model on several devices, which no single device bounds."""
        return None if self._packer.split else work_of(self.model, self._packer.kinds, self._kv_itemsize)

    @property
    def memory(self) -> ModelMemory | None:
        """See ``runner.Runner``."""
        packer = self._packer if self.recurrence is None else self.recurrence.packer
        states = None if self.recurrence is None else self.recurrence.memory
        sizes = memory_of(self.model, packer.chunk, self.cells.uniform, self._kv_itemsize, packer.dense, states)
        return None if sizes is None else replace(sizes, narrower=not why_no_kv_dtype(self.model), graphs=self.fixed)

    @property
    def _kv_itemsize(self) -> int:
        return (self.kv_dtype or self.dtype).itemsize

    def open(self, reserve: int = GRAIN) -> CellSequence:
        """An empty sequence with room for ``reserve`` cells (it grows on demand)."""
        sequence = self.cells.open(reserve, clear=self.fixed)
        if self.recurrence is not None:
            sequence.states = self.recurrence.states()
        return sequence

    def open_copy(self, source: CellSequence, length: int, reserve: int, exact: bool = False) -> CellSequence:
        """See ``runner.Runner``."""
        return self.cells.copy(source, length, reserve, clear=self.fixed, exact=exact)

    def capture(self, layers: tuple[int, ...] = ()) -> None:
        """Return these hidden states from now on. Numbers as in ``runner.Capabilities``.

        Raises:
            ValueError: a layer that the model does not have.
        """
        if layers == self._asked:
            return
        last = self.capabilities.hidden_layers
        states = numbered(layers, last)
        self._asked = layers
        self.call.capture(states, last, find_layers(self.model)[2][-1] if last in states else None)

    @cached_property
    def why_no_expert_counts(self) -> str:
        """See ``runner.Runner``. Hooks do not run in captured forwards."""
        return "its forwards have fixed shapes (graphs=true)" if self.fixed else why_not_counted(self.model)

    def count_experts(self, on: bool) -> None:
        """See ``runner.Runner``."""
        if on == (self.call.experts is not None):
            return
        if on and self.why_no_expert_counts:
            raise ValueError(self.why_no_expert_counts)
        self.call.count_experts(on)

    @torch.inference_mode()
    def plain_logits(self, tokens: Sequence[int], rows: int) -> Tensor:  # [rows, V]
        """See ``runner.Runner``: by one forward without cells, with keys and values rounded to ``kv_dtype``."""
        if self.kv_dtype is not None:
            return rounded_logits(self.model, tokens, rows, self.kv_dtype, self._packer.kinds, self._packer.dense)
        ids = torch.tensor([list(tokens)], device=self.device)
        wanted = torch.arange(len(tokens) - rows, len(tokens), device=self.device)  # see ``Packer.indexed``
        logits: Tensor = self.model(input_ids=ids, use_cache=False, logits_to_keep=wanted).logits[0]
        return logits

    forward = inference(Runner.forward)

    @property
    def _way(self) -> Packer | Graphs | Recurrence:
        """The preparation of forwards: in shapes as they come, in fixed shapes, or of chains."""
        return self.recurrence or (self.graphs if self.fixed else self._packer)

    def prepare(
        self,
        sequences: Sequence[Any],
        pending: Sequence[Sequence[int]],
        draft: Draft,
        prefill: Sequence[tuple[Any, Sequence[int]]] = (),
    ) -> Forward:
        """See ``runner.Runner``. Cells of pending tokens are appended to their sequences, those of nodes are held.

        Raises:
            ValueError: the draft branches, and the model has recurrent layers.
        """
        if any(sequence.ahead is not None for sequence in (*sequences, *(sequence for sequence, _ in prefill))):
            continued = continue_from(self._packer, sequences, pending, draft, prefill, self._taps)
            if continued is not None:
                return continued
        return self._way.prepare(sequences, pending, draft, prefill)

    def run(self, prepared: Forward, timed: Phase | None = None) -> Output:
        """See ``runner.Runner``. Called in inference mode."""
        self.forwards += 1 + len(prepared.early)
        return prepared.run(self.call, self._timed(timed))

    def _timed(self, timed: Phase | None) -> Phase:
        """The phase of a forward, whose clock has the captures as well."""
        timed = timed or self.clock.phase("target_forward")
        self.graphs.clock = timed.clock
        return timed

    @inference
    def extend(
        self,
        sequences: Sequence[Any],
        shape: Shape,
        rows: np.ndarray,
        token: np.ndarray | Tensor,
        timed: Phase | None = None,
    ) -> Extended:
        """See ``runner.DraftRunner``."""
        prepared = self._way.level(sequences, shape, rows, token)
        self.forwards += 1
        with self._timed(timed):
            return Extended(*prepared.compute(self.call))

    @property
    def plans_levels(self) -> bool:
        """Not in fixed shapes, nor of recurrent layers. Dense attention reads cells that are not written yet."""
        return self._way is self._packer and not self._packer.dense

    def levels_ahead(
        self,
        sequences: Sequence[Any],
        pending: Sequence[Sequence[int]],
        shape: Shape,
        arrays: Sequence[np.ndarray],
    ) -> LevelsAhead | None:
        """See ``runner.DraftRunner``."""
        packer = self._packer
        if max(map(len, pending)) > packer.chunk:
            return None
        active = [sequence for sequence in sequences if sequence is not None]
        return packer.levels_ahead(packer.plan(active, pending, None, len(active)), sequences, shape, arrays)

    @inference
    def run_level(self, prepared: Prepared, token: Tensor | None, timed: Phase | None = None) -> Tensor:
        """See ``runner.DraftRunner``."""
        self.forwards += 1
        forward = prepared if token is None else replace(prepared, ids=token[None])
        with timed or self.clock.phase("target_forward"):
            return forward.compute(self.call)[0]


def why_no_kv_dtype(model: Any) -> str:
    """Return what of a model does not support keys and values in a narrower data type; empty where nothing does."""
    if recurrent_layers(model.config):
        return "recurrent layers"
    return "ALiBi biases" if has_alibi(model) else ""  # stored in keys, which would round them
