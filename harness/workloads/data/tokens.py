"""Turn a corpus into token ids once, and keep them in a cache as one `.npy` array.

Ids are stored as uint16 when the vocabulary allows, else uint32. The file that a run reads depends on
nothing but the corpus's content, the tokenizer, the vocabulary, the size and (for zipf) the seed, and
carries their hash as its name. `python -m harness.workloads.data.tokens SPEC.json` does the same in a process of its
own, for a parent that must not load numpy.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from harness.records.task import TokenFile, id_type
from harness.workloads.data.sources import ZIPF_EXPONENT, Corpus, CorpusError, digest, resolve, texts

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer


TOKENIZERS = ("bytes", "words", "bpe")
UNKNOWN = "<unk>"  # contains signs that split words, so no word of a text can be equal to it
TRAINING_CHARACTERS = 8_000_000  # of the corpus, from its start: more text changes few merges and costs time
SMALLEST_CAP = 1 << 18
CHUNK = 1 << 20  # ids drawn or checked at once
FORMAT = 1
Ids = Iterator["np.ndarray"]


def prepare(
    corpus: Corpus, tokenizer: str, vocabulary: int, needed: int, seed: int, cache: Path, exact: bool = False
) -> TokenFile:
    """Return the ids of `corpus`, encoding them unless `cache` has them already.

    `tokenizer` is bytes (the 256 values of UTF-8), words (runs of `\\w`, and each other sign alone; the
    most frequent `vocabulary - 1`, the rest `<unk>`, id 0) or bpe (byte-level byte-pair encoding, trained
    on the first `TRAINING_CHARACTERS` of the corpus to `vocabulary` or as many
    as it gives). With `vocabulary` 0, bytes
    have 256, words and files of ids as many as the corpus. Zipf and files of ids need no tokenizer; theirs
    is ignored. Documents follow each other with nothing between.

    A text or a file of ids is cut after `needed` tokens rounded up to a power of two, at least
    `SMALLEST_CAP`; zipf, and with `exact` every corpus, gives exactly `needed`. Raises CorpusError where the corpus
    has fewer (no text is repeated), where an id lies outside the vocabulary, and where the tokenizer cannot give the
    vocabulary.
    """
    needed = max(needed, 1)
    check(corpus, tokenizer, vocabulary, seed)
    exact = exact or corpus.kind == "zipf"
    cap = needed if exact else max(SMALLEST_CAP, 1 << (needed - 1).bit_length())
    key = [FORMAT, digest(corpus), vocabulary, cap, *what_else_decides(corpus, tokenizer, seed)]
    path = cache.absolute() / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()}.npy"
    file = _cached(path)
    if file is None:
        vocabulary, chunks = encode(corpus, tokenizer, vocabulary, cap, seed)
        try:
            file = _store(path, _first(cap, chunks, vocabulary), vocabulary)
        except OSError as error:
            raise CorpusError(
                f"corpus {corpus.name!r}: cannot write the cache {cache} ({error}); name a writable folder"
            ) from error
    if file.tokens < needed:
        raise CorpusError(
            f"corpus {corpus.name!r}: has {file.tokens} tokens and {needed} are needed; use a larger corpus, "
            "or a smaller window, batch or number of steps"
        )
    return file


def open_tokens(file: TokenFile) -> np.ndarray:
    """Read the ids into memory: ids[tokens]. Raises CorpusError if the file is not as described."""
    import numpy as np

    try:
        with file.path.open("rb") as source:  # numpy.load would also take an archive
            ids = np.lib.format.read_array(source, allow_pickle=False)
    except Exception as error:  # a spoilt header makes numpy raise nearly anything
        raise CorpusError(
            f"tokens {file.path}: cannot be read ({error}); delete the file and prepare it anew"
        ) from error
    if ids.shape != (file.tokens,) or ids.dtype.str != np.dtype(file.dtype).str:
        raise CorpusError(
            f"tokens {file.path}: holds {ids.dtype}{list(ids.shape)} instead of {file.dtype}[{file.tokens}]; "
            "delete the file and prepare it anew"
        )
    return ids


def word_list(documents: Iterable[str], vocabulary: int) -> list[str]:
    """Return the words by id: `<unk>`, then the `vocabulary - 1` most frequent (0: all), ties by spelling."""
    counts: Counter[str] = Counter()
    for text in documents:
        counts.update(_words(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return [UNKNOWN, *(ranked[: vocabulary - 1] if vocabulary else ranked)]


def byte_pair_encoding(documents: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train byte-level byte-pair encoding of `vocabulary` tokens, or fewer where the text has no pair left.

    The first 256 ids are single bytes, so every text can be encoded and decoded again unchanged. Only the
    first `TRAINING_CHARACTERS` are used. Sennrich et al. 2016, arXiv:1508.07909; the byte alphabet is
    GPT-2's.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # comes as a list in no fixed order
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator(_beginning(documents, TRAINING_CHARACTERS), trainer)
    return model


def main(arguments: list[str] | None = None) -> int:
    """Prepare what one JSON file asks for, and print the TokenFile, or {"error": sentence} and return 2.

    The file is an object of corpus, root, tokenizer, vocabulary, needed, seed, cache, and optionally `exact`
    (see `prepare`) and `outside` (see `sources.resolve`); paths are relative to the working directory.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # nothing forks here, and the result is the same
    paths = sys.argv[1:] if arguments is None else arguments
    try:
        spec = _read_spec(paths)
        corpus = resolve(spec["corpus"], Path(spec["root"]), outside=spec["outside"])
        sizes = (spec["vocabulary"], spec["needed"], spec["seed"])
        file = prepare(corpus, spec["tokenizer"], *sizes, Path(spec["cache"]), bool(spec["exact"]))
    except CorpusError as error:
        print(json.dumps({"error": str(error)}))
        return 2
    print(json.dumps(asdict(file), default=str))
    return 0


