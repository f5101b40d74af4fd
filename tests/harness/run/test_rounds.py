"""Which members are timed next: rows leave as they are decided, and an interruption changes nothing of it."""

import random

import pytest

from harness.contract import plugins
from harness.records import Memory, Origin, Record, Slot, Times
from harness.run.schedule import Schedule, Summary, by_case
from harness.suite.reader import read
from harness.verdicts.rounds import Turn, before, newest, next_turn

MEMBERS = ("baseline", "nothing", "checkpoint", "chunked_loss", "fused_loss")
LOADED = plugins.load()


def times(rounds, scatter=0.0, **ratios):
    """Make step times of so many rounds: 1 s times the ratio, but for the scatter of processes."""
    draw = random.Random(1)
    return {
        name: {(number, 0): ratios.get(name, 1.0) * (1 + draw.uniform(-scatter, scatter)) for number in range(rounds)}
        for name in MEMBERS
    }


def without(seconds, name, number):
    return {**seconds, name: {at: each for at, each in seconds[name].items() if at[0] != number}}


def test_all_members_are_timed_until_the_first_look():
    for rounds in range(4):
        assert next_turn(MEMBERS, times(rounds), {}, 24) == Turn(rounds, MEMBERS)


def test_a_group_whose_rows_are_all_decided_stops_at_the_look():
    decided = times(4, checkpoint=1.3)
    assert next_turn(MEMBERS, decided, {}, 24) == Turn(4, ())
    assert next_turn(MEMBERS, times(3, checkpoint=1.3), {}, 24).members == MEMBERS, "between looks nothing is decided"


def test_a_row_that_is_decided_leaves_and_baseline_and_control_stay():
    scattered = times(4, 0.06, checkpoint=2.0)
    turn = next_turn(MEMBERS, scattered, {}, 24)
    assert turn.round == 4
    assert {"baseline", "nothing"} <= set(turn.members)
    assert "checkpoint" not in turn.members and len(turn.members) < len(MEMBERS)
    later = times(6, 0.06, checkpoint=2.0)
    del later["checkpoint"][4, 0], later["checkpoint"][5, 0]
    assert "checkpoint" not in next_turn(MEMBERS, later, {}, 24).members, "and does not come back"


def test_a_row_that_stays_is_timed_on_when_all_are_decided():
    """A claim on what rows wait for is decided by more rounds than their steps need."""
    staying = {"baseline", "nothing", "checkpoint", "fused_loss"}
    decided = times(4, checkpoint=1.3)
    assert next_turn(MEMBERS, decided, {}, 24, staying) == Turn(4, ("baseline", "nothing", "checkpoint", "fused_loss"))
    assert next_turn(MEMBERS, times(24, checkpoint=1.3), {}, 24, staying) == Turn(24, ())
    never = {**decided, "fused_loss": {}}
    turn = next_turn(MEMBERS, never, {"fused_loss": {0, 1, 2, 3}}, 24, staying)
    assert turn.members == ("baseline", "nothing", "checkpoint"), "what never ran is not tried for ever"


def test_rows_on_whose_waits_a_claim_rests_stay(tmp_path):
    path = tmp_path / "waits.yaml"
    path.write_text(
        "title: t\nworkload: decoder\nplaces: [torch/cpu]\ncorpus: standard_library\n"
        "shape: {layers: 1, width: 32, heads: 2, vocabulary: 256, batch: 2, tokens: 16, corpus_tokens: 4096}\n"
        "strategies: [nothing, strided_view, numpy_copy, {python_lists: {shared: [true, false]}}]\n"
        "claims:\n  - id: a\n    says: b\n"
        "    that: prepare_seconds(numpy_copy) <= prepare_seconds('python_lists(shared=true)')\n"
        "  - id: c\n    says: d\n    that: seconds(strided_view) <= seconds(baseline)\n"
        "    where: {tokens: 16}\n"
    )
    schedule = Schedule(read(path, LOADED), LOADED, 24)
    (comparison,) = schedule.plan.comparisons
    assert schedule.staying(comparison) == {"baseline", "nothing", "numpy_copy", "python_lists(shared=true)"}
    path.write_text(path.read_text().replace("shared=true)')", "shared=true)')\n    where: {tokens: 32}"))
    elsewhere = Schedule(read(path, LOADED), LOADED, 24)
    assert elsewhere.staying(elsewhere.plan.comparisons[0]) == set(), "that claim is about other comparisons"


def test_a_round_that_lacks_a_member_is_timed_again_whole():
    assert next_turn(MEMBERS, without(times(4), "fused_loss", 2), {}, 24) == Turn(2, MEMBERS)
    assert next_turn(MEMBERS, without(times(1), "baseline", 0), {}, 24) == Turn(0, MEMBERS)


