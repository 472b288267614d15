"""A process group that behaves like NCCL, over gloo and on CPU tensors.

* A synchronous call returns None, an asynchronous call returns a work handle.
* Reductions run in the dtype of the tensors, in the order of a ring, and round at every step.
* Dtypes that NCCL does not support raise an error, and so do reductions of 8-bit floats.
* Different collectives on different ranks raise an error, where NCCL would hang.

`as_on_cuda` makes models communicate in such groups with the code that runs on CUDA.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp_v2.comm.streams import NcclCollectives, StreamCommunicator, new_comm_streams
from megatron_fsdp_v2.optim import engine
from megatron_fsdp_v2.plan.simulation.process_group import PythonGroup
from megatron_fsdp_v2.runtime import context
from tests.distributed import wrapping
from tests.stream_safety.recorder import StreamRecorder

BACKEND = "nccl_double"
TIMEOUT = datetime.timedelta(seconds=30)
TEXT = 160
"""Bytes of a call's description, which is compared across ranks."""

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
DTYPES = (
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, *FLOAT8),
)
"""Dtypes that ProcessGroupNCCL supports. Torch views complex tensors as real tensors."""

_REDUCED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
}


def ring_reduced(pieces: Sequence[torch.Tensor], last: int, op: str = "SUM") -> torch.Tensor:
    """Reduce one slice of every rank in the order of a ring, in the dtype of the slices.

    Args:
        pieces: The slices, by rank.
        last: The rank where the ring ends.
        op: Name of the reduction.
    """
    size = len(pieces)
    total = pieces[(last + 1) % size].clone()
    for step in range(2, size + 1):
        total = _REDUCED[op](total, pieces[(last + step) % size])
    return total


def _op_of(opts: Any) -> str:
    """The name of a reduction; this package uses no averages, which switches cannot compute."""
    return next(name for name in _REDUCED if opts.reduceOp == getattr(dist.ReduceOp, name))


