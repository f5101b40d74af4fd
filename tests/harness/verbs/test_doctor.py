"""Known bytes are seen; of equal cases no more is said than their interval, and never equal on a noisy machine."""

import errno
import json
import random
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from harness import backends
from harness.cli import commands
from harness.contract import place, plugins
from harness.machine import checkups
from harness.machine.checkups import Checkup, Noise
from harness.machine.gpu import Gpu
from harness.records import Record, Times
from harness.refusal import Refusal
from harness.report import doctor as report
from harness.verbs import doctor

LOADED = plugins.load()


def each(run):
    """Run tasks that take turns as they would be one after the other."""
    return lambda tasks, threads, deadline, watch, order: [run(task, threads, deadline)[0] for task in tasks]


@pytest.mark.long
def test_known_bytes_are_seen_in_every_way_and_kept_for_later_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = CliRunner().invoke(commands.app, ["doctor", "--no-noise"])
    assert done.exit_code == 0, done.output
    judgements = dict(re.findall(r"^\| (\w.*?) *\| *64\.0 *\|.*\| (.*?) *\|$", done.output, re.MULTILINE))
    assert list(judgements) == ["anonymous", "mapped file", "child", "torch", "jax", "cuda"]
    absent = {name for name in place.NAMES if backends.absent(name, "cpu")}
    assert {way for way in judgements if judgements[way] == "good"} >= {*list(judgements)[:5]} - absent
    assert "OFF" not in done.output and "equal cases" not in done.output
    assert abs(checkups.latest(tmp_path / "harness")["calibration_error_bytes"]) <= checkups.TOLERANCE


def test_what_spoils_figures_is_looked_for_before_the_doctor_loads_the_machine(monkeypatch):
    order = []
    monkeypatch.setattr(doctor, "findings", lambda: order.append("findings") or ())
    monkeypatch.setattr(doctor, "calibrate", lambda way: order.append(way) or checkups.Calibration(way, 1, 1))
    doctor.examine(LOADED, noise=False)
    assert order[0] == "findings" and len(order) == 7


def test_a_gpu_is_there_where_one_framework_finds_it(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor.backends, "absent", lambda name, device: None if name == "jax" else "no torch")
    monkeypatch.setattr(doctor.gpu, "detect", lambda: None)
    assert "nvidia-smi" in doctor._gpu()[0].what
    monkeypatch.setattr(
        doctor.backends, "absent", lambda name, device: None if device == "cpu" else f"{name} sees none"
    )
    assert doctor._gpu()[0].what == "torch sees none: places on cuda become untested rows"


@pytest.mark.parametrize(("answer", "shown"), [("0\n", True), ("1\n", False), (OSError(errno.EAGAIN, ""), False)])
def test_turbo_is_asked_for_where_its_driver_answers(monkeypatch, answer, shown):
    def read(path):
        if not str(path).endswith("/intel_pstate/no_turbo"):
            raise FileNotFoundError
        if isinstance(answer, OSError):  # as the kernel does while the driver is off
            raise answer
        return answer

    monkeypatch.setattr(Path, "is_file", lambda path: True)
    monkeypatch.setattr(Path, "read_text", read)
    assert bool(doctor._turbo()) is shown


