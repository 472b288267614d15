"""Several trainings of Megatron in one process: its start, and the reset of its global state.

Importing Megatron takes seconds and a short training milliseconds, so ranks are forked from a
process that has imported it, and train one configuration after the other.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import importlib
import math
import multiprocessing
import os
import queue
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_cpu_rehearsal import rehearse
from megatron_cpu_rehearsal.flags import IMPL_FLAG, cpu_environment, with_cpu_flags
from megatron_fsdp_v2_mcore.flags.arguments import supported_on_cpu
from megatron_fsdp_v2_mcore.prove.preflight import QK_SCALING, QK_VARIABLE
from megatron_fsdp_v2_patching import Patches

_STACK = contextlib.ExitStack()
_LONGEST_DOCUMENT = 64
_MOST_ORDERS = 6
"""Kept orders of samples, of 25 MB each."""


def start(impl: str, recipe: Sequence[str]) -> None:
    """Import Megatron in a rehearsal that lasts as long as this process and those forked from it.

    Args:
        impl: Value of `--transformer-impl`: Megatron looks for Transformer Engine once per process.
        recipe: Flags that determine the rehearsed GPU.
    """
    os.environ["MEGATRON_LOGGING_LEVEL"] = "40"
    _STACK.enter_context(rehearse([IMPL_FLAG, impl, *recipe]))
    # Later, modules that the end of a rehearsal needs would be gone.
    atexit.register(_STACK.close)
    prepare()


def prepare() -> None:
    """Import Megatron, and keep what each of its trainings would compute again."""
    from megatron.training import arguments

    importlib.import_module("megatron_fsdp_v2_mcore.pretrain_gpt.gpt")
    importlib.import_module("megatron.core.tokenizers.text")
    _keep_help_texts()
    _keep_sample_orders()
    arguments.add_megatron_arguments(argparse.ArgumentParser())
    # Imported objects, which are most objects, need no traversal when garbage is collected.
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def training(flags: Sequence[str], *, rehearses: bool) -> Iterator[tuple[Patches, Any]]:
    """Set this rank up for one training, and reset Megatron after it. Collective.

    Args:
        flags: All flags except those of the rehearsal.
        rehearses: Whether the rank rehearses on a CPU.

    Yields:
        A registry of patches that are undone at the end, and the function that trains.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from megatron_fsdp_v2_mcore import install
    from megatron_fsdp_v2_mcore.pretrain_gpt import gpt

    argv, patches = sys.argv, Patches()
    # Megatron's asynchronous saves may start processes, which a daemon must not do.
    multiprocessing.current_process().daemon = False
    if "--async-save" not in flags:
        # Starting a process for this queue takes longer than a short training.
        filesystem_async._results_queue = queue.Queue()
    torch.manual_seed(0)
    install()
    is_done = False
    try:
        # Megatron requires one CUDA connection of some trainings, and several of others.
        variables = cpu_environment(flags)
        if rehearses:
            flags = with_cpu_flags(flags, supported_on_cpu(flags))
        else:
            variables = {name: variables[name] for name in variables if name.startswith("CUDA")}
        if QK_SCALING in flags:
            variables[QK_VARIABLE] = "1"
        patches.default_environment(variables)
        if "--eod-mask-loss" in flags:
            _mask_most_of_documents(patches)
        sys.argv = ["pretrain_gpt", *flags]
        yield patches, gpt.train
        is_done = True
    finally:
        sys.argv = argv
        try:
            _reset(waits=is_done)
        finally:
            patches.undo()


