"""Tensor parallelism over the ranks of torchrun: rank 0 runs the command, the others compute their part of the model.

Only rank 0 reads options, draws random numbers, measures, writes and prints. The others ``follow``: they load their own
shards of the models that rank 0 loads and repeat each of its calls, with KV cells for their own attention heads. So
ranks cannot decide differently, and the other ranks' logits are not read.

Calls are broadcast with gloo, on the CPU, as safetensors; transformers does the communication inside the layers.
"""

from __future__ import annotations

import atexit
import gc
import json
import signal
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor, nn

from spec_lab.core.cache_argument import cache_argument
from spec_lab.models.ranks import rank
from spec_lab.runners.adaptors import adapt
from spec_lab.runners.attention import AttentionKind, Pack, Segment, spans
from spec_lab.runners.kv_cache import Cells

IDLE = timedelta(days=7)
"""How long the other ranks wait for rank 0's next call."""

GRACE = timedelta(seconds=10)
"""How long a failed rank waits for the others to fail with the same error."""


@cache
def join() -> Link:
    """Connect to the other ranks, once per process. When rank 0 ends between calls, it tells the others to end."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=IDLE)
    link = Link()
    if rank() == 0:
        atexit.register(link.leave)
    return link


def follow(shards: Callable[..., Any]) -> None:
    """Serve rank 0 until it ends. Only rank 0 handles Ctrl-C, and this process ends with it.

    Args:
        shards: loads this rank's shards of a model, given what the first rank gave to ``Link.load``.

    Raises:
        SystemExit: with code 1: rank 0 died, or this rank failed with an error that rank 0 did not have.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = join()
    while link.repeat(shards):
        pass
    dist.destroy_process_group()


