"""The patches of Megatron: targets, reasons, compatibility checks, and their removal.

All replaced attributes of Megatron's modules and classes are listed here, except those of a CPU
rehearsal (`megatron_cpu_rehearsal/patches.py`). Two kinds of instances are changed elsewhere: the
context-parallel helpers of Mamba mixers when a model is sharded (`model/mamba_parameters.py`), and
the nodes of a schedule plan when it is built (`model/schedule_plans.py`).

`install()` checks every patch against the installed version before it applies any of them. Patches
marked `selected` are applied only if the command line selects this package; otherwise Megatron's
behavior is unchanged. `enable()` is for scripts without Megatron's command line: it applies the
patches of `megatron.core` at once.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron_fsdp_v2_mcore.flags.arguments import (
    accepted_by_megatron,
    check_arguments,
    check_validated_arguments,
    is_enabled,
)
from megatron_fsdp_v2_mcore.flags.checkpoint_check import choose_checkpoint
from megatron_fsdp_v2_mcore.flags.options import Options, is_active, set_active
from megatron_fsdp_v2_mcore.flags.patterns import evaluate_pattern
from megatron_fsdp_v2_mcore.flags.settings import notices
from megatron_fsdp_v2_patching import Patch, Patches

SUPPORTED = "0.19"


def _with_our_checks(original: Callable[..., Any]) -> Callable[..., Any]:
    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        if is_enabled(args):
            choose_checkpoint(args)
        check_arguments(args)
        if not is_enabled(args):
            return original(args, *rest, **kwargs)
        options = Options.from_args(args)
        # Megatron's validation changes some of the options that the notices depend on.
        messages = list(notices(args, options))
        with accepted_by_megatron(args):
            result = original(args, *rest, **kwargs)
        check_validated_arguments(args)
        if args.rank == 0:
            sys.stdout.write("".join(f"{notice}\n" for notice in messages))
        _apply(_SELECTED, options)
        return result

    return validate_args


def _unless_compiled(original: Callable[[], None]) -> Callable[[], None]:
    def compile_helpers() -> None:
        datasets = importlib.import_module("megatron.core.datasets")
        if Path(str(datasets.__file__)).with_name("Makefile").exists():
            original()
            return
        # A wheel has compiled helpers and no Makefile. This import raises if they are missing.
        importlib.import_module("megatron.core.datasets.helpers_cpp")

    return compile_helpers


def _within_bounds(original: Callable[[str], Any]) -> Callable[[str], Any]:
    del original
    return evaluate_pattern


def _with_emerging_optimizers(original: Callable[..., Any]) -> Callable[..., Any]:
    def build(config: Any, model_chunks: Any, *args: Any, **kwargs: Any) -> Any:
        # Imported here because other optimizers do not need emerging_optimizers.
        from megatron_fsdp_v2_mcore.optim.optimizer_factory import build_emerging_optimizer

        return build_emerging_optimizer(original, config, model_chunks, *args, **kwargs)

    return build


_selected = functools.partial(Patch, selected=True)

PATCHES: tuple[Patch, ...] = (
    Patch(
        "megatron.training.arguments:add_megatron_arguments",
        "adds --use-fsdp-fully-shard-api to the command line",
        wrap="megatron_fsdp_v2_mcore.flags.arguments:with_arguments",
        name="arguments",
        parameters=("parser",),
    ),
    Patch(
        "megatron.training.arguments:validate_args",
        "rejects unsupported options by name, and applies the patches below when selected",
        wrap="megatron_fsdp_v2_mcore.patches:_with_our_checks",
        name="validation",
        parameters=("args",),
    ),
    Patch(
        "megatron.training.yaml_arguments:validate_yaml",
        "--yaml-cfg bypasses the validation of arguments; rejected if this package is selected",
        wrap="megatron_fsdp_v2_mcore.flags.arguments:without_yaml",
        name="validation-of-files",
        parameters=("args",),
    ),
    Patch(
        "megatron.training.checkpointing:_load_base_checkpoint",
        "Megatron runs code that a checkpoint names, does not compare a checkpoint with the model, "
        "does not find the values of virtual stages, and cannot load state of its own optimizer "
        "into shards; without this package's flag, which --use-checkpoint-args precedes, the "
        "original function runs",
        wrap="megatron_fsdp_v2_mcore.checkpoint.loading:without_unpickling",
        name="load",
        parameters=("load_dir", "args", "rank0", "sharded_state_dict"),
    ),
    Patch(
        "megatron.training.arguments:_eval_pattern",
        "Megatron passes values of --moe-layer-freq and similar flags to eval, which may compute "
        "for hours; the replacement is equal, up to 100,000 layers",
        wrap="megatron_fsdp_v2_mcore.patches:_within_bounds",
        name="layer-patterns",
        parameters=("pattern",),
    ),
    Patch(
        "megatron.core.datasets.utils:compile_helpers",
        "Megatron's wheel contains the compiled helpers and no Makefile, so that every start "
        "without a rehearsal would fail; with a Makefile the original function runs",
        wrap="megatron_fsdp_v2_mcore.patches:_unless_compiled",
        name="dataset-helpers",
    ),
    _selected(
        "megatron.training.initialize:_initialize_distributed",
        "torchrun keeps its store across restarts, where gloo and NCCL would read the addresses of "
        "terminated ranks; with --max-restarts every start uses its own keys",
        wrap="megatron_fsdp_v2_mcore.restarts:in_fresh_store",
        parameters=("get_embedding_ranks", "get_position_embedding_ranks", "store"),
    ),
    _selected(
        "megatron.training.training:megatron_FSDP",
        "the class in which get_model wraps model chunks",
        wrap="megatron_fsdp_v2_mcore.model.wrapper:with_active_options",
        parameters=("config", "ddp_config", "module"),
    ),
    _selected(
        "megatron.training.models.dist_utils:FullyShardedDataParallel",
        "the class in which model builders wrap model chunks",
        wrap="megatron_fsdp_v2_mcore.model.wrapper:with_active_options",
        parameters=("config", "ddp_config", "module"),
    ),
    _selected(
        "megatron.training.training:get_model",
        "--skip-train: without an optimizer, Megatron omits the wrapper, so that every rank would "
        "hold the whole model and read a checkpoint by rank-local names",
        wrap="megatron_fsdp_v2_mcore.model.wrapper:sharded_without_training",
        parameters=("model_provider_func", "model_type", "wrap_with_ddp"),
    ),
    _selected(
        "megatron.training.models.dist_utils:"
        "prepare_existing_model_chunks_for_distributed_training",
        "--skip-train, as above, for models that a builder builds",
        wrap="megatron_fsdp_v2_mcore.model.wrapper:sharded_without_training",
        parameters=("model_list", "transformer_config", "pg_collection"),
    ),
    _selected(
        "megatron.core.optimizer:DistributedOptimizer",
        "the class that steps main weights: gradient statistics count replicated elements once, "
        "with every strategy",
        replace="megatron_fsdp_v2_mcore.optim.optimizer:ShardedOptimizer",
        parameters=("optimizer", "config", "grad_scaler"),
    ),
    _selected(
        "megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups",
        "options of OptimizerConfig that cannot step sharded parameters are rejected by name",
        wrap="megatron_fsdp_v2_mcore.optim.optimizer:with_checks",
        parameters=("config", "model_chunks", "param_groups"),
    ),
    _selected(
        "megatron.core.optimizer:_get_megatron_emerging_optimizer",
        "the factory of --optimizer muon and other emerging optimizers: Megatron's classes treat "
        "the rows of one rank as whole matrices",
        wrap="megatron_fsdp_v2_mcore.patches:_with_emerging_optimizers",
        parameters=("config", "model_chunks", "config_overrides", "pg_collection"),
    ),
    _selected(
        "megatron.training.training:calc_params_l2_norm",
        "Megatron sums squares of DTensors over their meshes only: it omits other pipeline stages "
        "and experts, and counts tensor-parallel replicas more than once",
        wrap="megatron_fsdp_v2_mcore.optim.optimizer:params_l2_norm",
        parameters=("model",),
    ),
    _selected(
        "megatron.core.distributed.finalize_model_grads:_allreduce_embedding_grad",
        "Megatron sums a tied embedding's gradient over pipeline stages and then assigns a plain "
        "tensor to the gradient of a DTensor",
        wrap="megatron_fsdp_v2_mcore.model.units:all_reduce_embedding_grads",
        parameters=("model", "embd_group", "pp_group", "weight_getter"),
    ),
    _selected(
        "megatron.training.training:finalize_model_grads",
        "--log-per-param-norm: logs gradients after reduction and before clipping; without the "
        "flag the original function runs",
        wrap="megatron_fsdp_v2_mcore.optim.param_norms:log_grads",
        parameters=("model",),
    ),
    _selected(
        "megatron.training.training:training_log",
        "--log-per-param-norm: writes the norms when an iteration is logged; without the flag the "
        "original function runs",
        wrap="megatron_fsdp_v2_mcore.optim.param_norms:log_norms",
        parameters=("loss_dict", "total_loss_dict", "learning_rate", "iteration"),
    ),
    _selected(
        "megatron.training.checkpointing:preprocess_fsdp_dtensor_state_dict",
        "Megatron names saved values by the layer and stage numbers local to a rank, and splits "
        "fused layers by attributes of its own buffers: other parallel sizes would load the wrong "
        "layers",
        wrap="megatron_fsdp_v2_mcore.checkpoint.state_dict:save_by_global_names",
        parameters=("args", "raw_state_dict", "model"),
    ),
    _selected(
        "megatron.training.checkpointing:generate_state_dict",
        "the function above receives only the first model chunk of a rank, and needs all of them "
        "to name their parameters",
        wrap="megatron_fsdp_v2_mcore.checkpoint.state_dict:with_chunks",
        parameters=("args", "model"),
    ),
    _selected(
        "megatron.training.checkpointing:FileSystemReader",
        "torch's class unpickles .metadata, which runs code that a checkpoint names",
        replace="megatron_fsdp_v2_mcore.checkpoint.loading:EntryReader",
        parameters=("path",),
    ),
    _selected(
        "megatron.training.training:save_checkpoint",
        "a save over an earlier checkpoint removes files that do not belong to the new one; a save "
        "that fails names rank, path and cause, as with --async-save, and ends no training",
        wrap="megatron_fsdp_v2_mcore.checkpoint.saving:with_checked_saves",
        parameters=("iteration", "model", "optimizer"),
    ),
    _selected(
        "megatron.core.dist_checkpointing.tensor_aware_state_dict:"
        "MCoreTensorAwareStateDict.from_state_dict",
        "--non-persistent-ckpt-type local: Megatron makes local checkpoints of its own sharded "
        "tensors, which fsdp_dtensor state dicts do not have; for other state dicts the original "
        "method runs",
        wrap="megatron_fsdp_v2_mcore.checkpoint.local:with_sharded_states",
        name="local-checkpoints",
        parameters=("sharded_state_dict",),
    ),
    _selected(
        "megatron.training.training:maybe_finalize_async_save",
        "a training that ends after a failed save, without another one, ends with its error",
        wrap="megatron_fsdp_v2_mcore.checkpoint.failed_saves:raising_at_the_end",
        parameters=("blocking", "terminate"),
    ),
    _selected(
        "megatron.training.training:check_param_hashes_across_dp_replicas",
        "Megatron compares the local values of a parameter, and ranks hold different rows of it",
        wrap="megatron_fsdp_v2_mcore.model.weight_hashes:compare_replicas",
        parameters=("model", "cross_check"),
    ),
    _selected(
        "megatron.training.checkpointing:get_async_strategy",
        "Megatron's worker processes write into the final checkpoint folder, and save fsdp_dtensor "
        "checkpoints only with NVIDIA's resiliency extension",
        wrap="megatron_fsdp_v2_mcore.checkpoint.async_saving:with_threaded_saves",
        parameters=("async_strategy", "module"),
    ),
    _selected(
        "megatron.training.async_utils:get_async_strategy",
        "the strategy that creates the queue of saves to finalize",
        wrap="megatron_fsdp_v2_mcore.checkpoint.async_saving:with_threaded_saves",
        name="async-save-queue",
        parameters=("async_strategy", "module"),
    ),
)

_SELECTED = [patch for patch in PATCHES if patch.selected]
_INSTALLED = [patch for patch in PATCHES if not patch.selected]

_applied = Patches()


def _apply(patches: Iterable[Patch], options: Options | None = None) -> None:
    """Apply patches. If the target of a patch is missing, apply none.

    Args:
        patches: The patches.
        options: Options of the patches that apply if this package is selected.
    """
    found = [patch for patch in patches if patch.find() is not None]
    if options is not None:
        set_active(options)
    for patch in found:
        if not _applied.holds(patch):
            _applied.apply(patch)


def megatron_version() -> str:
    """Return the installed version of megatron-core.

    Raises:
        RuntimeError: megatron-core is not installed.
    """
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        return str(importlib.import_module("megatron.core").__version__)
    except ImportError as error:
        raise RuntimeError(
            "megatron-core is not installed; install megatron-fsdp-v2[megatron]"
        ) from error


def check_patch(patch: Patch) -> bool:
    """Check that a patch fits the installed Megatron.

    Returns:
        Whether the module of its target is installed.

    Raises:
        RuntimeError: The patch does not fit.
    """
    return patch.check(
        f"Installed is megatron-core {megatron_version()}; supported is {SUPPORTED}.x"
    )


def install() -> None:
    """Patch Megatron to use this package. Call it before Megatron parses its arguments.

    The function is idempotent.

    Raises:
        RuntimeError: The installed version of Megatron is not supported, a patch does not fit, or
            the arguments were parsed already. Nothing is changed in these cases.
    """
    _check_version()
    if _applied.holds(PATCHES[0]):
        return
    global_vars = sys.modules.get("megatron.training.global_vars")
    if global_vars is not None and getattr(global_vars, "_GLOBAL_ARGS", None) is not None:
        raise RuntimeError(
            "Megatron has parsed its arguments already; call megatron_fsdp_v2_mcore.install() first"
        )
    for patch in PATCHES:
        check_patch(patch)
    _apply(_INSTALLED)


def enable(options: Options | None = None) -> None:
    """Patch `megatron.core`, for a script that does not use `megatron.training`.

    Call it before wrapping a model in `FullyShardedDataParallel`. Afterwards
    `get_megatron_optimizer` and `finalize_model_grads` of `megatron.core` support sharded models;
    their behavior for other models is unchanged. The function does not import or patch
    `megatron.training`. It is idempotent, and `uninstall()` reverts it.

    Args:
        options: Options that optimizers and checkpoints read; the defaults if None. A wrapper has
            its own.

    Raises:
        RuntimeError: The installed version of Megatron is not supported, or a patch does not fit.
            Nothing is changed in these cases.
    """
    _check_version()
    patches = [patch for patch in _SELECTED if patch.target.startswith("megatron.core.")]
    if not is_active():
        for patch in patches:
            check_patch(patch)
    _apply(patches, options or Options())


def _check_version() -> None:
    version = megatron_version()
    if not (version == SUPPORTED or version.startswith(f"{SUPPORTED}.")):
        raise RuntimeError(
            f"megatron-core {version} is installed; megatron_fsdp_v2_mcore supports {SUPPORTED}.x"
        )


def uninstall() -> None:
    """Remove all patches from Megatron."""
    _applied.undo()
    set_active(None)
