"""Model, data, batches and loss of `pretrain_gpt`, on Megatron's own building blocks.

Their composition is transcribed from Megatron-LM's `pretrain_gpt.py` and `gpt_builders.py`,
Copyright (c) NVIDIA CORPORATION; see NOTICE.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, pretrain
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.models.gpt import GPTModelBuilder
from megatron.training.models.hybrid import HybridModelBuilder
from megatron.training.utils import is_first_or_last_pipeline_stage

from megatron_fsdp_v2_mcore.flags.errors import (
    FlagError,
    flag_of,
    parser_errors_as_flag_errors,
    rejections_as_flag_errors,
)
from megatron_fsdp_v2_mcore.pretrain_gpt.data import check_data, dataset_config
from megatron_fsdp_v2_mcore.pretrain_gpt.inprocess import FLAG, restart_within_processes

# A loss that grows by more than this factor in an iteration is treated as a hardware fault.
SPIKY_LOSS_FACTOR = 10.0

BATCH_KEYS = (
    "tokens",
    "labels",
    "loss_mask",
    "position_ids",
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "local_cp_size",
)


def build_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> torch.nn.Module:
    """Build one pipeline stage of the model that the flags describe.

    The model is Megatron's hybrid model with `--hybrid-layer-pattern`, otherwise its GPT.

    Args:
        pre_process: Whether the stage has the embedding.
        post_process: Whether the stage has the output layer.
        vp_stage: Virtual pipeline stage.
        config: A transformer configuration; derived from the flags if None.
        pg_collection: Process groups.

    Raises:
        FlagError: Megatron's layers reject a combination of flags.
    """
    args = get_args()
    transformer = core_transformer_config_from_args(args) if config is None else config
    builder: Any
    if args.hybrid_layer_pattern is not None:
        builder = HybridModelBuilder(hybrid_config_from_args(args, transformer))
    else:
        builder = GPTModelBuilder(gpt_config_from_args(args, transformer))
    with rejections_as_flag_errors("Megatron cannot build the model that these flags describe"):
        model: torch.nn.Module = builder.build_model(
            pg_collection, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage
        )
    return model


def _reads_data(args: Any, vp_stage: int | None) -> bool:
    """Whether this rank's stage needs tokens or labels."""
    return bool(is_first_or_last_pipeline_stage(vp_stage) or _has_mtp(args, vp_stage))


def _has_mtp(args: Any, vp_stage: int | None) -> bool:
    if not args.mtp_num_layers:
        return False
    layout = core_transformer_config_from_args(args).pipeline_model_parallel_layout
    return bool(
        mtp_on_this_rank(
            layout=layout,
            mtp_num_layers=args.mtp_num_layers,
            ignore_virtual=vp_stage is None,
            vp_stage=vp_stage,
        )
    )


def build_datasets(num_samples: Any, vp_stage: int | None = None) -> Any:
    """Build train, validation and test datasets, on the ranks that read them.

    Args:
        num_samples: Number of samples of each dataset.
        vp_stage: Virtual pipeline stage.
    """
    args = get_args()
    builder = BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTDataset,
        num_samples,
        lambda: mpu.get_tensor_model_parallel_rank() == 0 and _reads_data(args, vp_stage),
        dataset_config(args),
    )
    return builder.build()


build_datasets.is_distributed = True  # type: ignore[attr-defined]  # read by Megatron


def get_batch(data_iterator: Iterator[Any] | None, vp_stage: int | None = None) -> dict[str, Any]:
    """Return this rank's part of the next micro-batch.

    Tensor-parallel rank 0 reads the micro-batch and broadcasts it to the other ranks.

    Args:
        data_iterator: Micro-batches; None on ranks that do not read data.
        vp_stage: Virtual pipeline stage.

    Returns:
        Tensors by name; None for those that this stage does not use.
    """
    args = get_args()
    if not _reads_data(args, vp_stage):
        return dict.fromkeys(BATCH_KEYS)
    stage: dict[str, Any] = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        assert data_iterator is not None
        data = next(data_iterator)
        for key in BATCH_KEYS:
            value = data.get(key)
            batch[key] = None if value is None else value.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=_has_mtp(args, vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(**stage),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(**stage),
    )
    if args.context_parallel_size > 1:
        cp_group = mpu.get_context_parallel_group()
        batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group)
    return batch


