"""A script with its own loop on `megatron.core`, where `megatron.training` does not exist."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import megatron_fsdp_v2_mcore
from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.runtime.module import named_units
from tests.cases import longer
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import count_collectives
from tests.docs.blocks import blocks_in
from tests.mcore import core_only
from tests.mcore.command_line import ROOT, RUN, run_code, torchrun
from tests.mcore.core_only import changed, clean, enter, wrapping
from tests.mcore.flags import NO_SHARD, ZERO1, ZERO2, ZERO3
from tests.mcore.session import distance
from tests.mcore.trained import TIMEOUT_S
from tests.ranks import RankPools, rank_pools

EXAMPLE = "examples/megatron_core_loop.py"
on_core = functools.partial(on_ranks, pools="core", timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def core() -> Iterator[RankPools]:
    """Process groups in which `megatron.training` cannot be imported."""
    with rank_pools(["tests.mcore.preloaded_core"]) as pools:
        yield pools


def _curves(core: RankPools, ranks: int, options: dict[str, Any]) -> tuple[list[float], list]:
    histories = core(ranks).run(core_only.train, {"iterations": 5, **options})
    losses = [[loss for loss, _ in history] for history in histories]
    norms = [[norm for _, norm in history] for history in histories]
    known = [mine for mine in losses if None not in mine]
    assert known
    assert all(mine == known[0] for mine in known)
    assert all(mine == norms[0] for mine in norms)
    return known[0], norms[0]


TENSOR = {"tensor_parallel": 2}
TIED = {"pipeline_parallel": 2, "tied": True}
EXPERTS = {"expert_parallel": 2}
HYBRID = {"instances": 2}
MUON = {"optimizer": "muon"}


# The functional matrix has more combinations, with the same wrapper and optimizers.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options", "strategy"),
    [
        (2, {}, ZERO3),
        (2, EXPERTS, NO_SHARD),
        (2, TIED, ZERO3),
        longer(4, TENSOR, NO_SHARD),
        longer(4, HYBRID, ZERO2),
        longer(4, {**MUON, **HYBRID}, ZERO1),
    ],
    ids=str,
)
def test_example_matches_megatrons_ddp(
    core: RankPools, ranks: int, options: dict[str, Any], strategy: str
) -> None:
    losses, norms = _curves(core, ranks, {**options, "strategy": strategy})
    # Megatron's DDP has no instances without its distributed optimizer.
    theirs = {**options, "ddp": True, "instances": 1}
    their_losses, their_norms = _curves(core, ranks, theirs)
    assert losses[-1] < losses[0]
    assert distance(losses, their_losses) < 1e-6
    assert distance(norms, their_norms) < 1e-5


@on_core(2)
def test_loop_with_an_optimizer_of_torch_matches_megatrons_ddp() -> None:
    """With Megatron's process groups, and with data-parallel groups alone."""
    example = enter()
    losses = []
    for options, names in (({"ddp": True}, ()), ({}, ()), ({}, ("dp", "dp_cp"))):
        settings = example.Settings(iterations=4, micro_batches=1, **options)
        with clean():
            example.start(settings)
            with wrapping(*names) if names else contextlib.nullcontext():
                model = example.build(settings)
            adam = torch.optim.Adam(model.parameters(), lr=1e-3)

            def step(model: Any = model, adam: Any = adam, ddp: bool = settings.ddp) -> Any:
                for param in model.parameters() if ddp else ():
                    param.grad = param.main_grad
                adam.step()
                return True, 0.0, None

            optimizer = SimpleNamespace(zero_grad=adam.zero_grad, step=step)
            history = example.run(settings, model, optimizer, example.batches())
            losses.append([loss for loss, _ in history])
    theirs, *ours = losses
    assert all(distance(mine, theirs) < 1e-6 for mine in ours)


@on_core(4)
def test_instances_sum_micro_batches_once_where_megatron_announces_none() -> None:
    """Without `overlap_grad_reduce`, Megatron's loop sets no `no_sync_func`."""
    example = enter()
    settings = example.Settings(iterations=1, micro_batches=3, instances=2)
    with clean():
        example.start(settings)
        model = example.build(settings)
        model.config.no_sync_func = None
        groups = [group for _, unit in named_units(model) for group in unit.groups]
        optimizer = SimpleNamespace(zero_grad=lambda: None, step=lambda: (True, 0.0, None))
        with count_collectives(groups[0].axes) as found:
            example.run(settings, model, optimizer, example.batches())
    numbers: Counter[str] = Counter()
    for (kind, where, *_), number in found.items():
        numbers[f"{kind} {where}"] += number
    assert numbers["reduce_scatter inner"] == 3 * len(groups)
    # One more is of the flags of missing gradients.
    assert numbers["all_reduce outer"] == len(groups) + 1