def test_a_meter_that_sees_half_ends_with_status_1(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    half = checkups.SIZE // 2
    monkeypatch.setattr(doctor, "calibrate", lambda way: checkups.Calibration(way, checkups.SIZE, half))
    done = CliRunner().invoke(commands.app, ["doctor", "--no-noise"])
    assert done.exit_code == 1 and done.output.count("OFF by more than 0.5 MiB and 1 %") == 6


def test_figures_that_cannot_be_written_are_shown_and_end_with_a_sentence(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(doctor, "calibrate", lambda way: checkups.Calibration(way, checkups.SIZE, checkups.SIZE))
    done = CliRunner().invoke(commands.app, ["doctor", "--no-noise"])
    assert isinstance(done.exception, Refusal) and done.output.count("good") == 6
    path = rf"'{tmp_path}/file/harness/doctor-.*\.json'"
    assert re.fullmatch(rf"these figures cannot be written to {path} \(.+\): make room, or .*", str(done.exception))


def timed(monkeypatch, scatter, seed=1):
    """Let processes take a second, but for their scatter."""
    draw = random.Random(seed)
    tasks = []

    def run(task, threads, deadline):
        tasks.append(task)
        return [Record(times=Times(step_seconds=(1 + draw.uniform(-scatter, scatter),) * 2))]

    monkeypatch.setattr(doctor.turns, "run", each(run))
    return tasks


def text_of(noise):
    return report.text(Checkup("now", "m", (), noise, ()))


def test_four_equal_cases_are_timed_in_every_round(monkeypatch):
    tasks = timed(monkeypatch, 0.005)
    noise = doctor.aa_noise(LOADED, 4)
    assert len(tasks) == 16
    labels = [task.case.label for task in tasks]
    assert labels.count("baseline") == labels.count("nothing") == 8
    assert {tuple(sorted(labels[at : at + 4])) for at in range(0, 16, 4)} == {("baseline",) * 2 + ("nothing",) * 2}
    assert len({tuple(labels[at : at + 4]) for at in range(0, 16, 4)}) > 1, "in an order drawn anew"
    assert (noise.rounds, noise.word) == (4, "within 5 %")
    assert noise.low < 1 < noise.high and 0 < noise.scatter < 0.01
    assert "equal within 5 %; rounds drift by" in text_of(noise)


def test_drift_of_rounds_and_scatter_of_steps_are_told_apart(monkeypatch):
    begun = []

    def run(task, threads, deadline):
        begun.append(task)
        level = 1.0 if (len(begun) - 1) // 4 % 2 else 1.2  # every second round is slower
        return [Record(times=Times(step_seconds=tuple(level * (1 + 0.001 * at) for at in range(-10, 11))))]

    monkeypatch.setattr(doctor.turns, "run", each(run))
    noise = doctor.aa_noise(LOADED, 8)
    assert noise.drift > 0.1 and noise.scatter < 0.01
    assert noise.within == pytest.approx(1.4826 * 0.005)


def test_a_noisy_machine_is_too_noisy_to_say(monkeypatch):
    for seed in range(10):
        timed(monkeypatch, 0.4, seed=seed)
        noise = doctor.aa_noise(LOADED)
        assert noise.scatter > 0.1
        assert "open: this machine is too noisy to say" in text_of(noise)


def test_equal_cases_are_rarely_called_different(monkeypatch):
    words = []
    for seed in range(40):
        timed(monkeypatch, 0.05, seed=seed)
        words.append(doctor.aa_noise(LOADED).word)
    assert sum(word in ("slower", "faster") for word in words) <= 4


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("open", "0.85 x (0.63-1.30), open: this machine is too noisy to say"),
        ("at most 5 % slower", "open: this machine"),
        ("at most 5 % faster", "open: this machine"),
        ("slower", "NOT equal, which chance alone shows in 1 of 20 checkups"),
        ("faster", "NOT equal, which chance alone shows in 1 of 20 checkups"),
        ("within 5 %", "equal within 5 %"),
    ],
)
def test_words_follow_the_interval(word, shown):
    text = text_of(Noise(6, 0.85, 0.63, 1.3, word, None))
    assert shown in text and "scatter" not in text


@pytest.mark.parametrize("broken", [Record(status="crash"), Record()])
def test_a_case_that_fails_gives_no_noise(monkeypatch, broken):
    monkeypatch.setattr(doctor.turns, "run", each(lambda *rest: [broken]))
    assert doctor.aa_noise(LOADED) is None


def test_the_scatter_is_kept_for_the_records_of_later_runs(tmp_path):
    checkups.keep(
        Checkup("now", "m", (doctor.Calibration("torch", 64, 65),), Noise(6, 1, 0.9, 1.1, "open", 0.04), ()), tmp_path
    )
    machine = checkups.latest(tmp_path)
    assert (machine["noise_low"], machine["noise_high"], machine["noise_scatter"]) == (0.9, 1.1, 0.04)


