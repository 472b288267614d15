"""Flags that a rehearsal adds to Megatron's command line, and flags that it rejects."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_cpu_rehearsal.errors import RehearsalError
from megatron_cpu_rehearsal.te import load

__all__ = [
    "FLAG",
    "IMPL_FLAG",
    "LOCAL",
    "LOCAL_UNLESS_ASKED",
    "TRANSFORMER_ENGINE",
    "VERBOSE_FLAG",
    "cpu_capability",
    "cpu_environment",
    "is_requested",
    "transformer_impl",
    "why_no_kernels",
    "with_cpu_defaults",
    "with_cpu_flags",
]

FLAG = "--cpu-rehearsal"
VERBOSE_FLAG = "--rehearsal-verbose"

TRANSFORMER_ENGINE, LOCAL = "transformer_engine", "local"
IMPL_FLAG = "--transformer-impl"


@dataclass(frozen=True, slots=True)
class CpuFlag:
    """A flag that a rehearsal sets.

    Attributes:
        name: The flag.
        value: Its value; None for a switch.
        reason: Reason why a CPU needs the flag.
        only_local: Whether only Megatron's own layers need the flag.
    """

    name: str
    value: str | None
    reason: str
    only_local: bool = False


@dataclass(frozen=True, slots=True)
class GpuFlag:
    """A flag that only a GPU supports.

    Attributes:
        name: The flag.
        reason: Reason for the rejection.
        values: Rejected values; if empty, the flag is rejected with every value.
        only_local: Whether the flag is rejected only with Megatron's own layers, since Transformer
            Engine's reference kernels support it.
    """

    name: str
    reason: str
    values: tuple[str, ...] = ()
    only_local: bool = False


CPU_FLAGS: tuple[CpuFlag, ...] = (
    CpuFlag("--distributed-backend", "gloo", "nccl needs GPUs"),
    CpuFlag(
        "--no-persist-layer-norm",
        None,
        "the persistent layer norm is a CUDA kernel",
        only_local=True,
    ),
    CpuFlag(
        "--no-gradient-accumulation-fusion", None, "the fusion is a CUDA kernel", only_local=True
    ),
    CpuFlag("--no-masked-softmax-fusion", None, "the fusion is a CUDA kernel"),
    CpuFlag("--no-bias-gelu-fusion", None, "the fusion is compiled for a GPU"),
    CpuFlag("--no-bias-swiglu-fusion", None, "the fusion is compiled for a GPU"),
    CpuFlag("--no-bias-dropout-fusion", None, "the fusion is compiled for a GPU"),
    CpuFlag("--no-rope-fusion", None, "the fusion is a CUDA kernel"),
    CpuFlag("--no-gradient-reduce-div-fusion", None, "gloo cannot scale within a reduction"),
    CpuFlag("--attention-backend", "unfused", "fused attention needs a GPU"),
    CpuFlag("--num-workers", "0", "ranks share a few cores"),
    CpuFlag("--no-one-logger", None, "a rehearsal sends no reports to a service"),
)

_TE = "it needs kernels of Transformer Engine for a GPU"
_ITS_IMPL = (
    f"it is part of Transformer Engine; it is supported with {IMPL_FLAG} {TRANSFORMER_ENGINE}"
)
_FUSED = "the fusion is a CUDA kernel"
_GRAPHS = "CUDA graphs need a GPU"
_NCCL = "it is part of NCCL, which needs GPUs"
_OFFLOAD = "there is no device memory to move it from"

GPU_FLAGS: tuple[GpuFlag, ...] = (
    GpuFlag("--use-flash-attn", "fused attention needs a GPU"),
    GpuFlag("--fp8-format", _ITS_IMPL, only_local=True),
    GpuFlag("--fp4-format", _ITS_IMPL, only_local=True),
    GpuFlag("--tp-comm-overlap", _TE),
    GpuFlag("--te-rng-tracker", _TE),
    GpuFlag("--use-te-activation-func", _TE),
    GpuFlag("--use-transformer-engine-op-fuser", _TE),
    GpuFlag("--use-precision-aware-optimizer", _ITS_IMPL, only_local=True),
    GpuFlag("--delay-wgrad-compute", _ITS_IMPL, only_local=True),
    GpuFlag("--moe-single-grouped-weight", _TE),
    GpuFlag("--moe-single-grouped-bias", _TE),
    GpuFlag("--fused-residual-rmsnorm", _TE),
    GpuFlag("--cross-entropy-fusion-impl", _TE, ("te",)),
    GpuFlag("--disable-mamba-mem-eff-path", "its kernels need a GPU"),
    GpuFlag("--moe-permute-fusion", _FUSED),
    GpuFlag("--moe-router-fusion", _FUSED),
    GpuFlag("--moe-enable-deepep", "DeepEP needs GPUs"),
    GpuFlag("--moe-token-dispatcher-type", "its kernels need GPUs", ("flex",)),
    GpuFlag("--cuda-graph-impl", _GRAPHS, ("local", "transformer_engine", "full_iteration")),
    GpuFlag("--enable-cuda-graph", _GRAPHS),
    GpuFlag("--external-cuda-graph", _GRAPHS),
    GpuFlag("--optimizer-cuda-graph", _GRAPHS),
    GpuFlag("--use-nccl-ub", _NCCL),
    GpuFlag("--use-sharp", _NCCL),
    GpuFlag("--use-ring-exchange-p2p", _NCCL),
    GpuFlag("--fine-grained-activation-offloading", _OFFLOAD),
    GpuFlag("--cpu-offloading-num-layers", _ITS_IMPL, only_local=True),
    GpuFlag("--optimizer-cpu-offload", _OFFLOAD),
    GpuFlag("--profile", "it records CUDA activity"),
    GpuFlag("--log-straggler", "it queries the GPU's driver"),
    GpuFlag("--gpu-sniff-test-interval", "it tests GPUs and NCCL"),
    GpuFlag("--record-memory-history", "it records device memory"),
    GpuFlag("--log-energy", "it queries the GPU's driver"),
)


_CONTEXT_FLAG = "--context-parallel-size"
LOCAL_UNLESS_ASKED = ("--experimental-attention-variant", "--hybrid-layer-pattern")
"""Flags with which Megatron's own layers are the default."""


