"""Runs some layers of a model of transformers by the model's own code.

While such a forward runs, modules that are left out are replaced by others: a layer by one that returns its input, a
sublayer by one that returns zeros. Embeddings, masks, rotary embeddings, the final norm and the LM head are computed by
the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from spec_lab.runners.draft_pass import Route, Sublayer, SublayerKind

NAMES: dict[SublayerKind, tuple[str, ...]] = {
    "attn": ("self_attn", "self_attention", "attention", "attn"),
    "mlp": ("mlp", "feed_forward", "block_sparse_moe"),
}
"""What transformers calls the two sublayers of a layer."""


class LayerRanges:
    """The layers of a model, and forwards that run some of them.

    Args:
        model: a causal LM of transformers.
        run: runs a forward of it, which shows what its modules return.

    Raises:
        NotImplementedError: its layers are not found, or return what cannot be replaced.
    """

    def __init__(self, model: Any, run: Callable[[], object]) -> None:
        self.count = int(model.config.num_hidden_layers)
        self.decoder, self._name, layers = find_layers(model)
        self._layers: list[nn.Module] = list(layers)
        names = {kind: self._names(kind) for kind in NAMES}
        modules = {
            Sublayer(kind, number): (layer, names[kind][number])
            for kind in NAMES for number, layer in enumerate(self._layers) if names[kind][number]
        }  # fmt: skip
        self._returns = _probe(run, [*self._layers, *(parent._modules[name] for parent, name in modules.values())])
        self._sublayers = {one: place for one, place in modules.items() if place[0]._modules[place[1]] in self._returns}
        self.sublayers = frozenset(self._sublayers)
        if any(layer not in self._returns for layer in self._layers):
            raise NotImplementedError("its layers do not return hidden states like their input")
        self._lists: dict[tuple[Route, frozenset[int]], tuple[nn.ModuleList, _Given, dict[int, _Tap]]] = {}
        self._zeros: dict[Sublayer, nn.Module] = {}

    def _names(self, kind: SublayerKind) -> list[str]:
        """The name of each layer's sublayer of a kind; empty where it has none of a known name that can be replaced."""
        return [
            next((name for name in NAMES[kind] if name in layer._modules and _adds_nothing(layer._modules[name])), "")
            for layer in self._layers
        ]

    @contextmanager
    def running(
        self, route: Route, taps: frozenset[int] = frozenset(), states: Tensor | None = None
    ) -> Iterator[dict[int, Tensor]]:
        """Within the block a forward of the model runs the layers of a route.

        Args:
            route: the layers.
            taps: layers whose inputs are returned, among those of the route and the one after its last.
            states: ``[N, H]`` the input of the route's first layer, if it is not layer 0.

        Yields:
            A dictionary that holds, after the block, ``[N, H]`` the inputs of the layers of ``taps``.
        """
        layers, given, tapped = self._list(route, taps)
        places: list[tuple[nn.Module, str, nn.Module]] = [(self.decoder, self._name, layers)]
        places += [(*self._sublayers[one], self._zero(one)) for one in route.skipped]
        before: list[Any] = [parent._modules[name] for parent, name, _ in places]
        caught: dict[int, Tensor] = {}
        given.states = None if states is None else states[None]
        try:
            for parent, name, module in places:
                parent._modules[name] = module
            yield caught
            for number, tap in tapped.items():
                if tap.states is None:
                    raise NotImplementedError("a layer of it was not called")
                caught[number] = tap.states.flatten(0, 1)
        finally:
            for (parent, name, _), own in zip(places, before, strict=True):
                parent._modules[name] = own
            given.states = None
            for tap in tapped.values():
                tap.states = None

    def _list(self, route: Route, taps: frozenset[int]) -> tuple[nn.ModuleList, _Given, dict[int, _Tap]]:
        """What replaces the model's list of layers for a route, built once."""
        key = (Route(route.first, route.end, _whole(route.skipped)), taps)
        if key not in self._lists:
            if len(self._lists) >= MOST_LISTS:
                self._lists.clear()
            end = self.count if route.end is None else route.end
            whole = {one.layer for one in key[0].skipped}
            given, tapped, modules = _Given(self._returns[self._layers[0]]), {}, []
            for number, layer in enumerate(self._layers):
                runs = route.first <= number < end and number not in whole
                one = layer if runs else given if number == route.first - 1 else _Same(self._returns[layer])
                if number in taps:
                    one = tapped[number] = _Tap(one)
                if one is not layer:
                    _copy_attributes(layer, one)
                modules.append(one)
            self._lists[key] = nn.ModuleList(modules), given, tapped
        return self._lists[key]

    def _zero(self, one: Sublayer) -> nn.Module:
        if one not in self._zeros:
            parent, name = self._sublayers[one]
            module = parent._modules[name]
            if module is None:
                raise NotImplementedError(f"{name} of layer {one.layer} is no module")
            self._zeros[one] = _Zero(self._returns[module])
            _copy_attributes(module, self._zeros[one])
        return self._zeros[one]


