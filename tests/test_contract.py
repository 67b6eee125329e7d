"""vLLM's internals are as our code expects: vllm_contract held against every release that we support."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from vllm_contract import CONTRACT, Row
from vllm_source import Installed, Source, released

from vllm_dflash.plugin import installed_vllm

pytestmark = pytest.mark.case("F47", "F48")

REPOSITORY = Path(__file__).resolve().parent.parent
OTHER_RELEASES = ("0.33.0",)

ROWS = [(module, row) for module, rows in CONTRACT.items() for row in rows]


@pytest.fixture(scope="session", params=["installed", *OTHER_RELEASES])
def vllm(request: pytest.FixtureRequest) -> Source:
    """Each release that the contract is held against."""
    return Installed() if request.param == "installed" else released(request.param, CONTRACT)


# ---- the tests


@pytest.mark.parametrize(("module", "row"), ROWS, ids=[f"{module}.{row.name}" for module, row in ROWS])
def test_vllm_is_as_our_code_expects(vllm: Source, module: str, row: Row):
    if found := list(problems(vllm, module, row)):
        sentences = "".join(f"\n  {module}.{row.name} {problem}" for problem in found)
        pytest.fail(f"vLLM {vllm.version} is not as {row.used_by} expects:{sentences}", pytrace=False)


def test_cpu_gets_the_v1_runner(vllm: Source):
    """Our proposer lives in the V1 runner; what keeps the V2 runner away from CPUs is that they have no Triton."""
    config = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        watermark_config=None,
        _get_v2_model_runner_unsupported_features=list,
    )

    def uses_v2(has_triton: bool) -> Any:
        choose = vllm.function(
            "vllm.config.vllm",
            "VllmConfig.use_v2_model_runner",
            HAS_TRITON=has_triton,
            current_platform=Mock(is_unspecified=lambda: False),
            envs=SimpleNamespace(VLLM_USE_V2_MODEL_RUNNER=None),
            logger=Mock(),
        )
        return choose(config)

    assert uses_v2(has_triton=False) is False, f"vLLM {vllm.version} runs CPUs with its V2 runner"
    assert uses_v2(has_triton=True) is True


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_installed_vllm_finds_no_triton_on_a_cpu():
    from vllm.triton_utils import HAS_TRITON

    assert HAS_TRITON is False, f"vLLM {installed_vllm()} uses Triton here, so its V2 runner would replace our proposer"


@pytest.mark.parametrize("folder", ["vllm_dflash", "triton_kernels"])
def test_every_import_from_vllm_is_in_the_contract(folder: str):
    for file in sorted((REPOSITORY / folder).rglob("*.py")):
        for name in imports_from_vllm(file):
            users = [row.used_by for module, row in ROWS if name in (module, f"{module}.{row.name.split('.')[0]}")]
            assert any(file.name in used_by for used_by in users), f"{file.name} imports {name}: add it to CONTRACT"


def test_the_contract_names_files_that_exist():
    for module, row in ROWS:
        for name in row.used_by.split(", "):
            exists = (REPOSITORY / "vllm_dflash" / name).is_file() or (REPOSITORY / name).is_file()
            assert exists, f"{module}.{row.name} is used by {name}, which does not exist"


EXAMPLE = """
LIMIT = 7
class Base: ...
@dataclass
class Thing(Base):
    width: int
    height: int = 0
    def move(self, dx: int, dy=1, *, fast: bool = False) -> tuple[int, int]:
        self.place = draw(dx, label="a", colour=self.width)
