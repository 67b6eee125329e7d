"""What README names exists: make targets, files, tests, settings. Its commands are run by tests/cli and engine."""

from __future__ import annotations

import re
from dataclasses import fields

from cases import CASES, NOT_COVERED
from conftest import REPOSITORY
from tables import covered_cases, with_tables

from vllm_dflash.options import DFlashOptions

README = (REPOSITORY / "README.md").read_text()


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert named
    assert named <= targets


def test_tests_in_the_comparison_exist():
    sources = "\n".join(file.read_text() for file in (REPOSITORY / "tests").rglob("*.py"))
    named = re.findall(r"\| `(test_\w+|tests/[\w/.]+)` \|", README)
    assert len(named) >= 8
    for name in named:
        assert f"def {name}(" in sources or (REPOSITORY / name).is_file(), name


def test_file_tree_is_complete_and_true():
    tree = README.split("## Files")[1].split("```")[1]
    named = set(re.findall(r"[\w-]+\.py", tree))
    modules = {file.name for file in (REPOSITORY / "vllm_dflash").glob("*.py")} - {"__init__.py"}
    assert modules <= named
    kernels = {file.name for file in (REPOSITORY / "triton_kernels").glob("*.py")} - {"__init__.py"}
    assert named - {"pyproject.toml"} <= modules | kernels


def test_settings_are_described():
    for field in fields(DFlashOptions):
        assert f'"{field.name}"' in README


def test_measured_tables_are_filled():
    for name in ("demo output", "serving table"):
        block = README.split(f"<!-- {name}: begin -->")[1].split(f"<!-- {name}: end -->")[0]
        assert len(block.strip()) > 100, f"README's block '{name}' is empty"


def test_tables_made_from_the_tests_are_up_to_date():
    assert with_tables(README) == README, "python tests/tables.py writes them anew"


def test_every_trouble_of_users_has_a_test_or_a_reason():
    assert covered_cases() <= CASES.keys()
    assert CASES.keys() - covered_cases() == NOT_COVERED.keys()
