"""Checks before anything is decoded that its memory fits, and names what would fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spec_lab.core import device_memory
from spec_lab.core.device_memory import readable
from spec_lab.decode.capacity import max_cells, max_rows
from spec_lab.decode.proposer import Proposer
from spec_lab.propose.null import Null
from spec_lab.runners.memory_need import Decoding, MemoryNeed, ModelMemory, need, what_fits
from spec_lab.tasks.lab import Lab, Settings


def check_memory(lab: Lab, settings: Settings, prompts: Sequence[int], room: int | None = None) -> dict[str, Any]:
    """Refuse a run whose decoding does not fit the memory that is left, before it decodes.

    Args:
        prompts: tokens of each prompt.
        room: available bytes; None asks the target's device.

    Returns:
        What the manifest records: bytes needed, by part, and available; empty where the target's runner does not state
        its memory.

    Raises:
        ValueError: states what is needed, what is available, and which options fit.
    """
    lm = lab.target.lm
    model = lm.memory
    room = device_memory.available(lm.device) if room is None else room
    if model is None or not prompts:
        return {}
    decoding, proposers = _decoding(lab, settings, prompts), [lab.proposer, *lab.more_proposers.values()]

    def draft_bytes(positions: Sequence[int]) -> int:
        return sum(proposer.kv_bytes(positions) for proposer in proposers)

    needed = need(model, decoding, draft_bytes)
    if room is not None and needed.total > room:
        fitting = what_fits(model, decoding, room, draft_bytes)
        raise ValueError(
            f"decoding with batch_size={settings.batch_size}, max_new_tokens={settings.max_new_tokens} and prompts of "
            f"up to {max(decoding.prompts)} tokens needs {readable(needed.total)} ({needed}), and {readable(room)} of "
            f"memory are available on {lm.device}: {_advice(fitting)}"
        )
    return facts(model, needed, room)


def _decoding(lab: Lab, settings: Settings, prompts: Sequence[int]) -> Decoding:
    """Return the largest of each need of memory among the arms."""
    forces = lab.applied is not None and lab.applied.on_draft and bool(lab.applied.fast_forward)
    every: list[Proposer] = [lab.proposer, *lab.more_proposers.values()]
    arms = sum(not isinstance(proposer, Null) for proposer in every) + settings.baseline
    return Decoding(
        prompts=prompts,
        batch_size=settings.batch_size,
        max_new_tokens=settings.max_new_tokens,
        context=lab.target.context,
        rows=max(max_rows(proposer, forces) for proposer in every),
        cells=max(max_cells(proposer, forces) for proposer in every),
        prefix_cache=max(arms, 1) * (settings.prefix_cache or 0),
        states=max(_states(proposer.requires.hidden, lab.target.lm.capabilities.hidden_layers) for proposer in every),
    )


def _states(hidden: Sequence[int], layers: int) -> int:
    """Return how many hidden states of a row a forward keeps for these (``CausalLM.capture``)."""
    return len(hidden) if {*hidden} <= {-1, layers} else layers + 1 + len(hidden)


def _advice(fitting: Sequence[str]) -> str:
    if not fitting:
        return "no smaller batch_size or max_new_tokens fits: shorten the prompts, or choose a smaller model"
    return f"set {' or '.join(fitting)}"


def facts(model: ModelMemory, needed: MemoryNeed, room: int | None) -> dict[str, Any]:
    """Return the entry "memory" of the manifest."""
    return {
        "weights_bytes": model.weights,
        "kv_cache_bytes": needed.kv_cache,
        "draft_kv_cache_bytes": needed.draft_kv_cache,
        "recurrent_states_bytes": needed.recurrent_states,
        "graphs_bytes": needed.graphs,
        "logits_bytes": needed.logits,
        "activations_bytes": needed.activations,
        "decoding_bytes": needed.total,
        "available_bytes": room,
    }
