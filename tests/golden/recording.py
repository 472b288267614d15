"""Runs a case and creates its record."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from benchmarks.live_bytes import LiveBytes
from tests.distributed.nccl_double import NcclDouble, as_on_cuda
from tests.distributed.wrapping import on_mesh
from tests.golden.cases import Case
from tests.golden.files import EVERY
from tests.parity.patterns import PATTERNS, Pattern
from tests.ranks import RankPools
from tests.reference.training import train_reference, train_sharded
from tests.sharding import shard

_MATMULS = tuple(getattr(torch.ops.aten, name) for name in ("mm", "addmm", "bmm"))
_KINDS = {
    "allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather of several",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter of several",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce of several",
    "alltoall_base": "all_to_all",
}
"""Names of collectives in c10d, without leading and trailing underscores."""


class Recorder(LiveBytes):
    """Records the events and the live bytes of a training.

    Args:
        axes: Names of mesh axes by the names of their groups.
        stream: Returns the name of the current stream.

    Attributes:
        micro_batches: Events of each micro-batch, up to the end of the last optimizer step.
        steady_bytes: Live bytes at that time.
    """

    def __init__(self, axes: Mapping[str, str], stream: Callable[[], str]) -> None:
        super().__init__()
        self._axes, self._stream = axes, stream
        self._events: list[list[str]] = []
        self._is_in_collective = False
        self.micro_batches: list[list[str]] = []
        self.steady_bytes = 0

    def note(self, event: str) -> None:
        """Add an event, unless it repeats the last one."""
        if event == "forward":
            self._events.append([])
        if self._events[-1][-1:] != [event]:
            self._events[-1].append(event)

    def end_step(self) -> None:
        """Store the events and live bytes up to now: a record ends with an optimizer step."""
        self.micro_batches = [list(events) for events in self._events]
        self.steady_bytes = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_in_collective:
            return func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            # The group is the first script object; a reduction operator is a later argument.
            boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(boxed).group_name
            self._collective(func.overloadpacket.__name__, args, group)
        elif func.overloadpacket in _MATMULS:
            self.note("matmul")
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextlib.contextmanager
    def calls_of(self, group_class: type[dist.ProcessGroup]) -> Iterator[None]:
        """Record the calls of a process group class written in Python.

        torch calls its methods without the dispatcher. Operations inside them are not recorded.
        """
        with contextlib.ExitStack() as stack:
            for name, call in list(vars(group_class).items()):
                # Newer versions of torch call some methods by a second name.
                if getattr(call, "__name__", "").strip("_") in _KINDS:
                    stack.enter_context(mock.patch.object(group_class, name, self._noted(call)))
            yield

    def _noted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(group: dist.ProcessGroup, *args: Any) -> Any:
            if self._is_in_collective:
                return call(group, *args)
            self._collective(call.__name__, args, group.group_name)
            self._is_in_collective = True
            try:
                return call(group, *args)
            finally:
                self._is_in_collective = False

        return noted

    def _collective(self, name: str, args: Sequence[Any], group: str) -> None:
        """Record a collective if its group is one of the mesh."""
        if group not in self._axes:
            return
        sides = [[t for t in tree_leaves(arg) if isinstance(t, torch.Tensor)] for arg in args]
        full = max(sides, key=lambda tensors: sum(t.nbytes for t in tensors))
        kind, nbytes = _KINDS.get(name.strip("_"), name), sum(tensor.nbytes for tensor in full)
        dtype = str(full[0].dtype).removeprefix("torch.")
        self._events[-1].append(f"{kind} {dtype} {nbytes} {self._axes[group]} {self._stream()}")


# -- on a rank ------------------------------------------------------------------------------------


def _watched(pattern: Pattern, recorder: Recorder) -> Pattern:
    """Return the pattern with a loss and an optimizer that record the parts of a step."""

    def loss(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
        if not recorder.micro_batches:
            # The peak excludes `fully_shard`.
            recorder.peak = recorder.now
        recorder.note("forward")
        found = pattern.loss(model, step, micro, rank)
        recorder.note("backward")
        return found

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = pattern.optimizer(parameters)
        made.register_step_pre_hook(lambda *_: recorder.note("optimizer step"))
        made.register_step_post_hook(lambda *_: recorder.end_step())
        return made

    return dataclasses.replace(pattern, loss=loss, optimizer=optimizer)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


def _plain(case: Case) -> str:
    """Return a digest of the losses, gradients and weights of the training without sharding."""

    def build() -> nn.Module:
        model = PATTERNS[case.pattern].build().to(case.plain_dtype)
        if case.plain_dtype != torch.float32:
            model.register_forward_pre_hook(lambda _, args: (args[0].to(case.plain_dtype),))
        return model

    pattern = PATTERNS[case.pattern]
    if case.plain_dtype != torch.float32:
        pattern = dataclasses.replace(pattern, build=build)
    trace = train_reference(pattern, case.num_ranks, 0, _bytes_of)
    return _digest(repr((trace.losses, trace.grads, trace.params)).encode())


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


def train(case: Case) -> dict[str, Any]:
    """Run a case on this rank; return this rank's part of the record. Collective."""
    plain = _plain(case) if dist.get_rank() == 0 else ""
    pattern, streams = PATTERNS[case.pattern], None
    pattern = dataclasses.replace(
        pattern, build=case.build or pattern.build, units=case.units or pattern.units
    )
    gc.collect()
    with contextlib.ExitStack() as stack:
        if case.has_streams:
            streams = stack.enter_context(as_on_cuda())
        options = {**on_mesh(case.mesh), "check_ranks": "never", **pattern.options, **case.options}
        mesh = options["mesh"]
        axes = {mesh.get_group(axis).group_name: axis for axis in mesh.mesh_dim_names}
        recorder = Recorder(axes, lambda: streams.current_stream().name if streams else "-")
        # Live bytes must not depend on the time of a garbage collection.
        gc.disable()
        stack.callback(gc.enable)
        with recorder, recorder.calls_of(NcclDouble):
            trace = train_sharded(
                _watched(pattern, recorder),
                lambda module: shard(module, sharding_strategy=case.strategy, **options),
                _bytes_of,
            )
    return {
        "events": recorder.micro_batches,
        "bytes": f"{recorder.steady_bytes} at rest, {recorder.peak} at peak",
        "losses": trace.losses,
        "held": [*trace.grads, trace.params],
        "rows": trace.rows,
        "plain": plain,
    }


