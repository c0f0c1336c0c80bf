"""Capture and replay as a CUDA graph does it, on the CPU: the same operations on the same tensors, without Python."""

from itertools import count

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spec_lab.models.target import Target
from spec_lab.runners.causal_lm import CausalLM
from tests.tiny import CONTEXT, tiny_model

LONG = 10**6
"""Seconds of a capture (``slow_target``)."""


def slow_target(*drafts):
    """A target whose captures, and those of draft models, take ``LONG`` seconds each. Its clock counts its marks."""
    target = Target(CausalLM(tiny_model(), fixed=True), None, "tiny", CONTEXT, "", 0.0)
    marks, captures = count(), []
    target.lm.clock.mark = lambda: float(next(marks)) + LONG * len(captures)

    def capture(forward):
        captures.append(forward)
        return forward

    for lm in (target.lm, *drafts):
        lm.graphs.capture = capture
    return target


class Recorder(TorchDispatchMode):
    """Records every operation with its arguments and results."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


def replayed(forward):
    """Run ``forward`` once; every later call repeats its operations and overwrites its results, as a graph would."""
    forward()  # allocates what is allocated once
    with Recorder() as recorder:
        output = forward()

    def replay():
        for func, args, kwargs, results in recorder.calls:
            inputs = {
                leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)
            }
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if torch.is_tensor(old) and old.untyped_storage().data_ptr() not in inputs:  # no view, not in place
                    old.copy_(new)
        return output

    return replay
