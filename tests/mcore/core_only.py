"""Functions for the ranks of a pool in which `megatron.training` cannot be imported."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.mcore.session import end_groups

_STACK = contextlib.ExitStack()
LOCAL = ["--transformer-impl", "local"]


def enter() -> Any:
    """Start a rehearsal without `megatron.training` on this rank; return the example."""
    example = start_permanent_rehearsal()
    multiprocessing.current_process().daemon = False
    torch.manual_seed(1)
    return example


def start_permanent_rehearsal() -> Any:
    """Start a permanent rehearsal in this process and those forked from it."""
    if "examples.megatron_core_loop" not in sys.modules:
        assert not [name for name in sys.modules if name.startswith("megatron")]
        # Python cannot import a module that is None.
        sys.modules["megatron.training"] = None  # type: ignore[assignment]
        from megatron_cpu_rehearsal import rehearse

        _STACK.enter_context(rehearse(LOCAL, into_parser=True))
    from examples import megatron_core_loop

    return megatron_core_loop


@contextlib.contextmanager
def _clean() -> Iterator[None]:
    """Reset Megatron's global state at the end, also after an exception."""
    from megatron.core import parallel_state

    import megatron_fsdp_v2_mcore

    try:
        yield
    finally:
        megatron_fsdp_v2_mcore.uninstall()
        end_groups(parallel_state)
    blocked = [name for name in sys.modules if name.startswith("megatron.training")]
    assert blocked == ["megatron.training"], blocked
    assert sys.modules["megatron.training"] is None


def train(options: dict[str, Any]) -> list[tuple[float | None, float]]:
    """Run the example on this rank. Collective over the pool."""
    example = enter()
    with _clean():
        history: list[tuple[float | None, float]] = example.train(example.Settings(**options))
        return history


def train_ddp_with_distributed_optimizer(*, is_enabled: bool) -> list[tuple[float | None, float]]:
    """Train with Megatron's own wrapper and optimizer, with this package enabled or not."""
    example = enter()
    import megatron_fsdp_v2_mcore

    with (
        _changed("DistributedDataParallelConfig", use_distributed_optimizer=True),
        _changed("OptimizerConfig", use_distributed_optimizer=True),
        _clean(),
    ):
        if is_enabled:
            megatron_fsdp_v2_mcore.enable()
        settings = example.Settings(iterations=3, ddp=True)
        history: list[tuple[float | None, float]] = example.train(settings)
        return history


def _changed(name: str, **fields: Any) -> Any:
    """Change fields of one of the example's configurations."""
    example = enter()
    make = getattr(example, name)
    return mock.patch.object(example, name, lambda **options: make(**{**options, **fields}))


def save_and_continue(options: dict[str, Any], folder: str) -> tuple[list[Any], list[Any]]:
    """Save during a training; return its remaining history and that of a resumed training."""
    example = enter()
    from megatron_fsdp_v2 import checkpoint

    settings = example.Settings(iterations=2, **options)

    def start() -> Any:
        example.start(settings)
        model = example.build(settings)
        return model, example.build_optimizer(settings, model), example.batches()

    with _clean():
        model, optimizer, data = start()
        example.run(settings, model, optimizer, data)
        checkpoint.save(folder, model.module, optimizer.optimizer)
        uninterrupted = example.run(settings, model, optimizer, data)
    with _clean():
        model, optimizer, data = start()
        for _ in range(2 * settings.micro_batches):
            next(data)
        checkpoint.load(folder, model.module, optimizer.optimizer)
        return uninterrupted, example.run(settings, model, optimizer, data)


def train_quickstart(options: dict[str, Any]) -> list[tuple[float | None, float]]:
    """Run the example with torch's Adam over the wrapped model's parameters.

    Args:
        options: Settings of the example, and `groups`: names of the process groups passed to the
            wrapper, or None.
    """
    example = enter()
    names = options.pop("groups", None)
    settings = example.Settings(iterations=4, micro_batches=1, **options)
    with _clean():
        example.start(settings)
        with contextlib.nullcontext() if names is None else _wrapping(*names):
            model = example.build(settings)
        adam = torch.optim.Adam(model.parameters(), lr=1e-3)

        def step() -> tuple[bool, float, None]:
            for param in model.parameters() if settings.ddp else ():
                param.grad = param.main_grad
            adam.step()
            return True, 0.0, None

        optimizer = SimpleNamespace(zero_grad=adam.zero_grad, step=step)
        history: list[tuple[float | None, float]] = example.run(
            settings, model, optimizer, example.batches()
        )
        return history


