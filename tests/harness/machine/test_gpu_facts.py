"""What is known of a GPU from the driver's tool: here a script that answers as the tool would."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Place
from harness.machine import environment, facts, gpu, interference
from harness.machine.gpu import Gpu, State
from harness.verbs import doctor

MIB = 1 << 20
ANSWERS = {
    "name": "NVIDIA H100 80GB HBM3",
    "memory.total": "81559",
    "memory.free": "80000",
    "driver_version": "580.159.04",
    "memory.reserved": "551",
    "mig.mode.current": "Disabled",
    "compute_mode": "Default",
    "clocks_event_reasons_counters.hw_thermal_slowdown": "7",
    "clocks_event_reasons_counters.sw_thermal_slowdown": "0",
    "clocks_event_reasons_counters.hw_power_brake_slowdown": "[N/A]",
}
UUIDS = ("GPU-8932f937-d72c", "GPU-8a56ab03-11e0")
TOOL = """#!/usr/bin/env python3
import sys
answers, running, on_the_second, uuids = {answers!r}, {running!r}, {on_the_second!r}, {uuids!r}
for word in sys.argv[1:]:
    if word == "--query-gpu=index,uuid":
        print("\\n".join(", ".join(map(str, each)) for each in enumerate(uuids)))
    elif word.startswith("--query-gpu="):
        fields = word.partition("=")[2].split(",")
        if not set(fields) <= set(answers):
            sys.exit(2)
        print(", ".join(answers[field] for field in fields))
    if word.startswith("--query-compute-apps"):
        print("\\n".join(running if "--id=0" in sys.argv else running + on_the_second))
    if word.startswith("--id=") and word != "--id=0":
        sys.exit(6)
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a tool first in the path that gives these answers."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpu.usable_bytes.cache_clear()

    def put(
        running: tuple[str, ...] = (),
        without: tuple[str, ...] = (),
        on_the_second: tuple[str, ...] = (),
        **changed: str,
    ) -> None:
        answers = {name: value for name, value in (ANSWERS | changed).items() if name not in without}
        path = tmp_path / "nvidia-smi"
        path.write_text(TOOL.format(answers=answers, running=running, on_the_second=on_the_second, uuids=UUIDS))
        path.chmod(0o700)
        gpu.usable_bytes.cache_clear()

    yield put
    gpu.usable_bytes.cache_clear()


def test_what_programs_can_use_leaves_out_what_the_driver_keeps(tool: Callable[..., None]) -> None:
    tool()
    assert gpu.detect() == Gpu("NVIDIA H100 80GB HBM3", 81008 * MIB, 80000 * MIB, "580.159.04")
    assert gpu.usable_bytes() == 81008 * MIB
    assert gpu.free_to_use() == int(81008 * MIB * facts.DEVICE_SHARE)


def test_another_program_leaves_less(tool: Callable[..., None]) -> None:
    tool(**{"memory.free": "1000"})
    assert gpu.free_to_use() == 1000 * MIB


def test_an_old_driver_knows_less_and_is_asked_again(tool: Callable[..., None]) -> None:
    tool(without=("memory.reserved", "mig.mode.current"))
    assert gpu.usable_bytes() == 81559 * MIB


def test_the_memory_of_an_instance_is_not_that_of_the_card(tool: Callable[..., None]) -> None:
    tool(**{"mig.mode.current": "Enabled"})
    assert gpu.usable_bytes() is None and gpu.free_to_use() is None
    env = environment.variables("memory", Place("jax", "cuda"), "run", 1, 8 << 30)
    assert env["XLA_PYTHON_CLIENT_MEM_FRACTION"] == f"{facts.DEVICE_SHARE:.6f}", "no share of an unknown memory"


