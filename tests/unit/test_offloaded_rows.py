"""Tensors that are kept in host memory: which ones they are, and that they stay there."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp_v2.dtensor.row_shards import RowShards, TensorShard
from megatron_fsdp_v2.dtensor.sharded_rows import rows_like
from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor, local_of
from megatron_fsdp_v2.memory.host_memory import (
    empty_in_host_memory,
    is_in_host_memory,
    keep_in_host_memory,
    storages_in_host_memory,
)


def test_rows_in_host_memory_stay_there_whatever_the_device_of_the_mesh() -> None:
    mesh = DeviceMesh("cuda", [0], mesh_dim_names=("dp",), _init_backend=False, _rank=0)
    local = torch.arange(12.0).view(4, 3)
    shards = RowShards(((0, 4),), (1,), TensorShard(None, 0, (1, 3)))
    tensor = UnevenDTensor.from_rows(local, mesh, shards, (4, 3))
    assert local_of(tensor).data_ptr() == local.data_ptr()
    assert tensor.shape == (4, 3)
    first, second = tensor.pieces()
    assert local_of(first).data_ptr() == local.data_ptr()
    # What a checkpoint reads into a piece arrives in the tensor.
    local_of(second).fill_(7)
    assert bool((local[1:] == 7).all())
    state = rows_like(torch.zeros(4, 3, dtype=torch.bfloat16), tensor)
    assert (state.dtype, state.device.type, state.shape) == (torch.bfloat16, "cpu", (4, 3))
    assert state.row_shards == tensor.row_shards


def test_what_is_offloaded_is_known_while_it_lives() -> None:
    before = len(storages_in_host_memory())
    made = empty_in_host_memory((2, 3), torch.float32, pin_memory=False)
    kept = torch.zeros(5)
    assert not is_in_host_memory(kept)
    keep_in_host_memory(kept)
    keep_in_host_memory(kept[1:])
    assert is_in_host_memory(made)
    assert is_in_host_memory(kept[2:].view(3, 1))
    assert not is_in_host_memory(kept.clone())
    assert len(storages_in_host_memory()) == before + 2
    del made, kept
    gc.collect()
    assert len(storages_in_host_memory()) == before


def test_a_tensor_on_a_device_is_not_in_host_memory() -> None:
    with pytest.raises(ValueError, match=r"shape \(2,\) on meta is not in host memory"):
        keep_in_host_memory(torch.empty(2, device="meta"))
