"""Config, tags, group, job type and id of a run on Weights & Biases."""

from pathlib import Path

import pytest

from spec_lab.analysis.tracking import facts

MANIFEST = {
    "config": {
        "name": "toy",
        "target": {"_target_": "spec_lab.models.target.Target.load", "path": "/absolute/models/toy", "dtype": None},
        "proposer": {
            "_target_": "spec_lab.drafters.medusa.propose.Medusa.load",
            "depth": 4,
            "path": "org/heads",
            "api_key": "x",
        },
        "verifier": {"_target_": "spec_lab.verify.Typical"},
        "policy": {"_target_": "spec_lab.policy.none"},
        "constraint": {"_target_": "spec_lab.constrain.load.none", "draft_budget": None},
        "sampling": {"_target_": "spec_lab.core.probabilities.Sampling", "temperature": None},
        "prompts": {"path": "~/prompts/mine.jsonl", "limit": 3},
        "task": {"_target_": "spec_lab.tasks.benchmark.run", "history": "own"},
        "arms": {"other": {"_target_": "package.Other.load", "depth": 2}},
        "batch_size": 2,
        "stop_strings": [],
        "seed": 1,
        "output_dir": "/absolute/outputs",
        "tracker": {"project": "secret-project"},
    },
    "seed": 1,
    "sampling": {"temperature": 0.7},
    "parts": {"proposer": "medusa", "verifier": "typical", "constraint": "none", "lossless": False},
    "proposers": {
        "medusa": {"name": "medusa", "drawn": "deterministic", "nodes": 9, "tree": "0 1"},
        "other": {"name": "o"},
    },
    "machine": {"processor": "A CPU", "gpus": ["H100", "H100"]},
    "versions": {"torch": "2.8", "other": None},
    "commit": "abc",
    "threads": 1,
}


def test_the_config_is_nested_under_the_names_of_the_options_and_complete():
    assert facts.config(MANIFEST) == {
        "experiment": "toy",
        "target": {"path": "models/toy"},
        "proposer": {
            "name": "medusa", "drawn": "deterministic", "nodes": 9, "depth": 4, "path": "org/heads", "api_key": "***"
        },
        "verifier": {"name": "typical"},
        "policy": {"name": "none"},
        "constraint": {"name": "none"},
        "sampling": {"temperature": 0.7},
        "prompts": {"path": "prompts/mine.jsonl", "limit": 3},
        "task": {"name": "benchmark", "history": "own"},
        "arms": {"other": {"name": "o", "depth": 2}},
        "batch_size": 2,
        "seed": 1,
        "threads": 1,
        "machine": {"processor": "A CPU", "gpus": "H100, H100"},
        "commit": "abc",
        "versions": {"torch": "2.8"},
    }  # fmt: skip


@pytest.mark.parametrize("wrong", ["text", 3, ["a"], True])
def test_options_of_another_shape_are_left_out(wrong):
    names = ("proposer", "verifier", "policy", "task", "arms", "sampling")
    configured = facts.config({"config": dict.fromkeys(names, wrong), "seed": 0})
    assert configured == facts.config({"config": {}, "seed": 0})


def test_a_run_keeps_its_id_and_another_run_has_another():
    mapping = facts.identity(Path("a/run"), MANIFEST)
    assert mapping == facts.identity(Path("b/run"), dict(reversed(MANIFEST.items())))
    assert mapping != facts.identity(Path("a/other"), MANIFEST)
    assert mapping != facts.identity(Path("a/run"), MANIFEST | {"began": "later"})
    assert facts.is_offline_folder(f"offline-run-20260101_000000-{mapping}", mapping)
    assert not facts.is_offline_folder("offline-run-20260101_000000-other", mapping)
