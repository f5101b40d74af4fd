"""Documents of all lengths: packed answers are those of padding, an epoch has each one once, peaks are foreseen."""

from dataclasses import replace
from functools import partial
from itertools import islice
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from harness import IGNORED, Place, backends
from harness.contract import place, plugins
from harness.contract.assembly import assemble
from harness.contract.loop import training
from harness.records import Applied, Case, Task
from harness.run import runner
from harness.run.schedule import conflict
from harness.verdicts.observed import of_steps
from harness.worker import batch_sizes, timing
from harness.workloads.data import documents
from harness.workloads.data.sources import PIECE, CorpusError, resolve

LOADED = plugins.load()
DOCUMENTS = LOADED.workloads["documents"]
MIB = 1 << 20


def case_of(backend, *names, shape=None, **sizes):
    shape = shape or DOCUMENTS.probe(DOCUMENTS.shape()).model_dump() | sizes
    applied = tuple(Applied(name=name, knobs=dict(LOADED.strategies[name].probe)) for name in names)
    return Case(
        workload="documents",
        shape=shape,
        place=f"{backend}/cpu",
        corpus="drawn",
        tokenizer="none",
        strategies=applied,
    )


def parts_of(backend, *names, **sizes):
    return assemble(LOADED, case_of(backend, *names, **sizes))


def opened(parts):
    source = parts.source(parts)
    return source, parts.windows(parts, source)


def losses_of(backend, parts, steps):
    module = backends.load(backend)
    module.start(Place(backend, "cpu"))
    return [float(loss) for loss, _ in islice(training(parts, module.prepare(parts), finish=module.wait), steps)]


# Padded


def test_a_document_predicts_each_of_its_tokens_but_the_first():
    source, windows = opened(parts_of("torch", ignored=0.0))
    for index in range(source.count):
        x_1T, y_1T = windows.batch([index])
        first, length = int(source.firsts_N[index]), int(source.lengths_N[index])
        assert x_1T.shape == (1, length)
        whole = np.append(source.inputs, source.targets[-1])[first : first + length + 1]
        assert (x_1T[0] == whole[:-1]).all() and (y_1T[0] == whole[1:]).all()


@pytest.mark.parametrize("backend", place.NAMES)
def test_a_batch_is_padded_to_its_longest_and_in_jax_to_the_window(backend):
    source, windows = opened(parts_of(backend))
    shortest = np.argsort(source.lengths_N)[:3]
    longest = int(source.lengths_N[shortest].max()) if backend == "torch" else source.window
    x_BT, y_BT = windows.batch(shortest)
    assert x_BT.shape == windows.size(shortest) == (3, longest) and longest <= source.window
    for row, index in enumerate(shortest):
        assert (x_BT[row, source.lengths_N[index] :] == 0).all()
        assert (y_BT[row, source.lengths_N[index] :] == IGNORED).all()


# Packed


@pytest.mark.parametrize("backend", place.NAMES)
def test_a_row_has_every_token_once_and_positions_begin_anew(backend):
    _, padded = opened(parts_of(backend))
    source, packed = opened(parts_of(backend, "packed"))
    x_BT, y_BT = padded.batch(np.arange(3))
    x_1T2, y_1T = packed.batch(np.arange(3))
    lengths = source.lengths_N[:3]
    real = np.concatenate([np.arange(length) for length in lengths])
    total = len(real)
    assert x_1T2.shape == packed.size(np.arange(3))
    assert (x_1T2[0, :total, 1] == real).all() and (x_1T2[0, total:, 1] == -1).all()
    assert (x_1T2[0, :total, 0] == np.concatenate([x[:n] for x, n in zip(x_BT, lengths, strict=True)])).all()
    assert (y_1T[0, :total] == np.concatenate([y[:n] for y, n in zip(y_BT, lengths, strict=True)])).all()
    assert (y_1T[0, total:] == IGNORED).all()


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
@pytest.mark.parametrize("others", [(), ("checkpoint", "fused_loss")])
def test_packed_trains_as_padded(backend, others):
    packed = losses_of(backend, parts_of(backend, "packed", *others), 8)
    assert packed == pytest.approx(losses_of(backend, parts_of(backend), 8), rel=2e-6)


@pytest.mark.parametrize("backend", place.NAMES)
def test_a_document_sees_no_other(backend):
    """Without the limits of attention, or with positions that go on, the losses are others."""
    right = losses_of(backend, parts_of(backend, "packed", query_key_norm=False), 2)
    plain = parts_of(backend, query_key_norm=False)
    parts = parts_of(backend, "packed", query_key_norm=False)
    leaky = replace(parts, grad=lambda parts, state, x, y: plain.grad(parts, state, x, y))
    assert losses_of(backend, leaky, 2)[0] != pytest.approx(right[0], rel=1e-5)


