"""Capture and replay as a CUDA graph does it, on the CPU: the same operations on the same tensors, without Python."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
