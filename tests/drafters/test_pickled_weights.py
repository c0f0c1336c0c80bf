"""Every reader of drafters refuses pickled weights by their name, and names a missing folder."""

from functools import partial

import pytest

from spec_lab.drafters.block.propose import BlockDrafter
from spec_lab.drafters.eagle import propose as eagle
from spec_lab.drafters.hydra.propose import Hydra
from spec_lab.drafters.kangaroo import propose as kangaroo
from spec_lab.drafters.medusa.propose import Medusa
from tests.drafters.block_drafters import dflash
from tests.drafters.eagle_heads import eagle1, written
from tests.drafters.hydra_heads import hydra
from tests.drafters.kangaroo_adapters import adapter
from tests.drafters.medusa_heads import authors
from tests.tiny import VOCABULARY, tiny_target

FAMILIES = {
    "eagle": (partial(eagle.load, depth=2), eagle1(32, VOCABULARY), "pytorch_model.bin"),
    "hydra": (partial(Hydra.load, depth=2), hydra(32, VOCABULARY), "hydra_lm_head.pt"),
    "block": (partial(BlockDrafter.load, depth=2), dflash(32), "pytorch_model.bin"),
    "medusa": (partial(Medusa.load, tree="2"), authors(32, VOCABULARY), "medusa_lm_head.pt"),
    "kangaroo": (partial(kangaroo.load, depth=2), adapter(32), "pytorch_model.bin"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_pickled_weights_are_never_read_and_a_missing_folder_is_named(tmp_path, family):
    load, (config, tensors), name = FAMILIES[family]
    target = tiny_target(num_hidden_layers=4)
    with pytest.raises(ValueError, match=name):
        load(target, written(tmp_path / "head", config, tensors, name=name))
    with pytest.raises(OSError, match=r"there is no folder .*none"):
        load(target, str(tmp_path / "none"))
