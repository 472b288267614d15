"""Every flag is supported, or rejected by name; the documentation says which."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from megatron_fsdp_v2_mcore import FlagError
from megatron_fsdp_v2_mcore.flags.arguments import (
    accepted_by_megatron,
    add_arguments,
    check_before,
    check_no_yaml,
)
from megatron_fsdp_v2_mcore.flags.precision import check_has_fused_adam
from megatron_fsdp_v2_mcore.flags.table import DDP_FIELDS, OTHER_FLAGS, Flag, Handling
from tests.mcore.flags import MODEL_FLAGS, fsdp
from tests.pages import check_page, page, table

_NOT_TYPED = "(set for CUDA graphs)"


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """Megatron's own parser with our flags."""
    from megatron.training.arguments import add_megatron_arguments

    return add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


def _actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {flag: action for action in parser._actions for flag in action.option_strings}


def _parsed(parser: argparse.ArgumentParser, *flags: str) -> argparse.Namespace:
    args = parser.parse_args([*MODEL_FLAGS, *fsdp(), *flags])
    args.world_size = 4  # Megatron adds it to what it has parsed.
    return args


def _word(flag: str) -> str:
    return flag.split(" ")[0]


def _handled(flags: tuple[Flag, ...], *handlings: Handling) -> list[Flag]:
    return [flag for flag in flags if flag.handling in handlings]


FIELDS_REJECTED = _handled(DDP_FIELDS, Handling.REJECTED)
OTHERS_REJECTED = _handled(OTHER_FLAGS, Handling.REJECTED)
VALUES = {
    "--optimizer": ["sgd"],
    "--cuda-graph-impl": ["local"],
    "--fp8-format": ["e4m3"],
    "--te-precision-config-file": ["layers.yaml"],
    "--dump-param-to-param-group-map": ["map"],
    "--ddp-param-name-patterns-for-fp32-local-accumulation": ["*.bias"],
    "--non-persistent-ckpt-type": ["global"],
    "--ckpt-convert-format": ["torch_dist"],
    "--expert-tensor-parallel-num-weight-shards": ["2"],
}


