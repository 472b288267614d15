"""Copies of asynchronous saves in host memory, and rows that stay in host memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.checkpoint import saving
from megatron_fsdp_v2.dtensor.row_shards import RowShards, TensorShard
from megatron_fsdp_v2.dtensor.sharded_rows import local_of, rows_like
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor
from megatron_fsdp_v2.memory.host_memory import (
    empty_in_host_memory,
    is_in_host_memory,
    register_host_memory,
    storages_in_host_memory,
)


def test_async_save_queues_all_copies_and_waits_once_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 100).bfloat16())
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    events: list[str] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten._to_copy.default:
                # Torch pins the memory of such a copy from CUDA.
                events.append("queued" if kwargs.get("non_blocking") else "blocking")
            return func(*args, **(kwargs or {}))

    with Copies():
        monkeypatch.setattr(saving, "wait_for_device", lambda _: events.append("wait"))
        write = saving._Job.write
        monkeypatch.setattr(saving._Job, "write", lambda job: (events.append("write"), write(job)))
        save = checkpoint.save(tmp_path / "saved", model, optimizer, async_save=True)
    save.result()
    # Four parameters, each with two moments and a count of steps.
    assert events == ["queued"] * 16 + ["wait", "write"]


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12).view(3, 4).t(),
        torch.ones(1).expand(5, 2),
        torch.empty(0, 3),
        torch.eye(3).to_sparse(),
        torch.tensor([1 + 2j]).conj(),
    ],
    ids=["transposed", "expanded", "empty", "sparse", "conjugate"],
)
def test_copies_preserve_dtype_shape_layout_and_values(value: torch.Tensor) -> None:
    copy = saving._copied(value)
    assert (copy.dtype, copy.shape, copy.layout) == (value.dtype, value.shape, value.layout)
    assert torch.equal(copy.to_dense(), value.to_dense())


def test_rows_in_host_memory_stay_there_on_a_cuda_mesh() -> None:
    mesh = DeviceMesh("cuda", [0], mesh_dim_names=("dp",), _init_backend=False, _rank=0)
    local = torch.arange(12.0).view(4, 3)
    shards = RowShards(((0, 4),), (1,), TensorShard(None, 0, (1, 3)))
    tensor = UnevenDTensor.from_rows(local, mesh, shards, (4, 3))
    assert local_of(tensor).data_ptr() == local.data_ptr()
    assert tensor.shape == (4, 3)
    first, second = tensor.pieces()
    assert local_of(first).data_ptr() == local.data_ptr()
    # A write to a piece changes the tensor.
    local_of(second).fill_(7)
    assert bool((local[1:] == 7).all())
    state = rows_like(torch.zeros(4, 3, dtype=torch.bfloat16), tensor)
    assert (state.dtype, state.device.type, state.shape) == (torch.bfloat16, "cpu", (4, 3))
    assert state.row_shards == tensor.row_shards


def test_offloaded_storages_are_tracked_while_they_live() -> None:
    before = len(storages_in_host_memory())
    made = empty_in_host_memory((2, 3), torch.float32, pin_memory=False)
    kept = torch.zeros(5)
    assert not is_in_host_memory(kept)
    register_host_memory(kept)
    register_host_memory(kept[1:])
    assert is_in_host_memory(made)
    assert is_in_host_memory(kept[2:].view(3, 1))
    assert not is_in_host_memory(kept.clone())
    assert len(storages_in_host_memory()) == before + 2
    del made, kept
    gc.collect()
    assert len(storages_in_host_memory()) == before


def test_a_tensor_on_a_device_is_not_in_host_memory() -> None:
    with FakeTensorMode():
        on_device = torch.empty(2, device="cuda")
    with pytest.raises(ValueError, match=r"shape \(2,\) on cuda:0 is not in host memory"):
        register_host_memory(on_device)
