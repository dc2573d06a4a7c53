"""What a run says to its user: one console, so that lines and a progress bar do not overwrite each other."""

from __future__ import annotations

from rich.console import Console

console = Console(highlight=False)


def say(text: str = "") -> None:
    """Prints lines as they are: no markup, no wrapping at the width of a terminal that is not there."""
    console.print(text, markup=False, soft_wrap=True)