def _mask_most_of_documents(patches: Patches) -> None:
    """Patch Megatron's mock documents: short ones, of which the last three quarters are masked.

    With one masked token in thousands, most ranks would have the same number of others.
    """
    from megatron.core.datasets import gpt_dataset

    documents: Any = gpt_dataset.MockGPTLowLevelDataset
    get = documents.__getitem__

    def masked(self: Any, index: int) -> Any:
        document = get(self, index)
        document[len(document) // 4 :] = self.eod_token
        return document

    patches.set(documents, "max_sequence_length", _LONGEST_DOCUMENT)
    patches.set(documents, "__getitem__", masked)


def sum_norms_in_fp64(patches: Patches) -> None:
    """Patch Megatron to sum the squares of all gradients in fp64."""
    from megatron.core.optimizer import layer_wise_optimizer, optimizer

    def norm(grads: Any, norm_type: float = 2, grad_stats_parallel_group: Any = None) -> float:
        assert norm_type == 2
        device = torch.device(torch.cuda.current_device())
        total = torch.zeros(1, dtype=torch.float64, device=device)
        for grad in grads:
            total += grad.double().square().sum()
        dist.all_reduce(total, group=grad_stats_parallel_group)
        return math.sqrt(total.item())

    for user in (optimizer, layer_wise_optimizer):
        patches.set(user, "get_grad_norm_fp32", norm)


def _keep_help_texts() -> None:
    """Keep the help texts of flags, for which Megatron parses the source of its classes."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    read: Any = ArgumentGroupFactory._get_field_docstrings
    known: dict[type, dict[str, str]] = {}

    def remembered(factory: Any, source: type) -> dict[str, str]:
        if source not in known:
            known[source] = read(factory, source)
        return dict(known[source])

    ArgumentGroupFactory._get_field_docstrings = remembered


def _keep_sample_orders() -> None:
    """Keep the last shuffled orders of the mock data, which has millions of samples."""
    from megatron.core.datasets import gpt_dataset

    shuffle: Any = gpt_dataset._build_shuffle_index
    known: dict[tuple[Any, ...], Any] = {}

    def remembered(num_samples: int, total_size: int, random: Any) -> Any:
        _, words, *rest = random.get_state()
        key = (num_samples, total_size, words.tobytes(), *rest)
        if key not in known:
            if len(known) >= _MOST_ORDERS:
                known.clear()
            known[key] = shuffle(num_samples, total_size, random)
        return known[key]

    gpt_dataset._build_shuffle_index = remembered


def _reset(*, waits: bool) -> None:
    """Reset Megatron's global state and destroy its process groups; see `end_groups`."""
    from megatron.core import mpu, rerun_state_machine
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.transformer.moe import moe_logging
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.training import async_utils, checkpointing, global_vars

    from megatron_fsdp_v2.checkpoint import ranks
    from megatron_fsdp_v2_mcore import uninstall

    uninstall()
    async_utils._async_calls_queue = None
    # The process group of asynchronous saves is destroyed below.
    ranks._groups.clear()
    global_vars.destroy_global_vars()
    global_vars._GLOBAL_TIMERS = None
    destroy_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()
    moe_logging.destroy_moe_metrics_tracker()
    MTPLossLoggingHelper.tracker = {}
    checkpointing._CHECKPOINT_VERSION = None
    # Saving a torch_dist checkpoint starts a process for a queue, which would outlive this one.
    filesystem_async._results_queue = None
    for child in multiprocessing.active_children():
        child.terminate()
        child.join()
    quantization = sys.modules.get("transformer_engine.pytorch.quantization")
    if quantization is not None:
        # Amaxes of deleted modules would be reduced with those of the next training.
        quantization.FP8GlobalStateManager.reset()
    end_groups(mpu, waits=waits)


def end_groups(parallel_state: Any, *, waits: bool = True) -> None:
    """Destroy all process groups except that of all ranks. Collective.

    Args:
        parallel_state: Megatron's module of its process groups.
        waits: Whether to wait for the other ranks first. A rank with an error does not: they may
            be waiting for it, for example in another pipeline stage, and would hide the error.
    """
    from megatron_fsdp_v2.runtime import meshes

    if waits:
        dist.barrier()
    parallel_state.destroy_model_parallel()
    # Megatron drops its groups without destroying them, and each group has threads.
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    # Default meshes use these groups.
    meshes._MESHES.clear()
    # --manual-gc disables collection. Groups, with hundreds of threads, are in reference cycles.
    gc.enable()
    gc.collect()
