"""What the machine grants: cores and memory, read from made-up descriptions of both versions of control groups."""

import os

import pytest

from dejavu_train.ground import machine

LIMITS = {
    "inner quota": ("0::/a/b", {"a/b/cpu.max": "200000 100000"}, 2),
    "outer quota is less": ("0::/a/b", {"a/b/cpu.max": "400000 100000", "a/cpu.max": "300000 100000"}, 3),
    "no quota": ("0::/a", {"a/cpu.max": "max 100000"}, 8),
    "part of a core": ("0::/a", {"a/cpu.max": "50000 100000"}, 1),
    "one and a half": ("0::/a", {"a/cpu.max": "150000 100000"}, 1),
    "more than the cores": ("0::/a", {"a/cpu.max": "6400000 100000"}, 8),
    "a container's own root": ("0::/", {"cpu.max": "200000 100000"}, 2),
    "a path outside": ("0::/../../x", {"cpu.max": "200000 100000"}, 2),
    "version 1": ("4:cpu,cpuacct:/a", {"cpu,cpuacct/a/cpu.cfs_quota_us": "500000"}, 5),
    "version 1, alone": ("4:cpu:/a\n3:memory:/", {"cpu/cpu.cfs_quota_us": "300000"}, 3),
    "version 1, the path outside": ("4:cpu:/docker/abc", {"cpu/cpu.cfs_quota_us": "300000"}, 3),
    "version 1, none": ("4:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "-1"}, 8),
    "both": ("4:cpu:/a\n0::/b", {"cpu/a/cpu.cfs_quota_us": "300000", "unified/b/cpu.max": "200000 100000"}, 2),
    "no groups": ("", {}, 8),
}


def describe(root, groups, files):
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": files[name] for name in files}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
        if name.endswith("cfs_quota_us"):
            (root / name).with_name("cpu.cfs_period_us").write_text("100000\n")


@pytest.mark.parametrize("name", LIMITS)
def test_cores_are_the_least_of_affinity_and_quotas(tmp_path, monkeypatch, name):
    groups, files, expected = LIMITS[name]
    describe(tmp_path, groups, files)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert machine.cores() == expected
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    assert machine.cores() == 1


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a", {"a/memory.max": "5000000", "a/memory.current": "3000000"}, 2_000_000),
        ("0::/a", {"a/memory.max": "max", "a/memory.current": "3000000"}, 8_192_000),
        ("0::/a/b", {"a/memory.max": "2000000", "a/memory.current": "3000000"}, 0),
        (
            "0::/",
            {"memory.max": "5000000", "memory.current": "3000000", "memory.stat": "anon 7\ninactive_file 900000"},
            2_900_000,
        ),
        ("3:memory:/a", {"memory/a/memory.limit_in_bytes": "4000", "memory/a/memory.usage_in_bytes": "1000"}, 3000),
        ("", {}, 8_192_000),
    ],
)
def test_free_memory_is_the_least_of_machine_and_groups(tmp_path, monkeypatch, groups, files, expected):
    describe(tmp_path, groups, files)
    (tmp_path / "proc/meminfo").write_text("MemTotal:       16000 kB\nMemAvailable:    8000 kB\n")
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert machine.free_memory() == expected


def test_a_machine_that_says_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert machine.free_memory() is None and machine.cores() >= 1
