"""What a run consists of: which rows cannot be, and why."""

import pytest

from harness import Strategy
from harness.contract import plugins
from harness.records import Applied, Case
from harness.run.schedule import conflict, obstacle

LOADED = plugins.load()


def strategy(name: str, **conflicts: str) -> Strategy:
    return Strategy(
        name, rewrites=(), on={}, about="About.", conflicts={key.replace("_", " "): conflicts[key] for key in conflicts}
    )


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


@pytest.mark.parametrize(
    ("names", "word"),
    [
        (("clip_gradients", "float16_scaled"), "while they are scaled"),
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
        (("float16_scaled", "clip_gradients"), None),
        (("accumulate", "clip_gradients"), None),
        (("lora", "bfloat16_autocast"), None),
        (("adam_8bit", "fsdp"), None),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else "",
)
def test_what_would_be_wrong_without_a_word_is_a_row_that_says_why(names: tuple[str, ...], word: "str | None") -> None:
    case = Case(
        workload="decoder",
        shape={"tokens": 64},
        place="torch/cpu",
        corpus="zipf",
        tokenizer="bytes",
        strategies=tuple(Applied(name=name) for name in names),
    )
    reason = obstacle(LOADED, case)
    assert (reason is None) if word is None else (reason is not None and word in reason)
