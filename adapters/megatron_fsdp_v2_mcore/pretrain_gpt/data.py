"""The data of `pretrain_gpt`: options of Megatron's dataset builder from its flags.

The mapping of flags to options is transcribed from Megatron-LM's `pretrain_gpt.py`, Copyright (c)
NVIDIA CORPORATION; see NOTICE.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_fsdp_v2_mcore.flags.errors import FlagError


def dataset_config(args: Any) -> GPTDatasetConfig:
    """Return the dataset configuration of Megatron's arguments.

    Args:
        args: Megatron's arguments.
    """
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    counts = args.per_dataset_sequences_path
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        data_parallel_size=args.data_parallel_size,
        context_parallel_size=args.context_parallel_size,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        sequences_per_dataset=None if counts is None else json.loads(Path(counts).read_text()),
    )


OTHER_DATA = {
    "--sft": "it packs conversations",
    "--fim-data": "it cuts samples up to be filled in",
    "--dataloader-inter-document-masking": "it packs documents and attends within each",
}
"""Flags of datasets that this program does not build, with their meaning."""


def check_data(flags: Collection[str]) -> None:
    """Check that this program builds the requested kind of data.

    Args:
        flags: The given flags; other words are ignored.

    Raises:
        FlagError: The program does not build this kind of data. The message names the flag.
    """
    for flag, meaning in OTHER_DATA.items():
        if flag in flags:
            raise FlagError(
                f"{flag} requests data that this pretrain_gpt does not build ({meaning}); run your "
                "own pretraining script with -m megatron_fsdp_v2_mcore.run"
            )
