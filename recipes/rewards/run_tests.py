"""Inside the sandbox: a completion's code and the task's tests, in a process of their own. Only the standard library."""

from __future__ import annotations

import ast
import errno
import sys
import types
from typing import Any

_OURS = (errno.ENOSPC, errno.EFBIG, errno.EROFS, errno.EDQUOT, errno.ENOMEM)  # the sandbox's walls, not the tests' business


def run(request: dict[str, str]) -> dict[str, Any]:
    """{"passed", "tests", "why"}: each top-level assert of request["tests"] is one, and each function test_*.

    The code's names are the tests' own, and those of a module `solution`, too.
    """
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    space = module.__dict__
    if why := _attempt(lambda: exec(compile(request["code"], "solution.py", "exec"), space)):
        return {"passed": 0, "tests": 1, "why": why}
    passed = tests = 0
    first = ""
    before = set(space)
    for statement in ast.parse(request["tests"], "tests.py").body:
        part = compile(ast.Module([statement], []), "tests.py", "exec")
        why = _attempt(lambda part=part: exec(part, space))  # type: ignore[misc]
        if isinstance(statement, ast.Assert) or why:
            tests += 1
            passed += not why
        first = first or why
    for name in [name for name in space if name.startswith("test_") and name not in before and callable(space[name])]:
        why = _attempt(space[name])
        tests += 1
        passed += not why
        first = first or (f"{name}: {why}" if why else "")
    return {"passed": passed, "tests": tests, "why": first}


def _attempt(call: Any) -> str:
    """What went wrong, or nothing. What the walls of the sandbox stopped goes on up."""
    try:
        call()
    except (MemoryError, BlockingIOError):
        raise
    except BaseException as error:  # SystemExit, too
        if isinstance(error, OSError) and error.errno in _OURS:
            raise
        return f"{type(error).__name__}: {error}"[:300]
    return ""
