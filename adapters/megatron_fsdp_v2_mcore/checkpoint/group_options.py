"""Optimizer options that both a checkpoint and the command line of a resumed run set.

Megatron's schedule reads its learning rates and weight decays from the parameter groups first. Its
own optimizers find the saved group of a parameter by these options, and fail if none matches.
"""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer.optimizer import param_group_identifier_keys

from megatron_fsdp_v2_mcore.flags.errors import FlagError

EXPERT = "is_expert_parallel"
"""Option that describes the parallelism of a run; a checkpoint does not set it."""

_SCHEDULED = tuple(key for key in param_group_identifier_keys if key != EXPERT)


def restored_options(
    name: str, given: dict[str, Any], saved: dict[str, Any], args: Any
) -> dict[str, Any]:
    """Return the options of a parameter in a resumed run.

    Args:
        name: Name of the parameter, for errors.
        given: Its options by the command line.
        saved: Its options in the checkpoint.
        args: Megatron's arguments. `--override-opt_param-scheduler` selects the given options that
            the schedule reads, `--use-checkpoint-opt_param-scheduler` the saved ones.

    Raises:
        FlagError: Without these flags, an option that the schedule reads differs.
    """
    scheduled = {key: given[key] for key in _SCHEDULED if key in given}
    if args.override_opt_param_scheduler:
        return {**saved, **scheduled}
    differ = [key for key, value in scheduled.items() if saved.get(key) != value]
    if differ and not args.use_checkpoint_opt_param_scheduler:
        values = ", ".join(f"{key} {saved.get(key)}, here {given[key]}" for key in differ)
        raise FlagError(
            f"the checkpoint has other optimizer options for {name}: {values}; use the flags of "
            "the run that saved it, or add --override-opt_param-scheduler for the values of this "
            "command line or --use-checkpoint-opt_param-scheduler for those of the checkpoint"
        )
    return saved
