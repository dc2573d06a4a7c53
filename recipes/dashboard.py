"""What of Weights & Biases can be known before a run: the mode, the server, whether there is a key, whether it answers."""

from __future__ import annotations

import netrc
import os
import threading
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from recipes.config import WandbMode

PATIENCE = 5.0  # seconds for the server to answer at all


def wanted_mode(configured: WandbMode) -> WandbMode:
    """What `wandb.mode` means here: `auto` follows WANDB_MODE, else is online where there is a key and offline where not."""
    if configured is not WandbMode.auto:
        return configured
    said = os.environ.get("WANDB_MODE")
    if said in ("online", "offline", "disabled"):
        return WandbMode[said]
    return WandbMode.online if has_key() else WandbMode.offline


def has_key() -> bool:
    """Whether WANDB_API_KEY or the netrc file holds a key for the server; nothing is asked and nothing is sent."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urllib.parse.urlsplit(base_url()).hostname or ""
    for file in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        try:
            if file and netrc.netrc(str(Path(file).expanduser())).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def base_url() -> str:
    """The server that the client would talk to, by its environment and its settings files."""
    import wandb

    return str(wandb.setup(wandb.Settings(silent=True)).settings.base_url)


def answers(url: str, patience: float = PATIENCE) -> bool:
    """Whether a server speaks HTTP at `url`, whatever it says, within `patience` seconds. Proxies of the environment are used.

    In a thread: looking up a name has no time limit of its own.
    """
    heard = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(url, timeout=patience).close()
            heard.set()
        except urllib.error.HTTPError:
            heard.set()
        except (OSError, ValueError):
            pass

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(patience)
    return heard.is_set()
