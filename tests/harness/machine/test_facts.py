"""The memory that cases may use is that of the machine, or less where a container has a limit."""

import os
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from harness.backends import processor
from harness.machine import facts

GIB = 1 << 30
V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder for control groups; the machine has 256 GiB, and 200 of them are free and may be used."""
    monkeypatch.setattr(facts, "HOST_SHARE", 1.0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=256 * GIB, available=200 * GIB))
    monkeypatch.setattr(facts, "CONTROL_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(facts, "MEMBERSHIP", tmp_path / "membership")
    return tmp_path / "cgroup"


def group(folder: Path, limit: object, use: int, dropped: int = 0, files: tuple[str, str, str] = V2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / files[0]).write_text(f"{limit}\n")
    (folder / files[1]).write_text(f"{use}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{files[2]} {dropped}\nunevictable 7\n")


def usable(groups: Path, membership: str) -> tuple[float, int]:
    """Return the GiB that are free to use, and those that there are."""
    (groups.parent / "membership").write_text(membership)
    return facts.free_to_use() / GIB, facts.total_bytes() // GIB


def test_without_a_limit_it_is_the_memory_of_the_machine(groups: Path) -> None:
    assert usable(groups, "0::/\n") == (200, 256)
    assert usable(groups, "") == (200, 256)
    group(groups / "some", "max", 5 * GIB)
    assert usable(groups, "0::/some\n") == (200, 256)
    (groups.parent / "membership").unlink()
    assert (facts.free_to_use(), facts.total_bytes()) == (200 * GIB, 256 * GIB)


def test_a_container_has_its_limit_less_what_is_used_there(groups: Path) -> None:
    group(groups, 4 * GIB, 3 * GIB, 2 * GIB)
    assert usable(groups, "0::/\n") == (3, 4), "pages that the kernel drops on demand are free"
    group(groups, 4 * GIB, 5 * GIB)
    assert usable(groups, "0::/\n") == (0, 4)
    group(groups, 512 * GIB, GIB)
    assert usable(groups, "0::/\n") == (200, 256)


def test_what_the_kernel_drops_of_files_in_use_and_of_its_own_is_free_as_well(groups: Path) -> None:
    group(groups, 4 * GIB, 4 * GIB)
    (groups / "memory.stat").write_text(f"inactive_file {GIB}\nactive_file {GIB}\nslab_reclaimable {GIB}\nfile {GIB}\n")
    assert usable(groups, "0::/\n") == (3, 4)
    group(groups / "memory", 4 * GIB, 4 * GIB, files=V1)
    files = "total_inactive_file {0}\ntotal_active_file {0}\ninactive_file {0}\nactive_file {0}\n"
    (groups / "memory" / "memory.stat").write_text(files.format(GIB))
    assert usable(groups, "4:memory:/\n") == (2, 4), "what the groups within have, and that once"


def test_the_least_of_a_group_and_those_around_it_counts(groups: Path) -> None:
    group(groups / "pods", 16 * GIB, 15 * GIB)
    group(groups / "pods" / "mine", 8 * GIB, GIB)
    group(groups / "pods" / "mine" / "inner", "max", GIB)
    group(groups / "pods" / "other", GIB, GIB)
    assert usable(groups, "0::/pods/mine/inner\n") == (1, 8)


def test_a_path_from_outside_leads_to_the_groups_that_are_there(groups: Path) -> None:
    group(groups, 4 * GIB, GIB)
    assert usable(groups, "0::/kubepods/pod7/mine\n") == usable(groups, "0::/../other\n") == (3, 4)


def test_limits_of_version_1_count_where_they_are_no_absurd_number(groups: Path) -> None:
    membership = "5:cpu,cpuacct:/docker/a\n4:memory:/docker/a\n0::/\n"
    group(groups / "memory", 9223372036854771712, 9 * GIB, files=V1)
    assert usable(groups, membership) == (200, 256)
    group(groups / "memory" / "docker" / "a", 4 * GIB, 2 * GIB, GIB, files=V1)
    assert usable(groups, membership) == (3, 4)


def test_a_limit_changes_no_fact_of_the_machine(groups: Path) -> None:
    before = facts.facts.__wrapped__()["memory_bytes"], facts.name.__wrapped__()
    group(groups, 4 * GIB, GIB)
    assert usable(groups, "0::/\n") == (3, 4)
    assert (facts.facts.__wrapped__()["memory_bytes"], facts.name.__wrapped__()) == before
    assert before[0] == 256 * GIB and "-256gib-" in before[1]


@pytest.mark.parametrize(
    ("membership", "files", "threads"),
    [
        ("", {}, 8),
        ("0::/mine\n", {"mine/cpu.max": "max 100000"}, 8),
        ("0::/mine\n", {"mine/cpu.max": "250000 100000"}, 3),
        ("0::/mine\n", {"mine/cpu.max": "1000 100000"}, 1),
        ("0::/mine\n", {"mine/cpu.max": "900000 100000"}, 8),
        ("0::/mine/inner\n", {"mine/cpu.max": "200000 100000", "mine/inner/cpu.max": "max 100000"}, 2),
        ("0::/kubepods/mine\n", {"cpu.max": "400000 100000"}, 4),
        ("3:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "150000", "cpu/a/cpu.cfs_period_us": "50000"}, 3),
        ("3:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 8),
        ("3:cpuset:/a\n", {"cpu/a/cpu.cfs_quota_us": "100000", "cpu/a/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_threads_are_as_many_as_cpus_or_as_a_quota_of_their_time(
    groups: Path, membership: str, files: dict[str, str], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    (groups.parent / "membership").write_text(membership)
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(f"{text}\n")
    assert facts.threads() == threads


def test_packages_that_are_called_have_their_versions_and_absent_ones_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "keras":
            raise PackageNotFoundError
        return "1.0"

    monkeypatch.setattr(facts, "version", version)
    versions = facts.versions.__wrapped__()
    called = {"transformers", "peft", "grain", "datasets", "numba", "triton", "liger_kernel", "cut_cross_entropy"}
    assert versions.keys() == {"python", "torch", "jax", "jaxlib", "numpy", "tokenizers"} | called


@pytest.mark.parametrize(
    ("flags", "cpu"),
    [
        ("fpu avx avx2", "Some Model without AVX-512"),
        ("fpu avx avx2 avx512f", "Some Model"),
        ("fpu avx avx2 avx512f avx512_bf16", "Some Model"),
        ("fpu avx avx2 avx512f avx512_bf16 amx_tile amx_bf16", "Some Model with AMX"),
        ("", "Some Model"),
    ],
)
def test_processors_that_a_cloud_gives_one_name_are_machines_of_their_own(
    flags: str, cpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    names = []
    for text in ("fpu avx512f", flags):
        processor.of_processor.cache_clear()
        processor.CPUINFO.write_text(f"model\t\t: 1\nmodel name\t: Some Model\nflags\t\t: {text}\n" * 2)
        names.append(facts.name.__wrapped__())
    described = facts.facts.__wrapped__()["cpu"]
    processor.of_processor.cache_clear()
    assert described == cpu
    assert (names[0] == names[1]) == (cpu == "Some Model")
