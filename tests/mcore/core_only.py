"""What runs on the ranks of a pool in which `megatron.training` cannot be imported."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

_STACK = contextlib.ExitStack()


def enter() -> Any:
    """Make this rank rehearse without `megatron.training`, for good; return the example."""
    if "examples.megatron_core_loop" not in sys.modules:
        assert not [name for name in sys.modules if name.startswith("megatron")]
        # To Python a module that is None cannot be imported.
        sys.modules["megatron.training"] = None  # type: ignore[assignment]
        multiprocessing.current_process().daemon = False
        from megatron_fsdp_v2_mcore.rehearsal import rehearse

        _STACK.enter_context(rehearse([], into_parser=True))
    torch.manual_seed(1)
    from examples import megatron_core_loop

    return megatron_core_loop


@contextlib.contextmanager
def _clean() -> Iterator[None]:
    """Leave no trace in Megatron's globals, whatever happens."""
    from megatron.core import parallel_state

    import megatron_fsdp_v2_mcore

    try:
        yield
    finally:
        megatron_fsdp_v2_mcore.uninstall()
        dist.barrier()
        parallel_state.destroy_model_parallel()
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        gc.collect()
    blocked = [name for name in sys.modules if name.startswith("megatron.training")]
    assert blocked == ["megatron.training"], blocked
    assert sys.modules["megatron.training"] is None


def train(options: dict[str, Any]) -> list[tuple[float | None, float]]:
    """Run the example on this rank; every rank of the pool has to."""
    example = enter()
    with _clean():
        history: list[tuple[float | None, float]] = example.train(example.Settings(**options))
        return history


def train_ddp_with_distributed_optimizer(*, is_enabled: bool) -> list[tuple[float | None, float]]:
    """Megatron's own wrapper and optimizer, with this package enabled or not."""
    example = enter()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    import megatron_fsdp_v2_mcore

    def distributed(make: Any) -> Any:
        return lambda **options: make(**{**options, "use_distributed_optimizer": True})

    example.DistributedDataParallelConfig = distributed(DistributedDataParallelConfig)
    example.OptimizerConfig = distributed(OptimizerConfig)
    try:
        with _clean():
            if is_enabled:
                megatron_fsdp_v2_mcore.enable()
            history: list[tuple[float | None, float]] = example.train(
                example.Settings(iterations=3, ddp=True)
            )
            return history
    finally:
        example.DistributedDataParallelConfig = DistributedDataParallelConfig
        example.OptimizerConfig = OptimizerConfig


def save_and_go_on(options: dict[str, Any], folder: str) -> tuple[list[Any], list[Any]]:
    """Save in the middle of a training; what it saw after, and what one saw that loaded that."""
    example = enter()
    from megatron_fsdp_v2 import checkpoint

    settings = example.Settings(iterations=2, **options)
    with _clean():
        example.start(settings)
        model, data = example.build(settings), example.batches()
        optimizer = example.build_optimizer(settings, model)
        example.run(settings, model, optimizer, data)
        checkpoint.save(folder, model.module, optimizer.optimizer)
        uninterrupted = example.run(settings, model, optimizer, data)
    with _clean():
        example.start(settings)
        model, data = example.build(settings), example.batches()
        optimizer = example.build_optimizer(settings, model)
        for _ in range(2 * settings.micro_batches):
            next(data)
        checkpoint.load(folder, model.module, optimizer.optimizer)
        return uninterrupted, example.run(settings, model, optimizer, data)


def train_quickstart(options: dict[str, Any]) -> list[float]:
    """A loop as simple as can be: torch's Adam over the wrapped model's parameters.

    Args:
        options: `groups`: names of the process groups given to the wrapper, or None; and those
            of the example.
    """
    example = enter()
    names = options.pop("groups", None)
    with _clean():
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.process_groups_config import ProcessGroupCollection

        import megatron_fsdp_v2_mcore

        settings = example.Settings(**options)
        example.start(settings)
        if settings.ddp:
            model = example.build(settings)
        else:
            wrap, groups = megatron_fsdp_v2_mcore.FullyShardedDataParallel, None
            if names is not None:
                every = ProcessGroupCollection.use_mpu_process_groups()
                groups = ProcessGroupCollection(**{name: getattr(every, name) for name in names})
            with _wrapping(groups):
                model = example.build(settings)
            assert isinstance(model, wrap)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        data, losses = example.batches(), []
        model.config.finalize_model_grads_func = None
        for _ in range(4):
            optimizer.zero_grad()
            model.zero_grad_buffer()
            reduced = get_forward_backward_func()(
                forward_step_func=example.forward_step,
                data_iterator=data,
                model=model,
                num_microbatches=1,
                seq_length=example.SEQUENCE,
                micro_batch_size=example.MICRO_BATCH,
                decoder_seq_length=example.SEQUENCE,
                forward_only=False,
            )
            finalize_model_grads([model])
            if settings.ddp:
                for param in model.parameters():
                    param.grad = param.main_grad
            optimizer.step()
            losses.append(float(reduced[0]["lm loss"]))
        return losses


