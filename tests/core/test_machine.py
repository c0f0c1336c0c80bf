"""The processor load of other processes."""

import pytest

from spec_lab.core import machine
from spec_lab.core.machine import Usage, other_load

STAT = "cpu  1000 400 500 90000 70 20 30 50 0 0\ncpu0 1 2 3\n"


def test_the_load_of_others_is_all_use_minus_this_process_s():
    assert other_load(Usage(0.0, 100.0, 5.0), Usage(10.0, 130.0, 15.0)) == pytest.approx(2.0)
    assert other_load(Usage(0.0, 100.0, 5.0), Usage(10.0, 109.0, 15.0)) == 0.0, "clocks of different grain"
    assert other_load(Usage(0.0, None, 5.0), Usage(10.0, None, 15.0)) is None


@pytest.mark.parametrize(("niceness", "jiffies"), [(0, 1600), (5, 2000)])
def test_processes_of_low_priority_count_only_for_others_of_low_priority(tmp_path, monkeypatch, niceness, jiffies):
    (tmp_path / "stat").write_text(STAT)
    monkeypatch.setattr(machine, "STAT", tmp_path / "stat")
    monkeypatch.setattr(machine.os, "nice", lambda _: niceness)
    monkeypatch.setattr(machine.os, "sysconf", lambda _: 100)
    assert Usage.now().machine == pytest.approx(jiffies / 100)


@pytest.mark.parametrize("text", [None, "", "cpu  1 2 3", "cpu a b c d e f g h"])
def test_a_system_without_this_information_is_no_error(tmp_path, monkeypatch, text):
    monkeypatch.setattr(machine, "STAT", tmp_path / "stat")
    if text is not None:
        (tmp_path / "stat").write_text(text)
    assert Usage.now().machine is None
