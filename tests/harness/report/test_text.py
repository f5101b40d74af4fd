"""Text as it is shown: in a spreadsheet, as code within a sentence, and again without its markup."""

import html

import pytest
from markdown_it import MarkdownIt
from tabulate import tabulate

from harness.report.text import cell, escaped, on_terminal, plain, row_name, with_code


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


@pytest.mark.parametrize(
    ("label", "is_code"),
    [
        ("fused_loss", True),
        ("named(kind=a*b&amp;[e])", True),
        ("named(kind=a|b)", False),
        ("named(kind=<a>)", False),
        ("named(kind=`a`)", False),
        (r"named(kind=a\b*\|)", False),
        ("named(kind=<&lt;&#35;&amp;amp;&b)", False),
    ],
)
def test_a_label_is_shown_letter_by_letter_in_a_table_and_without_markup(label: str, is_code: bool) -> None:
    page = MarkdownIt("commonmark").enable("table").render(f"| row | b |\n|:--|:--|\n| {row_name(label)} | 1 |\n")
    shown = html.escape(label, quote=False)
    assert f'<td style="text-align:left">{f"<code>{shown}</code>" if is_code else shown}</td>' in page
    assert plain(row_name(label)) == label


def test_code_of_a_sentence_is_shown_letter_by_letter() -> None:
    page = MarkdownIt("commonmark").render(with_code("see `a * b`, `c < d` and *now*"))
    assert page == "<p>see <code>a * b</code>, c &lt; d and *now*</p>\n"


def test_a_sentence_without_its_markup_reads_as_it_was_written() -> None:
    assert plain(f"Use **lean**: {row_name('a*b|c<d>')} at 1.2 x.") == "Use lean: a*b|c<d> at 1.2 x."


@pytest.mark.parametrize(
    "label", [r"named(kind=a|b)", r"named(kind=a\b*\|)", "named(kind=<a>&lt;)", "named(kind=[`a`])"]
)
def test_a_terminal_shows_a_table_without_escapes_and_straight(label: str) -> None:
    rows = tabulate([(row_name(label), "1"), ("`plain`", "2")], ("row", "b"), tablefmt="pipe", disable_numparse=True)
    shown = on_terminal(f"{rows}\n\nUse **{escaped(label)}**.\n\n```sh\necho \\*\n```\n").split("\n")
    assert shown[2].startswith(f"| {label} ") and shown[5] == f"Use **{label}**."
    assert len({len(line) for line in shown[:4]}) == 1, "as wide as before"
    assert "echo \\*" in shown, "code is as it is to be typed"
