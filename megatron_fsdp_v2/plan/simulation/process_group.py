"""The c10d backend `sim`: collectives of one rank of a simulated cluster.

Results have the right shapes. Small results, which programs read (comparisons of ranks, the loss),
have the values for equal inputs on all ranks; larger results are not written.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, override

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.utils._python_dispatch import _disable_current_modes

from megatron_fsdp_v2.comm.interface import Work
from megatron_fsdp_v2.plan.simulation.devices import Device

BACKEND = "sim"
MOST_FILLED = 1 << 20
"""Largest result, in bytes, whose values are written."""


class Network(Protocol):
    """The network between ranks, such as that of a `Machine`."""

    def seconds(self, kind: str, nbytes: int, ranks: Sequence[int], /) -> float:
        """Seconds of a collective on an otherwise idle network.

        Args:
            kind: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `broadcast` or
                `barrier`.
            nbytes: Bytes of the full buffer; of an all-to-all, bytes that the rank sends.
            ranks: Global ranks that take part.
        """
        ...

    def link(self, ranks: Sequence[int], /) -> str:
        """Name of the link of these ranks, which runs one collective at a time."""
        ...


class _Work(dist.Work):
    """A simulated collective in flight."""

    def __init__(self, done: Work, results: list[Any]) -> None:
        super().__init__()
        self._done = done
        self._results = results

    @override
    def wait(self, timeout: Any = None) -> bool:
        del timeout
        self._done.wait()
        return True

    @override
    def is_completed(self) -> bool:
        return True

    @override
    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._results)
        return future


class PythonGroup(dist.ProcessGroup):
    """A process group whose collectives are methods in Python.

    Args:
        rank: This rank in the group.
        size: Ranks of the group.
        name: Name of its communicator.
        backend: Name of its backend.
    """

    def __init__(self, rank: int, size: int, name: str, backend: str) -> None:
        # The constructor with a store creates a group with methods in C++.
        make: Any = super().__init__
        make(rank, size)
        self._communicator = name
        self._backend_name = backend

    def getBackendName(self) -> str:
        """Called by c10d."""
        return self._backend_name

    # c10d reads names through these two methods; groups in C++ keep names in their backends.

    def getGroupName(self) -> str:
        """Called by c10d."""
        return self._communicator

    def getGroupDesc(self) -> str:
        """Called by c10d."""
        return self._backend_name


class SimulatedProcessGroup(PythonGroup):
    """A process group with this process as one rank. A network determines the times of collectives.

    Args:
        rank: This rank in the group.
        ranks: Global ranks of the group.
        name: Name of its communicator.
        device: Device that collectives are queued on.
        network: Network that determines the times of collectives; None for no times.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        name: str,
        device: Device,
        network: Network | None,
    ) -> None:
        super().__init__(rank, len(ranks), name, BACKEND)
        self._ranks = ranks
        self._device = device
        self._network = network

    def _issue(self, kind: str, nbytes: int, results: list[Any]) -> _Work:
        seconds, link = 0.0, f"{self._communicator} alone"
        if self._network is not None and len(self._ranks) > 1:
            seconds = self._network.seconds(kind, nbytes, self._ranks)
            link = self._network.link(self._ranks)
        return _Work(self._device.communicate(self._communicator, link, seconds), results)

    # -- collectives, under the names that c10d calls ------------------------------------------

    @override
    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        _fill(output.view(self.size(), -1), lambda: input.reshape(1, -1))
        return self._issue("all_gather", output.nbytes, [output])

    @override
    def _reduce_scatter_base(
        self, outputTensor: torch.Tensor, inputTensor: torch.Tensor, opts: Any = None
    ) -> Any:
        def own() -> torch.Tensor:
            piece = inputTensor.reshape(self.size(), -1)[self.rank()]
            return self._reduced(piece, opts).view_as(outputTensor)

        _fill(outputTensor, own, inputTensor.nbytes)
        return self._issue("reduce_scatter", inputTensor.nbytes, [outputTensor])

    @override
    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        for tensor in tensors:
            _fill(tensor, functools.partial(self._reduced, tensor, opts))
        return self._issue("all_reduce", sum(tensor.nbytes for tensor in tensors), tensors)

    @override
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        nbytes = 0
        for outputs, given in zip(output_tensors, input_tensors, strict=True):
            for output in outputs:
                nbytes += output.nbytes
                _fill(output, functools.partial(given.view_as, output))
        return self._issue("all_gather", nbytes, output_tensors)

    @override
    def alltoall_base(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        output_split_sizes: Any,
        input_split_sizes: Any,
        opts: Any = None,
    ) -> Any:
        _fill(output_tensor, lambda: torch.zeros_like(output_tensor))
        return self._issue("all_to_all", input_tensor.nbytes, [output_tensor])

    @override
    def broadcast(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        return self._issue("broadcast", sum(tensor.nbytes for tensor in tensors), tensors)

    @override
    def barrier(self, opts: Any = None) -> Any:
        return self._issue("barrier", 0, [])

    # torch 2.15 renamed these methods.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def _reduced(self, tensor: torch.Tensor, opts: Any) -> torch.Tensor:
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        return tensor * self.size() if op == dist.ReduceOp.SUM else tensor


def _fill(output: torch.Tensor, value: Callable[[], torch.Tensor], nbytes: int = 0) -> None:
    """Write a small result, invisible to dispatch modes. No-op on the meta device."""
    if not output.is_meta and max(output.nbytes, nbytes) <= MOST_FILLED:
        with _disable_current_modes(), torch.no_grad():
            # A shard may be a view of the gathered tensor.
            output.copy_(value().clone())


@contextlib.contextmanager
def simulated_groups(device: Device, network: Network | None) -> Iterator[None]:
    """Make `torch.distributed.new_group(backend="sim")` create simulated groups in the context.

    They may exist beside real groups of the same world size.

    Args:
        device: Device that collectives are queued on.
        network: Network that determines the times of collectives; None for no times.
    """

    def make(options: Any, backend_options: Any) -> SimulatedProcessGroup:
        del backend_options
        return SimulatedProcessGroup(
            options.group_rank,
            options.global_ranks_in_group or range(options.group_size),
            str(options.group_id),
            device,
            network,
        )

    if BACKEND.upper() not in dist.Backend.__dict__:
        dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu", "cuda"])
    _makers.append(make)
    try:
        yield
    finally:
        _makers.remove(make)


@contextlib.contextmanager
def simulated_ranks(
    size: int, device: Device, network: Network | None, *, rank: int = 0
) -> Iterator[None]:
    """Make this process one rank of many in the context, with `sim` as the default group.

        device = HostDevice()
        with simulated_ranks(1024, device, find_machine("h100")):
            model = fully_shard(model, mesh=init_device_mesh("cpu", (128, 8)))

    Args:
        size: World size.
        device: Device that collectives are queued on.
        network: Network that determines the times of collectives; None for no times.
        rank: Rank of this process.

    Raises:
        RuntimeError: A default process group exists already.
        ValueError: The rank is not below `size`.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "simulated_ranks needs a process without a process group; call "
            "torch.distributed.destroy_process_group() first"
        )
    if not 0 <= rank < size:
        raise ValueError(f"rank must be from 0 to {size - 1}, got {rank}")
    with simulated_groups(device, network):
        dist.init_process_group(BACKEND, store=HashStore(), rank=rank, world_size=size)
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


_makers: list[Callable[[Any, Any], SimulatedProcessGroup]] = []


def _make(options: Any, backend_options: Any) -> SimulatedProcessGroup:
    """Create a process group of the current simulation."""
    if not _makers:
        raise RuntimeError(
            "backend 'sim' exists inside simulated_ranks() and simulated_groups() only"
        )
    return _makers[-1](options, backend_options)
