"""What a hostile, careless or honest YAML file turns into: plain values, or one sentence with its place."""

import gc
import json
import math
import os
import pickle
import time

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.suite.bounds import SuiteError
from harness.suite.claims import claims_of
from harness.suite.yaml import MAX_BYTES, YamlError, line_of, load, loads


def refusal(text: str | bytes) -> YamlError:
    with pytest.raises(YamlError) as caught:
        loads(text, "suite.yaml")
    return caught.value


def value(scalar: str) -> object:
    return loads(f"key: {scalar}\n").data["key"]


def test_a_suite_becomes_plain_values_with_a_line_for_each():
    document = loads(
        "# what still fits\n"
        "title: What still fits\n"
        "shape: {layers: 6, tokens: [2048, 8192]}\n"
        "at:\n"
        "  '*/cuda': {batch: 1}\n"
        "strategies:\n"
        "  - nothing\n"
        "  - [checkpoint, {chunked: {chunk: 1024}}]\n"
    )
    assert document.data == {
        "title": "What still fits",
        "shape": {"layers": 6, "tokens": [2048, 8192]},
        "at": {"*/cuda": {"batch": 1}},
        "strategies": ["nothing", ["checkpoint", {"chunked": {"chunk": 1024}}]],
    }
    assert document.lines[("title",)] == 2
    assert document.lines[("shape", "tokens", 1)] == 3
    assert document.lines[("at", "*/cuda")] == 5
    assert document.lines[("strategies", 0)] == 7
    assert document.lines[("strategies", 1, 1, "chunked", "chunk")] == 8
    assert len(document.lines) == 16


def test_line_of_falls_back_to_the_longest_known_beginning():
    document = loads("a: 1\nb:\n  - c: 2\n    d: 3\n")
    assert line_of(document, ("b", 0, "d")) == 4
    assert line_of(document, ["b", 0, "missing", "deeper"]) == 3
    assert line_of(document, ("b", 7)) == 2
    assert line_of(document, ("missing",)) is None
    assert line_of(document, ()) is None


@pytest.mark.parametrize(
    ("scalar", "expected"),
    [
        ("", None), ("~", None), ("null", None), ("true", True), ("false", False),
        ("0", 0), ("-0", 0), ("+5", 5), ("-12", -12), ("9" * 32, int("9" * 32)),
        ("1e-3", 1e-3), ("1E5", 1e5), ("1e+5", 1e5), ("-2.5", -2.5), (".5", 0.5), ("1.", 1.0),
        ("0e-999", 0.0), ("5e-324", 5e-324),
    ],
)  # fmt: skip
def test_plain_scalars_are_null_booleans_and_decimal_numbers(scalar, expected):
    assert value(scalar) == expected
    assert type(value(scalar)) is type(expected)


@pytest.mark.parametrize(
    "scalar",
    [
        "no", "No", "on", "off", "yes", "y", "True", "FALSE", "Null", "NULL", "017", "-01", "00.5", "1:30",
        "0x1F", "0o7", "0b1", "1_000", ".inf", "-.inf", ".nan", "inf", "nan", "2024-01-01", "1e", "e5", ".",
        "1.2.3", "1,5", "1 000", "<<", "=", "٣", "²",
    ],
)  # fmt: skip
def test_every_other_plain_scalar_is_text(scalar):
    assert value(scalar) == scalar


@pytest.mark.parametrize("text", ["", "~", "null", "true", "1", "1e-3", "9" * 33, "1e999", "*/cuda", "<<"])
def test_everything_quoted_is_text(text):
    assert value(f'"{text}"') == text
    assert value(f"'{text}'") == text
    assert value(f"|-\n  {text}") == text


def test_keys_are_text_as_written():
    text = 'on: 1\nno: 2\n1: 3\n1.0: 4\nnull: 5\n~: 6\n017: 7\ntrue: 8\n"<<": 9\n"": 10\n'
    keys = ["on", "no", "1", "1.0", "null", "~", "017", "true", "<<", ""]
    assert loads(text).data == dict(zip(keys, range(1, 11), strict=True))


