"""Readback: several tensors reach the host by one copy."""

import numpy as np
import torch

from spec_lab.core.readback import Readback


def test_what_is_packed_comes_back_with_its_type_and_shape():
    """A device is played by the bytes themselves: fetch runs on the CPU too."""
    given = [
        torch.tensor([True, False, True]), torch.tensor([[1.5], [2.5]], dtype=torch.float64), torch.arange(5),
        torch.tensor([0.25, 0.5]), torch.empty(0, dtype=torch.int64), torch.tensor([3], dtype=torch.int8),
    ]  # fmt: skip
    for tensor, array in zip(given, Readback().fetch(given), strict=True):
        assert array.dtype == tensor.numpy().dtype and np.array_equal(array, tensor.numpy())


def test_arrays_of_the_host_are_not_copied():
    read, array = Readback(), np.arange(3)
    assert read(array, torch.arange(2))[0] is array
    assert read.copies == 1
