"""The place of a case is a value in memory and text where it is written, so that what was written stays readable."""

import pickle

import pytest
from pydantic import ValidationError

from harness.records import Case
from harness.records.place import Place

WRITTEN = (
    '{"workload": "decoder", "shape": {"vocabulary": 4096, "batch": 4, "tokens": 64, "stride": null, '
    '"label_smoothing": 0.0, "z_loss": 0.0, "soft_cap": 0.0, "learning_rate": 0.001, "weight_decay": 0.01, '
    '"ignored": 0.0, "shuffle": false, "corpus_tokens": null, "layers": 12, "width": 512, "heads": 8, '
    '"kv_heads": null, "head_width": null, "hidden": null, "tied": false, "feed": "swiglu", "norm": "rms", '
    '"bias": false, "parallel": false, "query_key_norm": false, "rotary_share": 1.0, "rotary_base": 10000.0}, '
    '"place": "torch/cpu", "corpus": "standard_library", "tokenizer": "bpe", "strategies": [{"name": "ddp"}], '
    '"ranks": 2}'
)
"""The case of a committed record."""
DIGEST = "31fbf253d055f274b21bf65a"
"""Its digest when the place was text."""


def test_a_committed_case_keeps_its_digest() -> None:
    case = Case.model_validate_json(WRITTEN)
    assert case.digest() == DIGEST
    assert case.model_copy(update={"place": "torch/cpu"}).digest() == DIGEST


def test_a_place_is_a_value_that_is_written_as_text() -> None:
    case = Case.model_validate_json(WRITTEN)
    assert case.place == Place("torch", "cpu") and f"{case.place}" == "torch/cpu"
    assert case.model_dump()["place"] == case.model_dump(mode="json")["place"] == "torch/cpu"
    assert Case.model_validate_json(case.model_dump_json()) == case == pickle.loads(pickle.dumps(case))


@pytest.mark.parametrize("place", ["torch", "torch/", "torch/cpu/0", 3, None, ["torch", "cpu"]])
def test_what_is_no_place_is_refused_in_a_sentence(place: object) -> None:
    with pytest.raises(ValidationError, match="is not a place: write backend/device"):
        Case(workload="decoder", shape={}, place=place, corpus="drawn", tokenizer="none")
