"""What the class that a sharded module gets is to those who look at classes."""

from __future__ import annotations

import typing
from typing import Any

from torch import nn

from megatron_fsdp_v2.runtime.fsdp_module import FSDPModule, swap_class


class ReadsAnnotations(nn.Linear):
    """Resolves the annotations of every subclass, as models of transformers do."""

    seen: typing.ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ReadsAnnotations.seen = typing.get_type_hints(cls)


def test_annotations_of_a_sharded_class_can_be_resolved() -> None:
    module = ReadsAnnotations(2, 3)
    swap_class(module)
    assert isinstance(module, FSDPModule)
    assert "weight" in ReadsAnnotations.seen


def test_a_sharded_class_prints_as_the_class_it_was_and_its_module_as_sharded() -> None:
    module = nn.Sequential(nn.Linear(2, 3))
    swap_class(module[0])
    assert str(type(module[0])) == str(nn.Linear)
    assert "(0): FSDPLinear(" in str(module)
