"""The data type that a device computes fastest."""

import logging

import pytest
import torch

from spec_lab.models import placement
from spec_lab.models.target import Target
from tests import checkpoints

CPU = torch.device("cpu")


@pytest.fixture
def slow(monkeypatch):
    """A CPU without products in bfloat16, whose linear layers take so many seconds for a row and for eight."""

    def take(**seconds):
        monkeypatch.setattr(placement, "multiplies_bfloat16", lambda device: device.type != "cpu")
        timed = {placement.DTYPES[name]: each for name, each in seconds.items()}
        monkeypatch.setattr(placement, "linear_seconds", lambda dtype, rows: timed[dtype][rows])

    return take


@pytest.mark.parametrize(
    ("bfloat16", "fastest"), [({1: 1.0, 8: 9.0}, "float32"), ({1: 1.0, 8: 3.0}, "bfloat16")], ids=["trees", "both"]
)
def test_a_cpu_without_bfloat16_takes_the_dtype_that_is_faster_for_a_row_and_a_tree(slow, caplog, bfloat16, fastest):
    slow(bfloat16=bfloat16, float32={1: 2.0, 8: 3.0})
    with caplog.at_level(logging.WARNING):
        assert placement.automatic_dtype(CPU) == fastest
    assert f"target.dtype=auto: the target is computed in {fastest}" in caplog.text
    assert placement.automatic_dtype(torch.device("cuda")) == "bfloat16"


def test_a_target_has_that_dtype_unless_it_is_given(slow, tmp_path):
    slow(bfloat16={1: 1.0, 8: 9.0}, float32={1: 1.0, 8: 1.0})
    folder = str(checkpoints.checkpoint(tmp_path))
    assert Target.load(folder).lm.dtype == torch.float32
    assert Target.load(folder, dtype="bfloat16").lm.dtype == torch.bfloat16


def test_layers_are_timed():
    assert placement.linear_seconds(torch.bfloat16, 2, size=8, repeats=1) > 0
