"""A training loop on `megatron.core` alone, without `megatron.training`.

The loop trains a small GPT on synthetic sequences, sharded by this package, with optional tensor,
pipeline and expert parallelism:

    torchrun --nproc-per-node 2 examples/megatron_core_loop.py --strategy optim_grads_params
    torchrun --nproc-per-node 2 -m megatron_fsdp_v2_mcore.run \
        examples/megatron_core_loop.py --cpu-rehearsal --pipeline-parallel 2 --tied

The first command needs GPUs. `--ddp` trains with Megatron's own DistributedDataParallel instead.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_fsdp_v2_mcore

VOCABULARY = 128
SEQUENCE = 32
MICRO_BATCH = 2
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@dataclass(frozen=True)
class Settings:
    """Settings of the command line.

    Attributes:
        strategy: Sharding strategy.
        ddp: Whether Megatron's own DistributedDataParallel trains instead.
        iterations: Number of iterations.
        micro_batches: Micro-batches of an iteration.
        tensor_parallel: Tensor-parallel ranks.
        pipeline_parallel: Pipeline stages.
        expert_parallel: Expert-parallel ranks; more than one makes a model with experts.
        instances: Optimizer instances; each has a replica of the parameters.
        tied: Whether the output layer shares the embedding's weights.
        optimizer: Name of one of Megatron's optimizers.
    """

    strategy: str = "optim_grads_params"
    ddp: bool = False
    iterations: int = 10
    micro_batches: int = 2
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    instances: int = 1
    tied: bool = False
    optimizer: str = "adam"


def parse() -> Settings:
    """Parse the command line; an unknown flag is an error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    for field in fields(Settings):
        name = f"--{field.name.replace('_', '-')}"
        if isinstance(field.default, bool):
            parser.add_argument(name, action="store_true")
        else:
            choices = STRATEGIES if field.name == "strategy" else None
            parser.add_argument(
                name, type=type(field.default), default=field.default, choices=choices
            )
    return Settings(**vars(parser.parse_args()))


def build_module(settings: Settings) -> GPTModel:
    """Build this rank's pipeline stage."""
    has_experts = settings.expert_parallel > 1
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        num_moe_experts=4 if has_experts else None,
        moe_token_dispatcher_type="alltoall",
        moe_aux_loss_coeff=0.01,
        add_bias_linear=not has_experts,
        tensor_model_parallel_size=settings.tensor_parallel,
        pipeline_model_parallel_size=settings.pipeline_parallel,
        expert_model_parallel_size=settings.expert_parallel,
        pipeline_dtype=torch.float32,
        masked_softmax_fusion=False,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(config.num_moe_experts),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=settings.tied,
    ).to(torch.device("cuda", torch.cuda.current_device()))


def build(settings: Settings) -> torch.nn.Module:
    """Build and wrap this rank's pipeline stage."""
    module = build_module(settings)
    config = module.config
    if settings.ddp:
        ddp_config = DistributedDataParallelConfig(
            num_distributed_optimizer_instances=settings.instances
        )
        model: torch.nn.Module = DistributedDataParallel(config, ddp_config, module)
    else:
        # From here on, Megatron's optimizers and gradient reductions support sharded models.
        megatron_fsdp_v2_mcore.enable()
        ddp_config = DistributedDataParallelConfig(
            use_megatron_fsdp=True,
            use_distributed_optimizer=True,
            data_parallel_sharding_strategy=settings.strategy,
            num_distributed_optimizer_instances=settings.instances,
        )
        model = megatron_fsdp_v2_mcore.FullyShardedDataParallel(config, ddp_config, module)
    config.no_sync_func = model.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    return model


def build_optimizer(settings: Settings, model: torch.nn.Module) -> Any:
    """Build Megatron's optimizer for this rank's pipeline stage."""
    config = OptimizerConfig(
        optimizer=settings.optimizer,
        lr=1e-3,
        clip_grad=1.0,
        use_distributed_optimizer=not settings.ddp,
        muon_fp32_matmul_prec="high",
    )
    return get_megatron_optimizer(config, [model])


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """Yield sequences of tokens that count up by a random step, different on each DP rank."""
    seed = 1000 + parallel_state.get_data_parallel_rank(with_context_parallel=True)
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(SEQUENCE + 1)
    while True:
        start = torch.randint(VOCABULARY, (MICRO_BATCH, 1), generator=generator)
        step = torch.randint(1, 4, (MICRO_BATCH, 1), generator=generator)
        tokens = (start + step * positions) % VOCABULARY
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def forward_step(data: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> Any:
    """Run the forward of one micro-batch; return its output and the loss function."""
    device = torch.device("cuda", torch.cuda.current_device())
    batch = {name: value.to(device) for name, value in next(data).items()}
    positions = torch.arange(SEQUENCE, device=device).expand(MICRO_BATCH, -1)
    # In Megatron's masks, True marks masked positions.
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=device).triu(1)
    output = model(batch["tokens"], positions, mask, labels=batch["labels"])
    return output, partial(_loss)


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    # Megatron divides the loss itself by the number of micro-batches, in place.
    return loss, {"lm loss": loss.detach().clone()}


def train(settings: Settings) -> list[tuple[float | None, float]]:
    """Train in the existing process group.

    Returns:
        Loss and gradient norm of every iteration. Only the last pipeline stage has a loss.
    """
    start(settings)
    model = build(settings)
    return run(settings, model, build_optimizer(settings, model), batches())


def start(settings: Settings) -> None:
    """Create Megatron's process groups and seed its generators."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=settings.tensor_parallel,
        pipeline_model_parallel_size=settings.pipeline_parallel,
        expert_model_parallel_size=settings.expert_parallel,
        num_distributed_optimizer_instances=settings.instances,
    )
    model_parallel_cuda_manual_seed(1)


def run(
    settings: Settings,
    model: torch.nn.Module,
    optimizer: Any,
    data: Iterator[dict[str, torch.Tensor]],
) -> list[tuple[float | None, float]]:
    """Train a model for some iterations."""
    forward_backward = get_forward_backward_func()
    history: list[tuple[float | None, float]] = []
    for _ in range(settings.iterations):
        model.zero_grad_buffer()  # type: ignore[operator]
        optimizer.zero_grad()
        losses = forward_backward(
            forward_step_func=forward_step,
            data_iterator=data,
            model=[model],
            num_microbatches=settings.micro_batches,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        _, grad_norm, _ = optimizer.step()
        history.append((_mean(losses), float(grad_norm)))
    return history


def _mean(losses: list[dict[str, torch.Tensor]]) -> float | None:
    """Return the mean loss over micro-batches and DP ranks; None on stages without a loss."""
    if not losses:
        return None
    mean = torch.stack([loss["lm loss"] for loss in losses]).mean()
    dist.all_reduce(mean, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    num_ranks: int = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    return float(mean) / num_ranks


def main() -> None:
    """Start the process group, train, print."""
    settings = parse()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(1)
    history = train(settings)
    if dist.get_rank() == dist.get_world_size() - 1:
        for iteration, (loss, norm) in enumerate(history, start=1):
            sys.stdout.write(f"iteration {iteration}: loss {loss:.6f}, gradient norm {norm:.6f}\n")
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
