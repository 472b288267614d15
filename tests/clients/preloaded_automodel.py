"""Imports of the rank processes of the tests with automodel's recipes before they are forked."""

from tests.clients import automodel

automodel.start()
