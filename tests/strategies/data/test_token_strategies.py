"""Windows within documents, blocks without overlap, and fewer words: what they give and what they say of it."""

from dataclasses import replace
from itertools import islice, product

import numpy as np
import pytest

from harness import Parts, Place, Source
from harness.contract import plugins
from harness.contract.assembly import assemble
from harness.contract.data import Extent
from harness.records import Applied, Case
from harness.records.task import TokenFile
from harness.run.schedule import conflict
from harness.workloads.data import rows

LOADED = plugins.load()
END = 0


def parts_of(name, **knobs):
    plain = Parts(None, Place("torch", "cpu"), windows=rows.plain_windows, order=rows.order, batches=rows.batches)
    return LOADED.strategies[name].on["torch"](plain, **knobs)


def stream(lengths, window, stride, ends_with_one=True):
    """Documents of so many ids and an end each; ids count up, so that each is at one place alone."""
    ids, number = [], 1
    for length in lengths:
        ids += [*range(number, number + length), END]
        number += length
    ids = np.array(ids if ends_with_one else ids[:-1], np.uint16)
    return Source(ids[:-1], ids[1:], window, stride, batch=2)


def due_windows(source, tail):
    """Walk through the source row by row: all windows, and the rows that they cover."""
    windows, covered, inputs, targets = [], set(), source.inputs.tolist(), source.targets.tolist()
    row = 0
    while row < len(inputs):
        if inputs[row] == END:
            row += 1
            continue
        stop = row
        while stop < len(inputs) and inputs[stop] != END:
            stop += 1
        start, reached = row, row
        while start < stop and (start + source.window <= stop or (tail == "pad" and reached < stop)):
            reached = min(stop, start + source.window)
            padding = source.window - (reached - start)
            windows.append((inputs[start:reached] + [0] * padding, targets[start:reached] + [-100] * padding))
            covered |= set(range(start, reached))
            start += source.stride
        row = stop
    return windows, len(covered) / len(inputs)


def all_of(windows):
    x, y = windows.batch(np.arange(len(windows)))
    return list(zip(x.tolist(), y.tolist(), strict=True))


CORPORA = [
    [9, 1, 4, 5, 30, 2],
    [4] * 6,
    [0, 0, 12, 0, 7, 1],
    np.random.Generator(np.random.Philox(key=3)).integers(0, 14, 40).tolist(),
]


@pytest.mark.parametrize("tail", ["drop", "pad"])
@pytest.mark.parametrize("lengths", CORPORA, ids=range(len(CORPORA)))
def test_windows_are_those_found_by_walking_through_each_document(lengths, tail):
    tried = 0
    for window, stride, closed in product((1, 2, 4, 7), (1, 2, 3, 4, 9), (True, False)):
        source = stream(lengths, window, stride, closed)
        due, coverage = due_windows(source, tail)
        parts = parts_of("document_windows", end=END, tail=tail)
        if not due:
            with pytest.raises(ValueError, match="set tail to 'pad'"):
                parts.windows(parts, source)
            continue
        windows = parts.windows(parts, source)
        assert len(windows) == windows.source.count == len(due), (window, stride)
        assert all_of(windows) == due, (window, stride)
        assert parts.notes["coverage"] == pytest.approx(coverage), (window, stride)
        tried += 1
    assert tried > 10


def test_no_window_spans_an_end():
    source = stream(CORPORA[3], 5, 1)
    for tail in ("drop", "pad"):
        parts = parts_of("document_windows", end=END, tail=tail)
        x, y = parts.windows(parts, source).batch(np.arange(20))
        assert not (x[y != -100] == END).any()
        assert not (y[:, :-1] == END)[y[:, 1:] != -100].any(), "an end is the last target of its document"
        inside = (y != -100) & (y != END)
        assert np.array_equal(y[inside], x[inside] + 1)


def test_indices_may_come_in_any_order_and_type():
    source = stream([9, 1, 4, 5, 30, 2], 4, 3)
    parts = parts_of("document_windows", end=END)
    windows = parts.windows(parts, source)
    due = all_of(windows)
    some = np.array([7, 0, len(windows) - 1, 3], np.uint32)
    assert [(x.tolist(), y.tolist()) for x, y in zip(*windows.batch(some), strict=True)] == [due[i] for i in some]
    assert windows.batch(some)[0].dtype == windows.batch(some)[1].dtype == np.uint16


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_a_window_of_documents_that_does_not_exist_is_refused(tail):
    parts = parts_of("document_windows", end=END, tail=tail)
    windows = parts.windows(parts, stream([9, 1, 4, 5, 30, 2], 4, 3))
    for wrong in (-1, len(windows)):
        with pytest.raises(IndexError, match=f"window {wrong} is not among the {len(windows)} of the source"):
            windows.batch(np.array([0, wrong]))


