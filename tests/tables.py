"""Tables of README that follow from the tests: which features of vLLM are shown to work, which troubles are not.

    python tests/tables.py      write them anew

They are read from the marks in the source, so that there is no row without a test and no test without its row;
tests/test_readme.py compares.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cases import NOT_COVERED

TESTS = Path(__file__).resolve().parent
README = TESTS.parent / "README.md"

#: What a test asserts: the same as without speculation, or a clear refusal.
_AS_PLAIN, _REFUSED = "as without", "refused"


def marks(name: str) -> Iterator[tuple[list[Any], dict[str, Any], Path]]:
    """Arguments of each `pytest.mark.<name>(...)` under tests/, with its file; they must be literals."""
    for file in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == f"pytest.mark.{name}":
                try:
                    named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
                    yield [ast.literal_eval(argument) for argument in node.args], named, file
                except ValueError as error:
                    raise ValueError(
                        f"{file.name}, line {node.lineno}: arguments of a mark must be literals"
                    ) from error


def covered_cases() -> set[str]:
    """Ids that a test carries; those of parametrised tests may stand in their table of parameters."""
    found = set()
    for file in TESTS.rglob("*.py"):
        if file.name != "cases.py":
            values = (node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant))
            found |= {value for value in values if isinstance(value, str) and re.fullmatch(r"F\d+b?", value)}
    return found


def feature_table() -> str:
    """A row per feature and way of testing it, alphabetically."""
    rows = set()
    for arguments, named, file in marks("feature"):
        feature, how = (*arguments, *(named[key] for key in ("name", "how") if key in named))
        result = _REFUSED if how.startswith(("refused by", "refused:", "vLLM's own message")) else _AS_PLAIN
        rows.add((feature, how, result, file.relative_to(TESTS.parent).as_posix()))
    lines = ["| feature | tested how | result | test |", "|---|---|---|---|"]
    by_name = sorted(rows, key=lambda row: (row[0].lower(), row))
    return "\n".join(lines + [f"| {feature} | {how} | {result} | `{test}` |" for feature, how, result, test in by_name])


def not_covered_list() -> str:
    """A line per trouble that no test here shows to be absent."""
    return "\n".join(f"* {reason} ({case})" for case, reason in NOT_COVERED.items())


TABLES = {"features": feature_table, "not covered": not_covered_list}


def with_tables(text: str) -> str:
    """README's text with its tables made anew."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if not (begin in text and end in text):
            raise ValueError(f"README has no place for the table '{name}': it needs {begin} and {end}.")
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{table()}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))