@pytest.mark.parametrize(("with_noise", "low"), [(False, 0.9), (True, None)])
def test_a_checkup_without_noise_leaves_that_of_the_one_before(tmp_path, with_noise, low):
    calibrations = (doctor.Calibration("torch", 64, 65),)
    checkups.keep(Checkup("then", "m", calibrations, None, ()), tmp_path, with_noise=False)
    checkups.keep(Checkup("before", "m", calibrations, Noise(6, 1, 0.9, 1.1, "open", 0.04), ()), tmp_path)
    checkups.keep(Checkup("now", "m", calibrations, None, ()), tmp_path, with_noise)
    assert checkups.latest(tmp_path)["noise_low"] == low


def tried(monkeypatch, tmp_path, *words, ends=()):
    """Run the doctor where the processes of some ways end with an error; `ends` are programs that end well."""

    def run(command, **settings):
        way = command[3] if "harness.worker.calibration" in command else "usable"
        good = way in ends
        seen = json.dumps({"seen": checkups.SIZE}) if good else ""
        return subprocess.CompletedProcess(command, int(not good), seen, "" if good else f"Traceback\nError: {way}\n")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(backends, "absent", lambda name, device: "it is absent" if name == "jax" else None)
    monkeypatch.setattr(doctor, "findings", lambda: ())
    monkeypatch.setattr(doctor.subprocess, "run", run)
    done = CliRunner().invoke(commands.app, ["doctor", "--no-noise", *words])
    return done, dict(re.findall(r"^\| (\w.*?) *\| *64\.0 *\|.*\| (.*?) *\|$", done.output, re.MULTILINE))


def test_a_test_of_a_meter_that_fails_ends_with_status_1_and_what_is_absent_does_not(monkeypatch, tmp_path):
    most = {"anonymous", "mapped file", "child", "torch"}
    done, judgements = tried(monkeypatch, tmp_path, ends={*most, "cuda"})
    assert done.exit_code == 0 and judgements["jax"] == "not tried: it is absent", done.output
    done, judgements = tried(monkeypatch, tmp_path, ends={*most - {"anonymous"}, "cuda"})
    assert done.exit_code == 1 and judgements["anonymous"] == "FAILED: Error: anonymous"
    assert checkups.latest(tmp_path / "harness")["calibration_error_bytes"] == 0
    done, judgements = tried(monkeypatch, tmp_path, ends=most)
    assert done.exit_code == 0 and judgements["cuda"] == "not tried: Error: cuda", "a build for the CPU, say"
    done, judgements = tried(monkeypatch, tmp_path, ends={*most, "usable"})
    assert done.exit_code == 1 and judgements["cuda"] == "FAILED: Error: cuda"


def test_noise_that_could_not_be_measured_is_said(monkeypatch, tmp_path):
    said = "\n\nnoise: could not be measured\n\n"
    assert said in text_of(None)
    done, _ = tried(monkeypatch, tmp_path)
    assert "noise" not in done.output, "nobody asked for it"
    monkeypatch.setattr(doctor, "aa_noise", lambda loaded: None)
    monkeypatch.setattr(doctor, "calibrate", lambda way: checkups.Calibration(way, checkups.SIZE, checkups.SIZE))
    assert said in CliRunner().invoke(commands.app, ["doctor"]).output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--place", "torch/cpu"), "--place goes with --limits SUITE"),
        (("-k", "loss"), "-k goes with --limits SUITE"),
        (("--results", "results"), "--results goes with --limits SUITE"),
        (("--limits", "smoke", "--no-noise"), "--no-noise goes without --limits"),
    ],
)
def test_an_option_without_a_use_is_refused(monkeypatch, words, told):
    monkeypatch.setattr(doctor, "calibrate", lambda way: pytest.fail("it began"))
    done = CliRunner().invoke(commands.app, ["doctor", *words])
    assert isinstance(done.exception, Refusal) and str(done.exception).startswith(told)


def test_the_help_names_the_status():
    assert "Ends with status 0; with 1 where" in CliRunner().invoke(commands.app, ["doctor", "--help"]).output


# What would spoil figures


class Ticks(NamedTuple):
    """The time of a processor, of which other machines took a part."""

    user: float
    steal: float