class Link:
    """One rank's end of the connection between rank 0 and the others."""

    def __init__(self) -> None:
        self.words = dist.new_group(backend="gloo", timeout=IDLE)
        self.failed = dist.new_group(backend="gloo", timeout=GRACE)
        self.in_step = True  # no rank is inside a call; False for good once the first rank left one half-way
        self._inside = False  # this rank is inside a call
        self._counter = count()
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._gone: list[int] = []  # numbers of models and cells that the first rank has dropped
        self._things: dict[int, Any] = {}  # on the others: models and cells by the first rank's numbers

    # Rank 0 -----------------------------------------------------------------------------------------------------------

    def load(self, shards: Callable[..., Any], **how: Any) -> Any:
        """Load every rank's shards of a model, and return those of rank 0. Call it on rank 0 only.

        Args:
            shards: called with ``how`` here; ``follow`` was given the others'.
            how: as JSON can hold it.
        """
        with self._step():
            self._tell({"do": "load", "number": (number := next(self._counter)), "how": how, **self._news()}, {})
            model = shards(**how)
        self._name(model, number)
        for part, module in _parts(model).items():
            module.forward = self._led(model, number, part, module.forward)
        return model

    def leave(self) -> None:
        """Tell the others to end, unless they are inside a call; then they end with their connection."""
        if self.in_step and dist.is_initialized():
            self._tell({"do": "end"}, {})
            dist.destroy_process_group()

    def _led(self, model: nn.Module, number: int, part: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """``original``, the forward of a part of the model, run on every rank."""
        watched = weakref.proxy(model)

        def forward(*given: Any, **named: Any) -> Any:
            if self._inside:  # a part of a call in which the others are already
                return original(*given, **named)
            both = {str(index): value for index, value in enumerate(given)} | named
            tensors = {name: value for name, value in both.items() if isinstance(value, Tensor)}
            plain = {name: value for name, value in both.items() if not isinstance(value, Tensor | Pack)}
            what = {"do": "call", "number": number, "part": part, "plain": plain}
            what["attention"] = watched.config._attn_implementation
            if (pack := next((value for value in both.values() if isinstance(value, Pack)), None)) is not None:
                what["pack"], more = self._packed(pack)
                tensors |= more
            with self._step(), torch.inference_mode():
                self._tell(what | self._news(), tensors)
                return original(*given, **named)

        return forward

    def _packed(self, pack: Pack) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what other ranks need to build the pack over their cells."""
        kinds, tensors = [], {}
        for kind, segments in pack.segments.items():
            layers = [layer for layer, its in pack.kinds.items() if its == kind]
            kinds.append({"kind": kind, "layers": layers, "segments": (plain := [])})
            for number, segment in enumerate(segments):
                slots = [segment.slots.start, segment.slots.stop] if isinstance(segment.slots, slice) else None
                plain.append([*segment[:3], slots, segment.first, segment.end, segment.causal])
                if isinstance(segment.slots, Tensor):
                    tensors[f"slots {number}"] = segment.slots
                if segment.mask is not None:
                    tensors[f"mask {len(kinds)} {number}"] = segment.mask
        cells = pack.cells
        if cells not in self._numbers:
            self._name(cells, next(self._counter))
        facts = {"cells": self._numbers[cells], "capacities": cells.capacities, "kinds": kinds}
        return {**facts, "counting": [*pack.counting]}, tensors

    def _name(self, thing: Any, number: int) -> None:
        self._numbers[thing] = number
        weakref.finalize(thing, self._gone.append, number).atexit = False

    def _news(self) -> dict[str, list[int]]:
        gone = self._gone.copy()
        del self._gone[: len(gone)]
        return {"gone": gone}

    # The others ------------------------------------------------------------------------------------------------------

    def repeat(self, shards: Callable[..., Any]) -> bool:
        """Repeat rank 0's next call; return False once it has ended. Errors as in ``follow``."""
        try:
            what, tensors = self._hear()
        except RuntimeError:  # rank 0 died, and has printed its error
            sys.exit(1)
        if what["do"] == "end":
            return False
        for number in what["gone"]:
            self._things.pop(number, None)
        try:
            with self._step():
                if what["do"] == "load":
                    gc.collect()  # split models are part of reference cycles
                    self._things[what["number"]] = model = shards(**what["how"])
                    adapt(model)
                    spans()  # registered here too: rank 0 names it as the model's attention
                else:
                    self._call(what, tensors)
        except Exception:  # rank 0 fails with the same error and handles it
            pass
        return True

    @torch.inference_mode()
    def _call(self, what: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
        model = self._things[what["number"]]
        if model.config._attn_implementation != what["attention"]:
            model.set_attn_implementation(what["attention"])
        tensors = {name: tensor.to(model.device) for name, tensor in tensors.items()}
        named = what["plain"]
        if "pack" in what:
            named[cache_argument(_parts(model)[what["part"]])] = self._unpacked(what["pack"], tensors, model.device)
        named |= {name: tensor for name, tensor in tensors.items() if " " not in name}
        given = [named.pop(name) for name in sorted(name for name in named if name.isdecimal())]
        _parts(model)[what["part"]](*given, **named)

    def _unpacked(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> Pack:
        cells = self._things.setdefault(facts["cells"], Cells())
        cells.reserve(facts["capacities"])
        kinds: dict[int, AttentionKind] = {}
        packed: dict[AttentionKind, list[Segment]] = {}
        for number, described in enumerate(facts["kinds"], start=1):
            kind = AttentionKind(*described["kind"])
            kinds |= dict.fromkeys(described["layers"], kind)
            packed[kind] = [
                Segment(
                    span, start, stop, slice(*slots) if slots else tensors[f"slots {index}"], first, end,
                    tensors.get(f"mask {number} {index}"), causal,
                )
                for index, (span, start, stop, slots, first, end, causal) in enumerate(described["segments"])
            ]  # fmt: skip
        counting = dict.fromkeys(facts["counting"], device)
        return Pack(cells, kinds, packed, device, tensors["position_ids"], counting)

    # Both ------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Run a call on every rank. If it fails on all, they continue; if on some, those end and torchrun the rest."""
        if not self.in_step:
            raise RuntimeError("the ranks have diverged since a call was interrupted: start the command again")
        self.in_step, self._inside = False, True
        try:
            yield
        except Exception as error:
            try:
                dist.barrier(self.failed)
            except RuntimeError:
                message = " ".join(str(error).split()) or type(error).__name__
                if rank() and isinstance(error, RuntimeError) and "by peer" in message:
                    sys.exit(1)  # gloo lost another rank, which has printed why it ended
                raise SystemExit(f"spec_lab: rank {rank()}, and not every rank, failed: {message}") from error
            self.in_step = True
            raise
        else:
            self.in_step = True
        finally:
            self._inside = False

    def _tell(self, what: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        words = torch.frombuffer(bytearray(json.dumps(what).encode()), dtype=torch.uint8)
        layout = torch.contiguous_format  # masks of two kinds of layers may share memory, which safetensors refuses
        every = {name: tensor.cpu().clone(memory_format=layout) for name, tensor in tensors.items()}
        told = torch.frombuffer(bytearray(save({**every, "": words})), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(told)]), 0, group=self.words)
        dist.broadcast(told, 0, group=self.words)

    def _hear(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        length = torch.empty(1, dtype=torch.long)
        dist.broadcast(length, 0, group=self.words)
        told = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(told, 0, group=self.words)
        tensors = load(told.numpy().tobytes())
        return json.loads(tensors.pop("").numpy().tobytes()), tensors


def _parts(model: Any) -> dict[str, Any]:
    """Return the modules that are called: the model and, by Medusa heads, its LM head and its embedding."""
    return {"": model, "out": model.get_output_embeddings(), "in": model.get_input_embeddings()}
