"""A causal LM of transformers, run over forests of tokens: any model whose layers are attention over earlier tokens.

Linear layers run packed over the new tokens of all sequences; attention runs sequence by sequence (``attention``), and
so do recurrent layers (``recurrent``), with which forests must be chains.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spec_lab.core.cache_argument import cache_argument
from spec_lab.core.clock import Clock, Phase
from spec_lab.core.draft import Draft, Shape, empty
from spec_lab.core.inference import inference
from spec_lab.core.own_attention import own_attention
from spec_lab.core.roofline import ForwardWork
from spec_lab.runners.adaptors import adapt, has_alibi
from spec_lab.runners.attention import (
    SPANS,
    Attention,
    counting_layers,
    layer_kinds,
    layers_without_cells,
    recurrent_layers,
)
from spec_lab.runners.causal_draft_pass import CausalDraftPass, Continued, continue_from
from spec_lab.runners.draft_pass import Route, Sublayer
from spec_lab.runners.graphs import Capture, CudaGraphs, FixedForward, FixedPack, Graphs, uncaptured
from spec_lab.runners.kv_cache import GRAIN, Cells, CellSequence
from spec_lab.runners.layer_ranges import LayerRanges, find_layers
from spec_lab.runners.memory import ModelMemory
from spec_lab.runners.model_work import memory_of, parameters_of, work_of
from spec_lab.runners.prepare import Packer, Prepared
from spec_lab.runners.quantized import recorded
from spec_lab.runners.recurrent import Recurrence, refuse_branches, states_of
from spec_lab.runners.rounded import RoundedCache, text_masks
from spec_lab.runners.runner import Ability, Capabilities, Extended, ModelSettings, Output, Runner


class CausalLM(Runner):
    """A causal LM of transformers with a KV cache of its own. A ``runner.DraftRunner`` as well.

    Args:
        model: a transformers model with a language-modelling head, in eval mode.
        attention: over spans of cells, sequence by sequence, or dense (the oracle, and the only way for models without
            ``AttentionInterface``).
        chunk: longest part of a prompt computed in one forward.
        fixed: whether decoding steps run in fixed shapes (``graphs``), captured as CUDA graphs on a GPU.
        kv_dtype: in which keys and values are stored; None: in the model's.
    """

    def __init__(
        self,
        model: Any,
        attention: Attention = "spans",
        chunk: int = 512,
        fixed: bool = False,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.attention = attention
        wanted = SPANS if attention == "spans" else own_attention(model)
        without, recurrent = layers_without_cells(model.config), recurrent_layers(model.config)
        if recurrent and (fixed or attention == "dense"):
            raise ValueError("recurrent layers require attention over spans, without forwards of fixed shapes")
        self.kv_dtype = None if kv_dtype == model.dtype else kv_dtype
        self.model_settings = ModelSettings(attention, chunk, fixed, self.kv_dtype)
        if self.kv_dtype is not None and (why := why_no_kv_dtype(model)):
            raise ValueError(f"{why} require keys and values in the model's own data type")
        attends = len(without) < model.config.num_hidden_layers
        if attends and (attention == "dense" or getattr(model, "_can_set_attn_implementation", lambda: True)()):
            model.set_attn_implementation(wanted)
        if attention == "dense" and has_alibi(model):
            raise NotImplementedError("its ALiBi biases require target.attention=spans")
        own = attends and attention == "spans" and adapt(model)
        if attends and attention == "spans" and not own and model.config._attn_implementation != wanted:
            raise NotImplementedError("it does not compute attention by transformers' AttentionInterface")
        self.chunk = chunk
        self.cells = Cells(without, uniform=fixed or attention == "dense", dtype=self.kv_dtype)
        self.dtype, self.device = model.dtype, model.device
        self.vocabulary = int(model.get_output_embeddings().weight.shape[0])
        devices = getattr(model, "hf_device_map", None) or {}
        split = len({str(device) for device in devices.values()}) > 1
        layers = int(model.config.num_hidden_layers)
        kinds, counting = layer_kinds(model.config), counting_layers(model)
        dense = attention == "dense"
        shares = bool(getattr(model.config, "num_kv_shared_layers", 0))
        self._packer = Packer(self.cells, kinds, layers, self.device, self.dtype, dense, split, counting, shares)
        if fixed and (split or dense):
            raise ValueError("forwards of fixed shapes require attention over spans, and all layers on one device")
        self.recurrence = Recurrence(model) if recurrent else None
        self.fixed = fixed
        capture: Capture = CudaGraphs() if self.device.type == "cuda" else uncaptured
        self.graphs = Graphs(self.cells, kinds, counting, self.device, self.dtype, self._compute_fixed, capture)
        self.clock = Clock(self.device)
        self.forwards = 0  # of the model, so far
        self._asked: tuple[int, ...] = ()
        self._layers: tuple[int, ...] = ()
        self._final: Tensor | None = None
        self._hook: Any = None

    @property
    def facts(self) -> dict[str, Any]:
        """What the seconds of a forward depend on, for records (``core.protocols.Described``)."""
        parameters, head = list(self.model.parameters()), self.model.get_output_embeddings().weight
        copied = head.is_mkldnn and self.model.config.tie_word_embeddings  # from the embedding (``models.packed``)
        devices = sorted({parameter.device for parameter in parameters} | {torch.device(self.device)}, key=str)
        return {
            "devices": [torch.cuda.get_device_name(one) if one.type == "cuda" else str(one) for one in devices],
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
        if (getattr(self.model, "tp_size", None) or 1) == 1:  # other ranks are told of forwards only
            abilities.add("copied_prefix")
        return Capabilities(self.layers, sequences=None, abilities=frozenset(abilities))

    @property
    def layers(self) -> int:
        """L, the number of the model's layers."""
        return int(self.model.config.num_hidden_layers)

    @property
    def max_pending(self) -> int:
        """See ``runner.Runner``."""
        return self.chunk

    @cached_property
    def why_no_layer_ranges(self) -> str:
        """Why it lacks the ability ``layer_ranges``; empty where it has it."""
        if self.attention == "dense":
            return "it computes attention=dense"
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
    def _ranges(self) -> LayerRanges:
        return LayerRanges(self.model, self._one_token)

    @inference
    def _one_token(self) -> None:
        """A forward of one token, in cells of its own."""
        packer = replace(self._packer, cells=Cells())
        prepared = packer.prepare([packer.cells.open(1)], [[0]], empty(1, self.device), (), self.chunk)
        try:
            self._forward(self.model, prepared, {"logits_to_keep": prepared.keep})
        finally:
            self._final = None

    @property
    def sublayers(self) -> frozenset[Sublayer]:
        """See ``runner.Runner``."""
        return self._ranges.sublayers

    def draft_pass(self, route: Route, logits: bool = True) -> CausalDraftPass:
        """See ``runner.Runner``."""
        if route.first or not (route.end is None or 0 < route.end < self.layers) or route.skipped - self.sublayers:
            raise ValueError(f"{route} is no route of a draft pass: the model has {self.layers} layers")
        taps = () if route.end is None else self._taps(route.end)

        def call(prepared: Prepared, timed: Phase) -> tuple[Tensor | None, Tensor | None]:
            with timed:
                return self._run_part(prepared, route, taps, logits)

        return CausalDraftPass(self._packer, route, taps, self.max_pending, call)

    def _taps(self, end: int) -> tuple[int, ...]:
        """Which of the captured hidden states are inputs of layers below ``end``, ascending."""
        return tuple(sorted({layer for layer in self._layers if layer < end}))

    @property
    def work(self) -> ForwardWork | None:
        """See ``runner.Runner``. None of a model on several devices, which no single device bounds."""
        return None if self._packer.split else work_of(self.model, self._packer.kinds, self._kv_itemsize)

    @property
    def memory(self) -> ModelMemory | None:
        """See ``runners.memory.StatesMemory``."""
        recurrent, chunk = None, self.chunk
        if self.recurrence is not None:
            recurrent, chunk = self.recurrence.memory, self.recurrence.chunk(chunk)
        dense = self.attention == "dense"
        found = memory_of(self.model, chunk, self.cells.uniform, self._kv_itemsize, dense, recurrent)
        return None if found is None else replace(found, narrower=not why_no_kv_dtype(self.model))

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
        """See ``runner.CopiesPrefix``."""
        return self.cells.copy(source, length, reserve, clear=self.fixed, exact=exact)

    def capture(self, layers: tuple[int, ...] = ()) -> None:
        """Return these hidden states from now on. Numbers as in ``runner.Capabilities``.

        The state after the final norm, which enters the language-modelling head, is caught by a hook; for others
        transformers keeps all states of a forward.

        Raises:
            ValueError: a layer that the model does not have.
        """
        if layers == self._asked:
            return
        last = self.capabilities.hidden_layers
        if wrong := [layer for layer in layers if not -last - 1 <= layer <= last]:
            raise ValueError(f"hidden state {wrong[0]} does not exist: the model has states 0 to {last}")
        self._asked, layers = layers, tuple(layer % (last + 1) for layer in layers)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._layers = layers
        if layers == (last,):
            self._hook = self.model.get_decoder().register_forward_hook(self._catch)  # OPT never calls its base_model

    @torch.inference_mode()
    def plain_logits(self, tokens: Sequence[int], rows: int) -> Tensor:  # [rows, V]
        """Return the logits of the last rows of a forward over a text without cells, with keys and values rounded to
        ``kv_dtype``.
        """
        ids = torch.tensor([list(tokens)], device=self.device)
        wanted = torch.arange(len(tokens) - rows, len(tokens), device=self.device)  # see ``Packer.indexed``
        if self.kv_dtype is None:
            logits: Tensor = self.model(input_ids=ids, use_cache=False, logits_to_keep=wanted).logits[0]
            return logits
        kinds, dense = self._packer.kinds, self.attention == "dense"
        positions = torch.arange(len(tokens), device=self.device)[None]
        mask = text_masks(kinds, self.layers, len(tokens), self.dtype, self.device) if dense else None
        cache = RoundedCache(self.kv_dtype, kinds, positions, dense)
        logits = self.model(
            input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True, logits_to_keep=wanted,
            **{cache_argument(self.model): cache},
        ).logits[0]  # fmt: skip
        return logits

    def _catch(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._final = output[0].flatten(0, 1)  # [N, H]

    forward = inference(Runner.forward)

    def prepare(
        self,
        sequences: Sequence[Any],
        pending: Sequence[Sequence[int]],
        draft: Draft,
        prefill: Sequence[tuple[Any, Sequence[int]]] = (),
    ) -> Prepared | FixedForward | Continued:
        """See ``runner.Runner``. Cells of pending tokens are appended to their sequences, those of nodes are held.

        Raises:
            ValueError: the draft branches, and the model has recurrent layers.
        """
        if self.recurrence is not None:
            refuse_branches(draft.shape)
            every = [*sequences, *(one for one, _ in prefill)]
            self._recover(every)
            return self._chains(sequences, pending, draft, prefill)
        if any(one.ahead is not None for one in sequences) or any(one.ahead is not None for one, _ in prefill):
            continued = continue_from(self._packer, sequences, pending, draft, prefill, self.chunk, self._taps)
            if continued is not None:
                return continued
        if self.fixed and sequences and not prefill and max(map(len, pending)) <= MOST_PENDING:
            planned = self._packer.plan(sequences, pending, draft, len(sequences))
            fixed = self.graphs.prepare(planned, draft)
            if fixed is not None:
                self._packer.keep(planned)
                return fixed
            self._packer.give_back(planned)
        return self._packer.prepare(sequences, pending, draft, prefill, self.chunk)

    def _chains(
        self,
        sequences: Sequence[Any],
        pending: Sequence[Sequence[int]],
        draft: Draft,
        prefill: Sequence[tuple[Any, Sequence[int]]],
    ) -> Prepared:
        """``prepare`` of a model with recurrent layers."""
        assert self.recurrence is not None
        prepared = self._packer.prepare(sequences, pending, draft, prefill, self.recurrence.chunk(self.chunk))
        every = [*sequences, *(one for one, _ in prefill)]
        return self.recurrence.follow(prepared, every, [*pending, *(tokens for _, tokens in prefill)], draft)

    @inference
    def _recover(self, sequences: Sequence[CellSequence]) -> None:
        """Compute sequences again whose states are lost."""
        again = []
        for one in sequences:
            one.accept()
            states = states_of(one)
            if states.lost:
                self.cells.backtrack(one, 0)
                again.append((one, states.take_tokens()))
        if again:
            self.run(self._chains([], [], empty(0, self.device), again))

    def run(self, prepared: Prepared | FixedForward | Continued, timed: Phase | None = None) -> Output:
        """See ``runner.Runner``. Called in inference mode."""
        if isinstance(prepared, FixedForward):
            logits, hidden = self._run_fixed(prepared, timed)
            return Output(logits, prepared.attended, hidden, prepared.pending, prepared.nodes)
        before, prepared = (prepared, prepared.whole) if isinstance(prepared, Continued) else (None, prepared)
        early: dict[int, Tensor] = {}
        for chunk, places in prepared.early:
            _, hidden = self._call(chunk, timed)
            if hidden is not None:
                for place, rows in zip(places, chunk.pending, strict=True):
                    early[place] = torch.cat([early[place], hidden[rows]]) if place in early else hidden[rows]
        logits, hidden = self._call(prepared, timed) if before is None else self._continue(before, timed)
        return Output(logits, prepared.attended, hidden, prepared.pending, prepared.nodes, early)

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
        if isinstance(token, np.ndarray):
            token = torch.from_numpy(token).to(self.device)
        if self.recurrence is not None:
            refuse_branches(shape)
            prepared = self._packer.level(sequences, shape, rows, token)
            return Extended(*self._call(self.recurrence.extend(prepared, sequences, shape, rows, token), timed))
        if self.fixed:
            planned = self._packer.plan_level(sequences, shape, rows)
            if (fixed := self.graphs.prepare(planned, None, token)) is not None:
                return Extended(*self._run_fixed(fixed, timed))
            return Extended(*self._call(self._packer.finish_level(planned, token), timed))
        return Extended(*self._call(self._packer.level(sequences, shape, rows, token), timed))

    def _run_fixed(self, prepared: FixedForward, timed: Phase | None) -> tuple[Tensor, Tensor | None]:
        assert self.fixed
        self.forwards += 1
        with timed or self.clock.phase("target_forward"):
            return self.graphs.run(prepared, self._layers)

    def _compute_fixed(
        self, ids: Tensor, positions: Tensor, pack: FixedPack, wanted: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return self._compute(ids, positions, pack, None, wanted)

    def _call(self, prepared: Prepared, timed: Phase | None) -> tuple[Tensor, Tensor | None]:
        """Logits ``[R, V]``, and the captured hidden states ``[N, layers * H]``."""
        self.forwards += 1
        with timed or self.clock.phase("target_forward"):
            return self._compute(prepared.ids, prepared.positions, prepared.pack, prepared.mask, prepared.keep)

    def _run_part(
        self, prepared: Prepared, route: Route, taps: tuple[int, ...], logits: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Logits ``[n, V]`` after a route's layers; if it has an end, the inputs of ``taps``, then its output."""
        own = () if route.end is None else (*taps, route.end)
        with self._ranges.running(route, frozenset(own)) as caught:
            module = self.model if logits else self._ranges.decoder
            output = self._forward(module, prepared, {"logits_to_keep": prepared.keep} if logits else {})
        self._final = None
        states = torch.cat([caught[layer] for layer in own], -1) if own else None
        return output.logits.flatten(0, 1) if logits else None, states

    def _continue(self, prepared: Continued, timed: Phase | None) -> tuple[Tensor, Tensor | None]:
        """As ``_call``. The layers that the draft pass ran are computed of no row twice."""
        self.forwards += 1
        whole, end, last = prepared.whole, prepared.end, self.layers
        with timed or self.clock.phase("target_forward"):
            states = prepared.states
            if prepared.rest is not None:
                _, rest = self._run_part(prepared.rest, Route(0, end), prepared.taps, False)
                states = states if rest is None else torch.cat([states, rest])
            states = states.index_select(0, prepared.order)
            parts = states.tensor_split(len(prepared.taps) + 1, -1)
            hidden = dict(zip((*prepared.taps, end), parts, strict=True))
            later = frozenset(layer for layer in self._layers if end < layer < last)
            own = self._ranges.decoder.register_forward_hook(self._catch) if self._hook is None else None
            try:
                with self._ranges.running(Route(end), later, hidden[end]) as caught:
                    output = self._forward(self.model, whole, {"logits_to_keep": whole.keep})
            finally:
                if own is not None:
                    own.remove()
            final, self._final = self._final, None
            if final is None:
                raise NotImplementedError("its decoder returns no state after the final norm")
            hidden |= {**caught, last: final}
        captured = torch.cat([hidden[layer] for layer in self._layers], -1) if self._layers else None
        return output.logits.flatten(0, 1), captured

    def _forward(self, module: Any, prepared: Prepared, more: dict[str, Any]) -> Any:
        return module(
            input_ids=prepared.ids,
            position_ids=prepared.positions,
            attention_mask=prepared.mask,
            use_cache=True,
            **{cache_argument(module): prepared.pack},
            **more,
        )

    def _compute(
        self, ids: Tensor, positions: Tensor, pack: Any, mask: Any, keep: Tensor | int
    ) -> tuple[Tensor, Tensor | None]:
        """The model, on rows ``[b, n]``: logits ``[R, V]`` and the captured hidden states ``[N, layers * H]``."""
        more: dict[str, Any] = {"output_hidden_states": True} if self._layers and self._hook is None else {}
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=keep,
            **{cache_argument(self.model): pack},
            **more,
        )
        hidden = None
        if self._hook is not None:
            hidden, self._final = self._final, None
        elif self._layers:
            states = [output.hidden_states[layer].flatten(0, 1).to(self.device) for layer in self._layers]
            hidden = torch.cat(states, -1)
        return output.logits.flatten(0, 1), None if hidden is None else hidden.to(self.device)


MOST_PENDING = 16
"""Most pending tokens of a sequence in a forward of fixed shape; longer ones are prompts."""


def why_no_kv_dtype(model: Any) -> str:
    """Return what of a model does not support keys and values in a narrower data type; empty where nothing does."""
    if recurrent_layers(model.config):
        return "recurrent layers"
    return "ALiBi biases" if has_alibi(model) else ""  # stored in keys, which would round them
