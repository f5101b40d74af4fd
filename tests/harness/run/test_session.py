"""A whole run with workers that are made up: who is timed how often, what an interruption costs, what a record says."""

import random
import threading
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from harness.contract import plugins
from harness.contract.place import Place
from harness.machine.history import Roles
from harness.records import Case, Memory, Origin, Prediction, Record, Slot, Times, store
from harness.records.record import Verdict, heading_of
from harness.records.roofline import Operations
from harness.run import bench, guards, predict_again, predictions, rounds, runner, session, turns
from harness.run import schedule as schedules
from harness.run.bench import Options, Progress
from harness.run.pacing import UNKNOWN, Pacing
from harness.run.schedule import Summary
from harness.run.session import Session, schedule_of
from harness.run.turns import TURNS
from harness.suite.reader import read
from harness.verdicts.judge import judge
from harness.verdicts.looks import LOOKS

LOADED = plugins.load()
MIB = 1 << 20
RATIOS = {"checkpoint": 1.4, "chunked_loss": 1.03}
EXACT = Verdict("bit_exact", 1.0, None, None, None, (), "equal")


class Workers:
    """Workers that answer at once; times scatter by chance, the same for the same process of any run."""

    def __init__(self, scatter=0.05, lives=1.0):
        self.scatter, self.lives = scatter, lives
        self.kinds, self.timed = Counter(), []
        self.stop_after = None

    def __call__(self, task, threads, deadline, watch):
        label = task.case.label
        self.kinds[task.kind] += 1
        if task.kind == "time":
            if len(self.timed) == self.stop_after:
                raise KeyboardInterrupt
            self.timed.append(label)
        draw = random.Random(f"{label}/{sum(name == label for name in self.timed)}")
        step = RATIOS.get(label, 1.0) * (1 + draw.uniform(-self.scatter, self.scatter))
        record = {
            "numerics": Record(numerics=EXACT),
            "memory": Record(memory=Memory(peak_host_bytes=self.peak(label), losses=(6.0, 5.9, 5.8))),
            "pilot": Record(times=Times(step_seconds=(0.2,) * 12)),
            "time": Record(times=Times(step_seconds=(step, step), warmup_steps=1)),
        }.get(task.kind, Record())
        return [record.model_copy(update={"origin": record.origin.model_copy(update={"worker_seconds": self.lives})})]

    def peak(self, label):
        return 50 * MIB if label == "checkpoint" else 100 * MIB


@pytest.fixture
def measuring(smallest, tmp_path, monkeypatch):
    """Return a function that goes on with a run: the same records, another run."""
    path = tmp_path / "mine.yaml"
    monkeypatch.setattr(rounds.interference, "disturbances", lambda before, after: ())
    monkeypatch.setattr(
        predictions,
        "of_cases",
        lambda cases, *rest, **options: (
            (case, Record(prediction=Prediction(predicted_peak_bytes=MIB, floor_bytes=MIB))) for case in cases
        ),
    )
    records = []

    def in_turns(tasks, threads, deadline, watch, order, starting):
        begin.blocks.append([(task.case.label, task.turns) for task in tasks])
        return [runner.run(task, threads, deadline, watch)[0] for task in tasks]

    def begin(workers, keys="rounds: 24", strategies="checkpoint, chunked_loss, fused_loss", place="torch/cpu"):
        text = smallest.replace("[checkpoint]", f"[{strategies}]").replace("torch/cpu", place)
        text += f"warmup: 1\nsteps: 2\n{keys}\n"
        path.write_text(text)
        monkeypatch.setattr(runner, "run", workers)
        monkeypatch.setattr(turns, "run", in_turns)
        plan = read(path, LOADED)
        options = Options(tmp_path, cache=tmp_path)
        schedule = schedule_of(plan, LOADED, options)
        latest = {record.slot: Summary.of(record) for record in records if record.slot is not None}
        run_id = str(len({record.origin.run_id for record in records if record.slot is not None}) + 1)
        records.append(session.beginning(schedule, run_id))
        return Session(schedule, options, Progress(), run_id, tmp_path, {}, latest, records.append)

    begin.records, begin.blocks = records, []
    return begin


class Heard(Progress):
    """What a watcher heard of the beginning of runs: the slots due, the results there, and the seconds for rounds."""

    def __init__(self):
        self.begun, self.seconds = [], []

    def groups(self, groups, seconds):
        self.seconds.append(list(seconds))

    def begin(self, slots, done):
        self.begun.append((len(slots), done))


@pytest.fixture
def running(measuring, tmp_path, monkeypatch):
    """Return a function that runs a suite from its file to its results, with workers that are made up."""
    monkeypatch.setattr(session.prepare_data, "prepare", lambda plan, *rest: (plan, {}))
    monkeypatch.setattr(session.orphans, "sweep", lambda: None)

    def run(workers, keys="rounds: 1", strategies="checkpoint", heard=None, **options):
        plan = measuring(workers, keys, strategies).plan
        return session.run(plan, LOADED, Options(tmp_path, cache=tmp_path, **options), heard or Progress())

    return run


def rounds_by_row(records):
    """Return the rounds in which each row was timed, in order, once for each process."""
    rounds = {}
    for record in records:
        if record.slot is not None and record.slot.kind == "time":
            rounds.setdefault(record.case.label, []).append(record.slot.round)
    return rounds


def test_rows_leave_as_they_are_decided_and_the_group_stops_at_a_look(measuring):
    workers = Workers()
    measuring(workers).measure()
    rounds = rounds_by_row(measuring.records)
    assert rounds["checkpoint"] == [0, 1, 2, 3], "40 % are clear at the first look"
    last = len(rounds["baseline"])
    assert 4 < last <= 24 and last in LOOKS
    assert rounds["baseline"] == rounds["nothing"] == list(range(last))
    assert max(len(rounds["chunked_loss"]), len(rounds["fused_loss"])) == last
    (table,) = judge(measuring.records)
    row = next(row for row in table.rows if row.label == "checkpoint")
    assert (row.verdict, row.speed.word, row.speed.rounds) == ("trades", "slower", 4)


def test_a_quiet_machine_needs_four_rounds(measuring):
    workers = Workers(scatter=0.005)
    measuring(workers).measure()
    assert {len(rounds) for rounds in rounds_by_row(measuring.records).values()} == {4}
    (table,) = judge(measuring.records)
    assert {row.speed.word for row in table.rows[2:]} == {"slower", "within 5 %"}


def test_a_finished_run_measures_nothing_twice(measuring):
    measuring(Workers()).measure()
    again = Workers()
    going_on = measuring(again)
    assert going_on.schedule.due(going_on.latest) == []
    going_on.measure()
    assert again.kinds == Counter()


