"""The exhaustive sweep, whose arms are the modes of a grid; nightly the command itself, on the bundled model."""

import json
import shlex
import subprocess
import sys

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from experiments.recommend.measure import arm_options, grid
from spec_lab.cli.bundled import conf
from spec_lab.tasks.recommend.modes import SpeculativeMode

MODES = {mode.name: mode for mode in [*list(grid().values())[::7], *list(grid().values())[-2:]]}
POLICY = SpeculativeMode("suffix", {}, "fixed", {"depth": 2})


@pytest.mark.parametrize("name", [*MODES, POLICY.name])
def test_an_arm_of_the_sweep_is_the_mode(name):
    mode = MODES.get(name, POLICY)
    with initialize_config_dir(conf(), version_base="1.3"):
        wanted = compose("config", mode.overrides)
        arm = compose("config", ["proposer=none", *arm_options("a", mode.overrides)]).arms.a
    arm = OmegaConf.to_container(arm, resolve=False)
    policy = arm.pop("policy", None)
    assert arm == OmegaConf.to_container(wanted.proposer, resolve=False)
    assert mode.policy == "none" or policy == OmegaConf.to_container(wanted.policy, resolve=False)


@pytest.mark.nightly
def test_the_command_recommends_a_mode_of_the_bundled_model_whose_preset_and_command_run(tmp_path):
    out = tmp_path / "out"
    usual = ["prompts=code", "max_new_tokens=48", "threads=1"]
    spec_lab("recommend", *usual, "minutes=2", f"output_dir={out}", "--model", "llama-3.1-8b", "--batch", "1,8")
    summary = json.loads((out / "summary.json").read_text())
    chosen = summary["recommended"]
    assert chosen["mode"] == "none" or chosen["speedup"]["low"] > 1
    assert summary["seconds"] < 150 and len(summary["modes"]) <= 10
    short = ["prompts.limit=2", "max_new_tokens=8"]
    for number, command in enumerate((chosen["command"], chosen["preset"])):
        words = shlex.split(command)[1:]
        spec_lab(*words, *(usual if number else []), *short, f"output_dir={tmp_path / str(number)}")
        manifest = json.loads((tmp_path / str(number) / "manifest.json").read_text())
        assert manifest["arms"][-1] == "baseline" and len(manifest["arms"]) == 1 + (chosen["mode"] != "none")
    spec_lab("report", out)
    assert summary["conclusion"][:20] in (out / "report.html").read_text()


def spec_lab(*arguments):
    subprocess.run([sys.executable, "-m", "spec_lab", *map(str, arguments)], check=True)
