"""The local test cluster has room for the jobs of the documented commands."""

import runpy

import pytest
from omegaconf import OmegaConf

from tests import documents
from tests.cli.launchers.conftest import ROOT

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "local_slurm.py"))
PAGE = ROOT / "docs/tutorials/sweep_on_a_cluster.md"
COMMANDS = [
    [word for word in command.words if word.startswith("hydra")]
    for command in documents.commands(PAGE, PAGE.read_text())
    if "--multirun" in command.words and "hydra/launcher=slurm" in command.words
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_node_of_the_local_slurm_has_room_for_a_job_of_the_documented_command(cli, command):
    code, output, errors = cli(*command, "--cfg", "hydra")
    assert code == 0, errors
    launcher = OmegaConf.create(output).hydra.launcher
    assert launcher.memory_gb * 1024 <= SCRIPT["MEMORY"]
    assert launcher.cpus <= SCRIPT["CPUS"]
    assert launcher.gpus == 0


def test_the_documented_command_is_there():
    assert COMMANDS
