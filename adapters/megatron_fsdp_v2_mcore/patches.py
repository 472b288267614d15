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

import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron_cpu_rehearsal.patching import Patch, Patches
from megatron_fsdp_v2_mcore.flags.arguments import (
    accepted_by_megatron,
    check_after,
    check_before,
    is_enabled,
)
from megatron_fsdp_v2_mcore.flags.options import Options, is_active, set_active
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
        _STATE.apply(selected=True, options=options)
        return result

    return validate_args


def _unless_compiled(original: Callable[[], None]) -> Callable[[], None]:
    def compile_helpers() -> None:
        datasets = importlib.import_module("megatron.core.datasets")
        if Path(str(datasets.__file__)).with_name("Makefile").exists():
            original()
            return
        # There is nothing to compile with; where they are missing, this says so.
        importlib.import_module("megatron.core.datasets.helpers_cpp")

    return compile_helpers


def _with_emerging_optimizers(original: Callable[..., Any]) -> Callable[..., Any]:
    def build(config: Any, model_chunks: Any, *args: Any, **kwargs: Any) -> Any:
        # Imported here because other optimizers do not need emerging_optimizers.
        from megatron_fsdp_v2_mcore.optim.optimizer_factory import build_emerging_optimizer

        return build_emerging_optimizer(original, config, model_chunks, *args, **kwargs)

    return build


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
        "rejects by name what cannot be supported, and applies the patches below when selected",
        wrap="megatron_fsdp_v2_mcore.patches:_with_our_checks",
        name="validation",
        parameters=("args",),
    ),
    Patch(
        "megatron.training.yaml_arguments:validate_yaml",
        "--yaml-cfg goes past the validation of arguments; rejected where this package is selected",
        wrap="megatron_fsdp_v2_mcore.flags.arguments:without_yaml",
        name="validation-of-files",
        parameters=("args",),
    ),
    Patch(
        "megatron.core.datasets.utils:compile_helpers",
        "Megatron's wheel carries the compiled helpers and no Makefile to compile them with: every "
        "start without a rehearsal would end there; with a Makefile it is as it was",
        wrap="megatron_fsdp_v2_mcore.patches:_unless_compiled",
        name="dataset-helpers",
    ),
    Patch(
        "megatron.training.initialize:_initialize_distributed",
        "torchrun restarts workers beside the store of the last start, where gloo and NCCL would "
        "find addresses of ranks that are gone; with --max-restarts every start has its own keys",
        wrap="megatron_fsdp_v2_mcore.restarts:in_fresh_store",
        name="start",
        parameters=("get_embedding_ranks", "get_position_embedding_ranks", "store"),
        selected=True,
    ),
    Patch(
        "megatron.training.training:megatron_FSDP",
        "the class get_model wraps model chunks in",
        wrap="megatron_fsdp_v2_mcore.model.wrapper:with_active_options",
        name="wrapper",
        parameters=("config", "ddp_config", "module"),
        selected=True,
    ),
    Patch(
        "megatron.training.models.dist_utils:FullyShardedDataParallel",
        "the class model builders wrap model chunks in",
        wrap="megatron_fsdp_v2_mcore.model.wrapper:with_active_options",
        name="wrapper-of-builders",
        parameters=("config", "ddp_config", "module"),
        selected=True,
    ),
    Patch(
        "megatron.core.optimizer:DistributedOptimizer",
        "the class that steps main weights: gradient statistics count replicated elements once, "
        "whatever the strategy",
        replace="megatron_fsdp_v2_mcore.optim.optimizer:ShardedOptimizer",
        name="optimizer",
        parameters=("optimizer", "config", "grad_scaler"),
        selected=True,
    ),
    Patch(
        "megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups",
        "options of OptimizerConfig that cannot step sharded parameters are rejected by name",
        wrap="megatron_fsdp_v2_mcore.optim.optimizer:with_checks",
        name="optimizer-options",
        parameters=("config", "model_chunks", "param_groups"),
        selected=True,
    ),
    Patch(
        "megatron.core.optimizer:_get_megatron_emerging_optimizer",
        "the factory of --optimizer muon and its like: Megatron's classes take a rank's rows for "
        "whole matrices",
        wrap="megatron_fsdp_v2_mcore.patches:_with_emerging_optimizers",
        name="emerging-optimizer",
        parameters=("config", "model_chunks", "config_overrides", "pg_collection"),
        selected=True,
    ),
    Patch(
        "megatron.training.training:calc_params_l2_norm",
        "Megatron sums squares of DTensors over their meshes only: other pipeline stages and "
        "experts are left out, tensor-parallel copies counted again",
        wrap="megatron_fsdp_v2_mcore.optim.optimizer:params_l2_norm",
        name="params-norm",
        parameters=("model",),
        selected=True,
    ),
    Patch(
        "megatron.core.distributed.finalize_model_grads:_allreduce_embedding_grad",
        "Megatron sums a tied embedding's gradient over pipeline stages and then assigns a plain "
        "tensor to the gradient of a DTensor",
        wrap="megatron_fsdp_v2_mcore.model.embedding_grads:add_up_embedding_grads",
        name="embedding-grads",
        parameters=("model", "embd_group", "pp_group", "weight_getter"),
        selected=True,
    ),
    Patch(
        "megatron.training.training:finalize_model_grads",
        "--log-per-param-norm: where gradients are final and not clipped yet; else as it is",
        wrap="megatron_fsdp_v2_mcore.optim.param_norms:log_grads",
        name="end-of-backward",
        parameters=("model",),
        selected=True,
    ),
    Patch(
        "megatron.training.training:training_log",
        "--log-per-param-norm: where an iteration is logged; else as it is",
        wrap="megatron_fsdp_v2_mcore.optim.param_norms:log_norms",
        name="training-log",
        parameters=("loss_dict", "total_loss_dict", "learning_rate", "iteration"),
        selected=True,
    ),
    Patch(
        "megatron.training.checkpointing:preprocess_fsdp_dtensor_state_dict",
        "Megatron names what it saves by a rank's own numbers of layers and stages, and splits "
        "fused layers by attributes of its own buffers: other parallel sizes would load other "
        "layers",
        wrap="megatron_fsdp_v2_mcore.checkpoint.state_dict:save_by_model",
        name="checkpoint-entries",
        parameters=("args", "raw_state_dict", "model"),
        selected=True,
    ),
    Patch(
        "megatron.training.checkpointing:generate_state_dict",
        "the function above is given the first of a rank's model chunks only, and all have to be "
        "named",
        wrap="megatron_fsdp_v2_mcore.checkpoint.state_dict:with_chunks",
        name="checkpoint-chunks",
        parameters=("args", "model"),
        selected=True,
    ),
    Patch(
        "megatron.training.checkpointing:_load_base_checkpoint",
        "Megatron neither compares a checkpoint with the model nor knows where the values of "
        "virtual stages are; a file of another model would load in part. A torch_dist checkpoint "
        "of its own optimizer it cannot load into shards at all",
        wrap="megatron_fsdp_v2_mcore.checkpoint.torch_dist.loading:with_torch_dist",
        name="checkpoint-loading",
        parameters=("load_dir", "args", "rank0", "sharded_state_dict"),
        selected=True,
    ),
    Patch(
        "megatron.training.training:check_param_hashes_across_dp_replicas",
        "Megatron compares what ranks hold of a parameter, and they hold other rows of it",
        wrap="megatron_fsdp_v2_mcore.model.weight_hashes:compare_replicas",
        name="weight-check",
        parameters=("model", "cross_check"),
        selected=True,
    ),
    Patch(
        "megatron.training.checkpointing:get_async_strategy",
        "Megatron's worker processes write into the folder of the checkpoint itself, and of "
        "fsdp_dtensor checkpoints with NVIDIA's resiliency extension only",
        wrap="megatron_fsdp_v2_mcore.checkpoint.async_saving:by_threads",
        name="async-save",
        parameters=("async_strategy", "module"),
        selected=True,
    ),
    Patch(
        "megatron.training.async_utils:get_async_strategy",
        "where the queue of saves that are to be finalized comes from",
        wrap="megatron_fsdp_v2_mcore.checkpoint.async_saving:by_threads",
        name="async-save-queue",
        parameters=("async_strategy", "module"),
        selected=True,
    ),
)


class _Installation:
    """Which patches are in place, with their originals."""

    def __init__(self) -> None:
        self.is_installed = False
        self._patches = Patches()

    def apply(
        self, *, selected: bool, patches: Iterable[Patch] = PATCHES, options: Options | None = None
    ) -> None:
        """Apply the patches of one kind; all of them or, if one does not fit, none."""
        waiting = [patch for patch in patches if patch.selected is selected]
        targets = [(patch, find_target(patch)) for patch in waiting]
        if selected:
            set_active(options or Options())
        for patch, found in targets:
            if found is not None and not self._patches.holds(*found):
                self._patches.apply(patch)

    def undo(self) -> None:
        """Restore everything, last replacement first."""
        self._patches.undo()
        self.is_installed = False
        set_active(None)


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
