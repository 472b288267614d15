"""`prove --script` starts nothing of the job, however its script names the launcher."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron_fsdp_v2_mcore.prove import dry_run, source
from tests.processes import ran

LAUNCHERS = """
torchrun python python3 python3.12 srun sbatch mpirun sudo docker ssh modulecmd pkill rm launch
"""
FLAGS = ("--num-layers", "32", "--save", "", "--lr", "3e-4")
JOB = 'pretrain_gpt.py --num-layers 32 --save "$UNSET" --lr $((1 + 2))e-4'
PYTHON = 'import subprocess; subprocess.run(["{bin}/torchrun", "pretrain_gpt.py", "--a", "1"])'

STARTS = {
    "search path": "export PATH={bin}:$PATH\ntorchrun {job}",
    "only search path": "export PATH={bin}\ntorchrun {job}",
    "virtual environment": "source {bin}/activate\ntorchrun {job}",
    "module load": 'module() {{ eval "$({bin}/modulecmd "$@")"; }}\nmodule load a\ntorchrun {job}',
    "no launcher installed": "nosuchrun {job}",
    "absolute path": "{bin}/torchrun {job}",
    "module of torch": "{bin}/python3.12 -m torch.distributed.run --nproc-per-node 8 {job}",
    "module of this package": "{bin}/python -m megatron_fsdp_v2_mcore.run {job}",
    "exec": "exec {bin}/torchrun {job}",
    "after other programs": "set -e\n{bin}/python prepare.py --a\nrm -r /x\n{bin}/torchrun {job}",
    "command": "PATH={bin}:$PATH\ncommand torchrun {job}",
    "backslash": "PATH={bin}:$PATH\n\\torchrun {job}",
    "which": "PATH={bin}:$PATH\n$(which torchrun) {job}",
    "array": 'LAUNCHER=({bin}/torchrun --nproc-per-node 8)\n"${{LAUNCHER[@]}}" {job}',
    "nohup": "nohup {bin}/torchrun {job} > {bin}/log 2>&1 &",
    "background": "{bin}/torchrun {job} &\nwait",
    "daemon": "(setsid {bin}/torchrun {job} &)",
    "timeout": "timeout 9 {bin}/torchrun {job}",
    "env": "env A=1 {bin}/torchrun {job}",
    "empty environment": "env -i {bin}/torchrun {job}",
    "shell in an empty environment": "env -i bash -c '{bin}/torchrun {job}'",
    "sudo": "sudo -E {bin}/torchrun {job}",
    "docker": "{bin}/docker run --rm image torchrun {job}",
    "entry point": "{bin}/docker run --entrypoint bash image torchrun {job}",
    "ssh": "{bin}/ssh host {bin}/torchrun {job}",
    "command line for ssh": "{bin}/ssh host '{bin}/torchrun {job} > {bin}/log'",
    "srun": "{bin}/srun -c 8 -N 2 {bin}/python -u {job}",
    "shell in srun": "{bin}/srun -N 2 bash -c 'cd /; {bin}/torchrun {job} 2>&1'",
    "script in srun": "{bin}/srun -N 2 {bin}/node.sh",
    "sbatch": "{bin}/sbatch -N 2 {bin}/node.sh",
    "wrapped by sbatch": "{bin}/sbatch --wrap='srun {bin}/python {job}'",
    "mpirun": "{bin}/mpirun -np 8 {bin}/python {job}",
    "another script": "bash {bin}/node.sh",
    "eval": "eval '{bin}/torchrun {job}'",
    "function": 'start() {{ {bin}/torchrun "$@"; }}\nstart {job}',
    "at exit": "trap '{bin}/torchrun {job}' EXIT",
    "pipe": "{bin}/torchrun {job} 2>&1 | tee {bin}/log",
    "process substitution": "cat <({bin}/torchrun {job})",
    "command substitution": "A=$({bin}/torchrun {job})",
    "xargs": "echo pretrain_gpt.py --a 1 | xargs {bin}/torchrun",
    "awk": "awk 'BEGIN {{ system(\"{bin}/torchrun pretrain_gpt.py --a 1\") }}'",
}
STARTS_UNKNOWN = {
    "program of python": f"{{bin}}/python - <<'END'\n{PYTHON}\nEND",
    "script of python": "{bin}/launch.py",
    "perl": 'perl -e \'exec "{bin}/torchrun", "pretrain_gpt.py", "--a", "1"\'',
    "file without a suffix": "{bin}/launch",
    "input of ssh": "{bin}/ssh host <<END\n{bin}/torchrun {job}\nEND",
    "other programs": "pkill -f pretrain; {bin}/python -c 'its \"quote'",
}


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """Programs that leave a marker, and what a script needs to name them."""
    marker, folder = tmp_path / "started", tmp_path / "bin"
    folder.mkdir()
    for name in LAUNCHERS.split():
        (folder / name).write_text(f"#!/bin/sh\n: > {marker}\n")
    (folder / "activate").write_text(f"export PATH={folder}:$PATH VIRTUAL_ENV={folder}\n")
    (folder / "launch.py").write_text(f"#!/usr/bin/env python3\n{PYTHON.format(bin=folder)}\n")
    (folder / "node.sh").write_text(f"#!/bin/bash\n{folder}/torchrun {JOB}\n")
    for path in folder.iterdir():
        path.chmod(0o755)
    return {"bin": str(folder), "job": JOB, "marker": str(marker)}


def written(script: str, job: dict[str, str]) -> Path:
    path = Path(job["marker"]).with_name("job.sh")
    path.write_text(script.format(**job))
    return path


@pytest.mark.parametrize("script", STARTS.values(), ids=STARTS)
def test_flags_are_found_and_nothing_is_started(script: str, job: dict[str, str]) -> None:
    found = source.read_script(written(script, job))
    assert found.words == (FLAGS if "{job}" in script or "node.sh" in script else ("--a", "1"))
    assert not Path(job["marker"]).exists()


@pytest.mark.parametrize("script", STARTS_UNKNOWN.values(), ids=STARTS_UNKNOWN)
def test_unknown_program_is_not_started(script: str, job: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"starts no training .* give the flags of the job after"):
        source.read_script(written(script, job))
    assert not Path(job["marker"]).exists()


@pytest.mark.parametrize("name", ["absolute path", "virtual environment", "nohup", "awk"])
def test_these_scripts_start_their_launcher_outside_a_dry_run(
    name: str, job: dict[str, str]
) -> None:
    ran("bash", written(f"{STARTS[name]}\nwait", job))
    assert Path(job["marker"]).exists()


def test_variables_and_ranks_are_those_of_the_launcher(job: dict[str, str]) -> None:
    script = "NODES=4\nexport A='b c'\n{bin}/torchrun --nproc_per_node 8 --nnodes=$NODES {job}"
    found = source.read_script(written(script, job))
    assert (found.num_ranks, found.environment["A"]) == (32, "b c")
    assert source.read_script(written("{bin}/srun -N 2 {bin}/python {job}", job)).num_ranks is None


def test_all_processes_end_at_the_time_limit(
    job: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_TIMEOUT_S", 1)
    beat = "setsid bash -c 'while sleep 0.05; do echo >> {bin}/alive; done' > /dev/null 2>&1 &"
    with pytest.raises(ValueError, match="it did not end within 1 s"):
        source.read_script(written(f"({beat})\nsleep 100", job))
    _assert_silent(Path(job["bin"], "alive"))
    # The script itself ends; its training is known.
    source.read_script(written(f"({beat})\n{{bin}}/torchrun {{job}}", job))
    _assert_silent(Path(job["bin"], "alive"))


def _assert_silent(alive: Path) -> None:
    assert alive.stat().st_size
    time.sleep(0.3)
    size = alive.stat().st_size
    time.sleep(0.3)
    assert alive.stat().st_size == size


def test_a_script_cannot_kill_processes(job: dict[str, str]) -> None:
    source.read_script(written("kill -9 $PPID 0\n{bin}/torchrun {job}", job))


def test_without_tracing_the_script_is_not_started(
    job: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused = tmp_path / "refused.py"
    refused.write_text(
        Path(dry_run.__file__).read_text().replace("call(request, pid, None, data) == 0", "0")
    )
    monkeypatch.setattr(dry_run, "__file__", str(refused))
    with pytest.raises(ValueError, match="does not allow to trace processes"):
        source.read_script(written(": > {marker}", job))
    assert not Path(job["marker"]).exists()
