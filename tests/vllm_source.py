"""A release of vLLM as a reader: the installed one is imported and inspected, another is read as source.

The other release is a CUDA build, which cannot be imported on most machines; its wheel is fetched once, and only the
files that are asked for are kept.
"""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from vllm_dflash.plugin import installed_vllm
from vllm_dflash.targets import cache_folder

DOWNLOAD_SECONDS = 600  # 336 MB; ten seconds on a good line


class Source:
    """A release of vLLM as its source shows it; nothing of it is imported.

    Args:
        version: for messages.
        folder: the folder that holds the package `vllm`.
    """

    def __init__(self, version: str, folder: Path) -> None:
        self.version, self.folder = version, folder
        self.trees: dict[str, ast.Module] = {}

    def reader(self, module: str) -> Source:
        """Who can tell about a module."""
        return self

    def tree(self, module: str) -> ast.Module:
        """The parsed module; an empty one if it does not exist."""
        if module not in self.trees:
            found = [path for path in module_paths(module) if (self.folder / path).is_file()]
            self.trees[module] = ast.parse((self.folder / found[0]).read_text(encoding="utf-8") if found else "")
        return self.trees[module]

    def node(self, module: str, name: str) -> Any:
        """The statement that binds a dotted name, or None."""
        node: ast.AST | None = self.tree(module)
        for part in name.split("."):
            node = definitions(node).get(part) if node is not None else None
        return node

    def code(self, module: str, name: str) -> list[ast.AST]:
        """Every node of that statement."""
        node = self.node(module, name)
        return [] if node is None else list(ast.walk(node))

    def function(self, module: str, name: str, **module_globals: Any) -> Callable[..., Any]:
        """A function or property, compiled from its source alone, in a module with these globals."""
        definition = copy.deepcopy(self.node(module, name))
        definition.decorator_list = []
        code = compile(ast.Module([definition], type_ignores=[]), name, "exec")
        exec(code, module_globals)
        return module_globals[definition.name]

    def has(self, module: str, name: str) -> bool:
        return self.node(module, name) is not None

    def signature(self, module: str, name: str) -> inspect.Signature:
        """Parameters of a function, or of the constructor of a dataclass; without `self`, annotations and defaults."""
        node = self.node(module, name)
        if isinstance(node, ast.ClassDef):
            declared = [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]
            empty, by_keyword = inspect.Parameter.empty, inspect.Parameter.KEYWORD_ONLY
            return inspect.Signature(
                [
                    inspect.Parameter(ast.unparse(field.target), by_keyword, default=None if field.value else empty)
                    for field in declared
                ]
            )
        arguments = copy.deepcopy(node.args)
        for argument in ast.walk(arguments):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
        arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
        stub = ast.Expression(ast.Lambda(arguments, ast.Constant(None)))
        return without_self(inspect.signature(eval(compile(ast.fix_missing_locations(stub), name, "eval"))))

    def returns(self, module: str, name: str) -> str | None:
        node = self.node(module, name)
        return ast.unparse(node.returns) if getattr(node, "returns", None) else None

    def fields(self, module: str, name: str) -> set[str]:
        """Fields of a dataclass; none if the class is not one."""
        node = self.node(module, name)
        decorators = [ast.unparse(decorator).split("(")[0] for decorator in node.decorator_list]
        if not {"config", "dataclass"}.intersection(decorators):
            return set()
        return {ast.unparse(statement.target) for statement in node.body if isinstance(statement, ast.AnnAssign)}

    def members(self, module: str, name: str) -> set[str]:
        return self.own_members(module, name)

    def own_members(self, module: str, name: str) -> set[str]:
        return set(definitions(self.node(module, name)))

    def bases(self, module: str, name: str) -> set[str]:
        return {ast.unparse(base) for base in self.node(module, name).bases}

    def attributes(self, module: str, name: str) -> set[str]:
        """Attributes that a method assigns to self or declares on it."""
        attributes = [node for node in self.code(module, name) if isinstance(node, ast.Attribute)]
        return {a.attr for a in attributes if isinstance(a.ctx, ast.Store) and ast.unparse(a.value) == "self"}

    def value(self, module: str, name: str) -> Any:
        return ast.literal_eval(self.node(module, name).value)


