"""Faulty blocks are detected: a block that cannot be checked is an error."""

from __future__ import annotations

import pytest

from tests.docs.blocks import Block, blocks_in, use_of
from tests.docs.shell import check, commands_of


def _block(text: str) -> Block:
    (block,) = blocks_in("page.md", text)
    return block


def test_block_that_is_not_closed_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"page\.md:2: the block is not closed"):
        blocks_in("page.md", "```python\na = 1\n")


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("```\nwords\n```", "unknown"),
        ("```text\nwords\n```", "unknown"),
        ("```rust\nfn main() {}\n```", "unknown"),
        ("```python\ndef (\n```", "unknown"),
        ("<!-- not run: -->\n```python\npass\n```", "unknown"),
        ("<!-- skip: it is slow -->\n```python\npass\n```", "unknown"),
        ("<!-- not run: needs four nodes of a cluster -->\n```bash\nsrun x\n```", "not run"),
        ("```python\ndist.init_process_group()\n```", "program"),
        ("```python\nprint(1)\n```", "python"),
        ("```console\n$ make test\n```", "shell"),
        ("```bash\n--bf16 ...\n```", "flags"),
        ("```json\n{}\n```", "data"),
    ],
)
def test_language_or_comment_determines_the_check_of_a_block(text: str, how: str) -> None:
    assert use_of(_block(text)).how == how


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("curl somewhere", "curl"),
        ("make 'test", "No closing quotation"),
        ('torchrun "$UNSET_VARIABLE"', "UNSET_VARIABLE"),
        ("make no-such-target", "no-such-target"),
        ("make pretrain NOSUCH=1", "NOSUCH"),
        ("torchrun --no-such-option x.py", "unrecognized|required|no-such-option"),
        ("torchrun tests/no_such_file.py", "no_such_file"),
        ("torchrun -m megatron_fsdp_v2_mcore.no_such_module", "no_such_module"),
        ("python -m megatron_fsdp_v2_mcore.pretrain_gpt --no-such-flag", "no-such-flag"),
        ("megatron-fsdp-v2 no-such-command", "no-such-command"),
        ("megatron-fsdp-v2 ckpt verify PATH --no-such-option", "no-such-option"),
        ("pytest tests/no_such_folder", "no_such_folder"),
    ],
)
def test_invalid_commands_are_detected(script: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        for command in commands_of(script):
            check(command)
