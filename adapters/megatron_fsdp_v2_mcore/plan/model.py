"""Megatron's model of one pipeline stage, built without memory and without the other ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, override

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["build_stage", "fewest_ranks"]


class _MetaDevices(TorchFunctionMode):
    """Gives tensors that are made on a device none of its memory."""

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


def fewest_ranks(args: Any) -> int:
    """Ranks of the smallest job with this job's model parallelism: one data-parallel replica.

    What a rank builds does not depend on how many replicas there are, and groups of thousands of
    ranks would take minutes to make.

    Args:
        args: Megatron's arguments.
    """
    expert_tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    dense = args.tensor_model_parallel_size * args.context_parallel_size
    expert = expert_tensor * args.expert_model_parallel_size
    return int(args.pipeline_model_parallel_size * math.lcm(dense, expert))


def build_stage(args: Any, stage: int) -> list[nn.Module]:
    """The chunks of the first rank of a pipeline stage, on the meta device.

    Args:
        args: Megatron's arguments, validated; Megatron's globals hold them.
        stage: Number of the stage.
    """
    from megatron.core import tensor_parallel
    from megatron.training import training

    from megatron_fsdp_v2_mcore.pretrain_gpt.gpt import build_model

    with _first_rank_of(args, stage):
        tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
        with _MetaDevices(), torch.device("meta"):
            chunks: list[nn.Module] = training.get_model(build_model, wrap_with_ddp=False)
    return chunks


@contextlib.contextmanager
def _first_rank_of(args: Any, stage: int) -> Iterator[None]:
    """Process groups of the smallest job, in which nothing is ever sent."""
    from megatron.core import mpu

    num_ranks = fewest_ranks(args)
    rank = stage * (num_ranks // args.pipeline_model_parallel_size)
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        mpu.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
