"""Text as it is shown: in a spreadsheet, as code within a sentence, and again without its markup."""

import pytest

from harness.report.text import cell, escaped, plain, with_code


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("=1+1", "'=1+1"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@a", "'@a"),
        ("a=1", "a=1"),
        ("a\x1bb\nc", "a b\nc"),
    ],
)
def test_no_cell_of_a_spreadsheet_is_a_formula_or_obeyed(text: str, shown: str) -> None:
    assert cell(text) == shown


def test_what_stands_between_backticks_stays_code_and_all_else_is_inert() -> None:
    assert with_code("see `fused_loss` *now* <b>") == r"see `fused_loss` \*now\* &lt;b&gt;"


def test_a_sentence_without_its_markup_reads_as_it_was_written() -> None:
    assert plain(f"Use **lean**: `{escaped('a*b|c<d>')}` at 1.2 x.") == "Use lean: a*b|c<d> at 1.2 x."