@pytest.mark.parametrize("rejected", [*FIELDS_REJECTED, *OTHERS_REJECTED], ids=lambda r: r.name)
def test_a_rejected_flag_ends_the_start_with_its_name(
    parser: argparse.ArgumentParser, rejected: Flag
) -> None:
    flag = _word(rejected.flag)
    action = _actions(parser)[flag]
    words = [flag] if action.nargs == 0 else [flag, *VALUES.get(flag, ["2"])]
    check_before(_parsed(parser))
    args = _parsed(parser, *words)
    with pytest.raises(
        FlagError, match=f"^{flag} .*cannot be used with --use-fsdp-fully-shard-api"
    ):
        check_before(args)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--num-experts 3 --expert-model-parallel-size 2",
            "--num-experts 3 cannot be divided by --expert-model-parallel-size 2",
        ),
        ("--expert-model-parallel-size 2", "--expert-model-parallel-size 2 needs --num-experts"),
        (
            "--num-experts 6 --expert-model-parallel-size 3",
            "4 ranks cannot be divided by --expert-model-parallel-size 3 x "
            "--expert-tensor-parallel-size 1 x --pipeline-model-parallel-size 1",
        ),
        (
            "--num-experts 4 --expert-model-parallel-size 2 --tensor-model-parallel-size 4",
            "4 ranks cannot be divided by --expert-model-parallel-size 2 x "
            "--expert-tensor-parallel-size 4 x --pipeline-model-parallel-size 1",
        ),
        (
            "--tensor-model-parallel-size 2 --context-parallel-size 3",
            "4 ranks cannot be divided by --tensor-model-parallel-size 2 x "
            "--pipeline-model-parallel-size 1 x --context-parallel-size 3",
        ),
        (
            "--tensor-model-parallel-size 2 --experimental-attention-variant gated_delta_net",
            "gated_delta_net cannot be used with --tensor-model-parallel-size 2",
        ),
        (
            "--use-tp-pp-dp-mapping --pipeline-model-parallel-size 2 --num-experts 4 "
            "--expert-model-parallel-size 2",
            "--use-tp-pp-dp-mapping cannot be used with --pipeline-model-parallel-size 2",
        ),
        (
            "--delay-wgrad-compute",
            "--delay-wgrad-compute needs --overlap-moe-expert-parallel-comm",
        ),
        (
            "--overlap-moe-expert-parallel-comm --moe-latent-size 32",
            "--moe-latent-size cannot be used with --overlap-moe-expert-parallel-comm",
        ),
        (
            "--optimizer-cpu-offload --optimizer-offload-fraction 1.5",
            "--optimizer-offload-fraction 1.5 is no fraction",
        ),
        ("--optimizer-offload-fraction -0.1", "--optimizer-offload-fraction -0.1 is no fraction"),
        (
            "--optimizer-cpu-offload --optimizer lion",
            "--optimizer lion cannot be used with --optimizer-cpu-offload: there is no optimizer",
        ),
        (
            "--optimizer-cpu-offload --optimizer muon --muon-scalar-optimizer lion",
            "--muon-scalar-optimizer lion cannot be used with --optimizer-cpu-offload",
        ),
        (
            "--optimizer-cpu-offload --use-precision-aware-optimizer --exp-avg-dtype bf16",
            "--exp-avg-dtype .*bf.* cannot be used with --optimizer-cpu-offload",
        ),
        ("--optimizer-cpu-offload --optimizer sgd", "--optimizer sgd cannot be used with"),
        (
            "--exp-avg-sq-dtype fp8",
            "--exp-avg-sq-dtype fp8 needs --use-precision-aware-optimizer; add it",
        ),
        (
            "--use-precision-aware-optimizer --optimizer muon",
            "--use-precision-aware-optimizer cannot be used with --optimizer muon: only Transf",
        ),
        (
            "--use-precision-aware-optimizer --main-params-dtype fp16",
            r"--main-params-dtype fp16 asks .* leave it out \(--megatron-fsdp-main-params-dtype",
        ),
        (
            "--use-precision-aware-optimizer --main-grads-dtype bf16 "
            "--megatron-fsdp-main-grads-dtype fp32",
            "--main-grads-dtype bf16 and --megatron-fsdp-main-grads-dtype fp32 say different",
        ),
        (
            "--outer-dp-sharding-strategy optim",
            "optim shards between optimizer instances, and there is one; "
            "add --num-distributed-optimizer-instances",
        ),
        (
            "--outer-dp-sharding-strategy optim --num-distributed-optimizer-instances 2 "
            "--expert-data-parallel-sharding-strategy no_shard",
            "optim shards further what --expert-data-parallel-sharding-strategy shards",
        ),
        (
            "--init-model-with-meta-device --data-parallel-sharding-strategy no_shard",
            "--init-model-with-meta-device cannot be used with --data-parallel-sharding-strategy",
        ),
        (
            "--bf16 --fsdp-flat-optimizer --use-precision-aware-optimizer",
            "--fsdp-flat-optimizer cannot be used with --use-precision-aware-optimizer: state in",
        ),
        (
            "--bf16 --fsdp-flat-optimizer --optimizer-cpu-offload",
            "--fsdp-flat-optimizer cannot be used with --optimizer-cpu-offload: an optimizer of",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_named(
    parser: argparse.ArgumentParser, flags: str, message: str
) -> None:
    with pytest.raises(FlagError, match=message):
        check_before(_parsed(parser, *flags.split()))


@pytest.mark.parametrize("name", ["sft", "fim_data", "dataloader_inter_document_masking"])
def test_data_that_pretrain_gpt_does_not_build_is_rejected(name: str) -> None:
    from megatron_fsdp_v2_mcore.pretrain_gpt.data import check_data

    check_data(argparse.Namespace(**{name: False}))
    with pytest.raises(FlagError, match=f"--{name.replace('_', '-')} asks for data"):
        check_data(argparse.Namespace(**{name: True}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer_offload_fraction": 2.0}, r"optimizer_offload_fraction = 2\.0 is no fraction"),
        ({"optimizer": "lion"}, "OptimizerConfig.optimizer = 'lion' cannot be used with"),
        ({"optimizer": "muon", "muon_scalar_optimizer": "lion"}, "muon_scalar_optimizer = 'lion'"),
        (
            {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16},
            "exp_avg_dtype = torch.bfloat16 cannot be used with optimizer_cpu_offload",
        ),
    ],
)
def test_offload_that_a_script_asks_for_in_vain_names_the_field(
    options: dict[str, Any], message: str
) -> None:
    from megatron.core.optimizer import OptimizerConfig

    from megatron_fsdp_v2_mcore.optim.offload import check_offload

    common = {"optimizer_cpu_offload": True, "use_distributed_optimizer": True, "lr": 0.1}
    check_offload(OptimizerConfig(**common, optimizer_offload_fraction=1.0))
    with pytest.raises(ValueError, match=message):
        check_offload(OptimizerConfig(**(common | options)))


def test_precision_aware_does_nothing_beside_offload(
    parser: argparse.ArgumentParser,
) -> None:
    args = _parsed(parser, "--use-precision-aware-optimizer", "--optimizer-cpu-offload")
    check_before(args)
    with accepted_by_megatron(args):
        assert args.use_precision_aware_optimizer
    assert not args.use_precision_aware_optimizer
    args = _parsed(parser, "--optimizer-cpu-offload")
    check_before(args)
    with accepted_by_megatron(args):
        # Megatron's own check of offload looks for it.
        assert args.use_precision_aware_optimizer
    assert not args.use_precision_aware_optimizer


def test_dtype_of_main_gradients_is_one_whichever_flag_says_it(
    parser: argparse.ArgumentParser,
) -> None:
    aware = ("--use-precision-aware-optimizer", "--main-grads-dtype", "bf16")
    args = _parsed(parser, *aware)
    check_before(args)
    with accepted_by_megatron(args):
        assert args.megatron_fsdp_main_grads_dtype == "bf16"
    check_before(_parsed(parser, *aware, "--megatron-fsdp-main-grads-dtype", "bf16"))
    assert _parsed(parser).megatron_fsdp_main_grads_dtype == "auto"


def test_an_adam_without_state_in_other_dtypes_is_named(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import optimizer

    args = _parsed(parser, "--use-precision-aware-optimizer")
    monkeypatch.setattr(optimizer, "Adam", torch.optim.AdamW)
    with pytest.raises(FlagError, match=r"Megatron found torch\.optim\.adamw\.AdamW; inst"):
        check_has_fused_adam(args)
    check_has_fused_adam(_parsed(parser))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"main_params_dtype": torch.float16},
            "main_params_dtype = torch.float16 asks the optimizer for main weights of its own",
        ),
        ({"main_grads_dtype": torch.bfloat16}, "gradients of sharded parameters are in torch.flo"),
    ],
)
def test_dtypes_that_a_script_asks_for_in_vain_name_the_field(
    options: dict[str, Any], message: str
) -> None:
    from megatron_fsdp_v2_mcore.optim.precision import check_precision

    common = {
        "optimizer": "adam",
        "use_precision_aware_optimizer": True,
        "main_params_dtype": torch.float32,
        "main_grads_dtype": torch.float32,
    }
    params = [torch.nn.Parameter(torch.ones(2))]
    check_precision(argparse.Namespace(**common), params)
    with pytest.raises(ValueError, match=message):
        check_precision(argparse.Namespace(**(common | options)), params)


