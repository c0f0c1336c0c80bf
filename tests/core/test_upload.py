"""Arrays on a device: every data type and shape by one copy."""

import numpy as np
import pytest
import torch

from spec_lab.core.upload import upload

ARRAYS = [
    np.arange(6).reshape(2, 3),
    np.array([True, False, True]),
    np.array([[0.5, -np.inf]], dtype=np.float32),
    np.empty((0, 2), dtype=np.int64),
    np.arange(8)[::2],
]


def test_on_the_cpu_nothing_is_copied():
    for array, tensor in zip(ARRAYS, upload(torch.device("cpu"), *ARRAYS), strict=True):
        assert np.array_equal(tensor.numpy(), array) and np.shares_memory(tensor.numpy(), array) == bool(array.size)


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_other_devices_have_the_same_shapes_types_and_values(device):
    for array, tensor in zip(ARRAYS, upload(torch.device(device), *ARRAYS), strict=True):
        assert tensor.device.type == device and tensor.shape == array.shape
        assert tensor.dtype == torch.from_numpy(array[:0]).dtype
        assert device == "meta" or np.array_equal(tensor.cpu().numpy(), array)