def is_requested(argv: Sequence[str]) -> bool:
    """Whether a command line requests a rehearsal."""
    return FLAG in argv


def transformer_impl(argv: Sequence[str]) -> str:
    """Return the implementation of layers: `transformer_engine`, or `local` for Megatron's own.

    Without `--transformer-impl`, Transformer Engine's layers are used, as in Megatron, if its
    Python package can be loaded and reference kernels exist for the flags.

    Raises:
        RehearsalError: `--transformer-impl` has another value, or requests Transformer Engine,
            which cannot be used.
    """
    flags = _values(argv)
    given, why_not = flags.get(IMPL_FLAG), load.why_not() or why_no_kernels(argv)
    if given is None:
        is_local = why_not or any(name in flags for name in LOCAL_UNLESS_ASKED)
        return LOCAL if is_local else TRANSFORMER_ENGINE
    if given not in (TRANSFORMER_ENGINE, LOCAL):
        raise RehearsalError(
            f"{IMPL_FLAG} {given} cannot be used on a CPU: give {TRANSFORMER_ENGINE} or {LOCAL}"
        )
    if given == TRANSFORMER_ENGINE and why_not:
        raise RehearsalError(
            f"{IMPL_FLAG} {given} cannot be used here: {why_not}; leave it out or give {LOCAL}"
        )
    return given


def why_no_kernels(argv: Sequence[str]) -> str | None:
    """Return the reason why no reference kernels exist for Transformer Engine's layers, or None."""
    if _values(argv).get(_CONTEXT_FLAG, "1") != "1":
        return (
            f"its attention under {_CONTEXT_FLAG} is cuDNN's or flash attention, which need a GPU"
        )
    return None


