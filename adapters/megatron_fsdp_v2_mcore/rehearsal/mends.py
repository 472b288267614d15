"""Places in Megatron that no CPU gets past, mended one by one, each with its reason."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_fsdp_v2_mcore.rehearsal.patches import Patches


@dataclass(frozen=True, slots=True)
class Mend:
    """One replaced attribute.

    Attributes:
        target: `module:attribute`.
        reason: Why a CPU needs it.
        replace: Makes the replacement from the original.
    """

    target: str
    reason: str
    replace: Callable[[Any], Any]


def _skip_if_compiled(compile_helpers: Callable[[], None]) -> Callable[[], None]:
    def compile_or_skip() -> None:
        try:
            importlib.import_module("megatron.core.datasets.helpers_cpp")
        except ImportError:
            compile_helpers()

    return compile_or_skip


def _lists_for_splits(all_to_all: Callable[..., Any]) -> Callable[..., Any]:
    def with_lists(
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's own name, passed by keyword
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return all_to_all(
            output, input, _as_list(output_split_sizes), _as_list(input_split_sizes), *args, **kwargs
        )

    return with_lists


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if hasattr(sizes, "tolist") else sizes


MENDS: tuple[Mend, ...] = (
    Mend(
        "megatron.core.datasets.utils:compile_helpers",
        "the wheel carries the compiled helpers and no Makefile to compile them with",
        _skip_if_compiled,
    ),
    Mend(
        "torch.distributed:all_to_all_single",
        "the MoE token dispatcher passes split sizes as arrays; gloo wants lists",
        _lists_for_splits,
    ),
)


def mend(patches: Patches) -> None:
    """Apply every mend."""
    for item in MENDS:
        module_name, _, attribute = item.target.partition(":")
        module = importlib.import_module(module_name)
        patches.set(module, attribute, item.replace(getattr(module, attribute)))
