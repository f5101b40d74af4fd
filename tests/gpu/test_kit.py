"""The kit for a machine with a GPU: limits that add up, wheels with versions, locks that agree."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import harness

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "gpu").glob("[1-9]-*.sh"))
TEN_MINUTES = 600
KILLED, BESIDE = 10, 30
"""Seconds that a stage has to end after its limit, and those of a script beside its stages: wheels, interpreters."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_stages_of_a_script_end_within_ten_minutes(script: Path) -> None:
    text = script.read_text()
    branches = [text] if "else\n" not in text else [text.split("else\n")[0], text.split("else\n")[1]]
    for branch in branches:
        limits = [int(seconds) for seconds in re.findall(r"^\s*stage (\d+) ", branch, re.MULTILINE)]
        assert limits and sum(limits) + KILLED * len(limits) + BESIDE <= TEN_MINUTES
    subprocess.run(["bash", "-n", script], check=True)


def test_tests_that_take_long_are_left_out() -> None:
    assert '-m "not slow and not long and ' in (ROOT / "gpu" / "2-jax.sh").read_text()


def test_a_stage_that_runs_too_long_is_stopped_and_the_next_one_runs(tmp_path: Path) -> None:
    program = f'source "{ROOT}/gpu/stages.sh"; stage 1 slow sleep 20; stage 5 next echo done; finish'
    env = {"PATH": "/usr/bin:/bin", "OUT": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(["bash", "-c", program], env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "slow: stopped after 1 s" in done.stdout and "next: ended with 0" in done.stdout
    assert "failed: slow" in done.stdout
    assert (tmp_path / "next.log").read_text() == "done\n"


def test_stages_that_are_named_run_alone(tmp_path: Path) -> None:
    program = f'source "{ROOT}/gpu/stages.sh"; for name in first second third; do stage 5 $name echo ran; done; finish'
    env = {"PATH": "/usr/bin:/bin", "OUT": str(tmp_path), "PYTHON": sys.executable, "ONLY": "first third"}
    done = subprocess.run(["bash", "-c", program], env=env, capture_output=True, text=True, timeout=30)
    assert done.stdout.splitlines() == ["first: ended with 0", "third: ended with 0"]
    assert not (tmp_path / "second.log").exists()


def test_records_of_the_stages_that_ended_are_there_when_the_script_is_killed(tmp_path: Path) -> None:
    write = 'stage 5 first sh -c "mkdir -p $OUT/results/suite/machine && echo 1 > $OUT/results/suite/machine/x.jsonl"'
    program = f'source "{ROOT}/gpu/stages.sh"; {write}; kill -9 $$; finish'
    env = {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path), "OUT": str(tmp_path), "PYTHON": sys.executable}
    subprocess.run(["bash", "-c", program], env=env, capture_output=True, timeout=30)
    with tarfile.open(tmp_path / "results.tar.gz") as archive:
        assert "results/suite/machine/x.jsonl" in archive.getnames()


def test_tests_of_the_kit_see_the_repositories_that_they_make(tmp_path: Path) -> None:
    """What a copy has of git is passed over where its records ask for the commit, and there alone."""
    shutil.copytree(ROOT / "gpu", tmp_path / "gpu", ignore=shutil.ignore_patterns("wheels", "out"))
    (tmp_path / ".commit").write_text("0123456789ab\n")
    (tmp_path / "python").write_text('#!/bin/sh\necho "${GIT_DIR-none}"\n')
    (tmp_path / "python").chmod(0o755)
    out = tmp_path / "out"
    env = {"PATH": "/usr/bin:/bin", "OUT": str(out), "PYTHON": str(tmp_path / "python")}
    command = ["bash", tmp_path / "gpu" / "2-jax.sh"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(out / f"{name}.log").read_text() for name in ("meters-jax", "tests")] == ["/dev/null\n", "none\n"]


def test_continuous_integration_runs_it_in_a_folder_whose_name_has_a_space(tmp_path: Path) -> None:
    root = tmp_path / "my project"
    shutil.copytree(ROOT / "gpu", root / "gpu", ignore=shutil.ignore_patterns("wheels", "out"))
    for name in (".ci", ".venv/bin", "bin"):
        (root / name).mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", root / ".ci" / "run")
    for name in (".venv/bin/python", "bin/make", "bin/chromium"):
        (root / name).write_text("#!/bin/sh\necho fused_loss\n")
        (root / name).chmod(0o755)
    env = {"PATH": f"{root}/bin:/usr/bin:/bin"}
    done = subprocess.run([root / ".ci" / "run"], env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """A Python with all packages of this one but the project."""
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "memory_strategy_harness" not in path.name:
            (packages / path.name).symlink_to(path)
    return tmp_path / "venv" / "bin" / "python"


def test_strategies_and_workloads_are_discovered_where_the_project_is_not_installed(
    tmp_path: Path, bare_python: Path
) -> None:
    names = "from harness import plugins as p; p = p.load(); print(*p.workloads, *p.strategies, *p.versions.values())"
    program = f"source '{ROOT}/gpu/stages.sh'; stage 60 names $PYTHON -c '{names}'; finish"
    env = {"PATH": "/usr/bin:/bin", "OUT": str(tmp_path), "PYTHON": str(bare_python)}
    done = subprocess.run(["bash", "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"decoder", "fused_loss", harness.__version__} <= set((tmp_path / "names.log").read_text().split())


def test_each_file_with_tests_of_a_gpu_is_run_by_a_script() -> None:
    text = "".join(script.read_text() for script in SCRIPTS)
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"mark\.gpu\b", file.read_text()) and file != Path(__file__)
    }
    assert marked
    assert {file for file in marked if file not in text} == {"tests/harness/test_faults.py"}, "which takes minutes"


def test_suites_that_the_scripts_run_exist() -> None:
    text = "".join(script.read_text() for script in SCRIPTS)
    files = re.findall(r"(?:suites|gpu)/\w+\.(?:yaml|py)", text)
    assert files and all((ROOT / file).is_file() for file in files)


def versions(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def test_the_lock_for_gpus_is_that_of_the_cpu_with_other_builds() -> None:
    plain, gpu = versions("requirements.lock"), versions("requirements-gpu.lock")
    assert gpu["jax-cuda13-plugin"] == gpu["jax-cuda13-pjrt"] == plain["jax"] == plain["jaxlib"]
    assert {"nvidia-ml-py", "triton", "torch", "nvidia-cudnn-cu13"} <= set(gpu)
    assert all(plain[name] == version for name, version in gpu.items() if name in plain)


def test_wheels_to_carry_have_the_versions_of_the_lock_or_their_own() -> None:
    names = [line for line in (ROOT / "gpu" / "wheels.txt").read_text().splitlines() if line and line[0] != "#"]
    locked = {
        name.lower().replace("_", "-") for name in [*versions("requirements.lock"), *versions("requirements-gpu.lock")]
    }
    assert all("==" in name or name.lower().replace("_", "-") in locked for name in names)


THERE = {"torch", "triton", "jax", "jaxlib", "numpy"}
"""What the machine has, with what these need."""
LEFT_OUT = {"huggingface-hub"}
"""What tokenizers asks for files of others alone."""


def needed(name: str) -> set[str]:
    """Return what an installed package requires without extras; nothing of one that is not installed."""
    try:
        texts = requires(name) or []
    except PackageNotFoundError:
        return set()
    asked = [Requirement(text) for text in texts]
    return {canonicalize_name(each.name) for each in asked if not each.marker or each.marker.evaluate({"extra": ""})}


def test_what_the_wheels_need_is_carried_too() -> None:
    lines = (ROOT / "gpu" / "wheels.txt").read_text().splitlines()
    carried = {canonicalize_name(line.partition("==")[0]) for line in lines if line and line[0] != "#"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = {canonicalize_name(Requirement(text).name) for text in project} | {"pytest", "pytest-xdist"}
    for name in carried:
        wanted |= needed(name)
    assert not LEFT_OUT & carried
    assert not wanted - carried - THERE - LEFT_OUT, "these are missing in gpu/wheels.txt"
    assert needed("pytest") and needed("pydantic"), "requirements can be read"


def test_a_shape_that_does_not_fit_is_a_reason_and_the_others_are_measured(tmp_path: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, 'gpu'); import losses\n"
        "def figures(turn, n, D, V):\n"
        "    if V > 1000: raise MemoryError('out of memory')\n"
        "    return {'peak_bytes': 1 << 20, 'milliseconds': 2.0}\n"
        "losses.figures, losses.errors = figures, lambda loss, device: [0.0, 0.0]\n"
        "losses.losses = lambda device: [('some', None)]\n"
        f"sys.argv = ['losses', {str(tmp_path / 'out.json')!r}, '8,4,2000', '8,4,500']; sys.exit(losses.main())"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [row["loss"] for row in rows] == ["the three products alone", "some"]
    assert all(row["8,4,2000"] == {"error": "MemoryError: out of memory"} for row in rows)
    assert all(row["8,4,500"]["milliseconds"] == 2.0 for row in rows)
    document = tmp_path / "document.md"
    document.write_text("<!-- losses alone -->\n<!-- end of losses alone -->\n")
    command = [sys.executable, "gpu/losses_table.py", str(tmp_path / "out.json"), "--into", str(document)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    cells = [cell.strip() for cell in document.read_text().splitlines()[5].strip("|").split("|")]
    assert cells == ["some", "", "", "", "2.0", "1.00", "1", "0.0e+00", "0.0e+00"]


def test_the_probe_goes_on_after_a_fact_that_fails(tmp_path: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, 'gpu'); import probe\n"
        "def broken(device): raise OSError('no such file')\n"
        "def fine(device): return device\n"
        "probe.FACTS[:] = [broken, fine]\n"
        f"sys.argv = ['probe', {str(tmp_path / 'out.json')!r}, '--cpu']; sys.exit(probe.main())"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
    results = json.loads((tmp_path / "out.json").read_text())
    assert results == {"broken": {"error": "OSError: no such file"}, "fine": "cpu"}
