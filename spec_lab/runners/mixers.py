"""The mixers of a model of transformers: the modules of its recurrent layers that read and write the states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from spec_lab.core.inference import inference
from spec_lab.runners.attention import Pack, recurrent_layers
from spec_lab.runners.layer_ranges import find_layers


class Mixer:
    """Stands in for the ``forward`` of a mixer.

    Args:
        inner: the module's own forward.
        tokenwise: whether the module continues from a state with one token only, as those of Mamba (and Jamba) do: more
            tokens would begin with an empty state.
    """

    def __init__(self, layer: int, inner: Callable[..., Tensor], tokenwise: bool) -> None:
        self.layer, self.inner, self.tokenwise = layer, inner, tokenwise

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The module's forward; over the sequences of a ``Pack`` one after the other."""
        pack = kwargs.get("cache")
        if not isinstance(pack, Pack):
            return self.inner(hidden_states, *args, **kwargs)
        parts = [advance(self, hidden_states) for advance in pack.advances]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def advance(self, rows: Tensor, cache: Any) -> Tensor:
        """Compute rows ``[1, n, H]`` of one sequence, and advance its state in transformers' cache."""
        if self.tokenwise and rows.shape[1] > 1 and cache.has_previous_state(self.layer):
            return torch.cat([self.inner(row, cache=cache) for row in rows.split(1, 1)], 1)
        return self.inner(rows, cache=cache)


class Mixers(NamedTuple):
    """The mixers of a model, from ``find_mixers``."""

    every: list[Mixer]
    hidden_states: bool
    """Whether the model numbers its hidden states as ``runner.Capabilities`` does."""
    state_bytes: int
    """Bytes of the states of one sequence in all recurrent layers."""
    input_bytes: int
    """Bytes of the inputs of all mixers for one token."""


def find_mixers(model: Any) -> Mixers:
    """Let the mixers of a model read the states of the sequences of a ``Pack``; other forwards remain as they are.

    Args:
        model: a causal LM of transformers with recurrent layers.

    Raises:
        NotImplementedError: a recurrent layer does not keep its states in transformers' cache, or shares its mixer.
    """
    modules, inputs, regular, state_bytes = _probe(model, model.config, recurrent_layers(model.config))
    if len({id(module) for module in modules.values()}) < len(modules):
        raise NotImplementedError("two of its recurrent layers share a module")
    mixers, tokenwise = [], dict[type, bool]()
    for layer, module in modules.items():
        kind = type(module)
        if not isinstance(module.forward, Mixer):  # else of an earlier runner of this model
            if kind not in tokenwise:
                tokenwise[kind] = not _continues(module, layer, inputs[layer], model.config)
            module.forward = Mixer(layer, module.forward, tokenwise[kind])
        mixers.append(module.forward)
    return Mixers(mixers, regular, state_bytes, sum(tensor.nbytes for tensor in inputs.values()))


@inference
def _probe(model: Any, config: Any, layers: Sequence[int]) -> tuple[dict[int, nn.Module], dict[int, Tensor], bool, int]:
    """Run one token; return each layer's mixer, its input, ``Mixers.hidden_states`` and ``Mixers.state_bytes``."""
    cache, modules, inputs = DynamicCache(config=config), dict[int, nn.Module](), dict[int, Tensor]()
    first: list[Tensor] = []

    def written() -> set[int]:
        return {layer for layer in layers if cache.has_previous_state(layer)}

    stack: list[set[int]] = []

    def enter(*_: Any) -> None:
        stack.append(written())

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        for layer in written() - stack.pop() - modules.keys():
            modules[layer], inputs[layer] = module, args[0] if args else kwargs["hidden_states"]

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first.append(args[0] if args else kwargs["hidden_states"])

    with _hooks() as handles:
        for module in model.modules():
            if "cache" in signature(type(module).forward).parameters:
                handles.append(module.register_forward_pre_hook(enter))
                handles.append(module.register_forward_hook(leave, with_kwargs=True))
        handles.append(find_layers(model)[2][0].register_forward_pre_hook(begin, with_kwargs=True))
        ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        states = model(input_ids=ids, cache=cache, use_cache=True, output_hidden_states=True).hidden_states
    if missing := [layer for layer in layers if layer not in modules]:
        raise NotImplementedError(
            f"its layer {missing[0]} does not keep its state in transformers' cache (of transformers 5.24 or newer)"
        )
    regular = states is not None and len(states) == config.num_hidden_layers + 1 and bool((states[0] == first[0]).all())
    state_bytes = sum(tensor.nbytes for layer in layers for tensor in state_tensors(cache.layers[layer]))
    return modules, inputs, regular, state_bytes


def state_tensors(state: Any) -> list[Tensor]:
    """Return the tensors of one layer's state in transformers' cache."""
    values = [value for value in vars(state).values() if isinstance(value, dict)]
    return [tensor for every in values for tensor in every.values() if isinstance(tensor, Tensor)]


@contextmanager
def _hooks() -> Iterator[list[Any]]:
    handles: list[Any] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()


@inference
def _continues(module: nn.Module, layer: int, row: Tensor, config: Any) -> bool:
    """Return whether several tokens begin with the state of those before: whether NaN in the state reaches them."""
    for name in ("conv_states", "recurrent_states"):
        cache = DynamicCache(config=config)
        module(row, cache=cache)
        states = [state for state in vars(cache.layers[layer])[name].values() if state is not None]
        for state in states:
            state.fill_(torch.nan)
        if states and not module(torch.cat([row, row], 1), cache=cache).isnan().any():
            return False
    return True