def test_a_member_that_failed_does_not_hold_the_others_up():
    seconds = without(times(3), "fused_loss", 1)
    assert next_turn(MEMBERS, seconds, {"fused_loss": {1}}, 24) == Turn(3, MEMBERS)
    never = {**times(4, 0.06), "fused_loss": {}}
    turn = next_turn(MEMBERS, never, {"fused_loss": {0, 1, 2, 3}}, 24)
    assert turn.round == 4 and "fused_loss" not in turn.members, "what never ran is not tried for ever"


def test_the_last_round_ends_it_whatever_is_known():
    assert next_turn(MEMBERS, times(5, 0.3), {}, 5) == Turn(5, ())
    assert next_turn(MEMBERS, {}, {}, 0) == Turn(0, ())


def test_what_comes_next_depends_on_the_times_alone():
    """Asked after every process, as one that is interrupted everywhere, it gives what it gives without."""
    whole = times(24, 0.05, checkpoint=1.15, chunked_loss=1.04)
    measured = {name: {} for name in MEMBERS}
    asked = []
    while (turn := next_turn(MEMBERS, measured, {}, 24)).members:
        asked.append(turn)
        missing = next(name for name in turn.members if (turn.round, 0) not in measured[name])
        measured[missing][turn.round, 0] = whole[missing][turn.round, 0]
    together = {name: {} for name in MEMBERS}
    while (turn := next_turn(MEMBERS, together, {}, 24)).members:
        together |= {name: {**together[name], (turn.round, 0): whole[name][turn.round, 0]} for name in turn.members}
    assert measured == together
    assert len({turn.round for turn in asked}) in (4, 6, 8, 12, 16, 24)


def test_times_before_a_round():
    assert before({"a": {(0, 0): 1, (0, 1): 2, (1, 0): 3}}, 1) == {"a": {(0, 0): 1, (0, 1): 2}}


def test_of_a_round_that_was_timed_twice_the_newest_run_counts():
    timed = {"a": {(0, 0): 1.0, (1, 0): 2.0, (1, 1): 3.0}, "b": {(0, 0): 4.0, (1, 0): 5.0}}
    runs = {"a": {(0, 0): "1", (1, 0): "1", (1, 1): "2"}, "b": {(0, 0): "1", (1, 0): "2"}}
    assert newest(timed, runs) == {"a": {(0, 0): 1.0, (1, 1): 3.0}, "b": {(0, 0): 4.0, (1, 0): 5.0}}


# As a schedule asks for it


