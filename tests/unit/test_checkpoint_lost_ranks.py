"""Which ranks ended first, from closed connections and the records of the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_fsdp_v2.checkpoint import lost_ranks as module
from megatron_fsdp_v2.checkpoint.lost_ranks import lost_ranks, next_save


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The store of four ranks, of which this one is rank 0."""
    found = dist.HashStore()
    monkeypatch.setattr(module, "default_store", lambda: found)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1, 2, 3])
    yield found


def _close(monkeypatch: pytest.MonkeyPatch, *ranks: int) -> None:
    monkeypatch.setattr(module, "_is_closed", lambda rank, group: rank in ranks)


@pytest.mark.parametrize(
    ("closed", "recorded", "start"),
    [
        ([], [], ""),
        ([2], [], "rank 2 ended, or destroyed its process group, before"),
        ([1, 2, 3], [1, 3], "rank 2 ended, or"),
        ([1, 2, 3], [1], "ranks 2, 3 ended, or destroyed their process group, before"),
        # A rank that failed otherwise, and closed its connections.
        ([1], [1], ""),
    ],
)
def test_ranks_that_ended_are_those_that_recorded_nothing(
    monkeypatch: pytest.MonkeyPatch,
    store: Any,
    closed: list[int],
    recorded: list[int],
    start: str,
) -> None:
    _close(monkeypatch, *closed)
    for rank in recorded:
        store.set(f"a save, failed on rank {rank}", "")
    found = lost_ranks("a save", None)
    assert found.startswith(start) and bool(found) == bool(start)
    assert store.check(["a save, failed on rank 0"])


def test_records_of_an_earlier_save_are_not_those_of_this_save(
    monkeypatch: pytest.MonkeyPatch, store: Any, tmp_path: Path
) -> None:
    first, second = next_save(tmp_path), next_save(tmp_path)
    store.set(f"{first}, failed on rank 1", "")
    _close(monkeypatch, 1)
    assert not lost_ranks(first, None)
    assert lost_ranks(second, None).startswith("rank 1 ended")


class _Gone:
    """A store whose host has ended."""

    def set(self, key: str, value: str) -> None:
        raise dist.DistNetworkError("failed to recv, got 0 bytes")


@pytest.mark.usefixtures("store")
def test_without_the_store_all_lost_connections_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "default_store", _Gone)
    _close(monkeypatch, 0, 3)
    assert lost_ranks("a save", None) == "lost the connection to rank 3: "
    _close(monkeypatch, 1, 3)
    assert lost_ranks("a save", None) == "lost the connection to ranks 1, 3: "
    _close(monkeypatch)
    assert not lost_ranks("a save", None)


@pytest.mark.usefixtures("store")
def test_a_store_that_does_not_answer_delays_no_error_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(module, "default_store", answers.wait)
    monkeypatch.setattr(module, "_MOST_SECONDS", 0.1)
    assert not lost_ranks("a save", None)
    answers.set()


def test_no_error_replaces_that_of_the_save() -> None:
    """There is no process group here, as after `destroy_process_group`."""
    assert not dist.is_initialized()
    assert not lost_ranks("a save", None)
