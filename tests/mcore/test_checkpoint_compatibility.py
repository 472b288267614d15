"""A checkpoint of another model is rejected by name, before any value is read."""

from __future__ import annotations

import argparse
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from megatron_fsdp_v2_mcore.checkpoint.compatibility import check_request
from megatron_fsdp_v2_mcore.flags.checkpoint_check import check_checkpoint_folder
from tests.mcore.flags import PP2, fsdp, loading, saving
from tests.mcore.trained import trained
from tests.ranks import RankFailure, RankPools

EMBEDDING = "model.embedding.word_embeddings.weight"
STATE = "optimizer.state.embedding.word_embeddings.weight.exp_avg"
MOMENT = f"{STATE}_sq"
META = "optimizer.param_to_group_meta.embedding.word_embeddings.weight.lr"
RNG = "rng_state.(0, 0).0.torch_rng_state"

REQUESTED: dict[str, tuple[int, ...] | None] = {
    EMBEDDING: (8, 2),
    "model.decoder.layers.0.mlp.linear_fc1.weight": (4, 2),
    STATE: (8, 2),
    MOMENT: (8, 2),
    META: None,
    RNG: (16,),
}


def _args(**changed: Any) -> argparse.Namespace:
    values = {"num_layers": 1, "padded_vocab_size": 8, "tensor_model_parallel_size": 1}
    return argparse.Namespace(**(values | changed))


def _saved(folder: Path, missing: str = "", **more: tuple[int, ...]) -> str:
    """Save a checkpoint with the entries of `REQUESTED`, except some, and more; return its path.

    Args:
        folder: The checkpoint.
        missing: The beginning of entries that are left out.
        more: Shapes of additional entries.
    """
    shapes = {k: s for k, s in REQUESTED.items() if not missing or not k.startswith(missing)}
    entries = {k: 1.0 if s is None else torch.ones(s) for k, s in {**shapes, **more}.items()}
    dcp.save(entries, checkpoint_id=str(folder), no_dist=True)
    return str(folder)


def test_matching_checkpoint_has_no_problem_and_no_note(tmp_path: Path) -> None:
    result = check_request(_saved(tmp_path), REQUESTED, _args(), _args())
    assert (result.problem, result.notes, result.absent) == ("", [], set())


def test_checkpoint_with_rows_of_only_one_rank_is_incomplete(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    reader = dcp.FileSystemReader(path)
    metadata = reader.read_metadata()
    entry = metadata.state_dict_metadata[STATE]
    entry.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 2]))]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    problem = check_request(path, REQUESTED, _args(), _args()).problem
    assert f"is incomplete: {STATE} has 16 elements, and its chunks 8" in problem


FC1 = "mlp.linear_fc1.weight"
LAYER_1 = {f"model.decoder.layers.1.{FC1}": (4, 2)}
LAYERS = r"--num-layers \(num_layers\) was"
LARGER = {EMBEDDING: (12, 2), STATE: (12, 2)}
PADDED = {"padded_vocab_size": 12, "tensor_model_parallel_size": 2}
SIZES = "to 12 at --tensor-model-parallel-size 2 and is padded to 8 at 1"
# The beginning of missing entries, additional entries, arguments of the run that saved, and the
# expected error.
PROBLEMS: tuple[tuple[str, dict[str, Any], dict[str, int], str], ...] = (
    ("model.decoder", {}, {"num_layers": 0}, f"contain model.*layers.0.{FC1}.*{LAYERS} 0 and is 1"),
    ("", LAYER_1, {"num_layers": 2}, f"does not have its model.*layers.1.*{LAYERS} 2 and is 1"),
    ("", LARGER, {}, rf"shapes differ: {EMBEDDING} \(12, 2\), in this run \(8, 2\)"),
    ("", LARGER, PADDED, f"{SIZES}.*--make-vocab-size-divisible-by 12 pads it to 12"),
    ("optimizer.", {}, {}, "add --no-load-optim"),
    (MOMENT, {}, {}, f"does not contain {MOMENT}"),
    (META, {}, {}, f"does not contain {META}"),
)


