"""Arguments of `megatron-fsdp-v2 plan`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_fsdp_v2_cli import arguments

# Names of the core, which imports torch; a test compares them.
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
OUTER_NAMES = ("HSDP", "HFSDP")
OPTIMIZERS = ("adam", "sgd", "sgd_momentum", "lion", "muon", "adaptive_muon", "none")
MACHINES = ("h100", "h200", "b200")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the model, the machine, the compared strategies and the output."""
    parser.usage = (
        "megatron-fsdp-v2 plan --ranks N [options] --model module:function\n"
        "       megatron-fsdp-v2 plan --ranks N [options] -- <training flags>"
    )
    parser.add_argument("flags", nargs="*", help="training flags, after --")
    parser.add_argument("--ranks", type=_ranks, required=True, help="ranks of the job")
    _add_model_options(parser.add_argument_group("a custom model"))
    _add_machine_options(parser.add_argument_group("what it runs on"))
    group = parser.add_argument_group("what is compared and written")
    group.add_argument(
        "--strategy", choices=["all", *STRATEGIES], default="all", help="default: all"
    )
    group.add_argument(
        "--outer",
        type=arguments.count,
        action="append",
        default=[],
        metavar="N",
        help="also try an outer data-parallel axis of N ranks: "
        f"{' and '.join(OUTER_NAMES)}; may be repeated",
    )
    group.add_argument(
        "--overlap",
        action="store_true",
        help="also say which collectives of the strategy that is shown are exposed, and why; "
        "needs --machine",
    )
    group.add_argument("--json", metavar="FILE", help="write data; - for standard output")
    group.add_argument("--plot", metavar="FILE", type=Path, help="write a picture")
    group.add_argument(
        "--timeline",
        metavar="FILE",
        type=Path,
        help="write the step of the strategy that is shown, for megatron-fsdp-v2 trace; needs "
        "--machine",
    )


_MOST_RANKS = 1 << 20
"""A mesh of so many ranks takes seconds to build."""


def _ranks(text: str) -> int:
    if (ranks := arguments.count(text)) > _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text} ranks are more than {_MOST_RANKS:,}")
    return ranks


def _number(field: str, meaning: str) -> dict[str, Any]:
    return dict(dest=field, type=arguments.count, metavar="N", help=meaning)


def _nbytes(field: str, meaning: str) -> dict[str, Any]:
    return dict(dest=field, type=arguments.size, metavar="SIZE", help=meaning)


def _switch(field: str, meaning: str, value: object = True) -> dict[str, Any]:
    return dict(dest=field, action="store_const", const=value, help=meaning)


def _dtype(field: str, meaning: str) -> dict[str, Any]:
    meaning += "; default: as MixedPrecisionPolicy has it"
    return dict(dest=field, type=arguments.dtype, metavar="DTYPE", help=meaning)


MODEL_FLAGS: dict[str, dict[str, Any]] = {
    "--units": dict(
        dest="patterns",
        metavar="PATTERNS",
        help="names or classes of the modules that become units, such as 'layers.*' or Block; "
        "default: members of the outermost module lists",
    ),
    "--param-dtype": _dtype("param_dtype", "dtype weights are gathered and computed with"),
    "--main-params-dtype": _dtype("main_params_dtype", "dtype the optimizer steps"),
    "--main-grads-dtype": _dtype("main_grads_dtype", "dtype of reduced gradients"),
    "--grad-comm-dtype": _dtype("grad_comm_dtype", "communication dtype of gradients"),
    "--granularity": dict(dest="granularity", help="row, block:<rows> or tensor; default: row"),
    "--optimizer": dict(dest="optimizer", choices=OPTIMIZERS, help="default: adam"),
    "--offload-fraction": dict(
        dest="offload_fraction",
        type=float,
        metavar="F",
        help="fraction of Adam's parameters stepped in host memory, from 0 to 1; default: 0",
    ),
    "--cpu-offload": _switch(
        "cpu_offload",
        "main weights, main gradients and optimizer state in host memory: CPUOffloadPolicy",
    ),
    "--micro-batches": _number("num_microbatches", "of a step; all but the last in no_sync()"),
    "--tokens": _number("tokens", "of a micro-batch on a rank, for the time"),
    "--activations": _nbytes("activations", "of a micro-batch, such as 12GiB"),
    "--prefetch-depth": _number("unshard_prefetch_depth", "units gathered ahead; default: 1"),
    "--prefetch-bytes": _nbytes(
        "unshard_prefetch_bytes",
        "of weights gathered ahead, such as 2GiB, but always those of one unit; default: any",
    ),
    "--grad-buffers": _number("max_live_grad_buffers", "live at a time; default: 2"),
    "--recompute": _switch("recompute_factor", "units run their forward twice", 1.0),
}
"""Options of a custom model; training flags after `--` replace them.

An option that is stored under the name of a field of `TrainingDescription`, `RuntimeOptions` or
`MixedPrecisionPolicy` sets this field.
"""

MACHINE_FLAGS = {
    "--node-bandwidth": ("node_bandwidth", 1e9, "GB/s of a GPU to others of its node"),
    "--network-bandwidth": ("network_bandwidth", 1e9, "GB/s of a GPU to other nodes"),
    "--node-latency": ("node_latency", 1e-6, "microseconds"),
    "--network-latency": ("network_latency", 1e-6, "microseconds"),
    "--tflops": ("flops", 1e12, "TFLOP/s of dense 16-bit products of a GPU"),
    "--efficiency": ("efficiency", 1.0, "part of them that is reached"),
}
"""Flag: attribute of a machine, its unit, and the help."""


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="function that builds the model; it runs on the meta device and returns the model, "
        "or a pair of it and the list of modules that become units",
    )
    group.add_argument(
        "--model-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="argument of that function; a Python literal or text; may be repeated",
    )
    for flag, settings in MODEL_FLAGS.items():
        group.add_argument(flag, **settings)


def _add_machine_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--machine",
        metavar="NAME",
        help=f"{', '.join(MACHINES)}, or a .json file with the attributes of a machine",
    )
    group.add_argument("--memory", **_nbytes("memory", "for the training on a rank, such as 76GiB"))
    for flag, (attribute, _, meaning) in MACHINE_FLAGS.items():
        group.add_argument(flag, dest=attribute, type=float, metavar="X", help=meaning)
    group.add_argument("--gpus-per-node", type=arguments.count, metavar="N")