def check(corpus: Corpus, tokenizer: str, vocabulary: int, seed: int) -> None:
    """Refuse before any work what no corpus could satisfy."""
    what = f"corpus {corpus.name!r}"
    if not 0 <= vocabulary <= 1 << 32:
        raise CorpusError(f"{what}: a vocabulary of {vocabulary} cannot be stored; ask for 0 (all) to {1 << 32}")
    if corpus.kind == "zipf":
        if seed < 0:
            raise CorpusError(f"{what}: the seed {seed} is negative; use 0 or more")
        if vocabulary == 0:
            raise CorpusError(f"{what}: has no vocabulary of its own; ask for 1 or more")
    elif corpus.kind in ("npy", "raw"):
        return
    elif tokenizer not in TOKENIZERS:
        raise CorpusError(f"{what}: there is no tokenizer {tokenizer!r}; use one of {', '.join(TOKENIZERS)}")
    else:
        most = TRAINING_CHARACTERS if tokenizer == "bpe" else 1 << 32  # the trainer reserves memory for all
        least = 2 if tokenizer == "words" else 256
        if not least <= vocabulary <= most and (vocabulary or tokenizer == "bpe"):
            raise CorpusError(
                f"{what}: {tokenizer} cannot have a vocabulary of {vocabulary}; ask for {least} to {most}"
            )


def what_else_decides(corpus: Corpus, tokenizer: str, seed: int) -> list[str | int | float]:
    """List what changes the ids besides content, vocabulary and size; nothing else may cost a second file."""
    import numpy as np

    if corpus.kind == "zipf":
        return ["zipf", ZIPF_EXPONENT, seed, np.__version__]
    if corpus.kind in ("npy", "raw"):
        return ["ids"]
    if tokenizer == "words":
        return ["words", unicodedata.unidata_version]  # decides what \w matches
    if tokenizer == "bytes":
        return ["bytes"]
    try:
        return ["bpe", TRAINING_CHARACTERS, metadata.version("tokenizers")]
    except metadata.PackageNotFoundError as error:
        raise CorpusError(
            f"corpus {corpus.name!r}: bpe needs the package 'tokenizers'; install it, or use words or bytes"
        ) from error


def encode(
    corpus: Corpus, tokenizer: str, vocabulary: int, cap: int, seed: int, whole: bool = False
) -> tuple[int, Ids]:
    """Return the vocabulary, and the ids in pieces that are made when asked for; with `whole` one of each document."""
    if corpus.kind == "zipf":
        return vocabulary, _zipf(vocabulary, cap, seed)
    if corpus.kind in ("npy", "raw"):
        return _stored(corpus, vocabulary)
    by_tokenizer = {"bytes": _encode_bytes, "words": _encode_words, "bpe": _encode_bpe}
    return by_tokenizer[tokenizer](corpus, vocabulary, whole)


