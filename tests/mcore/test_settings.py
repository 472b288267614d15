"""Megatron's configuration is supported field by field, or rejected by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.distributed import DistributedDataParallelConfig

from megatron_fsdp_v2_mcore import FlagError, Options
from megatron_fsdp_v2_mcore.flags.checkpoint_check import check_checkpoint_folder
from megatron_fsdp_v2_mcore.flags.settings import (
    ShardingSettings,
    notices,
    sharding_settings,
)
from megatron_fsdp_v2_mcore.flags.table import DDP_FIELDS, Handling


def _config(**fields: Any) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params", **fields
    )


def test_the_table_knows_every_field_of_the_installed_megatron() -> None:
    fields = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    assert {rule.name for rule in DDP_FIELDS} == fields
    assert len(DDP_FIELDS) == len(fields)


def test_dtypes_and_overlap_reach_fully_shard() -> None:
    settings = sharding_settings(
        _config(
            overlap_grad_reduce=True,
            megatron_fsdp_main_params_dtype=torch.float32,
            megatron_fsdp_grad_comm_dtype=torch.bfloat16,
            grad_reduce_in_fp32=True,
            reduce_scatter_with_fp32_accumulation=True,
        )
    )
    assert settings.policy.resolve(torch.bfloat16).sums_in_fp32
    assert settings.sharding_strategy == "optim_grads_params"
    assert settings.enable_async_reduce_grad
    assert not settings.enable_unshard_prefetch
    assert settings.policy.main_params_dtype == torch.float32
    assert settings.policy.main_grads_dtype == torch.float32
    assert settings.policy.grad_comm_dtype == torch.bfloat16


def test_sums_in_fp32_without_reduce_scatters_are_rejected() -> None:
    config = _config(reduce_scatter_with_fp32_accumulation=True)
    config.data_parallel_sharding_strategy = "no_shard"
    message = "no_shard all-reduces gradients, and --ddp-reduce-scatter-with-fp32-accumulation is"
    with pytest.raises(FlagError, match=message):
        sharding_settings(config)


def test_half_of_the_suggested_communication_unit_is_gathered_ahead() -> None:
    def settings(suggested: int | None) -> ShardingSettings:
        return sharding_settings(
            _config(overlap_param_gather=True, suggested_communication_unit_size=suggested)
        )

    options = Options()
    assert settings(None).prefetch_bytes(options, torch.bfloat16) is None
    assert settings(1001).prefetch_bytes(options, torch.bfloat16) == 1000
    # As with Megatron-FSDP, a small value switches gathering ahead off.
    assert not settings(1).enable_unshard_prefetch
    assert settings(2).enable_unshard_prefetch
    ours = Options(unshard_prefetch_bytes=7)
    assert settings(None).prefetch_bytes(ours, torch.bfloat16) == 7
    with pytest.raises(FlagError, match="both say how much is gathered ahead"):
        settings(1001).prefetch_bytes(ours, torch.bfloat16)
    config = _config(fsdp_double_buffer=True, suggested_communication_unit_size=1001)
    (said,) = notices(config, options)
    assert "no more than one unit and what is gathered ahead of it are gathered" in said


def test_double_buffers_are_accepted_and_a_notice_says_what_serves_them() -> None:
    config = _config(fsdp_double_buffer=True)
    sharding_settings(config)
    assert notices(_config(), Options()) == []
    (said,) = notices(config, Options(unshard_prefetch_depth=2))
    assert said.startswith(
        "--fsdp-double-buffer: beside the root no more than 3 units are gathered"
    )
    assert said.endswith(
        "add --fsdp-trace-pool to keep their memory between steps at fixed addresses"
    )
    (said,) = notices(config, Options(uses_trace_pool=True))
    assert "; --fsdp-trace-pool keeps their memory" in said
    (said,) = notices(_config(megatron_fsdp_max_pool_double_buffer=True), Options())
    # Megatron's configuration turns the one on for the other.
    assert said.startswith("--fsdp-double-buffer and --megatron-fsdp-max-pool-double-buffer: ")


def test_registration_without_fixed_addresses_is_said_to_be_none() -> None:
    config = _config(nccl_ub=True, fsdp_manual_registration=True)
    sharding_settings(config)
    (said,) = notices(config, Options())
    assert said.startswith("--use-nccl-ub: nothing is registered")
    assert said.endswith("add --fsdp-trace-pool to have them at fixed ones")
    assert notices(config, Options(uses_trace_pool=True)) == []


@pytest.mark.parametrize(("kind", "share"), [("fp8", "half"), ("fp4", "a quarter of")])
def test_whole_copies_of_weights_that_are_gathered_in_bf16_are_said(kind: str, share: str) -> None:
    config: Any = _config()
    setattr(config, kind, "e2m1")
    (said,) = notices(config, Options())
    assert said.startswith(f"--{kind}-format: weights are gathered in bf16")
    assert said.endswith(f"add --{kind}-param-gather to gather {share} the bytes and keep nothing")
    setattr(config, f"{kind}_param_gather", True)
    assert notices(config, Options()) == []


REFUSED_VALUES: dict[str, Any] = {"param_name_patterns_for_fp32_local_accumulation": ("*",)}


@pytest.mark.parametrize(
    "rule",
    [rule for rule in DDP_FIELDS if rule.handling is Handling.REJECTED],
    ids=lambda r: r.name,
)
def test_a_rejected_field_names_its_flag(rule: Any) -> None:
    config = _config()
    setattr(config, rule.name, REFUSED_VALUES.get(rule.name, True))
    with pytest.raises(FlagError, match=rule.flag):
        sharding_settings(config)


def test_sharding_between_one_optimizer_instance_is_rejected() -> None:
    config = _config()
    config.outer_dp_sharding_strategy = "optim"
    with pytest.raises(FlagError, match=r"add --num-distributed-optimizer-instances"):
        sharding_settings(config)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A complete checkpoint of iteration 7."""
    folder = tmp_path / "iter_0000007"
    dcp.save({"weight": torch.ones(1000)}, checkpoint_id=str(folder), no_dist=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    return tmp_path


def test_a_complete_checkpoint_passes(checkpoint: Path) -> None:
    check_checkpoint_folder(checkpoint, may_be_empty=False)


def test_an_empty_folder_is_fine_only_where_it_is_also_saved_to(tmp_path: Path) -> None:
    check_checkpoint_folder(tmp_path, may_be_empty=True)
    with pytest.raises(FlagError, match="is empty of checkpoints"):
        check_checkpoint_folder(tmp_path, may_be_empty=False)
    with pytest.raises(FlagError, match="does not exist"):
        check_checkpoint_folder(tmp_path / "nowhere", may_be_empty=False)


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes | None], str]] = {
    "a truncated shard": (
        "__0_0.distcp",
        lambda content: content[:100],
        r"truncated: __0_0\.distcp has 100 of \d+ bytes",
    ),
    "a missing shard": ("__0_0.distcp", lambda _: None, r"__0_0\.distcp is missing"),
    "no metadata": (".metadata", lambda _: None, "not an fsdp_dtensor checkpoint"),
    "metadata cut short": (".metadata", lambda content: content[:50], "cannot be read"),
    "metadata that would run code": (
        ".metadata",
        lambda _: b"cos\nsystem\n(S'true'\ntR.",
        r"os\.system, which is not allowed",
    ),
}
"""By what is wrong: the file, what becomes of its content, and what is said."""


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_rejected_by_what_is_wrong(checkpoint: Path, damage: str) -> None:
    name, changed, message = DAMAGE[damage]
    file = checkpoint / "iter_0000007" / name
    content = changed(file.read_bytes())
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(FlagError, match=message):
        check_checkpoint_folder(checkpoint, may_be_empty=False)


def test_an_iteration_that_was_not_saved_is_named(checkpoint: Path) -> None:
    with pytest.raises(FlagError, match="no checkpoint of iteration 3"):
        check_checkpoint_folder(checkpoint, may_be_empty=False, iteration=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_strategy": "zero3"}, "expert_strategy is one of no_shard, .* got 'zero3'"),
        ({"unshard_prefetch_depth": 0}, "unshard_prefetch_depth is at least 1, got 0"),
        ({"unshard_prefetch_bytes": 0}, "unshard_prefetch_bytes is at least 1, got 0"),
        ({"max_live_grad_buffers": -1}, "max_live_grad_buffers is at least 1, got -1"),
    ],
)
def test_an_option_that_means_nothing_is_rejected_by_name(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**options)
