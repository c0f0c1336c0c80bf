"""Available memory as Linux and control groups state it, and the peak of a process."""

import torch

from spec_lab.core import device_memory
from spec_lab.core.device_memory import Peak, available, group_room

CPU = torch.device("cpu")


def group(folder, names, limit, used, stat):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip((*names, "memory.stat"), (limit, used, stat), strict=True):
        (folder / name).write_text(f"{value}\n")


def test_what_is_left_below_the_limit_of_each_control_group_counts(tmp_path):
    """Version 2: of the group and of those it lies in; "max" is no limit; page cache can be freed."""
    names = "memory.max", "memory.current"
    group(tmp_path / "job" / "step", names, 1000, 900, "anon 500\ninactive_file 200\nactive_file 100\n")
    group(tmp_path / "job", names, "max", 900, "inactive_file 300")
    group(tmp_path, names, 5000, 1200, "active_file 7")
    (tmp_path / "own").write_text("0::/job/step\n")
    assert list(group_room(tmp_path / "own", tmp_path)) == [400, 3807]


def test_version_1_of_control_groups_has_a_folder_for_memory(tmp_path):
    names = "memory.limit_in_bytes", "memory.usage_in_bytes"
    group(
        tmp_path / "memory" / "a job",
        names,
        1000,
        900,
        "inactive_file 1\ntotal_inactive_file 200\ntotal_active_file 100\n",
    )
    (tmp_path / "own").write_text("9:cpu,cpuacct:/\n8:memory:/a job\n")
    assert list(group_room(tmp_path / "own", tmp_path)) == [400]


def test_the_least_of_machine_and_groups_is_available(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:   20 kB\n")
    monkeypatch.setattr(device_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(device_memory, "group_room", lambda: [30000, 40000])
    assert available(CPU) == 20 * 1024
    monkeypatch.setattr(device_memory, "group_room", lambda: [-5])
    assert available(CPU) == 0, "a group may use more than its limit for a moment"
    monkeypatch.setattr(device_memory, "group_room", lambda: [])
    monkeypatch.setattr(device_memory, "MEMINFO", tmp_path / "none")
    assert available(CPU) is None and available(torch.device("meta")) is None


def test_the_peak_of_the_process_is_at_least_what_it_holds():
    """How much a block adds depends on what the allocator still holds of earlier ones."""
    peak = Peak.start(CPU)
    block = torch.ones(2**24)  # 64 MiB
    facts = peak.facts()
    if facts["before_bytes"] is not None:
        assert facts["peak_bytes"] >= facts["before_bytes"]
        assert facts["peak_bytes"] >= block.numel() * block.element_size()
