"""Every key of the configs is explained."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from spec_lab.cli.explain.reference import EXPERIMENT, canonical
from spec_lab.cli.explain.terminal import reference
from spec_lab.cli.main import conf, groups, top_level_options


@pytest.fixture(scope="module")
def known():
    return reference()


def options(known):
    return [known.top, *(option for group in known.groups for option in group.options)]


def test_every_key_and_every_option_has_a_meaning(known):
    lacking = [f"{option.file}: {key.name}" for option in options(known) for key in option.keys if not key.meaning]
    assert lacking == [], "write a comment behind the key, or describe the argument in the docstring"
    assert [option.file for option in options(known) if not option.summary] == [], "write a comment above the first key"
    assert [group.name for group in known.groups if not group.summary] == []


def test_no_meaning_ends_in_the_middle_of_a_sentence(known):
    for option in options(known):
        for key in option.keys:
            assert not key.meaning.endswith((",", " and", " or", ";")), f"{option.file}: {key.name}"


def test_the_keys_are_those_of_the_files(known):
    assert {key.name for key in known.top.keys} == top_level_options() - groups()
    for option in options(known)[1:]:
        file = Path(conf()).parent / option.file
        if option.group == EXPERIMENT:
            continue
        keys = {str(key) for key in OmegaConf.load(file) if str(key) not in ("defaults", "_target_", "_convert_")}
        keys -= {"_recursive_"}
        assert keys <= {key.name for key in option.keys}, file


def test_every_file_is_an_option(known):
    files = {path.relative_to(Path(conf()).parent).as_posix() for path in Path(conf()).rglob("*.yaml")}
    assert {option.file for option in options(known)} == files - {"conf/applied_constraint.yaml"}


def test_every_constraint_has_the_options_of_how_it_applies(known):
    for option in known.group("constraint").options:
        keys = {key.name: (key.default, bool(key.meaning)) for key in option.keys}
        assert (keys["placement"], keys["fast_forward"]) == (("both", True), ("null", True)), option.file


def test_an_option_that_is_based_on_another_has_its_keys_and_meanings(known):
    based, base = known.option("policy", "thompson"), known.option("policy", "ucb")
    assert [key.name for key in based.keys] == [key.name for key in base.keys]
    rule = {key.name: key for key in based.keys}["rule"]
    assert (rule.default, rule.type, rule.meaning) == ("thompson", "ucb or thompson", "ucb or thompson")


def test_types_are_those_of_the_signatures(known):
    types = {path: key.type for path, option, key in known.each_key() if option.name in ("zoo", "draft_chain", "regex")}
    assert types["target.attention"] == "per_sequence or dense_mask"
    assert types["proposer.depth"] == "int from 1 to 256 or null", "of the options of trees"
    assert types["constraint.draft_budget"] == "int of 0 or more, str, or null", "of how a constraint is applied"
    assert next(key.type for key in known.top.keys if key.name == "stop_strings").startswith("list of str")


def test_an_experiment_lists_what_it_sets(known):
    eagle = {key.name: key for key in known.option(EXPERIMENT, "eagle3").keys}
    assert eagle["+proposer@arms.medusa"].default == "medusa" and eagle["proposer"].default == "eagle"
    meanings = {key.name: key.meaning for key in known.option("proposer", "medusa").keys}
    assert eagle["arms.medusa.max_nodes"].meaning == meanings["max_nodes"], "the meaning is the arm's own"
    swept = {key.name: key for key in known.option(EXPERIMENT, "batch_size").keys}["batch_size"]
    assert (swept.type, swept.default) == ("sweep", "1,2,4,8,16")
    recipe = {key.name: key for key in known.option(EXPERIMENT, "train_medusa").keys}
    assert recipe["task.recipe.trunk"].type == "int of 0 or more" and recipe["task.recipe.trunk"].meaning


@pytest.mark.parametrize(("path", "name"), [
    ("arms.mine.depth", "proposer.depth"), ("verifiers.v.lenience", "verifier.lenience"), ("seed", "seed"),
    ("proposer.parts.suffix.depth", "proposer.depth"), ("proposer.inner.depth", "proposer.depth"),
    ("arms.mine.parts.suffix.depth", "proposer.depth"), ("arms.mine.inner.inner.path", "proposer.path"),
    ("arms", "arms"), ("proposer.parts.suffix", "proposer.parts.suffix"), ("task.repeats", "task.repeats"),
])  # fmt: skip
def test_parts_of_other_groups_have_the_names_of_their_group(path, name):
    assert canonical(path) == name


@pytest.mark.nightly
def test_folders_of_ones_own_are_added(tmp_path):
    (tmp_path / "proposer").mkdir()
    (tmp_path / "proposer" / "mine.yaml").write_text("# Mine.\n_target_: nowhere.load\ndepth: 3   # levels\n")
    expected = reference([str(tmp_path)])
    mine = expected.option("proposer", "mine")
    assert (mine.summary, [(key.name, key.type, key.meaning) for key in mine.keys]) == (
        "Mine.", [("depth", "int", "levels")]
    )  # fmt: skip
    assert expected.option("proposer", "medusa")
    with pytest.raises(FileNotFoundError, match="is not a folder of configs"):
        reference([str(tmp_path / "absent")])