@pytest.mark.parametrize(
    ("check", "seen", "said"),
    [
        ("_load", 2.0, ""),
        ("_load", 2.1, "the load is 2.1 on 4 CPUs, so times will scatter"),
        ("_steal", 10.0, ""),
        ("_steal", 20.0, "other machines took 2.0% of the processor's time since the start"),
        ("_governor", None, ""),
        ("_governor", "performance", ""),
        ("_governor", "powersave", "the frequency governor is 'powersave', so clocks change during a run"),
        ("_huge_pages", "madvise", ""),
        ("_huge_pages", "always", "transparent huge pages are 'always', so sparse writes cost whole 2 MiB pages"),
        ("_swap", (64 << 20) - 1, ""),
        ("_swap", 64 << 20, "64 MiB are swapped out, and swapped pages are not in a peak"),
    ],
)
def test_what_spoils_figures_is_named_where_it_is_so(monkeypatch, check, seen, said):
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (seen, 9.0, 9.0))
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(doctor.psutil, "cpu_times", lambda: Ticks(1000.0 - seen, seen))
    monkeypatch.setattr(doctor.psutil, "swap_memory", lambda: SimpleNamespace(used=seen))
    monkeypatch.setattr(doctor.facts, "facts", lambda: {"governor": seen, "huge_pages": seen})
    function = getattr(doctor, check)
    assert function in doctor.CHECKS
    assert [fault.what for fault in function()] == ([said] if said else [])


@pytest.mark.parametrize(("boost", "shown"), [("1\n", True), ("0\n", False)])
def test_turbo_of_another_driver_is_on_where_it_says_1(monkeypatch, boost, shown):
    def read(path):
        if not str(path).endswith("/cpufreq/boost"):
            raise FileNotFoundError
        return boost

    monkeypatch.setattr(Path, "read_text", read)
    assert bool(doctor._turbo()) is shown


@pytest.mark.parametrize(("libc", "shown"), [("glibc 2.39", False), ("musl 1.2", True), ("", True)])
def test_an_allocator_that_is_set_or_cannot_be_pinned_is_named(monkeypatch, libc, shown):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    monkeypatch.setattr(doctor.facts, "facts", lambda: {"libc": libc})
    faults = [fault.what for fault in doctor._allocator()]
    assert "MALLOC_ARENA_MAX is set here; workers do not inherit it" in faults
    assert ("the C library is not glibc, so its allocator cannot be pinned" in faults) is shown


def test_a_peak_that_cannot_be_reset_is_named(monkeypatch):
    def refuse():
        raise PermissionError

    monkeypatch.setattr(doctor.memory, "reset_peak", refuse)
    (fault,) = doctor._peak_reset()
    assert fault.what == "/proc/self/clear_refs cannot be written, so no host peak can be measured"


@pytest.mark.parametrize(("off", "good"), [(671_088, True), (-671_088, True), (671_089, False), (-671_089, False)])
def test_a_meter_is_good_within_a_hundredth_of_64_mib_on_either_side(off, good):
    assert checkups.Calibration("torch", 64 << 20, (64 << 20) + off).good is good


def test_the_largest_error_of_a_meter_is_kept_with_its_sign(tmp_path):
    seen = {"torch": 65, "jax": 59, "cuda": None}
    calibrations = tuple(checkups.Calibration(way, 64, size) for way, size in seen.items())
    checkups.keep(Checkup("now", "m", calibrations, None, ()), tmp_path)
    assert checkups.latest(tmp_path)["calibration_error_bytes"] == -5


@pytest.mark.parametrize(
    ("compiler", "headers", "lacking"), [(None, True, "C compiler"), ("/bin/cc", False, "Python.h")]
)
def test_what_triton_needs_to_build_kernels_is_looked_for(monkeypatch, tmp_path, compiler, headers, lacking):
    monkeypatch.setattr(doctor.backends, "absent", lambda *place: None)
    monkeypatch.setattr(doctor.gpu, "visible", lambda: True)
    monkeypatch.setattr(doctor.gpu, "detect", lambda: Gpu("NVIDIA L4", 20 << 30, 20 << 30, "580.1"))
    monkeypatch.setattr(doctor.gpu, "state", lambda: None)
    monkeypatch.setattr(doctor, "which", lambda name: compiler)
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    if headers:
        (tmp_path / "Python.h").touch()
    (fault,) = (each for each in doctor._gpu() if "Triton" in each.what)
    assert fault.what.startswith(f"no {lacking} is here")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(doctor, "which", lambda name: "/bin/cc")
    assert not any("Triton" in each.what for each in doctor._gpu())
