"""The flags Megatron needs on a CPU, so that nobody has to type them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FLAG", "VERBOSE_FLAG", "RehearsalError", "is_requested", "with_cpu_flags"]

FLAG = "--cpu-rehearsal"
VERBOSE_FLAG = "--rehearsal-verbose"


class RehearsalError(SystemExit):
    """A run that cannot be rehearsed; ends the program with one sentence."""

    def __init__(self, message: str) -> None:
        super().__init__(f"cpu rehearsal: {message}")


@dataclass(frozen=True, slots=True)
class CpuFlag:
    """A flag a rehearsal sets.

    Attributes:
        name: The flag.
        value: Its value; `None` for a switch.
        reason: Why a CPU needs it.
        forbids: Flags that ask for the opposite.
    """

    name: str
    value: str | None
    reason: str
    forbids: tuple[str, ...] = ()


CPU_FLAGS: tuple[CpuFlag, ...] = (
    CpuFlag("--distributed-backend", "gloo", "nccl needs GPUs"),
    CpuFlag(
        "--transformer-impl",
        "local",
        "Transformer Engine's kernels need a GPU",
        ("--fp8-format", "--fp4-format"),
    ),
    CpuFlag("--no-persist-layer-norm", None, "the persistent layer norm is a CUDA kernel"),
    CpuFlag("--no-gradient-accumulation-fusion", None, "the fusion is a CUDA kernel"),
    CpuFlag("--no-masked-softmax-fusion", None, "the fusion is a CUDA kernel"),
    CpuFlag("--no-bias-gelu-fusion", None, "the fusion is compiled for a GPU"),
    CpuFlag("--no-bias-swiglu-fusion", None, "the fusion is compiled for a GPU"),
    CpuFlag("--no-bias-dropout-fusion", None, "the fusion is compiled for a GPU"),
    CpuFlag("--no-rope-fusion", None, "the fusion is a CUDA kernel"),
    CpuFlag("--attention-backend", "unfused", "fused attention needs a GPU", ("--use-flash-attn",)),
    CpuFlag("--num-workers", "0", "ranks share a few cores"),
)


def is_requested(argv: Sequence[str]) -> bool:
    """Whether a command line asks for a rehearsal."""
    return FLAG in argv


def with_cpu_flags(argv: Sequence[str]) -> list[str]:
    """A command line with the flags added that a CPU needs and it does not have yet.

    Raises:
        RehearsalError: It asks for something else where a CPU leaves no choice.
    """
    given = _values(argv)
    added: list[str] = []
    for flag in CPU_FLAGS:
        for opposite in flag.forbids:
            if opposite in given:
                raise RehearsalError(
                    f"{opposite} cannot be used on a CPU: {flag.reason}; leave it out"
                )
        if flag.name not in given:
            added += [flag.name] if flag.value is None else [flag.name, flag.value]
        elif flag.value is not None and flag.name != "--num-workers":
            value = given[flag.name]
            if value != flag.value:
                raise RehearsalError(
                    f"{flag.name} {value} cannot be used on a CPU: {flag.reason}; leave it out "
                    f"({flag.value} is set by itself)"
                )
    return [*argv, *added]


def _values(argv: Sequence[str]) -> dict[str, str]:
    """Flags on a command line and the word after each."""
    found: dict[str, str] = {}
    for position, word in enumerate(argv):
        if not word.startswith("--"):
            continue
        name, joined, value = word.partition("=")
        if not joined:
            value = argv[position + 1] if position + 1 < len(argv) else ""
        found[name] = value
    return found
