"""A vocabulary counted with few counters: exact with enough of them, never without a frequent word, and bounded."""

from collections import Counter

import numpy as np
import pytest

from harness import Place
from harness.contract import plugins
from strategies.data.rows import streaming_vocabulary
from strategies.data.rows.capped_vocabulary import capped
from strategies.data.rows.streaming_vocabulary import frequent, renumbered

LOADED = plugins.load()
DECODER = LOADED.workloads["decoder"]


@pytest.fixture
def in_pieces(monkeypatch):
    """Read pieces of 100 ids, so that a small corpus has many."""
    monkeypatch.setattr(streaming_vocabulary, "CHUNK", 100)


def corpus(rows=5000, words=300, seed=0):
    random = np.random.Generator(np.random.Philox(key=seed))
    return np.minimum(random.zipf(1.3, rows) - 1, words - 1).astype(np.uint16)


def counted(ids):
    """All words but the unknown one, the most frequent first, ties by id."""
    counts = Counter(word for word in ids.tolist() if word)
    return sorted(counts, key=lambda word: (-counts[word], word))


@pytest.mark.usefixtures("in_pieces")
def test_with_a_counter_for_each_word_the_ranks_are_exact():
    assert frequent(corpus(), 300).tolist() == counted(corpus())


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("counters", [20, 60])
def test_no_word_is_missed_that_comes_more_often_than_once_in_so_many(counters):
    ids = corpus()
    counts = Counter(ids.tolist())
    often = {word for word, count in counts.items() if word and count > len(ids) / (counters + 1)}
    words = frequent(ids, counters).tolist()
    assert often and often <= set(words) and len(words) <= counters


@pytest.mark.usefixtures("in_pieces")
def test_words_that_come_last_push_out_no_frequent_one():
    ids = np.concatenate([np.repeat(np.array([7, 3], np.uint16), [50, 40]), np.arange(10, 410, dtype=np.uint16)])
    assert frequent(ids, 5)[:2].tolist() == [7, 3]


@pytest.mark.usefixtures("in_pieces")
def test_words_are_numbered_by_rank_and_all_others_are_unknown():
    ids = corpus()
    words = counted(ids)[:19]
    numbers, unknown = renumbered(ids.copy(), 20, 300)
    number = {word: rank for rank, word in enumerate(words, 1)}
    assert numbers.tolist() == [number.get(word, 0) for word in ids.tolist()]
    assert unknown == sum(word not in number for word in ids.tolist())


@pytest.mark.usefixtures("in_pieces")
def test_ids_that_are_ranked_already_come_out_as_those_of_the_capped_vocabulary():
    rank = {word: at for at, word in enumerate(counted(corpus()), 1)}
    ids = np.array([rank.get(word, 0) for word in corpus().tolist()], np.uint16)
    (streamed, _), (cut, _) = renumbered(ids.copy(), 40, 300), capped(ids.copy(), 40)
    assert np.array_equal(streamed, cut)


def test_the_model_has_as_many_words_and_the_notes_say_what_is_lost():
    shape = DECODER.shape(vocabulary=500, tokens=64, batch=2)
    parts = LOADED.strategies["streaming_vocabulary"].on["torch"](
        DECODER.on["torch"](shape, Place("torch", "cpu"), None), size=50, counters=100
    )
    source = parts.source(parts)
    assert parts.shape.vocabulary == source.vocabulary == 50
    assert 0 < parts.notes["unknown"] < 1 and "instead of" in parts.notes["parameters"]
    assert max(source.inputs.max(), source.targets.max()) < 50


def test_there_are_ten_counters_for_each_word_where_no_number_is_set(monkeypatch):
    asked = set()
    monkeypatch.setattr(
        streaming_vocabulary, "frequent", lambda ids, counters: asked.add(counters) or frequent(ids, counters)
    )
    parts = DECODER.on["torch"](DECODER.shape(vocabulary=500, tokens=64, batch=2), Place("torch", "cpu"), None)
    parts = LOADED.strategies["streaming_vocabulary"].on["torch"](parts, size=20)
    assert parts.source(parts).vocabulary == 20 and asked == {200}


def test_too_few_counters_are_refused():
    parts = DECODER.on["torch"](DECODER.shape(), Place("torch", "cpu"), None)
    with pytest.raises(ValueError, match="9 counters cannot rank 10 words: give 10 or more"):
        LOADED.strategies["streaming_vocabulary"].on["torch"](parts, size=10, counters=9)
