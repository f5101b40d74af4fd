"""What a run consists of: what identifies it, which rows cannot be, and why."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness import Strategy
from harness.contract import plugins
from harness.machine import history
from harness.machine.gpu import Gpu
from harness.records import Applied, Case, Origin, Record, Slot, store
from harness.run import schedule as schedules
from harness.run.bench import Options
from harness.run.schedule import Schedule, Summary, conflict, obstacle
from harness.run.session import opened
from harness.suite.reader import read

LOADED = plugins.load()


def strategy(name: str, **conflicts: str) -> Strategy:
    return Strategy(
        name, rewrites=(), on={}, about="About.", conflicts={key.replace("_", " "): conflicts[key] for key in conflicts}
    )


def case_of(*names: str, **sizes: int) -> Case:
    """A case of the decoder."""
    return Case(
        workload="decoder",
        shape={"tokens": 64, **sizes},
        place="torch/cpu",
        corpus="zipf",
        tokenizer="bytes",
        strategies=tuple(Applied(name=name) for name in names),
    )


def says(reason: str | None, word: str | None) -> bool:
    """Check that a reason has a word; without a word that there is no reason."""
    return reason is None if word is None else reason is not None and word in reason


@pytest.mark.parametrize("turned", [False, True])
def test_strategies_that_do_not_go_together_are_refused_in_either_order(turned: bool) -> None:
    pair = [strategy("one", other="it is so"), strategy("other")]
    said = conflict(pair[::-1] if turned else pair)
    assert said == "'one' does not go together with 'other': it is so"
    assert conflict([pair[0], strategy("third")]) is None
    assert conflict([pair[0], pair[0]]) is None


def test_an_order_is_refused_and_the_other_is_not() -> None:
    one, other = strategy("one", before_other="name it after"), strategy("other")
    assert conflict([one, strategy("third"), other]) == "'one' does not go before 'other': name it after"
    assert conflict([other, one]) is None


def test_every_conflict_is_with_a_strategy_that_there_is() -> None:
    named = [(one.name, key.removeprefix("before ")) for one in LOADED.strategies.values() for key in one.conflicts]
    assert ("clip_gradients", "accumulate") in named
    assert [pair for pair in named if pair[1] not in LOADED.strategies or pair[0] == pair[1]] == []


@pytest.mark.parametrize("name", ["loss_only_evaluation", "streamed_save", "streamed_resume"])
def test_what_is_for_the_end_of_a_run_has_nothing_to_do_where_it_ends_with_its_steps(name: str) -> None:
    assert "give `evaluations` in the shape, or --evaluations" in (obstacle(LOADED, case_of(name, evaluations=0)) or "")
    assert obstacle(LOADED, case_of(name, evaluations=2)) is None
    assert obstacle(LOADED, case_of("fused_loss", evaluations=0)) is None


@pytest.mark.parametrize(
    ("names", "word"),
    [
        (("clip_gradients", "float16_scaled"), "while they are scaled"),
        (("document_windows", "streaming"), "out of the plain text"),
        (("exact_resume", "prefetch_thread"), "made ahead as trained on"),
        (("float16_scaled", "float16_master"), "each decides the type"),
        (("float32_master", "float16_autocast"), "each decides the type"),
        (("vocabulary_parallel_loss", "chunked_backward_loss"), "no target of its own"),
        (("native_sparse_attention", "ulysses"), "heads that choose blocks together"),
        (("int8_activations", "float8_matmul"), "nothing is rounded"),
        (("streaming", "prefetch_process"), "share arrays"),
        (("sparse_embedding_gradient", "fsdp"), "no rows to read"),
        (("sequence_windows", "automatic_windows"), "windows out of windows"),
        (("fsdp", "clip_gradients"), "each rank"),
        (("muon", "fsdp"), "whole matrices"),
        (("zero1", "lion"), "moments of AdamW"),
        (("tied", "vocabulary_parallel_loss"), "`tied: true`"),
        (("lora", "float32_master"), "name bfloat16 before"),
        (("fsdp", "float16_scaled"), "alone whether"),
        (("badam", "sparse_embedding_gradient"), "which block's turn"),
        (("lomo", "badam"), "which block's turn"),
        (("badam", "foreach_adamw"), "knows no blocks"),
        (("sequence_windows", "ring_attention"), "a stretch of every row"),
        (("ulysses", "document_loss"), "last token of that"),
        (("fsdp", "offload_activations"), "made whole"),
        (("clip_gradients", "update_in_backward"), "use clip_in_backward"),
        (("lomo", "clip_gradients"), "use clip_in_backward"),
        (("accumulate", "sparse_embedding_gradient"), "not of its pieces"),
        (("int8_activations", "feed_checkpoint"), "without rounding"),
        (("tiled_feed", "int8_activations"), "without rounding"),
        (("int8_activations", "recomputed_activation"), "without rounding"),
        (("document_loss", "chunked_backward_loss"), "last token of each chunk"),
        (("document_loss", "drop_ignored"), "last token alone"),
        (("soap", "bfloat16"), "no form in 16 bits"),
        (("vocabulary_parallel_loss", "drop_ignored"), "all must have as many"),
        (("bfloat16", "qlora", "float16_scaled"), "each decides the type"),
        (("float16_autocast", "bfloat16"), "each decides the type"),
        (("bfloat16_autocast", "float16_autocast"), "each decides the type"),
        *((("tensor_parallel", rule), "columns or rows") for rule in ("muon", "galore", "adafactor", "adam_mini")),
        *((("megatron_sequence_parallel", rule), "columns or rows") for rule in ("apollo", "soap")),
        (("float16_scaled", "clip_gradients"), None),
        (("prefetch_thread", "exact_resume"), None),
        (("accumulate", "clip_gradients"), None),
        (("lora", "bfloat16_autocast"), None),
        (("adam_8bit", "fsdp"), None),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else "",
)
def test_what_would_be_wrong_without_a_word_is_a_row_that_says_why(names: tuple[str, ...], word: "str | None") -> None:
    assert says(obstacle(LOADED, case_of(*names)), word)


@pytest.mark.parametrize(
    ("names", "word"),
    [
        (("fsdp", "packed"), "all be one rank's"),
        (("packed", "vocabulary_parallel_loss"), "without their positions"),
        (("mapped", "int8_rows"), "leaves them in their file"),
        (("int8_rows", "automatic"), "name it after"),
        (("longest_first", "bucketed_lengths"), "name it after"),
        (("automatic", "int8_rows"), None),
        (("streaming_vocabulary", "document_windows"), "cut at another word"),
        (("compiled_block", "int8_activations"), "name it after int8_activations"),
        (("int8_activations", "compiled_budget"), None),
        (("bucketed_lengths", "longest_first"), None),
        (("peft_lora", "qlora"), "adapts the same layers"),
        (("clip_gradients", "truncated_bptt"), "each stretch alone"),
        (("truncated_bptt", "clip_gradients"), None),
        (("packed", "checkpoint"), None),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else "",
)
def test_strategies_that_would_undo_each_other_are_refused_on_any_workload(
    names: tuple[str, ...], word: "str | None"
) -> None:
    assert says(conflict([LOADED.strategies[name] for name in names]), word)


# What identifies a run

PLUGIN = """
from harness import Strategy, hookimpl


