"""Export of checkpoints to plain files in one process, under Megatron's own parameter names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.exporting import convert, export
from megatron_fsdp_v2.checkpoint.folder import CheckpointFolder
from megatron_fsdp_v2.checkpoint.verifying import verify
from megatron_fsdp_v2.checkpoint.writing import pickled, write_folder
from megatron_fsdp_v2_mcore.checkpoint.layout import model_tensors
from megatron_fsdp_v2_mcore.checkpoint.name_table import SUBTENSOR_SUFFIXES
from megatron_fsdp_v2_mcore.model.tensor_shards import GATED_SUFFIXES, STATE_SPACE_SUFFIXES
from tests.mcore import flags as f
from tests.mcore.checkpoint_values import digest, digests, merged_digests
from tests.mcore.command_line import run_code
from tests.mcore.trained import trained
from tests.ranks import RankPools

# A dense layer, and one with experts, of which each rank holds half; both gated.
MIXED = f"{f.ALLTOALL} {f.EP2} --moe-layer-freq [0,1]"

Saved = tuple[Path, dict[str, str]]


def model_digests(model: list[Any], optimizer: Any) -> dict[str, str]:
    """Return digests of parameters and buffers by their names in the full model. Collective."""
    found = digests(model, optimizer)
    return {k: v for k, v in found.items() if not k.endswith((".exp_avg", ".exp_avg_sq", ".step"))}


@pytest.fixture(scope="module")
def saved(megatron: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A checkpoint of two ranks, and digests of their model when it was saved."""
    folder = tmp_path_factory.mktemp("mixed")
    flags = [f.fsdp(), "--global-batch-size 8 --train-iters 1", MIXED, f.saving(folder, 1)]
    return folder / "iter_0000001", merged_digests(
        trained(megatron, 2, *flags, probe=model_digests).extras
    )


def test_export_has_the_full_model_under_megatrons_own_names(saved: Saved, tmp_path: Path) -> None:
    path, expected = saved
    done = export(path, tmp_path / "model.safetensors")
    found = load_file(done.files[0])
    assert {key: digest(tensor) for key, tensor in found.items()} == expected
    assert "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight" in found
    assert "decoder.layers.0.mlp.linear_fc1.weight" in found
    assert not any(key.startswith("model.") for key in done.left_out)
    assert any(key.startswith("optimizer.") for key in done.left_out)


def test_converted_torch_dist_export_has_the_same_model(saved: Saved, tmp_path: Path) -> None:
    from megatron_fsdp_v2_mcore.checkpoint.torch_dist.export import export as to_torch_dist

    path, expected = saved
    stacked = to_torch_dist(path.parent, tmp_path / "stacked").path
    convert(stacked, tmp_path / "plain")
    opened = CheckpointFolder(tmp_path / "plain")
    found = {key.removeprefix("model."): opened.read_tensor(key) for key, _ in opened.tensors()}
    assert {key: digest(tensor) for key, tensor in found.items()} == expected
    assert verify(tmp_path / "plain").is_good


def test_name_table_has_the_order_of_every_fused_tensor() -> None:
    assert {GATED_SUFFIXES, *STATE_SPACE_SUFFIXES.values()} == set(SUBTENSOR_SUFFIXES)


def megatron_folder(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    objects = {"args": None, "checkpoint_version": 3.0}
    entries = {name: pickled(value) for name, value in objects.items()}
    model = {f"model.{name}": data for name, data in tensors.items()}
    write_folder(path, {**model, **entries}, has_manifest=False)
    return path


def test_parts_of_fused_tensors_are_joined_in_order(tmp_path: Path) -> None:
    """Names have prefixes of wrappers, which Megatron's own version of the format keeps."""
    saved, expected = {}, {}
    for name, order in (
        ("module.module.decoder.layers.0.mlp.linear_fc1.weight", GATED_SUFFIXES),
        ("module.module.decoder.layers.0.mlp.experts.linear_fc1.weight12", GATED_SUFFIXES),
        ("decoder.layers.0.mlp.linear_fc1.adapter.weight_magnitude", GATED_SUFFIXES),
        ("module.module.decoder.layers.0.mixer.in_proj.weight", STATE_SPACE_SUFFIXES[5]),
        ("module.module.decoder.layers.0.mixer.conv1d_weight", STATE_SPACE_SUFFIXES[3]),
        ("module.module.decoder.layers.0.mixer.conv1d_bias", STATE_SPACE_SUFFIXES[3]),
    ):
        pieces = [torch.randn(2 + i, 3) for i, _ in enumerate(order)]
        for ending, piece in reversed(list(zip(order, pieces, strict=True))):
            saved[name + ending] = piece
        expected[name.removeprefix("module.module.")] = torch.cat(pieces)
    path = megatron_folder(tmp_path / "c", saved)
    export(path, tmp_path / "m.safetensors")
    found = load_file(tmp_path / "m.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_missing_part_of_a_fused_tensor_is_an_error(tmp_path: Path) -> None:
    path = megatron_folder(tmp_path / "c", {"decoder.linear_fc1.weight_w": torch.ones(2, 2)})
    with pytest.raises(CheckpointError, match=r"it has only _w of decoder\.linear_fc1\.weight"):
        export(path, tmp_path / "m.pt")


def test_checkpoint_without_megatron_arguments_keeps_its_names(tmp_path: Path) -> None:
    write_folder(tmp_path / "c", {"model.weight_w": torch.ones(2)})
    assert model_tensors(CheckpointFolder(tmp_path / "c")) is None


@pytest.mark.functional
def test_export_does_not_import_megatron(tmp_path: Path) -> None:
    path = megatron_folder(
        tmp_path / "c", {f"linear_fc1.weight{e}": torch.ones(2, 2) for e in GATED_SUFFIXES}
    )
    script = (
        "import sys; sys.modules['megatron'] = None\n"
        "from megatron_fsdp_v2.checkpoint.exporting import export\n"
        "export(sys.argv[1], sys.argv[2])\n"
    )
    run = run_code(script, str(path), str(tmp_path / "m.pt"))
    assert run.code == 0, run.output
    assert torch.load(tmp_path / "m.pt", weights_only=True)["linear_fc1.weight"].shape == (4, 2)


@pytest.mark.parametrize(
    ("key", "is_grouped", "last"),
    [
        ("self_attention.linear_qkv.weight", False, "layers.1.self_attention.linear_qkv.weight"),
        ("self_attention.linear_qkv.layer_norm_weight", False, "layers.1.input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_bias", False, "layers.1.pre_mlp_layernorm.bias"),
        (
            "mlp.experts.experts.linear_fc1.weight",
            False,
            "layers.1.mlp.experts.local_experts.3.linear_fc1.weight",
        ),
        ("mlp.experts.experts.linear_fc2.weight", True, "layers.1.mlp.experts.linear_fc2.weight3"),
    ],
)
def test_stacked_layers_and_experts_are_split(key: str, is_grouped: bool, last: str) -> None:
    from megatron_fsdp_v2_mcore.checkpoint.name_table import StoredNames

    rules = StoredNames(num_layers=2, num_experts=4, is_grouped=is_grouped, has_fused_norms=True)
    stored = f"decoder.layers.{key}"
    found = list(rules.names(stored, (2, 4, 8)))
    assert found[-1][0] == f"decoder.{last}"
    for name, front in found:
        place = rules.place(name)
        assert place.key == stored
        assert tuple(position for position, _ in place.leading) == front
    assert len(found) == (8 if "experts" in key else 2)