def test_an_instance_of_another_card_has_not_the_memory_of_the_first(
    tool: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(running=("1", "2"))
    state = gpu.state()
    assert state is not None and state.others == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1f")
    assert gpu.usable_bytes() is None and gpu.free_to_use() is None
    assert gpu.state() is None, "programs on other instances disturb none on this one"


@pytest.mark.parametrize("visible", ["1", "GPU-other"])
def test_the_visible_gpu_is_asked_for(tool: Callable[..., None], visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tool()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu.detect() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert gpu.detect() is not None


@pytest.mark.parametrize("visible", ["", "-1", " ,0"])
def test_where_no_gpu_is_visible_none_is_asked_for(
    tool: Callable[..., None], visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(running=("4711",))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu.detect() is None and gpu.usable_bytes() is None and gpu.free_to_use() is None and gpu.state() is None


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, UUIDS),
        ("0", UUIDS[:1]),
        ("1, 0", UUIDS[::-1]),
        (f"{UUIDS[1]},1,GPU-8a", UUIDS[1:]),
        ("GPU-8a,GPU-7", (UUIDS[1], "GPU-7")),
        ("MIG-1f,7", ("MIG-1f", "7")),
        ("", ()),
        ("-1", ()),
    ],
)
def test_a_gpu_has_one_name_however_it_is_chosen(
    tool: Callable[..., None], chosen: str | None, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool()
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert gpu.visible() == list(names)


def test_without_the_tool_a_gpu_is_called_as_it_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu.visible() == ["0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"2,{UUIDS[0]}")
    assert gpu.visible() == ["2", UUIDS[0]]


def test_a_budget_is_a_share_of_what_programs_can_use(tool: Callable[..., None]) -> None:
    tool()
    env = environment.variables("memory", Place("jax", "cuda"), "run", 1, 81008 * MIB // 2)
    assert env["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.500000"
    assert env["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


def test_other_programs_and_a_slowed_clock_disturb_a_time(tool: Callable[..., None]) -> None:
    place = Place("torch", "cuda")
    tool()
    before = interference.snapshot(place)
    assert before.of_gpu == State(0, 7)
    assert not {"gpu_shared", "gpu_throttled"} & set(interference.disturbances(before, interference.snapshot(place)))
    tool(running=("4711",), **{"clocks_event_reasons_counters.hw_thermal_slowdown": "9"})
    flags = interference.disturbances(before, interference.snapshot(place))
    assert {"gpu_shared", "gpu_throttled"} <= set(flags)
    assert interference.snapshot(Place("torch", "cpu")).of_gpu is None, "a time on the CPU asks no GPU"


@pytest.mark.parametrize("visible", [None, "0"])
def test_programs_on_other_gpus_disturb_nothing(
    tool: Callable[..., None], visible: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(running=("4711",), on_the_second=("4712", "4713"))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu.state() == State(1, 7)


@pytest.mark.parametrize(
    ("mode", "exclusive"), [("Default", False), ("Prohibited", False), ("Exclusive_Process", True)]
)
def test_a_gpu_that_takes_one_process_at_a_time_says_so(tool: Callable[..., None], mode: str, exclusive: bool) -> None:
    tool(compute_mode=mode)
    assert gpu.is_exclusive() is exclusive
    tool(without=("compute_mode",))
    assert gpu.is_exclusive() is False


# Workers


@pytest.mark.parametrize("kind", ["memory", "numerics", "reference", "contract", "predict"])
def test_only_a_worker_that_is_timed_lets_the_compiler_try_kernels(kind: str) -> None:
    place = Place("jax", "cuda")
    assert "--xla_gpu_autotune_level=0" in environment.variables(kind, place, "run", 1, None)["XLA_FLAGS"]
    assert "XLA_FLAGS" not in environment.variables("time", place, "run", 1, None)
    deterministic = (
        "--xla_gpu_deterministic_ops=true" in environment.variables(kind, place, "run", 1, None)["XLA_FLAGS"]
    )
    assert deterministic == (kind in environment.COMPARING)


def test_libraries_have_no_choice_where_answers_are_compared() -> None:
    place = Place("torch", "cuda")
    assert environment.variables("numerics", place, "run", 1, None)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    memory = environment.variables("memory", place, "run", 1, None)
    assert "CUBLAS_WORKSPACE_CONFIG" not in memory
    assert memory["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    assert memory["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "CUDA_DEVICE_ORDER" not in environment.variables("memory", Place("torch", "cpu"), "run", 1, None)


def test_predictions_take_no_gpu(tool: Callable[..., None]) -> None:
    tool()
    env = environment.variables("predict", Place("jax", "cuda"), "run", 1, None)
    assert env["JAX_PLATFORMS"] == "cpu" and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in env


# What the doctor says


def findings(monkeypatch: pytest.MonkeyPatch, path: Path) -> str:
    monkeypatch.setattr(doctor.backends, "DRIVER_FILES", (str(path),))
    return " ".join(finding.what for finding in doctor._gpu())


def test_the_doctor_names_what_stands_in_the_way(
    tool: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "this machine has no NVIDIA GPU" in findings(monkeypatch, tmp_path / "absent")
    assert "does not answer" in findings(monkeypatch, tmp_path)
    tool(running=("1", "2"), driver_version="470.57.02", **{"mig.mode.current": "Enabled"})
    faults = findings(monkeypatch, tmp_path)
    assert "MIG" in faults and "the driver is 470.57.02" in faults and "2 other program(s)" in faults
    tool()
    assert "MIG" not in findings(monkeypatch, tmp_path) and "driver is" not in findings(monkeypatch, tmp_path)


@pytest.mark.parametrize("visible", ["", "-1"])
def test_the_doctor_says_that_no_gpu_is_visible(
    tool: Callable[..., None], visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    faults = findings(monkeypatch, tmp_path)
    assert faults == "CUDA_VISIBLE_DEVICES names no GPU: places on cuda become untested rows"


# Presence, and the commit of a copy


@pytest.mark.parametrize("shown", ["version", "nvidiactl", "dxg"])
def test_a_driver_is_seen_by_any_of_its_files(shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / name for name in ("version", "nvidiactl", "dxg")]
    monkeypatch.setattr(doctor.backends, "DRIVER_FILES", tuple(map(str, files)))
    assert doctor.backends.absent("torch", "cuda") == "this machine has no NVIDIA GPU"
    (tmp_path / shown).touch()
    assert doctor.backends.absent("torch", "cuda") is None


def test_a_copy_without_git_brings_its_commit_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "__file__", str(tmp_path / "harness" / "machine" / "facts.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert facts.commit.__wrapped__() == "unversioned"
    (tmp_path / ".commit").write_text("0123456789ab\n")
    assert facts.commit.__wrapped__() == "0123456789ab"
