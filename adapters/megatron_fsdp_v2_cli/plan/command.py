"""`megatron-fsdp-v2 plan`: memory, communication and time of a training before it runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from megatron_fsdp_v2.layout.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp_v2.layout.placement import OUTER_NAMES, STRATEGIES
from megatron_fsdp_v2.plan.description import (
    DATA,
    MemoryOption,
    MeshDescription,
    Strategy,
    TrainingDescription,
    describe_module,
)
from megatron_fsdp_v2.plan.machine import PRESETS, Machine, find_machine
from megatron_fsdp_v2.plan.optimizer_state import OPTIMIZERS
from megatron_fsdp_v2.plan.planner import advice, best_plan, plan_one, strategies
from megatron_fsdp_v2.plan.sources import SourceResult, describe_flags
from megatron_fsdp_v2.runtime.options import RuntimeOptions
from megatron_fsdp_v2_cli import arguments
from megatron_fsdp_v2_cli.plan.own_model import build_on_meta, model_arguments
from megatron_fsdp_v2_cli.plan.plot import draw
from megatron_fsdp_v2_cli.plan.report import PlanReport, as_dict, lines
from megatron_fsdp_v2_cli.plan.timeline import write_timeline
from megatron_fsdp_v2_cli.progress import progress


class _PlanCommand:
    """`megatron-fsdp-v2 plan`."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
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
            f"{' and '.join(OUTER_NAMES.values())}; may be repeated",
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

    def run(self, args: argparse.Namespace) -> int:
        """Print the plan."""
        report = _report(args)
        if args.plot is not None:
            draw(report, args.plot, args.model or "a model of Megatron's")
        if args.timeline is not None:
            write_timeline(report, args.timeline)
        if args.json not in (None, "-"):
            Path(args.json).write_text(_json(report))
        if args.json == "-":
            sys.stdout.write(_json(report))
        else:
            sys.stdout.writelines(f"{line}\n" for line in lines(report))
        return 0


# -- options ----------------------------------------------------------------------------------

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


_MODEL_FLAGS: dict[str, dict[str, Any]] = {
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
    "--optimizer": dict(dest="optimizer", choices=list(OPTIMIZERS), help="default: adam"),
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

_MACHINE_FLAGS = {
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
    for flag, settings in _MODEL_FLAGS.items():
        group.add_argument(flag, **settings)


def _add_machine_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--machine",
        metavar="NAME",
        help=f"{', '.join(PRESETS)}, or a .json file with the attributes of a machine",
    )
    group.add_argument("--memory", **_nbytes("memory", "for the training on a rank, such as 76GiB"))
    for flag, (attribute, _, meaning) in _MACHINE_FLAGS.items():
        group.add_argument(flag, dest=attribute, type=float, metavar="X", help=meaning)
    group.add_argument("--gpus-per-node", type=arguments.count, metavar="N")


def _given(args: argparse.Namespace, kind: Any) -> dict[str, Any]:
    """Return the given options that are fields of a dataclass, by the field's name."""
    names = {field.name for field in fields(kind)}
    return {
        name: value for name, value in vars(args).items() if name in names and value is not None
    }


def _machine(args: argparse.Namespace) -> Machine | None:
    changes = {
        attribute: value * unit
        for attribute, unit, _ in _MACHINE_FLAGS.values()
        if (value := getattr(args, attribute)) is not None
    }
    if args.gpus_per_node is not None:
        changes["gpus_per_node"] = args.gpus_per_node
    if args.machine is not None:
        return replace(find_machine(args.machine), **changes)
    if changes:
        raise ValueError(
            f"{', '.join(changes)}: these change a machine; name one with --machine "
            f"({', '.join(PRESETS)})"
        )
    return None


# -- the report -------------------------------------------------------------------------------


def _report(args: argparse.Namespace) -> PlanReport:
    machine = _machine(args)
    if args.overlap and machine is None:
        raise ValueError("--overlap needs times of collectives: add --machine")
    memory = args.memory
    if memory is None and machine is not None:
        memory = machine.usable_nbytes
    source = _described(args)
    sizes = [*dict.fromkeys(args.outer)]
    if source.strategy.outer_size not in (None, *sizes):
        sizes.append(source.strategy.outer_size)
    chosen = [
        strategy
        for strategy in strategies(source.stages[0], sizes, source.strategy.others)
        if args.strategy in ("all", strategy.inner)
    ]
    plans = []
    with progress("plan", unit=" strategies") as advance:
        for strategy in chosen:
            # The job runs where the stage with the largest peak fits.
            stages = (plan_one(stage, strategy, machine) for stage in source.stages)
            plans.append(max(stages, key=lambda plan: plan.peak_nbytes))
            advance(len(plans), len(chosen))
    best = None if memory is None else best_plan(plans, memory)
    shown = best or next(
        (plan for plan in plans if plan.strategy == source.strategy),
        min(plans, key=lambda plan: plan.peak_nbytes),
    )
    sentences: Sequence[str] = ()
    if memory is not None and best is None:
        sentences = advice(shown.training, plans, memory)
    return PlanReport(
        tuple(plans),
        best,
        shown,
        memory,
        tuple(sentences),
        args.ranks,
        shows_overlap=args.overlap,
    )


def _described(args: argparse.Namespace) -> SourceResult:
    if args.model_arg and args.model is None:
        raise ValueError("--model-arg is an argument of a function; name it with --model")
    if args.flags and args.model is not None:
        raise ValueError("both --model and training flags were given; plan one of them at a time")
    if args.flags:
        given = [
            flag
            for flag, settings in _MODEL_FLAGS.items()
            if getattr(args, settings["dest"]) is not None
        ]
        if given:
            raise ValueError(
                f"{', '.join(given)}: training flags say this themselves; leave it out"
            )
        return describe_flags(args.flags, args.ranks)
    if args.model is None:
        raise ValueError(
            "nothing to plan: give --model module:function, or training flags after --"
        )
    return SourceResult((_own_model(args),), Strategy())


def _own_model(args: argparse.Namespace) -> TrainingDescription:
    patterns = [] if args.patterns is None else [p.strip() for p in args.patterns.split(",")]
    model, chosen = build_on_meta(args.model, patterns, model_arguments(args.model_arg))
    units, plain_nbytes = describe_module(model, chosen)
    alternatives: tuple[MemoryOption, ...] = ()
    if args.activations is not None:
        each = args.activations // max(len(units) - 1, 1)
        units = tuple(replace(unit, activation_nbytes=each if unit.name else 0) for unit in units)
        alternatives = (
            MemoryOption("half the tokens in twice the micro-batches", args.activations // 2),
        )
    notes = []
    if args.machine is not None and args.tokens is None:
        notes.append("without --tokens a step computes nothing, and all communication is exposed")
    if args.activations is None:
        notes.append("activations are not counted; --activations says how many bytes they take")
    if args.cpu_offload and args.machine is not None:
        notes.append("times leave out copies from and to host memory, and the optimizer there")
    return TrainingDescription(
        units,
        {DATA: MeshDescription(args.ranks)},
        MixedPrecisionPolicy(**_given(args, MixedPrecisionPolicy)),
        options=RuntimeOptions(**_given(args, RuntimeOptions)),
        plain_nbytes=plain_nbytes,
        alternatives=alternatives,
        notes=tuple(notes),
        **_given(args, TrainingDescription),
    )


def _json(report: PlanReport) -> str:
    return json.dumps(as_dict(report), indent=2) + "\n"


command = _PlanCommand()