class Installed(Source):
    """The installed vLLM. What inspection cannot show (bodies, what a class itself defines) is read in its source."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("vllm")
        assert spec is not None
        assert spec.origin is not None
        super().__init__(installed_vllm(), Path(spec.origin).parent.parent)

    def reader(self, module: str) -> Source:
        try:
            importlib.import_module(module)
        except ImportError:  # a module for other hardware, or none: the source tells which
            return Source(self.version, self.folder)
        return self

    def object(self, module: str, name: str) -> Any:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found

    def has(self, module: str, name: str) -> bool:
        try:
            self.object(module, name)
        except AttributeError:
            return False
        return True

    def signature(self, module: str, name: str) -> inspect.Signature:
        function = self.object(module, name)
        if function.__module__.startswith("vllm_dflash"):  # an earlier test's engine has put ours in its place
            return super().signature(module, name)
        return without_self(inspect.signature(function))

    def fields(self, module: str, name: str) -> set[str]:
        cls = self.object(module, name)
        return {field.name for field in fields(cls)} if is_dataclass(cls) else set()

    def members(self, module: str, name: str) -> set[str]:
        return set(dir(self.object(module, name)))

    def bases(self, module: str, name: str) -> set[str]:
        return {base.__name__ for base in self.object(module, name).__mro__}

    def value(self, module: str, name: str) -> Any:
        return self.object(module, name)


def definitions(scope: Any) -> dict[str, ast.AST]:
    """Names that the statements of a module or class bind, also those under `if` and `try`; the last one counts."""
    found: dict[str, ast.AST] = {}
    for statement in getattr(scope, "body", []) + getattr(scope, "orelse", []):
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[statement.name] = statement
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name: statement for alias in statement.names}
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found |= {ast.unparse(target): statement for target in targets}
        elif isinstance(statement, ast.If | ast.Try):
            found |= definitions(statement)
    return found


def without_self(signature: inspect.Signature) -> inspect.Signature:
    return signature.replace(parameters=[p for p in signature.parameters.values() if p.name != "self"])


def module_paths(module: str) -> tuple[str, str]:
    """Where a module may be: as a file or as a package."""
    stem = module.replace(".", "/")
    return f"{stem}.py", f"{stem}/__init__.py"


# ---- fetching a release


def released(version: str, modules: Iterable[str]) -> Source:
    """A release that is not installed; skips the test if these modules of it must be fetched and cannot be."""
    folder = cache_folder() / "contract" / f"vllm-{version}"
    absent = [module for module in modules if not any((folder / path).is_file() for path in module_paths(module))]
    if absent:
        fetch(version, absent, folder)
    return Source(version, folder)


def fetch(version: str, modules: list[str], folder: Path) -> None:
    """Bring modules of a release into a folder, without installing it; skips the test if there is no network."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".wheel-") as name:
        scratch = Path(name)
        wheel = zipfile.ZipFile(download(version, scratch))
        members = set(wheel.namelist())
        for module in modules:
            path = next((path for path in module_paths(module) if path in members), None)
            # A module that the release does not have becomes an empty file, so that it is not fetched again.
            text = b"" if path is None else wheel.read(path)
            place(text, folder / (path or module_paths(module)[0]), scratch)


def place(text: bytes, file: Path, scratch: Path) -> None:
    """Write a file in one step: other test processes see all of it or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    (scratch / "module.py").write_bytes(text)
    os.replace(scratch / "module.py", file)


def download(version: str, folder: Path) -> Path:
    """The wheel, by pip and thus from the user's index; the platform is given, because nothing of it will run."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--retries=1"]
    command += ["--only-binary=:all:", "--platform=manylinux_2_28_x86_64", "--python-version=3.11"]
    command += ["--timeout=15", f"--dest={folder}", f"vllm=={version}"]
    try:
        errors = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS).stderr
    except subprocess.TimeoutExpired:
        errors = f"no end after {DOWNLOAD_SECONDS} s"
    wheels = list(folder.glob("*.whl"))
    if not wheels:
        pytest.skip(f"pip cannot fetch vLLM {version} to read its source: {errors.strip().rpartition(chr(10))[2]}")
    return wheels[0]
