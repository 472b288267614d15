"""One rank's values of a training, in the interface of NVIDIA's resiliency extension.

The extension's manager of local checkpoints writes such states to the disk of a node, and copies
them to other nodes. This is the only file that imports the extension, which is optional.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, override

import torch
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict

from megatron_fsdp_v2.comm.backends import wait_for_device
from megatron_fsdp_v2.dtensor.sharded_rows import ShardedRows, plain_of


class LocalPart(NamedTuple):
    """What a rank holds of a tensor.

    Attributes:
        shape: Shape of the whole tensor.
        rows: Row range of this rank; None if the tensor is not sharded.
        local_shape: Shape of this rank's part.
        dtype: Dtype.
    """

    shape: tuple[int, ...]
    rows: tuple[int, int] | None
    local_shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> LocalPart:
        """Describe the part of a tensor, sharded or not."""
        rows = tensor.local_rows if isinstance(tensor, ShardedRows) else None
        return cls(tuple(tensor.shape), rows, tuple(plain_of(tensor).shape), tensor.dtype)


class LocalState(TensorAwareStateDict):
    """This rank's parts of all tensors, and its other values.

    The extension sends tensors in the memory in which it finds them, and NCCL cannot send host
    memory. If some tensors are on a GPU, those in host memory, such as counters of steps, are
    therefore objects, which the extension pickles.

    Args:
        values: Tensors, sharded or not, and other values by name. Tensors are not copied until
            `copy_tensors_to_cpu`; other values are copied.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        found = {n: value for n, value in values.items() if isinstance(value, torch.Tensor)}
        local = {name: plain_of(value).detach() for name, value in found.items()}
        on_device = {name for name, tensor in local.items() if tensor.device.type != "cpu"}
        sent = on_device or local.keys()
        self.places = {name: LocalPart.of(value) for name, value in found.items()}
        self.objects = copy.deepcopy(
            {name: local.get(name, value) for name, value in values.items() if name not in sent}
        )
        self._sent = [name for name in local if name in sent]
        self._tensors: list[torch.Tensor] | None = [local[name] for name in self._sent]

    def values_by_name(self) -> dict[str, Any]:
        """Return all values; tensors are this rank's parts."""
        return self.objects | dict(zip(self._sent, self.tensors, strict=True))

    @property
    @override
    def is_hollow(self) -> bool:
        """Whether the tensors were popped and not inserted again."""
        return self._tensors is None

    @property
    @override
    def tensors(self) -> Sequence[torch.Tensor]:
        """The tensors, in the order in which they are popped and inserted.

        Raises:
            RuntimeError: The state is hollow.
        """
        if self._tensors is None:
            raise RuntimeError("the tensors of this local state were popped; insert them first")
        return self._tensors

    @override
    def pop_tensors(self) -> Sequence[torch.Tensor]:
        """Remove and return the tensors. Their shapes and dtypes remain."""
        popped, self._tensors = self.tensors, None
        return popped

    @override
    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Insert the tensors of a hollow state.

        Raises:
            RuntimeError: The state has its tensors.
            ValueError: There are too many or too few of them, or one has another shape or dtype.
        """
        if self._tensors is not None:
            raise RuntimeError("this local state has its tensors already; pop them first")
        inserted = list(tensor_data)
        expected = [(p.local_shape, p.dtype) for p in map(self.places.__getitem__, self._sent)]
        given = [(tuple(tensor.shape), tensor.dtype) for tensor in inserted]
        if given != expected:
            differing = [n for n, a, b in zip(self._sent, given, expected, strict=False) if a != b]
            raise ValueError(
                f"expected {len(expected)} tensors with the shapes and dtypes of the popped ones, "
                f"got {len(given)}" + (f"; {differing[0]} differs first" if differing else "")
            )
        self._tensors = inserted

    @override
    def init_tensors(self) -> None:
        """Insert empty tensors in host memory into a hollow state, to receive values."""
        places = [self.places[name] for name in self._sent]
        self.insert_tensors([torch.empty(p.local_shape, dtype=p.dtype) for p in places])

    @override
    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replace the tensors by copies in host memory, which no later step changes.

        Args:
            non_blocking: Not used: the extension may write the copies at once. Copies that it has
                started itself are complete afterwards.
        """
        del non_blocking
        if torch.cuda.is_available():
            wait_for_device(torch.device("cuda"))
        # A copy also has a storage of its own: torch saves whole storages.
        self._tensors = [tensor.to("cpu", copy=True) for tensor in self.tensors]

    @override
    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Do nothing: values are copied to the model from host memory."""