@pytest.mark.parametrize(("missing", "more", "was", "said"), PROBLEMS)
def test_mismatch_is_named_with_the_flag_to_change(
    tmp_path: Path, missing: str, more: dict[str, Any], was: dict[str, int], said: str
) -> None:
    path = _saved(tmp_path, missing, **more)
    assert re.search(said, check_request(path, REQUESTED, _args(**was), _args()).problem)


def test_query_groups_that_no_layer_has_are_not_a_difference(tmp_path: Path) -> None:
    heads = {"group_query_attention": False, "num_attention_heads": 4}
    saved, mine = (_args(**heads, num_query_groups=number) for number in (4, 1))
    problem = check_request(_saved(tmp_path, "model.decoder"), REQUESTED, saved, mine).problem
    assert problem and "num_query_groups" not in problem


# By requested entry: the beginning of missing entries, what keeps its value, the expected note.
OPTIONAL: dict[str, tuple[str, tuple[str, ...], str]] = {
    # A parameter saved before its first step.
    META: (STATE, ("optimizer", "state", "embedding.word_embeddings.weight"), ""),
    "rng_state.(0, 1).0.torch_rng_state": ("", ("rng_state",), "keep the seeds of this run"),
    "optimizer.grad_scaler.growth_tracker": ("", ("optimizer", "grad_scaler"), "loss scale"),
}


@pytest.mark.parametrize("key", OPTIONAL)
def test_missing_optional_entry_keeps_the_value_of_the_run(tmp_path: Path, key: str) -> None:
    missing, absent, text = OPTIONAL[key]
    path = _saved(tmp_path, missing)
    result = check_request(path, {key: None, **REQUESTED}, _args(), _args())
    assert (result.problem, result.absent) == ("", {absent})
    assert [text in note for note in result.notes] == [True] * bool(text)


@pytest.fixture(scope="module")
def pipelined(megatron: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint saved by two pipeline stages of two layers each."""
    folder = tmp_path_factory.mktemp("pipelined")
    trained(megatron, 2, fsdp(), "--num-layers 4 --train-iters 1", PP2, saving(folder, 1))
    return folder


def test_checkpoint_has_the_entries_of_all_stages_once(pipelined: Path) -> None:
    check_checkpoint_folder(pipelined, may_be_empty=False)
    metadata = dcp.FileSystemReader(pipelined / "iter_0000001").read_metadata()
    keys = set(metadata.state_dict_metadata)
    layers = {key.split(".")[3] for key in keys if key.startswith("model.decoder.layers.")}
    assert layers == {"0", "1", "2", "3"}
    for kind in ("optimizer.state.decoder", "optimizer.param_to_group_meta.decoder"):
        assert {k.split(".")[4] for k in keys if k.startswith(f"{kind}.layers.")} == layers
    assert {key.split(".")[1] for key in keys if key.startswith("rng_state.")} == {
        "(0, 0)",
        "(1, 0)",
    }
    assert not any("module." in key or key.startswith("model0") for key in keys)
    assert "model.output_layer.weight" not in keys


def test_plain_torch_reads_the_checkpoint_in_one_process(pipelined: Path) -> None:
    plain = _load_state_dict_from_keys({"model"}, checkpoint_id=pipelined / "iter_0000001")["model"]
    assert plain["embedding.word_embeddings.weight"].shape[1] == 64
    assert "decoder.layers.3.mlp.linear_fc2.weight" in plain
    assert all(tensor.isfinite().all() for tensor in plain.values())


def test_a_model_with_fewer_layers_is_rejected_on_every_rank(
    megatron: RankPools, pipelined: Path
) -> None:
    with pytest.raises(RankFailure, match=r"num_layers\) was 4 and is 2") as rejected:
        trained(megatron, 2, fsdp(), "--train-iters 2", loading(pipelined))
    assert str(rejected.value).count("FlagError: ") == 2
