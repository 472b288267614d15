"""Every point where Megatron is hooked: what, why, whether it fits, and how to undo it.

No attribute of Megatron's modules and classes is replaced anywhere else, except by a CPU rehearsal
(`megatron_cpu_rehearsal/patches.py`). Single objects of a sharded model are changed where they are
sharded: the parameters a Mamba mixer keeps (`model/mamba_parameters.py`), the nodes of a schedule
(`model/schedule_plans.py`). `install()` checks every patch against the installed version before it
applies one. Patches marked `selected` take effect only when the command line selects this package;
until then Megatron behaves as it does alone. `enable()` is for scripts without Megatron's command
line: those of `megatron.core` take effect at once.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron_cpu_rehearsal.patching import Patch, Patches
from megatron_fsdp_v2_mcore.activation import is_active, set_active
from megatron_fsdp_v2_mcore.flags.arguments import (
    accepted_by_megatron,
    add_arguments,
    check_after,
    check_before,
    check_no_yaml,
    is_enabled,
)
from megatron_fsdp_v2_mcore.flags.options import Options
from megatron_fsdp_v2_mcore.flags.settings import notices

__all__ = [
    "PATCHES",
    "SUPPORTED",
    "check_patch",
    "enable",
    "find_target",
    "install",
    "megatron_version",
    "uninstall",
]

SUPPORTED = "0.19"


def _with_our_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return add_arguments(original(parser))

    return add_megatron_arguments


def _with_our_checks(original: Callable[..., Any]) -> Callable[..., Any]:
    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        check_before(args)
        if not is_enabled(args):
            return original(args, *rest, **kwargs)
        options = Options.from_args(args)
        # Megatron turns on by itself what some of them name.
        said = notices(args, options)
        with accepted_by_megatron(args):
            result = original(args, *rest, **kwargs)
        check_after(args)
        if args.rank == 0:
            sys.stdout.write("".join(f"{notice}\n" for notice in said))
        _STATE.options = options
        _STATE.apply(selected=True)
        return result

    return validate_args


def _with_our_check_of_files(original: Callable[..., Any]) -> Callable[..., Any]:
    def validate_yaml(args: Any, *rest: Any, **kwargs: Any) -> Any:
        check_no_yaml(args, sys.argv)
        return original(args, *rest, **kwargs)

    return validate_yaml


def _unless_compiled(original: Callable[[], None]) -> Callable[[], None]:
    def compile_helpers() -> None:
        datasets = importlib.import_module("megatron.core.datasets")
        if Path(str(datasets.__file__)).with_name("Makefile").exists():
            original()
            return
        # There is nothing to compile with; where they are missing, this says so.
        importlib.import_module("megatron.core.datasets.helpers_cpp")

    return compile_helpers


def _our_start(original: Any) -> Any:
    return importlib.import_module("megatron_fsdp_v2_mcore.restarts").in_fresh_store(original)


def _our_wrapper(original: Any) -> Any:
    del original
    return importlib.import_module("megatron_fsdp_v2_mcore.model.wrapper").with_options(
        _STATE.options
    )


def _our_optimizer(original: Any) -> Any:
    del original
    return importlib.import_module("megatron_fsdp_v2_mcore.optim.optimizer").ShardedOptimizer


def _our_optimizer_checks(original: Any) -> Any:
    return importlib.import_module("megatron_fsdp_v2_mcore.optim.optimizer").with_checks(original)


def _our_emerging_optimizer(original: Any) -> Any:
    def build(config: Any, model_chunks: Any, *args: Any, **kwargs: Any) -> Any:
        # Imported when it is asked for: other optimizers need no emerging_optimizers.
        factory = importlib.import_module("megatron_fsdp_v2_mcore.optim.optimizer_factory")
        return factory.build_emerging_optimizer(original, config, model_chunks, *args, **kwargs)

    return build


def _our_params_norm(original: Any) -> Any:
    return importlib.import_module("megatron_fsdp_v2_mcore.optim.optimizer").params_l2_norm(
        original
    )


def _our_embedding_grads(original: Any) -> Any:
    module = importlib.import_module("megatron_fsdp_v2_mcore.model.embedding_grads")
    return module.add_up_embedding_grads(original)


def _our_end_of_backward(original: Any) -> Any:
    if not _STATE.options.logs_parameter_norms:
        return original
    return importlib.import_module("megatron_fsdp_v2_mcore.optim.param_norms").log_grads(original)


def _our_training_log(original: Any) -> Any:
    if _STATE.options.logs_parameter_norms:
        norms = importlib.import_module("megatron_fsdp_v2_mcore.optim.param_norms")
        original = norms.log_norms(original)
    return original


def _our_state_dict(original: Any) -> Any:
    return importlib.import_module("megatron_fsdp_v2_mcore.checkpoint.state_dict").with_chunks(
        original
    )


def _our_saving(original: Any) -> Any:
    return importlib.import_module("megatron_fsdp_v2_mcore.checkpoint.state_dict").save_by_model(
        original
    )


def _our_loading(original: Any) -> Any:
    state_dict = importlib.import_module("megatron_fsdp_v2_mcore.checkpoint.state_dict")
    torch_dist = importlib.import_module("megatron_fsdp_v2_mcore.checkpoint.torch_dist.loading")
    return torch_dist.with_torch_dist(state_dict.load_by_model(original))


def _our_weight_check(original: Any) -> Any:
    return importlib.import_module("megatron_fsdp_v2_mcore.model.weight_hashes").compare_replicas(
        original
    )


def _our_async_strategy(original: Any) -> Any:
    return importlib.import_module("megatron_fsdp_v2_mcore.checkpoint.async_saving").by_threads(
        original
    )


PATCHES: tuple[Patch, ...] = (
    Patch(
        "arguments",
        "megatron.training.arguments:add_megatron_arguments",
        "adds --use-fsdp-fully-shard-api to the command line",
        ("parser",),
        _with_our_arguments,
    ),
    Patch(
        "validation",
        "megatron.training.arguments:validate_args",
        "rejects by name what cannot be supported, and applies the patches below when selected",
        ("args",),
        _with_our_checks,
    ),
    Patch(
        "validation-of-files",
        "megatron.training.yaml_arguments:validate_yaml",
        "--yaml-cfg goes past the validation of arguments; rejected where this package is selected",
        ("args",),
        _with_our_check_of_files,
    ),
    Patch(
        "dataset-helpers",
        "megatron.core.datasets.utils:compile_helpers",
        "Megatron's wheel carries the compiled helpers and no Makefile to compile them with: every "
        "start without a rehearsal would end there; with a Makefile it is as it was",
        (),
        _unless_compiled,
    ),
    Patch(
        "start",
        "megatron.training.initialize:_initialize_distributed",
        "torchrun restarts workers beside the store of the last start, where gloo and NCCL would "
        "find addresses of ranks that are gone; with --max-restarts every start has its own keys",
        ("get_embedding_ranks", "get_position_embedding_ranks", "store"),
        _our_start,
        selected=True,
    ),
    Patch(
        "wrapper",
        "megatron.training.training:megatron_FSDP",
        "the class get_model wraps model chunks in",
        ("config", "ddp_config", "module"),
        _our_wrapper,
        selected=True,
    ),
    Patch(
        "wrapper-of-builders",
        "megatron.training.models.dist_utils:FullyShardedDataParallel",
        "the class model builders wrap model chunks in",
        ("config", "ddp_config", "module"),
        _our_wrapper,
        selected=True,
    ),
    Patch(
        "optimizer",
        "megatron.core.optimizer:DistributedOptimizer",
        "the class that steps main weights: gradient statistics count replicated elements once, "
        "whatever the strategy",
        ("optimizer", "config", "grad_scaler"),
        _our_optimizer,
        selected=True,
    ),
    Patch(
        "optimizer-options",
        "megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups",
        "options of OptimizerConfig that cannot step sharded parameters are rejected by name",
        ("config", "model_chunks", "param_groups"),
        _our_optimizer_checks,
        selected=True,
    ),
    Patch(
        "emerging-optimizer",
        "megatron.core.optimizer:_get_megatron_emerging_optimizer",
        "the factory of --optimizer muon and its like: Megatron's classes take a rank's rows for "
        "whole matrices",
        ("config", "model_chunks", "config_overrides", "pg_collection"),
        _our_emerging_optimizer,
        selected=True,
    ),
    Patch(
        "params-norm",
        "megatron.training.training:calc_params_l2_norm",
        "Megatron sums squares of DTensors over their meshes only: other pipeline stages and "
        "experts are left out, tensor-parallel copies counted again",
        ("model",),
        _our_params_norm,
        selected=True,
    ),
    Patch(
        "embedding-grads",
        "megatron.core.distributed.finalize_model_grads:_allreduce_embedding_grad",
        "Megatron sums a tied embedding's gradient over pipeline stages and then assigns a plain "
        "tensor to the gradient of a DTensor",
        ("model", "embd_group", "pp_group", "weight_getter"),
        _our_embedding_grads,
        selected=True,
    ),
    Patch(
        "end-of-backward",
        "megatron.training.training:finalize_model_grads",
        "--log-per-param-norm: where gradients are final and not clipped yet; else as it is",
        ("model",),
        _our_end_of_backward,
        selected=True,
    ),
    Patch(
        "training-log",
        "megatron.training.training:training_log",
        "--log-per-param-norm: where an iteration is logged; else as it is",
        ("loss_dict", "total_loss_dict", "learning_rate", "iteration"),
        _our_training_log,
        selected=True,
    ),
    Patch(
        "checkpoint-entries",
        "megatron.training.checkpointing:preprocess_fsdp_dtensor_state_dict",
        "Megatron names what it saves by a rank's own numbers of layers and stages, and splits "
        "fused layers by attributes of its own buffers: other parallel sizes would load other "
        "layers",
        ("args", "raw_state_dict", "model"),
        _our_saving,
        selected=True,
    ),
    Patch(
        "checkpoint-chunks",
        "megatron.training.checkpointing:generate_state_dict",
        "the function above is given the first of a rank's model chunks only, and all have to be "
        "named",
        ("args", "model"),
        _our_state_dict,
        selected=True,
    ),
    Patch(
        "checkpoint-loading",
        "megatron.training.checkpointing:_load_base_checkpoint",
        "Megatron neither compares a checkpoint with the model nor knows where the values of "
        "virtual stages are; a file of another model would load in part. A torch_dist checkpoint "
        "of its own optimizer it cannot load into shards at all",
        ("load_dir", "args", "rank0", "sharded_state_dict"),
        _our_loading,
        selected=True,
    ),
    Patch(
        "weight-check",
        "megatron.training.training:check_param_hashes_across_dp_replicas",
        "Megatron compares what ranks hold of a parameter, and they hold other rows of it",
        ("model", "cross_check"),
        _our_weight_check,
        selected=True,
    ),
    Patch(
        "async-save",
        "megatron.training.checkpointing:get_async_strategy",
        "Megatron's worker processes write into the folder of the checkpoint itself, and of "
        "fsdp_dtensor checkpoints with NVIDIA's resiliency extension only",
        ("async_strategy", "module"),
        _our_async_strategy,
        selected=True,
    ),
    Patch(
        "async-save-queue",
        "megatron.training.async_utils:get_async_strategy",
        "where the queue of saves that are to be finalized comes from",
        ("async_strategy", "module"),
        _our_async_strategy,
        selected=True,
    ),
)


class _Installation:
    """Which patches are in place, with their originals."""

    def __init__(self) -> None:
        self.is_installed = False
        self.options = Options()
        self._patches = Patches()

    def apply(self, *, selected: bool, patches: Iterable[Patch] = PATCHES) -> None:
        """Put the patches of one kind in place; all of them or, if one does not fit, none."""
        waiting = [patch for patch in patches if patch.selected is selected]
        for patch, found in [(patch, find_target(patch)) for patch in waiting]:
            if found is not None and not self._patches.holds(*found):
                self._patches.apply(patch)
        if selected:
            set_active(active=True)

    def undo(self) -> None:
        """Put everything back, last replacement first."""
        self._patches.undo()
        self.is_installed = False
        set_active(active=False)


_STATE = _Installation()


def megatron_version() -> str:
    """The installed version of megatron-core.

    Raises:
        RuntimeError: It is not installed.
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