def with_cpu_flags(argv: Sequence[str], supported: Collection[str] = ()) -> list[str]:
    """Append the missing flags that a CPU needs to a command line.

    Args:
        argv: The user's flags.
        supported: Names of `GPU_FLAGS` that the caller supports on a CPU itself.

    Raises:
        RehearsalError: A flag is not supported on a CPU.
    """
    given = _values(argv)
    impl = transformer_impl(argv)
    for flag in GPU_FLAGS:
        if flag.name in supported or (flag.only_local and impl != LOCAL):
            continue
        if flag.name in given and (not flag.values or given[flag.name] in flag.values):
            shown = f"{flag.name} {given[flag.name]}" if flag.values else flag.name
            raise RehearsalError(f"{shown} cannot be used on a CPU: {flag.reason}; leave it out")
    added: list[str] = [] if IMPL_FLAG in given else [IMPL_FLAG, impl]
    for default in CPU_FLAGS:
        if default.only_local and impl != LOCAL:
            continue
        if default.name not in given:
            added += [default.name] if default.value is None else [default.name, default.value]
        elif default.value is not None and default.name != "--num-workers":
            value = given[default.name]
            if value != default.value:
                raise RehearsalError(
                    f"{default.name} {value} cannot be used on a CPU: {default.reason}; leave it "
                    f"out (a rehearsal sets {default.value})"
                )
    return [*argv, *added]


def with_cpu_defaults(
    add_arguments: Callable[..., Any], argv: Sequence[str], supported: Collection[str] = ()
) -> Callable[..., Any]:
    """Set the flags that a CPU needs as defaults of Megatron's parser.

    A script with its own parser may not accept flags that are added to its command line.

    Args:
        add_arguments: Megatron's `add_megatron_arguments`.
        argv: The user's flags.
        supported: See `with_cpu_flags`.

    Returns:
        The replacement of `add_arguments`, which raises `RehearsalError` if a flag is not supported
        on a CPU.
    """

    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add_arguments(parser)
        added = _values(with_cpu_flags(argv, supported)[len(argv) :])
        actions = {name: a for a in parser._actions for name in a.option_strings}
        for name, given in added.items():
            action = actions[name]
            # argparse converts a default of type str like a value on the command line.
            value = given if action.nargs != 0 else action.const
            parser.set_defaults(**{action.dest: value})
        return parser

    return add_megatron_arguments


_ONE_CONNECTION_FLAGS = ("--tensor-model-parallel-size", "--context-parallel-size")
_BLACKWELL_RECIPES = ("mxfp8",)


def cpu_capability(argv: Sequence[str]) -> tuple[int, int]:
    """Return the compute capability for a command line: Hopper, or Blackwell if a recipe needs it.

    Args:
        argv: The user's flags.
    """
    given = _values(argv)
    wants_more = "--fp4-format" in given or given.get("--fp8-recipe") in _BLACKWELL_RECIPES
    return (10, 0) if wants_more else (9, 0)


_MANY_CONNECTIONS_FLAGS = (
    "--use-megatron-fsdp",
    "--use-torch-fsdp2",
    "--overlap-moe-expert-parallel-comm",
)


def cpu_environment(argv: Sequence[str]) -> dict[str, str]:
    """Return the environment variables that a command line needs on a CPU.

    Each rank uses one thread, since ranks share a machine, and gloo uses the loopback interface.
    Megatron requires one hardware queue of the GPU (`CUDA_DEVICE_MAX_CONNECTIONS`) for tensor and
    context parallelism, and several for its FSDP. A CPU has no such queues; the variable only
    satisfies Megatron's check.

    Args:
        argv: The user's flags.

    Returns:
        Defaults by name. Variables that the user has set are not changed.
    """
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    given = _values(argv)
    wants_one = any(given.get(flag, "1") != "1" for flag in _ONE_CONNECTION_FLAGS)
    if wants_one and not any(flag in given for flag in _MANY_CONNECTIONS_FLAGS):
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return variables


def _values(argv: Sequence[str]) -> dict[str, str]:
    """Return the flags of a command line, each with the following word."""
    found: dict[str, str] = {}
    for position, word in enumerate(argv):
        if not word.startswith("--"):
            continue
        name, joined, value = word.partition("=")
        if not joined:
            value = argv[position + 1] if position + 1 < len(argv) else ""
        found[name] = value
    return found
