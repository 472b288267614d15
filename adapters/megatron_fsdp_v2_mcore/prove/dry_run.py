"""Runs a shell script without the programs that it starts: a dry run.

The script and every process that descends from it are traced. The kernel stops a process when it
has loaded a program, before the program's first instruction. Shells, and programs that only read
and print (`HARMLESS`), continue. Every other program is recorded, with its arguments and its
environment, and exits with status 0. Neither the search path nor an absolute path, `exec`, `env -i`
or a daemon changes this. The kernel kills all traced processes when the tracing one ends, however
it ends.

A tracing process receives the signals of all its children. This file is therefore executed as a
program of its own, which imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

SHELLS = frozenset({"bash", "dash", "ksh", "ksh93", "mksh", "sh", "zsh"})
"""Shells run commands of a `-c`, of standard input, and of files with one of `_SUFFIXES`."""
_SUFFIXES = (".sh", ".bash")
_WITH_VALUE = {"-o", "+o", "-O", "+O", "--rcfile", "--init-file"}
"""Options of shells that have a value."""

_HARMLESS = """
[ arch awk b2sum base64 basename bc cat cksum cmp column comm cut date df diff dirname du echo egrep
env expand expr false fgrep file fmt fold free gawk getconf getent grep groups head hostid hostname
id jq join locale logname ls lscpu mawk md5sum mkdir mktemp nl nproc numfmt od original-awk paste
pathchk pr printenv printf ps pwd readlink realpath rev sed seq sha1sum sha256sum shuf sleep sort
stat tac tail tee test touch tr true tty uname uniq uptime users wc which who whoami xargs xxd
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Names of programs that run. What they start is stopped like what the script starts."""
_MULTI_CALL = {"busybox", "coreutils"}
"""Programs that do what the name of their call says."""

CANNOT_TRACE = 125
"""Exit code if this machine does not allow tracing. The script was not started."""
_MOST_RECORDS = 1000
"""Ends scripts that repeat a program until it prints something."""
_GRACE_S = 2
"""Time for processes in the background after the script has ended."""

_TRACEME, _CONT, _SETOPTIONS = 0, 7, 0x4200
_EVENT_EXEC = 4
_FORK, _VFORK, _CLONE, _EXEC, _EXITKILL = 1 << 1, 1 << 2, 1 << 3, 1 << _EVENT_EXEC, 1 << 20
_ALL_CHILDREN = 0x40000000
"""`__WALL` of `waitpid`: children of every kind of clone."""
_NOT_DELIVERED = {signal.SIGTRAP, signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
"""Signals of tracing, and those that would stop a process."""

_EXIT = {
    "x86_64": "31ff b8e7000000 0f05 0f0b",
    "aarch64": "000080d2 c80b80d2 010000d4 00000000",
}
"""Machine code of `exit_group(0)`, and of an invalid instruction in case it returns."""


def main(record: str, *words: str) -> NoReturn:
    """Run a program, and append what it would start to a file, one JSON object a line.

    Args:
        record: Path of the file.
        *words: The program and its arguments.
    """
    process = os.fork()
    if process == 0:
        os.setsid()
        if _ptrace(_TRACEME, 0):
            os.kill(os.getpid(), signal.SIGSTOP)
            os.execvp(words[0], words)
        os._exit(CANNOT_TRACE)
    _, status = os.waitpid(process, 0)
    options = _FORK | _VFORK | _CLONE | _EXEC | _EXITKILL
    if not os.WIFSTOPPED(status):
        sys.exit(CANNOT_TRACE)
    if not _ptrace(_SETOPTIONS, process, options):
        os.kill(process, signal.SIGKILL)
        sys.exit(CANNOT_TRACE)
    _ptrace(_CONT, process)
    num_records = 0
    is_script = True
    while num_records < _MOST_RECORDS:
        try:
            pid, status = os.waitpid(-1, _ALL_CHILDREN)
        except ChildProcessError:
            break
        if not os.WIFSTOPPED(status):
            if pid == process:
                signal.alarm(_GRACE_S)
            continue
        if status >> 16 == _EVENT_EXEC:
            # The first program is the shell of the script, whatever the name of its file.
            if not (is_script or _is_harmless(pid)):
                with contextlib.suppress(OSError):
                    _append(record, pid)
                    num_records += 1
                _end(pid)
            is_script = False
        number = os.WSTOPSIG(status)
        # Fails if the process has been killed in the meantime.
        _ptrace(_CONT, pid, 0 if number in _NOT_DELIVERED else number)
    sys.exit(0)


def _ptrace(request: int, pid: int, data: int = 0) -> bool:
    call = ctypes.CDLL(None).ptrace
    call.argtypes = ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p
    return bool(call(request, pid, None, data) == 0)


def _is_harmless(pid: int) -> bool:
    try:
        name = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
        words = _strings(pid, "cmdline")
    except OSError:
        # A program that this user must not read.
        return False
    if name in _MULTI_CALL and words:
        name = os.path.basename(words[0])
    return name in HARMLESS or (name in SHELLS and _is_harmless_script(words))


def _is_harmless_script(words: list[str]) -> bool:
    """Whether a shell's command line runs no file that may be an installed program."""
    options = iter(words[1:])
    for word in options:
        if word in _WITH_VALUE:
            next(options, None)
        elif not word.startswith(("-", "+")):
            name = os.path.basename(word)
            return name.endswith(_SUFFIXES) or name in HARMLESS
        elif not word.startswith("--") and "c" in word:
            return True
    return True


def _append(record: str, pid: int) -> None:
    words, variables = _strings(pid, "cmdline"), _strings(pid, "environ")
    environment = dict(each.split("=", 1) for each in variables if "=" in each)
    with open(record, "a") as file:
        file.write(json.dumps([words, environment]) + "\n")


def _strings(pid: int, name: str) -> list[str]:
    content = os.fsdecode(Path(f"/proc/{pid}/{name}").read_bytes())
    # Every string ends with a null character; some are empty.
    return content.split("\0")[:-1]


def _end(pid: int) -> None:
    """Let a process that has loaded a program exit with status 0, or kill it."""
    try:
        code = bytes.fromhex(_EXIT[os.uname().machine])
        entry = int(Path(f"/proc/{pid}/syscall").read_text().split()[-1], 16)
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(entry)
            memory.write(code)
    except (KeyError, OSError, ValueError):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
