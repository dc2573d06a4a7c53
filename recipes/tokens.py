"""The tokenizer of a phase that begins with a model: that model's own."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from data.tokenizer import Tokenizer, load_tokenizer
from parallel.together import from_first
from parallel.world import World
from recipes.config import Config
from recipes.errors import UserError


def tokenizer_of(cfg: Config, world: World) -> tuple[Tokenizer, str]:
    """(the tokenizer in `data.tokenizer`, a digest of its file). Raises UserError where it is another on some rank."""
    path = Path(cfg.data.tokenizer).expanduser()
    found = load_tokenizer(path, cfg.model.vocab_size)
    digest = blake2b(path.read_bytes(), digest_size=12).hexdigest()
    if digest != (first := from_first(world, lambda: digest)):
        raise UserError(f"data.tokenizer={path}: rank {world.rank} finds another file ({digest}) than rank 0 ({first})")
    return found, digest