@pytest.mark.parametrize("names", [("truncated", "packed"), ("packed", "truncated")], ids="+".join)
def test_packed_documents_attend_as_far_as_they_are_cut(names):
    parts, seen = parts_of("jax", *names), []

    def attend(parts_, *of_tokens):
        seen.append(of_tokens[0].shape[1])
        return parts.attend(parts_, *of_tokens)

    source, windows = opened(parts)
    watched, state = replace(parts, attend=attend), parts.init(parts, source)
    jax.eval_shape(partial(watched.grad, watched), state, *windows.batch(np.arange(source.batch)))
    assert set(seen) == {11} and source.window == 11


@pytest.mark.parametrize("name", ["update_in_backward"])
def test_packed_goes_with_what_rewrites_the_step(name):
    for names in (("packed", name), (name, "packed")):
        assert losses_of("torch", parts_of("torch", *names), 3) == pytest.approx(
            losses_of("torch", parts_of("torch"), 3), rel=1e-5
        )


@pytest.mark.parametrize("backend", place.NAMES)
def test_packed_is_refused_an_evaluation_which_would_mix_the_documents(backend):
    with pytest.raises(ValueError, match="packed tells documents apart where the gradient is taken"):
        parts_of(backend, "packed", evaluations=2)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, "whole rows") for name in ("ring_attention", "ulysses", "megatron_sequence_parallel")),
        ("accumulate", "is one row, which is not cut"),
    ],
)
def test_packed_is_refused_what_cuts_its_row_and_what_cannot(name, reason):
    pair = [LOADED.strategies[each] for each in ("packed", name)]
    assert reason in str(conflict(pair)) and reason in str(conflict(pair[::-1]))


# Order