@pytest.fixture
def schedule(smallest, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(smallest.replace("[checkpoint]", "[checkpoint, chunked_loss, fused_loss]") + "rounds: 24\n")
    return Schedule(read(path, LOADED), LOADED, 24)


def known_of(schedule, seconds, run="1", lives=1.0, status="ok"):
    """Make what a run knows: all predicted, answered, measured, and some timed."""
    (group,) = schedule.plan.comparisons
    latest = {slot: Summary("ok", run_id=run) for slot in schedule.slots() if slot.kind != "time"}
    for case in group.cases:
        for (number, block), each in seconds.get(case.label, {}).items():
            slot = Slot(case=schedule.digest(case), kind="time", round=number, block=block)
            latest[slot] = Summary(status, run_id=run, seconds=each, worker_seconds=lives)
    return latest


def turn_of(schedule, latest):
    number, members = schedule.turn(schedule.plan.comparisons[0], latest, by_case(latest))
    return number, tuple(case.label for case in members)


def slot_of(schedule, label, kind, number=0):
    case = next(case for case in schedule.plan.cases if case.label == label)
    return Slot(case=schedule.digest(case), kind=kind, round=number)


def test_a_schedule_names_the_round_and_what_is_left_of_it_at_most(schedule):
    latest = known_of(schedule, times(4, 0.06, checkpoint=2.0))
    number, members = turn_of(schedule, latest)
    assert number == 4 and "checkpoint" not in members and {"baseline", "nothing"} <= set(members)
    due = schedule.due(latest)
    assert {slot.round for slot in due} == set(range(4, 24)) and len(due) == 20 * len(members)
    assert schedule.due(known_of(schedule, times(4, checkpoint=1.3))) == []
    assert {slot.kind for slot in schedule.due({})} == {"predict", "numerics", "memory", "time"}


def test_blocks_of_a_round_count_together(schedule):
    cut = times(4, checkpoint=1.3)
    for name in ("checkpoint", "fused_loss"):
        cut[name] = {(number, 1): each for (number, _), each in cut[name].items()}
    cut["baseline"] |= {(number, 1): 1.0 for number in range(4)}
    assert turn_of(schedule, known_of(schedule, cut)) == (4, ())


def test_a_round_that_two_runs_timed_in_part_is_timed_again_whole(schedule):
    latest = known_of(schedule, times(1))
    latest |= {
        slot_of(schedule, name, "time"): Summary("ok", run_id="2", seconds=1.0) for name in ("baseline", "nothing")
    }
    assert turn_of(schedule, latest) == (0, MEMBERS), "the others are not their neighbours"


def test_a_case_that_did_not_run_is_not_timed(schedule):
    latest = known_of(schedule, times(1))
    latest[slot_of(schedule, "fused_loss", "memory")] = Summary("oom_host")
    assert turn_of(schedule, latest) == (1, MEMBERS[:-1])


def test_a_process_whose_clock_jumped_counts_as_one_that_failed(schedule):
    jumped = Record(
        slot=Slot(case="c", kind="time"), times=Times().model_copy(update={"step_seconds": (1.0, float("nan"))})
    )
    assert Summary.of(jumped).seconds is None
    pilot = Record(slot=Slot(case="c", kind="pilot"), times=Times().model_copy(update={"step_seconds": (1.0, 0.0)}))
    assert Summary.of(pilot).step_seconds == ()
    latest = known_of(schedule, times(1))
    latest[slot_of(schedule, "checkpoint", "time")] = Summary("ok", run_id="1")
    assert turn_of(schedule, latest) == (1, MEMBERS)


def test_what_was_ended_from_outside_is_tried_again(schedule):
    latest = known_of(schedule, times(1))
    latest[slot_of(schedule, "checkpoint", "time")] = Summary("killed_unknown", run_id="1")
    assert turn_of(schedule, latest) == (0, MEMBERS)


def test_in_a_round_that_is_given_up_who_was_killed_has_failed(schedule):
    latest = known_of(schedule, times(1))
    latest[slot_of(schedule, "checkpoint", "time")] = Summary("killed_unknown", run_id="1")
    comparison = schedule.plan.comparisons[0]
    number, members = schedule.turn(comparison, latest, by_case(latest), {0})
    assert (number, tuple(case.label for case in members)) == (1, MEMBERS)
    del latest[slot_of(schedule, "checkpoint", "time")]
    assert schedule.turn(comparison, latest, by_case(latest), {0})[0] == 0, "who was never timed has not"


def test_a_baseline_that_cannot_run_leaves_one_round(schedule):
    rows = {name: each for name, each in times(1).items() if name != "baseline"}
    latest = known_of(schedule, {})
    latest[slot_of(schedule, "baseline", "memory")] = Summary("oom_host")
    assert turn_of(schedule, latest) == (0, MEMBERS[1:])
    latest = known_of(schedule, rows)
    latest[slot_of(schedule, "baseline", "memory")] = Summary("oom_host")
    assert turn_of(schedule, latest) == (1, ())
    every = Schedule(schedule.plan, schedule.plugins, 24, all_rounds=True)
    assert turn_of(every, latest) == (1, MEMBERS[1:]), "asked for, to compare the rows with each other"


def test_the_minutes_that_a_suite_gives_end_it(schedule):
    minutes = schedule.plan.suite.timing_minutes
    scattered = times(4, 0.06)
    enough = 60 * minutes / (4 * len(MEMBERS))
    assert turn_of(schedule, known_of(schedule, scattered, lives=0.9 * enough))[1]
    assert turn_of(schedule, known_of(schedule, scattered, lives=1.1 * enough)) == (4, ())


def test_processes_that_ended_badly_take_of_those_minutes_as_well(schedule):
    minutes = schedule.plan.suite.timing_minutes
    latest = known_of(schedule, times(1, 0.06), lives=0.0)
    late = Record(status="timeout", slot=slot_of(schedule, "checkpoint", "time"), evidence={"seconds": 61 * minutes})
    latest[late.slot] = Summary.of(late)._replace(run_id="1")
    assert turn_of(schedule, latest) == (1, ())


def test_what_is_remembered_of_a_record():
    timed = Record(slot=Slot(case="c", kind="time"), times=Times(step_seconds=(1.0, 3.0, 9.0)))
    assert (Summary.of(timed).seconds, Summary.of(timed).step_seconds) == (2.0, ())
    pilot = Record(slot=Slot(case="c", kind="pilot"), times=Times(step_seconds=(1.0, 3.0, 9.0)))
    assert (Summary.of(pilot).seconds, Summary.of(pilot).step_seconds) == (None, (1.0, 3.0, 9.0))
    memory = Record(slot=Slot(case="c", kind="memory"), memory=Memory(peak_host_bytes=7))
    assert Summary.of(memory).peak_bytes == 7
    lives = [Summary.of(Record(evidence={"seconds": seconds})).worker_seconds for seconds in (2, 2.5, None, "2")]
    assert lives == [2, 2.5, 0.0, 0.0]
    both = Record(origin=Origin(worker_seconds=3.0), evidence={"seconds": 2.0})
    assert Summary.of(both).worker_seconds == 3.0


def test_of_a_timed_process_all_its_steps_are_remembered_and_of_memory_the_upper_bound_of_its_children():
    timed, pilot = (
        Record(slot=Slot(case="c", kind=kind), times=Times(step_seconds=(1.0, 3.0, 9.0))) for kind in ("time", "pilot")
    )
    assert (Summary.of(timed).timed_seconds, Summary.of(pilot).timed_seconds) == (13.0, 0.0)
    memory = Record(slot=Slot(case="c", kind="memory"), child_peak_bytes=2, child_peak_bound_bytes=3)
    assert Summary.of(memory).children_bytes == 3