"""


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (Row("LIMIT", "", value=7), []),
        (Row("LIMIT", "", value=8), ["is 7, not 8"]),
        (Row("Thing.stop", ""), ["does not exist"]),
        (Row("Thing", "", fields="width depth", lacks="move"), ["has no field depth", "defines move itself"]),
        (Row("Thing", "", bases="Base Other", call="* width"), ["does not derive from Other"]),
        (Row("Thing", "", call="* height"), ["cannot be called with (* height): missing a required argument: 'width'"]),
        (Row("Thing.move", "", signature="dx dy fast", returns="tuple[int, int]", sets="place"), []),
        (Row("Thing.move", "", signature="dx fast"), ["takes (dx, dy, fast), not (dx, fast)"]),
        (Row("Thing.move", "", call="dx * fast"), []),
        (
            Row("Thing.move", "", call="dx * slow"),
            ["cannot be called with (dx * slow): got an unexpected keyword argument 'slow'"],
        ),
        (Row("Thing.move", "", call="dy dx"), ["does not take (dy dx) in this order"]),
        (Row("Thing.move", "", contains="self.place = draw(...); draw(dx, colour=_, label='a')"), []),
        (Row("Thing.move", "", contains="draw(dy, colour=_, label='a')"), ["has no `draw(dy, colour=_, label='a')`"]),
    ],
)
def test_a_broken_expectation_is_reported(tmp_path: Path, row: Row, expected: list[str]):
    (tmp_path / "example.py").write_text(EXAMPLE)
    assert list(problems(Source("0", tmp_path), "example", row)) == expected


def imports_from_vllm(file: Path) -> Iterator[str]:
    """Every `vllm...` that a file of ours imports, as a dotted name."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "vllm")


# ---- comparing a row with vLLM


def problems(vllm: Source, module: str, row: Row) -> Iterator[str]:
    """What is not as the row says, each as the end of a sentence about the row's name."""
    vllm = vllm.reader(module)
    if not vllm.has(module, row.name):
        yield "does not exist"
        return
    if row.signature is not None:
        parameters = list(vllm.signature(module, row.name).parameters)
        if parameters != row.signature.split():
            yield f"takes ({', '.join(parameters)}), not ({', '.join(row.signature.split())})"
    if row.call is not None:
        yield from call_problems(vllm.signature(module, row.name), row.call)
    if row.returns not in (None, vllm.returns(module, row.name)):
        yield f"returns {vllm.returns(module, row.name)}, not {row.returns}"
    yield from (f"has no field {name}" for name in missing(row.fields, vllm.fields, module, row))
    yield from (f"has no member {name}" for name in missing(row.members, vllm.members, module, row))
    yield from (f"does not derive from {name}" for name in missing(row.bases, vllm.bases, module, row))
    yield from (f"does not set self.{name}" for name in missing(row.sets, vllm.attributes, module, row))
    own = vllm.own_members(module, row.name) if row.lacks else []
    yield from (f"defines {name} itself" for name in row.lacks.split() if name in own)
    for pattern in ast.parse(row.contains).body:
        code = pattern.value if isinstance(pattern, ast.Expr) else pattern
        if not any(matches(code, node) for node in vllm.code(module, row.name)):
            yield f"has no `{ast.unparse(pattern)}`"
    if row.value is not None and row.value != vllm.value(module, row.name):
        yield f"is {vllm.value(module, row.name)!r}, not {row.value!r}"


def missing(names: str, found: Callable[[str, str], set[str]], module: str, row: Row) -> list[str]:
    return [name for name in names.split() if name not in found(module, row.name)]


def call_problems(signature: inspect.Signature, call: str) -> Iterator[str]:
    """Does a call bind as it is meant to? Each parameter is given its own name as value."""
    by_position, _, by_keyword = (part.split() for part in call.partition("*"))
    try:
        bound = signature.bind(*by_position, **{name: name for name in by_keyword}).arguments
    except TypeError as error:
        yield f"cannot be called with ({call}): {error}"
        return
    if any(bound.get(name) != name for name in by_position):
        yield f"does not take ({call}) in this order"


def matches(pattern: ast.AST, node: ast.AST) -> bool:
    """Is the code the same but for `_` (anything) and `f(...)` (any arguments)? Keywords may change places."""
    if isinstance(pattern, ast.Name) and pattern.id == "_":
        return True
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.Call) and [ast.unparse(argument) for argument in pattern.args] == ["..."]:
        return matches(pattern.func, node.func)  # type: ignore[attr-defined]
    return all(
        same(getattr(pattern, field), getattr(node, field))
        for field in pattern._fields
        if field not in ("ctx", "kind", "type_comment")
    )


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, list):
        if all(isinstance(item, ast.keyword) for item in ours + theirs):
            ours, theirs = (sorted(items, key=lambda keyword: keyword.arg or "") for items in (ours, theirs))
        return len(ours) == len(theirs) and all(same(*pair) for pair in zip(ours, theirs))
    if isinstance(ours, ast.AST):
        return isinstance(theirs, ast.AST) and matches(ours, theirs)
    return bool(ours == theirs)
