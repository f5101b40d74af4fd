"""Turn the documents of a text into token ids once, each whole, and keep ids and lengths in a cache as `.npy` arrays.

The documents of `standard_library` are its modules, those of a folder its files, those of a `.jsonl` file its lines.
`python -m harness.workloads.data.documents SPEC.json` does this in a process of its own, for a parent that must not
load numpy.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.records.task import DocumentFile, id_type
from harness.workloads.data import tokens
from harness.workloads.data.sources import Corpus, CorpusError, digest, resolve

if TYPE_CHECKING:
    import numpy as np

FORMAT = 2
SHORTEST = 2
"""A document of fewer tokens predicts nothing: it is left out and not counted."""


class Wanted(NamedTuple):
    """How many documents to take, and of how many tokens at most; what is longer is refused, or skipped."""

    documents: int
    longest: int
    longer: str


def prepare(corpus: Corpus, tokenizer: str, vocabulary: int, wanted: Wanted, cache: Path) -> DocumentFile:
    """Return the first documents of `corpus`, encoding them unless `cache` has them already.

    Tokenizers and vocabularies are those of `tokens.prepare`. Raises CorpusError for a corpus that is no text, for one
    with fewer documents, and where longer ones are refused for the first of them.
    """
    if corpus.kind not in ("standard_library", "text", "jsonl"):
        raise CorpusError(f"corpus {corpus.name!r}: has no documents; name a text, a folder of texts or a .jsonl file")
    tokens.check(corpus, tokenizer, vocabulary, 0)
    key = [FORMAT, "documents", digest(corpus), vocabulary, *wanted, *tokens.what_else_decides(corpus, tokenizer, 0)]
    path = cache.absolute() / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()}.npy"
    if (file := _cached(path)) is not None:
        return file
    vocabulary, chunks = tokens.encode(corpus, tokenizer, vocabulary, 0, 0, whole=True)
    documents, left_out = _taken(corpus, chunks, wanted)
    try:
        return _store(path, documents, vocabulary, left_out)
    except OSError as error:
        raise CorpusError(
            f"corpus {corpus.name!r}: cannot write the cache {cache} ({error}); name a writable folder"
        ) from error


def _taken(corpus: Corpus, chunks: tokens.Ids, wanted: Wanted) -> tuple[list[np.ndarray], int]:
    """Take the first documents that are not too long; return them, and how many were left out before the last."""
    documents: list[np.ndarray] = []
    left_out = 0
    for number, ids in enumerate(chunks):
        if len(ids) > wanted.longest:
            if wanted.longer == "refuse":
                raise CorpusError(
                    f"corpus {corpus.name!r}: document {number} has {len(ids):,} tokens, more than the "
                    f"{wanted.longest:,} that fit; set `longer: skip`, or `tokens` to {len(ids) - 1} or more"
                )
            left_out += 1
        elif len(ids) >= SHORTEST:
            documents.append(ids)
        if len(documents) == wanted.documents:
            return documents, left_out
    raise CorpusError(
        f"corpus {corpus.name!r}: has {len(documents)} documents of {SHORTEST} to {wanted.longest:,} tokens and "
        f"{wanted.documents} are needed; use a larger corpus, fewer `documents` or more `tokens`"
    )


def _store(path: Path, documents: list[np.ndarray], vocabulary: int, left_out: int) -> DocumentFile:
    """Write ids and lengths, then what they should be, each at once: a reader sees all, or prepares its own."""
    import numpy as np

    ids = np.concatenate(documents).astype(id_type(vocabulary))
    lengths = np.array([len(each) for each in documents], np.int64)
    beside = path.with_suffix(".lengths.npy")
    file = DocumentFile(
        path, len(ids), vocabulary, str(ids.dtype), _digest(ids, lengths), beside, len(documents), left_out
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.stem}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        for target, values in ((path, ids), (beside, lengths)):
            with partial.open("wb") as out:
                np.save(out, values, allow_pickle=False)
            partial.replace(target)
        partial.write_text(json.dumps(asdict(file) | {"path": path.name, "lengths": beside.name}))
        partial.replace(path.with_suffix(".json"))
    finally:
        partial.unlink(missing_ok=True)
    return file


def _cached(path: Path) -> DocumentFile | None:
    """Return the file if it is whole and the one that was written; anything else is prepared again."""
    import numpy as np

    try:
        sidecar = json.loads(path.with_suffix(".json").read_text())
        file = DocumentFile(**sidecar | {"path": path, "lengths": path.with_suffix(".lengths.npy")})
        whole = _digest(tokens.open_tokens(file), np.load(file.lengths, allow_pickle=False)) == file.digest
    except (OSError, ValueError, TypeError, KeyError):  # CorpusError is a ValueError
        return None
    return file if whole else None


def _digest(ids: np.ndarray, lengths: np.ndarray) -> str:
    return hashlib.sha256(f"{tokens.digest_of(ids)} {tokens.digest_of(lengths)}".encode()).hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """Prepare what one JSON file asks for, and print the DocumentFile, or {"error": sentence} and return 2.

    The file is an object of corpus, root, tokenizer, vocabulary, documents, longest, longer, seed and cache.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # nothing forks here, and the result is the same
    paths = sys.argv[1:] if arguments is None else arguments
    try:
        spec: dict[str, Any] = json.loads(Path(paths[0]).read_text())
        wanted = Wanted(spec["documents"], spec["longest"], spec["longer"])
        corpus = resolve(spec["corpus"], Path(spec["root"]))
        file = prepare(corpus, spec["tokenizer"], spec["vocabulary"], wanted, Path(spec["cache"]))
    except CorpusError as error:
        print(json.dumps({"error": str(error)}))
        return 2
    print(json.dumps(asdict(file), default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