def same(parts):
    return parts


@hookimpl
def harness_strategies():
    return [Strategy("same", ("loss",), {"torch": same}, "Change nothing; keep all.")]
"""


@pytest.fixture
def suite(smallest: str, tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(smallest)
    return path


def schedule_of(suite: Path, *names: Path) -> Schedule:
    """Return what a new run of a suite consists of."""
    loaded = plugins.load(tuple(map(str, names)))
    return Schedule(read(suite, loaded), loaded, 2)


@pytest.mark.parametrize("changed", [{"memory_steps": 4}, {"steps": 3}, {"warmup": 2}], ids=str)
def test_other_settings_make_another_run(suite: Path, changed: dict[str, int]) -> None:
    schedule = schedule_of(suite)
    assert schedule_of(suite).plan_digest == schedule.plan_digest
    other = replace(schedule.plan, suite=schedule.plan.suite.model_copy(update=changed))
    assert Schedule(other, schedule.plugins, 2).plan_digest != schedule.plan_digest
    titled = replace(schedule.plan, suite=schedule.plan.suite.model_copy(update={"title": "another"}))
    assert Schedule(titled, schedule.plugins, 2).plan_digest == schedule.plan_digest, "it decides no figure"


def test_what_an_edited_plugin_file_measured_is_measured_anew(suite: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(PLUGIN)
    suite.write_text(suite.read_text().replace("[checkpoint]", "[same]"))
    before = schedule_of(suite, plugin)
    begun = tmp_path / "20260101T000000Z-a.jsonl"
    store.append(begun, Record(origin=Origin(plan=before.plan_digest)))
    once = Options(tmp_path, once=True)
    assert opened(tmp_path, schedule_of(suite, plugin), once, lambda latest, records: False)[0] == begun
    plugin.write_text(PLUGIN.replace("return parts", "return parts  # another"))
    assert opened(tmp_path, schedule_of(suite, plugin), once, lambda latest, records: True)[0] != begun


def test_another_text_makes_another_run(suite: Path, tmp_path: Path) -> None:
    text = tmp_path / "words.txt"
    text.write_text("words " * 1000)
    suite.write_text(suite.read_text().replace("corpus: zipf", "corpus: words.txt"))
    before = schedule_of(suite).plan_digest
    assert schedule_of(suite).plan_digest == before
    text.write_text("other " * 1000)
    assert schedule_of(suite).plan_digest != before


def test_other_threads_make_another_run_unless_they_are_of_no_machine_that_measures(
    suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = schedule_of(suite)
    elsewhere = replace(schedule, elsewhere=True)
    assert schedule.plan_digest and elsewhere.plan_digest
    monkeypatch.setattr(schedules.facts, "threads", lambda: 99)
    assert replace(schedule).plan_digest != schedule.plan_digest
    assert replace(elsewhere).plan_digest == elsewhere.plan_digest


def test_another_gpu_makes_another_run(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = schedule_of(suite)

    def on(names: list[str], card: str) -> str:
        monkeypatch.setattr(schedules.locks, "gpus", lambda places: names)
        monkeypatch.setattr(schedules.gpu, "detect", lambda: Gpu(card, 8 << 30, 8 << 30, "580.1"))
        return replace(schedule).plan_digest

    seen = [on(["GPU-a"], "NVIDIA L4"), on(["GPU-b"], "NVIDIA L4"), on(["GPU-a"], "NVIDIA T4"), on([], "NVIDIA L4")]
    assert len(set(seen)) == 4 and on(["GPU-a"], "NVIDIA L4") == seen[0]
    assert on([], "NVIDIA T4") == seen[3] == schedule.plan_digest, "where nothing runs on a GPU it is not asked"


def test_another_version_of_a_package_that_is_called_makes_another_run(
    suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = schedule_of(suite).plan_digest
    versions = schedules.facts.versions()
    monkeypatch.setattr(schedules.facts, "versions", lambda: {**versions, "transformers": "0.1"})
    assert schedule_of(suite).plan_digest != before


def test_what_is_resumed_is_known_by_the_code_and_not_by_the_commit(
    suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = schedule_of(suite)
    monkeypatch.setattr(schedules.facts, "commit", lambda: "123456789abc-dirty")
    committed = schedule_of(suite)
    assert committed.plan_digest == before.plan_digest and list(committed.slots()) == list(before.slots())
    known = history.digests
    monkeypatch.setattr(history, "digests", lambda files: {**known(files), "harness/worker/new.py": ""})
    edited = schedule_of(suite)
    assert edited.plan_digest != before.plan_digest and not set(edited.slots()) & set(before.slots())


def test_what_identifies_a_run_is_the_same_in_another_process(suite: Path, tmp_path: Path) -> None:
    plugin, text = tmp_path / "mine.py", tmp_path / "words.txt"
    plugin.write_text(PLUGIN)
    text.write_text("words " * 1000)
    suite.write_text(suite.read_text().replace("corpus: zipf", "corpus: words.txt"))
    program = (
        "import sys; from pathlib import Path; from harness.contract import plugins\n"
        "from harness.run.schedule import Schedule; from harness.suite.reader import read\n"
        "loaded = plugins.load((sys.argv[2],)); print(Schedule(read(Path(sys.argv[1]), loaded), loaded, 2).plan_digest)"
    )
    command = [sys.executable, "-c", program, str(suite), str(plugin)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert done.stdout.strip() == schedule_of(suite, plugin).plan_digest, done.stderr


# What wants a result


def test_that_a_row_cannot_run_is_a_result_as_long_as_it_cannot(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.write_text(suite.read_text().replace("[checkpoint]", "[checkpoint, jax_vmap]"))
    schedule = schedule_of(suite)
    case = schedule.plan.cases[-1]
    slots = list(schedule.slots())
    own = [slot for slot in slots if slot.case in (schedule.digest(case), schedule.probe_digest(case))]
    latest = {slot: Summary("unsupported" if slot in own else "ok", seconds=1.0) for slot in slots}
    assert schedule.due(latest) == []
    others = {slot: Summary("unsupported", seconds=1.0) for slot in slots}
    assert {slot.kind for slot in schedule.due(others)} >= {"numerics", "memory"}, "a worker said so: it may not again"
    monkeypatch.setattr(schedules, "obstacle", lambda plugins, case: None)
    again = Schedule(schedule.plan, schedule.plugins, 2)
    assert {slot.kind for slot in again.due(latest)} == {"predict", "numerics", "memory"}, "it is installed by now"


def test_results_that_are_there_are_those_of_the_plan_that_are_not_due(suite: Path) -> None:
    schedule = schedule_of(suite)
    slots = list(schedule.slots())
    case = schedule.plan.cases[0]
    beside = [
        Slot(case=schedule.digest(case), kind="pilot"),
        Slot(case=schedule.digest(case), kind="memory", repeat=1),
        Slot(case=schedule.digest(case), kind="time", block=1),
    ]
    whole = {slot: Summary("ok", run_id="1", seconds=1.0) for slot in (*slots, *beside)}
    assert schedule.there(whole) == len(slots)
    killed = {**whole, slots[-1]: Summary("killed_unknown", run_id="1")}
    assert schedule.there(killed) + len(schedule.due(killed)) == len(slots)
    assert schedule.there({}) == 0 and schedule.there(dict.fromkeys(beside, Summary("ok"))) == 0


@pytest.mark.parametrize(
    ("kind", "seconds", "again"),
    [
        ("memory", 100.0, True),
        ("memory", 900.0, False),
        ("time", 899.9, True),
        ("numerics", 901.0, False),
        ("pilot", 0.0, False),
        ("predict", 100.0, True),
        ("predict", 300.0, False),
    ],
)
def test_who_was_out_of_time_is_tried_again_once_there_is_more(
    suite: Path, kind: str, seconds: float, again: bool
) -> None:
    suite.write_text(suite.read_text() + "timeout_seconds: 900\n")
    schedule = schedule_of(suite)
    slot = Slot(case=schedule.digest(schedule.plan.cases[0]), kind=kind)
    assert schedule.wants(slot, Summary("timeout", worker_seconds=seconds)) is again


def test_a_round_in_which_a_member_was_out_of_time_is_timed_again_once_there_is_more(suite: Path) -> None:
    schedule = schedule_of(suite)
    slots = list(schedule.slots())
    latest = {slot: Summary("ok", seconds=1.0) for slot in slots}
    latest[slots[-1]] = Summary("timeout", worker_seconds=601.0)
    assert schedule.due(latest) == []
    latest[slots[-1]] = Summary("timeout", worker_seconds=60.0)
    assert {slot.round for slot in schedule.due(latest)} == {slots[-1].round}