def test_batches_of_documents_are_a_permutation_of_them():
    source = replace(stream(CORPORA[3], 4, 2), shuffle=True, batch=4, start=3)
    parts = replace(parts_of("document_windows", end=END), transfer=lambda parts, x, y: (x, y))
    windows = parts.windows(parts, source)
    whole = len(windows) // 4
    taken = list(islice(parts.batches(parts, windows), 2 * whole - 3))[-whole:]
    epoch = [tuple(x) for xs, _ in taken for x in xs.tolist()]
    assert len(set(epoch)) == 4 * whole
    assert set(epoch) <= {tuple(x) for x, _ in all_of(windows)}


def test_padded_targets_of_large_ids_keep_their_values():
    large = np.array([65_535, 40_000, 10, 7, 3_000_000_000, 10], np.uint32)
    parts = parts_of("document_windows", tail="pad")
    for ids, due in ((large[:3].astype(np.uint16), [40_000, 10]), (large[3:], [3_000_000_000, 10])):
        source = Source(np.append(ids[:2], 10).astype(ids.dtype), np.append(ids[1:], 10).astype(ids.dtype), 3, 3, 1)
        _, y = parts.windows(parts, source).batch(np.array([0]))
        assert y.tolist() == [[*due, -100]]


def test_a_tail_may_be_an_error():
    even = stream([8, 4], 4, 4)
    parts = parts_of("document_windows", end=END, tail="error")
    assert len(parts.windows(parts, even)) == 3
    for lengths, rows_left, at in (([8, 5, 4], 5, 9), ([8, 3], 3, 9)):
        with pytest.raises(
            ValueError, match=f"the document of {rows_left} rows at row {at} does not end with a window of 4"
        ):
            parts.windows(parts, stream(lengths, 4, 4))
    with pytest.raises(ValueError, match="not 'keep'"):
        parts_of("document_windows", tail="keep")


def test_ends_are_found_across_the_pieces_that_are_read(monkeypatch):
    from strategies.data.windows import document_windows

    source = stream(CORPORA[3], 3, 2)
    due, _ = due_windows(source, "drop")
    for chunk in (1, 3, 7):
        monkeypatch.setattr(document_windows, "CHUNK", chunk)
        parts = document_windows.on_any(replace(parts_of("document_windows"), windows=rows.plain_windows), end=END)
        assert all_of(parts.windows(parts, source)) == due


def test_documents_hold_24_bytes_for_each_that_has_a_window():
    import tracemalloc

    source = stream([40] * 1500, 8, 8)
    parts = parts_of("document_windows", end=END)
    parts.windows(parts, source)
    tracemalloc.start()
    try:
        windows = parts.windows(parts, source)
        declared = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    due = LOADED.strategies["document_windows"].holds(Extent(len(source.inputs), 2, 0, 8, 8, 2)).windows
    assert len(windows) == 1500 * 5
    assert declared == pytest.approx(24 * 1500, rel=0.15) == pytest.approx(due, rel=0.15)