@contextlib.contextmanager
def _wrapping(groups: Any) -> Iterator[None]:
    """Have the example's wrapper given process groups."""
    import megatron_fsdp_v2_mcore

    original = megatron_fsdp_v2_mcore.FullyShardedDataParallel
    if groups is None:
        yield
        return

    def wrap(*args: Any, **kwargs: Any) -> Any:
        return original(*args, pg_collection=groups, **kwargs)

    megatron_fsdp_v2_mcore.FullyShardedDataParallel = wrap  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del megatron_fsdp_v2_mcore.FullyShardedDataParallel


def errors() -> dict[str, str]:
    """What a script is told that does it wrongly, by what is wrong."""
    example = enter()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megatron_fsdp_v2_mcore

    def with_field(name: str, value: Any) -> Any:
        def make(**options: Any) -> Any:
            config = TransformerConfig(**options)
            setattr(config, name, value)
            return config

        return make

    def changed(make: Any, **other: Any) -> Any:
        return lambda **options: make(**{**options, **other})

    wrapper = changed(DistributedDataParallelConfig, use_megatron_fsdp=False)
    plain = changed(OptimizerConfig, use_distributed_optimizer=False)
    sgd = changed(OptimizerConfig, optimizer="sgd")
    cases = {
        "nothing wrong": (example, "VOCABULARY", example.VOCABULARY),
        "no call": (megatron_fsdp_v2_mcore, "enable", lambda: None),
        "another wrapper": (example, "DistributedDataParallelConfig", wrapper),
        "fp8": (example, "TransformerConfig", with_field("fp8", "hybrid")),
        "late": (example, "TransformerConfig", with_field("delay_wgrad_compute", True)),
        "offload": (example, "TransformerConfig", with_field("cpu_offloading_weights", True)),
        "plain optimizer": (example, "OptimizerConfig", plain),
        "sgd": (example, "OptimizerConfig", sgd),
    }
    found: dict[str, str] = {}
    for what, (owner, name, value) in cases.items():
        original = getattr(owner, name)
        setattr(owner, name, value)
        try:
            with _clean():
                example.start(example.Settings())
                example.build_optimizer(example.Settings(), example.build(example.Settings()))
        except (RuntimeError, ValueError) as error:
            found[what] = f"{type(error).__name__}: {error}"
        finally:
            setattr(owner, name, original)
    return found


def warnings_of(**fields: Any) -> list[str]:
    """What a script is warned of that sets these fields of its configuration."""
    example = enter()
    original = example.DistributedDataParallelConfig
    example.DistributedDataParallelConfig = lambda **options: original(**{**options, **fields})
    try:
        with _clean(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            example.start(example.Settings())
            example.build(example.Settings())
    finally:
        example.DistributedDataParallelConfig = original
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


def missing_groups() -> dict[str, str]:
    """What is said of process groups that a model needs and is not given, by the model."""
    example = enter()
    found = {}
    for what, options, names in (
        ("tensor", {"tensor_parallel": 2}, ("dp", "dp_cp")),
        ("data", {}, ("tp",)),
        ("experts", {"expert_parallel": 2}, ("dp", "dp_cp", "tp")),
    ):
        with _clean():
            from megatron.core.process_groups_config import ProcessGroupCollection

            settings = example.Settings(**options)
            example.start(settings)
            every = ProcessGroupCollection.use_mpu_process_groups()
            groups = ProcessGroupCollection(**{name: getattr(every, name) for name in names})
            try:
                with _wrapping(groups):
                    example.build(settings)
            except ValueError as error:
                found[what] = str(error)
    return found


def train_page(blocks: list[str]) -> list[tuple[float | None, float]]:
    """Wrap as the python blocks of a page do, and train what the first one made.

    Args:
        blocks: Code that finds a `config` and a `module`.
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