@pytest.mark.parametrize(
    ("text", "line", "column", "says"),
    [
        ("a: 1\nb: *a\n", 2, 4, "write text with a * in quotes"),
        ("a: 1\n*a : 1\n", 2, 1, "write text with a * in quotes"),
        ("at:\n  */cuda: {batch: 1}\n", 2, 3, "write text with a * in quotes"),
        ("places: [torch/cpu, *]\n", 1, 21, "write text with a * in quotes"),
        ("a: &x 1\n", 1, 4, "anchor"),
        ("a: 1\n&x b: 1\n", 2, 1, "anchor"),
        ("a: &x [1]\n", 1, 4, "anchor"),
        ("a: & 1\n", 1, 4, "anchor"),
        ("a: !!str 1\n", 1, 4, "tag"),
        ("a: ! 1\n", 1, 4, "tag"),
        ("a: !e!x 1\n", 1, 4, "tag"),
        ("a: {b: !!python/object/apply:os.system [id]}\n", 1, 8, "tag"),
        ("!!map\na: 1\n", 1, 1, "tag"),
        ("%YAML 1.1\n---\na: 1\n", 1, 1, "directive"),
        ("%YAML 9.9\n---\na: 1\n", 1, 1, "directive"),
        ("%TAG !e! x:\n---\na: 1\n", 1, 1, "directive"),
        ("%UNKNOWN x\n---\na: 1\n", 1, 1, "directive"),
        ("a: 1\n---\nb: 1\n", 2, 1, "second document"),
        ("a: 1\n...\n---\n", 3, 1, "second document"),
        ("a: 1\nb: 2\n\na: 3\n", 4, 1, "the key 'a' is on line 1 already"),
        ("x: {a: 1, \"a\": 2}\n", 1, 11, "the key 'a' is on line 1 already"),
        ("? [a]\n: 1\n", 1, 3, "a key may not be a list or a mapping"),
        ("a: 1\n{b: 1}: 2\n", 2, 1, "a key may not be a list or a mapping"),
        ("a: 1\n<<: {b: 1}\n", 2, 1, "merge key <<"),
        ("a: 1\nb: 1e999\n", 2, 4, "the number '1e999' is outside the range"),
        ("a: -1e309\n", 1, 4, "the number '-1e309' is outside the range"),
        ("a: 1e-999\n", 1, 4, "the number '1e-999' is outside the range"),
        ("a: " + "1" * 33, 1, 4, "more than 32 characters"),
        ("a: 0." + "1" * 31, 1, 4, "more than 32 characters"),
        ("a: " + "b" * 4097, 1, 4, "4097 characters, more than 4096"),
        ("? " + "b" * 4097, 1, 3, "4097 characters, more than 4096"),
        ("a: '" + "b" * 4097 + "'", 1, 4, "4097 characters, more than 4096"),
        ("a: " + "[" * 15 + "{b: 1}" + "]" * 15, 1, 19, "more than 16 levels"),
        ("- 1\n", 1, 1, "not a mapping"),
        ("just text", 1, 1, "not a mapping"),
        ("--- 1", 1, 5, "not a mapping"),
        ("a: b: c\n", 1, 5, "mapping values are not allowed here"),
        ("a: 1\nb: [c\n", 3, 1, "while parsing a flow sequence from line 2"),
        ('a: "b\n\n', 3, 1, "while scanning a quoted scalar from line 1"),
        ('a: "\\*"', 1, 6, "unknown escape character '*'"),
        ("a:\n\t- b\n", 2, 1, "write spaces"),
        ("a: @b\n", 1, 4, "may not start with @; write it in quotes"),
        ("a: %b\n", 1, 4, "may not start with %; write it in quotes"),
        ('a: 1\nb: "\\UFFFFFFFF"\n', 2, 7, "too large"),
        ("%YAML " + "1" * 5000 + ".1\n", 1, 7, "too large"),
        ('a: "\\ud83d"\n', 1, 4, "half of a surrogate pair"),
        ("a: 1\nb: x\x00y\n", 2, 5, "the character '\\x00' is not allowed"),
        ("a: \ud800\n", 1, 4, "byte 0xed is not UTF-8"),
        (b"a: 1\r\n\xc3\xa9: \xff\n", 2, 4, "byte 0xff is not UTF-8"),
        ("a: 1\n".encode("utf-16"), 1, 1, "byte 0xff is not UTF-8"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_is_wrong_and_where(text, line, column, says):
    error = refusal(text)
    assert (error.line, error.column) == (line, column)
    assert str(error).startswith(f"suite.yaml, line {line}, column {column}: ")
    assert says in str(error)
    assert str(error).isprintable()
    assert len(str(error)) < 300


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused_as_a_whole(text):
    error = refusal(text)
    assert str(error) == "suite.yaml: holds no values; write lines such as 'key: value'"
    assert (error.where, error.line, error.column) == ("suite.yaml", None, None)


def test_limits_allow_what_reaches_them():
    assert value("b" * 4096) == "b" * 4096
    assert value("[" * 15 + "]" * 15) is not None
    # Besides the items: start and end of stream, document, root and list, and the key.
    assert len(value("[" + "1," * (20_000 - 9) + "]")) == 20_000 - 9
    assert "more than 20000" in str(refusal("key: [" + "1," * (20_000 - 8) + "]"))
    padded = b"a: 1\n#" + b"x" * (MAX_BYTES - 6)
    assert loads(padded).data == {"a": 1}
    assert "holds more than 262144 bytes" in str(refusal(padded + b"x"))
    assert "holds more than 262144 bytes" in str(refusal("a: é\n#" + "x" * (MAX_BYTES - 6)))


def test_one_explicit_document_and_a_byte_order_mark_are_fine():
    assert loads(b"\xef\xbb\xbf# note\n---\na: 1\r\nb: 2\n...\n").data == {"a": 1, "b": 2}


def test_json_surrogate_pairs_are_one_character():
    assert loads('{"a": "\\ud83d\\ude00"}').data == {"a": "\U0001f600"}


def bomb(reference: str) -> str:
    lines = ["a0: &a0 {k: v}"]
    lines += [f"a{i}: &a{i} {reference.format(', '.join([f'*a{i - 1}'] * 10))}" for i in range(1, 8)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        bomb("{{<<: [{}]}}"),
        bomb("[{}]"),
        "a: " + "[" * 5000,
        "a: " + "[" * 5000 + "]" * 5000,
        "[" * MAX_BYTES,
        "{a: " * (MAX_BYTES // 4),
        "- " * (MAX_BYTES // 2),
        "a: " + "9" * 200_000,
        "a: 1" + "0" * 200_000 + "e5",
        "a: !" + "x" * 200_000,
        "a: '" + "\n" * 200_000 + "b'",
        "a: " + "b\n " * 80_000,
        "%a b\n" * 50_000,
        "a: [" + "b," * 120_000,
    ],
    ids=lambda text: text[:12],
)
def test_attacks_end_within_a_second(text, slowness):
    gc.disable()  # what earlier tests left behind is theirs to collect
    try:
        start = time.thread_time()  # of this thread alone: others of the process, and of the machine, do not count
        error = refusal(text)
        assert time.thread_time() - start < slowness
    finally:
        gc.enable()
    assert error.line is not None


def test_messages_show_control_characters_inert():
    escape = '"\\e[31m\\u202e": 1\n'
    with pytest.raises(YamlError) as caught:
        loads(escape * 2, "evil\x1b[2J\n\u202e.yaml")
    assert caught.value.where == "evil\\x1b[2J\\n\\u202e.yaml"
    assert str(caught.value) == (
        "evil\\x1b[2J\\n\\u202e.yaml, line 2, column 1: "
        "the key '\\x1b[31m\\u202e' is on line 1 already; keep one of the two"
    )
    assert "character '\\x1b' is not allowed" in str(refusal("a: \x1b[31m\n"))
    assert str(refusal("a: [\u202e\u2066\n")).isprintable()


def test_an_error_shows_no_other_error_and_survives_pickling():
    error = refusal("a: [1\n")
    assert error.__suppress_context__
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.where, copy.line, copy.column) == (str(error), "suite.yaml", 2, 1)


def test_load_reads_a_regular_file(tmp_path):
    path = tmp_path / "suite.yaml"
    path.write_text("titre: été\n", encoding="utf-8")
    assert load(path).data == {"titre": "été"}
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    assert load(link) == load(path)


def test_load_names_the_file_and_reads_no_more_than_the_limit(tmp_path):
    path = tmp_path / "suite.yaml"
    path.write_text("a: 1\na: 2\n")
    with pytest.raises(YamlError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}, line 2, column 1: ")
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: holds no blocks
    with pytest.raises(YamlError, match="holds more than 262144 bytes"):
        load(path)


def test_load_refuses_what_is_no_readable_file(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    expected = {
        tmp_path / "missing": "No such file",
        tmp_path: "directory",
        pipe: "is not a regular file",
        loop: "symbolic links",
        tmp_path / "nul\x00byte": "null byte",
    }
    open_files = os.listdir("/dev/fd")
    for path, says in expected.items():
        with pytest.raises(YamlError, match=says) as caught:
            load(path)
        assert caught.value.line is None
        assert str(caught.value).startswith(f"{caught.value.where}: ")
        assert str(caught.value).isprintable()
    assert os.listdir("/dev/fd") == open_files


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_load_refuses_an_unreadable_file(tmp_path):
    path = tmp_path / "suite.yaml"
    path.write_text("a: 1\n")
    path.chmod(0)
    with pytest.raises(YamlError, match="Permission denied"):
        load(path)


fragments = st.sampled_from(
    [
        "a", "b", "1", "1e9", "-", "- ", "?", "? ", ":", ": ", ",", "#", " #", "&", "&x ", "*", "*x", "!",
        "!!str ", "!<x>", "|", ">", "'", '"', "%", "@", "`", "~", "=", "<<", "[", "]", "{", "}", "---", "...",
        "\\", "\\x41", "\\ud83d", "\\ude00", "\\U00110000", "%YAML ", "1.1", "null", "true", "é",
        "\U0001f600", " ", "\n", "\n  ", "\t", "\r", "\x00", "\x1b", "\x85", "\u2028", "\ufeff", "\ud800",
    ]
)  # fmt: skip


@settings(deadline=None)
@given(st.text() | st.binary() | st.lists(fragments, max_size=30).map(lambda parts: "a: " + "".join(parts)))
def test_any_input_loads_or_is_refused_in_one_printable_line(text):
    try:
        document = loads(text, "suite.yaml")
    except YamlError as error:
        assert str(error).isprintable()
        assert str(error).startswith("suite.yaml")
    else:
        assert isinstance(document.data, dict)
        assert {path[:1] for path in document.lines} == {(key,) for key in document.data}


# A simple YAML key ends within 1024 characters; escaped, one character takes up to 12.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def mappings(leaves):
    children = st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
        max_leaves=20,
    )
    return st.dictionaries(texts, children, max_size=4).filter(lambda data: depth(data) <= 16)


def depth(data) -> int:
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


numbers = st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)


@settings(deadline=None)
@given(mappings(st.none() | st.booleans() | numbers | texts))
def test_json_loads_as_what_was_written(data):
    read = loads(json.dumps(data)).data
    assert read == data
    assert json.dumps(read) == json.dumps(data)  # 1, 1.0 and True are equal, but not the same
    assert loads(json.dumps(data, indent=2)).data == data


class NoAliases(yaml.SafeDumper):
    """Write a list that occurs twice twice."""

    def ignore_aliases(self, data):
        return True


@settings(deadline=None)
@given(mappings(texts), st.booleans())
def test_double_quoted_yaml_loads_as_what_was_written(data, flow):
    text = yaml.dump(data, Dumper=NoAliases, default_style='"', default_flow_style=flow, sort_keys=False)
    assert loads(text).data == data


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_keep_every_bit(number):
    read = value(repr(number))
    assert isinstance(read, float)
    assert (read, math.copysign(1, read)) == (number, math.copysign(1, number))


def test_what_a_model_refuses_is_said_with_its_line(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("title: t\nworkload: w\nstrategies: [x]\nclaims:\n  - id: a\n    says: 3\n    that: 1 < 2\n")
    with pytest.raises(SuiteError, match=r"mine\.yaml, line 6: claims\.0\.says: "):
        claims_of(path)
