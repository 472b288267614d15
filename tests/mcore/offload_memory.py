"""Memory of offloaded steps on the ranks of a pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from megatron_fsdp_v2.params.gathered_parameter import is_gathered_weight
from tests.mcore.session import Training, enter_rehearsal, train


def train_moving_activations(flags: Sequence[str], modules: Sequence[str]) -> Training:
    """A training whose activations of some modules Megatron moves to the host and back.

    Megatron's command line offers it with Transformer Engine only, and moves CUDA tensors only.
    `extras` is how many tensors were moved, and how many of them were gathered weights.
    """
    gpt = enter_rehearsal()["gpt"]
    from megatron.core.extensions import transformer_engine
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload

    make, move = gpt.core_transformer_config_from_args, offload.ChunkOffloadHandler.offload
    moved: list[bool] = []

    def with_modules(*args: Any, **kwargs: Any) -> Any:
        config = make(*args, **kwargs)
        config.fine_grained_activation_offloading = bool(modules)
        config.offload_modules = list(modules)
        config.min_offloaded_tensor_size = 0
        return config

    def noted(self: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        moved.append(is_gathered_weight(tensor))
        return move(self, tensor, *args, **kwargs)

    def is_managed(tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, torch.nn.Parameter)

    handler = offload.ChunkOffloadHandler
    with (
        # It only tells Transformer Engine's own layers.
        mock.patch.object(transformer_engine, "cpu_offload", SimpleNamespace()),
        mock.patch.object(gpt, "core_transformer_config_from_args", with_modules),
        mock.patch.object(handler, "offload", noted),
        mock.patch.object(handler, "_can_manage_tensor_for_offload", staticmethod(is_managed)),
    ):
        try:
            trained = train(flags)
        finally:
            offload.PipelineOffloadManager.reset_instance()
    return dataclasses.replace(trained, extras=(len(moved), sum(moved)))
