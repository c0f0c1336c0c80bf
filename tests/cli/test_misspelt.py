"""Overrides that do not compose: the answer names what was meant."""

import pytest

from spec_lab.cli.main import check_composition, check_overrides


def check(arguments):
    check_overrides(arguments)
    check_composition(arguments)


@pytest.mark.parametrize(
    ("overrides", "meant"),
    [
        ("proposer=ngram proposer.dept=3", "proposer.depth=3?"),
        ("proposer=ngram proposer.tree=2x1", "proposer has depth, max_ngram, min_ngram"),
        ("proposer=eagel", "proposer=eagle "),
        ("proposer=ngram,eagel --multirun", "proposer=eagle "),
        ("+experiment=medusa_tre", "+experiment=medusa_tree "),
        ("experiment=medusa_tree", ": +experiment=medusa_tree"),
        ("experiment=medusa_tre", "+experiment=medusa_tree "),
        ("proposer@arms.x=ngram", ": +proposer@arms.x=ngram"),
        ("arms.x.depth=3", "+proposer@arms.x=NAME"),
        ("temperature=1", "sampling.temperature=1?"),
        ("max_tokens=5", "max_new_tokens=5?"),
        ("model=some/model", "target.path=some/model?"),
        ("target=hf", "target=zoo target.path=MODEL"),
        ("verifer=token", "verifier=token?"),
        ("num_speculative_tokens=4", "proposer.depth=4?"),
        ("proposer=ngram proposer.num-speculative-tokens=4", "proposer.depth=4?"),
        ("~proposer.dept", "proposer.max_depth?"),
        ("zzzzzz=1", "spec-lab explain lists all"),
    ],
)
def test_what_was_meant_is_said_in_one_line(overrides, meant):
    with pytest.raises(ValueError) as refused:
        check(overrides.split())
    assert meant in str(refused.value) and "\n" not in str(refused.value)


def test_overrides_that_compose_pass():
    for arguments in (["proposer=ngram", "proposer.depth=3"], ["+experiment=eagle3", "--multirun", "seed=1,2"]):
        check(arguments)
