"""`megatron-fsdp-v2 plan`: its output, machines, advice and errors."""

from __future__ import annotations

import dataclasses
import importlib
import json
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from examples.plan_models import llama_405b
from megatron_fsdp_v2 import MixedPrecisionPolicy
from megatron_fsdp_v2.diagnostics import Role
from megatron_fsdp_v2.plan import (
    PRESETS,
    Machine,
    MemoryOption,
    MeshDescription,
    ParameterDescription,
    Strategy,
    TrainingDescription,
    UnitDescription,
    advice,
    best_plan,
    describe_module,
    find_machine,
    plan_one,
    sources,
    strategies,
)
from megatron_fsdp_v2_trace.timeline import busy_seconds, read
from tests.cases import longer
from tests.docs.blocks import blocks_in
from tests.pages import check_page
from tests.pictures import has_clear_ground
from tests.processes import ROOT
from tests.reference.models import Stack
from tests.unit.commands import called

HERE = f"{__name__}:"
ZERO_3 = Strategy("optim_grads_params")


def stack() -> nn.Module:
    return Stack(3)


def stack_and_units() -> tuple[nn.Module, list[nn.Module]]:
    model = Stack(3)
    return model, [model.blocks[0]]


def no_model() -> str:
    return "a model"


def scalar() -> nn.Module:
    module = nn.Module()
    module.scale = nn.Parameter(torch.tensor(1.0))
    return module


def failing() -> nn.Module:
    raise RuntimeError("no width")


def importing() -> nn.Module:
    importlib.import_module("no_such_package")
    return stack()


def twice() -> tuple[nn.Module, list[nn.Module]]:
    model = Stack(3)
    return model, [model.blocks[0]] * 2


def offer_sources(monkeypatch: pytest.MonkeyPatch, *values: str) -> None:
    points = [EntryPoint("one", value, sources.SOURCE_GROUP) for value in values]
    monkeypatch.setattr(sources, "entry_points", lambda group: points)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run `plan`; return its status, standard output and standard error."""
    return called(capsys, "plan", *words)


def described_by(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Run a command line for two ranks; return its JSON output."""
    status, out, _ = run(capsys, "--ranks", "2", "--json", "-", "--model", *words)
    assert status == 0
    return json.loads(out)


def training(num_ranks: int = 8, **options: Any) -> TrainingDescription:
    """Return a training of four equal layers of a million elements, and a root."""
    layer = (ParameterDescription("weight", (1000, 1000)), ParameterDescription("bias", (1000,)))
    units = [UnitDescription("", (ParameterDescription("table", (4000, 1000)),))]
    units += [
        UnitDescription(f"layers.{i}", layer, flops_per_token=2e6, activation_nbytes=10**6)
        for i in range(4)
    ]
    return TrainingDescription(tuple(units), {"dp": MeshDescription(num_ranks)}, **options)


# -- the command ------------------------------------------------------------------------------


def test_a_plan_of_a_model_compares_all_strategies(capsys: Any) -> None:
    data = described_by(capsys, HERE + "stack", "--ranks", "8", "--outer", "2")
    names = [plan["strategy"] for plan in data["plans"]]
    # Four on a 1-D mesh, four as HSDP and three as HFSDP.
    assert len(names) == 11
    assert len(set(names)) == 11
    assert data["numel"] == sum(p.numel() for p in Stack(3).parameters())
    assert [unit["count"] for unit in data["plans"][0]["units"]] == [1, 3]


