"""`prove` without trainings: runs that cover a job, comparisons, pre-flight, flags of scripts."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from pathlib import Path

import pytest
import torch

from megatron_cpu_rehearsal.flags import LOCAL, TRANSFORMER_ENGINE
from megatron_fsdp_v2_mcore.prove import compare, sides, source
from megatron_fsdp_v2_mcore.prove.compare import Bounds, Difference, Record
from megatron_fsdp_v2_mcore.prove.page import html_page
from megatron_fsdp_v2_mcore.prove.preflight import preflight
from megatron_fsdp_v2_mcore.prove.proof import SAME_GRADIENTS, ProofPhase, RunResult
from megatron_fsdp_v2_mcore.prove.report import (
    CANNOT_RUN,
    DIFFERS,
    PROVEN,
    ProofReport,
    as_dict,
    lines,
)
from megatron_fsdp_v2_mcore.prove.shrink import (
    AXES,
    DATA_PARALLEL,
    Flags,
    axes_of,
    covering_runs,
    number,
    parse_words,
)
from tests.processes import ran
from tests.unit.commands import called

MODEL = "--num-layers 80 --hidden-size 8192 --num-query-groups 8 --micro-batch-size 1 "
FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor "


def flags(text: str) -> Flags:
    return parse_words(text.split())


@pytest.mark.parametrize("sizes", list(itertools.product((1, 8), repeat=5)))
def test_runs_hold_every_pair_of_axes_in_eight_ranks(sizes: tuple[int, ...]) -> None:
    axes = (*AXES[:4], AXES[5])
    given = " ".join(f"{axis} {size}" for axis, size in zip(axes, sizes, strict=True))
    experts = "--num-experts 64 --expert-tensor-parallel-size 1 "
    job = flags(MODEL + experts + given)
    runs = covering_runs(job)
    wanted = (DATA_PARALLEL, *axes_of(job))
    for pair in itertools.combinations(wanted, 2):
        assert any(set(pair) <= set(run.axes) for run in runs), pair
    for run in runs:
        assert run.world_size <= 8
        for axis in axes:
            assert number(run.flags, axis) == (2 if axis in run.axes else 1)


@pytest.mark.parametrize(
    ("job", "kept"),
    [
        ("--moe-layer-freq [0]*3+[1]*58 --pipeline-model-parallel-size 16", "[0,1,1,1]"),
        ("--moe-layer-freq [0,1]*40 --pipeline-model-parallel-size 16", "[0,1,0,1]"),
        ("--moe-layer-freq ([1]*2+[0])*9", "[1,0]"),
        ("--moe-layer-freq 1", "1"),
    ],
)
def test_order_of_dense_and_expert_layers_is_kept(job: str, kept: str) -> None:
    (first, *_) = covering_runs(flags(MODEL + job))
    assert first.flags["--moe-layer-freq"] == (kept,)


def test_fewer_query_groups_than_tensor_parallel_ranks_stay_fewer() -> None:
    job = flags(MODEL + "--tensor-model-parallel-size 16")
    assert covering_runs(job)[0].flags["--num-query-groups"] == ("1",)


def test_a_pair_that_needs_more_ranks_is_an_error() -> None:
    job = flags(MODEL + "--tensor-model-parallel-size 8")
    with pytest.raises(ValueError, match="2 ranks cannot hold --tensor-model-parallel-size and"):
        covering_runs(job, 2)


def _record(grad: float, step: float = 1.0, rows: slice = slice(None)) -> Record:
    start = torch.arange(1.0, 5)
    grads = torch.tensor([grad, 2.0, 3.0, 1e-9])
    weights = [{"w": start[rows]}, {"w": (start - step * grads.sign())[rows]}]
    return Record(weights, [{"w": grads[rows]}], {"w": rows.start or 0})


def test_rows_of_equal_trainings_are_equal() -> None:
    assert not compare.records(_record(1.0, rows=slice(1, 3)), _record(1.0), Bounds())


def test_first_difference_names_parameter_iteration_and_both_values() -> None:
    found = compare.records(_record(1.5), _record(1.0), Bounds())
    (first, *_) = sorted(found, key=lambda each: each.order)
    assert first == Difference(compare.GRADIENT, 1, "w", 1.5, 1.0, pytest.approx(1 / 6))
    (late,) = compare.records(_record(1.0, step=1.9), _record(1.0), Bounds())
    assert (late.kind, late.iteration, late.name) == (compare.WEIGHT, 1, "w")


def test_update_of_a_gradient_that_is_only_rounding_is_not_compared() -> None:
    mine = _record(1.0)
    mine.weights[1]["w"][3] += 2
    assert not compare.records(mine, _record(1.0), Bounds())


def test_with_equal_gradients_every_element_of_an_update_counts() -> None:
    mine, theirs = _record(1.0), _record(1.0)
    mine.weights[1]["w"][3] += 1e-4
    (found,) = compare.records(mine, theirs, SAME_GRADIENTS)
    assert (found.kind, found.iteration, found.name) == (compare.WEIGHT, 1, "w")
    mine.weights[1]["w"][3] -= 1e-4 - 1e-6
    assert not compare.records(mine, theirs, SAME_GRADIENTS)


def test_options_of_both_optimizers_are_compared() -> None:
    mine, theirs = _record(1.0), _record(1.0)
    mine.options = [{"w": {"lr": 0.1, "weight_decay": 0.2}, "of another stage": {"lr": 1.0}}]
    theirs.options = [{"w": {"lr": 0.1, "weight_decay": 0.1, "eps": 1.0}}]
    (found,) = compare.records(mine, theirs, Bounds())
    assert found == Difference(compare.OPTION, 1, "w (weight_decay)", 0.2, 0.1, 1.0)


def test_state_that_a_load_lost_is_named() -> None:
    saved = {"exp_avg of w": torch.ones(2).numpy(), "step of w": torch.tensor(2.0).numpy()}
    loaded = saved | {"exp_avg of w": torch.zeros(2).numpy()}
    (found,) = compare.whole(loaded, saved, compare.STATE)
    assert str(found).startswith("loaded state of exp_avg of w: 0 against 1")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("", "--weight-decay 0.1 --adam-eps 1e-06 --clip-grad 0.1"),
        ("--weight-decay 0 --clip-grad 0", "--weight-decay 0 --clip-grad 0"),
        (
            "--weight-decay 0.3 --adam-eps 1e-4 --clip-grad 0.01",
            "--weight-decay 0.3 --adam-eps 1e-4",
        ),
        (
            "--start-weight-decay 0.001 --end-weight-decay 0.01",
            "--start-weight-decay 0.01 --end-weight-decay 0.1",
        ),
    ],
)
def test_each_term_of_an_update_is_large_enough_to_show(given: str, kept: str) -> None:
    (run,) = covering_runs(flags(MODEL + given))
    assert flags(kept).items() <= run.flags.items()


def test_one_factor_for_all_values_is_named() -> None:
    mine = _record(1.0)
    mine.grads[0]["w"] *= 2
    (found,) = compare.records(mine, _record(1.0), Bounds())
    assert found.factor == pytest.approx(2)
    assert "2 times all its values" in str(found)


def test_missing_and_changed_whole_weights_are_named() -> None:
    one, other = ({"a": torch.ones(2).numpy()} for _ in range(2))
    other["b"] = one["a"]
    assert [each.name for each in compare.whole(one, other)] == ["b"]
    other = {"a": torch.tensor([1.0, 1.0 + 1e-7]).numpy()}
    assert [each.name for each in compare.whole(one, other)] == ["a"]


def test_losses_that_are_not_finite_differ() -> None:
    assert compare.numbers(compare.LOSS, [float("nan")], [1.0], Bounds())
    assert compare.numbers(compare.LOSS, [1.0], [1.0, 2.0], Bounds())


@pytest.mark.parametrize(
    ("job", "variables", "ranks", "said"),
    [
        (FSDP, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, None, "unset it"),
        ("--tensor-model-parallel-size 2", {}, None, "requires CUDA_DEVICE_MAX_CONNECTIONS=1"),
        ("--use-megatron-fsdp", {}, None, "--ckpt-format torch_dist with --use-megatron-fsdp"),
        (FSDP, {}, None, "no expandable_segments:True"),
        (
            f"{FSDP} --use-nccl-ub",
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            None,
            "leave one of them out",
        ),
        ("--save /tmp/checkpoints", {}, 64, "a folder of one node"),
        ("--no-check-for-nan-in-loss-and-grad", {}, None, "steps never wait for the GPU"),
        ("--pipeline-model-parallel-size 3", {}, 8, "no multiple of tensor x pipeline"),
        (
            "--num-experts 8 --expert-model-parallel-size 3",
            {},
            8,
            "no multiple of pipeline x expert",
        ),
        ("--micro-batch-size 2 --global-batch-size 24", {}, 8, "no multiple of micro-batch size"),
        ("--apply-query-key-layer-scaling", {}, None, "export NVTE_APPLY_QK_LAYER_SCALING=1"),
        ("--context-parallel-size 2", {}, None, "add --calculate-per-token-loss"),
        ("--context-parallel-size 2 --mtp-num-layers 1", {}, None, "the loss of further tokens"),
        ("--tensor-model-parallel-size 2 --multi-latent-attention", {}, None, "ranks train apart"),
        ("--tensor-model-parallel-size 2 --softmax-type learnable", {}, None, "attention sinks"),
    ],
)
def test_preflight_names_the_mistake(
    job: str, variables: dict[str, str], ranks: int | None, said: str
) -> None:
    found = list(preflight(flags(job), variables, ranks))
    assert [sentence for sentence in found if said in sentence], found


def test_preflight_of_a_good_job_is_silent() -> None:
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    job = f"{FSDP} --save /lustre/run --micro-batch-size 1 --global-batch-size 64"
    assert not list(preflight(flags(job), variables, 64))


SCRIPT = """
export CUDA_DEVICE_MAX_CONNECTIONS=1
NODES=4
ARGS=(--num-layers 32 --data-path "/a folder/text")
[[ $NODES -gt 2 ]] && ARGS+=(--bf16)
torchrun --nproc_per_node 8 --nnodes=$NODES {module} \\
  "${{ARGS[@]}}" --lr $((1 + 2))e-4