class _Done(Work):
    """The work handle of a completed collective; on CUDA, of a queued one."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class NcclDouble(PythonGroup):
    """A process group that behaves like NCCL; see the module's docstring.

    Args:
        options: Options that `torch.distributed` passes to a backend.
    """

    def __init__(self, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size, str(options.group_id), BACKEND)
        self._gloo = dist.ProcessGroupGloo(options.store, rank, size, timeout=TIMEOUT)
        self._num_calls = 0

    def _gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The flattened tensors of all ranks. Collective."""
        given = tensor.detach().clone().view(-1).view(torch.uint8)
        found = [torch.empty_like(given) for _ in range(self.size())]
        if given.numel():
            self._gloo.allgather([found], [given]).wait()
        return [each.view(tensor.dtype) for each in found]

    def _check(self, kind: str, *given: torch.Tensor, op: str = "", compares: bool = True) -> None:
        """Check that NCCL supports the dtypes and that all ranks issue the same call."""
        for tensor in given:
            if tensor.dtype not in DTYPES:
                raise TypeError(
                    f"Input tensor data type is not supported for NCCL process group: "
                    f"{tensor.dtype}"
                )
            if op and tensor.dtype in FLOAT8:
                raise RuntimeError("Unsupported Float8 type for NCCL reduction")
            if not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")
        sizes = [(tensor.numel() if compares else "any", tensor.dtype) for tensor in given]
        text = f"call {self._num_calls}: {kind} of {sizes}"[:TEXT].encode().ljust(TEXT)
        self._num_calls += 1
        texts = [
            bytes(each.tolist()).decode().strip()
            for each in self._gathered(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        ]
        if len(set(texts)) > 1:
            raise RuntimeError(f"ranks of {self.getGroupName()} issue different calls: {texts}")

    @staticmethod
    def _answer(opts: Any) -> Work | None:
        """A work handle for an asynchronous call; a call without options is asynchronous."""
        return _Done() if getattr(opts, "asyncOp", True) else None

    def _reduced(self, tensor: torch.Tensor, op: str) -> list[torch.Tensor]:
        """The reduced slice of every rank, each in the order of the ring that ends at that rank."""
        slices = [each.tensor_split(self.size()) for each in self._gathered(tensor)]
        return [ring_reduced(pieces, last, op) for last, pieces in enumerate(zip(*slices))]  # noqa: B905

    # -- collectives, under the names that c10d calls -----------------------------------------

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        self._check("all_gather", input)
        output.view(-1).copy_(torch.cat(self._gathered(input)))
        return self._answer(opts)

    def allgather_into_tensor_coalesced(
        self, output_lists: Any, input_list: Any, opts: Any = None
    ) -> Any:
        for output, given in zip(output_lists, input_list, strict=True):
            self._allgather_base(output, given)
        return self._answer(opts)

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        (outputs,), (given,) = output_tensors, input_tensors
        self._check("all_gather", given)
        for output, found in zip(outputs, self._gathered(given), strict=True):
            output.copy_(found.view_as(output))
        return self._answer(opts)

    def _reduce_scatter_base(
        self, outputTensor: torch.Tensor, inputTensor: torch.Tensor, opts: Any = None
    ) -> Any:
        op = _op_of(opts)
        self._check(f"reduce_scatter {op}", inputTensor, op=op)
        outputTensor.view(-1).copy_(self._reduced(inputTensor, op)[self.rank()])
        return self._answer(opts)

    def reduce_scatter_tensor_coalesced(
        self, outputTensors: Any, inputTensors: Any, opts: Any = None
    ) -> Any:
        for output, given in zip(outputTensors, inputTensors, strict=True):
            self._reduce_scatter_base(output, given, opts)
        return self._answer(opts)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        op = _op_of(opts)
        for tensor in tensors:
            self._check(f"all_reduce {op}", tensor, op=op)
            tensor.copy_(torch.cat(self._reduced(tensor, op)).view_as(tensor))
        return self._answer(opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def alltoall_base(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        output_split_sizes: Any,
        input_split_sizes: Any,
        opts: Any = None,
    ) -> Any:
        self._check("all_to_all", input_tensor, compares=False)
        splits = list(output_split_sizes), list(input_split_sizes)
        self._gloo.alltoall_base(output_tensor, input_tensor, *splits).wait()
        return self._answer(opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        (tensor,) = tensors
        self._check(f"broadcast from {opts.rootRank}", tensor)
        tensor.copy_(self._gathered(tensor)[opts.rootRank].view_as(tensor))
        return self._answer(opts)

    def barrier(self, opts: Any = None) -> Any:
        self._check("barrier")
        return self._answer(opts)

    # c10d uses these names from torch 2.15 on.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


def _register() -> None:
    if BACKEND.upper() not in dist.Backend.__dict__:
        dist.Backend.register_backend(
            BACKEND, lambda options, _: NcclDouble(options), extended_api=True, devices=["cpu"]
        )


def new_double(ranks: Sequence[int] | None = None) -> Any:
    """A new group that behaves like NCCL. Collective over all ranks."""
    _register()
    return dist.new_group(ranks, backend=BACKEND)


@functools.cache
def mesh_of(*shape: int) -> DeviceMesh:
    """Like `wrapping.mesh_of`, with groups that behave like NCCL."""
    ranks = torch.arange(math.prod(shape)).view(shape)
    groups = []
    for axis in range(len(shape)):
        # Every rank creates all groups, and belongs to one group of each axis.
        for row in ranks.movedim(axis, -1).reshape(-1, shape[axis]).tolist():
            group = new_double(row)
            if dist.get_rank() in row:
                groups.append(group)
    names = ("outermost", "outer", "inner")[-len(shape) :]
    given = groups if len(groups) > 1 else groups[0]
    return DeviceMesh.from_group(given, "cpu", mesh=ranks, mesh_dim_names=names)


@contextlib.contextmanager
def as_on_cuda() -> Iterator[StreamRecorder]:
    """Make models sharded in the context communicate as on CUDA, in groups that behave like NCCL.

    Yields the recorder of the streams on which the collectives are queued.
    """
    recorder = StreamRecorder()
    shared = new_comm_streams(recorder)

    def communicator(device: torch.device) -> StreamCommunicator:
        return StreamCommunicator(recorder, NcclCollectives(), shared)

    with (
        mock.patch.object(context, "communicator_for", communicator),
        mock.patch.object(engine, "communicator_for", communicator),
        mock.patch.object(wrapping, "mesh_of", mesh_of),
    ):
        yield recorder
