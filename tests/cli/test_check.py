"""``spec-lab check``: the parts that a config names, built for toy models."""

import pytest
from omegaconf import OmegaConf

from spec_lab.cli import check
from spec_lab.cli.config_checks import check_policy
from spec_lab.cli.refusals import Refused
from spec_lab.tasks.certify.exact import MIN_TOKENS


def test_no_depth_is_chosen_by_timing_in_parts_of_parts_either():
    parts = {"first": {"depth": "auto"}, "second": {"depth": 7, "inner": {"depth": "auto"}}, "none": None}
    config = OmegaConf.create({"depth": "auto", "path": "???", "parts": parts})
    check.set_auto_depths(config)
    parts = {"first": {"depth": MIN_TOKENS}, "second": {"depth": 7, "inner": {"depth": MIN_TOKENS}}, "none": None}
    assert config == {"depth": MIN_TOKENS, "path": "???", "parts": parts}


def test_a_policy_is_checked_with_a_proposer_only(monkeypatch):
    monkeypatch.setattr("spec_lab.cli.config_checks.chosen", lambda part, otherwise: otherwise)
    config = OmegaConf.create({"proposer": {"_target_": check.NONE}, "policy": {"_target_": "mine.Slow"}})
    with pytest.raises(Refused, match=r"policy=mine\.Slow .*: add proposer=draft_chain"):
        check_policy(config)
    check_policy(OmegaConf.create({**config, "proposer": {"_target_": "mine.Drafts"}}))
    check_policy(OmegaConf.create({**config, "policy": {"_target_": "spec_lab.policy.none"}}))


@pytest.mark.parametrize("verbose", [False, True])
def test_a_constraint_that_refuses_the_toy_vocabulary_is_built_for_the_target(monkeypatch, capsys, verbose):
    def apply(config, settings, target, known=None):
        if known is not None:
            raise Refused("spec_lab: constraint: no digits")
        return f"over {target}", None

    monkeypatch.setattr(check, "apply_constraint", apply)
    monkeypatch.setattr(check, "chosen", lambda part, otherwise: otherwise)
    parts = {"target": {"path": "elsewhere/zoo/target"}, "constraint": {"_target_": "mine.Digits"}}
    config = OmegaConf.create({**parts, "verbose": verbose})
    assert check._applied(config, lambda: "the target") == "over the target"
    why = " (for a toy: constraint: no digits)" * verbose
    loading = f"Loading zoo/target to build mine.Digits, whose toy() is then checked{why}\n"
    assert capsys.readouterr().err == loading
