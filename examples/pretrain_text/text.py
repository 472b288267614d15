"""Collects text from a given file or folder, or from Python's standard library."""

import random
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Enough for the default run; more text would only make the first start slower.
STDLIB_MAX_NBYTES = 12_000_000
# A limit in case TEXT is a home directory; skipped files are reported.
USER_MAX_NBYTES = 256_000_000
# Less text does not fill the validation and test sets with whole sequences.
MIN_NBYTES = 32_000

_MAX_DOCUMENT_NBYTES = 32_768
_MIN_DOCUMENT_NBYTES = 128
# The split into training, validation and test sets never splits a document.
_MIN_NUM_DOCUMENTS = 200
_STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "__pycache__"})
_SHUFFLE_SEED = 20_26


class TextError(ValueError):
    """The requested text cannot be used; the message gives the reason and the remedy."""


@dataclass(frozen=True)
class Corpus:
    """Documents to train on.

    Attributes:
        source: Description of their source.
        documents: Their bytes, shuffled deterministically, none of them empty.
        num_files: Number of files that were read.
        num_skipped: Number of skipped files: not text, or beyond the size limit.
    """

    source: str
    documents: tuple[bytes, ...]
    num_files: int
    num_skipped: int

    @property
    def nbytes(self) -> int:
        """Bytes in all documents together."""
        return sum(map(len, self.documents))


def collect(text: str | None, *, called: str = "TEXT=") -> Corpus:
    """Collects the documents to train on.

    Args:
        text: A file or a folder of text; None for the sources of Python's standard library.
        called: What the user wrote before it, for messages: "TEXT=" with make, or "--text ".

    Returns:
        The documents.

    Raises:
        TextError: `text` does not exist, or contains too little text.
    """
    if text is None:
        return collect_stdlib()
    name = called.strip(" =")
    if not text.strip():
        raise TextError(
            f"{name} is empty, but it has to name a file or a folder of text: "
            f"name one, or leave {name} out to train on the sources of Python's standard library."
        )
    path = Path(text).expanduser()
    if not path.exists():
        raise TextError(
            f"{called}{text} does not exist: name a file or a folder of text, "
            f"or leave {name} out to train on the sources of Python's standard library."
        )
    paths = [path] if path.is_file() else _files_below(path)
    return _gather(f"{called}{text}", paths, USER_MAX_NBYTES)


def collect_stdlib() -> Corpus:
    """Collects the sources of Python's standard library, without its tests.

    Returns:
        The documents, at most `STDLIB_MAX_NBYTES` bytes in total.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if not _STDLIB_SKIPPED.intersection(path.relative_to(root).parts)
    ]
    return _gather("the sources of Python's standard library", paths, STDLIB_MAX_NBYTES)


def _files_below(folder: Path) -> list[Path]:
    """Lists the regular files below a folder in a fixed order, without hidden files."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]


def _gather(source: str, paths: Iterable[Path], max_nbytes: int) -> Corpus:
    """Reads files up to the limit and splits them into documents."""
    texts: list[bytes] = []
    nbytes = num_skipped = 0
    for path in paths:
        data = None if nbytes >= max_nbytes else _read_text(path, max_nbytes - nbytes)
        if data is None:
            num_skipped += 1
            continue
        texts.append(data)
        nbytes += len(data)
    if nbytes < MIN_NBYTES:
        raise TextError(
            f"{source} contains {nbytes} bytes of text in {len(texts)} files "
            f"({num_skipped} more were not UTF-8 text), but at least {MIN_NBYTES} bytes are "
            "needed to train on: name a larger file or folder."
        )
    documents = [document for data in texts for document in _cut(data, _document_nbytes(nbytes))]
    # Neighboring files are similar: shuffle, so that the validation set resembles the training set.
    random.Random(_SHUFFLE_SEED).shuffle(documents)
    return Corpus(source, tuple(documents), len(texts), num_skipped)


def _read_text(path: Path, max_nbytes: int) -> bytes | None:
    """Reads a file; returns None if it is empty, unreadable, too large or not UTF-8 text."""
    try:
        if path.stat().st_size > max_nbytes:
            return None
        data = path.read_bytes()
        data.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return data if data.strip() and b"\0" not in data else None


def _document_nbytes(corpus_nbytes: int) -> int:
    """Returns the maximum length of a document for which the corpus has enough documents."""
    return max(_MIN_DOCUMENT_NBYTES, min(_MAX_DOCUMENT_NBYTES, corpus_nbytes // _MIN_NUM_DOCUMENTS))


def _cut(data: bytes, max_nbytes: int) -> Iterator[bytes]:
    """Splits data into pieces of at most `max_nbytes`, at ends of lines if possible."""
    start = 0
    while start < len(data):
        end = min(start + max_nbytes, len(data))
        if end < len(data):
            # A line longer than half a piece is split anywhere, which avoids tiny pieces.
            line_end = data.rfind(b"\n", start + max_nbytes // 2, end)
            end = line_end + 1 if line_end >= 0 else end
        yield data[start:end]
        start = end
