"""A failed load changes nothing; a successful load restores all saved values."""

from __future__ import annotations

import copy
import types
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.utils._pytree import tree_map_only

from megatron_fsdp_v2 import checkpoint
from megatron_fsdp_v2.checkpoint.entries import OPTIMIZER_GROUPS
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from megatron_fsdp_v2.checkpoint.saving import pack
from tests.distributed.checkpoint_trainings import torch_save
from tests.unit.checkpoints import write_folder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def trained(
    optimizer: Any = optim.AdamW, seed: int = 0, dtype: Any = torch.float32, **options: Any
) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = net().to(dtype)
    made = optimizer(model.parameters(), **options)
    for _ in range(2):
        step(model, made)
    return model, made


def step(model: nn.Module, optimizer: optim.Optimizer) -> None:
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    model(torch.randn(5, 4, dtype=dtype)).square().sum().backward()
    optimizer.step()


def dtypes(optimizer: optim.Optimizer) -> Any:
    state = list(optimizer.state.values())
    return tree_map_only(torch.Tensor, lambda tensor: tensor.dtype, state)


def bits(model: nn.Module, optimizer: optim.Optimizer) -> Any:
    """Return a copy of all state that a load may change, comparable with `==`."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return (str(value.dtype), value.detach().reshape(-1).view(torch.uint8).tolist())
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return copy.deepcopy([plain(model.state_dict()), plain(optimizer.state_dict())])


def assert_rejected(
    path: Path, model: Any, optimizer: Any, problem: str, *, strict: bool = True
) -> None:
    """Assert that a load raises and changes nothing."""
    before = bits(model, optimizer)
    with pytest.raises(CheckpointError, match=problem):
        checkpoint.load(path, model, optimizer, strict=strict)
    assert bits(model, optimizer) == before


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
@pytest.mark.parametrize(
    ("there", "here", "problem"),
    [
        ("AdamW", "SGD", "AdamW, .*SGD: .*betas.*momentum"),
        ("SGD", "AdamW", "SGD, .*AdamW: .*dampening"),
        ("Adam", "Adamax", "Adam, .*Adamax: it has no amsgrad"),
        ("Adam", "AdamW", "decoupled_weight_decay is False there"),
    ],
    ids=["adamw-sgd", "sgd-adamw", "adam-adamax", "adam-adamw"],
)
def test_another_kind_of_optimizer_is_rejected(
    tmp_path: Path, there: str, here: str, problem: str, strict: bool
) -> None:
    options = {"momentum": 0.9} if there == "SGD" else {}
    model, optimizer = trained(getattr(optim, there), **options)
    checkpoint.save(tmp_path / "k", model, optimizer)
    other, other_optimizer = trained(getattr(optim, here), seed=1)
    assert_rejected(tmp_path / "k", other, other_optimizer, problem, strict=strict)
    # The weights alone can be loaded.
    checkpoint.load(tmp_path / "k", other)


@pytest.mark.parametrize(
    "kind", [optim.AdamW, optim.SGD, optim.Adafactor, optim.RMSprop, optim.NAdam]
)
def test_a_fresh_optimizer_of_the_same_kind_gets_state_and_options(
    tmp_path: Path, kind: Any
) -> None:
    model, optimizer = trained(kind, lr=0.1)
    optim.lr_scheduler.StepLR(optimizer, 1)
    checkpoint.save(tmp_path / "k", model, optimizer)
    other = net()
    fresh = kind(other.parameters(), lr=0.5, weight_decay=0.3)
    checkpoint.load(tmp_path / "k", other, fresh)
    assert bits(other, fresh) == bits(model, optimizer)


@pytest.mark.parametrize("option", ["fused", "capturable", "foreach"])
def test_values_that_kernels_read_on_the_device_are_loaded_there(
    tmp_path: Path, option: str
) -> None:
    """Step counts of a fused or capturable optimizer, and a learning rate in a tensor."""
    model, optimizer = trained(lr=torch.tensor(0.5), foreach=False)
    # A capturable step needs a GPU, and so does the fused step of what is loaded.
    optimizer.param_groups[0].update({"foreach": False, option: True})
    checkpoint.save(tmp_path / "k", model, optimizer)
    other = net().to("meta")
    fresh = optim.AdamW(other.parameters())
    fresh.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    checkpoint.load(tmp_path / "k", other, fresh)
    (options,), states = fresh.param_groups, fresh.state.values()
    assert options[option] and options["lr"].is_meta
    assert {state["step"].device.type for state in states} == {
        "cpu" if option == "foreach" else "meta"
    }


@pytest.mark.parametrize("saver", ["ours", "torch"])
@pytest.mark.parametrize("here", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kind", [optim.AdamW, optim.NAdam, optim.Adafactor, optim.RMSprop])
def test_a_run_resumes_in_another_precision(
    tmp_path: Path, kind: Any, here: torch.dtype, saver: str
) -> None:
    """State has the dtypes of a run in that precision, and continues from the rounded values."""
    there = torch.float32 if here == torch.bfloat16 else torch.bfloat16
    model, optimizer = trained(kind, dtype=there)
    if saver == "ours":
        checkpoint.save(tmp_path / "k", model, optimizer)
    else:
        torch_save(str(tmp_path / "k"), model, optimizer)
    uninterrupted, of_uninterrupted = trained(kind, dtype=here)
    other = net().to(here)
    fresh = kind(other.parameters())
    checkpoint.load(tmp_path / "k", other, fresh)
    saved = [optimizer.state[param] for param in model.parameters()]
    saved = tree_map_only(torch.Tensor, lambda t: t.to(here) if t.shape else t, saved)
    loaded = [fresh.state[p] for p in other.parameters()]
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    step(other, fresh)
    step(uninterrupted, of_uninterrupted)
    assert dtypes(fresh) == dtypes(of_uninterrupted)


@pytest.mark.parametrize("there", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_state_of_a_fixed_dtype_keeps_it(tmp_path: Path, there: torch.dtype) -> None:
    """Beside parameters of another dtype, or as declared by Transformer Engine's FusedAdam."""

    class Fp32Momentum(optim.SGD):
        if there == torch.float32:
            name_to_dtype_map = types.MappingProxyType({"momentum_buffer": torch.float32})

    def made(dtype: torch.dtype) -> tuple[Any, Any]:
        model = net().to(dtype)
        return model, Fp32Momentum(model.parameters(), momentum=0.9)

    model, optimizer = made(there)
    for param in model.parameters():
        optimizer.state[param]["momentum_buffer"] = torch.rand(param.shape)
    checkpoint.save(tmp_path / "k", model, optimizer)
    other, fresh = made(torch.bfloat16)
    checkpoint.load(tmp_path / "k", other, fresh)
    assert bits(other, fresh)[1] == bits(model, optimizer)[1]


