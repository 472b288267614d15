"""Trainer of transformers, for a model that the library shards itself: adapters and checkpoints."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp_v2.dtensor.sharded_rows import ShardedRows
from megatron_fsdp_v2_patching import Patch

__all__ = ["PATCHES"]

_HERE = "megatron_fsdp_v2_for.transformers_trainer"
_OPTIMIZER, _SCHEDULER = "optimizer", "scheduler.pt"
PATCHES = (
    Patch(
        "transformers.trainer:Trainer.__init__",
        reason="Trainer rejects checkpoints with the optimizer of a model that the library shards",
        wrap=f"{_HERE}:accepts_checkpoints",
        parameters=("self", "model", "args"),
    ),
    Patch(
        "transformers.trainer:Trainer._sync_replicated_trainable_parameters",
        reason="Trainer reduces the gradients of adapters that are added to a sharded model",
        wrap=f"{_HERE}:marks_adapters",
        parameters=("self", "model"),
    ),
    Patch(
        "transformers.trainer:Trainer._save_optimizer_and_scheduler",
        reason="Trainer saves the optimizer state of the first rank only",
        wrap=f"{_HERE}:saves_all_ranks",
        parameters=("self", "output_dir"),
    ),
    Patch(
        "transformers.trainer:Trainer._load_optimizer_and_scheduler",
        reason="Trainer loads the optimizer state of the first rank on all ranks",
        wrap=f"{_HERE}:loads_all_ranks",
        parameters=("self", "checkpoint"),
    ),
)
"""Patches of Trainer, the same for all versions of transformers."""


def accepts_checkpoints(
    original: Callable[..., Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return the constructor of Trainer, which accepts checkpoints of a model sharded here."""

    @functools.wraps(original)
    def init(self: Any, model: Any = None, args: Any = None, *more: Any, **others: Any) -> None:
        params = model.parameters() if isinstance(model, torch.nn.Module) else ()
        if args is None or not any(isinstance(param, ShardedRows) for param in params):
            original(self, model, args, *more, **others)
            return
        # Only the check of the constructor reads it.
        saves_only_model, args.save_only_model = args.save_only_model, True
        try:
            original(self, model, args, *more, **others)
        finally:
            args.save_only_model = saves_only_model

    return init


def marks_adapters(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the method that makes Trainer reduce adapters, which marks them as reduced by it."""

    def sync(self: Any, model: Any) -> None:
        original(self, model)
        for param in model.parameters():
            # Trainer sets it, and registers a hook that averages the gradient over all ranks.
            if getattr(param, "_replicated_grad_hook_registered", False):
                param.requires_gradient_reduction = False

    return sync


def saves_all_ranks(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the method that saves an optimizer, which saves sharded state from all ranks."""

    def save(self: Any, output_dir: str) -> None:
        if not _is_sharded(self.optimizer):
            original(self, output_dir)
            return
        from transformers.distributed import save_optimizer_distributed

        folder = Path(output_dir) / _OPTIMIZER
        save_optimizer_distributed(self.model, _plain(self.optimizer), str(folder))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    return save


def loads_all_ranks(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the method that loads an optimizer, which loads a rank's part of sharded state.

    Raises:
        FileNotFoundError: The folder has no optimizer that `saves_all_ranks` saved.
    """

    def load(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_sharded(self.optimizer):
            original(self, checkpoint)
        else:
            _load(self, Path(checkpoint))

    return load


def _load(trainer: Any, folder: Path) -> None:
    from transformers.distributed import load_optimizer_distributed

    if not (folder / _OPTIMIZER).is_dir():
        raise FileNotFoundError(
            f"{folder} has no folder {_OPTIMIZER!r} with the optimizer state of all ranks: it was "
            "saved without this package, or with save_only_model=True. Save it again after "
            "megatron_fsdp_v2_for.transformers.install(), or start from its weights: load them "
            "with from_pretrained, and train without resume_from_checkpoint"
        )
    optimizer = _plain(trainer.optimizer)
    load_optimizer_distributed(trainer.model, optimizer, str(folder / _OPTIMIZER))
    scheduler = torch.load(folder / _SCHEDULER, weights_only=True)
    trainer.lr_scheduler.load_state_dict(scheduler)


def _plain(optimizer: Any) -> Any:
    """Return the optimizer of torch, without accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _is_sharded(optimizer: Any) -> bool:
    groups = (group["params"] for group in optimizer.param_groups)
    return any(isinstance(param, ShardedRows) for param in itertools.chain(*groups))