def _wrapping(*names: str) -> Any:
    """Pass only these process groups to the example's wrapper."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    import megatron_fsdp_v2_mcore

    every = ProcessGroupCollection.use_mpu_process_groups()
    groups = ProcessGroupCollection(**{name: getattr(every, name) for name in names})
    wrap = functools.partial(megatron_fsdp_v2_mcore.FullyShardedDataParallel, pg_collection=groups)
    return mock.patch.object(megatron_fsdp_v2_mcore, "FullyShardedDataParallel", wrap)


def errors() -> dict[str, str]:
    """Return the error of each incorrect script, by name of the mistake."""
    example = enter()
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megatron_fsdp_v2_mcore

    def with_field(name: str, value: Any) -> Any:
        def make(**options: Any) -> Any:
            config = TransformerConfig(**options)
            setattr(config, name, value)
            return config

        return mock.patch.object(example, "TransformerConfig", make)

    cases = {
        "nothing wrong": contextlib.nullcontext(),
        "no call": mock.patch.object(megatron_fsdp_v2_mcore, "enable", lambda: None),
        "another wrapper": _changed("DistributedDataParallelConfig", use_megatron_fsdp=False),
        "late": with_field("delay_wgrad_compute", True),
        "offload": with_field("cpu_offloading_weights", True),
        "plain optimizer": _changed("OptimizerConfig", use_distributed_optimizer=False),
        "sgd": _changed("OptimizerConfig", optimizer="sgd"),
    }
    found: dict[str, str] = {}
    for what, change in cases.items():
        try:
            with change, _clean():
                example.start(example.Settings())
                example.build_optimizer(example.Settings(), example.build(example.Settings()))
        except (RuntimeError, ValueError) as error:
            found[what] = f"{type(error).__name__}: {error}"
    return found


def warnings_of(**fields: Any) -> list[str]:
    """Return the warnings of a script that sets these fields of its configuration."""
    example = enter()
    change = _changed("DistributedDataParallelConfig", **fields)
    with change, _clean(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        example.start(example.Settings())
        example.build(example.Settings())
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


def missing_groups() -> dict[str, str]:
    """Return the error about missing process groups, by model."""
    example = enter()
    found = {}
    for what, options, names in (
        ("tensor", {"tensor_parallel": 2}, ("dp", "dp_cp")),
        ("data", {}, ("tp",)),
        ("experts", {"expert_parallel": 2}, ("dp", "dp_cp", "tp")),
    ):
        with _clean():
            settings = example.Settings(**options)
            example.start(settings)
            try:
                with _wrapping(*names):
                    example.build(settings)
            except ValueError as error:
                found[what] = str(error)
    return found


def parsed(words: list[str]) -> str:
    """Parse flags with the example's parser."""
    example = enter()
    with mock.patch.object(sys, "argv", ["example", *words]):
        return str(example.parse())


def train_page(blocks: list[str]) -> list[tuple[float | None, float]]:
    """Wrap models with the Python blocks of a page, and train the model of the first block.

    Args:
        blocks: Code that uses a `config` and a `module`.
    """
    example = enter()
    with _clean():
        settings = example.Settings(iterations=2)
        example.start(settings)
        spaces: list[dict[str, Any]] = []
        for code in blocks:
            module = example.build_module(settings)
            known = spaces[0] if spaces else {}
            spaces.append({**known, "config": module.config, "module": module})
            exec(compile(code, "page", "exec"), spaces[-1])
        first = spaces[0]
        history: list[tuple[float | None, float]] = example.run(
            settings, first["model"], first["optimizer"], example.batches()
        )
        return history
