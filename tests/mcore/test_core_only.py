"""A script with its own loop on `megatron.core`, where `megatron.training` does not exist."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cases import longer
from tests.docs.blocks import blocks_in
from tests.mcore import core_only
from tests.mcore.command_line import ROOT, RUN, run_code, torchrun
from tests.mcore.flags import NO_SHARD, ZERO1, ZERO2, ZERO3
from tests.mcore.session import distance
from tests.ranks import RankPools, rank_pools

EXAMPLE = "examples/megatron_core_loop.py"


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
@pytest.mark.parametrize(
    ("ranks", "options", "strategy"),
    [
        (2, {}, ZERO3),
        (2, EXPERTS, NO_SHARD),
        (2, TIED, ZERO3),
        longer(4, TENSOR, NO_SHARD),
        longer(4, EXPERTS, ZERO3),
        longer(4, HYBRID, ZERO2),
        longer(4, {**MUON, **HYBRID}, ZERO1),
        longer(4, {**MUON, **TENSOR}, NO_SHARD),
        longer(2, {**MUON, **TIED}, ZERO3),
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


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param(None, id="megatrons-groups"),
        pytest.param(("dp", "dp_cp"), id="data-parallel-groups-alone"),
    ],
)
def test_loop_with_an_optimizer_of_torch_matches_megatrons_ddp(
    core: RankPools, groups: tuple[str, ...] | None
) -> None:
    ours, theirs = (
        [loss for loss, _ in core(2).run(core_only.train_quickstart, options)[0]]
        for options in ({"groups": groups}, {"ddp": True})
    )
    assert distance(ours, theirs) < 1e-6


def test_enable_does_not_change_unsharded_training(core: RankPools) -> None:
    function = core_only.train_ddp_with_distributed_optimizer
    enabled = core(2).run(function, is_enabled=True)
    assert enabled == core(2).run(function, is_enabled=False)


@pytest.mark.parametrize(
    "options", [pytest.param({}, id="data"), longer({"tensor_parallel": 2}, id="tensor")]
)
def test_resume_from_the_packages_own_checkpoint_is_bitwise_identical(
    core: RankPools, tmp_path: Path, options: dict[str, Any]
) -> None:
    results = core(2).run(core_only.save_and_continue, options, str(tmp_path / "saved"))
    for uninterrupted, resumed in results:
        assert len(resumed) == 2
        assert resumed == uninterrupted


def test_incorrect_scripts_are_rejected_by_name(core: RankPools) -> None:
    told = core(2).run(core_only.errors)[0]
    expected = {
        "no call": "RuntimeError: FullyShardedDataParallel needs",
        "another wrapper": "needs use_megatron_fsdp=True",
        "plain optimizer": "ValueError: OptimizerConfig.use_distributed_optimizer = False",
        "sgd": "OptimizerConfig.optimizer = 'sgd' (--optimizer) cannot be used with sharded",
        "late": "TransformerConfig.delay_wgrad_compute = True (--delay-wgrad-compute)",
        "offload": "TransformerConfig.cpu_offloading_weights = True",
    }
    assert told.keys() == expected.keys()
    assert all(text in told[what] for what, text in expected.items()), told
    assert "megatron_fsdp_v2_mcore.enable()" in told["no call"]


def test_missing_process_group_is_named(core: RankPools) -> None:
    told = core(2).run(core_only.missing_groups)
    assert told[0] == told[1]
    assert "pg_collection has no group tp" in told[0]["tensor"]
    assert "pg_collection has no group dp_cp" in told[0]["data"]
    assert "pg_collection has no group expt_dp" in told[0]["experts"]


def test_script_is_warned_of_an_option_with_another_implementation(core: RankPools) -> None:
    told, _ = core(2).run(core_only.warnings_of, fsdp_double_buffer=True)
    assert any(
        text.startswith("--fsdp-double-buffer: without the flag, apart from the root")
        for text in told
    )


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


def test_code_and_command_of_the_page_work(
    core: RankPools,
) -> None:
    page = "docs/megatron_core.md"
    blocks = blocks_in(page, (ROOT / page).read_text())
    python = [block.code for block in blocks if block.language == "python"]
    assert len(python) == 2
    of_the_page = core(2).run(core_only.train_page, python)
    assert of_the_page == core(2).run(core_only.train, {"iterations": 2})
    (command,) = (block.code for block in blocks if block.language == "bash")
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:6] == ["torchrun", "--nproc-per-node", "2", "-m", RUN, EXAMPLE]
    assert words[6] == "--cpu-rehearsal"
    # The script parses the rest; the longer test runs it.
    for settings in core(2).run(core_only.parsed, words[7:]):
        assert "pipeline_parallel=2" in settings
        assert "tied=True" in settings
