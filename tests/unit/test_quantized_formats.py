"""Which Transformer Engine the formats of quantized weights are for."""

from __future__ import annotations

import sys
import types

import pytest

from megatron_fsdp_v2_mcore.formats import register_formats, registering


@pytest.fixture(autouse=True)
def _anew() -> None:
    registering._register.cache_clear()


def test_without_transformer_engine_there_is_nothing_to_register(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert register_formats() is False


def test_an_untested_version_is_said_and_what_it_lacks_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its package is there and has no tensors that are known."""
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    ours = f"{registering.__package__}."
    for name in [name for name in sys.modules if name.startswith(ours)]:
        if name != registering.__name__:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(registering, "_version", lambda: "3.1.0")
    untested = r"tested with Transformer Engine 2\.20, and 3\.1\.0 is installed"
    lacking = r"3\.1\.0 has not what quantized weights are known by here"
    with pytest.warns(UserWarning, match=untested), pytest.raises(RuntimeError, match=lacking):
        register_formats()