def two_groups(model: Any) -> Any:
    return [{"params": model[0].parameters()}, {"params": [*model[1:].parameters()], "lr": 0.2}]


def test_groups_with_other_parameters_are_rejected_and_named(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint.save(tmp_path / "k", model, optimizer)
    other = net()
    split = optim.AdamW(two_groups(other))
    assert_rejected(
        tmp_path / "k", other, split, r"0\.weight and 1\.weight are in two groups of the"
    )
    with pytest.warns(UserWarning, match="of other groups"):
        checkpoint.load(tmp_path / "k", other, split, strict=False)
    assert [group["lr"] for group in split.param_groups] == [0.001, 0.001]

    checkpoint.save(tmp_path / "split", other, optim.AdamW(two_groups(other)))
    path, problem = tmp_path / "split", "in one group of the optimizer and in two"
    assert_rejected(path, model, optimizer, problem)
    assert_rejected(path, model, optimizer, "with different lr", strict=False)


def test_a_parameter_in_no_group_is_named(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint.save(tmp_path / "k", model, optim.AdamW(model[0].parameters()))
    assert_rejected(tmp_path / "k", model, optimizer, r"missing .*param_groups of 1\.weight")
    checkpoint.save(tmp_path / "k", model, optimizer)
    head = optim.AdamW(model[2].parameters())
    assert_rejected(tmp_path / "k", model, head, r"not in the model: optimizer\.state\.0\.bias")


def copy_without(source: Path, target: Path, left_out: str) -> None:
    """Copy a checkpoint without one entry."""
    folder = CheckpointFolder(source)
    keys = folder.entries.keys() - {left_out}
    tensors = {key: folder.read_tensor(key) for key in keys if folder.shape(key) is not None}
    write_folder(target, tensors, {key: folder.object(key) for key in keys - tensors.keys()})


@pytest.mark.parametrize("gone", ["optimizer.state.2.weight.exp_avg_sq", OPTIMIZER_GROUPS])
def test_missing_optimizer_state_is_reported(tmp_path: Path, gone: str) -> None:
    model, optimizer = trained()
    checkpoint.save(tmp_path / "k", model, optimizer)
    copy_without(tmp_path / "k", tmp_path / "less", gone)
    assert_rejected(tmp_path / "less", model, optimizer, f"missing in the checkpoint: {gone}")


def test_a_lenient_load_warns_of_what_it_does_not_load(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "k", *trained())
    with pytest.warns(UserWarning, match="fits in part: missing in the checkpoint: model.inner"):
        checkpoint.load(tmp_path / "k", nn.ModuleDict({"inner": net()}), strict=False)


@pytest.mark.parametrize(
    ("option", "value"),
    [("", 3), ("", [{"params": [["a"]]}]), ("", [{"params": [], 3: 1}]), (".0.params", 3)],
)
def test_malformed_groups_raise_checkpoint_error(tmp_path: Path, option: str, value: Any) -> None:
    write_folder(tmp_path / "k", {}, {OPTIMIZER_GROUPS + option: value})
    assert_rejected(tmp_path / "k", *trained(), "is not a list of groups")


def test_a_dtype_that_does_not_convert_is_rejected(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("table", torch.ones(3))
    checkpoint.save(tmp_path / "k", model)
    model.register_buffer("table", torch.zeros(3, dtype=torch.int64))
    with pytest.raises(
        CheckpointError, match=r"table is of torch\.float32 there and of torch\.int64"
    ):
        checkpoint.load(tmp_path / "k", model)
    model.register_buffer("table", torch.zeros(3, dtype=torch.bfloat16))
    checkpoint.load(tmp_path / "k", model)
    assert model.table.tolist() == [1.0, 1.0, 1.0]


def test_an_expanded_buffer_is_rejected_before_weights_change(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("z", torch.ones(1, 3).expand(2, 3))
    optimizer = optim.SGD(model.parameters())
    checkpoint.save(tmp_path / "k", model, optimizer)
    problem = r"model\.z is an expanded tensor, .*clone\(\) it"
    assert_rejected(tmp_path / "k", model, optimizer, problem)


class Counter(nn.Module):
    """A module with a count as extra state, which rejects counts above a limit."""

    def __init__(self, count: int, limit: int = 99) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(count)))
        self.count, self.limit = count, limit

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        if state > self.limit:
            raise RuntimeError("too much")
        self.count = state


def test_extra_state_that_a_module_rejects_leaves_the_model_unchanged(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "k", nn.Sequential(Counter(5), Counter(7)))
    model = nn.Sequential(Counter(1), Counter(2, limit=6))
    with pytest.raises(RuntimeError, match="too much"):
        checkpoint.load(tmp_path / "k", model)
    assert [(m.count, m.weight.tolist()) for m in model] == [(1, [1.0, 1.0]), (2, [2.0, 2.0])]
    inner = nn.Sequential(Counter(1), Counter(2))
    checkpoint.load(tmp_path / "k", torch.compile(inner, backend="eager"))
    assert [m.count for m in inner] == [5, 7]


# -- `extra`: values that cannot be loaded are rejected before writing ----------------------------


def test_only_the_elements_of_a_view_are_written() -> None:
    assert len(pack("extra", torch.zeros(1_000_000)[:3])) < 10_000


def recursive_list() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"a": [1, np.float64(2.0)]}, r"extra\['a'\]\[1\] is of the type numpy\.float64.*item\(\)"),
        ((np.ones(2),), r"extra\[0\] is of the type numpy\.ndarray.*from_numpy"),
        ({"net": nn.Linear(1, 1)}, r"extra\['net'\] is of the type torch\.nn\.modules\.linear"),
        # Not a path: Megatron adds paths to torch's safe globals.
        (
            {Fraction(1, 2): 1},
            r"extra cannot be loaded .*: Unsupported global: GLOBAL fractions\.Fraction",
        ),
        ([torch.ones(1, device="meta")], r"extra\[0\] is on the meta device"),
        (recursive_list(), "extra is nested too deeply, or contains itself"),
    ],
    ids=["scalar", "array", "module", "key", "meta", "itself"],
)
def test_values_that_cannot_be_loaded_are_rejected_before_writing(
    tmp_path: Path, extra: Any, problem: str
) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=problem):
        checkpoint.save(tmp_path / "k", model, extra=extra)
    assert list(tmp_path.iterdir()) == []
