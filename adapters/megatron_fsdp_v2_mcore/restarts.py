"""A separate key prefix in torchrun's store for every start of a job.

torchrun's agent keeps one store for all restarts of its workers, and torch stores connection
addresses under the same keys every time: a restarted rank may read the address of a process of the
previous start (pytorch issues 135712 and 167288). The restart count cannot identify a start, since
every node counts its own restarts.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from megatron_fsdp_v2._text import listed
from megatron_fsdp_v2_mcore.flags.options import training_globals

_REPLY_TIMEOUT = timedelta(seconds=2)
"""Time a rank waits for a reply to one announcement before it reads the announcement again."""

_MIN_TIMEOUT = timedelta(milliseconds=10)
_RETRY_DELAY_S = 0.1


def in_fresh_store(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's initialization to create process groups in a store of this start.

    Args:
        original: Megatron's `_initialize_distributed`.
    """

    def initialize_distributed(
        get_embedding_ranks: Any, get_position_embedding_ranks: Any, store: Any, **kwargs: Any
    ) -> Any:
        args = training_globals().get_args()
        if store is None and not dist.is_initialized() and not args.fake_process_group:
            timeout = timedelta(minutes=args.distributed_timeout_minutes)
            store = store_of_this_start(args.rank, args.world_size, timeout)
        return original(get_embedding_ranks, get_position_embedding_ranks, store, **kwargs)

    return initialize_distributed


def store_of_this_start(rank: int, world_size: int, timeout: timedelta) -> Store | None:
    """Return a store that only the processes of this start share. Collective.

    Args:
        rank: Rank of this process.
        world_size: Number of processes.
        timeout: Time to wait for the other ranks, and the timeout of the store.

    Returns:
        The store; None if torchrun does not share its store with the workers or never restarts
        them.

    Raises:
        RuntimeError: The other ranks did not answer before the timeout.
    """
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not is_shared or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, world_size, is_master=False, timeout=timeout
    )
    return PrefixStore(agree_on_prefix(store, rank, world_size, timeout), store)


def agree_on_prefix(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Agree on a key prefix that no earlier start used. Collective.

    Rank 0 generates a prefix and announces it. Every other rank answers with a random token and
    returns when rank 0 has echoed this token. Keys of an earlier start never contain this token.

    Args:
        store: A store that earlier starts may have used as well.
        rank: Rank of this process.
        world_size: Number of processes.
        timeout: Time to wait for the other ranks.

    Raises:
        RuntimeError: The other ranks did not answer before the timeout.
    """
    if rank == 0:
        return _announce(store, world_size, timeout)
    token, answered = uuid.uuid4().hex, ""
    deadline = time.monotonic() + timeout.total_seconds()
    while (remaining := deadline - time.monotonic()) > 0:
        # A store treats a timeout below one millisecond as no timeout.
        reply_timeout = max(_MIN_TIMEOUT, min(_REPLY_TIMEOUT, timedelta(seconds=remaining)))
        if not _is_set_within(store, "start", reply_timeout):
            continue
        prefix: str = store.get("start").decode()
        echo = f"{prefix}/echo/{rank}"
        if prefix != answered:
            store.set(f"{prefix}/answer/{rank}", token)
            answered = prefix
        if _is_set_within(store, echo, reply_timeout):
            if store.get(echo).decode() == token:
                return prefix
            # The echo is from an earlier start: rank 0 has not announced this start yet.
            time.sleep(_RETRY_DELAY_S)
    raise RuntimeError(
        f"rank {rank} did not reach the other ranks of this start within "
        f"{timeout.total_seconds():g} s; see the logs of rank 0"
    )


def _announce(store: Store, world_size: int, timeout: timedelta) -> str:
    prefix = f"start/{uuid.uuid4().hex}"
    store.set("start", prefix)
    others = range(1, world_size)
    answers = [f"{prefix}/answer/{other}" for other in others]
    try:
        if answers:
            store.wait(answers, timeout)
    except dist.DistStoreError as error:
        missing = [o for o, key in zip(others, answers, strict=True) if not store.check([key])]
        raise RuntimeError(
            f"ranks {listed(missing, 8)} did not answer at this start within "
            f"{timeout.total_seconds():g} s; see their logs"
        ) from error
    for other, token in zip(others, store.multi_get(answers) if answers else (), strict=True):
        store.set(f"{prefix}/echo/{other}", token.decode())
    return prefix


def _is_set_within(store: Store, key: str, timeout: timedelta) -> bool:
    try:
        store.wait([key], timeout)
    except dist.DistStoreError:
        return False
    return True
