"""A model on a small KV cache of its own, which holds copies of some positions of a sequence's whole one.

Two selections of positions: the first and the last ones (StreamingLLM, 2309.17453), or for each head those to which the
end of the prompt attends most (SnapKV, 2404.14469). Or all positions, in 8 or 4 bits a number (QuantSpec, 2502.10424;
``quantized_kv``). As drafts of the model itself: MagicDec (2408.11049), TriForce (2404.11912) and QuantSpec.

Keys and values are copied as the whole cache has them, at their own positions. What the small cache computes itself
(the root of a draft and its nodes) is removed when the sequence goes on: verification has computed these tokens with
the whole cache, whose keys and values are copied. So the logits of a draft follow from the sequence's text and from
where the step began in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.nn.functional import avg_pool1d

from spec_lab.core.inference import inference
from spec_lab.core.upload import upload
from spec_lab.runners.attention import AttentionKind, Layer, Pack
from spec_lab.runners.causal_lm import CausalLM
from spec_lab.runners.kv_cache import Cells, CellSequence
from spec_lab.runners.memory_need import ModelMemory
from spec_lab.runners.quantized_kv import QuantizedCells, row_bytes
from spec_lab.runners.softmax import Softmax, causal_mask

Method = Literal["streaming_llm", "snapkv", "int8", "int4"]

BITS: Mapping[Method, int] = {"int8": 8, "int4": 4}
"""Bits of a number, of methods that keep all positions."""

OF_METHOD: Mapping[Method, tuple[str, ...]] = {
    "streaming_llm": ("sinks",),
    "snapkv": ("window", "kernel"),
    **dict.fromkeys(BITS, ("group",)),
}
"""Fields of ``Selection`` that only these methods read."""


@dataclass(frozen=True)
class Selection:
    """Which positions a small cache holds.

    Args:
        method: "streaming_llm": the first ``sinks`` and the last ``budget`` - ``sinks`` positions of the text.
            "snapkv": of the prompt, the last ``window`` positions, and for each head the ``budget`` - ``window``
            earlier ones with the largest scores; and all positions after the prompt. "int8", "int4": all positions,
            in 8 and 4 bits a number.
        budget: B, positions of a text, or of a prompt.
        sinks, window: see ``method``.
        kernel: odd; a score is the mean of so many neighbours' (of "snapkv").
        group: most neighbouring numbers of a head that share a scale (of "int8" and "int4").
    """

    method: Method = "streaming_llm"
    budget: int = 256
    sinks: int = 4
    window: int = 32
    kernel: int = 5
    group: int = 32

    @property
    def bits(self) -> int:
        """Bits of a number; 0 where keys and values are copied as they are."""
        return BITS.get(self.method, 0)

    @property
    def facts(self) -> dict[str, Any]:
        """The options that its method has, for records."""
        read = {name: getattr(self, name) for name in OF_METHOD[self.method]}
        return {"selection": self.method, **({} if self.bits else {"budget": self.budget}), **read}

    @property
    def few(self) -> Selection:
        """The same of four positions, for toys."""
        return replace(self, budget=4, sinks=1, window=2, kernel=1)

    @property
    def fixed(self) -> int:
        """Cells before those of the last positions."""
        if self.bits:
            return 0
        return self.sinks if self.method == "streaming_llm" else self.budget - self.window

    @property
    def target_cells(self) -> int:
        """Cells of the whole cache for the prompt's last tokens, which are computed again to rank positions."""
        return self.window if self.method == "snapkv" else 0

    def cells(self, prompt: int, length: int) -> int:
        """Return how many cells a small cache of ``length`` positions has, of which ``prompt`` are the prompt's."""
        if self.bits:
            return length
        bounded = length if self.method == "streaming_llm" else min(length, prompt)
        return min(bounded, self.budget) + length - bounded