def loss_function(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the sum of the masked token losses of a micro-batch.

    Args:
        loss_mask: 1 for tokens that contribute to the loss, of shape `(batch, sequence)`.
        losses: Loss of every token, of shape `(batch, sequence)`.

    Returns:
        The sum (Megatron divides it), the number of tokens, and both as values to report.
    """
    args = get_args()
    mask = loss_mask.view(-1).float()
    total = torch.sum(losses.view(-1).float() * mask)
    num_tokens = mask.sum().clone().detach().to(torch.int)
    rerun = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for check, message in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            rerun.validate_result(
                result=total,
                rejection_func=check,
                message=f"found {message} in the local forward loss",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        rerun.validate_result(
            result=total,
            rejection_func=partial(
                rerun.is_unexpectedly_large, threshold=SPIKY_LOSS_FACTOR, context="loss"
            ),
            message="spiky loss",
            tolerance=0.0,
            fatal=False,
        )
    report = torch.cat([total.clone().detach().view(1), num_tokens.view(1)])
    return total, num_tokens, {"lm loss": report}


def forward_step(
    data_iterator: Any, model: torch.nn.Module, return_schedule_plan: bool = False
) -> Any:
    """Run the forward of one micro-batch; called by Megatron's schedules.

    Args:
        data_iterator: Micro-batches.
        model: A pipeline stage, which may be wrapped.
        return_schedule_plan: Whether to build a plan of the forward instead, for
            `--overlap-moe-expert-parallel-comm`.

    Returns:
        The stage's output or plan, and the function that computes the loss of the output.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    vp_stage: int | None = get_attr_wrapped_model(model, "vp_stage")
    batch = get_batch(data_iterator, vp_stage)
    timers("batch-generator").stop()
    run: Any = model.build_schedule_plan if return_schedule_plan else model
    output = run(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_function, batch["loss_mask"])


def _check_experts(args: Any) -> None:
    if args.num_experts and args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        raise FlagError(
            f"--num-experts {args.num_experts} with --tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size} needs --sequence-parallel: without it Megatron's "
            "layers of experts do not train"
        )


def _check_started() -> None:
    """Check that a launcher has told this process where the others are.

    Raises:
        FlagError: There is no address, of torchrun or of another launcher.
    """
    if not dist.is_initialized() and "MASTER_ADDR" not in os.environ:
        raise FlagError(
            "pretrain_gpt is started by torchrun, on one rank too: "
            "torchrun --nproc-per-node 1 -m megatron_fsdp_v2_mcore.pretrain_gpt <flags>"
        )


def train() -> None:
    """Parse Megatron's flags and train.

    Raises:
        FlagError: Megatron or this package rejects a flag.
    """
    # Checked before Megatron's validation, which may raise another error first, and after it.
    check_data(sys.argv)
    if FLAG in sys.argv:
        _check_started()
        restart_within_processes(_train)
    else:
        _train()


def _train(store: Any = None, call_wrapper: Any = None) -> None:
    """Parse Megatron's flags and train; see `restart_within_processes`."""
    with rejections_as_flag_errors("Megatron rejects these flags"):
        with parser_errors_as_flag_errors():
            args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
        check_data([flag_of(name) for name, value in vars(args).items() if value])
        _check_experts(args)
        # Megatron builds this configuration again with the model. Building it here checks it early.
        core_transformer_config_from_args(args)
        configuration = pretrain_cfg_container_from_args(args)
    _check_started()
    pretrain(
        configuration,
        build_datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider=build_model,
        store=store,
        inprocess_call_wrapper=call_wrapper,
    )
