"""Forwards of a model of transformers that run themselves, and the calls of the model that they are made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spec_lab.core.cache_argument import cache_argument
from spec_lab.core.clock import Phase
from spec_lab.runners.experts import ChosenExperts, ExpertHooks
from spec_lab.runners.runner import Output


class ModelCall:
    """Calls a model, and returns its logits and those of its hidden states that are captured.

    The state after the final norm, which enters the language-modelling head, and the one before it are caught by hooks;
    for others transformers keeps all states of a forward, but not the one before that norm.

    Args:
        model: a transformers model with a language-modelling head, in eval mode.

    Attributes:
        layers: numbers of the captured hidden states (``runner.numbered``).
        hook: what catches the state after the final norm; None where it is not needed, or transformers keeps it.
        experts: hooks that keep what routers choose; None where that is not counted.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.device = model, model.device
        self.layers: tuple[int, ...] = ()
        self.hook: Any = None
        self.experts: ExpertHooks | None = None
        self._chosen: ChosenExperts | None = None
        self._last = 0
        self._last_hook: Any = None
        self._final: Tensor | None = None
        self._before: Tensor | None = None

    def capture(self, layers: tuple[int, ...], last: int, last_layer: nn.Module | None) -> None:
        """Return these hidden states from now on.

        Args:
            layers: their numbers.
            last: the number of layers.
            last_layer: of the model, where its output, which is state ``last``, is among them.
        """
        for hook in (self.hook, self._last_hook):
            if hook is not None:
                hook.remove()
        self.layers, self.hook, self._last, self._last_hook = layers, None, last, None
        if last + 1 in layers and min(layers) >= last:
            self.hook = self.catch(self.model.get_decoder())  # OPT never calls its base_model
        if last_layer is not None:
            self._last_hook = last_layer.register_forward_hook(self._keep_before)

    def _keep_before(self, _layer: nn.Module, _args: Any, output: Any) -> None:
        self._before = (output if isinstance(output, Tensor) else output[0]).flatten(0, 1)

    def take_before(self) -> Tensor | None:  # [N, H]
        """The state before the final norm that was caught last, which is kept no longer."""
        before, self._before = self._before, None
        return before

    def catch(self, decoder: nn.Module) -> Any:
        """Keep the state that a decoder returns, until ``take_final``; return the handle that ends it."""

        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            self._final = output[0].flatten(0, 1)

        return decoder.register_forward_hook(keep)

    def take_final(self) -> Tensor | None:  # [N, H]
        """The state that was caught last, which is kept no longer."""
        final, self._final = self._final, None
        return final

    def count_experts(self, on: bool) -> None:
        """Keep what routers choose from now on, or no longer."""
        if self.experts is not None:
            self.experts.remove()
        self.experts, self._chosen = ExpertHooks(self.model) if on else None, None

    def take_chosen(self) -> ChosenExperts | None:
        """The choices of the routers in the last call, which are kept no longer; None where they are not known."""
        chosen, self._chosen = self._chosen, None
        return chosen

    def run(self, module: Any, ids: Tensor, positions: Tensor, pack: Any, mask: Any, **more: Any) -> Any:
        """Call the model or its decoder on rows ``[b, n]``; return what it returns."""
        return module(
            input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True,
            **{cache_argument(module): pack}, **more,
        )  # fmt: skip

    def __call__(
        self, ids: Tensor, positions: Tensor, pack: Any, mask: Any, keep: Tensor | int
    ) -> tuple[Tensor, Tensor | None]:
        """Logits ``[R, V]`` of the rows ``keep``, and the captured hidden states ``[N, layers * H]``."""
        all_states = bool(self.layers) and min(self.layers) < self._last
        more: dict[str, Any] = {"output_hidden_states": True} if all_states else {}
        if self.experts is not None:
            self.experts.begin()
        output = self.run(self.model, ids, positions, pack, mask, logits_to_keep=keep, **more)
        if self.experts is not None:
            self._chosen = self.experts.take()
        final, before = self.take_final(), self.take_before()
        if not self.layers:
            return output.logits.flatten(0, 1), None
        states: dict[int, Any] = {self._last: before, self._last + 1: final}
        for layer in {*self.layers} - {self._last} if all_states else ():
            states[layer] = output.hidden_states[min(layer, self._last)].flatten(0, 1)
        hidden = [states[layer].to(self.device) for layer in self.layers]
        return output.logits.flatten(0, 1), hidden[0] if len(hidden) == 1 else torch.cat(hidden, -1)


@dataclass(frozen=True, eq=False, kw_only=True)
class Forward(ABC):
    """One forward, ready to run.

    Args:
        attended: cells attended to in a layer with full attention, in total.
        pending: for each sequence, those that only prefill last, the rows of its pending tokens.
        nodes: for each tree the rows of its nodes.
        early: chunks of long prompts that are computed first, each with the numbers of its sequences.
    """

    attended: int
    pending: Sequence[slice] = ()
    nodes: Sequence[slice] = ()
    early: Sequence[tuple[Forward, list[int]]] = ()

    @abstractmethod
    def compute(self, call: ModelCall) -> tuple[Tensor, Tensor | None]:
        """Logits ``[R, V]``, and the captured hidden states ``[N, layers * H]``; without ``early``."""

    def run(self, call: ModelCall, timed: Phase) -> Output:
        """Compute everything; ``timed`` records the calls of the model."""
        early: dict[int, Tensor] = {}
        for chunk, sequences in self.early:
            with timed:
                _, hidden = chunk.compute(call)
            if hidden is not None:
                for sequence, rows in zip(sequences, chunk.pending, strict=True):
                    states = hidden[rows]
                    early[sequence] = torch.cat([early[sequence], states]) if sequence in early else states
        call.take_chosen()
        with timed:
            logits, hidden = self.compute(call)
        chosen = None if self.early else call.take_chosen()  # all rows, not those of a long prompt's last part
        return Output(logits, self.attended, hidden, self.pending, self.nodes, early, experts=chosen)
