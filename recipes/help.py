"""What `k3 VERB --help` prints: the groups and keys with types, defaults and the comments of the dataclasses themselves."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from collections.abc import Iterable
from enum import Enum
from types import NoneType, UnionType
from typing import Any

from recipes.config import JOBS, Config, is_group, options
from recipes.errors import shown


def keys(sections: Iterable[str] | None = None, root: Config | None = None) -> str:
    """The table of groups and keys of some of the root's fields; None: those of training. Defaults are those of `root`."""
    wanted = list(sections if sections is not None else JOBS["pretrain"])
    lines = ["groups (GROUP=OPTION):"]
    lines += [f"  {group}={'|'.join(options(group))}" for group in wanted if is_group(group)]
    root = root or Config()
    types = typing.get_type_hints(Config)
    for name in wanted:
        if not hasattr(root, name):  # a recipe sets values of other sections
            continue
        value = getattr(root, name)
        lines.append("")
        if dataclasses.is_dataclass(value):
            lines.append(f"{name}:")
            lines += _rows(value, name + ".")
        else:
            lines.append(_row(name, types[name], value, _comments(Config).get(name, "")))
    return "\n".join(lines)


def _rows(owner: Any, prefix: str) -> list[str]:
    rows: list[str] = []
    types, comments = typing.get_type_hints(type(owner)), _comments(type(owner))
    for field in dataclasses.fields(owner):
        value = getattr(owner, field.name)
        if dataclasses.is_dataclass(value):
            rows += _rows(value, f"{prefix}{field.name}.")
        else:
            rows.append(_row(prefix + field.name, types[field.name], value, comments.get(field.name, "")))
    return rows


def _row(key: str, kind: Any, value: Any, comment: str) -> str:
    left = f"  {key}={_value(value)}"
    return f"{left + ' ':<38}{_type(kind) + ' ':<34}{comment}".rstrip()


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_value, value))}]"
    return repr(value) if isinstance(value, str) and value != value.strip() else shown(value)


def _type(kind: Any) -> str:
    if isinstance(kind, UnionType) or typing.get_origin(kind) is typing.Union:
        return "|".join("null" if k is NoneType else _type(k) for k in typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return f"[{_type(*typing.get_args(kind))},...]"
    if typing.get_origin(kind) is dict:
        return "names and values"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(m.name for m in kind)
    return {bool: "true|false", int: "int", float: "float", str: "text"}.get(kind, str(kind))


def _comments(cls: type) -> dict[str, str]:
    """The comment behind each field, read from the class's source: the one place where it is written."""
    lines = textwrap.dedent(inspect.getsource(cls)).splitlines()
    body = ast.parse("\n".join(lines)).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            rest = lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset or 0 :].strip()
            above = itertools.takewhile(lambda line: line.strip().startswith("#"), reversed(lines[: node.lineno - 1]))
            if rest.startswith("#"):
                found[node.target.id] = rest.lstrip("# ")
            elif said := [line.strip().lstrip("# ") for line in above]:  # where there was no room behind
                found[node.target.id] = " ".join(reversed(said))
    return found