class SparseLM(CausalLM):
    """The model of a ``CausalLM`` on KV caches with some positions of its sequences.

    Args:
        whole: whose model it is, and whose sequences it reads.
    """

    def __init__(self, whole: CausalLM, selection: Selection) -> None:
        self.whole, self.selection = whole, selection
        super().__init__(whole.model, *whole.model_settings._replace(fixed=False))

    def _store(self, unused: frozenset[int], uniform: bool) -> Cells:
        bits, group = self.selection.bits, self.selection.group
        return QuantizedCells(bits, group) if bits else super()._store(unused, uniform)

    @property
    def memory(self) -> ModelMemory | None:
        """See ``runner.Runner``."""
        whole, config = super().memory, self.model.config
        if whole is None or not self.selection.bits:
            return whole
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        in_row = row_bytes(dim, self.selection.bits, self.selection.group)
        return replace(whole, cell=whole.cell * in_row // dim, kv_itemsize=1)

    def follow(self, kv: CellSequence, source: CellSequence, prompt: Sequence[int]) -> None:
        """Bring a small cache in line with a sequence's whole one. The prompt is computed.

        Args:
            kv: holds positions of a prefix of the sequence's text as this method left them, or none.
            source: the sequence's KV cache in ``whole``.
        """
        fixed, known, length = self.selection.fixed, len(kv), len(source)
        size = self.selection.cells(len(prompt), length)
        surplus = len(kv.slots) + length - known - size
        if known and 0 <= surplus <= max(0, len(kv.slots) - fixed):  # below 0: a window that a rewind has shortened
            if surplus > 0:
                self.cells.leave_out(kv, fixed, surplus)
            self.cells.append_copies(kv, source, source.slots[known:])
            return
        kv.truncate(0)
        if size == length:
            self.cells.append_copies(kv, source, source.slots)
            return
        streaming = self.selection.method == "streaming_llm"
        self.cells.append_copies(kv, source, source.slots[:fixed] if streaming else self._selected(source, prompt))
        self.cells.append_copies(kv, source, source.slots[length - size + fixed :])
        kv.gap, kv.left_out, kv.in_order = fixed, length - size, False

    def _selected(self, source: CellSequence, prompt: Sequence[int]) -> list[Tensor]:
        """Return for each layer ``[kv heads, B - window]`` the cells of the positions with the largest scores.

        Query heads that share keys and values are summed before the scores are pooled, which is linear.
        """
        chosen, cells = self.selection, []
        count, kernel = len(prompt) - chosen.window, chosen.kernel
        (slots,) = upload(self.device, source.slots[:count])
        for attention in self.attention_of_last(source, prompt, chosen.window).values():
            scores = avg_pool1d(attention[:, slots], kernel, stride=1, padding=kernel // 2)
            best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : chosen.fixed]
            cells.append(slots[best.sort(-1).values])
        return cells

    @inference
    def attention_of_last(self, source: CellSequence, prompt: Sequence[int], window: int) -> dict[int, Tensor]:
        """Return for each layer ``[kv heads, C]`` the attention of a prompt's last ``window`` tokens to its cells.

        They are computed again: prefill keeps no queries. (One forward of ``window`` tokens for each request.)
        """
        twin, packer = source.fork(), self.whole._packer
        try:
            twin.truncate(len(prompt) - window)
            planned = packer.plan([twin], [prompt[-window:]], None, 0)
            try:
                prepared = packer.finish_level(planned, planned.numbers[0], 1)
                recorded = RecordedPack(
                    packer.cells, packer.kinds, prepared.pack.segments, self.device, prepared.positions
                )
                replace(prepared, pack=recorded).compute(self.call)
            finally:
                packer.give_back(planned)
        finally:
            twin.close()
        return recorded.attention


@dataclass(frozen=True, eq=False)
class RecordedPack(Pack):
    """The cells of a forward over one sequence, whose attention is recorded: of each layer ``[kv heads, C]``."""

    attention: dict[int, Tensor] = field(default_factory=dict)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """See ``CellCache``."""
        layer, _ = super().update(key, value, layer_idx)
        recorded = RecordedLayer(layer, partial(self.attention.__setitem__, layer_idx))
        return recorded, recorded


@dataclass(frozen=True, eq=False)
class RecordedLayer:
    """One layer's cells, and what records its attention ``[kv heads, C]``, summed over rows and query heads."""

    layer: Layer
    record: Callable[[Tensor], None]

    @property
    def kind(self) -> AttentionKind:
        """The layer's kind."""
        return self.layer.kind

    def attend(self, query: Tensor, softmax: Softmax) -> Tensor:
        """See ``Layer``."""
        (segment,) = self.layer.segments
        keys = self.layer.keys[segment.stream].narrow(2, 0, segment.end).to(query.dtype)
        shares = softmax.shares(query, keys, causal_mask(query) if segment.causal else segment.mask)
        self.record(shares[0].sum((1, 2)))
        return self.layer.attend(query, softmax)
