"""Snapshots: a model and its optimizer in host memory, on this rank and on a neighbor.

A snapshot has this rank's rows of everything, in one flat host buffer. It needs no file, and a rank
whose memory was lost gets its snapshot back from the neighbor that holds a copy.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron_fsdp_v2._text import listed, listed_ranks
from megatron_fsdp_v2.checkpoint.entries import (
    OPTIMIZER_GROUPS,
    extra_state_names,
    groups_entry,
    model_entries,
    parameter_names,
    state_entries,
    states_by_parameter,
    tied_entries,
)
from megatron_fsdp_v2.comm.backends import wait_for_device
from megatron_fsdp_v2.dtensor.sharded_rows import plain_of, rows_like
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, replicated
from megatron_fsdp_v2.runtime.module import make_idle

_ALIGNMENT = 64
"""Bytes at whose multiples tensors begin in the buffer."""

_Kind = Literal["sharded", "replicated", "plain"]


class _Place(NamedTuple):
    """Where a tensor is in the buffer, and what it is made into.

    Attributes:
        start: First byte.
        shape: Shape of this rank's part.
        dtype: Dtype.
        kind: `sharded`: rows of a parameter; `replicated`: a whole tensor as a DTensor.
        is_on_host: Whether it is in host memory, where a step counter is.
    """

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: _Kind
    is_on_host: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A rank's part of a model and its optimizer at one step, in host memory.

    Attributes:
        step: Number of the step, as given to `snapshot`.
        memory: All tensors as flat bytes.
        places: Positions of tensors by name of the checkpoint entry.
        objects: Other entries by name.
        extra: Data of the user.
    """

    step: int
    memory: torch.Tensor = field(repr=False)
    places: dict[str, _Place] = field(repr=False)
    objects: dict[str, Any] = field(repr=False)
    extra: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self.memory.nbytes

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of the snapshot, sharing its memory."""
        place = self.places[name]
        return self.memory.narrow(0, place.start, place.nbytes).view(place.dtype).view(place.shape)


def snapshot(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int = 0,
    extra: Any = None,
    into: Snapshot | None = None,
    pin_memory: bool = True,
) -> Snapshot:
    """Copy this rank's part of a model and its optimizer to host memory. No communication.

    Call it between two steps. Gradients are not part of it.

    Args:
        model: A sharded model.
        optimizer: An optimizer of its parameters.
        step: Number of the step, which `recover` compares between ranks.
        extra: Data of the user that can be pickled, such as the states of random number generators.
        into: An earlier snapshot of the same model, whose memory is used again: it is overwritten.
        pin_memory: Whether new memory is pinned, so that copies from a GPU are fast.

    Raises:
        RuntimeError: A backward is under way, or the model was offloaded.
        ValueError: A tensor consists of several ones, such as a quantized state of an optimizer.
    """
    make_idle(model)
    places: dict[str, _Place] = {}
    objects: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    start = 0
    for name, value in _values(model, optimizer):
        if not isinstance(value, torch.Tensor):
            objects[name] = value
            continue
        local = tensors[name] = plain_of(value).detach()
        if is_traceable_wrapper_subclass(local):
            raise ValueError(
                f"{name} is a {type(local).__name__}, which consists of several tensors; save a "
                "checkpoint instead"
            )
        kind: _Kind = "plain"
        if isinstance(value, DTensor):
            kind = "sharded" if isinstance(value, UnevenDTensor) else "replicated"
        is_on_host = local.device.type == "cpu"
        places[name] = _Place(start, tuple(local.shape), local.dtype, kind, is_on_host)
        start += -(-places[name].nbytes // _ALIGNMENT) * _ALIGNMENT
    if into is not None and into.memory.nbytes == start:
        memory = into.memory
    else:
        is_pinned = pin_memory and any(t.device.type == "cuda" for t in tensors.values())
        # Zeros between tensors, so that snapshots of equal values are equal.
        memory = torch.zeros(start, dtype=torch.uint8, pin_memory=is_pinned)
    found = Snapshot(step, memory, places, objects, extra)
    for name, local in tensors.items():
        found.tensor(name).copy_(local, non_blocking=True)
    for device in {local.device for local in tensors.values()}:
        wait_for_device(device)
    return found


def restore(snapshot: Snapshot, model: nn.Module, optimizer: Optimizer | None = None) -> Any:
    """Write a snapshot into a model and its optimizer, sharded as when it was taken.

    Call it on all ranks; there is no communication. Gradients become None.

    Args:
        snapshot: A snapshot of this rank.
        model: The model, or another one that is sharded in the same way.
        optimizer: An optimizer of its parameters; required if the snapshot has one.

    Returns:
        `extra` of the snapshot.

    Raises:
        ValueError: The snapshot is of another model or optimizer, or of other rows; nothing is
            written.
    """
    make_idle(model)
    own = dict(_values(model, None))
    if optimizer is not None:
        own[OPTIMIZER_GROUPS] = groups_entry(optimizer, parameter_names(model))
    _check(snapshot, own)
    extra_states = extra_state_names(model)
    with torch.no_grad():
        for name, value in own.items():
            if isinstance(value, torch.Tensor):
                plain_of(value).detach().copy_(snapshot.tensor(name))
                torch.autograd.graph.increment_version(value)
    states = {extra_states[n]: o for n, o in snapshot.objects.items() if n in extra_states}
    if states:
        for value in states.values():
            if isinstance(value, io.BytesIO):
                value.seek(0)
        model.load_state_dict(states, strict=False)
    model.zero_grad()
    if optimizer is not None:
        _restore_optimizer(snapshot, model, optimizer)
    return snapshot.extra


def _restore_optimizer(snapshot: Snapshot, model: nn.Module, optimizer: Optimizer) -> None:
    names = parameter_names(model)
    found = states_by_parameter((*snapshot.places, *snapshot.objects))
    states: dict[Any, dict[str, Any]] = {}
    saved = snapshot.objects[OPTIMIZER_GROUPS]
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})
        for param in group["params"]:
            for state, name in found.get(names[param], {}).items():
                states.setdefault(param, {})[state] = _state(snapshot, name, param)
    optimizer.state.clear()
    optimizer.state.update(states)


def _state(snapshot: Snapshot, name: str, param: Any) -> Any:
    if name in snapshot.objects:
        return snapshot.objects[name]
    place, device = snapshot.places[name], plain_of(param).device
    value = snapshot.tensor(name).to("cpu" if place.is_on_host else device, copy=True)
    if place.kind == "sharded":
        return rows_like(value, param)
    if place.kind == "replicated":
        return replicated(value, param.device_mesh)
    return value


def _check(snapshot: Snapshot, own: dict[str, Any]) -> None:
    """Raise unless a snapshot has the model's tensors and the optimizer's groups."""
    groups, saved = own.pop(OPTIMIZER_GROUPS, None), snapshot.objects.get(OPTIMIZER_GROUPS)
    if (groups is None) != (saved is None):
        which = ("has", "none was given") if groups is None else ("has not", "one was given")
        raise ValueError(f"the snapshot {which[0]} the state of an optimizer, and {which[1]}")
    if [g["params"] for g in groups or ()] != [g["params"] for g in saved or ()]:
        raise ValueError("the snapshot is of an optimizer with other parameter groups")
    names = {n for n in (*snapshot.places, *snapshot.objects) if not n.startswith("optimizer.")}
    if other := sorted(names ^ own.keys()):
        raise ValueError(
            f"the snapshot is of another model: only one of them has {listed(other, 4)}"
        )
    for name, value in own.items():
        if not isinstance(value, torch.Tensor):
            continue
        place, local = snapshot.places[name], plain_of(value)
        if (place.shape, place.dtype) != (tuple(local.shape), local.dtype):
            raise ValueError(
                f"the snapshot has {place.dtype} values of shape {place.shape} for this rank's "
                f"rows of {name}, and the model {local.dtype} values of shape "
                f"{tuple(local.shape)}; restore a snapshot of this rank into a model that is "
                "sharded in the same way, or load a checkpoint"
            )


def _values(model: nn.Module, optimizer: Optimizer | None) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a model and its optimizer, in the order of the model."""
    tied = tied_entries(model)
    yield from ((name, value) for name, value in model_entries(model).items() if name not in tied)
    if optimizer is not None:
        names = parameter_names(model)
        yield from state_entries(optimizer, names).items()
        yield OPTIMIZER_GROUPS, groups_entry(optimizer, names)


