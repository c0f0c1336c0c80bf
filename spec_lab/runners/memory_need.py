"""The memory that decoding needs, from the sizes of a model and of what it decodes. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from spec_lab.core.device_memory import readable
from spec_lab.runners.kv_cache import GRAIN, allocated


@dataclass(frozen=True)
class StateMemory:
    """The bytes of the recurrent states of one sequence, whose length does not matter.

    Args:
        states: of all recurrent layers.
        inputs: of their inputs for one token, which are kept with a snapshot of the states.
        kept: most tokens whose inputs are kept, in addition to those of a draft.
    """

    states: int
    inputs: int
    kept: int

    def bytes(self, rows: int) -> int:
        """Return those of a sequence with drafts of so many rows: without drafts no snapshot is taken."""
        return 2 * self.states + (self.kept + rows) * self.inputs if rows else self.states


@dataclass(frozen=True)
class ModelMemory:
    """The sizes of a loaded model from which the memory of decoding follows.

    Args:
        weights: their bytes.
        cell: numbers in one KV cell, keys and values of all layers.
        kv_itemsize: bytes of each of them, as they are stored.
        itemsize: bytes of a number of the weights, activations and logits.
        probabilities: bytes of a probability.
        vocabulary: V.
        width: numbers that a row needs inside the layer with the most.
        hidden: numbers of a hidden state.
        chunk: most tokens of a prompt computed in one forward.
        uniform: whether all sequences have as many cells as the longest.
        recurrent: of a model with recurrent layers.
        narrower: whether keys and values can be stored in a narrower data type.
        graphs: whether decoding steps are captured.
    """

    weights: int
    cell: int
    kv_itemsize: int
    itemsize: int
    probabilities: int
    vocabulary: int
    width: int
    hidden: int
    chunk: int
    uniform: bool = False
    recurrent: StateMemory | None = None
    narrower: bool = True
    graphs: bool = False

    def kv_bytes(self, reserves: Sequence[int]) -> int:
        """Return the bytes of the KV cache of sequences with room for so many positions, open together."""
        return allocated(reserves, self.uniform) * self.cell * self.kv_itemsize


@dataclass(frozen=True)
class Decoding:
    """Sizes of the requests that are decoded.

    Args:
        prompts: tokens of each prompt.
        batch_size: most of them decoded together.
        max_new_tokens: most tokens emitted for each.
        context: most tokens of a sequence.
        rows: most rows below one root of a draft, and ``cells``: most KV cells there.
        prefix_cache: tokens of earlier requests whose KV cache is kept.
        states: hidden states of each row that a forward keeps.
    """

    prompts: Sequence[int]
    batch_size: int
    max_new_tokens: int
    context: int
    rows: int = 0
    cells: int = 0
    prefix_cache: int = 0
    states: int = 0

    def together(self) -> list[int]:
        """Return the lengths of the longest prompts that may be decoded together."""
        return sorted(self.prompts, reverse=True)[: self.batch_size]


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that decoding needs in addition to the weights.

    Args:
        kv_cache: of the target, and ``draft_kv_cache``: of draft models.
        recurrent_states: of the target, with their snapshots.
        graphs: of the target, outputs that captured steps share.
        logits: of the rows of a step, and their probabilities.
        activations: inside a forward, attention masks included.
    """

    kv_cache: int
    draft_kv_cache: int
    logits: int
    activations: int
    recurrent_states: int = 0
    graphs: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        parts = (self.kv_cache, self.draft_kv_cache, self.logits, self.activations, self.recurrent_states, self.graphs)
        return sum(parts)

    def __str__(self) -> str:
        parts = {
            "KV cache": self.kv_cache, "KV cache of draft models": self.draft_kv_cache,
            "recurrent states": self.recurrent_states, "logits and probabilities": self.logits,
            "activations": self.activations, "outputs of CUDA graphs": self.graphs,
        }  # fmt: skip
        return ", ".join(f"{name} {readable(size)}" for name, size in parts.items() if size)


