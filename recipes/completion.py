"""`eval "$(k3 completion bash)"`: verbs, keys, and the values of groups and switches, told without importing torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

from recipes.errors import UserError

SCRIPTS = {
    "bash": r"""_k3() {
    local - IFS=$'\n' line=${COMP_LINE:0:COMP_POINT}
    set -f
    local before=${line% *} word=${line##* }
    COMPREPLY=($(k3 completion words -- ${before// /$'\n'} "$word" 2>/dev/null))
    # readline cuts words at = as well: it wants what comes behind
    case $word in *=*) COMPREPLY=("${COMPREPLY[@]#"${word%%=*}="}") ;; esac
    case ${COMPREPLY[0]-} in *=) compopt -o nospace ;; esac
}
complete -F _k3 k3
""",
    "zsh": "autoload -U +X compinit && compinit; autoload -U +X bashcompinit && bashcompinit\n",
}
SCRIPTS["zsh"] += SCRIPTS["bash"]


def run(words: Sequence[str]) -> int:
    """`k3 completion bash|zsh` prints a script; `k3 completion words -- k3 WORDS...` what it asks for."""
    if words[:2] == ["words", "--"]:
        print("\n".join(candidates(words[3:])))
        return 0
    if len(words) != 1 or words[0] not in SCRIPTS:
        raise UserError(f"completion {' '.join(words)}: give one of {', '.join(SCRIPTS)}")
    print(SCRIPTS[words[0]], end="")
    return 0


def candidates(words: Sequence[str]) -> list[str]:
    """What may stand for the last of the words behind `k3`, of which there may be a beginning or nothing."""
    from recipes.cli import BENCHES, VERBS

    *typed, begun = words or [""]
    options: Iterator[str] = iter(())
    if not typed or typed[0] == "help":
        options = iter(VERBS)
    elif typed[0] == "bench":
        options = iter((*BENCHES, *(f"{key}=" for bench in BENCHES.values() for key in bench.keys)))
    elif typed[0] in VERBS:
        options = _keys(VERBS[typed[0]].sections, begun)
    return sorted(option for option in options if option.startswith(begun))


def _keys(sections: Sequence[str] | None, begun: str) -> Iterator[str]:
    from recipes.config import FILES, GROUPS, Config, leaves, options

    inside = lambda key: sections is None or key.split(".", 1)[0] in sections
    for key, value in leaves(Config()):
        if inside(key):
            yield f"{key}="
            if begun.startswith(f"{key}="):
                if isinstance(value, Enum):
                    yield from (f"{key}={option.name}" for option in type(value))
                elif isinstance(value, bool):
                    yield from (f"{key}=true", f"{key}=false")
    for group in (*GROUPS, *FILES):
        if inside(group):
            yield f"{group}="
            if begun.startswith(f"{group}="):
                yield from (f"{group}={option}" for option in options(group))
