"""Commands of `megatron-fsdp-v2`, called in this process."""

from __future__ import annotations

import pytest

from megatron_fsdp_v2_cli import main


def called(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Call `megatron-fsdp-v2`; return its exit code, standard output and standard error."""
    try:
        status = main([str(word) for word in words])
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    said = capsys.readouterr()
    return status, said.out, said.err
