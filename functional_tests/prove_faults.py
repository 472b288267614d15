"""Faults that are planted into sharded trainings, which `prove` must find and name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from functional_tests.prove_step_faults import STEP_FAULTS
from megatron_fsdp_v2_mcore.flags.arguments import API_FLAG
from megatron_fsdp_v2_mcore.prove import worker
from megatron_fsdp_v2_mcore.prove.worker import Job, Outcome

type Fault = contextlib.AbstractContextManager[Any]
"""A context in which this package computes something wrong."""


def train(job: Job, *, fault: str) -> Outcome:
    """Train as `worker.train` does, with a fault if this package shards the model."""
    if API_FLAG not in job.flags:
        return worker.train(job)
    if fault in STEP_FAULTS and STEP_FAULTS[fault].is_in_every_step and not job.has_its_gradients:
        # The verdict names the first difference, which is in the training before.
        return Outcome()
    context = FAULTS[fault] if fault in FAULTS else STEP_FAULTS[fault].plant
    with context(job):
        return worker.train(job)


def _wrong_divisor_for_experts(job: Job) -> Fault:
    from megatron_fsdp_v2_mcore.model import wrapper

    shard = wrapper.fully_shard

    def divide_by_own_mesh(modules: Any, *, mesh: Any, **options: Any) -> Any:
        return shard(modules, mesh=mesh, **(options | {"gradient_scaling_factor": 1 / mesh.size()}))

    return mock.patch.object(wrapper, "fully_shard", divide_by_own_mesh)


def _lost_gradient_of_tied_weights(job: Job) -> Fault:
    from megatron.core.models.common.language_module.language_module import LanguageModule

    share = LanguageModule.shared_embedding_or_output_weight
    return mock.patch.object(
        LanguageModule, "shared_embedding_or_output_weight", lambda self: share(self).detach()
    )


def _stale_weight_after_a_load(job: Job) -> Fault:
    from megatron.training import training

    load = training.load_checkpoint

    def load_all_but_one(model: Any, *args: Any, **kwargs: Any) -> Any:
        params = [p for p in model[0].parameters() if p.dim() > 1][1:2]
        kept = [param.to_local().detach().clone() for param in params]
        result = load(model, *args, **kwargs)
        for param, rows in zip(params, kept, strict=True):
            param.to_local().detach().copy_(rows)
        return result

    return mock.patch.object(training, "load_checkpoint", load_all_but_one)


def _wrong_scale_with_per_token_loss(job: Job) -> Fault:
    from megatron_fsdp_v2_mcore.model.wrapper import FullyShardedDataParallel

    scale = FullyShardedDataParallel.scale_gradients
    return mock.patch.object(
        FullyShardedDataParallel, "scale_gradients", lambda self, factor: scale(self, 2 * factor)
    )


@contextlib.contextmanager
def _skipped_refresh_under_fp8(job: Job) -> Iterator[None]:
    from megatron_fsdp_v2.runtime import context
    from megatron_fsdp_v2_mcore.optim.optimizer import ShardedChain

    write, step, steps = context.write_stale_weights, ShardedChain.step, []

    def count(self: Any) -> Any:
        steps.append(self)
        return step(self)

    def skip_once(groups: Any, weight_version: int) -> None:
        if len(steps) != 1:
            write(groups, weight_version)
            return
        for group in groups:
            if group.format.communicates:
                group.note_written(weight_version)

    with (
        mock.patch.object(context, "write_stale_weights", skip_once),
        mock.patch.object(ShardedChain, "step", count),
    ):
        yield


def _momentum_advanced_twice(job: Job) -> Fault:
    from megatron_fsdp_v2_mcore.optim.optimizer import ShardedChain

    step = ShardedChain.step

    def advance_twice(self: Any) -> Any:
        result = step(self)
        for part in self.chained_optimizers:
            for param, state in part.optimizer.state.items():
                if param.grad is not None:
                    state["exp_avg"].to_local().lerp_(param.grad.to_local(), 0.1)
        return result

    return mock.patch.object(ShardedChain, "step", advance_twice)


def _swapped_halves_in_a_reshard(job: Job) -> Fault:
    from megatron_fsdp_v2_mcore.model import tensor_shards

    halves = tensor_shards.GATED_SUFFIXES
    is_reshard = "--load" in job.flags and "--tensor-model-parallel-size" not in _larger(job)
    return mock.patch.object(
        tensor_shards, "GATED_SUFFIXES", halves[::-1] if is_reshard else halves
    )


def _larger(job: Job) -> set[str]:
    """Return the flags with the value 2."""
    return {name for name, value in zip(job.flags, job.flags[1:], strict=False) if value == "2"}


def _norm_without_replicated_parameters(job: Job) -> Fault:
    from megatron_fsdp_v2_mcore.optim import optimizer

    counted = optimizer.params_counted_on_rank

    def only_split(params: Any, *groups: Any) -> Iterator[Any]:
        split = (p for p in params if getattr(p, "tensor_model_parallel", False))
        return counted(split, *groups)

    return mock.patch.object(optimizer, "params_counted_on_rank", only_split)


FAULTS: dict[str, Callable[[Job], Fault]] = {
    function.__name__[1:]: function
    for function in (
        _wrong_divisor_for_experts,
        _lost_gradient_of_tied_weights,
        _stale_weight_after_a_load,
        _wrong_scale_with_per_token_loss,
        _skipped_refresh_under_fp8,
        _momentum_advanced_twice,
        _swapped_halves_in_a_reshard,
        _norm_without_replicated_parameters,
    )
}