def test_json_and_plot_are_written_to_files(capsys: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    data, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    words = ["--ranks", "2", "--model", HERE + "stack", "--machine", "B200", "--tokens", "64"]
    written = ["--overlap", "--json", str(data), "--plot", str(picture)]
    status, out, _ = run(capsys, *words, *written)
    assert status == 0
    assert "With " in out
    found = json.loads(data.read_text())
    assert found["num_ranks"] == 2
    (shown,) = (plan for plan in found["plans"] if "overlap" in plan)
    assert shown["overlap"]["exposed"] == pytest.approx(shown["seconds"]["exposed"])
    assert has_clear_ground(picture)


def test_units_come_from_the_function_or_from_patterns(capsys: Any) -> None:
    for words, count in (
        ("{0}stack", 4),
        ("{0}stack_and_units", 2),
        ("{0}stack --units blocks.1,blocks.2", 3),
        ("{0}stack --units Block", 4),
    ):
        plan = described_by(capsys, *words.format(HERE).split())["plans"][0]
        assert sum(unit["count"] for unit in plan["units"]) == count


def sized(width: int, *, depth: int, kind: str = "plain") -> nn.Module:
    assert kind in ("plain", "8")
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))


def test_model_function_gets_the_given_arguments(capsys: Any) -> None:
    # A quoted literal is a string.
    values = ("width=16", "depth=3", "kind='8'")
    words = [word for value in values for word in ("--model-arg", value)]
    assert described_by(capsys, HERE + "sized", *words)["numel"] == 3 * 16 * 16


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", "nothing to plan: give --model module:function, or training flags after --"),
        ("--model {stack} -- --bf16", "both --model and training flags"),
        ("--tokens 8 -- --bf16", "--tokens: training flags say this themselves"),
        ("--model {stack} --machine h101", "there is no machine 'h101': choose h100, h200, b200"),
        ("--model {stack} --overlap", "--overlap needs times of collectives: add --machine"),
        ("--model {stack} --efficiency 0.4", "name one with --machine (h100, h200, b200)"),
        ("--model {stack} --machine h100 --efficiency 1.5", "efficiency of machine 'h100'"),
        ("--model {stack} --outer 3", "an outer axis of 3 cannot divide 8 data-parallel ranks"),
        ("--model {stack} --units nothing", "no module's name or class matches nothing"),
        ("--model {stack} --granularity rows", "unknown shard_granularity 'rows'"),
        ("--model {no_model}", "must return an nn.Module"),
        ("--model {scalar}", "parameter scale of the root is 0-dim"),
        ("--model torch.nn:ReLU", "the model has no parameters, so there is nothing to plan"),
        ("--model {stack}s", "has no function stacks"),
        ("--model no.such.module:f", "--model no.such.module:f: No module named 'no'"),
        ("--model stack", "--model takes module:function, such as models.llama:build, got 'stack'"),
        ("--model ./models.py:build", "--model takes module:function"),
        ("--model {failing}", "failing: RuntimeError: no width (" + __file__),
        ("--model {importing}", "importing: No module named 'no_such_package'"),
        ("--model {twice}", "blocks.0 is listed twice as a unit"),
        ("--model {stack} --ranks 99999999999", "ranks are more than 1,048,576"),
        ("--model {stack} --num-layers 4", "(training flags follow --)"),
        ("--model {stack} --plot plan", "name a picture, such as plan.png"),
        ("--model {sized}", "sized(width: 'int', *, depth: 'int', kind: 'str' = 'plain')"),
        ("--model {sized} --model-arg width=8", "missing a required argument: 'depth'"),
        ("--model {stack} --model-arg width=8", "got an unexpected keyword argument 'width'"),
        ("--model {sized} --model-arg width", "--model-arg takes name=value, got 'width'"),
        ("--model {sized} --model-arg width=8 --model-arg width=9", "width was given twice"),
        ("--model-arg width=8 -- --bf16", "--model-arg is an argument of a function"),
        ("--model {stack} --ranks 0", "'0' is not a number of at least 1"),
        ("--model {stack} --strategy zero3", "invalid choice: 'zero3'"),
        ("--model {stack} --plot plan.nonsense", "--plot plan.nonsense"),
        ("--model {stack} --offload-fraction 2", "offload_fraction is from 0 to 1, got 2.0"),
        (
            "--model {stack} --cpu-offload --offload-fraction 0.5",
            "cpu_offload has all state in host memory",
        ),
        ("--cpu-offload -- --bf16", "--cpu-offload: training flags say this themselves"),
    ],
)
def test_bad_input_is_rejected_with_a_reason(words: str, reason: str, capsys: Any) -> None:
    names = ("stack", "no_model", "scalar", "sized", "failing", "importing", "twice")
    typed = words.format(**{name: HERE + name for name in names}).split()
    status, out, err = run(capsys, "--ranks", "8", *typed)
    assert status == 2
    assert out == ""
    assert reason in err


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "need an adapter, and none is installed"),
        (["no_such_package.plan:describe"], "no_such_package, which cannot be imported"),
        ([HERE + "flags_that_need_a_package"], "no_such_package, which cannot be imported"),
    ],
)
def test_training_flags_without_an_adapter_are_rejected(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, values: list[str], said: str
) -> None:
    offer_sources(monkeypatch, *values)
    status, _, err = run(capsys, "--ranks", "8", "--", "--bf16")
    assert status == 2
    assert said in err


