"""Adapters of Kangaroo: what is read and written, and what is refused."""

import pytest
import torch
from safetensors.torch import load_file

from spec_lab.drafters.kangaroo.files import read_kangaroo, write_kangaroo
from spec_lab.models.checkpoint import weights_hash
from tests.drafters.eagle_heads import written
from tests.drafters.kangaroo_adapters import adapter
from tests.tiny import VOCABULARY, tiny_target

H = 32


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_hidden_layers=3)


def test_what_is_written_is_read_again(target, tmp_path):
    config, tensors = adapter(H, 2, layers=2)
    first = read_kangaroo(written(tmp_path / "one", config, tensors), target)
    assert (first.settings.exit_layer, first.layers) == (2, 2)
    sha256 = write_kangaroo(first, tmp_path / "two", VOCABULARY, {"method": "kangaroo"}, torch.float64)
    second = read_kangaroo(str(tmp_path / "two"), target)
    assert weights_hash(str(tmp_path / "two")) == sha256 and second.settings == first.settings
    again = load_file(tmp_path / "two" / "model.safetensors")
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


def test_a_published_config_has_no_exit_layer_and_a_run_states_it(target, tmp_path):
    folder = written(tmp_path, *adapter(H, None))
    with pytest.raises(ValueError, match=r"exit_layer"):
        read_kangaroo(folder, target)
    network = read_kangaroo(folder, target, 2)
    assert network.settings.exit_layer == network.reading.values["exit_layer"] == 2
    assert network.reading.others == [("exit_layer", "one layer earlier", 1)]
    with pytest.raises(ValueError, match=r"exit_layer is 3, but .* 3 layers, 1 to 2"):
        read_kangaroo(folder, target, 3)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"exit_layer": 3}, {}, "exit_layer is 3.*3 layers.*another target"),
        ({"exit_layer": 0}, {}, "exit_layer must be a whole number from 1"),
        ({"exit_layer": True}, {}, "exit_layer must be a whole number"),
        ({"hidden_size": 16}, {}, "hidden size 16.*has 32"),
        ({"vocab_size": 60}, {}, "vocabulary of 60"),
        ({"model_type": "gemma"}, {}, "model_type must be llama"),
        ({"layer_types": ["sliding_attention"]}, {}, "layer_types"),
        ({"num_hidden_layers": 2}, {}, r"layers\.1\..* is missing"),
        ({"num_hidden_layers": 99}, {}, "num_hidden_layers is 99, but .* 6 tensors"),
        ({"num_attention_heads": 8}, {}, r"self_attn\..* is \["),
        ({"head_dim": 10**9}, {}, "head_dim|cannot build|rotary"),
        ({}, {"norm.weight": None}, "norm.weight is missing"),
        ({}, {"layers.0.mlp.up_proj.weight": torch.ones(2, 2)}, "mlp.*is in no layer"),
        ({}, {"norm.weight": torch.ones(H + 1)}, r"norm.weight is \[33\]"),
        ({}, {"norm.weight": torch.full((H,), torch.nan)}, "NaN or infinite"),
        ({}, {"norm.weight": torch.ones(H, dtype=torch.int8)}, "quantized"),
        ({}, {"layers.0.self_attn.q_proj.weight": None}, "holds no adapter of Kangaroo"),
        ({}, {"fc.weight": torch.ones(2, 2)}, "holds no adapter of Kangaroo"),
    ],
)
def test_other_files_are_refused_by_name(target, tmp_path, config, tensors, message):
    adapter_config, held = adapter(H, 1)
    changed = {name: tensor for name, tensor in (held | tensors).items() if tensor is not None}
    folder = written(tmp_path, adapter_config | config, changed)
    with pytest.raises(ValueError, match=message):
        read_kangaroo(folder, target)


def test_the_exit_layer_of_a_run_must_be_that_of_the_config(target, tmp_path):
    folder = written(tmp_path, *adapter(H, 1))
    with pytest.raises(ValueError, match=r"exit_layer must be 1"):
        read_kangaroo(folder, target, 2)
    network = read_kangaroo(folder, target, 1)
    assert network.settings.exit_layer == 1 and not network.reading.others
