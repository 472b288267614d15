"""Checks that every row of every parameter is held exactly once, in separate memory."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from megatron_fsdp_v2._text import listed
from megatron_fsdp_v2.diagnostics.walk import joined, parameters_below, units_below
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.params.group import ParameterGroup

_NAMED_AT_MOST = 10
"""Maximum number of problems in an error message."""


def check_no_overlap(module: nn.Module) -> None:
    """Check that slices do not overlap and that none is missing. No communication.

    For all ranks, from layouts: the shards of a parameter hold each row exactly once; every replica
    holds each shard once. For this rank: the memory of parameters, model weights and gradients
    consists of disjoint address ranges, and contains the expected rows.

    Args:
        module: A sharded module, or one that contains some.

    Raises:
        RuntimeError: Rows overlap, are missing or misplaced. The message names the parameters.
        ValueError: Nothing in the module is sharded.
    """
    found: list[str] = []
    for unit_name, unit in units_below(module):
        for group in unit.groups:
            names = [joined(unit_name, name) for name in group.names]
            found += _group_problems(names, group)
    found += _memory_problems(module)
    if found:
        raise RuntimeError(
            f"slices of {type(module).__name__} are not disjoint and complete: "
            f"{listed(found, _NAMED_AT_MOST, separator='; ')}. Rebuild the model and shard it "
            "before anything keeps or replaces its parameters"
        )


def _uneven(group: ParameterGroup) -> list[UnevenDTensor]:
    return [param for param in group.sharded_params if isinstance(param, UnevenDTensor)]


def _group_problems(names: Sequence[str], group: ParameterGroup) -> Iterator[str]:
    """Return shards that are not held once per replica, and tensors with other rows.

    The layout was validated when it was made: parameters are disjoint in the flat buffer, and its
    slices hold each row once.
    """
    for index, (name, param) in enumerate(zip(names, _uneven(group), strict=True)):
        mesh = param.device_mesh
        steps = [
            [coordinate * stride for coordinate in range(mesh.size(axis))]
            for axis, stride in enumerate(param.row_shards.strides)
        ]
        # All parameters of a group are distributed identically.
        if index == 0:
            holders = Counter(sum(step) for step in itertools.product(*steps))
            if len(holders) != group.layout.num_shards or len(set(holders.values())) != 1:
                yield f"shards of {name} and its group are not held once in every replica"
        if param.row_shards.row_ranges != group.layout.row_ranges(index):
            yield f"the row ranges of {name} are not those of its layout"
        start, end = param.local_rows
        if (start, end) != group.main_weight.rows(index):
            yield f"rows {start} to {end} of {name} are not those in this rank's flat buffer"
        for what, tensor in (("", param), ("the gradient of ", param.grad)):
            if tensor is None:
                continue
            assert isinstance(tensor, UnevenDTensor)
            with torch.no_grad():
                num_rows = tensor.to_local().shape[0]
            if tensor.local_rows != (start, end) or num_rows != end - start:
                yield f"{what}{name} does not hold rows {start} to {end} on this rank"


type _Range = tuple[str, int, int, str]
"""Range of the addresses of a tensor: its device, start, end, and label."""


def _memory_problems(module: nn.Module) -> Iterator[str]:
    """Return tensors that share memory. Plain parameters may share memory with each other."""
    ranges: list[_Range] = []
    plain: set[str] = set()
    for entry in parameters_below(module):
        tensors = {entry.name: entry.local, f"gradient of {entry.name}": entry.local_grad}
        ranges += [_range_of(t, label) for label, t in tensors.items() if t is not None]
        if not entry.is_sharded:
            plain |= tensors.keys()
    for unit_name, unit in units_below(module):
        for group in unit.groups:
            if group.model_weight is not group.main_weight:
                for index, name in enumerate(group.names):
                    label = f"model weight of {joined(unit_name, name)}"
                    ranges.append(_range_of(group.model_weight.view(index), label))
    for first, second in _overlaps(ranges):
        if not plain.issuperset((first, second)):
            yield f"{first} and {second} share memory on this rank"


def _range_of(tensor: torch.Tensor, label: str) -> _Range:
    """Return the range of addresses of a tensor."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
    return str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + nbytes, label


def _overlaps(ranges: Iterable[_Range]) -> Iterator[tuple[str, str]]:
    """Return labels of ranges that overlap an earlier range on the same device."""
    place, reach, holder = "", 0, ""
    for where, start, end, label in sorted(ranges):
        if start == end:
            continue
        if where != place:
            place, reach = where, start
        if start < reach:
            yield holder, label
        if end > reach:
            reach, holder = end, label