@on_core(2)
def test_enable_does_not_change_unsharded_training() -> None:
    example = enter()
    histories = []
    for enables in (True, False):
        with (
            changed("DistributedDataParallelConfig", use_distributed_optimizer=True),
            changed("OptimizerConfig", use_distributed_optimizer=True),
            clean(),
        ):
            if enables:
                megatron_fsdp_v2_mcore.enable()
            histories.append(example.train(example.Settings(iterations=3, ddp=True)))
    assert histories[0] == histories[1]


@on_core(2)
def test_resume_from_the_packages_own_checkpoint_is_bitwise_identical(tmp_path: Path) -> None:
    example = enter()
    settings = example.Settings(iterations=2)
    histories = []
    for call in (checkpoint.save, checkpoint.load):
        with clean():
            example.start(settings)
            model = example.build(settings)
            optimizer, data = example.build_optimizer(settings, model), example.batches()
            if call is checkpoint.save:
                example.run(settings, model, optimizer, data)
            else:
                for _ in range(2 * settings.micro_batches):
                    next(data)
            call(tmp_path / "saved", model.module, optimizer.optimizer)
            histories.append(example.run(settings, model, optimizer, data))
    uninterrupted, resumed = histories
    assert len(resumed) == 2
    assert resumed == uninterrupted