def test_without_our_flag_nothing_is_checked(parser: argparse.ArgumentParser) -> None:
    args = parser.parse_args([*MODEL_FLAGS, "--qk-clip", "--use-torch-fsdp2"])
    check_before(args)


def test_our_flag_needs_megatrons(parser: argparse.ArgumentParser) -> None:
    args = _parsed(parser)
    args.use_megatron_fsdp = False
    with pytest.raises(FlagError, match=r"--use-fsdp-fully-shard-api needs --use-megatron-fsdp"):
        check_before(args)


@pytest.mark.parametrize("place", ["command line", "file"])
def test_a_file_of_arguments_cannot_select_us_unchecked(place: str) -> None:
    api = "--use-fsdp-fully-shard-api"
    argv = ["pretrain", "--yaml-cfg", "run.yaml", *([api] if place == "command line" else [])]
    args = argparse.Namespace(use_fsdp_fully_shard_api=place == "file")
    with pytest.raises(FlagError, match=f"--yaml-cfg cannot be used with {api}"):
        check_no_yaml(args, argv)
    check_no_yaml(argparse.Namespace(), argv[:3])


def test_sizes_that_divide_pass(parser: argparse.ArgumentParser) -> None:
    flags = "--num-experts 4 --expert-model-parallel-size 2 --tensor-model-parallel-size 2"
    check_before(_parsed(parser, *flags.split()))