def _encode_bytes(corpus: Corpus, vocabulary: int, whole: bool) -> tuple[int, Ids]:
    import numpy as np

    return vocabulary or 256, (np.frombuffer(text.encode(), np.uint8) for text in texts(corpus, whole))


def _encode_words(corpus: Corpus, vocabulary: int, whole: bool) -> tuple[int, Ids]:
    import numpy as np

    words = word_list(texts(corpus, whole), vocabulary)
    number = {word: i for i, word in enumerate(words)}
    chunks = (np.array([number.get(word, 0) for word in _words(text)], np.int64) for text in texts(corpus, whole))
    return vocabulary or len(words), chunks


def _encode_bpe(corpus: Corpus, vocabulary: int, whole: bool) -> tuple[int, Ids]:
    import numpy as np

    model = byte_pair_encoding(texts(corpus, whole), vocabulary)
    return model.get_vocab_size(), (np.array(model.encode(text).ids, np.int64) for text in texts(corpus, whole))


def _zipf(vocabulary: int, count: int, seed: int) -> Ids:
    """Draw ids with probability in proportion to 1 / (id + 1), by inverting the cumulative distribution."""
    import numpy as np

    cumulative = np.cumsum(np.arange(1, vocabulary + 1, dtype=np.float64) ** -ZIPF_EXPONENT)
    cumulative /= cumulative[-1]  # ends in exactly 1, above every draw
    random = np.random.Generator(np.random.Philox(seed))
    for start in range(0, count, CHUNK):
        yield np.searchsorted(cumulative, random.random(min(CHUNK, count - start)), side="right")


def _stored(corpus: Corpus, vocabulary: int) -> tuple[int, Ids]:
    """Map a file of ids, and check all of it, used or not: what fails at one size should fail at all."""
    import numpy as np

    (path,) = corpus.files
    ids = _map_raw(corpus, path) if corpus.kind == "raw" else _map_npy(corpus, path)
    limit, largest = vocabulary or 1 << 32, 0
    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        low, high = int(chunk.min()), int(chunk.max())
        largest = max(largest, high)
        if low >= 0 and high < limit:
            continue
        value = low if low < 0 else high
        where = start + int(np.flatnonzero(chunk == value)[0])
        remedy = f"ask for a vocabulary of {value + 1} or more"
        if value < 0 or value >= 1 << 32:
            remedy = "write ids from 0 up that fit in 32 bits, or declare the file's true type"
        raise CorpusError(
            f"corpus {corpus.name!r}: {path} holds the id {value} at position {where}, outside 0 to "
            f"{limit - 1}; {remedy}"
        )
    return vocabulary or largest + 1, (ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK))


def _map_raw(corpus: Corpus, path: Path) -> np.ndarray:
    import numpy as np

    try:
        return np.memmap(path, np.dtype(corpus.dtype).newbyteorder("<"), mode="r")
    except (OSError, ValueError) as error:
        raise CorpusError(f"corpus {corpus.name!r}: cannot read {path} ({error}); write the file anew") from error


def _map_npy(corpus: Corpus, path: Path) -> np.ndarray:
    """Map an array of ids; the header alone decides, and nothing is ever unpickled."""
    import numpy as np

    remedy = "save it anew with numpy.save(path, ids.astype('<u4'))"
    try:
        ids = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # a spoilt header makes numpy raise nearly anything
        raise CorpusError(
            f"corpus {corpus.name!r}: {path} is no complete .npy of integers ({error}); {remedy}"
        ) from error
    fault = ""
    if ids.dtype.kind not in "iu":
        fault = f"values of type {ids.dtype}, not integers"
    elif ids.dtype.str.startswith(">"):
        fault = f"big-endian integers ({ids.dtype.str})"
    elif ids.ndim != 1:
        fault = f"an array of shape {ids.shape}, not one dimension"
    elif len(ids) == 0:
        fault = "no ids"
    if fault:
        raise CorpusError(f"corpus {corpus.name!r}: {path} holds {fault}; {remedy}")
    return ids


def _first(cap: int, chunks: Ids, vocabulary: int) -> Ids:
    """Yield the first `cap` ids in pieces, all known to be below `vocabulary`, in the type that holds them."""
    dtype, count = id_type(vocabulary), 0
    for chunk in chunks:
        piece = chunk[: cap - count].astype(dtype)
        yield piece
        count += len(piece)
        if count == cap:
            break


