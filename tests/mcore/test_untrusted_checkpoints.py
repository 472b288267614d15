"""No byte of a checkpoint runs code, whichever way Megatron's `--load` reads it."""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fsdp_v2.checkpoint.manifest import METADATA
from megatron_fsdp_v2_cli import main
from tests.mcore import flags as f
from tests.mcore.session import Training, train
from tests.mcore.trained import run_of_ranks, trained
from tests.ranks import RankFailure, RankPools
from tests.unit.checkpoints import changed_metadata

STEPS = "--train-iters 2"
DTENSOR, TORCH_DIST = "fsdp_dtensor", "torch_dist"
ARGUMENTS = {DTENSOR: "args", TORCH_DIST: "common_state/shard_0_1"}


class _Touches:
    """An object that creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = str(file)

    def __reduce__(self) -> Any:
        return open, (self._file, "w")


@pytest.fixture(scope="module")
def honest(megatron: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of both formats, in folders of these names."""
    folder = tmp_path_factory.mktemp("honest")
    saved, exported = folder / DTENSOR, folder / TORCH_DIST
    trained(megatron, 2, f.fsdp(), STEPS, f.saving(saved, 1))
    words = ["ckpt", "convert", "--to", TORCH_DIST, "--iteration", "1"]
    assert main([*words, str(saved), str(exported)]) == 0
    return folder


def evil_metadata(path: Path, kind: str, evil: Any) -> None:
    """Let `.metadata` create the file; what it describes stays the same."""
    del kind
    file = path / METADATA
    # Without the opcodes for the protocol and the end.
    call = pickle.dumps(evil, protocol=2)[2:-1]
    file.write_bytes(file.read_bytes()[:-1] + call + b"0.")


def evil_arguments(path: Path, kind: str, evil: Any) -> None:
    """Put an object that creates the file into Megatron's arguments."""
    torch.save([evil] if kind == TORCH_DIST else evil, path / "evil")
    with changed_metadata(path) as metadata:
        for index, info in metadata.storage_data.items():
            if index.fqn == ARGUMENTS[kind]:
                vars(info).update(
                    relative_path="evil", offset=0, length=(path / "evil").stat().st_size
                )


def evil_file(path: Path, kind: str, evil: Any) -> None:
    """Add a file with Megatron's older name for arguments."""
    del kind
    torch.save(evil, path / "common.pt")


Attack = Callable[[Path, str, Any], None]


def crafted(honest: Path, kind: str, attack: Attack, folder: Path) -> tuple[Path, Path]:
    """Return a crafted copy of a checkpoint, and the file that it would create."""
    file, copy = folder / "created", folder / "crafted"
    shutil.copytree(honest / kind, copy)
    attack(copy / "iter_0000001", kind, _Touches(file))
    return copy, file


def resume(pools: RankPools, folder: Path, *flags: f.Flags) -> None:
    trained(pools, 2, f.fsdp(), STEPS, f.loading(folder, 1), *flags, iterations=1)


def resume_with_its_arguments(pools: RankPools, folder: Path) -> None:
    command = f.words(f.MODEL_FLAGS, f.fsdp(), STEPS, f.loading(folder, 1), "--use-checkpoint-args")
    run_of_ranks(pools, 2, command)


NOT_PLAIN = r"cannot be loaded as plain data: .*add --fsdp-trust-checkpoint"
WAYS = {"load": resume, "load arguments": resume_with_its_arguments}
ATTACKS = {
    "metadata": (evil_metadata, (DTENSOR, TORCH_DIST)),
    "arguments": (evil_arguments, (DTENSOR, TORCH_DIST)),
    "file": (evil_file, (TORCH_DIST,)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("attack", "kind"), [(attack, kind) for attack, (_, kinds) in ATTACKS.items() for kind in kinds]
)
def test_a_crafted_checkpoint_runs_no_code(
    megatron: RankPools, honest: Path, tmp_path: Path, attack: str, kind: str, way: str
) -> None:
    folder, file = crafted(honest, kind, ATTACKS[attack][0], tmp_path)
    if attack == "metadata":
        # What it calls is never called, and what it describes is read.
        WAYS[way](megatron, folder)
    else:
        with pytest.raises(RankFailure, match=NOT_PLAIN) as rejected:
            WAYS[way](megatron, folder)
        assert "FlagError" in str(rejected.value)
    assert not file.exists()


def test_a_trusted_checkpoint_may_run_code(
    megatron: RankPools, honest: Path, tmp_path: Path
) -> None:
    folder, file = crafted(honest, DTENSOR, evil_arguments, tmp_path)
    with pytest.raises(RankFailure, match="has no arguments of a Megatron run"):
        resume(megatron, folder, "--fsdp-trust-checkpoint")
    assert file.exists()


class OwnOption:
    """A value of an option that a script adds to Megatron's."""


def train_with_own_option(flags: list[str]) -> tuple[Training, str]:
    """Train as a script with an option of its own; also return what saves print."""
    from megatron.training import get_args

    from megatron_fsdp_v2_mcore.checkpoint import state_dict
    from megatron_fsdp_v2_mcore.pretrain_gpt import gpt

    build, printed = gpt.build_model, io.StringIO()

    def build_with_option(*args: Any, **kwargs: Any) -> Any:
        get_args().own_option = OwnOption()
        return build(*args, **kwargs)

    with (
        mock.patch.object(gpt, "build_model", build_with_option),
        mock.patch.object(state_dict, "sys", SimpleNamespace(stdout=printed)),
    ):
        training = train(flags)
    return training, printed.getvalue()


def test_a_save_names_the_flag_that_loads_of_its_arguments_need(
    megatron: RankPools, tmp_path: Path
) -> None:
    command = f.words(f.MODEL_FLAGS, f.fsdp(), STEPS, f.saving(tmp_path, 1))
    results = megatron(2).run(train_with_own_option, command)
    uninterrupted, printed = results[0]
    assert "tests.mcore.test_untrusted_checkpoints.OwnOption" in printed
    assert "needs --fsdp-trust-checkpoint" in printed
    with pytest.raises(RankFailure, match=NOT_PLAIN):
        resume(megatron, tmp_path)
    load = [*f.loading(tmp_path, 1), "--fsdp-trust-checkpoint"]
    resumed = trained(megatron, 2, f.fsdp(), STEPS, load, iterations=1)
    assert resumed.losses == uninterrupted.losses[1:]
