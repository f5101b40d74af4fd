"""Mapped files lie on a disk, have room, and leave nothing behind; a folder that cannot serve is refused in words."""

import os
from pathlib import Path

import pytest
import torch

from harness import Place, backends, mapped_files
from harness.contract import plugins
from harness.contract.assembly import assemble
from harness.contract.loop import training
from harness.records import Applied, Case

LOADED = plugins.load()
USERS = {
    "mapped_cache": ("scoring", {}),
    "mapped_moments": ("decoder", {}),
    "offload_activations": ("decoder", {"least_kib": 1}),
}


def run(name, folder):
    """Take one step with files in this folder."""
    workload, knobs = USERS[name]
    kind = LOADED.workloads[workload]
    case = Case(
        workload=workload,
        shape=kind.probe(kind.shape()).model_dump(),
        place="torch/cpu",
        corpus="drawn",
        tokenizer="none",
        strategies=(Applied(name=name, knobs={**knobs, "folder": str(folder)}),),
    )
    module = backends.load("torch")
    module.start(Place("torch", "cpu"))
    parts = assemble(LOADED, case)
    next(training(parts, module.prepare(parts)))


def refused(name, folder):
    with pytest.raises(ValueError) as caught:
        run(name, folder)
    assert str(caught.value).startswith(f"{name}: ")
    return str(caught.value)


@pytest.mark.parametrize("name", USERS)
def test_every_user_maps_its_files_in_the_folder_that_was_given(name, tmp_path, monkeypatch):
    folders = []
    inner = mapped_files.unnamed
    monkeypatch.setattr(mapped_files, "unnamed", lambda *args: folders.append(args[1]) or inner(*args))
    run(name, tmp_path)
    assert set(folders) == {str(tmp_path)} and os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", USERS)
def test_a_folder_that_cannot_serve_is_refused_in_words(name, tmp_path, monkeypatch):
    assert "there is no folder" in refused(name, tmp_path / "none") and "one that is on a disk" in refused(name, "/no")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "give a folder that you may write to" in refused(name, tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(mapped_files, "file_system", lambda folder: "tmpfs")
    assert "is tmpfs, which is memory itself: give a folder on a disk" in refused(name, tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_disk_without_room_is_named_with_its_bytes(tmp_path, monkeypatch):
    result = os.statvfs(tmp_path)
    full = type("Full", (), {"f_bavail": 1, "f_frsize": result.f_frsize})
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    assert f"{result.f_frsize:,} bytes free of" in refused("mapped_cache", tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", USERS)
def test_a_disk_that_fills_meanwhile_is_named_before_anything_is_written(name, tmp_path, monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert "No space left on device" in refused(name, tmp_path) and os.listdir(tmp_path) == []


def test_a_tensor_is_zeros_of_its_size_and_is_written_to_its_file(tmp_path):
    tensor = mapped_files.in_torch("test", str(tmp_path), (3, 5), torch.bfloat16)
    assert tensor.shape == (3, 5) and tensor.dtype == torch.bfloat16 and not tensor.any()
    pages = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert len(pages) == 1 and "(deleted)" in pages[0] and "rw-s" in pages[0]
    assert mapped_files.in_torch("test", str(tmp_path), (0, 5), torch.float32).shape == (0, 5)


def test_a_prediction_makes_no_file(tmp_path, monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    monkeypatch.setattr(os, "posix_fallocate", lambda *args: pytest.fail("a file was made"))
    with FakeTensorMode():
        tensor = mapped_files.in_torch("test", str(tmp_path), (1 << 30, 1 << 10), torch.float32)
    assert isinstance(tensor, FakeTensor) and tensor.untyped_storage().nbytes() == 4 << 40


def test_the_type_of_a_file_system_is_that_of_its_device(tmp_path):
    device = os.stat(tmp_path).st_dev
    line = "36 25 {}:{} / /somewhere rw,relatime shared:5 - {} source rw\n"
    mounts = tmp_path / "mounts"
    other = line.format(os.major(device), os.minor(device) + 1, "ext4")
    mounts.write_text(other + line.format(os.major(device), os.minor(device), "tmpfs"))
    assert mapped_files.file_system(str(tmp_path), str(mounts)) == "tmpfs"
    mounts.write_text(other)
    assert mapped_files.file_system(str(tmp_path), str(mounts)) == ""