# -- of all ranks ---------------------------------------------------------------------------------


def _whole(ranks: Sequence[tuple[Mapping[str, tuple[int, int]], Mapping[str, Any]]]) -> str:
    """Return a digest of full tensors, assembled from the rows of all ranks.

    Args:
        ranks: For each rank: its range of rows and their bytes (or None), by parameter name.

    Raises:
        AssertionError: Two ranks hold the same rows with different bytes.
    """
    parts = []
    for name in ranks[0][0]:
        found: dict[tuple[int, int], Any] = {}
        for rows, held in ranks:
            start, end = rows[name]
            # A rank without rows may have an empty gradient or none.
            if start < end:
                value = held[name] if held[name] is not None else b"none"
                assert found.setdefault((start, end), value) == value, f"ranks differ in {name}"
        parts += [name.encode(), *(found[span] for span in sorted(found))]
    return _digest(*parts)


def _of_ranks(values: Iterable[Any]) -> dict[str, Any]:
    """Return the values by rank, or one value if all are equal."""
    listed = list(values)
    if all(value == listed[0] for value in listed):
        return {EVERY: listed[0]}
    return {f"rank {rank}": value for rank, value in enumerate(listed)}


def record(pools: RankPools, case: Case) -> dict[str, Any]:
    """Run a case on a pool of ranks; return its record."""
    ranks = pools(case.num_ranks).run(train, case)
    *grads, weights = [
        _whole([(rank["rows"], rank["held"][index]) for rank in ranks])
        for index in range(len(ranks[0]["held"]))
    ]
    return {
        "events": _of_ranks(rank["events"] for rank in ranks),
        "bytes": _of_ranks(rank["bytes"] for rank in ranks),
        "bits": {
            "plain": ranks[0]["plain"],
            "losses": " ".join(loss.hex() for loss in ranks[0]["losses"]),
            "gradients": " ".join(grads),
            "weights": weights,
        },
    }
