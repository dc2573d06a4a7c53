"""What a run says to its user: one console, so that lines and a progress bar do not overwrite each other."""

from __future__ import annotations

import logging
import warnings

from rich.console import Console

console = Console(highlight=False)


def say(text: str = "") -> None:
    """Prints lines as they are: no markup, no wrapping at the width of a terminal that is not there."""
    console.print(text, markup=False, soft_wrap=True)


def show_logs() -> None:
    """Shows what the rooms below log (which kernel runs, what data preparation does), and not what their libraries warn of."""
    for name in ("k3", "data", "parallel", "recipes"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.handlers = [_Says()]
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")  # "Transformer Engine and Apex are not installed"
    warnings.filterwarnings("ignore", category=SyntaxWarning)  # megatron-core's, when it is compiled for the first time


class _Says(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())
