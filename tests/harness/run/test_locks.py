"""One harness at a time in a folder of results and on a GPU: the second is refused at once, in one sentence."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import Place
from harness.records.store import StoreError
from harness.run import locks

HELD_GPU = """
import fcntl, os, sys, time
descriptor = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""
HOLD = """
import sys, time
from pathlib import Path
from harness import Place
from harness.run import locks
with locks.measuring(Path(sys.argv[1]), map(Place.parse, sys.argv[2:])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_of_another_process_is_refused_at_once_and_goes_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "machine"
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        sentence = r"another harness is writing to '.*machine': .*--results"
        with pytest.raises(StoreError, match=sentence), locks.measuring(folder, ()):
            pytest.fail("two hold one lock")
        holder.kill()
    with locks.measuring(folder, ()):
        assert folder.is_dir()


def test_a_lock_is_given_back_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), locks.measuring(tmp_path, ()):
        raise RuntimeError
    with locks.measuring(tmp_path, ()):
        held = [link for link in map(str, Path("/proc/self/fd").iterdir()) if _target(link) == str(tmp_path / ".lock")]
    assert len(held) == 1
    assert not [link for link in map(str, Path("/proc/self/fd").iterdir()) if _target(link) == str(tmp_path / ".lock")]


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def test_a_lock_file_is_open_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS makes these locks of those of ranges, and locks no file that is open for reading alone."""
    modes: list[int] = []
    flock = fcntl.flock

    def noted(descriptor: int, operation: int) -> None:
        modes.append(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE)
        flock(descriptor, operation)

    monkeypatch.setattr(locks.fcntl, "flock", noted)
    for _ in ("made", "there"):
        with locks.measuring(tmp_path, ()):
            pass
    assert modes == [os.O_RDWR] * 2


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_lock_file_that_may_not_be_written_is_locked_all_the_same(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".lock").touch()
    opened = os.open

    def refusing(path: Path, flags: int, *rest: int) -> int:
        if flags & os.O_ACCMODE == os.O_RDWR and path == tmp_path / ".lock":
            raise OSError(number, os.strerror(number))
        return opened(path, flags, *rest)

    monkeypatch.setattr(locks.os, "open", refusing)
    with (
        locks.measuring(tmp_path, ()),
        pytest.raises(StoreError, match="another harness is writing"),
        locks.measuring(tmp_path, ()),
    ):
        pytest.fail("two hold one lock")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in its place")
    sentence = r"results cannot be written to '.*file/suite' .*--results"
    with pytest.raises(StoreError, match=sentence), locks.measuring(tmp_path / "file" / "suite", ()):
        pytest.fail("a folder within a file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_rights_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="Permission denied"), locks.measuring(tmp_path, ()):
        pytest.fail("locked without rights")


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let there be a driver, but no tool of its; return the folder of the locks."""
    monkeypatch.setattr(locks.backends, "DRIVER_FILES", (str(tmp_path),))
    monkeypatch.setattr(locks.gpu, "_run", lambda arguments: None)
    monkeypatch.setattr(locks.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def test_all_gpus_that_are_visible_are_for_one_harness_at_a_time_and_others_are_free(
    gpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, cuda = Place("torch", "cpu"), Place("torch", "cuda")
    command = [sys.executable, "-c", HELD_GPU, str(gpus), str(gpus / "harness-gpu-2.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
        refused = pytest.raises(StoreError, match=r"another harness measures on the GPU 2, .*CUDA_VISIBLE_DEVICES")
        with refused, locks.measuring(gpus / "a", [cpu, cuda]):
            pytest.fail("two on one GPU")
        with locks.measuring(gpus / "a", [cpu]):
            assert (gpus / "a").is_dir()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        with locks.measuring(gpus / "a", [cuda]):  # the refusal has left it free
            assert (gpus / "harness-gpu-1.lock").is_file()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "../../2")
        with locks.in_turn([Place("jax", "cuda")], int):
            assert (gpus / "harness-gpu-______2.lock").is_file()
        holder.kill()


def test_no_gpu_is_locked_where_no_case_can_run_on_one(gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks.backends, "DRIVER_FILES", ())
    with locks.measuring(gpus / "a", [Place("torch", "cuda")]):
        assert not list(gpus.glob("*.lock"))


def test_a_gpu_under_two_names_has_one_lock(gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks.gpu, "_run", lambda arguments: "0, GPU-a\n1, GPU-b\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with locks.measuring(gpus / "a", [Place("torch", "cuda")]):
        assert {file.name for file in gpus.glob("*.lock")} == {"harness-gpu-GPU-a.lock", "harness-gpu-GPU-b.lock"}
        for name in ("GPU-b", "1"):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
            with (
                pytest.raises(StoreError, match="on the GPU GPU-b,"),
                locks.measuring(gpus / "b", [Place("jax", "cuda")]),
            ):
                pytest.fail("two on one GPU")


def test_a_lock_file_is_no_link_that_leads_elsewhere(tmp_path: Path) -> None:
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="cannot be written"), locks.measuring(tmp_path, ()):
        pytest.fail("a link was followed")
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_system_without_locks_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    monkeypatch.setattr(locks.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    for lock, option in ((locks.measuring(tmp_path / "results", ()), "--results"), (locks.in_turn((), int), "TMPDIR")):
        with pytest.raises(StoreError, match=rf"No locks available\): name another folder with {option}$"), lock:
            pytest.fail("measured without a lock")


def test_a_machine_on_which_nothing_can_be_written_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gettempdir() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(locks.tempfile, "gettempdir", gettempdir)
    (tmp_path / "file").touch()
    for lock, option in (
        (locks.measuring(tmp_path / "file" / "suite", ()), "--results"),
        (locks.in_turn((), int), "TMPDIR"),
    ):
        with pytest.raises(StoreError, match=rf"cannot be written .*{option}$"), lock:
            pytest.fail("measured without a lock")


def test_a_folder_in_which_no_lock_file_may_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by its rights, which root passes over."""
    opened = os.open

    def refusing(path: Path, flags: int, *rest: int) -> int:
        if flags & os.O_CREAT and path == tmp_path / ".lock":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, flags, *rest)

    monkeypatch.setattr(locks.os, "open", refusing)
    sentence = r"results cannot be written to '.*' \(Permission denied\): name another folder with --results$"
    with pytest.raises(StoreError, match=sentence), locks.measuring(tmp_path, ()):
        pytest.fail("locked without rights")