def flags_that_need_a_package(flags: list[str], num_ranks: int) -> sources.SourceResult:
    importlib.import_module("no_such_package.arguments")
    raise AssertionError


def flags_of_a_framework(flags: list[str], num_ranks: int) -> sources.SourceResult:
    if "--impossible" in flags:
        raise sources.FlagsError("--impossible cannot be planned: nobody can do it")
    stages = tuple(
        dataclasses.replace(training(num_ranks // 2, num_microbatches=4, stages=2), **changes)
        for changes in (
            {"label": "stage 0 of 2", "num_in_flight": 2},
            {"label": "stage 1 of 2", "plain_nbytes": 10**3},
        )
    )
    return sources.SourceResult(stages, Strategy("optim", "optim", 2))


def test_training_flags_are_planned_by_an_adapter(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_sources(monkeypatch, HERE + "flags_of_a_framework")
    status, out, _ = run(capsys, "--ranks", "16", "--", "--bf16", "--strategy", "none of ours")
    assert status == 0
    # The stage with more activations, and the outer axis of the flags.
    assert "stage 0 of 2" in out
    assert "optim, HFSDP x2" in out
    status, out, err = run(capsys, "--ranks", "16", "--", "--impossible")
    assert status == 2
    assert (out, err) == ("", "--impossible cannot be planned: nobody can do it\n")


# -- machines ---------------------------------------------------------------------------------


def test_machine_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ours.json"
    path.write_text(json.dumps({"like": "h100", "network_bandwidth": 25e9}))
    assert find_machine(str(path)) == dataclasses.replace(
        PRESETS["h100"], name="ours", network_bandwidth=25e9
    )
    path.write_text(json.dumps(dataclasses.asdict(PRESETS["b200"])))
    assert find_machine(str(path)) == PRESETS["b200"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"flops": 1', "is not JSON"),
        ("[]", "must hold an object"),
        ('{"like": "h100", "speed": 1}', "unknown attributes speed"),
        ('{"like": "a100"}', "there is no preset 'a100': choose h100, h200, b200"),
        ('{"flops": 1e12}', "lacks attributes (of gpus_per_node"),
        ('{"like": "h100", "flops": "fast"}', "flops of machine 'ours' must be a positive number"),
    ],
)
def test_a_bad_machine_file_is_rejected(content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "ours.json"
    path.write_text(content)
    with pytest.raises(ValueError) as rejected:
        find_machine(str(path))
    assert reason in str(rejected.value)


MACHINE = Machine("plain", 8, 100e9, 10e9, 0.0, 0.0, 1e12, 1.0, 1.0)


def test_time_of_a_collective_is_bytes_over_the_slowest_link() -> None:
    seconds = MACHINE.seconds
    assert seconds("all_gather", 8e9, range(8)) == pytest.approx(7e9 / 100e9)
    # Each of the eight GPUs of a node has a network adapter.
    assert seconds("all_gather", 16e9, range(16)) == pytest.approx(15e9 / 80e9)
    # Ranks eight apart are on different nodes, so only one adapter per node is used.
    assert seconds("reduce_scatter", 4e9, range(0, 32, 8)) == pytest.approx(3e9 / 10e9)
    assert seconds("all_reduce", 4e9, range(0, 32, 8)) == pytest.approx(6e9 / 10e9)
    assert seconds("all_gather", 8e9, [0]) == 0.0


# -- time, memory, advice ---------------------------------------------------------------------


def test_every_micro_batch_is_counted() -> None:
    counts = {}
    for count in (1, 2, 3, 4, 7):
        plan = plan_one(training(num_microbatches=count, tokens=10), ZERO_3, MACHINE)
        counts[count] = sum(plan.step.collectives.values())
        assert plan.step.compute_seconds == pytest.approx(count * 24e6 * 10 / 1e12)
    assert [counts[n] for n in (2, 3, 4, 7)] == [n * counts[1] for n in (2, 3, 4, 7)]


def test_pipeline_gathers_equally_often_and_holds_more_activations() -> None:
    first = training(num_microbatches=8, stages=4, num_in_flight=4, tokens=10)
    alone = training(num_microbatches=8, tokens=10)
    plans = [plan_one(t, ZERO_3, MACHINE) for t in (first, alone)]
    # The difference is the activations of three further micro-batches in flight.
    assert plans[0].peak[Role.ACTIVATIONS] - plans[1].peak[Role.ACTIVATIONS] == 3 * 4 * 10**6
    assert plans[0].step.collectives == plans[1].step.collectives
    assert plans[0].idle_seconds > 0
    assert plans[1].idle_seconds == 0


def test_offloaded_state_is_in_host_memory_and_not_on_the_device() -> None:
    peaks, hosts = [], []
    for fraction in (0.0, 0.5, 1.0):
        plan = plan_one(training(4, offload_fraction=fraction), ZERO_3)
        peaks.append(plan.peak[Role.OPTIMIZER])
        hosts.append(plan.host_nbytes)
    assert peaks[0] > 0
    assert peaks == [peaks[0], peaks[0] // 2, 0]
    # Host memory: two moments and copies of main weight and gradient, each as large as a moment.
    assert [host - hosts[0] for host in hosts] == [0, peaks[0], 2 * peaks[0]]


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (("--offload-fraction", "0.5"), "for 50% of what Adam steps"),
        (("--cpu-offload",), "h2d, d2h: what a step"),
        (("--cpu-offload",), "times leave out copies from and to host memory"),
    ],
)
def test_plan_reports_host_memory_and_copies(
    option: tuple[str, ...], text: str, capsys: Any
) -> None:
    words = ("--ranks", "4", "--machine", "h100", "--strategy", "optim", "--model", HERE + "stack")
    assert text in run(capsys, *words, *option)[1]
    assert text not in run(capsys, *words)[1]


def test_the_best_plan_is_as_fast_as_any_that_fits() -> None:
    described = training(tokens=1000)
    plans = [plan_one(described, strategy, MACHINE) for strategy in strategies(described)]
    everything = max(plan.peak_nbytes for plan in plans)
    best = best_plan(plans, everything)
    assert best is not None
    assert best.seconds <= 1.01 * min(plan.seconds for plan in plans)
    least = min(plan.peak_nbytes for plan in plans)
    tight = best_plan(plans, least)
    assert tight is not None
    assert tight.peak_nbytes == least
    assert best_plan(plans, least - 1) is None


def test_advice_names_planned_changes() -> None:
    described = training(
        tokens=1000,
        num_microbatches=1,
        alternatives=(MemoryOption("--recompute-granularity full", 10**5),),
    )
    plans = [plan_one(described, Strategy("no_shard"))]
    memory = plan_one(described, ZERO_3).peak_nbytes
    sentences = "\n".join(advice(described, plans, memory))
    assert "--strategy optim_grads_params fits" in sentences
    assert "--recompute-granularity full saves" in sentences
    assert "is not enough alone" in sentences


def test_advised_number_of_ranks_is_sufficient() -> None:
    described = training(2)
    plans = [plan_one(described, ZERO_3)]
    memory = plans[0].peak_nbytes * 7 // 10
    found = [s for s in advice(described, plans, memory) if "times the data-parallel" in s]
    assert len(found) == 1, found
    times = int(found[0].split()[0])
    assert plan_one(training(2 * times), ZERO_3).fits(memory)
    assert not plan_one(training(times), ZERO_3).fits(memory)


def test_order_of_runs_must_name_every_unit_below_the_root() -> None:
    with pytest.raises(ValueError, match=r"\['layers.2', 'layers.3', 'layers.7'\]"):
        training(runs=("layers.0", "layers.1", "layers.7", "layers.0"))


# -- a large model ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", longer("muon")])
def test_llama_405b_on_16384_ranks_is_planned_in_seconds(optimizer: str) -> None:
    start = time.process_time()
    with torch.device("meta"):
        units, _ = describe_module(llama_405b())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    described = TrainingDescription(
        units, {"dp": MeshDescription(16384)}, policy, optimizer=optimizer, tokens=8192
    )
    assert described.numel == 405_853_388_800
    chosen = list(strategies(described))
    plans = [plan_one(described, strategy, PRESETS["h100"]) for strategy in chosen]
    assert len(plans) == 4
    assert time.process_time() - start < 15 * len(plans)
    best = best_plan(plans, PRESETS["h100"].usable_nbytes)
    assert best is not None
    assert best.strategy.name == "optim_grads_params"


# -- documentation ----------------------------------------------------------------------------

PAGE = "docs/plan.md"


def test_the_example_in_python_on_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / PAGE).read_text()
    (block,) = [block for block in blocks_in("plan.md", page) if block.language == "python"]
    exec(compile(block.code, block.name, "exec"), {"__name__": "page", "build_model": stack})
    assert "Role.GATHERED" in capsys.readouterr().out


COMMAND = "$ megatron-fsdp-v2 plan "


@pytest.mark.functional
def test_examples_on_the_page_are_what_the_command_writes(
    capsys: Any, request: pytest.FixtureRequest
) -> None:
    blocks = (ROOT / PAGE).read_text().split("```console\n")
    shown = [blocks[0]]
    for block in blocks[1:]:
        written, _, rest = block.partition("```")
        typed = written.partition("\n")[0]
        if typed.startswith(COMMAND) and "examples." in typed:
            status, out, _ = run(capsys, *typed.removeprefix(COMMAND).split())
            assert status == 0
            written = f"{typed}\n{out}"
        shown.append(f"{written}```{rest}")
    page = "```console\n".join(shown)
    check_page(request, PAGE, page)
    assert len(blocks) > 2


def test_the_timeline_of_a_plan_has_its_times(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--ranks", "8", "--machine", "h100", "--strategy", "optim_grads_params"]
    words += ["--tokens", "4096", "--model", "examples.plan_models:llama_8b", "--json", "-"]
    status, out, err = run(capsys, *words, "--timeline", str(tmp_path / "step.json"))
    assert (status, err) == (0, "")
    (plan,) = json.loads(out)["plans"]
    step = read(tmp_path / "step.json")
    assert busy_seconds(step.spans, "compute") == pytest.approx(plan["seconds"]["compute"])
    assert step.end == pytest.approx(plan["seconds"]["step"], rel=0.05)
    _, first, *_ = step.by_unit().values()
    assert all(busy_seconds(first, track) > 0 for track in ("compute", "gather", "reduce"))
    status, _, err = run(
        capsys, "--ranks", "2", "--model", f"{HERE}stack", "--timeline", str(tmp_path / "a.json")
    )
    assert status == 2 and "add --machine" in err
