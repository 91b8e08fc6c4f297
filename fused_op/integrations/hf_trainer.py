"""``transformers.Trainer``: convert the model by one argument.

    Trainer(model, args, ..., callbacks=[FusedNorms()])

With ``accelerate`` alone, call ``fused_op.convert(model)`` before ``accelerator.prepare(model)``.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from transformers import TrainerCallback

from ..convert import Report, Select, convert
from ..modules import CONVERTED

logger = logging.getLogger(__name__)


class FusedNorms(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """A callback that converts the norms of the model when the trainer is made.

    That is before the model is wrapped for several processes, and before the optimizer is made.
    The report of :func:`fused_op.convert` is in ``report``, and is logged.

    Args:
        include: as in :func:`fused_op.convert`.
        exclude: as in :func:`fused_op.convert`.
    """

    def __init__(self, *, include: Select = None, exclude: Select = None) -> None:
        """See the class."""
        self.report: Report | None = None
        self._include, self._exclude = include, exclude

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Convert the model that the trainer was made with."""
        if model is not None:
            self._convert(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Convert the model of a callback that was added later, or a new one of ``model_init``."""
        if model is not None and (self.report is None or not _is_converted(model)):
            self._convert(model)

    def _convert(self, model: nn.Module) -> None:
        self.report = convert(model, include=self._include, exclude=self._exclude)
        logger.info("fused_op: %s", self.report)


def _is_converted(model: nn.Module) -> bool:
    return any(CONVERTED in module.__dict__ for module in model.modules())
