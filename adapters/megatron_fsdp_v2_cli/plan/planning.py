"""The work of `megatron-fsdp-v2 plan`: describe the training, plan it, and write the report."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from megatron_fsdp_v2.layout.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp_v2.plan.description import (
    DATA,
    MemoryOption,
    MeshDescription,
    Strategy,
    TrainingDescription,
    describe_module,
)
from megatron_fsdp_v2.plan.machine import PRESETS, Machine, find_machine
from megatron_fsdp_v2.plan.planner import advice, best_plan, plan_one, strategies
from megatron_fsdp_v2.plan.sources import SourceResult, describe_flags
from megatron_fsdp_v2.runtime.options import RuntimeOptions
from megatron_fsdp_v2_cli.conversions import converted
from megatron_fsdp_v2_cli.plan.arguments import MACHINE_FLAGS, MODEL_FLAGS
from megatron_fsdp_v2_cli.plan.own_model import build_on_meta, model_arguments
from megatron_fsdp_v2_cli.plan.plot import draw
from megatron_fsdp_v2_cli.plan.report import PlanReport, as_dict, lines
from megatron_fsdp_v2_cli.plan.timeline import write_timeline
from megatron_fsdp_v2_cli.progress import progress
from megatron_fsdp_v2_trace.files import check_writable


def run(args: argparse.Namespace) -> int:
    """Print the plan; return the exit status."""
    args = converted(args)
    for path in (args.plot, args.timeline, args.json):
        if path not in (None, "-"):
            check_writable(path)
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


def _given(args: argparse.Namespace, kind: Any) -> dict[str, Any]:
    """Return the given options that are fields of a dataclass, by the field's name."""
    names = {field.name for field in fields(kind)}
    return {
        name: value for name, value in vars(args).items() if name in names and value is not None
    }


def _machine(args: argparse.Namespace) -> Machine | None:
    changes = {
        attribute: value * unit
        for attribute, unit, _ in MACHINE_FLAGS.values()
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
            for flag, settings in MODEL_FLAGS.items()
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
