"""A checkpoint of another model is rejected by name, before any value is read."""

from __future__ import annotations

import argparse
import pickle
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


def _saved(folder: Path, without: tuple[str, ...] = (), **more: tuple[int, ...]) -> str:
    """Save a checkpoint with the entries of `REQUESTED`, except some, and more; return its path."""
    entries = {k: shape for k, shape in REQUESTED.items() if not k.startswith(without or ("-",))}
    dcp.save(
        {k: 1.0 if s is None else torch.ones(s) for k, s in {**entries, **more}.items()},
        checkpoint_id=str(folder),
        no_dist=True,
    )
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


LAYER_1 = "model.decoder.layers.1.mlp.linear_fc1.weight"
# Missing entries, additional entries, arguments of the run that saved, and expected texts.
PROBLEMS: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, int], list[str]]] = {
    "missing parameters": (
        ("model.decoder",),
        {},
        {"num_layers": 0},
        [
            "does not contain model.decoder.layers.0.mlp.linear_fc1.weight",
            "--num-layers (num_layers) was 0 and is 1",
        ],
    ),
    "unexpected parameters": (
        (),
        {LAYER_1: (4, 2)},
        {"num_layers": 2},
        [
            "this model does not have its model.decoder.layers.1",
            "--num-layers (num_layers) was 2 and is 1",
        ],
    ),
    "a vocabulary padded differently": (
        (),
        {EMBEDDING: (12, 2), STATE: (12, 2)},
        {"padded_vocab_size": 12, "tensor_model_parallel_size": 2},
        [
            f"shapes differ: {EMBEDDING} (12, 2), in this run (8, 2)",
            "padded to 12 at --tensor-model-parallel-size 2 and is padded to 8 at 1",
            "--make-vocab-size-divisible-by 12 pads it to 12",
        ],
    ),
    "no optimizer": (("optimizer.",), {}, {}, ["add --no-load-optim"]),
    "an incomplete state": ((MOMENT,), {}, {}, [f"does not contain {MOMENT}"]),
    "a missing option": ((META,), {}, {}, [f"does not contain {META}"]),
}


@pytest.mark.parametrize("what", PROBLEMS)
def test_mismatch_is_named_with_the_flag_to_change(tmp_path: Path, what: str) -> None:
    without, more, was, texts = PROBLEMS[what]
    path = _saved(tmp_path, without, **more)
    problem = check_request(path, REQUESTED, _args(**was), _args()).problem
    assert [text for text in texts if text not in problem] == []


# Missing entries, an additional requested entry, the entry that keeps its value, expected text.
OPTIONAL: dict[str, tuple[tuple[str, ...], str, tuple[str, ...], str]] = {
    "a parameter saved before its first step": (
        (STATE,),
        META,
        ("optimizer", "state", "embedding.word_embeddings.weight"),
        "",
    ),
    "random numbers of other ranks": (
        (),
        "rng_state.(0, 1).0.torch_rng_state",
        ("rng_state",),
        "keep the seeds of this run",
    ),
    "a loss scale": (
        (),
        "optimizer.grad_scaler.growth_tracker",
        ("optimizer", "grad_scaler"),
        "loss scale",
    ),
}


@pytest.mark.parametrize("what", OPTIONAL)
def test_missing_optional_entry_keeps_the_value_of_the_run(tmp_path: Path, what: str) -> None:
    without, key, absent, text = OPTIONAL[what]
    path = _saved(tmp_path, without)
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
