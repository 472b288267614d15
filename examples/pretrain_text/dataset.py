"""Writing documents as a Megatron indexed dataset, one token per byte.

Megatron's `NullTokenizer` maps a token to itself. With a vocabulary of 257 it makes a byte-level
model: a byte is its own token, and 256 ends a document.
"""

import hashlib
import importlib
import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

END_OF_DOCUMENT = 256
VOCAB_SIZE = END_OF_DOCUMENT + 1

# Part of the cache key: increase it when the file format changes.
_FORMAT = b"byte-level, end of document 256, uint16, version 1"
_PREFIX_NAME = "text_document"


@dataclass(frozen=True)
class Dataset:
    """An indexed dataset on disk.

    Attributes:
        prefix: Value for `--data-path`: the path of the two files without `.bin` and `.idx`.
        index_cache: Value for `--data-cache-path`: the folder of Megatron's sample index.
        num_tokens: Tokens in all documents, ends of documents included.
        is_new: Whether this call wrote the dataset; False if the dataset existed.
    """

    prefix: Path
    index_cache: Path
    num_tokens: int
    is_new: bool


def build(documents: Iterable[bytes], folder: Path) -> Dataset:
    """Writes documents as an indexed dataset, or returns the existing dataset.

    Args:
        documents: The documents; iterated twice.
        folder: Folder of all datasets. Each dataset has a subfolder named by a hash of its content.

    Returns:
        The dataset.
    """
    documents = tuple(documents)
    home = folder / _key(documents)
    num_tokens = sum(map(len, documents)) + len(documents)
    is_new = not home.is_dir()
    if is_new:
        folder.mkdir(parents=True, exist_ok=True)
        # Write to a temporary folder and rename it: an interruption leaves no incomplete dataset.
        unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=folder))
        try:
            _write(documents, unfinished)
            unfinished.rename(home)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return Dataset(home / _PREFIX_NAME, home / "index", num_tokens, is_new)


def _key(documents: Iterable[bytes]) -> str:
    """Hashes the documents and the file format."""
    digest = hashlib.sha256(_FORMAT)
    for document in documents:
        digest.update(len(document).to_bytes(8))
        digest.update(document)
    return digest.hexdigest()[:16]


def _write(documents: Iterable[bytes], folder: Path) -> None:
    """Writes the two files of an indexed dataset."""
    prefix = folder / _PREFIX_NAME
    builder = _import_indexed_dataset().IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        tokens = np.empty(len(document) + 1, dtype=np.uint16)
        tokens[:-1] = np.frombuffer(document, dtype=np.uint8)
        tokens[-1] = END_OF_DOCUMENT
        builder.add_document(tokens, [tokens.size])
    builder.finalize(f"{prefix}.idx")


def _import_indexed_dataset() -> ModuleType:
    """Imports Megatron's module, which takes seconds and is needed for a new dataset only.

    Megatron's warnings about missing optional packages are suppressed; the training runs log them.
    """
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("megatron.core.datasets.indexed_dataset")
    finally:
        logging.disable(logging.NOTSET)