def _store(path: Path, pieces: Ids, vocabulary: int) -> TokenFile:
    """Write the ids as one array as they come, then what it should be: a reader sees both, or prepares its own.

    One piece at a time is held, so that a corpus may be larger than the memory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.stem}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        with partial.open("wb") as out:
            count, digest = _write_array(out, pieces, id_type(vocabulary))
        file = TokenFile(path, count, vocabulary, id_type(vocabulary), digest)
        partial.replace(path)
        partial.write_text(json.dumps(asdict(file) | {"path": path.name}))
        partial.replace(path.with_suffix(".json"))
    finally:
        partial.unlink(missing_ok=True)
    return file


def _write_array(out: BinaryIO, pieces: Ids, dtype: str) -> tuple[int, str]:
    """Write pieces as one `.npy` array; return their length in all and their hash."""
    import numpy as np

    def head(length: int) -> None:
        header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (length,)}
        out.seek(0)
        np.lib.format.write_array_header_1_0(out, header)  # of one size whatever the length: it leaves room to grow

    head(0)
    count, hashed = 0, hashlib.sha256()
    for piece in pieces:
        data = _little(piece)
        out.write(data)
        hashed.update(data)
        count += len(piece)
    head(count)
    return count, hashed.hexdigest()


def _cached(path: Path) -> TokenFile | None:
    """Return the file if it is whole and the one that was written; anything else is prepared again."""
    try:
        sidecar = json.loads(path.with_suffix(".json").read_text())
        file = TokenFile(**sidecar | {"path": path})
        whole = sidecar["path"] == path.name and digest_of(_map_tokens(file)) == file.digest
    except (OSError, ValueError, TypeError, KeyError):  # CorpusError is a ValueError
        return None
    return file if whole else None


def _map_tokens(file: TokenFile) -> np.ndarray:
    """Map the ids of a file; raise ValueError where it is not as described."""
    import numpy as np

    try:
        ids = np.lib.format.open_memmap(file.path, mode="r")
    except Exception as error:  # a spoilt header makes numpy raise nearly anything
        raise ValueError(f"{file.path} cannot be read ({error})") from error
    if ids.shape != (file.tokens,) or ids.dtype.str != np.dtype(file.dtype).str:
        raise ValueError(f"{file.path} holds {ids.dtype}{list(ids.shape)}")
    return ids


def digest_of(ids: np.ndarray) -> str:
    """Hash ids, a piece at a time."""
    hashed = hashlib.sha256()
    for start in range(0, len(ids), CHUNK):
        hashed.update(_little(ids[start : start + CHUNK]))
    return hashed.hexdigest()


def _little(ids: np.ndarray) -> memoryview:
    """Return the bytes of ids in the order that files have."""
    import numpy as np

    return np.ascontiguousarray(ids.astype(ids.dtype.newbyteorder("<"), copy=False)).data


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def _beginning(documents: Iterable[str], characters: int) -> Iterator[str]:
    for text in documents:
        if characters <= 0:
            return
        yield text[:characters]
        characters -= len(text)


def _read_spec(arguments: list[str]) -> dict[str, Any]:
    """Read the one file named, and check that each value has its type."""
    types: dict[str, type] = dict.fromkeys(("corpus", "root", "tokenizer", "cache"), str)
    types |= dict.fromkeys(("vocabulary", "needed", "exact", "seed"), int) | {"outside": bool}
    if len(arguments) != 1:
        raise CorpusError("usage: python -m harness.workloads.data.tokens SPEC.json")
    try:
        spec = {"outside": False, "exact": 0} | json.loads(Path(arguments[0]).read_text())
    except (OSError, ValueError, TypeError) as error:
        raise CorpusError(f"{arguments[0]}: is no readable JSON object ({error}); write one") from error
    if set(spec) != set(types):
        raise CorpusError(f"{arguments[0]}: has the keys {', '.join(spec)}; write exactly {', '.join(types)}")
    for key, kind in types.items():
        if type(spec[key]) is not kind:
            raise CorpusError(f"{arguments[0]}: {key} is {spec[key]!r}; write a value of type {kind.__name__}")
    return spec


if __name__ == "__main__":
    sys.exit(main())