@pytest.mark.parametrize("name", ["bucketed_lengths", "longest_first"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_epoch_has_every_document_once(name, shuffle):
    parts = parts_of("torch", name, shuffle=shuffle)
    source, _ = opened(parts)
    for epoch in range(2):
        assert sorted(parts.order(parts, source, epoch)(0, source.count)) == list(range(source.count))


def test_no_document_is_left_out_of_every_epoch():
    """Of 11 documents three fill no batch of four: they must not be the shortest each time."""
    parts = parts_of("torch", "bucketed_lengths", shuffle=True, documents=11, batch=4)
    source, _ = opened(parts)
    epochs = [set(parts.order(parts, source, epoch)(0, 8).tolist()) for epoch in range(12)]
    assert {len(epoch) for epoch in epochs} == {8}
    assert set.union(*epochs) == set(range(11))


def test_an_epoch_is_put_in_order_once_however_many_batches_it_has():
    """Each order of 2,000 documents is a permutation of all of them."""
    parts, orders = parts_of("torch", documents=2000, shuffle=True), []

    def order(parts_, source, epoch):
        orders.append(epoch)
        return parts.order(parts_, source, epoch)

    epoch = batch_sizes.of_epoch(DOCUMENTS, replace(parts, order=order))
    assert orders == [0] and len(epoch.shapes) == 2000 // parts.shape.batch
    source, windows = opened(parts)
    indices_B = parts.order(parts, source, 0)(source.batch, 2 * source.batch)
    assert epoch.shapes[1] == windows.size(indices_B)


def test_buckets_have_documents_of_like_lengths():
    plain, sorted_ = (
        batch_sizes.of_epoch(DOCUMENTS, parts_of("torch", *names)) for names in ((), ("bucketed_lengths",))
    )
    assert sum(sorted_.tokens) == sum(plain.tokens) and sum(sorted_.slots) < 0.8 * sum(plain.slots)
    assert max(sorted_.slots) == max(plain.slots), "the longest document is as long as before"


def test_documents_change_their_batch_within_a_pool_alone():
    plain = parts_of("torch")
    source, _ = opened(plain)
    whole = source.count // source.batch

    def batches(parts):
        order = np.asarray(parts.order(parts, source, 0)(0, whole * source.batch))
        return {frozenset(each.tolist()) for each in order.reshape(whole, -1)}

    one, three = (LOADED.strategies["bucketed_lengths"].on["torch"](plain, pool=pool) for pool in (1, 3))
    assert batches(one) == batches(plain) != batches(three)


@pytest.mark.parametrize("others", [(), ("packed",), ("bucketed_lengths",)])
def test_the_largest_batch_comes_second(others):
    before = batch_sizes.of_epoch(DOCUMENTS, parts_of("torch", *others, documents=40))
    after = batch_sizes.of_epoch(DOCUMENTS, parts_of("torch", *others, "longest_first", documents=40))
    assert after.largest == 1 and sorted(after.shapes) == sorted(before.shapes)


# Truncated


def test_what_is_cut_off_is_noted_and_not_trained_on():
    parts = parts_of("torch", "truncated")
    source, windows = opened(parts)
    assert windows.batch(np.arange(source.count))[0].shape[1] == 11
    whole, _ = opened(parts_of("torch"))
    assert parts.notes["truncated_share"] == pytest.approx(1 - source.lengths_N.sum() / whole.lengths_N.sum())
    assert 0 < parts.notes["truncated_share"] < 1


def test_of_a_document_that_is_cut_the_first_tokens_stay():
    source, cut = opened(parts_of("torch", "truncated"))
    whole, untouched = opened(parts_of("torch"))
    x_BT, y_BT = cut.batch(np.arange(source.count))
    whole_x_BT, whole_y_BT = untouched.batch(np.arange(whole.count))
    lengths = np.minimum(whole.lengths_N, 11)
    assert (whole.lengths_N > 11).any() and (whole.lengths_N < 11).any()
    for row, length in enumerate(lengths):
        assert (x_BT[row, :length] == whole_x_BT[row, :length]).all()
        assert (y_BT[row, :length] == whole_y_BT[row, :length]).all()
        assert (y_BT[row, length:] == IGNORED).all()


# Worst batch, predicted and measured


SHAPE = {"layers": 4, "width": 128, "heads": 4, "vocabulary": 4096, "documents": 24, "batch": 4, "tokens": 768}


def record(kind, backend, *names):
    case = case_of(backend, *names, shape=SHAPE).model_copy(
        update={"strategies": tuple(Applied(name=n) for n in names)}
    )
    task = Task(kind=kind, cases=(case,), run_id=f"documents-{kind}", parent=0, folder="", steps=6)
    (answer,) = runner.run(task, 1, 240.0)
    assert answer.status == "ok", answer.evidence
    return answer


@pytest.mark.long
@pytest.mark.parametrize("names", [(), ("packed",), ("longest_first",)], ids=lambda names: "+".join(names) or "padded")
def test_the_peak_is_that_of_the_worst_batch_and_comes_where_it_does(names):
    measured = record("memory", "torch", *names)
    predicted = record("predict", "torch", *names).prediction.predicted_peak_bytes
    assert measured.memory.peak_host_bytes == pytest.approx(predicted, rel=0.05, abs=2 * MIB)
    epoch = batch_sizes.of_epoch(DOCUMENTS, assemble(LOADED, case_of("torch", *names, shape=SHAPE)))
    assert measured.memory.peak_step == measured.extra["largest_batch_step"] == epoch.largest + 1
    assert measured.extra["tokens_per_step"] * len(epoch.shapes) == sum(epoch.tokens)
    assert 0 <= measured.extra["padding_share"] < 1 and (measured.extra["padding_share"] == 0) == (names == ("packed",))


@pytest.mark.long
def test_jax_compiles_for_the_largest_batch():
    measured, predicted = record("memory", "jax", "packed"), record("predict", "jax", "packed")
    assert measured.memory.peak_host_bytes == pytest.approx(predicted.prediction.predicted_peak_bytes, rel=0.15)


@pytest.mark.long
@pytest.mark.alone  # beside others, a worker that waits for a core may find that its clock was read too early
def test_whole_epochs_are_timed():
    times = record("time", "torch", "bucketed_lengths").times
    assert times.uneven and len(times.step_seconds) == 6
    assert of_steps(times.step_seconds, times.uneven) == pytest.approx(sum(times.step_seconds) / 6)


@pytest.mark.parametrize("names", [(), ("bucketed_lengths",)], ids=lambda names: "+".join(names) or "padded")
def test_the_timed_steps_take_each_document_once(names, tmp_path):
    module, seen = backends.load("torch"), []

    def prepare(parts, *rest):
        step = module.prepare(parts, *rest)

        def watched(state, x, y):
            seen.append([row.numpy().tobytes().rstrip(b"\0") for row in x])
            return step(state, x, y)

        return watched

    small = {"layers": 1, "width": 16, "heads": 1, "vocabulary": 64, "tokens": 64, "shuffle": True}
    case = case_of("torch", *names, shape=SHAPE | small)
    task = Task(kind="time", cases=(case,), run_id="timed", parent=0, folder=str(tmp_path), steps=6, warmup=2)
    times = timing.measure(task, LOADED, SimpleNamespace(**{**vars(module), "prepare": prepare})).times
    documents = [row for batch in seen[-6:] for row in batch]
    assert len(times.step_seconds) == 6 and len(documents) == len(set(documents)) == 24


# From a corpus


def test_the_documents_of_an_epoch_fill_a_batch():
    assert DOCUMENTS.shape(documents=4, batch=4).documents == 4
    with pytest.raises(ValueError, match="3 documents fill no batch of 4"):
        DOCUMENTS.shape(documents=3, batch=4)


def test_a_file_is_one_document_however_long(tmp_path):
    for name, words in (("a.txt", PIECE), ("b.txt", 3)):
        (tmp_path / name).write_text("a\n" * words)
    corpus = resolve(".", tmp_path)
    file = documents.prepare(corpus, "bytes", 256, documents.Wanted(2, 2 * PIECE, "refuse"), tmp_path / "cache")
    assert np.load(file.lengths).tolist() == [2 * PIECE, 6]
    with pytest.raises(CorpusError, match=f"document 0 has {2 * PIECE:,} tokens, more than the {PIECE:,} that fit"):
        documents.prepare(corpus, "bytes", 256, documents.Wanted(2, PIECE, "refuse"), tmp_path / "cache")
