"""The local test cluster has room for the jobs of the documented commands."""

import re
import runpy
import shlex

import pytest
from omegaconf import OmegaConf

from tests.cli.launchers.conftest import ROOT

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "local_slurm.py"))
COMMANDS = [
    line.partition("  #")[0]
    for line in re.findall(r"^spec-lab .*$", (ROOT / "experiments/cluster/README.md").read_text(), re.MULTILINE)
    if "hydra/launcher=slurm" in line
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_node_of_the_local_slurm_has_room_for_a_job_of_the_documented_command(cli, command):
    code, output, errors = cli(*shlex.split(command)[1:], "--cfg", "hydra")
    assert code == 0, errors
    launcher = OmegaConf.create(output).hydra.launcher
    assert launcher.memory_gb * 1024 <= SCRIPT["MEMORY"]
    assert launcher.cpus <= SCRIPT["CPUS"]
    assert launcher.gpus == 0


def test_the_documented_command_is_there():
    assert COMMANDS
