"""Imports of the rank processes of the tests of torchao before they are forked."""

import torchao.float8
import torchao.optim  # noqa: F401