def find_target(patch: Patch) -> tuple[Any, str] | None:
    """The object a patch's attribute belongs to, and the attribute; None without the module.

    Raises:
        RuntimeError: The module is there and the attribute is not.
    """
    try:
        return patch.find()
    except AttributeError as error:
        raise RuntimeError(_misfit(patch, str(error))) from error


def _misfit(patch: Patch, problem: str) -> str:
    return (
        f"patch {patch.name!r} does not fit: {problem}. Installed is megatron-core "
        f"{megatron_version()}; supported is {SUPPORTED}.x"
    )


def check_patch(patch: Patch) -> None:
    """Find out whether a patch fits the installed Megatron.

    Raises:
        RuntimeError: It does not.
    """
    found = find_target(patch)
    if found is None or not patch.parameters:
        return
    # A class's signature is that of its constructor, without self.
    names = list(inspect.signature(getattr(*found)).parameters)
    if tuple(names[: len(patch.parameters)]) != patch.parameters:
        raise RuntimeError(
            _misfit(
                patch,
                f"{patch.target} takes ({', '.join(names)}), expected "
                f"({', '.join(patch.parameters)}, ...)",
            )
        )


def install() -> None:
    """Hook this package into Megatron, before Megatron parses its arguments.

    It is idempotent.

    Raises:
        RuntimeError: The installed Megatron is of another version, a patch does not fit, or the
            arguments were parsed already. Nothing is changed then.
    """
    if _STATE.is_installed:
        return
    _check_version()
    global_vars = sys.modules.get("megatron.training.global_vars")
    if global_vars is not None and getattr(global_vars, "_GLOBAL_ARGS", None) is not None:
        raise RuntimeError(
            "Megatron has parsed its arguments already; call megatron_fsdp_v2_mcore.install() first"
        )
    for patch in PATCHES:
        check_patch(patch)
    _STATE.apply(selected=False)
    _STATE.is_installed = True


def enable() -> None:
    """Hook this package into `megatron.core`, for a script that does not use `megatron.training`.

    To be called once, before a model is wrapped in `FullyShardedDataParallel`. From then on
    `get_megatron_optimizer` and `finalize_model_grads` of `megatron.core` know sharded models;
    what they do with any other model is as before. Nothing of `megatron.training` is imported or
    replaced. It is idempotent; `uninstall()` undoes it.

    Raises:
        RuntimeError: The installed Megatron is of another version, or a patch does not fit. Nothing
            is changed then.
    """
    _check_version()
    patches = [
        patch for patch in PATCHES if patch.selected and patch.target.startswith("megatron.core.")
    ]
    if not is_active():
        for patch in patches:
            check_patch(patch)
    _STATE.apply(selected=True, patches=patches)


def _check_version() -> None:
    version = megatron_version()
    if not (version == SUPPORTED or version.startswith(f"{SUPPORTED}.")):
        raise RuntimeError(
            f"megatron-core {version} is installed; megatron_fsdp_v2_mcore supports {SUPPORTED}.x"
        )


def uninstall() -> None:
    """Put everything in Megatron back as it was."""
    _STATE.undo()
