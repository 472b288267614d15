"""Megatron's configuration is supported field by field, or rejected by name."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.distributed import DistributedDataParallelConfig

from megatron_fsdp_v2 import RuntimeOptions
from megatron_fsdp_v2.runtime.api import SMALL_UNIT_BYTES
from megatron_fsdp_v2_mcore import FlagError, Options
from megatron_fsdp_v2_mcore.flags.checkpoint_check import check_checkpoint_folder, choose_checkpoint
from megatron_fsdp_v2_mcore.flags.settings import ShardingSettings, notices, sharding_settings


def _settings(
    config: DistributedDataParallelConfig, options: Options | None = None
) -> ShardingSettings:
    return sharding_settings(config, options or Options(), torch.bfloat16, torch.bfloat16)


def _config(**fields: Any) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params", **fields
    )


def test_dtypes_and_overlap_reach_fully_shard() -> None:
    settings = _settings(
        _config(
            overlap_grad_reduce=True,
            megatron_fsdp_main_params_dtype=torch.float32,
            megatron_fsdp_grad_comm_dtype=torch.bfloat16,
            grad_reduce_in_fp32=True,
            reduce_scatter_with_fp32_accumulation=True,
        )
    )
    assert settings.policy.resolve(torch.bfloat16).sums_in_fp32
    assert settings.runtime.enable_async_reduce_grad
    assert not settings.runtime.enable_unshard_prefetch
    assert settings.policy.main_params_dtype == torch.float32
    assert settings.policy.main_grads_dtype == torch.float32
    assert settings.policy.grad_comm_dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"grad_reduce_in_fp32": True}, torch.float32),
        ({"megatron_fsdp_main_grads_dtype": torch.float32}, torch.float32),
        ({"megatron_fsdp_grad_comm_dtype": torch.float32}, torch.float32),
    ],
    ids=str,
)
def test_gradients_are_reduced_in_the_requested_dtype(
    fields: dict[str, Any], dtype: torch.dtype
) -> None:
    """Main gradients have the dtype of the main weights; see docs/megatron_flags.md."""
    dtypes = _settings(_config(**fields)).policy.resolve(torch.bfloat16)
    assert (dtypes.grad_comm, dtypes.main_grad) == (dtype, torch.float32)


def test_half_of_the_suggested_communication_unit_is_prefetched() -> None:
    def runtime(suggested: int | None, options: Options | None = None) -> RuntimeOptions:
        config = _config(overlap_param_gather=True, suggested_communication_unit_size=suggested)
        return _settings(config, options).runtime

    assert runtime(None).unshard_prefetch_bytes is None
    assert runtime(1001).unshard_prefetch_bytes == 1000
    # As with Megatron-FSDP, a small value disables the prefetch.
    assert not runtime(1).enable_unshard_prefetch
    assert runtime(2).enable_unshard_prefetch
    ours = Options(runtime=RuntimeOptions(unshard_prefetch_bytes=7))
    assert runtime(None, ours).unshard_prefetch_bytes == 7
    with pytest.raises(FlagError, match="both limit the prefetch"):
        runtime(1001, ours)
    config = _config(fsdp_double_buffer=True, suggested_communication_unit_size=1001)
    (said,) = notices(config, Options())
    assert "at most one unit and its prefetched successors are gathered" in said


@pytest.mark.parametrize(
    ("options", "suggested", "expected"),
    [
        (Options(), None, SMALL_UNIT_BYTES),
        (Options(), 1001, 2002),
        (Options(), 0, 1),
        (Options(unit_bytes=7), None, 7),
        (Options(unit_bytes=7), 1001, 7),
    ],
)
def test_small_layers_are_grouped_by_default(
    options: Options, suggested: int | None, expected: int
) -> None:
    config = _config(suggested_communication_unit_size=suggested)
    assert _settings(config, options).unit_bytes == expected


def test_unit_bytes_of_zero_is_an_error() -> None:
    with pytest.raises(ValueError, match="unit_bytes must be a whole number of at least 1, got 0"):
        Options(unit_bytes=0)


PLAIN, POOL = Options(), Options(runtime=RuntimeOptions(enable_trace_pool=True))
DEPTH_2 = Options(runtime=RuntimeOptions(unshard_prefetch_depth=2))
DOUBLE = {"fsdp_double_buffer": True}
# Megatron's configuration enables fsdp_double_buffer with this field.
MAX_POOL = {"megatron_fsdp_max_pool_double_buffer": True}
UB = {"nccl_ub": True, "fsdp_manual_registration": True}
FP8: dict[str, Any] = {"fp8": "e2m1"}
FP4: dict[str, Any] = {"fp4": "e2m1"}
# Fields and options of a run, and a pattern of the notice; empty without a notice.
NOTICES: tuple[tuple[dict[str, Any], Options, str], ...] = (
    ({}, PLAIN, ""),
    (DOUBLE, DEPTH_2, "fsdp-double-buffer: without the flag, .* at most 3 .* add --fsdp-trace"),
    (DOUBLE, POOL, "fsdp-double-buffer: .* between steps"),
    (MAX_POOL, PLAIN, "fsdp-double-buffer and --megatron-fsdp-max-pool-double-buffer: "),
    (UB, PLAIN, "use-nccl-ub: no memory is registered.* add --fsdp-trace-pool for fixed addresses"),
    (UB, POOL, ""),
    (FP8, PLAIN, "fp8-format: weights are gathered in bf16.* add --fp8-param-gather .* half the b"),
    (FP4, PLAIN, "fp4-format: weights are gathered in bf16.* add --fp4-param-gather .* a quarter "),
    ({**FP8, "fp8_param_gather": True}, PLAIN, ""),
    ({**FP4, "fp4_param_gather": True}, PLAIN, ""),
)


@pytest.mark.parametrize(("fields", "options", "pattern"), NOTICES)
def test_options_with_another_implementation_yield_a_notice(
    fields: dict[str, Any], options: Options, pattern: str
) -> None:
    quantized = {name: value for name, value in fields.items() if name.startswith("fp")}
    config = _config(**{name: fields[name] for name in fields.keys() - quantized.keys()})
    for name, value in quantized.items():
        setattr(config, name, value)
    _settings(config)
    said = list(notices(config, options))
    assert len(said) == bool(pattern)
    assert all(re.match(f"--{pattern}", text) for text in said)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A complete checkpoint of iteration 7."""
    folder = tmp_path / "iter_0000007"
    dcp.save({"weight": torch.ones(1000)}, checkpoint_id=str(folder), no_dist=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    return tmp_path


def test_a_complete_checkpoint_passes(checkpoint: Path) -> None:
    check_checkpoint_folder(checkpoint, may_be_empty=False)


def test_empty_folder_is_accepted_only_if_the_run_saves_to_it(tmp_path: Path) -> None:
    check_checkpoint_folder(tmp_path, may_be_empty=True)
    with pytest.raises(FlagError, match="has no checkpoints"):
        check_checkpoint_folder(tmp_path, may_be_empty=False)
    with pytest.raises(FlagError, match="does not exist"):
        check_checkpoint_folder(tmp_path / "nowhere", may_be_empty=False)


def _chosen(**given: Any) -> argparse.Namespace:
    defaults = {"load": None, "pretrained_checkpoint": None, "ckpt_step": None, "finetune": False}
    args = argparse.Namespace(**{**defaults, **given})
    choose_checkpoint(args)
    return args


def test_pretrained_checkpoint_is_chosen_if_the_folder_to_load_has_none(checkpoint: Path) -> None:
    own = checkpoint / "own"
    for load in (None, str(own)):
        args = _chosen(load=load, pretrained_checkpoint=str(checkpoint))
        assert (args.load, args.finetune) == (str(checkpoint), True)
    own.mkdir()
    (own / "latest_checkpointed_iteration.txt").write_text("4")
    args = _chosen(load=str(own), pretrained_checkpoint=str(checkpoint))
    assert (args.load, args.finetune) == (str(own), False)
    assert _chosen(load="elsewhere").load == "elsewhere"


def test_folder_without_a_pretrained_checkpoint_is_named(checkpoint: Path) -> None:
    with pytest.raises(FlagError, match=r"--pretrained-checkpoint nowhere does not exist"):
        _chosen(pretrained_checkpoint="nowhere")
    with pytest.raises(FlagError, match=r"--pretrained-checkpoint .* has no checkpoint of iterat"):
        _chosen(pretrained_checkpoint=str(checkpoint), ckpt_step=8)


SHARD, METADATA = "__0_0.distcp", ".metadata"
# The damaged file, its new content or the number of bytes that are kept, and the expected error.
DAMAGE: tuple[tuple[str, bytes | int | None, str], ...] = (
    (SHARD, 100, r"truncated: __0_0\.distcp has 100 of \d+ bytes"),
    (METADATA, None, r"its save was cut short: it has no \.metadata"),
    (METADATA, b"cos\nsystem\n(S'true'\ntR.", r"a os\.system is in the place of a Metadata"),
)


@pytest.mark.parametrize(("name", "kept", "message"), DAMAGE)
def test_damaged_checkpoint_is_rejected_with_the_kind_of_damage(
    checkpoint: Path, name: str, kept: bytes | int | None, message: str
) -> None:
    file = checkpoint / "iter_0000007" / name
    content = file.read_bytes()
    file.unlink()
    if kept is not None:
        file.write_bytes(content[:kept] if isinstance(kept, int) else kept)
    with pytest.raises(FlagError, match=message):
        check_checkpoint_folder(checkpoint, may_be_empty=False)


def test_missing_iteration_is_named(checkpoint: Path) -> None:
    with pytest.raises(FlagError, match="no checkpoint of iteration 3"):
        check_checkpoint_folder(checkpoint, may_be_empty=False, iteration=3)
