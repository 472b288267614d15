"""Imports of the rank processes of the tests with Megatron-Bridge before they are forked."""

from tests.clients import bridge

bridge.start()
