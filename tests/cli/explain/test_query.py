"""Names on the command line are found."""

import pytest

from spec_lab.cli.explain.query import KeyMatch, find, names
from spec_lab.cli.explain.terminal import reference


@pytest.fixture(scope="module")
def known():
    return reference()


def test_nothing_is_everything(known):
    assert find(known, "") == (known,)


@pytest.mark.parametrize("query", ["verifier", "+verifier", "verifier@verifiers.one", "/verifier"])
def test_a_group_is_found(known, query):
    assert find(known, query) == (known.group("verifier"),)


@pytest.mark.parametrize(
    ("query", "group", "name"),
    [
        ("proposer=medusa", "proposer", "medusa"), ("proposer.medusa", "proposer", "medusa"),
        ("+proposer@arms.x=medusa", "proposer", "medusa"), ("+experiment=certify", "experiment", "certify"),
        ("hydra/launcher=slurm", "hydra/launcher", "slurm"), ("hydra.launcher.slurm", "hydra/launcher", "slurm"),
    ],
)  # fmt: skip
def test_an_option_is_found(known, query, group, name):
    assert find(known, query) == (known.option(group, name),)


def test_a_key_is_found_in_every_option_that_has_it(known):
    matches = find(known, "proposer.depth")
    having = {
        option.name for option in known.group("proposer").options if any(key.name == "depth" for key in option.keys)
    }
    assert all(isinstance(match, KeyMatch) and match.path == "proposer.depth" for match in matches)
    listed = [option.name for match in matches for option in match.options]
    assert sorted(listed) == sorted(having) and len(having) > 10


@pytest.mark.parametrize(
    ("query", "paths"),
    [
        ("temperature", {"proposer.temperature", "policy.temperature", "sampling.temperature"}),
        ("max_new_tokens", {"max_new_tokens"}), ("seed=3", {"seed"}), ("arms.mine.max_ngram", {"proposer.max_ngram"}),
        ("recipe.loss", {"task.recipe.loss"}), ("hydra.launcher.minutes", {"hydra.launcher.minutes"}),
        ("proposer.inner", {"proposer.inner"}), ("arms", {"arms"}),
        ("depth", {"proposer.depth", "policy.depth", "task.recipe.depth"}),
    ],
)  # fmt: skip
def test_a_key_is_found_by_its_name_or_its_end(known, query, paths):
    assert {match.path for match in find(known, query)} == paths


@pytest.mark.parametrize(
    ("query", "near"),
    [
        ("proposer.dept", "proposer.depth"), ("verifier=toke", "verifier=token"), ("proposr", "proposer"),
        ("max_new_token", "max_new_tokens"), ("tempreature", "temperature"),
        ("+experiment=certfy", "experiment=certify"), ("out", "output_dir"), ("=", "no option =;"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_refused_with_the_nearest(known, query, near):
    with pytest.raises(ValueError) as error:
        find(known, query)
    assert near in str(error.value)


def test_every_name_is_found(known):
    for name in names(known):
        assert find(known, name)
