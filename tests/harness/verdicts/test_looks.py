import math
import random
from statistics import NormalDist

import pytest

from harness.verdicts import pooled as model
from harness.verdicts.looks import (
    LOOKS,
    concluded,
    ever_beyond,
    last_error,
    look,
    nominal_error,
    planned,
    replayed,
)


@pytest.mark.parametrize(("looks", "published"), [(2, 0.0294), (3, 0.0221), (4, 0.0182), (5, 0.0158), (10, 0.0106)])
def test_pococks_published_constants_keep_five_percent(looks, published):
    assert ever_beyond(range(1, looks + 1), published) == pytest.approx(0.05, abs=0.001)


def test_the_chance_over_all_looks_is_that_of_a_walk():
    rng = random.Random(1)
    nominal, walks, beyond = 0.02, 20_000, 0
    for _ in range(walks):
        total, rounds = 0.0, 0
        for end in LOOKS:
            total += rng.gauss(0, math.sqrt(end - rounds))
            rounds = end
            if abs(total) > 2.3263 * math.sqrt(end):
                beyond += 1
                break
    assert ever_beyond(LOOKS, nominal) == pytest.approx(beyond / walks, abs=0.005)


def test_each_look_has_a_part_of_the_error():
    assert nominal_error((3,)) == 0.05
    assert nominal_error(LOOKS) == pytest.approx(0.05 * 0.2305, rel=0.01)
    assert 0.05 > nominal_error((4, 6)) > nominal_error((4, 6, 8)) > nominal_error(LOOKS) > 0.05 / 6
    assert nominal_error(LOOKS, 0.01) == pytest.approx(nominal_error(LOOKS) / 5)
    assert ever_beyond(LOOKS, 0.005 * nominal_error(LOOKS) / 0.05) == pytest.approx(0.005, rel=0.01)


@pytest.mark.parametrize("looks", [(), (0, 4), (4, 4), (6, 4)])
def test_looks_that_do_not_increase_are_refused(looks):
    with pytest.raises(ValueError, match="do not increase"):
        nominal_error(looks)


def test_few_rounds_are_looked_at_once():
    assert [planned(rounds) for rounds in (1, 2, 3, 4)] == [(1,), (2,), (3,), (4,)]
    assert planned(5) == (4, 5)
    assert planned(10) == (4, 6, 8, 10)
    assert planned(24) == LOOKS
    assert planned(30) == (*LOOKS, 30)
    with pytest.raises(ValueError, match="plan at least 1"):
        planned(0)


def timed(rounds: int, **ratios: float) -> dict[str, dict[int, float]]:
    rng = random.Random(3)
    names = ("baseline", "nothing", "checkpoint", "remat", "offload")
    return {n: {r: ratios.get(n, 1.0) * math.exp(rng.gauss(0, 0.03)) for r in range(rounds)} for n in names}


def test_a_decided_member_leaves_and_the_baselines_stay():
    seen = look(timed(4, remat=1.5), 4, LOOKS, final=model.FINAL)
    assert seen.decided == ("remat",)
    assert seen.remaining == ("baseline", "nothing", "checkpoint", "offload")
    assert (seen.finished, seen.next_round) == (False, 6)


def test_a_group_is_finished_when_all_are_decided_or_the_looks_are_over():
    seen = look(timed(4, checkpoint=1.5, remat=1.5, offload=0.5), 4, LOOKS)
    assert (seen.finished, seen.remaining, seen.next_round) == (True, (), None)
    last = look(timed(6), 6, (4, 6), final=model.FINAL)
    assert last.finished
    assert set(last.decided) < {"checkpoint", "remat", "offload"}


def test_between_looks_nobody_leaves():
    seen = look(timed(5, remat=1.5), 5, LOOKS)
    assert seen.pooled.speeds["remat"].word == "slower"
    assert seen.decided == ()
    assert seen.next_round == 6


def test_one_sided_words_leave_only_where_they_are_enough():
    times = timed(4)
    words = {name: speed.word for name, speed in look(times, 4, LOOKS).pooled.speeds.items()}
    one_sided = {name for name, word in words.items() if word.startswith("at most")}
    assert one_sided
    assert not one_sided & set(look(times, 4, LOOKS, final=model.FINAL).decided)
    assert one_sided <= set(look(times, 4, LOOKS).decided), "that it costs no time is what is asked"


def test_members_that_failed_are_not_timed_on():
    times = timed(4)
    times["offload"] = {}
    remaining = look(times, 4, LOOKS, final=model.FINAL).remaining
    assert remaining == ("baseline", "nothing", "checkpoint", "remat")


def test_without_baselines_every_planned_round_is_timed():
    times = {name: each for name, each in timed(4).items() if name not in model.BASELINES}
    seen = look(times, 4, LOOKS)
    assert seen.remaining == ("checkpoint", "remat", "offload") and seen.next_round == 6