@pytest.mark.parametrize(("n", "window", "stride"), [(40, 8, 1), (47, 8, 3), (40, 8, 20), (8, 8, 1)])
def test_blocks_do_not_overlap_and_cover_all_but_the_tail(n, window, stride):
    ids = np.arange(n + 1, dtype=np.uint16)
    plain = Parts(
        None, Place("torch", "cpu"), notes={"unused": "of the other stride"}, windows=rows.plain_windows,
        source=lambda parts: Source(ids[:-1], ids[1:], window, stride, batch=2, seed=4, start=6),
    )  # fmt: skip
    parts = LOADED.strategies["blocks"].on["torch"](plain)
    source = parts.source(parts)
    assert (source.count, source.seed, source.start) == (n // window, 4, 6)
    x, y = parts.windows(parts, source).batch(np.arange(source.count))
    assert x.ravel().tolist() == list(range(n // window * window))
    assert np.array_equal(y, x + 1)
    assert parts.notes == {"coverage": n // window * window / n}


def test_the_first_examples_of_tokens_are_copied_once_for_inputs_and_targets():
    ids = np.arange(41, dtype=np.uint16)
    plain = Parts(None, Place("torch", "cpu"), source=lambda parts: Source(ids[:-1], ids[1:], 5, 2, batch=2))
    parts = LOADED.strategies["max_examples"].on["torch"](plain, count=4)
    source = parts.source(parts)
    assert source.count == 4 and source.joined.tolist() == list(range(12))
    assert not np.shares_memory(source.inputs, ids)


def decoder(backend, *applied, corpus=None, **shape):
    made = LOADED.workloads["decoder"]
    sizes = made.probe(made.shape(**shape)).model_dump()
    case = Case(
        workload="decoder",
        shape=sizes,
        place=f"{backend}/cpu",
        corpus="drawn",
        tokenizer="none",
        strategies=tuple(Applied(name=name, knobs=knobs) for name, knobs in applied),
    )
    return assemble(LOADED, case, corpus=corpus)


def saved(folder, ids, vocabulary=67):
    path = folder / "ids.npy"
    np.save(path, ids)
    return TokenFile(path, len(ids), vocabulary, str(ids.dtype), "")


def ranked(number=2000, vocabulary=67):
    return rows.drawn_ids(number, vocabulary, seed=2).astype(np.uint16)


def test_rare_words_become_the_unknown_one_and_are_counted(tmp_path):
    ids = ranked()
    parts = decoder("torch", ("capped_vocabulary", {"size": 31}), corpus=saved(tmp_path, ids))
    source = parts.source(parts)
    due = np.where(ids >= 31, 0, ids)
    assert np.array_equal(source.inputs, due[:-1])
    counts = source.targets != -100
    assert np.array_equal(source.targets[counts], due[1:][counts])
    assert source.inputs.dtype == np.uint16 and source.inputs.max() == 30
    assert source.vocabulary == 31
    assert 0.05 < parts.notes["unknown"] == (ids >= 31).mean()
    assert parts.notes["parameters"].endswith(f"instead of {decoder('torch').shape.parameters():,}")


def test_ids_that_are_not_ranked_by_frequency_are_refused(tmp_path):
    rare_first = 66 - ranked()
    parts = decoder("torch", ("capped_vocabulary", {"size": 31}), corpus=saved(tmp_path, rare_first))
    with pytest.raises(ValueError, match=r"the ids below 31 are \d+% .* not ranked by frequency; take streaming_voc"):
        parts.source(parts)


def test_the_file_of_ids_stays_as_it_is(tmp_path):
    from strategies.data.rows import capped_vocabulary as subject

    ids = ranked()
    np.save(tmp_path / "ids.npy", ids)
    for mode in ("r", "r+", "c"):
        mapped = np.load(tmp_path / "ids.npy", mmap_mode=mode)
        result, unknown = subject.capped(mapped, 31)
        assert unknown == (ids >= 31).sum() and result.max() == 30
        del mapped
        assert np.array_equal(np.load(tmp_path / "ids.npy"), ids)


def test_ids_in_memory_are_capped_where_they_are(monkeypatch):
    from strategies.data.rows import capped_vocabulary as subject

    monkeypatch.setattr(subject, "CHUNK", 7)
    ids = ranked()
    due = np.where(ids >= 31, 0, ids)
    result, _ = subject.capped(ids, 31)
    assert result is ids and np.array_equal(ids, due)


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_embedding_and_head_have_as_many_rows_as_words(backend):
    parts = decoder(backend, ("capped_vocabulary", {"size": 31}))
    source = parts.source(parts)
    # what is drawn is drawn of all 67 words, as without the strategy
    plain = decoder(backend)
    whole = np.asarray(plain.source(plain).inputs)
    assert np.array_equal(source.inputs, np.where(whole >= 31, 0, whole))
    state = parts.init(parts, source)
    assert state["params"]["embed"].shape[0] == state["params"]["head"].shape[0] == parts.shape.vocabulary == 31
    x, y = next(parts.batches(parts, parts.windows(parts, source)))
    _, loss = parts.step(parts, state, x, y)
    assert float(loss) == pytest.approx(np.log(31), rel=0.1)


@pytest.mark.parametrize("size", [67, 10_000])
def test_a_vocabulary_that_is_no_larger_changes_nothing(size):
    plain = decoder("torch")
    assert LOADED.strategies["capped_vocabulary"].on["torch"](plain, size=size) is plain


@pytest.mark.parametrize("reader", ["mapped", "pread", "reservoir", "streaming"])
@pytest.mark.parametrize("name", ["capped_vocabulary", "streaming_vocabulary"])
def test_ids_that_are_changed_do_not_stay_in_their_file(name, reader):
    pair = [LOADED.strategies[each] for each in (name, reader)]
    assert "read into memory" in str(conflict(pair)) and conflict(pair) == conflict(pair[::-1])


def test_a_vocabulary_of_less_than_a_word_is_refused():
    with pytest.raises(ValueError, match="give 2"):
        decoder("torch", ("capped_vocabulary", {"size": 1}))


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("name", ["document_windows", "blocks"])
def test_the_loss_is_finite(name, backend):
    knobs = dict(LOADED.strategies[name].probe)
    parts = decoder(backend, (name, knobs))
    source = parts.source(parts)
    x, y = next(parts.batches(parts, parts.windows(parts, source)))
    _, loss = parts.step(parts, parts.init(parts, source), x, y)
    assert np.isfinite(float(loss))
    assert 0 < parts.notes["coverage"] <= 1


def test_each_says_what_it_holds():
    extent = Extent(1 << 22, 2, 0, 128, 64, 16)
    for name in ("document_windows", "blocks", "capped_vocabulary"):
        declared = LOADED.strategies[name].holds(extent)
        assert declared.batches == 0, f"{name}: a batch is counted already"
    assert LOADED.strategies["capped_vocabulary"].holds(extent).making == 2 << 20