MOST_LISTS = 64
"""Most routes whose modules are kept."""


def find_layers(model: Any) -> tuple[nn.Module, str, nn.ModuleList]:
    """Return the outermost module of a causal LM that has a list of its layers, the list's name in it, and the list.

    Raises:
        NotImplementedError: there is none.
    """
    count = int(model.config.num_hidden_layers)
    for parent in model.get_decoder().modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return parent, name, child
    raise NotImplementedError("its layers are not one list of modules of its decoder")


def _adds_nothing(module: nn.Module | None) -> bool:
    """Return whether a sublayer returns what its layer adds to the residual, and not, like Bloom's, their sum."""
    return module is not None and "residual" not in signature(type(module).forward).parameters


def _whole(skipped: frozenset[Sublayer]) -> frozenset[Sublayer]:
    """The sublayers of layers both of whose sublayers are skipped, for which the whole layer is."""
    return frozenset(one for one in skipped if all(Sublayer(kind, one.layer) in skipped for kind in NAMES))


def _copy_attributes(module: nn.Module, to: nn.Module) -> None:
    """Copy plain attributes, such as ``attention_type``, which the loop over the layers may read."""
    for name, value in vars(module).items():
        if not name.startswith("_") and name not in vars(to):
            setattr(to, name, value)


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def _returned(hidden: Tensor, width: int) -> Any:
    """As a module returns hidden states: alone (0), or as the first of so many."""
    return (hidden, *[None] * (width - 1)) if width else hidden


class _Same(nn.Module):
    """In place of a layer: returns its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _returned(_input(args, kwargs), self.width)


class _Given(nn.Module):
    """In place of the layer before the first that runs: returns what is given, ``[1, N, H]``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.states: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        if self.states is None:
            raise NotImplementedError("the layer before the first that runs was called without states to return")
        return _returned(self.states, self.width)


class _Zero(nn.Module):
    """In place of a sublayer: returns zeros."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _returned(torch.zeros_like(_input(args, kwargs)), self.width)


class _Tap(nn.Module):
    """Keeps the input of a layer, then calls it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.states: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.states = _input(args, kwargs)
        return self.layer(*args, **kwargs)


def _probe(run: Callable[[], object], modules: Sequence[nn.Module | None]) -> dict[nn.Module, int]:
    """Return how modules return hidden states (``_returned``) in a forward.

    Modules that return something else, or are not called, are left out.
    """
    found: dict[nn.Module, int] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        hidden = _input(args, kwargs) if args or "hidden_states" in kwargs else None
        if isinstance(first, Tensor) and isinstance(hidden, Tensor) and first.shape == hidden.shape:
            found[module] = len(output) if isinstance(output, tuple) else 0

    handles = [one.register_forward_hook(note, with_kwargs=True) for one in modules if one is not None]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found
