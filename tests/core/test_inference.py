"""Functions run in inference mode, whatever the mode of their caller, and leave it as it was."""

import pytest
import torch

from spec_lab.core.inference import inference


@inference
def doubled(x: torch.Tensor, fails: bool = False) -> torch.Tensor:
    assert torch.is_inference_mode_enabled()
    if fails:
        raise ValueError
    return 2 * x


@pytest.mark.parametrize("inside", [False, True])
def test_a_function_runs_in_inference_mode_and_leaves_the_mode_as_it_was(inside):
    with torch.inference_mode(inside):
        assert doubled(torch.ones(1)).is_inference()
        assert torch.is_inference_mode_enabled() == inside
        with pytest.raises(ValueError):
            doubled(torch.ones(1), fails=True)
        assert torch.is_inference_mode_enabled() == inside


def test_a_function_keeps_its_name_and_documentation():
    assert doubled.__name__ == "doubled"
