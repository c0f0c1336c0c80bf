"""The processor load of other processes."""

import pytest

from spec_lab.core import machine
from spec_lab.core.machine import Usage, other_load

STAT = """cpu  1000 400 500 90000 70 20 30 50 0 0
cpu0 100 10 5 9000 7 3 2 3 0 0
cpu1 1000 100 50 9000 7 30 20 3 0 0
cpu3 1 1 1 9000 7 1 2 3 0 0
intr 12345
"""


def test_the_load_of_others_is_all_use_minus_this_process_s():
    assert other_load(Usage(0.0, 100.0, 5.0), Usage(10.0, 130.0, 15.0)) == pytest.approx(2.0)
    assert other_load(Usage(0.0, 100.0, 5.0), Usage(10.0, 109.0, 15.0)) == pytest.approx(-0.1), (
        "clocks of different grain"
    )
    assert other_load(Usage(0.0, None, 5.0), Usage(10.0, None, 15.0)) is None


@pytest.mark.parametrize(("allowed", "ticks"), [([0], 123), ([1, 3], 1212), ([7], 2000)])
def test_the_use_of_the_allowed_cores_counts_at_every_priority_and_what_the_hypervisor_takes(
    tmp_path, monkeypatch, allowed, ticks
):
    (tmp_path / "stat").write_text(STAT)
    monkeypatch.setattr(machine, "STAT", tmp_path / "stat")
    monkeypatch.setattr(machine, "allowed_cores", lambda: allowed)
    monkeypatch.setattr(machine.os, "sysconf", lambda _: 100)
    assert Usage.now().machine == pytest.approx(ticks / 100), "without lines of these cores, the whole machine's"


@pytest.mark.parametrize("text", [None, "", "cpu  1 2 3", "cpu a b c d e f g h"])
def test_a_system_without_this_information_is_no_error(tmp_path, monkeypatch, text):
    monkeypatch.setattr(machine, "STAT", tmp_path / "stat")
    if text is not None:
        (tmp_path / "stat").write_text(text)
    assert Usage.now().machine is None