def _with_field(name: str, value: Any) -> Any:
    """Set a field of Megatron's configuration of layers in the example."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    def make(**options: Any) -> Any:
        config = TransformerConfig(**options)
        setattr(config, name, value)
        return config

    return mock.patch.object(enter(), "TransformerConfig", make)


def _error_of(change: Any) -> str:
    """Return the error of the example after a change."""
    example = enter()
    settings = example.Settings()
    try:
        with change, clean():
            example.start(settings)
            example.build_optimizer(settings, example.build(settings))
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@on_core(2)
def test_incorrect_scripts_are_rejected_by_name() -> None:
    enter()
    no_call = mock.patch.object(megatron_fsdp_v2_mcore, "enable", lambda: None)
    wrapper = changed("DistributedDataParallelConfig", use_megatron_fsdp=False)
    plain = changed("OptimizerConfig", use_distributed_optimizer=False)
    sgd = "OptimizerConfig.optimizer = 'sgd' (--optimizer) cannot be used with sharded"
    for change, said in (
        (no_call, "RuntimeError: FullyShardedDataParallel needs"),
        (no_call, "megatron_fsdp_v2_mcore.enable()"),
        (wrapper, "needs use_megatron_fsdp=True"),
        (plain, "ValueError: OptimizerConfig.use_distributed_optimizer = False"),
        (changed("OptimizerConfig", optimizer="sgd"), sgd),
        (
            _with_field("delay_wgrad_compute", True),
            "TransformerConfig.delay_wgrad_compute = True (--delay-wgrad-compute)",
        ),
        (
            _with_field("cpu_offloading_weights", True),
            "TransformerConfig.cpu_offloading_weights = True",
        ),
    ):
        assert said in _error_of(change)
    assert _error_of(contextlib.nullcontext()) == ""


@pytest.mark.parametrize(
    ("options", "groups", "missing"),
    [
        ({"tensor_parallel": 2}, ("dp", "dp_cp"), "tp"),
        ({}, ("tp",), "dp_cp"),
        ({"expert_parallel": 2}, ("dp", "dp_cp", "tp"), "expt_dp"),
    ],
)
@on_core(2)
def test_missing_process_group_is_named(
    options: dict[str, Any], groups: tuple[str, ...], missing: str
) -> None:
    example = enter()
    settings = example.Settings(**options)
    with clean():
        example.start(settings)
        message = f"pg_collection has no group {missing}"
        with wrapping(*groups), pytest.raises(ValueError, match=message):
            example.build(settings)


@on_core(2)
def test_weights_are_broadcast_before_they_are_sharded_or_not_at_all() -> None:
    example = enter()
    settings = example.Settings()
    for options in (None, megatron_fsdp_v2_mcore.Options(broadcasts_parameters=True)):
        wrap = functools.partial(megatron_fsdp_v2_mcore.FullyShardedDataParallel, options=options)
        raises = pytest.raises(RuntimeError, match="broadcasts_parameters=True")
        with mock.patch.object(megatron_fsdp_v2_mcore, "FullyShardedDataParallel", wrap), clean():
            example.start(settings)
            model = example.build(settings)
            with raises if options is None else contextlib.nullcontext():
                model.broadcast_params()


@on_core(2)
def test_script_is_warned_of_an_option_with_another_implementation() -> None:
    example = enter()
    said = "--fsdp-double-buffer: without the flag, apart from the root"
    with changed("DistributedDataParallelConfig", fsdp_double_buffer=True), clean():
        example.start(example.Settings())
        with pytest.warns(UserWarning, match=said):
            example.build(example.Settings())


ALONE = """
import json, sys
import megatron_fsdp_v2_mcore
argv = list(sys.argv)
megatron_fsdp_v2_mcore.enable()
megatron_fsdp_v2_mcore.enable()
import megatron.core.optimizer as optimizers
ours = optimizers.DistributedOptimizer.__module__
megatron_fsdp_v2_mcore.uninstall()
training = sorted(name for name in sys.modules if name.startswith("megatron.training"))
theirs = optimizers.DistributedOptimizer.__module__
print(json.dumps([ours, theirs, training, argv == sys.argv]))
"""


def test_enabling_imports_nothing_of_megatron_training_and_can_be_undone() -> None:
    run = run_code(ALONE)
    assert run.code == 0, run.output
    ours, theirs, training, is_same = json.loads(run.output.splitlines()[-1])
    assert ours == "megatron_fsdp_v2_mcore.optim.optimizer"
    assert theirs == "megatron.core.optimizer.distrib_optimizer"
    assert training == []
    assert is_same


@pytest.mark.functional
def test_example_with_its_own_parser_rehearses_under_run(core: RankPools) -> None:
    flags = ["--pipeline-parallel", "2", "--tied", "--iterations", "5"]
    run = torchrun(2, RUN, [EXAMPLE, *flags, "--cpu-rehearsal"])
    assert run.code == 0, run.output[-3000:]
    losses, norms = _curves(core, 2, TIED)
    printed = re.findall(
        r"^iteration (\d+): loss ([\d.]+), gradient norm ([\d.]+)$", run.output, re.M
    )
    assert [int(number) for number, _, _ in printed] == list(range(1, len(losses) + 1))
    # Printed with six decimals. Another process may sum with other kernels, in another order.
    assert [float(loss) for _, loss, _ in printed] == pytest.approx(losses, rel=1e-6, abs=1e-6)
    assert [float(norm) for _, _, norm in printed] == pytest.approx(norms, rel=1e-6, abs=1e-6)
    unknown = torchrun(1, RUN, [EXAMPLE, "--no-such-flag", "--cpu-rehearsal"])
    assert "error: unrecognized arguments: --no-such-flag\n" in unknown.output


@on_core(2)
def test_code_and_command_of_the_page_work() -> None:
    page = "docs/cluster.md"
    blocks = blocks_in(page, (ROOT / page).read_text())
    python = [block.code for block in blocks if block.language == "python"]
    first, second = (code for code in python if "FullyShardedDataParallel" in code)
    example = enter()
    settings = example.Settings(iterations=2)

    def run_block(code: str, **names: Any) -> dict[str, Any]:
        module = example.build_module(settings)
        names |= {"config": module.config, "module": module}
        exec(compile(code, page, "exec"), names)
        return names

    with clean():
        example.start(settings)
        names = run_block(first)
        run_block(second, **names)
        trained = names["model"], names["optimizer"]
        of_the_page = example.run(settings, *trained, example.batches())
    assert of_the_page == core_only.train({"iterations": 2})
    (command,) = (block.code for block in blocks if "megatron_core_loop.py" in block.code)
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:6] == ["torchrun", "--nproc-per-node", "2", "-m", RUN, EXAMPLE]
    assert words[6] == "--cpu-rehearsal"
    # The script parses the rest; the longer test runs it.
    with mock.patch.object(sys, "argv", [EXAMPLE, *words[7:]]):
        parsed = example.parse()
    assert (parsed.pipeline_parallel, parsed.tied) == (2, True)
