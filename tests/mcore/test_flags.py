"""Every flag is supported, or rejected by name; the documentation says which."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from megatron_fsdp_v2_mcore.flags.arguments import accepted_by_megatron, check_arguments
from megatron_fsdp_v2_mcore.flags.table import NO_FLAG, REJECTED
from tests.mcore.flags import fsdp
from tests.mcore.parsing import parsed
from tests.pages import ROOT, check_part, table

PAGE = "docs/megatron_flags.md"
_NOT_TYPED = "(set for CUDA graphs)"


def _actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {flag: action for action in parser._actions for flag in action.option_strings}


def _word(flag: str) -> str:
    return flag.split(" ")[0]


def test_precision_aware_has_no_effect_with_offload(parser: argparse.ArgumentParser) -> None:
    args = parsed(parser, *fsdp(), "--use-precision-aware-optimizer", "--optimizer-cpu-offload")
    check_arguments(args)
    with accepted_by_megatron(args):
        assert args.use_precision_aware_optimizer
    assert not args.use_precision_aware_optimizer
    args = parsed(parser, *fsdp(), "--optimizer-cpu-offload")
    check_arguments(args)
    with accepted_by_megatron(args):
        # Megatron's own check of offload requires this value.
        assert args.use_precision_aware_optimizer
    assert not args.use_precision_aware_optimizer


def test_either_flag_sets_the_dtype_of_main_gradients(parser: argparse.ArgumentParser) -> None:
    aware = ("--use-precision-aware-optimizer", "--main-grads-dtype", "bf16")
    args = parsed(parser, *fsdp(), *aware)
    check_arguments(args)
    with accepted_by_megatron(args):
        assert args.megatron_fsdp_main_grads_dtype == "bf16"
    check_arguments(parsed(parser, *fsdp(), *aware, "--megatron-fsdp-main-grads-dtype", "bf16"))
    assert parsed(parser, *fsdp()).megatron_fsdp_main_grads_dtype == "auto"


# -- documentation --------------------------------------------------------------------------------


def _rows(heading: str) -> list[list[str]]:
    """Cells of the table below a heading of the page, without its first two lines."""
    part = (ROOT / PAGE).read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_every_documented_flag_is_one_of_megatrons(parser: argparse.ArgumentParser) -> None:
    known = _actions(parser)
    fields = _rows("Flags that configure data parallelism")
    others = _rows("Other flags with an effect")
    flags = [_word(cells[0]) for cells in others]
    assert len(flags) == len(set(flags))
    assert set(flags) | {cells[0] for cells in fields} - {_NOT_TYPED} <= known.keys()
    for flag in REJECTED:
        name = flag.argument or flag.name
        assert flag.flag == NO_FLAG or flag.flag in known, flag.flag
        assert name != flag.argument or known[flag.flag].dest == name


def test_every_field_of_the_installed_megatron_is_documented_once() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    fields = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    documented = [cells[1] for cells in _rows("Flags that configure data parallelism")]
    rejected = [flag.name for flag in REJECTED if flag.name in fields]
    assert sorted([*documented, *rejected]) == sorted(fields)


def _ours(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    groups = [group for group in parser._action_groups if group.title == "megatron_fsdp_v2"]
    return list(groups[0]._group_actions)


def test_the_page_has_the_rejected_flags_and_ours(
    parser: argparse.ArgumentParser, request: pytest.FixtureRequest
) -> None:
    rejected = [
        (f"`{flag.flag}`" if flag.flag != NO_FLAG else f"`{flag.name}` ({NO_FLAG})", flag.meaning)
        for flag in REJECTED
    ]
    # A field and a flag of one name have one reason.
    check_part(request, PAGE, "rejected", table(("flag", "why"), list(dict.fromkeys(rejected))))
    ours = []
    for action in _ours(parser):
        values = f" {{{','.join(map(str, action.choices))}}}" if action.choices else ""
        ours.append((f"`{action.option_strings[0]}{values}`", str(action.help)))
    check_part(request, PAGE, "own", table(("flag", "what it does"), ours))
