import os
import subprocess
import sys
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from harness.verdicts.blocks import blocks

MEMBERS = ["baseline", "nothing", *(f"row {i}" for i in range(10))]


def cut(round: int = 0, group: str = "g", seconds: float = 4.0, limit: float = 20.0) -> list[list[str]]:
    return blocks(MEMBERS, dict.fromkeys(MEMBERS, seconds), group, round, limit)


@given(st.dictionaries(st.sampled_from(MEMBERS), st.floats(0.1, 50)), st.integers(0, 30), st.text(max_size=4))
def test_every_block_has_the_baseline_and_everybody_else_is_in_one(seconds, round, group):
    members = ["baseline", *seconds] if "baseline" not in seconds else list(seconds)
    made = blocks(members, seconds, group, round)
    assert all(block.count("baseline") == 1 for block in made)
    assert Counter(name for block in made for name in block if name != "baseline") == Counter(
        name for name in members if name != "baseline"
    )
    assert all(len(block) >= min(3, len(members)) for block in made)


def test_a_short_round_is_one_block_and_a_long_one_stays_within_the_limit():
    assert len(cut(seconds=1.0)) == 1
    made = cut()
    assert all(len(block) * 4.0 <= 20 for block in made)
    assert len(made) == 3  # 11 others, 4 beside the baseline in each


def test_slow_processes_are_spread():
    seconds = {**dict.fromkeys(MEMBERS, 1.0), "row 3": 15.0, "row 7": 15.0}
    made = blocks(MEMBERS, seconds, "g", 0)
    assert all(not {"row 3", "row 7"} <= set(block) for block in made)


def test_one_slow_process_leaves_the_others_their_block():
    seconds = {**dict.fromkeys(MEMBERS, 1.0), "row 3": 60.0}
    assert len(blocks(MEMBERS, seconds, "g", 0)) == 1


def test_processes_that_live_side_by_side_are_within_the_memory():
    sizes = {**dict.fromkeys(MEMBERS, 1.0), "row 3": 5.0}
    made = blocks(MEMBERS, {}, "g", 0, sizes=sizes, room=8.0)
    assert len(made) > 1
    assert all(sum(sizes[name] for name in block) <= 8.0 for block in made)


def test_two_processes_that_fill_the_memory_are_in_different_blocks_each_with_neighbours():
    sizes = {**dict.fromkeys(MEMBERS, 1.0), "row 3": 6.0, "row 7": 6.0}
    for round in range(20):
        made = blocks(MEMBERS, {"row 5": 30.0}, "g", round, sizes=sizes, room=8.0)
        assert all(sum(sizes[name] for name in block) <= 8.0 and len(block) >= 3 for block in made)


def test_processes_above_the_limit_still_have_neighbours():
    made = cut(seconds=60.0)
    assert len(made) == 5
    assert all(len(block) >= 3 for block in made)


def test_the_control_is_in_all_places_in_turn():
    orders = [cut(round) for round in range(60)]
    first = sum(next(block for block in made if "nothing" in block).index("nothing") == 0 for made in orders)
    assert 5 <= first <= 30
    partners = Counter(
        name for made in orders for block in made if "nothing" in block for name in block if name.startswith("row")
    )
    assert len(partners) == 10
    assert min(partners.values()) >= 5


def test_the_order_repeats_for_a_group_and_round_alone():
    assert cut(1) == cut(1)
    assert len({str(cut(round)) for round in range(20)}) == 20
    assert cut(group="g") != cut(group="h")
    first = [cut(round)[0][0] for round in range(120)]
    assert first.count("baseline") < 60


def test_an_unknown_duration_counts_as_the_usual_one():
    known = {name: 4.0 for name in MEMBERS if name != "row 1"}
    assert blocks(MEMBERS, known, "g", 0) == cut()
    assert len(blocks(MEMBERS, {}, "g", 0)) == 1


def test_without_a_baseline_there_is_one_block():
    assert [sorted(block) for block in blocks(["b", "a"], {"a": 90.0, "b": 90.0}, "g", 0)] == [["a", "b"]]
    assert blocks([], {}, "g", 0) == []


def test_the_order_does_not_depend_on_the_process():
    code = (
        "from harness.verdicts.blocks import blocks;"
        "print(blocks(list('abcdefg') + ['baseline'], dict.fromkeys('abcdefg', 7.0), 'x', 2))"
    )

    def run(seed: str) -> str:
        environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    made = blocks([*"abcdefg", "baseline"], dict.fromkeys("abcdefg", 7.0), "x", 2)
    assert {run("1"), run("2")} == {f"{made}\n"}