DraftBytes = Callable[[Sequence[int]], int]
"""The bytes of a proposer's own KV cache, for sequences of so many positions that are open together."""


def need(model: ModelMemory, decoding: Decoding, draft_bytes: DraftBytes = lambda _: 0) -> MemoryNeed:
    """Return the memory of decoding.

    The KV cache is counted as it is allocated, in blocks; in a uniform store each kept text of the prefix cache, of at
    least one block, takes as much as the longest sequence. Logits are counted once, and twice as probabilities.
    Activations are those of the larger one of two forwards: of all prompts' largest chunks, and of a step with all
    drafts; a sequence of which several rows are computed has an additive mask of these rows over its cells, unless it
    is a prompt of one chunk. Outputs of captured steps lie in memory that grows in powers of two and is kept
    (``graphs.Graphs``): at most four times the largest one.
    """
    prompts = decoding.together()
    ends = [min(prompt + decoding.max_new_tokens, decoding.context) for prompt in prompts]
    reserves = [end + decoding.cells for end in ends]
    kept = [decoding.prefix_cache] if decoding.prefix_cache else []
    if model.uniform:
        kept = [max(reserves, default=0)] * (decoding.prefix_cache // GRAIN)
    step = 1 + decoding.rows
    logits = len(prompts) * step * model.vocabulary * (model.itemsize + 2 * model.probabilities)
    chunks = [min(prompt, model.chunk) for prompt in prompts]
    row = model.width + decoding.states * model.hidden
    forwards = [
        _activations(model, row, chunks, [end if end > model.chunk else 0 for end in prompts]),
        _activations(model, row, [step] * len(prompts), reserves if decoding.rows else [0] * len(prompts)),
    ]
    graphs = 4 * len(prompts) * step * (model.vocabulary + decoding.states * model.hidden) * model.itemsize
    states = 0 if model.recurrent is None else len(prompts) * model.recurrent.bytes(decoding.rows)
    return MemoryNeed(
        model.kv_bytes(reserves + kept), draft_bytes(ends), logits, max(forwards), states, graphs * model.graphs
    )


def _activations(model: ModelMemory, row: int, rows: Sequence[int], cells: Sequence[int]) -> int:
    """Return the bytes inside a forward with so many rows of each sequence, which need masks over so many cells.

    Args:
        row: numbers that each row needs.
        rows: of each sequence.
        cells: of each sequence.
    """
    masks = [count * end for count, end in zip(rows, cells, strict=True)]
    return (sum(rows) * row + sum(masks)) * model.itemsize + 4 * max(masks, default=0)


def what_fits(
    model: ModelMemory, decoding: Decoding, available: int, draft_bytes: DraftBytes = lambda _: 0
) -> list[str]:
    """Return options of a run with which it fits, each by itself; empty where it fits, or where none helps."""

    def fits(model: ModelMemory, other: Decoding) -> bool:
        return need(model, other, draft_bytes).total <= available

    if fits(model, decoding):
        return []
    options = []
    batch = largest(lambda size: fits(model, replace(decoding, batch_size=size)), len(decoding.together()) - 1)
    if batch:
        options.append(f"batch_size={batch}")
    if new := largest(lambda size: fits(model, replace(decoding, max_new_tokens=size)), decoding.max_new_tokens - 1):
        options.append(f"max_new_tokens={new}")
    cut = largest(lambda end: fits(model, replace(decoding, prompts=[min(end, p) for p in decoding.prompts])),
                  max(decoding.prompts, default=0) - 1)  # fmt: skip
    if cut:
        options.append(f"max_prompt_tokens={cut}")
    if model.narrower and model.kv_itemsize > 2 and fits(replace(model, kv_itemsize=2), decoding):
        options.append("target.kv_dtype=bfloat16")
    if decoding.prefix_cache and fits(model, replace(decoding, prefix_cache=0)):
        options.append("prefix_cache=null")
    return options


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number from 1 to ``limit`` that fits, given that all below it do; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return max(low, 0)
