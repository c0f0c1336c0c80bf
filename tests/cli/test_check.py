"""``spec-lab check``: the parts that a config names, built for toy models."""

from omegaconf import OmegaConf

from spec_lab.cli.check import set_auto_depths
from spec_lab.tasks.certify.exact import MIN_TOKENS


def test_no_depth_is_chosen_by_timing_in_parts_of_parts_either():
    parts = {"first": {"depth": "auto"}, "second": {"depth": 7, "inner": {"depth": "auto"}}, "none": None}
    config = OmegaConf.create({"depth": "auto", "path": "???", "parts": parts})
    set_auto_depths(config)
    parts = {"first": {"depth": MIN_TOKENS}, "second": {"depth": 7, "inner": {"depth": MIN_TOKENS}}, "none": None}
    assert config == {"depth": MIN_TOKENS, "path": "???", "parts": parts}