# -- copies on neighbors ---------------------------------------------------------------------------


def replicate(
    snapshot: Snapshot, *, group: dist.ProcessGroup | None = None, distance: int = 1
) -> Snapshot:
    """Send this rank's snapshot to a neighbor, and receive that of another one. Collective.

    Rank `r` of the group sends to rank `r + distance`, so that with a distance of the ranks per
    node, the copy is on another node.

    Args:
        snapshot: The snapshot of this rank.
        group: A process group that communicates in host memory, such as of gloo; None for the
            default group.
        distance: Distance between a rank and the holder of its copy.

    Returns:
        The snapshot of rank `r - distance`, which this rank holds from now on.

    Raises:
        ValueError: The group cannot communicate in host memory, or every rank would hold its own
            snapshot.
    """
    rank, size = _place_in(group, distance)
    to, source = (rank + distance) % size, (rank - distance) % size
    (received,) = _exchanged([(snapshot, to)], [source], group)
    return received


def recover(
    snapshot: Snapshot | None,
    held: Snapshot | None,
    *,
    group: dist.ProcessGroup | None = None,
    distance: int = 1,
) -> Snapshot:
    """Return every rank's own snapshot, from its neighbor's copy where it was lost. Collective.

    Args:
        snapshot: This rank's snapshot; None if it was lost.
        held: The snapshot that this rank holds for a neighbor; None if it was lost.
        group: As in `replicate`.
        distance: As in `replicate`.

    Raises:
        RuntimeError: A snapshot and its copy were both lost, or snapshots are of different steps.
            Raised on all ranks.
    """
    rank, size = _place_in(group, distance)
    everyone: list[tuple[int | None, int | None]] = [(None, None)] * size
    mine = (None if each is None else each.step for each in (snapshot, held))
    dist.all_gather_object(everyone, tuple(mine), group=group)
    lost = [r for r, (own, _) in enumerate(everyone) if own is None]
    gone = [r for r in lost if everyone[(r + distance) % size][1] is None]
    if gone:
        raise RuntimeError(
            f"the snapshot of {listed_ranks(gone)} and its copy were both lost; load a checkpoint"
        )
    steps = {
        r: everyone[(r + distance) % size][1] if r in lost else everyone[r][0] for r in range(size)
    }
    if len(set(steps.values())) > 1:
        raise RuntimeError(f"snapshots are of different steps, by rank: {steps}; load a checkpoint")
    owner = (rank - distance) % size
    sends = [(held, owner)] if held is not None and owner in lost else []
    received = _exchanged(sends, [(rank + distance) % size] if rank in lost else [], group)
    if received:
        return received[0]
    assert snapshot is not None
    return snapshot


