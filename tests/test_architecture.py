"""The rules of the house: imports point downwards, files fit in a head, nothing committed names one machine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What each package may import of the others.
BELOW: dict[str, set[str]] = {
    "kernels": set(),
    "parallel": {"kernels"},
    "k3": {"kernels", "parallel"},
    "data": {"kernels", "parallel"},
    "optim": {"kernels", "parallel", "k3"},
    "slurm": {"kernels", "parallel", "k3"},
    "recipes": {"kernels", "parallel", "k3", "data", "optim", "slurm"},
}
CONFIG_ONLY = {"recipes/config.py", "recipes/errors.py", "recipes/cli.py", "recipes/launch.py", "recipes/compose.py"}
CONFIG_ONLY |= {"recipes/overrides.py", "recipes/validate.py", "recipes/help.py", "recipes/placement.py"}
CONFIG_ONLY |= {f"{package}/config.py" for package in ("data", "k3", "optim", "parallel", "slurm")}
CONFIG_ONLY |= {"recipes/rl/config.py", "recipes/rewards/config.py", "recipes/coming.py"}
CONFIG_ONLY |= {"recipes/phases/__init__.py", "recipes/phases/rules.py"}
CONFIG_ONLY |= {"data/tasks/config.py", "data/tasks/presets.py", "k3/qat.py"}
CONFIG_ONLY |= {"k3/activations.py", "k3/presets.py", "k3/low_precision.py", "recipes/precision.py"}
MOST_LINES = 500


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


SOURCES = [path for package in BELOW for path in modules(package)]


def imported(tree: ast.AST) -> Iterator[str]:
    """Every dotted module that any statement in `tree` imports, inside functions and under TYPE_CHECKING, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def unguarded(body: list[ast.stmt]) -> Iterator[str]:
    """What importing a module imports for sure: not inside a try, a function or TYPE_CHECKING."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported(node)
        elif isinstance(node, ast.ClassDef | ast.With):
            yield from unguarded(node.body)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from unguarded(node.body + node.orelse)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_imports_point_downwards(path: Path):
    package = path.relative_to(ROOT).parts[0]
    tops = {module.split(".")[0] for module in imported(ast.parse(path.read_text()))}
    wrong = (tops & (set(BELOW) | {"tests"})) - BELOW[package] - {package}
    assert not wrong, (
        f"{name(path)} imports {', '.join(sorted(wrong))}; {package} may import {sorted(BELOW[package]) or 'no package'}"
    )


@pytest.mark.parametrize("path", modules("kernels"), ids=name)
def test_kernels_need_torch_alone(path: Path):
    tops = {module.split(".")[0] for module in unguarded(ast.parse(path.read_text()).body)}
    foreign = tops - set(sys.stdlib_module_names) - {"torch", "kernels"}
    assert not foreign, f"{name(path)} needs {', '.join(sorted(foreign))}; import optional backends inside a try or a function"


def test_recipes_are_never_imported_by_relative_path():
    relative = [name(p) for p in SOURCES for n in ast.walk(ast.parse(p.read_text())) if isinstance(n, ast.ImportFrom) and n.level]
    assert not relative, "relative imports escape the rules above"


@pytest.mark.parametrize("path", sorted(CONFIG_ONLY))
def test_configuration_needs_no_torch(path: str):
    tops = {module.split(".")[0] for module in unguarded(ast.parse((ROOT / path).read_text()).body)}
    assert not tops & {"torch", "megatron"}, f"{path} is read by help and dry runs; import torch where it is used"


@pytest.mark.parametrize("module", ["data", "data.tasks", "data.chat", "data.sft", "recipes.rewards.served"])
def test_data_and_rewards_start_without_torch(module: str):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0, "workers of rewards would load it, too"


def test_no_file_is_too_long():
    files = [p for p in [*SOURCES, *modules("tests")] if len(p.read_text().splitlines()) > MOST_LINES]
    assert not files, f"over {MOST_LINES} lines: {', '.join(map(name, files))}"


def test_every_package_is_installed():
    found = {p.parent.name for p in ROOT.glob("*/__init__.py")} - {"tests"}
    listed = set(re.findall(r'"(\w+)\*"', (ROOT / "pyproject.toml").read_text()))
    assert found == listed == set(BELOW)


# A home or work folder, an address of a package registry, a download address in a requirement.
MACHINE = re.compile(
    r"(?<![\w.$}\"'~])/(home|root|Users|work|mnt|scratch)/\w|https?://[\w.-]*(pypi|files\.pythonhosted|simple)\b|--(extra-)?index-url|\bfile://"
)
BUILD_FILES = (
    "Makefile",
    "install.sh",
    "constraints.txt",
    "pyproject.toml",
    ".ci/run",
    ".gitignore",
    ".python-version",
    "README.md",
)


@pytest.mark.parametrize("path", BUILD_FILES)
def test_build_files_name_no_machine(path: str):
    lines = [line for line in (ROOT / path).read_text().splitlines() if MACHINE.search(line)]
    assert not lines, f"{path} holds a path of one machine or the address of a registry: {lines}"


def test_constraints_are_exact_and_hold_every_dependency():
    import tomllib

    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9._-]*==[\w.]+", line) for line in lines)
    pinned = {re.sub(r"[-_.]+", "-", line.split("==")[0]) for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"] + project["optional-dependencies"]["test"]:
        wanted = re.sub(r"[-_.]+", "-", re.split(r"[<>=\[;]", requirement)[0].strip().lower())
        assert wanted in pinned, f"{requirement} has no exact version in constraints.txt"
