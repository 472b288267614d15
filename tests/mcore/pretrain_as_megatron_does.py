"""A stub for the `pretrain_gpt.py` of a Megatron-LM 0.19 checkout, for `run`.

The script first imports the same modules, and then calls Megatron with the same arguments: a model
configuration from which Megatron builds the model, or, with `--by-provider` (a flag of this
script), a function that builds the model.

The imports, and the order and arguments of the calls, are transcribed from Megatron-LM's
`pretrain_gpt.py`, Copyright (c) NVIDIA CORPORATION; see NOTICE.
"""

import time

_PROGRAM_START_TIME = time.time()

import argparse  # noqa: E402
import sys  # noqa: E402
from functools import partial  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer  # noqa: E402
from megatron.core.utils import get_attr_wrapped_model  # noqa: E402
from megatron.training import (  # noqa: E402
    get_args,
    get_timers,
    inprocess_restart,
    pretrain,
    print_rank_0,
    set_startup_timestamps,
)
from megatron.training.argument_utils import (  # noqa: E402
    core_transformer_config_from_args,
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args  # noqa: E402
from megatron.training.utils import is_first_or_last_pipeline_stage  # noqa: E402


def add_own_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--by-provider", action="store_true")
    return parser


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    args = get_args()
    return GPTModel(
        config=config or core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def loss_func(loss_mask: torch.Tensor, output: torch.Tensor) -> Any:
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().clone().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.cat([loss.detach().view(1), num_tokens.view(1)])}


def forward_step(data_iterator: Any, model: Any) -> Any:
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    get_attr_wrapped_model(model, "vp_stage")
    batch = next(data_iterator)
    timers("batch-generator").stop()
    output = model(
        batch["tokens"].cuda(),
        batch["position_ids"].cuda(),
        batch["attention_mask"].cuda(),
        labels=batch["labels"].cuda(),
        loss_mask=batch["loss_mask"].cuda(),
    )
    return output, partial(loss_func, batch["loss_mask"].cuda())


def is_dataset_built_on_rank(vp_stage: int | None = None) -> bool:
    is_end = is_first_or_last_pipeline_stage(vp_stage)
    return bool(is_end and parallel_state.get_tensor_model_parallel_rank() == 0)


def train_valid_test_datasets_provider(num_samples: Any, vp_stage: int | None = None) -> Any:
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
    )
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    built_here = partial(is_dataset_built_on_rank, vp_stage=vp_stage)
    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, built_here, config).build()


if __name__ == "__main__":
    set_startup_timestamps(program_start=_PROGRAM_START_TIME, main_entry=time.time())
    print_rank_0(f"script: {__file__} called as {sys.argv[0]}")
    train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    args = parse_and_validate_args(
        extra_args_provider=add_own_args, args_defaults={"tokenizer_type": "GPT2BPETokenizer"}
    )
    pretrain(
        pretrain_cfg_container_from_args(
            args, None if args.by_provider else gpt_config_from_args(args)
        ),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider=model_provider if args.by_provider else None,
        store=store,
    )