def test_an_interval_at_a_look_is_wider_than_without_looks():
    times = timed(6)
    plain = model.pooled(times).speeds["remat"]
    assert look(times, 6, LOOKS).pooled.speeds["remat"].half_width > 1.1 * plain.half_width


def test_a_member_keeps_what_was_known_when_it_left():
    times = timed(8, remat=1.5)
    four = look({name: {r: s for r, s in each.items() if r < 4} for name, each in times.items()}, 4, LOOKS)
    times["remat"] = {r: s for r, s in times["remat"].items() if r < 4}
    eight = look(times, 8, LOOKS, before=four)
    assert eight.pooled.speeds["remat"] == four.pooled.speeds["remat"]
    assert "remat" in eight.decided
    assert "remat" not in eight.remaining


def test_replaying_the_rounds_gives_what_the_run_saw():
    times, seen = {name: {} for name in timed(1)}, None
    whole = timed(24, remat=1.5, offload=1.05)
    for number in range(24):
        for name in times if seen is None else seen.remaining:
            times[name][number, 0] = whole[name][number]
        if number + 1 in LOOKS:
            seen = look(times, number + 1, LOOKS, before=seen)
            assert replayed(times, LOOKS) == seen
        else:
            between = replayed(times, LOOKS)
            assert between.decided == (() if seen is None else seen.decided)
            assert between.next_round == next(each for each in LOOKS if each > number + 1)
        if seen is not None and seen.finished:
            break
    assert seen.finished
    assert replayed(times, LOOKS).pooled.speeds["remat"].rounds < replayed(times, LOOKS).pooled.speeds["offload"].rounds


def test_nothing_timed_is_nothing_decided():
    seen = replayed({}, (4, 6))
    assert (seen.pooled.speeds, seen.decided) == ({}, ())


def test_the_last_look_has_the_error_that_is_left():
    assert [last_error(LOOKS, rounds) for rounds in (1, 3, 4)] == [0.05] * 3, "nothing was looked at before"
    left = [last_error(LOOKS, rounds) for rounds in (4, 5, 6, 7, 8, 12, 16, 24)]
    assert left == sorted(left, reverse=True)
    assert last_error(LOOKS, 24) == pytest.approx(nominal_error(LOOKS), rel=0.01)
    assert last_error(LOOKS, 5, 0.01) == pytest.approx(last_error(LOOKS, 5) / 5)


def test_a_walk_that_may_end_anywhere_errs_as_often_as_is_said():
    rng = random.Random(2)
    walks, beyond = 20_000, 0
    bound = {each: -NormalDist().inv_cdf(0.005 * nominal_error(LOOKS) / 0.05 / 2) for each in LOOKS}
    for _ in range(walks):
        end, total = rng.choice((9, 14, 20)), 0.0
        last = -NormalDist().inv_cdf(0.1 * last_error(LOOKS, end) / 2)
        for rounds in range(1, end + 1):
            total += rng.gauss(0, 1)
            limit = last if rounds == end else bound.get(rounds, math.inf)
            if abs(total) > limit * math.sqrt(rounds):
                beyond += 1
                break
    assert beyond / walks == pytest.approx(0.005, abs=0.0015)


def test_who_is_undecided_when_the_time_is_spent_has_all_the_error_that_is_left():
    times = timed(5, remat=1.5)
    looked, ended = replayed(times, LOOKS).pooled, concluded(times, LOOKS)
    assert ended.speeds["checkpoint"].half_width < 0.9 * looked.speeds["checkpoint"].half_width
    assert ended.speeds["checkpoint"].ratio == looked.speeds["checkpoint"].ratio
    four = {name: {r: s for r, s in each.items() if r < 4} for name, each in times.items()}
    left = {name: times[name] if name != "remat" else four[name] for name in times}
    assert "remat" in replayed(left, LOOKS).decided
    assert concluded(left, LOOKS).speeds["remat"] == look(four, 4, LOOKS).pooled.speeds["remat"]
    assert concluded({}, LOOKS).speeds == {}


def test_a_row_that_left_and_is_not_decided_by_these_rules_gets_the_error_of_one_look():
    draw, at = random.Random(5), planned(24)
    rounds = {"baseline": 8, "nothing": 8, "fused_loss": 8, "checkpoint": 4}
    times = {name: {at: math.exp(draw.gauss(0, 0.08)) for at in range(made)} for name, made in rounds.items()}
    together = concluded(times, at)
    assert "checkpoint" not in replayed(times, at).decided
    one_look = model.pooled(times, error=nominal_error(at)).speeds["checkpoint"]
    assert together.speeds["checkpoint"].interval == one_look.interval
    assert together.speeds["checkpoint"].half_width > model.pooled(times).speeds["checkpoint"].half_width
