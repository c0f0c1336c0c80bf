"""Modes as options of the command line and as presets, and what a subtree of a recording is drafted by."""

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from spec_lab.cli.bundled import conf
from spec_lab.cli.commands import recommendation
from spec_lab.core.options import WrongOption
from spec_lab.replay.subtrees import Subtree
from spec_lab.tasks.recommend.engines import flags
from spec_lab.tasks.recommend.modes import WITHOUT_FILES, ModeFamily, SpeculativeMode, families_of

UNION = {"parts": {"suffix": {"proposer": "ngram", "depth": 3}, "heads": {"proposer": "recycling", "tree": "4x2"}}}

MODES = {
    "ngram depth=3": SpeculativeMode("ngram", {"depth": 3}),
    'recycling tree="1"': SpeculativeMode("recycling", {"tree": "1"}),
    "recycling tree=0 1 0.0": SpeculativeMode("recycling", {"tree": "0 1 0.0"}),
    "union suffix=ngram suffix.depth=3 heads=recycling heads.tree=4x2": SpeculativeMode("union", UNION),
    "suffix policy.depth=2": SpeculativeMode("suffix", {}, "fixed", {"depth": 2}),
    "ngram policy=goodput scope=request": SpeculativeMode("ngram", {}, "goodput", {"scope": "request"}),
    "none": SpeculativeMode("none"),
}


@pytest.mark.parametrize("name", MODES)
def test_the_options_and_the_preset_of_a_mode_name_the_same_proposer_and_policy(tmp_path, name):
    mode = MODES[name]
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "recommended.yaml").write_text(mode.preset("A comment."))
    with initialize_config_dir(conf(), version_base="1.3"):
        by_options = compose("config", mode.overrides)
        where = f"hydra.searchpath=['file://{tmp_path}']"
        by_preset = compose("config", [where, "+experiment=recommended"])
    assert mode.name == name
    for part in ("proposer", "policy"):
        assert OmegaConf.to_container(by_preset[part], resolve=False) == OmegaConf.to_container(
            by_options[part], resolve=False
        )
    assert by_preset.name == "recommended"


TREES = ModeFamily(SpeculativeMode("recycling", {"tree": "3x2"}), tree="tree")


@pytest.mark.parametrize(
    ("family", "subtree", "drafted"),
    [
        (ModeFamily(SpeculativeMode("ngram", {"depth": 9}), ["depth"]), Subtree(depth=2), "ngram depth=2"),
        (ModeFamily(SpeculativeMode("suffix")), Subtree(depth=2), "suffix policy.depth=2"),
        (ModeFamily(SpeculativeMode("suffix")), Subtree(children=2), None),
        (TREES, Subtree(children=2), "recycling tree=2x2"),
        (TREES, Subtree(nodes=2), 'recycling tree="2"'),
        (ModeFamily(SpeculativeMode("medusa")), Subtree(), "medusa"),
    ],
)  # fmt: skip
def test_a_subtree_is_drafted_by_the_options_that_limit_its_family(family, subtree, drafted):
    mode = family.limited(subtree)
    assert (mode and mode.name) == drafted


def test_drafters_are_named_with_their_paths_or_with_all_their_options():
    named = families_of(["draft_chain:DIR", {"proposer": "eagle", "path": "HEAD", "depth": 5}, "mtp"])
    assert [family.mode.name for family in named] == [
        "draft_chain path=DIR depth=8 confidence=0", "draft_chain path=DIR depth=8 confidence=0.4",
        "draft_chain path=DIR depth=8 confidence=0.7", "eagle path=HEAD depth=5", "mtp",
    ]  # fmt: skip
    for wrong in ("a/b", {"path": "HEAD"}):
        with pytest.raises(WrongOption, match=r"drafters\[0\] must be NAME"):
            families_of([wrong])


def test_every_family_without_files_names_a_proposer_of_conf_and_options_that_it_has():
    with initialize_config_dir(conf(), version_base="1.3"):
        for family in WITHOUT_FILES:
            assert compose("config", family.mode.overrides).proposer._target_


@pytest.mark.parametrize(
    ("mode", "engines"),
    [
        (
            MODES["ngram depth=3"],
            {
                "vLLM": '--speculative-config \'{"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1, '
                '"num_speculative_tokens": 3}\'',
                "llama.cpp": "--spec-type ngram-simple --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 3",
            },
        ),
        (
            SpeculativeMode("ngram_tree", {"nodes": 8}),
            {"SGLang": "--speculative-algorithm NGRAM --speculative-num-draft-tokens 9"},
        ),
        (
            SpeculativeMode("draft_chain", {"path": "D", "confidence": 0.4}, "fixed", {"depth": 2}),
            {
                "vLLM": '--speculative-config \'{"method": "draft_model", "model": "D", "num_speculative_tokens": 2}\'',
                "SGLang": "--speculative-algorithm STANDALONE --speculative-draft-model-path D "
                "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3",
                "llama.cpp": "--model-draft D --draft-max 2 --draft-p-min 0.4",
            },
        ),
        (MODES["ngram policy=goodput scope=request"], {}),
        (MODES['recycling tree="1"'], {}),
    ],
)
def test_the_flags_of_other_engines_have_the_numbers_of_the_mode(mode, engines):
    assert flags(mode, 3, {"max_ngram": 4, "min_ngram": 1}) == engines


EAGLE = SpeculativeMode("eagle", {"path": "D"}, "fixed", {"depth": 2})


@pytest.mark.parametrize(
    ("facts", "engines"),
    [
        (
            {"name": "eagle", "tree": "1x1x1", "nodes": 3},
            {
                "vLLM": '--speculative-config \'{"method": "eagle", "model": "D", "num_speculative_tokens": 2}\'',
                "SGLang": "--speculative-algorithm EAGLE --speculative-draft-model-path D --speculative-num-steps 2 "
                "--speculative-eagle-topk 1 --speculative-num-draft-tokens 3",
            },
        ),
        (
            {"name": "eagle3", "tree": "reranked", "nodes": 8, "children": 4},
            {
                "SGLang": "--speculative-algorithm EAGLE3 --speculative-draft-model-path D --speculative-num-steps 2 "
                "--speculative-eagle-topk 4 --speculative-num-draft-tokens 9",
            },
        ),
    ],
)
def test_heads_have_the_flags_of_their_kind_and_trees_none_of_engines_that_draft_chains(facts, engines):
    assert flags(EAGLE, 3, facts) == engines
    assert flags(SpeculativeMode("block", {"path": "D"}), 3, {"tree": "1x1x1", "nodes": 3, "head": "vanilla"}) == {}


def test_the_command_is_short_for_a_run_of_the_task():
    given = [
        "recommend",
        "prompts=prose",
        "minutes=4",
        "drafters=[medusa]",
        "--model",
        "llama-3.1-8b",
        "--batch",
        "1,8",
    ]
    assert recommendation(given) == [
        "task=recommend", "proposer=none", "name=recommend", "task.model=llama-3.1-8b", "task.batches=[1,8]",
        "prompts=prose", "task.minutes=4", "task.drafters=[medusa]",
    ]  # fmt: skip
