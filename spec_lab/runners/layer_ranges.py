"""Runs some layers of a model of transformers by the model's own code.

While such a forward runs, modules that are left out are replaced by others: a layer by one that returns its input, a
sublayer by one that returns zeros. Embeddings, masks, rotary embeddings, the final norm and the LM head are computed by
the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from spec_lab.core.draft import empty
from spec_lab.core.inference import inference
from spec_lab.runners.draft_pass import Route, Sublayer, SublayerKind
from spec_lab.runners.forward import ModelCall
from spec_lab.runners.kv_cache import Cells
from spec_lab.runners.prepare import Packer, Prepared

NAMES: dict[SublayerKind, tuple[str, ...]] = {
    "attn": ("self_attn", "self_attention", "attention", "attn"),
    "mlp": ("mlp", "feed_forward", "block_sparse_moe"),
}
"""Names of the two sublayers of a layer in transformers."""


class LayerRanges:
    """The layers of a model, and forwards that run some of them.

    Args:
        call: of a causal LM of transformers.
        packer: of the same; a forward of one token, in cells of its own, shows what the model's modules return.

    Raises:
        NotImplementedError: its layers are not found, or return what cannot be replaced.
    """

    def __init__(self, call: ModelCall, packer: Packer) -> None:
        self.call, self._packer = call, replace(packer, cells=Cells())
        self.count = int(call.model.config.num_hidden_layers)
        self.decoder, self._name, layers = find_layers(call.model)
        self._layers: list[nn.Module] = list(layers)
        names = {kind: self._names(kind) for kind in NAMES}
        modules = {
            Sublayer(kind, number): (layer, names[kind][number])
            for kind in NAMES for number, layer in enumerate(self._layers) if names[kind][number]
        }  # fmt: skip
        inner = [parent._modules[name] for parent, name in modules.values()]
        self._returns = _probe(self._one_token, [*self._layers, *inner])
        self._sublayers = {
            sublayer: (parent, name)
            for sublayer, (parent, name) in modules.items() if parent._modules[name] in self._returns
        }  # fmt: skip
        self.sublayers = frozenset(self._sublayers)
        if any(layer not in self._returns for layer in self._layers):
            raise NotImplementedError("its layers do not return hidden states like their input")
        self._lists: dict[tuple[Route, frozenset[int]], tuple[nn.ModuleList, _Instead, dict[int, _Tap]]] = {}
        self._zeros: dict[Sublayer, nn.Module] = {}

    def _names(self, kind: SublayerKind) -> list[str]:
        """The name of each layer's sublayer of a kind; empty where it has none of a known name that can be replaced."""
        return [
            next((name for name in NAMES[kind] if name in layer._modules and _adds_nothing(layer._modules[name])), "")
            for layer in self._layers
        ]

    @inference
    def _one_token(self) -> None:
        packer = self._packer
        prepared = packer.prepare([packer.cells.open(1)], [[0]], empty(1, packer.device))
        try:
            self._run(self.call.model, prepared)
        finally:
            self.call.take_final()

    def _run(self, module: Any, prepared: Prepared) -> Any:
        more = {"logits_to_keep": prepared.keep} if module is self.call.model else {}
        return self.call.run(module, prepared.ids, prepared.positions, prepared.pack, prepared.mask, **more)

    def first(
        self, prepared: Prepared, route: Route, inputs: Sequence[int] = (), logits: bool = True
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run the layers of a route that begins with layer 0.

        Returns:
            Logits ``[R, V]`` after these layers if ``logits``; and ``[N, X]`` the inputs of the layers ``inputs``.
        """
        with self.running(route, frozenset(inputs)) as caught:
            output = self._run(self.call.model if logits else self.decoder, prepared)
        self.call.take_final()
        states = torch.cat([caught[layer] for layer in inputs], -1) if inputs else None
        return output.logits.flatten(0, 1) if logits else None, states

    def rest(self, prepared: Prepared, first: int, states: Mapping[int, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Run the layers from ``first`` on, and what follows them.

        Args:
            prepared: all rows.
            states: ``[N, H]`` hidden states that are known already, among them the input of that layer.

        Returns:
            Logits ``[R, V]`` and the captured hidden states ``[N, layers * H]``.
        """
        call, last = self.call, self.count
        later = frozenset(layer for layer in call.layers if first < layer < last)
        handle = call.catch(self.decoder) if call.hook is None else None
        try:
            with self.running(Route(first), later, states[first]) as caught:
                output = self._run(call.model, prepared)
        finally:
            if handle is not None:
                handle.remove()
        final = call.take_final()
        if final is None:
            raise NotImplementedError("its decoder returns no state after the final norm")
        known = {**states, **caught, last + 1: final}
        if (before := call.take_before()) is not None:
            known[last] = before
        hidden = torch.cat([known[layer] for layer in call.layers], -1) if call.layers else None
        return output.logits.flatten(0, 1), hidden

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
        replacements: list[tuple[nn.Module, str, nn.Module]] = [(self.decoder, self._name, layers)]
        replacements += [(*self._sublayers[sublayer], self._zero(sublayer)) for sublayer in route.skipped]
        before: list[Any] = [parent._modules[name] for parent, name, _ in replacements]
        caught: dict[int, Tensor] = {}
        given.states = None if states is None else states[None]
        try:
            for parent, name, module in replacements:
                parent._modules[name] = module
            yield caught
            for number, tap in tapped.items():
                if tap.states is None:
                    raise NotImplementedError("a layer of it was not called")
                caught[number] = tap.states.flatten(0, 1)
        finally:
            for (parent, name, _), module in zip(replacements, before, strict=True):
                parent._modules[name] = module
            given.states = None
            for tap in tapped.values():
                tap.states = None

    def _list(self, route: Route, taps: frozenset[int]) -> tuple[nn.ModuleList, _Instead, dict[int, _Tap]]:
        """Return the modules that replace the model's list of layers for a route, built once."""
        key = (Route(route.first, route.end, _whole(route.skipped)), taps)
        if key not in self._lists:
            if len(self._lists) >= MAX_LISTS:
                self._lists.clear()
            end = self.count if route.end is None else route.end
            whole = {sublayer.layer for sublayer in key[0].skipped}
            given, tapped, modules = _Given(self._returns[self._layers[0]]), {}, []
            for number, layer in enumerate(self._layers):
                runs = route.first <= number < end and number not in whole
                module = layer if runs else given if number == route.first - 1 else _Same(self._returns[layer])
                if number in taps:
                    module = tapped[number] = _Tap(module)
                if module is not layer:
                    _copy_attributes(layer, module)
                modules.append(module)
            self._lists[key] = nn.ModuleList(modules), given, tapped
        return self._lists[key]

    def _zero(self, sublayer: Sublayer) -> nn.Module:
        if sublayer not in self._zeros:
            parent, name = self._sublayers[sublayer]
            module = parent._modules[name]
            if module is None:
                raise NotImplementedError(f"{name} of layer {sublayer.layer} is no module")
            self._zeros[sublayer] = _Zero(self._returns[module])
            _copy_attributes(module, self._zeros[sublayer])
        return self._zeros[sublayer]


MAX_LISTS = 64
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
    return frozenset(
        sublayer for sublayer in skipped if all(Sublayer(kind, sublayer.layer) in skipped for kind in NAMES)
    )


def _copy_attributes(module: nn.Module, to: nn.Module) -> None:
    """Copy plain attributes, such as ``attention_type``, which the loop over the layers may read."""
    for name, value in vars(module).items():
        if not name.startswith("_") and name not in vars(to):
            setattr(to, name, value)


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


class _Instead(nn.Module):
    """In place of a layer or sublayer: returns hidden states alone (width 0), or as the first of so many."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.states: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self.hidden(*args, **kwargs)
        return (hidden, *[None] * (self.width - 1)) if self.width else hidden

    def hidden(self, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError


class _Same(_Instead):
    """In place of a layer: returns its input."""

    def hidden(self, *args: Any, **kwargs: Any) -> Tensor:
        return _input(args, kwargs)


class _Given(_Instead):
    """In place of the layer before the first that runs: returns what is given, ``[1, N, H]``."""

    def hidden(self, *_: Any, **__: Any) -> Tensor:
        if self.states is None:
            raise NotImplementedError("the layer before the first that runs was called without states to return")
        return self.states


class _Zero(_Instead):
    """In place of a sublayer: returns zeros."""

    def hidden(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros_like(_input(args, kwargs))


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
    """Return how modules return hidden states (``_Instead``) in a forward.

    Modules that return something else, or are not called, are left out.
    """
    widths: dict[nn.Module, int] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        hidden = _input(args, kwargs) if args or "hidden_states" in kwargs else None
        if isinstance(first, Tensor) and isinstance(hidden, Tensor) and first.shape == hidden.shape:
            widths[module] = len(output) if isinstance(output, tuple) else 0

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in modules if module is not None]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return widths