def test_every_flag_of_the_table_is_one_of_megatrons(parser: argparse.ArgumentParser) -> None:
    known = _actions(parser)
    for row in (*DDP_FIELDS, *OTHER_FLAGS):
        if row.flag != _NOT_TYPED:
            assert _word(row.flag) in known, row.flag
    for row in OTHER_FLAGS:
        assert known[_word(row.flag)].dest == row.name
    for rule in DDP_FIELDS:
        if rule.argument is not None:
            assert known[_word(rule.flag)].dest == rule.argument


def test_no_flag_has_two_rows() -> None:
    flags = [_word(row.flag) for row in OTHER_FLAGS]
    assert len(flags) == len(set(flags))


# -- documentation --------------------------------------------------------------------------------

_ABOUT = (
    "What becomes of Megatron's flags with `--use-megatron-fsdp --use-fsdp-fully-shard-api`. "
    "Generated by `pytest tests/mcore/test_flags.py --write-docs` from the tables in "
    "`flags/table.py` and the parser of our own flags; the suite fails "
    "when this page is out of date, and when `DistributedDataParallelConfig` of the installed "
    "Megatron has a field that the first table does not know. A rejected flag ends the start with "
    "exit code 2 and a sentence that names it. Flags that are not listed keep Megatron's meaning."
)


def _ours(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    groups = [group for group in parser._action_groups if group.title == "megatron_fsdp_v2"]
    return list(groups[0]._group_actions)


def _document(parser: argparse.ArgumentParser) -> str:
    fields = [rule for handling in Handling for rule in DDP_FIELDS if rule.handling is handling]
    others = _handled(OTHER_FLAGS, Handling.SUPPORTED, Handling.NO_OP)
    ours = []
    for action in _ours(parser):
        values = f" {{{','.join(map(str, action.choices))}}}" if action.choices else ""
        ours.append((f"`{action.option_strings[0]}{values}`", str(action.help)))
    meaning = "what it does here"
    return page(
        "Megatron's flags",
        _ABOUT,
        "## Flags that configure data parallelism",
        table(
            ("flag", "field of `DistributedDataParallelConfig`", meaning),
            [(f"`{r.flag}`", f"`{r.name}`", _verdict(r.handling, r.meaning)) for r in fields],
        ),
        "## Other flags that are rejected",
        table(("flag", "why"), [(f"`{flag.flag}`", flag.meaning) for flag in OTHERS_REJECTED]),
        "## Other flags that mean something here",
        table(
            ("flag", meaning),
            [(f"`{flag.flag}`", _verdict(flag.handling, flag.meaning)) for flag in others],
        ),
        "## Flags of this package",
        table(("flag", "what it does"), ours),
    )


def _verdict(handling: Handling, meaning: str) -> str:
    return f"**{handling.value}**: {meaning}"


def test_the_page_about_flags_is_up_to_date(
    parser: argparse.ArgumentParser, request: pytest.FixtureRequest
) -> None:
    check_page(request, "docs/megatron_flags.md", _document(parser))