"""


@pytest.mark.parametrize("module", ["pretrain_gpt.py", "-m megatron_fsdp_v2_mcore.pretrain_gpt"])
def test_flags_of_a_script_are_expanded_by_bash(tmp_path: Path, module: str) -> None:
    script = tmp_path / "job.sh"
    script.write_text(SCRIPT.format(module=module))
    found = source.read_script(script)
    assert found.num_ranks == 32
    assert found.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    words = ("--num-layers", "32", "--data-path", "/a folder/text", "--bf16", "--lr", "3e-4")
    assert found.words == words


def test_flags_under_srun_are_found(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("srun -N 2 bash -c 'torchrun --nproc-per-node 4 train.py --bf16 --lr 1 --a'")
    assert source.read_script(script).words == ("--bf16", "--lr", "1", "--a")


def test_flags_of_yaml_files(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("MODEL_ARGS:\n  --bf16: true\n  --fp16: false\n  --lr: 1e-4\n")
    assert source.read_yaml(path).words == ("--bf16", "--lr", "1e-4")
    path.write_text("model_parallel:\n  tensor_model_parallel_size: 2\nrecompute_modules: [a, b]\n")
    words = ("--tensor-model-parallel-size", "2", "--recompute-modules", "a", "b")
    assert source.read_yaml(path).words == words


_DEEP = "{a: " * 2000 + "1" + "}" * 2000


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"1: 2", "has 1 in the place of the name of a flag"),
        (b"lr: {2020-01-01: 3}", "in the place of the name of a flag"),
        (b"ENV_VARS: [1]", "ENV_VARS of .* contains no names"),
        (b"MODEL_ARGS: [1]", "MODEL_ARGS of .* contains no names"),
        (b"MODEL_ARGS:", "MODEL_ARGS of .* contains no names"),
        (b"lr: [[1], 2]", "has a list of lists as the value of lr"),
        (b"? [1]\n: 2", "is no YAML file"),
        (b"\xff", "is no YAML file"),
        (_DEEP.encode(), "is nested too deeply"),
        (b"a: &x\n  b: *x", "is nested too deeply"),
    ],
)
def test_odd_yaml_files_are_errors(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=said) as rejected:
        source.read_yaml(file)
    assert str(file) in str(rejected.value)
    assert "\n" not in str(rejected.value)


PATTERNS = (
    *("9**9**9", "[0]*9**9", "[0]*9999999999", "[[0]*999]*999+[0]*99999", "[0]*[1]", "[1]+1"),
    *("(" * 500, "(((", "1*" * 3000 + "1", "1," * 6000, "(1)", "[1][0]"),
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_odd_patterns_of_layers_are_errors(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"of layers|neither a number nor a list"):
        covering_runs({**flags(MODEL), "--moe-layer-freq": (pattern,)})


@pytest.mark.parametrize(
    ("content", "words", "said"),
    [
        ("", "prove", "give the flags of the job after --"),
        ("", "prove --script {} -- --bf16", "give the flags of the job after --"),
        ("", "prove -- bf16", "training flags begin with --, got 'bf16'"),
        ("echo nothing", "prove --script {}", "starts no training that is a .py file or a module"),
        ("- 1", "prove --yaml {}", "contains no names and values of flags"),
        ("a: [", "prove --yaml {}", "is no YAML file"),
        ("", "prove --json {}/a.json -- --bf16", "a.json cannot be written: its folder does"),
    ],
)
def test_bad_input_is_one_sentence(
    content: str, words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job"
    path.write_text(content)
    status, _, error = called(capsys, *words.format(path).split())
    assert (status, said in error, error.count("Traceback")) == (CANNOT_RUN, True, 0), error


def test_replicas_that_differ_name_parameter_iteration_and_both_values() -> None:
    first = [{"w": torch.ones(2)}, {"w": torch.tensor([1.0, 4.0])}]
    mine = [{"w": torch.ones(2)}, {"w": torch.tensor([1.0, 5.0])}]
    (found,) = compare.replicas(mine, first)
    assert found == Difference(compare.REPLICA, 1, "w", 5.0, 4.0, pytest.approx(0.2))


def _report(*phases: ProofPhase) -> ProofReport:
    job = flags(f"{MODEL} {FSDP} --use-flash-attn --save /x")
    (run,) = covering_runs(job)
    return ProofReport(job, LOCAL, ["a sentence"], [RunResult(run, list(phases))], 1.0)


GAP = Difference(compare.GRADIENT, 2, "layer.weight", 1.0, 2.0, 0.5)


@pytest.mark.parametrize(
    ("phase", "code", "verdict"),
    [
        (ProofPhase("training", num_compared=5), PROVEN, "PROVEN: 1 run trained"),
        (
            ProofPhase("training", [GAP]),
            DIFFERS,
            "DIFFERS: run 1, training: gradient of layer.weight",
        ),
        (
            ProofPhase("training", error="rank 0: no"),
            CANNOT_RUN,
            "CANNOT RUN: run 1, training: rank 0",
        ),
    ],
)
def test_verdict_exit_code_and_data(phase: ProofPhase, code: int, verdict: str) -> None:
    report = _report(phase)
    assert report.exit_code == code
    assert report.verdict.startswith(verdict)
    assert as_dict(report)["exit_code"] == code


def test_difference_of_megatron_itself_is_said_and_does_not_fail() -> None:
    report = _report(ProofPhase("training"), ProofPhase("on one rank", [GAP], is_ours=False))
    assert report.exit_code == PROVEN
    assert f"Megatron itself: run 1, on one rank: {GAP}" in "\n".join(lines(report))


def test_memory_is_reported_beside_its_plan() -> None:
    report = _report(ProofPhase("training"))
    report.results[0].memory = {"weights": (2048, 2040), "gradients": (2048, 1024)}
    text = "\n".join(lines(report))
    assert re.search(r"weights +2.0 KiB +2.0 KiB +equal", text), text
    assert re.search(r"gradients +2.0 KiB +1.0 KiB +differs by more than 1%", text), text
    (run,) = as_dict(report)["runs"]
    assert run["memory"]["gradients"] == {"measured": 2048, "planned": 1024}
    report.results[0].unplanned = "no"
    assert "run 1: the memory was not planned: no" in "\n".join(lines(report))


def test_page_draws_both_sides_of_every_comparison() -> None:
    curves = ([2.0, 1.0], [2.0, 1.5], [3.0], [3.0])
    page = html_page(_report(ProofPhase("training", curves=curves, first=3)))
    assert page.count('"reference"') == page.count('"this package"') == 2
    assert page.count('"x":[3,4]') == 2 and page.count('"dtick":1') == 2
    assert "PROVEN: 1 run trained" in page


def test_flags_are_sorted_by_what_is_proven() -> None:
    text = "\n".join(lines(_report(ProofPhase("training"))))
    assert "proven with another value: --hidden-size 8192 (64)" in text
    assert "only parsed: --save /x" in text
    assert "not proven without a GPU: --use-flash-attn (fused attention needs a GPU)" in text


def test_on_a_gpu_no_flag_is_unproven_for_want_of_one() -> None:
    report = dataclasses.replace(_report(ProofPhase("training")), impl=None)
    text = "\n".join(lines(report))
    assert re.search(r"^proven: .*--use-flash-attn", text, re.MULTILINE), text
    assert "without a GPU" not in text and "layers:" not in text


@pytest.mark.parametrize(
    ("job", "impl", "said"),
    [
        ("--bf16", TRANSFORMER_ENGINE, "Transformer Engine's, over reference kernels"),
        ("--transformer-impl local", LOCAL, "Megatron's own (--transformer-impl local)"),
        ("--context-parallel-size 2 --fp8-format hybrid", LOCAL, "its attention under --context"),
        ("--hybrid-layer-pattern M*", LOCAL, "whose layers of this kind are not tested"),
        ("--hybrid-layer-pattern M* --fp8-format hybrid", TRANSFORMER_ENGINE, "over reference"),
    ],
)
def test_layers_are_those_of_the_job_if_a_cpu_has_them(job: str, impl: str, said: str) -> None:
    found, description = sides.layers_of(flags(job))
    assert (found, said in description) == (impl, True), description


def test_the_command_imports_megatron_in_its_ranks_only() -> None:
    """Megatron imports Transformer Engine once per process, with kernels in a rehearsal only."""
    module = "megatron_fsdp_v2_mcore.prove.command"
    done = ran(sys.executable, "-c", f"import sys, {module}; print('megatron.core' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr
