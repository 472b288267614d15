"""NVIDIA's compute-sanitizer over whole steps: what kernels access."""

from __future__ import annotations

import shutil

from tests.gpu.kit.running import Check, Outcome, Request, Status, command, python

STEP = ("-m", "tests.gpu.sanitized_step", "optim_grads_params", "2x2", "optim")


def run(request: Request) -> Outcome:
    """Its memcheck over the steps that torch's sanitizer sees as well; on a CPU the steps alone.

    Its other tools would report what is not there: collectives of those steps write nothing.
    """
    if not request.on_cuda:
        command(python(*STEP, "cpu"), request.folder / "step.log").checked()
        return Outcome.of(True, "the steps alone")
    program = shutil.which("compute-sanitizer")
    if program is None:
        return Outcome(Status.NEEDS_TOOL, "compute-sanitizer is part of the CUDA toolkit")
    # Every allocation by itself, or neighbors in one block would hide what reaches beyond.
    words = [program, "--tool", "memcheck", "--error-exitcode", "9", *python(*STEP)]
    log = request.folder / "memcheck.log"
    done = command(words, log, environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    return Outcome.of(done.code == 0, "nothing reported" if done.code == 0 else done.output[-2000:])


CHECK = Check(
    "compute-sanitizer",
    "NVIDIA's compute-sanitizer finds no access outside of memory in two steps",
    run,
    only_cuda=True,
)