def _place_in(group: dist.ProcessGroup | None, distance: int) -> tuple[int, int]:
    """Return rank and size in a group, and check the arguments."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if distance % size == 0:
        raise ValueError(
            f"with a distance of {distance} in a group of {size} ranks, every rank would hold its "
            "own snapshot; use a distance that is no multiple of the size"
        )
    backend = dist.get_backend_config(group)
    if backend != "gloo" and "cpu:" not in backend:
        raise ValueError(
            "snapshots are in host memory, where this group cannot communicate; pass "
            "group=torch.distributed.new_group(backend='gloo')"
        )
    return rank, size


def _exchanged(
    sends: list[tuple[Snapshot, int]], sources: list[int], group: dist.ProcessGroup | None
) -> list[Snapshot]:
    """Send snapshots to ranks of a group, and receive those of others."""
    targets = [to for _, to in sends]

    def exchange(sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        works = [
            dist.isend(t, group=group, group_dst=r) for t, r in zip(sent, targets, strict=True)
        ]
        works += [
            dist.irecv(t, group=group, group_src=r) for t, r in zip(received, sources, strict=True)
        ]
        for work in works:
            if work is not None:
                work.wait()

    contents = []
    for each, _ in sends:
        content = pickle.dumps((each.step, each.places, each.objects, each.extra))
        contents.append(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    sizes = [torch.tensor([len(c), s.nbytes]) for c, (s, _) in zip(contents, sends, strict=True)]
    announced = [torch.empty(2, dtype=torch.int64) for _ in sources]
    exchange(sizes, announced)
    abouts, memories = (
        [torch.empty(int(each[which]), dtype=torch.uint8) for each in announced] for which in (0, 1)
    )
    exchange(contents, abouts)
    exchange([each.memory for each, _ in sends], memories)
    found = []
    for about, memory in zip(abouts, memories, strict=True):
        step, places, objects, extra = pickle.loads(about.numpy().tobytes())
        found.append(Snapshot(step, memory, places, objects, extra))
    return found