@pytest.mark.parametrize("stop_after", [2, 7, 15, 22])
def test_an_interruption_in_mid_round_costs_that_round_and_nothing_else(measuring, stop_after):
    interrupted = Workers()
    interrupted.stop_after = stop_after
    with pytest.raises(KeyboardInterrupt):
        measuring(interrupted).measure()
    before = judge(measuring.records)
    assert all(row.speed is None or row.speed.rounds <= max(1, stop_after // 5) for row in before[0].rows)
    resumed = Workers()
    going_on = measuring(resumed)
    assert not {slot for slot in going_on.schedule.due(going_on.latest) if slot.kind != "time"}
    going_on.measure()
    assert set(resumed.kinds) == {"time"}, "answers and memory are known"
    rounds = rounds_by_row(measuring.records)
    whole = stop_after // 5
    counts = Counter(number for each in rounds.values() for number in each)
    if stop_after < 20:
        assert all(counts[number] == 5 for number in range(whole))
        assert counts[whole] == 5, "what took turns with others is of no use without them"
    assert all(count == 1 for count in Counter(rounds["baseline"]).values() if count != 2)
    runs = {record.slot.round: record.origin.run_id for record in measuring.records if _is_time(record)}
    assert set(runs.values()) == ({"1", "2"} if whole else {"2"})
    (table,) = judge(measuring.records)
    assert next(row for row in table.rows if row.label == "checkpoint").speed.rounds == 4


def _is_time(record):
    return record.slot is not None and record.slot.kind == "time"


def test_long_rounds_are_cut_into_blocks_with_the_baseline_in_each(measuring):
    measuring(Workers(scatter=0.005, lives=8.0), strategies="checkpoint, chunked_loss, fused_loss, bfloat16").measure()
    blocks = {}
    for record in measuring.records:
        if _is_time(record):
            blocks.setdefault((record.slot.round, record.slot.block), []).append(record.case.label)
    assert len(blocks) > 4
    assert all("baseline" in members for members in blocks.values())
    assert all(len(members) == len(set(members)) >= 3 for members in blocks.values())
    (table,) = judge(measuring.records)
    assert next(row for row in table.rows if row.label == "checkpoint").speed.word == "slower"


def test_the_members_of_a_block_take_turns(measuring):
    measuring(Workers(scatter=0.005), "rounds: 2").measure()
    block, _ = measuring.blocks
    assert sorted(block) == [
        (label, TURNS) for label in ("baseline", "checkpoint", "chunked_loss", "fused_loss", "nothing")
    ]


def test_what_shares_the_cache_of_files_is_timed_when_no_other_process_is_there(measuring):
    measuring(Workers(scatter=0.005), "rounds: 2", "checkpoint, mapped: {cold: [true, false]}").measure()
    together, alone, *_ = measuring.blocks
    assert alone == [("mapped(cold=true)", 1)]
    assert sorted(together) == [(label, TURNS) for label in ("baseline", "checkpoint", "mapped(cold=false)", "nothing")]


def test_processes_that_would_fill_the_memory_together_are_timed_one_after_the_other(measuring, monkeypatch):
    monkeypatch.setattr(rounds.facts, "free_to_use", lambda: 2 * (rounds.OF_A_PROCESS + 100 * MIB))
    measuring(Workers(scatter=0.005), "rounds: 1").measure()
    assert {len(block) for block in measuring.blocks} == {1}
    assert {turns for block in measuring.blocks for _, turns in block} == {1}


def test_a_block_has_as_many_members_as_the_memory_has_room_for(measuring, monkeypatch):
    monkeypatch.setattr(rounds.facts, "free_to_use", lambda: 4 * (rounds.OF_A_PROCESS + 100 * MIB) - 1)
    measuring(Workers(scatter=0.005), "rounds: 2").measure()
    assert list(map(len, measuring.blocks)) == [3] * 4


def test_a_large_process_takes_turns_where_it_fits_beside_two_others(measuring, monkeypatch):
    class Large(Workers):
        def peak(self, label):
            return 1000 * MIB if label == "chunked_loss" else 100 * MIB

    three = (1000 + 2 * 100) * MIB + 3 * rounds.OF_A_PROCESS
    for free, turns_of in ((three, TURNS), (three - 1, 1)):
        monkeypatch.setattr(rounds.facts, "free_to_use", lambda free=free: free)
        measuring.blocks.clear()
        measuring.records.clear()
        measuring(Large(scatter=0.005), "rounds: 2").measure()
        large = [dict(block) for block in measuring.blocks if "chunked_loss" in dict(block)]
        assert [(block["chunked_loss"], len(block)) for block in large] == 2 * [(turns_of, 3 if turns_of > 1 else 1)]


def test_who_has_no_room_in_a_block_is_no_baseline(measuring, monkeypatch):
    class Large(Workers):
        def peak(self, label):
            return {"baseline": 400, "nothing": 400, "checkpoint": 300}.get(label, 100) * MIB

    monkeypatch.setattr(rounds.facts, "free_to_use", lambda: 900 * MIB + 3 * rounds.OF_A_PROCESS)
    measuring(Large(scatter=0.005), "rounds: 2", "checkpoint, chunked_loss").measure()
    in_turns = [{label for label, turns_of in block if turns_of > 1} for block in measuring.blocks]
    assert all({"baseline", "nothing"} <= block for block in in_turns if block)
    assert any(in_turns)


def test_baseline_and_control_are_timed_alike_where_one_of_them_has_no_room(measuring, monkeypatch):
    class Large(Workers):
        def peak(self, label):
            return 700 * MIB if label == "nothing" else 100 * MIB

    monkeypatch.setattr(rounds.facts, "free_to_use", lambda: 600 * MIB + 3 * rounds.OF_A_PROCESS)
    measuring(Large(scatter=0.005), "rounds: 2").measure()
    turns_of = {label: turns for block in measuring.blocks for label, turns in block}
    assert turns_of == {"baseline": 1, "nothing": 1, "checkpoint": TURNS, "chunked_loss": TURNS, "fused_loss": TURNS}


@pytest.mark.parametrize(
    ("place", "ranks", "turns"),
    [("torch/cpu", 1, True), ("torch/cpu", 2, False), ("jax/cpu", 2, True), ("torch/cuda", 1, False)],
)
def test_ranks_that_are_processes_and_gpus_are_not_stopped(measuring, place, ranks, turns):
    going_on = measuring(Workers())
    case = going_on.plan.cases[0].model_copy(update={"place": Place(*place.split("/")), "ranks": ranks})
    assert going_on.rounds.takes_turns(case) is turns


def test_time_that_is_spent_ends_it_after_the_round(measuring):
    measuring(Workers(scatter=0.2, lives=20.0), keys="rounds: 24\ntiming_minutes: 8").measure()
    assert judge(measuring.records)[0].rows[3].speed.word == "open"
    rounds = rounds_by_row(measuring.records)
    assert set(rounds["chunked_loss"]) == set(rounds["nothing"]) == set(rounds["baseline"]), "each round is whole"
    processes = Counter(number for each in rounds.values() for number in each)
    last = processes.pop(max(processes))
    assert 20.0 * processes.total() <= 8 * 60 < 20.0 * (processes.total() + last)


def test_a_process_that_was_disturbed_is_run_again_once_and_both_are_written(measuring, monkeypatch):
    monkeypatch.setattr(rounds.Rounds, "takes_turns", lambda self, case: False)
    first = iter([("stolen",), ()] * 100)
    monkeypatch.setattr(rounds.interference, "disturbances", lambda before, after: next(first))
    measuring(Workers(scatter=0.005), keys="rounds: 1").measure()
    flags = {}
    for record in filter(_is_time, measuring.records):
        flags.setdefault(record.slot, []).append("stolen" in record.flags)
    assert len(flags) == 4 and all(each == [True, False] for each in flags.values())


def test_a_disturbed_process_that_fails_when_it_is_run_again_keeps_its_figures(measuring, monkeypatch):
    class Failing(Workers):
        def __call__(self, task, *rest):
            (record,) = super().__call__(task, *rest)
            again = task.kind == "time" and len(self.timed) % 2 == 0
            return [Record(status="timeout") if again else record]

    monkeypatch.setattr(rounds.Rounds, "takes_turns", lambda self, case: False)
    first = iter([("stolen",), ()] * 100)
    monkeypatch.setattr(rounds.interference, "disturbances", lambda before, after: next(first))
    measuring(Failing(scatter=0.005), keys="rounds: 1").measure()
    statuses = Counter(record.status for record in filter(_is_time, measuring.records))
    assert statuses == {"ok": 4, "timeout": 4}, "both are written"
    assert all(row.status == "ok" and row.step_seconds for row in judge(measuring.records)[0].rows)


def test_what_disturbs_a_block_is_marked_and_not_run_again_since_it_met_all_alike(measuring, monkeypatch):
    monkeypatch.setattr(rounds.interference, "disturbances", lambda before, after: ("stolen",))
    measuring(Workers(scatter=0.005), keys="rounds: 2").measure()
    timed = [record for record in measuring.records if _is_time(record)]
    assert len(timed) == 10
    assert all("stolen" in record.flags for record in timed)


def test_on_a_machine_that_is_always_disturbed_processes_are_not_run_again_for_ever(measuring, monkeypatch):
    monkeypatch.setattr(rounds.Rounds, "takes_turns", lambda self, case: False)
    monkeypatch.setattr(rounds.interference, "disturbances", lambda before, after: ("crowded",))
    measuring(Workers(scatter=0.005), keys="rounds: 3").measure()
    timed = [record for record in measuring.records if _is_time(record)]
    counts = Counter(record.slot for record in timed)
    assert sorted(counts.values()) == [1] * 11 + [2] * 4
    assert all("crowded" in record.flags for record in timed)
    assert all("crowded" in row.flags for row in judge(measuring.records)[0].rows)


def test_a_member_that_fails_in_time_leaves_the_others_their_rounds(measuring):
    class Failing(Workers):
        def __call__(self, task, *rest):
            (record,) = super().__call__(task, *rest)
            fails = task.kind == "time" and task.case.label == "fused_loss"
            return [Record(status="timeout")] if fails else [record]

    measuring(Failing(scatter=0.005)).measure()
    rounds = rounds_by_row(measuring.records)
    assert rounds["fused_loss"] == rounds["checkpoint"] == [0, 1, 2, 3]
    (table,) = judge(measuring.records)
    row = next(row for row in table.rows if row.label == "fused_loss")
    assert (row.speed, row.verdict) == (None, "same memory")


def test_peaks_near_the_bound_are_measured_three_times(measuring):
    class Near(Workers):
        def peak(self, label):
            return {"chunked_loss": 97 * MIB + MIB // 2, "checkpoint": 50 * MIB}.get(label, 100 * MIB)

    measuring(Near(scatter=0.005)).measure()
    repeats = Counter(r.case.label for r in measuring.records if r.slot is not None and r.slot.kind == "memory")
    assert repeats == {"baseline": 3, "nothing": 1, "chunked_loss": 3, "checkpoint": 1, "fused_loss": 1}


@pytest.mark.parametrize(
    ("resolution", "equal", "again"),
    [
        (8, 0, {"baseline": 3, "chunked_loss": 3, "nothing": 1, "checkpoint": 1, "fused_loss": 1}),
        (0, 4, {"baseline": 3, "chunked_loss": 3, "nothing": 1, "checkpoint": 1, "fused_loss": 1}),
        (0, 0, {"baseline": 1, "chunked_loss": 1, "nothing": 1, "checkpoint": 1, "fused_loss": 1}),
    ],
    ids=["what the meter resolves", "what the control differs by", "2 % of the baseline"],
)
def test_near_the_bound_of_a_word_is_near_to_that_which_the_verdict_goes_by(measuring, resolution, equal, again):
    class Near(Workers):
        def __call__(self, task, *rest):
            (record,) = super().__call__(task, *rest)
            memory = record.memory.model_copy(update={"resolution_bytes": resolution * MIB})
            return [record.model_copy(update={"memory": memory}) if task.kind == "memory" else record]

        def peak(self, label):
            return {"chunked_loss": 91, "checkpoint": 50, "nothing": 100 + equal}.get(label, 100) * MIB

    measuring(Near(scatter=0.005)).measure()
    assert Counter(r.case.label for r in measuring.records if r.slot and r.slot.kind == "memory") == again


@pytest.mark.parametrize("once", [False, True])
def test_a_run_that_stopped_while_memory_was_measured_again_goes_on_there(running, tmp_path, monkeypatch, once):
    class Stopped(Workers):
        def __call__(self, task, *rest):
            if task.kind == "memory" and self.kinds["memory"] == 3:  # two rows, and one of them again
                raise KeyboardInterrupt
            return super().__call__(task, *rest)

        def peak(self, label):
            return 97 * MIB if label == "checkpoint" else 100 * MIB

    claim = "{id: near, says: near, that: peak(checkpoint) <= 0.97 * peak(baseline)}"
    keys = f"rounds: 0\nclaims: [{claim}]"
    with pytest.raises(KeyboardInterrupt):
        running(Stopped(), keys)
    (path,) = tmp_path.glob("mine/*/*.jsonl")
    monkeypatch.setattr(predict_again.history, "since", lambda *rest: Roles((), (), ()))
    plan, options = read(tmp_path / "mine.yaml", LOADED), Options(tmp_path, cache=tmp_path, once=once)
    assert predict_again.run(plan, LOADED, options, Progress()) is None, "something is left to measure"
    resumed = Workers()
    assert running(resumed, keys, once=once) == path
    assert resumed.kinds == {"memory": 3}, "of two repetitions of two rows one was there"
    assert predict_again.run(plan, LOADED, options, Progress()) == path


def test_pace_comes_from_the_suite_or_from_one_pilot_that_is_remembered(measuring):
    going_on = measuring(Workers())
    case = going_on.plan.cases[0]
    assert going_on.rounds.pacing(case) == Pacing(1, 2)
    suite = going_on.plan.suite.model_copy(update={"steps": None})
    object.__setattr__(going_on.plan, "suite", suite)
    assert [going_on.rounds.pacing(case) for _ in range(2)] == 2 * [Pacing(1, 20)]
    pilots = [record for record in measuring.records if record.slot is not None and record.slot.kind == "pilot"]
    assert len(pilots) == 1
    slot = Slot(case=going_on.schedule.digest(case), kind="pilot")
    going_on.latest[slot] = Summary("error")
    runner.run = lambda *rest: [Record(status="error")]
    assert going_on.rounds.pacing(case).flags == UNKNOWN.flags


def test_a_pilot_that_failed_is_not_run_again(measuring):
    class Failing(Workers):
        def __call__(self, task, *rest):
            records = super().__call__(task, *rest)
            return [Record(status="timeout")] if task.kind == "pilot" else records

    workers = Failing()
    going_on = measuring(workers)
    object.__setattr__(going_on.plan, "suite", going_on.plan.suite.model_copy(update={"steps": None}))
    assert [going_on.rounds.pacing(going_on.plan.cases[0]).flags for _ in range(3)] == 3 * [UNKNOWN.flags]
    assert workers.kinds["pilot"] == 1


def test_of_a_round_that_is_timed_again_nothing_is_left_of_the_first_try(measuring):
    """Times that are known by then would cut it into fewer blocks, and leave those of the first try beside them."""

    class Killed(Workers):
        def __call__(self, task, *rest):
            records = super().__call__(task, *rest)
            first = task.kind == "time" and task.case.label == "checkpoint" and self.timed.count("checkpoint") == 1
            return [Record(status="killed_unknown")] if first else records

    workers = Killed(scatter=0.005, lives=8.0)
    measuring(workers, "rounds: 2", "checkpoint, chunked_loss, fused_loss, bfloat16").measure()
    assert workers.timed.count("checkpoint") == 3, "it was timed again"
    latest = {record.slot: record for record in measuring.records if _is_time(record) and not record.slot.round}
    timed = Counter(record.case.label for record in latest.values() if record.status == "ok")
    blocks = timed.pop("baseline")
    assert blocks > 1 and timed.pop("nothing") == 1
    assert timed == dict.fromkeys(("checkpoint", "chunked_loss", "fused_loss", "bfloat16"), 1)


def test_a_run_goes_on_where_a_later_file_is_of_another_plan(measuring, tmp_path):
    schedule = measuring(Workers()).schedule
    folder = tmp_path / "there"
    folder.mkdir()
    begun, other, whole = (folder / f"2026010{day}T000000Z-a.jsonl" for day in (1, 2, 3))
    for path, plan in ((begun, schedule.plan_digest), (other, "another")):
        case = schedule.plan.cases[0]
        slot = Slot(case=schedule.digest(case), kind="memory")
        session.store.append(path, Record(slot=slot, case=case, origin=Origin(plan=plan)))
    path, latest, records = session.opened(folder, schedule, Options(tmp_path), lambda latest, _: len(latest) == 1)
    assert (path, len(latest), len(records)) == (begun, 1, 1)
    assert session.opened(folder, schedule, Options(tmp_path, fresh=True), lambda *known: True)[0] not in (
        begun,
        other,
    )
    once = Options(tmp_path, once=True)
    assert session.opened(folder, schedule, once, lambda *known: False)[0] == begun, "though it has all of the plan"
    session.store.append(whole, Record(origin=Origin(plan=schedule.plan_digest)))
    path, _, _ = session.opened(folder, schedule, Options(tmp_path), lambda latest, _: len(latest) == 1)
    assert path not in (begun, other, whole), "the newest of this plan has all of it"


def test_what_is_left_counts_one_round_where_the_baseline_cannot_run(measuring):
    class OutOfMemory(Workers):
        def __call__(self, task, *rest):
            (record,) = super().__call__(task, *rest)
            return [Record(status="oom_budget")] if task.kind == "memory" and task.case.is_baseline else [record]

    class Heard(Progress):
        def __init__(self):
            self.rounds = []

        def left(self, slots):
            self.rounds.append({slot.round for slot in slots if slot.kind == "time"})

    going_on = measuring(OutOfMemory())
    object.__setattr__(going_on, "progress", heard := Heard())
    going_on.measure()
    assert heard.rounds == [{0}, set()], "once the baseline was tried, and at the end of the group"
    assert {round for rounds in rounds_by_row(measuring.records).values() for round in rounds} == {0}


def test_a_row_that_cannot_run_here_leaves_the_others_all_their_rounds(measuring):
    workers = Workers(scatter=0.2)
    measuring(workers, "rounds: 6", "jax_vmap, checkpoint, chunked_loss, fused_loss").measure()
    timed = rounds_by_row(measuring.records)
    assert "jax_vmap" not in timed
    assert timed["baseline"] == [0, 1, 2, 3, 4, 5]


def memory_runs(records):
    """Return how often the memory of each row was measured, by its label and its tokens."""
    of_memory = (each for each in records if each.slot is not None and each.slot.kind == "memory")
    return Counter((each.case.label, each.case.shape["tokens"]) for each in of_memory)


@pytest.mark.parametrize(
    ("claim", "again"),
    [
        ("peak(checkpoint) <= 0.52 * peak(baseline)", {"checkpoint", "baseline"}),
        ("peak(checkpoint) <= 0.9 * peak(baseline)", set()),
        ("peak(fused_loss) <= 0.1 * peak(baseline)", set()),
        ("answer(checkpoint) == 'bit_exact' and 100 * floor(baseline) <= peak(fused_loss)", {"fused_loss", "baseline"}),
        ("seconds(checkpoint) <= seconds(baseline)", set()),
        ("peak(checkpoint) <= 0.52 * peak(baseline), where: {tokens: 7}", set()),
    ],
)
def test_rows_near_the_bound_of_a_claim_are_measured_three_times(measuring, claim, again):
    measuring(Workers(), f"rounds: 0\nclaims: [{{id: c, says: s, that: {claim}}}]", "checkpoint, fused_loss").measure()
    runs = memory_runs(measuring.records)
    assert {label for (label, _), count in runs.items() if count == 3} == again
    assert sum(runs.values()) == 3 + 2 * len(again)


def test_a_claim_about_two_comparisons_measures_both_again_with_the_second(measuring):
    claims = "claims: [{id: c, says: s, that: 'peak(checkpoint, tokens=32) <= 1.02 * peak(checkpoint, tokens=16)'}]"
    keys = f"each: [{{tokens: 16}}, {{tokens: 32}}]\nrounds: 0\n{claims}"
    going_on = measuring(Workers(), keys, "checkpoint, fused_loss")
    going_on.measure()
    again = {row: count for row, count in memory_runs(measuring.records).items() if count != 1}
    assert again == {("checkpoint", 16): 3, ("checkpoint", 32): 3}


def test_a_row_near_the_bound_of_a_claim_that_did_not_run_is_tried_once(measuring):
    class Late(Workers):
        def __call__(self, task, *rest):
            (record,) = super().__call__(task, *rest)
            late = task.kind == "memory" and task.case.label == "checkpoint"
            return [Record(status="timeout")] if late else [record]

    claims = "claims: [{id: c, says: s, that: peak(checkpoint) < peak(fused_loss)}]"
    going_on = measuring(Late(), f"rounds: 0\n{claims}", "checkpoint, fused_loss")
    going_on.measure()
    assert set(memory_runs(measuring.records).values()) == {1}, "nothing that is measured again would decide it"
    assert going_on.schedule.due(going_on.latest) == [], "so the run is complete"


def test_an_answer_without_a_reference_says_why_it_is_not_judged(measuring):
    class NoReference(Workers):
        def __call__(self, task, *rest):
            if task.kind == "reference":
                self.kinds[task.kind] += 1
                return [Record(status="error", evidence={"message": "no product in 64 bits"})]
            return super().__call__(task, *rest)

    workers = NoReference()
    measuring(workers, "rounds: 0").measure()
    answers = [record for record in measuring.records if record.slot is not None and record.slot.kind == "numerics"]
    assert len(answers) == 4 and workers.kinds["numerics"] == 0
    assert all(record.status == "error" and "no product in 64 bits" in record.evidence["message"] for record in answers)
    (table,) = judge(measuring.records)
    assert all("gave no reference: no product in 64 bits" in row.answer_reason for row in table.rows)
    assert {row.verdict for row in table.rows[1:]}.isdisjoint({"wins", "saves"})


def test_what_is_due_needs_the_digest_of_a_case_once(measuring, monkeypatch):
    digest, probe_of, calls = Case.digest, schedules.probe_of, Counter()

    def counted_digest(self, *versions):
        calls["digest"] += 1
        return digest(self, *versions)

    def counted_probe(plugins, case):
        calls["probe"] += 1
        return probe_of(plugins, case)

    monkeypatch.setattr(Case, "digest", counted_digest)
    monkeypatch.setattr(schedules, "probe_of", counted_probe)
    going_on = measuring(Workers(), "rounds: 24")
    cases = len(going_on.plan.cases)
    before = calls.copy()
    assert before["probe"] == cases
    for _ in range(5):
        due = going_on.schedule.due(going_on.latest)
    assert len(due) > 24 * cases
    assert calls["probe"] == cases and calls["digest"] - before["digest"] < cases


# Which file a run goes on with, and what it counts


class Near(Workers):
    """Workers by which the memory of a row lies near a bound, so that it is measured again."""

    def peak(self, label):
        return 97 * MIB + MIB // 2 if label == "checkpoint" else 100 * MIB


def interrupted(running, tmp_path, workers, strategies="checkpoint"):
    """Interrupt a run of four rounds when four processes were timed; return its file."""
    workers.stop_after = 4
    with pytest.raises(KeyboardInterrupt):
        running(workers, "rounds: 4", strategies)
    (path,) = tmp_path.glob("mine/*/*.jsonl")
    return path


def test_an_interrupted_run_is_resumed_and_counts_what_is_there(running, tmp_path):
    path, heard, resumed = interrupted(running, tmp_path, Near()), Heard(), Workers()
    assert running(resumed, "rounds: 4", heard=heard) == path
    assert heard.begun == [(9, 12)], "all but three rounds of three rows"
    assert heard.seconds == [[600.0 - 3.0]], "three processes of a second were timed whole"
    assert set(resumed.kinds) == {"time"}


def test_an_interrupted_run_of_other_settings_is_not_resumed(running, tmp_path):
    path, heard = interrupted(running, tmp_path, Near()), Heard()
    assert running(Workers(), "rounds: 4\nmemory_steps: 4", heard=heard) != path
    assert heard.begun == [(21, 0)]


class Told(Progress):
    """What a watcher heard ahead: seconds of earlier results, the rows measured again, and who is timed in a round."""

    def __init__(self):
        self.before, self.again, self.members, self.done = {}, [], [], []

    def earlier(self, seconds):
        self.before = dict(seconds)

    def repeated(self, cases, slots):
        self.again.append((len(cases), list(slots)))

    def timed(self, cases, number, members):
        self.members.append((number, len(cases), len(members)))

    def finish(self, record, case):
        self.done.append(record.slot)


def test_a_watcher_hears_what_each_task_took_in_the_newest_results_before(running, monkeypatch):
    first, second = Told(), Told()
    running(Workers(lives=3.0), "rounds: 4", heard=first)
    assert first.before == {}
    monkeypatch.setattr(session.Schedule, "code", "another")  # the slots of today have other digests
    running(Workers(lives=5.0), "rounds: 4", heard=second)
    assert set(second.before) == set(second.done) and not set(second.done) & set(first.done)
    assert {seconds for slot, seconds in second.before.items() if slot.kind != "predict"} == {3.0}


def test_what_the_newest_results_do_not_say_stands_in_older_ones_and_in_those_of_other_machines(measuring, tmp_path):
    schedule = measuring(Workers(), strategies="checkpoint").schedule
    plain, checkpoint = schedule.plan.cases[0], schedule.plan.cases[-1]
    files = {"here/3": {"plain": 3.0}, "here/2": {"plain": 2.0}, "there/9": {"plain": 9.0, "checkpoint": 18.0}}
    for name, took in files.items():
        for case in (case for case in (plain, checkpoint) if ("checkpoint" if case.strategies else "plain") in took):
            seconds = took["checkpoint" if case.strategies else "plain"]
            slot = Slot(case="as it was", kind="memory") if case is plain else Slot(case="another", kind="memory")
            path = tmp_path / "mine" / f"{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            session.store.append(path, Record(slot=slot, case=case, origin=Origin(worker_seconds=seconds)))
    before = session.seconds_before(schedule, tmp_path / "mine" / "here", tmp_path / "mine" / "here" / "4.jsonl")
    took = {schedule.digest(plain): 3.0, schedule.digest(checkpoint): 18.0}
    assert {slot.case: seconds for slot, seconds in before.items()} == took


def test_a_watcher_hears_of_rows_near_a_bound_before_they_are_measured_again(running):
    heard = Told()
    running(Near(), "rounds: 4", heard=heard)
    ((cases, slots),) = heard.again
    measured = [slot for slot in heard.done if slot.kind == "memory" and slot.repeat]
    assert cases == 3 and len(slots) == 4 and slots == measured


def test_a_watcher_hears_who_is_timed_in_a_round(running):
    heard = Told()
    running(Workers(), "rounds: 24", "checkpoint, fused_loss, chunked_loss", heard=heard)
    assert [number for number, _, _ in heard.members] == list(range(len(heard.members)))
    assert heard.members[0] == (0, 5, 5) and heard.members[4][2] < 5, "who is decided at the first look has left"


@pytest.mark.parametrize(("steps", "pilots"), [(2, 0), (None, 2)])
def test_pilots_are_counted_ahead(measuring, steps, pilots):
    schedule = measuring(Workers(), "rounds: 1", "checkpoint").schedule
    suite = schedule.plan.suite.model_copy(update={"steps": steps})
    schedule = replace(schedule, plan=replace(schedule.plan, suite=suite))
    tasks = schedule.tasks({})
    assert [slot.kind for slot in tasks].count("pilot") == pilots
    ran = {slot: Summary("ok") for slot in tasks if slot.kind == "pilot"}
    assert schedule.tasks(ran) == schedule.due(ran)


def test_a_finished_run_with_a_row_that_cannot_run_here_is_followed_by_a_new_file(running):
    strategies, heard = "checkpoint, jax_vmap", Heard()
    first = running(Workers(), strategies=strategies, heard=heard)
    assert any(record.status == "unsupported" for record in store.read(first)[0])
    second = running(Workers(), strategies=strategies, heard=heard)
    assert first != second and heard.begun[0] == heard.begun[1]
    before = store.read(second)[0]
    assert running(Workers(), strategies=strategies, heard=heard, once=True) == second
    assert heard.begun[2] == (0, heard.begun[0][0] - 1), "all but the times of that row"
    assert [record.slot for record in store.read(second)[0][len(before) :]] == [None], "there is nothing left to do"


def test_a_run_without_its_place_is_followed_by_a_new_file(running, monkeypatch):
    monkeypatch.setattr(schedules, "obstacle", lambda *case: "there is no such place")
    first = running(Workers())
    second = running(Workers())
    before = store.read(second)[0]
    assert {record.status for record in before if record.slot and record.slot.kind == "memory"} == {"unsupported"}
    assert first != second == running(Workers(), once=True)
    assert [record.slot for record in store.read(second)[0][len(before) :]] == [None], "there is nothing left to do"


def test_what_would_be_skipped_again_leaves_a_run_finished(running):
    first = running(Workers(), max_bytes=1)
    second = running(Workers(), max_bytes=1)
    assert first != second
    workers = Workers()
    third = running(workers, max_bytes=1, try_all=True)
    assert third not in (first, second) and not workers.kinds["memory"], "what the user bounds is not tried"
    assert running(workers, try_all=True) == third
    assert workers.kinds["memory"] == 2


def test_what_the_user_bounds_is_skipped_whatever_is_known_of_the_machine(measuring, monkeypatch):
    monkeypatch.setattr(guards.gpu, "free_to_use", lambda: None)
    monkeypatch.setattr(guards.facts, "free_to_use", lambda: 50)
    run = measuring(Workers())
    on_host = run.plan.cases[0]
    on_gpu = on_host.model_copy(update={"place": Place("torch", "cuda")})
    needs_100 = Summary("ok", need_bytes=100)

    def limit(case, **options):
        refused = guards.guarded(case, needs_100, Options(Path("results"), **options), run.plan.suite)
        return refused and refused.evidence["limit_bytes"]

    assert (limit(on_gpu), limit(on_gpu, max_bytes=99), limit(on_gpu, max_bytes=100)) == (None, 99, None)
    assert (limit(on_host), limit(on_host, try_all=True), limit(on_host, max_bytes=100)) == (50, None, 50)
    assert (limit(on_host, max_bytes=99, try_all=True), limit(on_host, max_bytes=100, try_all=True)) == (99, None)


@pytest.mark.parametrize(
    ("flops", "rate", "allowed", "lasting"),
    [
        (20e9, 6e8, 60, "100 seconds"),
        (20e9, 6e8, 120, None),
        (20e9, 1e12, 60, None),
        (5e8, 6e8, 4, None),  # so little that no rate is asked for
    ],
)
def test_steps_in_16_bits_that_would_outlast_the_suites_time_are_not_begun(
    measuring, monkeypatch, flops, rate, allowed, lasting
):
    asked = []
    rates = {"flops": {"bfloat16": rate}, "bandwidth": 1e10}
    guards._rates.cache_clear()
    monkeypatch.setattr(guards.throughput, "of_place", lambda place, cache: asked.append(place) or rates)
    run = measuring(Workers())
    case, suite = run.plan.cases[0], run.plan.suite.model_copy(update={"timeout_seconds": allowed, "memory_steps": 3})
    works = (Operations("float32", 1e15, 0), Operations("bfloat16", flops, 0))
    summary = Summary.of(Record(prediction=Prediction(predicted_peak_bytes=1, predicted_work=works)))

    def refused(case, **options):
        return guards.guarded(case, summary, Options(Path("results"), **options), suite)

    record = refused(case)
    assert len(asked) == (flops > 1e9)
    assert (record is None) == (lasting is None)
    if record is not None:
        assert record.status == "skipped_guard"
        assert record.evidence["message"] == (
            f"3 steps in bfloat16 on this processor are expected to take {lasting}, and the suite's timeout_seconds "
            "are 60: --try-all runs it"
        )
    assert refused(case) == record and len(asked) <= 1, "a busy machine is not measured for each case"
    assert refused(case, try_all=True) is None
    assert refused(case.model_copy(update={"place": Place("torch", "cuda")})) is None
    guards._rates.cache_clear()


class SetBack(datetime):
    """A clock that was set back."""

    @classmethod
    def now(cls, tz=None):
        return datetime(2000, 1, 1, tzinfo=UTC)


def test_what_a_resumed_run_times_counts_though_the_clock_was_set_back(running, tmp_path, monkeypatch):
    """It cuts the round into more blocks, by what is known by then: what was timed before is not overwritten."""

    class Longer(Workers):
        def __call__(self, task, *rest):
            self.lives = 8.0 if task.kind == "time" else 0.1
            return super().__call__(task, *rest)

    monkeypatch.setattr(rounds.Rounds, "takes_turns", lambda self, case: False)
    strategies = "checkpoint, chunked_loss, fused_loss, bfloat16"
    path = interrupted(running, tmp_path, Longer(scatter=0.005), strategies)
    monkeypatch.setattr(bench, "datetime", SetBack)
    assert running(Longer(scatter=0.005), "rounds: 4", strategies) == path
    records = store.read(path)[0]
    assert len({record.slot.block for record in filter(_is_time, records)}) > 1
    (table,) = judge(records)
    assert {row.speed.rounds for row in table.rows[2:]} == {4}


# What fails or is ended from outside


class Failing(Workers):
    """Workers of which those of a kind, for cases with strategies or without, end with a status."""

    def __init__(self, kind, status, untouched=True):
        super().__init__(scatter=0.005)
        self.kind, self.status, self.untouched = kind, status, untouched

    def __call__(self, task, *rest):
        records = super().__call__(task, *rest)
        fails = task.kind == self.kind and self.untouched == (not task.case.strategies)
        return [Record(status=self.status, evidence={"message": f"it ended with {self.status}"})] if fails else records


def answers_of(records):
    """Return the newest record of the answer of each row."""
    newest = {record.slot: record for record in records if record.slot is not None and record.slot.kind == "numerics"}
    return {record.case.label: record for record in newest.values()}


@pytest.mark.parametrize("kind", ["reference", "numerics"])
def test_answers_whose_reference_was_ended_from_outside_are_judged_by_a_later_run(measuring, kind):
    workers = Failing(kind, "killed_unknown")
    measuring(workers, "rounds: 0").measure()
    answers = answers_of(measuring.records)
    assert len(answers) == 4 and {record.status for record in answers.values()} == {"killed_unknown"}
    assert "gave no reference: it ended with killed_unknown" in answers["checkpoint"].evidence["message"]
    assert workers.kinds[kind] == 1
    measuring(Workers(), "rounds: 0").measure()
    assert all(record.numerics == EXACT for record in answers_of(measuring.records).values())


def test_answers_are_worked_on_at_once_after_that_of_the_baseline(measuring, monkeypatch):
    class Meeting(Workers):
        def __call__(self, task, *rest):
            if task.kind == "numerics":
                order.append(task.case.label)
                if task.case.strategies:
                    both.wait()
            return super().__call__(task, *rest)

    order, both = [], threading.Barrier(2, timeout=20)
    monkeypatch.setattr(session.facts, "threads", lambda: 2)
    measuring(Meeting(), "rounds: 0", "checkpoint, fused_loss").measure()
    assert set(order[:-2]) == {"baseline"} and set(order[-2:]) == {"checkpoint", "fused_loss"}
    assert all(record.numerics == EXACT for record in answers_of(measuring.records).values())


@pytest.mark.parametrize(("place", "exclusive"), [("torch/cpu", True), ("torch/cuda", False), ("torch/cuda", True)])
def test_answers_are_worked_on_one_at_a_time_on_a_gpu_that_takes_one_process(measuring, monkeypatch, place, exclusive):
    class Noting(Workers):
        def __call__(self, task, *rest):
            if task.kind == "numerics" and task.case.strategies:
                at_work.append(threading.get_ident())
                if not one_at_a_time:
                    both.wait()  # or one thread might be done before another begins
            return super().__call__(task, *rest)

    at_work, both, one_at_a_time = [], threading.Barrier(2, timeout=20), place == "torch/cuda" and exclusive
    monkeypatch.setattr(session.facts, "threads", lambda: 2)
    monkeypatch.setattr(schedules.backends, "absent", lambda *place: None)
    monkeypatch.setattr(session.gpu, "is_exclusive", lambda: exclusive)
    measuring(Noting(), "rounds: 0", "checkpoint, fused_loss", place).measure()
    assert len(at_work) == 2 and len(set(at_work)) == (1 if one_at_a_time else 2)
    assert all(record.numerics == EXACT for record in answers_of(measuring.records).values())


def test_where_the_answer_of_the_baseline_fails_the_others_say_so(measuring):
    workers = Failing("numerics", "error")
    measuring(workers, "rounds: 0").measure()
    answers = answers_of(measuring.records)
    assert answers.pop("baseline").evidence["message"] == "it ended with error"
    assert {record.status for record in answers.values()} == {"error"}
    assert all("gave no reference: it ended with error" in record.evidence["message"] for record in answers.values())
    assert workers.kinds["numerics"] == 1


class Late(Workers):
    """Workers of which those of a kind need some seconds, and have as many as they are allowed."""

    def __init__(self, kind, needs):
        super().__init__(scatter=0.005)
        self.kind, self.needs, self.allowed = kind, needs, {}

    def __call__(self, task, threads, deadline, watch):
        self.allowed[task.kind] = deadline
        records = super().__call__(task, threads, deadline, watch)
        late = task.kind == self.kind and deadline < self.needs and not task.case.is_control
        return [Record(status="timeout", evidence={"seconds": deadline + 0.1})] if late else records


@pytest.mark.parametrize("kind", ["numerics", "memory", "time"])
def test_who_was_out_of_time_is_tried_again_by_a_run_that_allows_more(measuring, kind):
    measuring(Late(kind, 400), "rounds: 1\ntimeout_seconds: 310").measure()
    for allowed, tried in ((310, False), (390, True), (390, False), (410, True), (410, False)):
        workers = Late(kind, 400)
        measuring(workers, f"rounds: 1\ntimeout_seconds: {allowed}").measure()
        assert bool(workers.kinds[kind]) is tried, allowed
    assert {row.status for row in judge(measuring.records)[0].rows} == {"ok"}


def test_a_reference_has_as_long_as_the_suite_allows_and_five_minutes_at_least(measuring):
    for allowed, tried, has in ((100, True, 300), (100, False, None), (400, True, 400), (600, True, 600)):
        workers = Late("reference", 500)
        measuring(workers, f"rounds: 0\ntimeout_seconds: {allowed}").measure()
        assert bool(workers.kinds["reference"]) is tried and workers.allowed.get("reference") == has, allowed
    assert all(record.numerics == EXACT for record in answers_of(measuring.records).values())


def test_what_ends_a_killed_run_is_started_before_the_corpus_is_made(running, monkeypatch):
    begun = []
    monkeypatch.setattr(session.orphans, "start", lambda: begun.append("start"))
    monkeypatch.setattr(session.prepare_data, "prepare", lambda plan, *rest: begun.append("corpus") or (plan, {}))
    running(Workers())
    assert begun[:2] == ["start", "corpus"]


def test_workers_have_the_threads_that_a_quota_leaves(measuring, monkeypatch):
    monkeypatch.setattr(bench.facts, "threads", lambda: 3)
    assert measuring(Workers()).threads == 3


def test_a_row_that_is_killed_in_every_round_leaves_the_others_theirs(measuring):
    class Killed(Workers):
        def __call__(self, task, *rest):
            records = super().__call__(task, *rest)
            killed = task.kind == "time" and task.case.label == "fused_loss"
            return [Record(status="killed_unknown")] if killed else records

    measuring(Killed(scatter=0.005), "rounds: 4").measure()
    assert Counter(rounds_by_row(measuring.records)["checkpoint"]) == {0: 2, 1: 2, 2: 2, 3: 2}
    rows = {row.label: row for row in judge(measuring.records)[0].rows}
    assert rows["checkpoint"].speed.rounds == 4 and rows["fused_loss"].speed is None


def test_an_interruption_between_two_predictions_ends_what_predicts_the_others(measuring, monkeypatch):
    class Interrupted(Progress):
        def finish(self, record, case):
            raise KeyboardInterrupt

    ended = []

    def of_cases(cases, *rest, **options):
        try:
            for case in cases:
                yield case, Record(prediction=Prediction(predicted_peak_bytes=MIB))
        finally:
            ended.append(True)

    going_on = measuring(Workers())
    monkeypatch.setattr(predictions, "of_cases", of_cases)
    going_on.progress = Interrupted()
    with pytest.raises(KeyboardInterrupt) as interruption:
        going_on.measure()
    assert ended and interruption.tb is not None, "though the frames of the loop are there still"


# What a process needs, and how long it keeps others waiting


def test_a_timed_process_needs_room_for_all_its_ranks_and_its_children(measuring):
    going_on = measuring(Workers())
    case = going_on.plan.cases[0].model_copy(update={"ranks": 2})
    slot = Slot(case=going_on.schedule.digest(case), kind="memory")
    going_on.latest[slot] = Summary("ok", peak_bytes=100 * MIB, children_bytes=30 * MIB)
    assert going_on.rounds.room(case) == rounds.OF_A_PROCESS + 230 * MIB


@pytest.mark.parametrize(("turning", "seconds"), [(True, 3.0), (False, 8.0)])
def test_a_process_that_takes_turns_keeps_others_waiting_for_its_steps_and_another_for_its_life(
    measuring, monkeypatch, turning, seconds
):
    going_on = measuring(Workers())
    monkeypatch.setattr(rounds.Rounds, "takes_turns", lambda self, case: turning)
    case = going_on.plan.cases[0]
    for number, (timed, life) in enumerate(((2.0, 7.0), (3.0, 8.0), (30.0, 80.0))):
        slot = Slot(case=going_on.schedule.digest(case), kind="time", round=number)
        going_on.latest[slot] = Summary("ok", seconds=1.0, timed_seconds=timed, worker_seconds=life)
    assert going_on.rounds.share_of_block(case) == seconds


def test_ranks_share_the_memory_of_the_host_and_have_a_gpu_each(measuring):
    plan, needs_100 = measuring(Workers()).plan, Summary("ok", need_bytes=100)

    def need(**changes):
        case, options = plan.cases[0].model_copy(update=changes), Options(Path("results"), max_bytes=1)
        refused = guards.guarded(case, needs_100, options, plan.suite)
        return refused.evidence["need_bytes"]

    assert (need(), need(ranks=2), need(ranks=2, place=Place("torch", "cuda"))) == (100, 200, 100)
    assert (need(budget_bytes=40), need(budget_bytes=40, ranks=2), need(budget_bytes=400)) == (40, 80, 100)


def test_a_better_predictor_predicts_again_what_stays_measured(running, tmp_path, monkeypatch):
    workers = Workers()
    file = running(workers)
    measured = Counter(workers.kinds)
    before = {row.label: row for table in judge(store.read(file)[0]) for row in table.rows}
    monkeypatch.setattr(predict_again.history, "since", lambda *rest: Roles((), (), ("the predictor",)))
    twice = Record(prediction=Prediction(predicted_peak_bytes=2 * MIB, floor_bytes=MIB))
    monkeypatch.setattr(predictions, "of_cases", lambda cases, *rest, **options: ((case, twice) for case in cases))
    heard = Heard()
    plan = read(tmp_path / "mine.yaml", LOADED)
    assert predict_again.run(plan, LOADED, Options(tmp_path, cache=tmp_path / "other"), heard) == file
    after = {row.label: row for table in judge(store.read(file)[0]) for row in table.rows}
    assert workers.kinds == measured and heard.begun == [(len(plan.cases), 0)]
    assert after.keys() == before.keys() == {"baseline", "checkpoint"}
    for label, row in after.items():
        assert (before[label].predicted_bytes, row.predicted_bytes) == (MIB, 2 * MIB)
        assert (row.peak_bytes, row.speed) == (before[label].peak_bytes, before[label].speed)
    assert running(workers, once=True) == file, "and a run of this very code finds nothing to do"


def test_a_run_that_is_asked_for_once_answers_the_claims_that_stand_now(running, tmp_path, monkeypatch):
    claim = "claims: [{id: A, says: %s, that: peak(checkpoint) > 0}]"
    file = running(Workers(), claim % "before")
    monkeypatch.setattr(predict_again.history, "since", lambda *rest: Roles((), (), ()))
    suite = (tmp_path / "mine.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(suite.replace("says: before", "says: now"))
    plan, options = read(tmp_path / "mine.yaml", LOADED), Options(tmp_path, cache=tmp_path, once=True)
    for _ in range(2):
        assert predict_again.run(plan, LOADED, options, Progress()) == file
        records = store.read(file)[0]
        assert [claim.says for claim in heading_of(records).claims] == ["now"]
    assert sum(record.slot is None and bool(record.heading.claims) for record in records) == 2, "written once"


@pytest.mark.parametrize("roles", [None, Roles(("a strategy",), (), ()), Roles((), ("the meter",), ("the predictor",))])
def test_what_is_to_be_measured_anew_is_not_predicted_again(roles, running, tmp_path, monkeypatch):
    file = running(Workers())
    written = file.read_bytes()
    monkeypatch.setattr(predict_again.history, "since", lambda *rest: roles)
    again = predict_again.run(
        read(tmp_path / "mine.yaml", LOADED), LOADED, Options(tmp_path, cache=tmp_path), Progress()
    )
    assert again is None and file.read_bytes() == written


def test_a_run_that_lacks_something_is_measured_on_and_not_predicted_again(running, tmp_path, monkeypatch):
    file = running(Workers())
    monkeypatch.setattr(predict_again.history, "since", lambda *rest: Roles((), (), ("the predictor",)))
    whole = file.read_text().splitlines(keepends=True)
    last = max(at for at, text in enumerate(whole) if '"kind": "time"' in text)
    file.write_text("".join(whole[:last]))
    plan, options = read(tmp_path / "mine.yaml", LOADED), Options(tmp_path, cache=tmp_path / "other")
    assert predict_again.run(plan, LOADED, options, Progress()) is None


@pytest.mark.parametrize(
    ("keys", "strategies"),
    [
        ("rounds: 2", "checkpoint"),
        ("rounds: 1", "fused_loss"),
        ("memory_steps: 4", "checkpoint"),
    ],
)
def test_results_of_another_suite_are_none_of_this_one(keys, strategies, measuring, running, tmp_path, monkeypatch):
    monkeypatch.setattr(predict_again.history, "since", lambda *rest: Roles((), (), ()))
    options = Options(tmp_path, cache=tmp_path)
    assert predict_again.run(measuring(Workers()).plan, LOADED, options, Progress()) is None, "there are none"
    file = running(Workers())
    assert predict_again.run(read(tmp_path / "mine.yaml", LOADED), LOADED, options, Progress()) == file
    other = measuring(Workers(), keys, strategies).plan
    assert predict_again.run(other, LOADED, options, Progress()) is None
    running(Workers(), "rounds: 1", "fused_loss")
    assert predict_again.run(measuring(Workers(), "rounds: 1", "checkpoint").plan, LOADED, options, Progress()) == file


@pytest.mark.parametrize("changes", [{"steps": 9}, {"warmup": 9}, {}])
def test_results_in_other_steps_are_none_of_this_suite(changes, running, tmp_path, monkeypatch):
    file = running(Workers())
    monkeypatch.setattr(predict_again.history, "since", lambda *rest: Roles((), (), ()))
    plan = read(tmp_path / "mine.yaml", LOADED)
    plan = replace(plan, suite=plan.suite.model_copy(update=changes))
    again = predict_again.run(plan, LOADED, Options(tmp_path, cache=tmp_path), Progress())
    assert again == (None if changes else file)


def test_a_corpus_in_a_file_may_be_another_by_now(running, tmp_path, monkeypatch):
    running(Workers())
    monkeypatch.setattr(predict_again.history, "since", lambda *rest: Roles((), (), ()))
    monkeypatch.setattr(predict_again.digests, "of_corpus", lambda name, root: "what the file is today")
    plan = read(tmp_path / "mine.yaml", LOADED)
    assert predict_again.run(plan, LOADED, Options(tmp_path, cache=tmp_path), Progress()) is None
