"""Running python blocks: on ranks that are there already, or as programs of their own."""

from __future__ import annotations

import contextlib
import importlib
import io
import multiprocessing
import os
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.docs.given import prepare
from tests.ranks import PRELOADED, free_port

__all__ = ["load", "program", "run_page"]

TIMEOUT_S = 60.0


def load(name: str) -> Any:
    """What `module:function` names.

    Raises:
        ValueError: It names nothing.
    """
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name!r} names no function: {error}") from None


def run_page(blocks: list[tuple[str, int, str, str]], folder: str) -> None:
    """Run the python blocks of one page on this rank, in the order a reader meets them.

    Later blocks see what earlier ones have made, as a reader does, except those with names of
    their own.

    Args:
        blocks: Page, line, code, and the function that gives names, or nothing.
        folder: Where the blocks may write, for all ranks.
    """
    names: dict[str, Any] = {}
    before = Path.cwd()
    os.chdir(folder)
    try:
        for page, line, code, given in blocks:
            space = dict(load(given)()) if given else names
            try:
                prepare(code, space)
                # Empty lines before it make line numbers those of the page.
                compiled = compile("\n" * (line - 1) + code, page, "exec")
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(compiled, space)
            except Exception as error:
                raise AssertionError(f"{page}:{line}: the example fails") from error
    finally:
        os.chdir(before)


def _run_program(path: str, environment: dict[str, str], output: str) -> None:
    """What `python path` does, in a process that has imported torch already."""
    written = io.StringIO()
    status = 0
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
        try:
            os.environ.update(environment)
            os.chdir(Path(path).parent)
            sys.argv = [path]
            runpy.run_path(path, run_name="__main__")
        except BaseException:
            traceback.print_exc()
            status = 1
    Path(output).write_text(written.getvalue())
    os._exit(status)


def program(path: Path, num_ranks: int) -> list[str]:
    """Run a program as torchrun does on so many ranks, or without torchrun where it is 0.

    Processes are forked from one that has imported torch, which saves the seconds that takes.

    Args:
        path: The program.
        num_ranks: Ranks, or 0 for one process on its own.

    Returns:
        What each process wrote.

    Raises:
        AssertionError: A process failed, or did not end in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port = str(free_port())
    processes, outputs = [], []
    for rank in range(max(num_ranks, 1)):
        environment = {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        if num_ranks:
            environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
            environment |= {"WORLD_SIZE": str(num_ranks)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        output = path.with_suffix(f".{num_ranks}.{rank}.txt")
        process = context.Process(
            target=_run_program, args=(str(path), environment, str(output)), daemon=True
        )
        process.start()
        processes.append(process)
        outputs.append(output)
    deadline = time.monotonic() + TIMEOUT_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.1))
    late = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    for process in processes:
        if process.exitcode is None:
            process.kill()
    written = [output.read_text() if output.exists() else "" for output in outputs]
    failed = [rank for rank, process in enumerate(processes) if process.exitcode]
    if late or failed:
        raise AssertionError(f"ranks {failed} failed, {late} did not end:\n" + "\n".join(written))
    return written
