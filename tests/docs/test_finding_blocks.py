"""What is wrong with a block is found: nothing passes because nobody looked."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import Block, blocks_in, use_of
from tests.docs.given import free_names, prepare
from tests.docs.running import load, program, run_page
from tests.docs.shell import check, check_flags, commands_of, typed_lines
from tests.docs.test_code_blocks import show_console
from tests.ranks import RankFailure, RankPools


def _block(text: str) -> Block:
    (block,) = blocks_in("page.md", text)
    return block


def test_blocks_are_found_with_their_lines_languages_and_comments() -> None:
    page = (
        "# Page\n\n```python\na = 1\n```\n\n<!-- output of: some:thing -->\n```text\nb\n```\n"
        "<!-- not run: lost, since words follow -->\nwords\n"
        "* item:\n\n  ~~~bash title=x\n  c\n  ~~~\n"
    )
    python, text, bash = blocks_in("page.md", page)
    assert (python.line, python.language, python.code) == (4, "python", "a = 1\n")
    assert (text.line, text.markers) == (9, {"output of": "some:thing"})
    assert (bash.language, bash.code, bash.markers) == ("bash", "c\n", {})
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
def test_a_block_is_run_by_its_language_or_its_comment(text: str, how: str) -> None:
    assert use_of(_block(text)).how == how


def test_an_example_that_fails_is_named_with_its_page_and_line(
    pools: RankPools, tmp_path: Path
) -> None:
    for code, said in (
        ("x = 1\ny = x / 0\n", "page.md.*, line 8"),
        ("fully_shard(model, mesh=mesh)\n", "nothing is called 'fully_shard'"),
        ("from megatron_fsdp_v2 import shard_fully\n", "shard_fully"),
        ("model.no_such_method()\n", "no_such_method"),
    ):
        with pytest.raises(RankFailure, match=said) as raised:
            pools(2).run(run_page, [("page.md", 7, code, "")], str(tmp_path))
        assert "page.md:7: the example fails" in str(raised.value)


def test_later_examples_see_what_earlier_ones_made_and_others_do_not(
    pools: RankPools, tmp_path: Path
) -> None:
    first, second = ("page.md", 1, "made = 3\n", ""), ("page.md", 9, "assert made == 3\n", "")
    pools(1).run(run_page, [first, second], str(tmp_path))
    with pytest.raises(RankFailure, match="nothing is called 'made'"):
        pools(1).run(run_page, [second], str(tmp_path))


def test_a_program_that_fails_on_one_rank_fails(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import os\nassert os.environ['RANK'] == '0', 'the other rank'\n")
    with pytest.raises(AssertionError, match="the other rank"):
        program(path, 2)
    with pytest.raises(AssertionError, match="KeyError: 'RANK'"):
        program(path, 0)


def test_names_that_code_reads_and_does_not_make_are_known() -> None:
    code = (
        "import a.b as c, d.e\nfor f in g:\n    h = [i for i in f]\n"
        "def j(k): return k + l\nprint(c, d)"
    )
    assert free_names(ast.parse(code)) == {"g", "l"}
    names: dict[str, Any] = {}
    prepare("build_model()", names)
    assert list(names) == ["build_model"]


def test_commands_are_what_the_shell_makes_of_a_script(tmp_path: Path) -> None:
    script = 'torchrun -m x --save "$CHECKPOINTS" \\\n  <your flags>  # comment\nsrun make a b\n'
    assert commands_of(script, tmp_path) == [
        ["torchrun", "-m", "x", "--save", "/shared/checkpoints", "..."],
        ["srun", "make", "a", "b"],
        ["make", "a", "b"],
    ]
    assert typed_lines("console", "$ a \\\n  b\nout\n$ c\n") == "a \\\n  b\nc\n"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("curl somewhere", "curl"),
        ("make test\nif", "syntax error"),
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
def test_a_command_that_would_be_rejected_is_found(script: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=said):
        for command in commands_of(script, tmp_path):
            check(command)


def test_flags_that_this_package_refuses_are_found() -> None:
    ours = ["--use-megatron-fsdp", "--use-fsdp-fully-shard-api"]
    with pytest.raises(AssertionError, match="--ckpt-format torch_dist cannot be used"):
        check_flags([*ours, "--data-parallel-sharding-strategy", "optim"])


def test_a_console_that_shows_something_else_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "$ megatron-fsdp-v2 plan --ranks 2 --model examples.plan_models:llama_8b"
    with pytest.raises(AssertionError):
        show_console(_block(f"```console\n{command}\nnothing\n```"), tmp_path, capsys)


def test_a_function_that_is_not_there_is_named() -> None:
    for name in ("tests.docs.outputs:nothing", "no_such_module:f", "words"):
        with pytest.raises(ValueError, match="names no function"):
            load(name)
