"""The configuration and the machine of a run, in words."""

from textwrap import wrap

import pytest

from spec_lab.analysis.report.facts import device_text, facts
from spec_lab.analysis.report.page import heading_width
from spec_lab.results.result import run_title


@pytest.mark.parametrize(
    ("target", "more", "text"),
    [
        ({"device": "auto"}, {"device": "cuda:0"}, "cuda:0"),
        ({"device": None}, {"device": "cuda:1"}, "cuda:1"),
        ({}, {"device": "cpu"}, "cpu"),
        ({"device": None}, {}, "cpu"),
        ({"device": "cuda"}, {}, "cuda"),
        ({}, {}, None),
        ({"device": "auto", "device_map": "balanced"}, {"device": "cuda:0"}, "device map balanced"),
        ({"device": "auto", "tensor_parallel": True}, {"device": "cuda:0", "ranks": 2}, "2 ranks"),
    ],
)
def test_the_device_is_where_the_target_was(target, more, text):
    assert device_text({"config": {"target": target}, **more}) == text


def test_the_model_and_the_prompts_have_their_names_and_llama_cpp_the_type_of_its_file():
    config = {"name": "custom", "target": {"_target_": "a.load"}, "prompts": {"_target_": "b.load", "name": "mt_bench"}}
    target = {"name": "SmolLM2.Q4_1", "dtype": "float32", "weights": "Q4_1"}
    manifest = {"config": config, "target": target, "device": "cpu", "proposers": {"ngram": {"name": "ngram"}}}
    shown = facts(manifest)
    assert (shown["model"], shown["prompts"]) == ("SmolLM2.Q4_1", "mt_bench")
    assert shown["precision, device, attention"] == "Q4_1, cpu"


@pytest.mark.parametrize(
    ("name", "path", "proposers", "title"),
    [
        ("custom", "~/models/zoo/target", {"first": {"name": "ngram"}}, "ngram on zoo/target"),
        ("custom", "Qwen/Qwen3-8B", {"proposer": {"name": "none"}}, "Qwen/Qwen3-8B"),
        ("medusa_tree", "Qwen/Qwen3-8B", {"medusa": {"name": "medusa"}}, "medusa_tree"),
        ("custom", None, {}, "custom"),
    ],
)
def test_a_run_without_a_name_is_titled_by_proposer_and_target(name, path, proposers, title):
    assert run_title({"config": {"name": name, "target": {"path": path}}, "proposers": proposers}) == title


def test_a_heading_of_a_column_fits_in_two_lines():
    heading = "roofline share, end to end [95 %]"
    assert len(wrap(heading, heading_width(heading))) == 2 and heading_width("x" * 99) == 24
