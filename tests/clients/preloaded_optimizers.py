"""Imports of the rank processes of the tests of optimizers before they are forked."""

import bitsandbytes.optim  # noqa: F401
import prodigyopt  # noqa: F401
import pytorch_optimizer  # noqa: F401
import schedulefree  # noqa: F401
import timm.optim  # noqa: F401
