"""Validates the flags of configurations without training."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

from functional_tests.upstream.sides import Shrunk, sharded, user_flags
from tests.mcore.command_line import call_in_process
from tests.mcore.flags import LOCAL


def rejections(configurations: Sequence[Shrunk]) -> list[str]:
    """Let Megatron and this package parse and validate configurations, in a new process.

    Returns:
        The reason why each configuration is rejected; empty for valid configurations.
    """
    calls = [
        (user_flags(each), sharded(each).flags, each.run.world_size) for each in configurations
    ]
    return call_in_process(_validate_each, calls)


def _validate_each(calls: Sequence[Any]) -> list[str]:
    from megatron_cpu_rehearsal import rehearse
    from megatron_fsdp_v2_mcore import install

    # Configurations are not trained, so that the implementation of layers does not matter.
    with contextlib.redirect_stdout(io.StringIO()), rehearse(LOCAL):
        install()
        _keep_one_parser()
        return [_rejection(*call) for call in calls]


def _keep_one_parser() -> None:
    """Let Megatron build its parser once, which takes longer than parsing flags."""
    from megatron.training import arguments

    make: Any = arguments.add_megatron_arguments
    made: list[Any] = []

    def kept(parser: Any) -> Any:
        if not made:
            made.append(make(parser))
        return made[0]

    arguments.add_megatron_arguments = kept


def _rejection(typed: Sequence[str], on_cpu: Sequence[str], world_size: int) -> str:
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron_cpu_rehearsal.flags import with_cpu_flags
    from megatron_fsdp_v2_mcore.plan.source import parse_flags, rejections_as_errors
    from megatron_fsdp_v2_mcore.prove.rejection import reason_of

    def check() -> None:
        args, _ = parse_flags(with_cpu_flags(on_cpu), typed)
        with rejections_as_errors():
            pretrain_cfg_container_from_args(args)

    return reason_of(check, world_size)
