"""The parts of the plugin that need no engine: versions, which drafters are ours, imports, rebinding."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from test_config import naming, speculators
from tiny_models import drafter_config, write_tiny_drafter

from vllm_dflash import SUPPORTED_VLLM
from vllm_dflash.plugin import installed_vllm, version_problem
from vllm_dflash.rebinding import rebind, when_imported
from vllm_dflash.runners import is_served_by_us
from vllm_dflash.speculative_config import read_drafter

pytestmark = pytest.mark.case("F47")

ALLOW = "DFLASH_ALLOW_UNTESTED_VLLM"

# ---- versions of vLLM


@pytest.fixture(autouse=True)
def strict_about_versions(monkeypatch):
    monkeypatch.delenv(ALLOW, raising=False)


def test_supported_range_is_as_tested_and_documented():
    assert SUPPORTED_VLLM == ("0.32", "0.34")


@pytest.mark.parametrize(
    "installed", ["0.32.0", "0.32.1", "0.33.0", "0.33.0+cpu", "0.33.1rc1", "0.32.dev5", "0.33", "0.33.1.dev7+g1a2b"]
)
def test_supported_vllm(installed):
    assert version_problem(installed) is None


@pytest.mark.parametrize(
    "installed", ["0.31.9", "0.34.0", "0.34.0rc1", "1.0.0", "1.32.0", "0.3.2", "0.320.0", "0.9", "dev", "", "unknown"]
)
def test_other_vllm_is_refused_with_the_repair(installed):
    problem = version_problem(installed)
    assert problem is not None
    for part in (">= 0.32", "< 0.34", f"but {installed} is installed", "Install a supported vLLM", f"{ALLOW}=1"):
        assert part in problem


@pytest.mark.parametrize("installed", ["0.31.9", "1.0.0", "dev"])
def test_environment_variable_allows_any_vllm(installed, monkeypatch):
    monkeypatch.setenv(ALLOW, "1")
    assert version_problem(installed) is None
    monkeypatch.setenv(ALLOW, "0")
    assert version_problem(installed) is not None


def test_installed_vllm_is_supported():
    assert re.match(r"0\.3[23]\.", installed_vllm())
    assert version_problem(installed_vllm()) is None


# ---- which speculative configs are about a drafter of ours


def write_config(folder: Path, content: object) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return str(write_tiny_drafter(tmp_path_factory.mktemp("unit") / "drafter"))


@pytest.mark.case("F28")
def test_drafter_is_read_with_its_method_given_or_not(tiny):
    expected = read_drafter({"method": "dflash", "model": tiny}, None, None)
    assert expected is not None
    assert (expected.name, expected.target_layer_ids, expected.draft_block_size) == (tiny, (0, 2), 8)
    assert read_drafter({"model": tiny}, None, None) == expected
    assert read_drafter({"model": tiny, "num-speculative-tokens": 3}, None, None) == expected


def test_drafter_is_read_from_the_shorthand_flags(tiny):
    expected = read_drafter({"model": tiny}, None, None)
    assert read_drafter(None, "dflash", tiny) == expected
    assert read_drafter(None, None, tiny) == expected
    assert read_drafter({"num_speculative_tokens": 4}, "dflash", tiny) == expected


def test_keys_with_dashes_are_the_same_keys(tiny):
    """`--speculative-config.draft-tensor-parallel-size` and its like reach us with dashes."""
    given = {"method": "dflash", "model": tiny, "draft-tensor-parallel-size": 1}
    assert read_drafter(given, None, None) == read_drafter({"model": tiny}, None, None)
    assert list(given) == ["method", "model", "draft-tensor-parallel-size"]  # left as it was


@pytest.mark.parametrize("method", ["mtp", "eagle3", "ngram", "draft_model"])
@pytest.mark.case("F28")
def test_other_methods_stay_with_vllm_whatever_the_folder_is_called(tmp_path, method):
    folder = str(write_tiny_drafter(tmp_path / "dflash-models" / "drafter"))
    assert read_drafter({"method": method, "model": folder}, None, None) is None
    assert read_drafter(None, method, folder) is None


@pytest.mark.parametrize("speculative", [None, {}, {"method": "dflash"}, {"method": "ngram"}])
def test_nothing_to_read_without_a_model(speculative):
    assert read_drafter(speculative, None, None) is None


@pytest.mark.case("F28")
def test_folder_name_does_not_make_a_model_a_drafter(tmp_path):
    eagle = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64}
    folder = write_config(tmp_path / "dflash-models" / "dflash", eagle)
    assert read_drafter({"model": folder}, None, None) is None


@pytest.mark.parametrize("method", [None, "dflash"])
@pytest.mark.parametrize("dialect", ["z-lab", "speculators"])
def test_dflash2_stays_with_vllm(tmp_path, dialect, method):
    of_z_lab = drafter_config(architectures=["DFlash2DraftModel"])
    raw = of_z_lab if dialect == "z-lab" else speculators(speculators_model_type="dflash2")
    folder = write_config(tmp_path / "drafter", raw)
    assert read_drafter({"model": folder, "method": method} if method else {"model": folder}, None, None) is None


@pytest.mark.parametrize("architecture", ["MuseGlimmerAssistantModel", "LagunaForCausalLM", "LiLiCorrDraftModel"])
def test_variants_with_classes_of_their_own_stay_with_vllm(tmp_path, architecture):
    folder = write_config(tmp_path / "drafter", {"architectures": [architecture], "hidden_size": 64})
    assert read_drafter({"method": "dflash", "model": folder}, None, None) is None


@pytest.mark.case("F33")
def test_drafter_under_an_unknown_architecture_is_refused(tmp_path):
    folder = write_config(tmp_path / "drafter", drafter_config(architectures=["Qwen3ForCausalLM"]))
    with pytest.raises(ValueError, match=naming(folder, "['Qwen3ForCausalLM']", "DFlashDraftModel")):
        read_drafter({"method": "dflash", "model": folder}, None, None)


def test_model_that_is_no_drafter_is_refused_only_when_dflash_is_asked_for(tmp_path):
    folder = write_config(tmp_path / "model", {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64})
    with pytest.raises(ValueError, match=naming(folder, "not a DFlash drafter", "['Qwen3ForCausalLM']", "give a")):
        read_drafter({"method": "dflash", "model": folder}, None, None)
    assert read_drafter({"model": folder}, None, None) is None


@pytest.mark.parametrize(
    "model", ["{tmp}/missing", "{tmp}", "nobody/no-such-drafter", "no-such-drafter", "a/b/c", "relative/../path"]
)
def test_missing_drafter_is_refused_only_when_dflash_is_asked_for(tmp_path, model):
    """Offline, as set in conftest.py: nothing may be asked of the Hugging Face Hub."""
    model = model.format(tmp=tmp_path)
    with pytest.raises(ValueError, match=naming(f"'{model}' has no readable config.json", "give 'model'", "folder")):
        read_drafter({"method": "dflash", "model": model}, None, None)
    assert read_drafter({"model": model}, None, None) is None


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "null", '"dflash_config"'])
def test_unreadable_config_is_refused_only_when_dflash_is_asked_for(tmp_path, content):
    folder = write_config(tmp_path / "drafter", content)
    with pytest.raises(ValueError, match=naming(f"'{folder}' has no readable config.json", "give 'model'")):
        read_drafter({"method": "dflash", "model": folder}, None, None)
    assert read_drafter({"model": folder}, None, None) is None


@pytest.mark.parametrize("method", [None, "dflash"])
def test_damaged_drafter_is_refused_with_or_without_a_method(tmp_path, method):
    folder = write_tiny_drafter(tmp_path / "drafter")
    (folder / "model.safetensors").unlink()
    given = {"model": str(folder)} | ({"method": method} if method else {})
    with pytest.raises(ValueError, match=naming(str(folder), "no *.safetensors file")):
        read_drafter(given, None, None)


# ---- imports


def test_import_is_quick_and_light(tmp_path):
    """vLLM imports the entry point in every process that it starts."""
    program = (
        "import sys, time; start = time.perf_counter(); import vllm_dflash; took = time.perf_counter() - start;"
        "import vllm_dflash.plugin, vllm_dflash.config, vllm_dflash.checkpoint, vllm_dflash.speculative_config;"
        "print(took, *({'torch', 'vllm', 'numpy', 'transformers', 'triton'} & set(sys.modules)))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    outputs = [run.stdout.split() for run in runs]
    assert [heavy for _, *heavy in outputs] == [[], [], []]
    assert min(float(took) for took, *_ in outputs) < 0.1


# ---- acting on a module after its import


@pytest.fixture
def late(tmp_path, monkeypatch) -> Iterator[str]:
    """Name of a module in a package, neither of them imported yet."""
    package = tmp_path / "late_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "late.py").write_text("value = 'original'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield "late_package.late"
    for name in ("late_package", "late_package.late"):
        sys.modules.pop(name, None)


class Action:
    """Records what it saw in the module, then replaces it."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, module: ModuleType) -> None:
        self.seen.append(module.value)
        module.value = "replaced"  # type: ignore[attr-defined]


def test_action_runs_once_and_right_after_the_import(late):
    action = Action()
    when_imported(late, action)
    assert action.seen == []
    assert late not in sys.modules
    namespace: dict[str, str] = {}
    exec(f"from {late} import value", namespace)
    assert namespace["value"] == "replaced"  # before the importing module takes anything from it
    importlib.import_module(late)
    assert action.seen == ["original"]


def test_action_runs_at_once_on_an_imported_module(late):
    module, action = importlib.import_module(late), Action()
    num_finders = len(sys.meta_path)
    when_imported(late, action)
    assert action.seen == ["original"]
    assert module.value == "replaced"
    assert len(sys.meta_path) == num_finders


def test_registering_twice_before_the_import_acts_once(late):
    first, second = Action(), Action()
    when_imported(late, first)
    when_imported(late, second)
    importlib.import_module(late)
    assert (first.seen, second.seen) == (["original"], [])


def test_looking_the_module_up_does_not_use_up_the_action(late):
    """`importlib.util.find_spec` is how programs ask whether a module exists."""
    action = Action()
    when_imported(late, action)
    assert importlib.util.find_spec(late) is not None
    assert action.seen == []
    importlib.import_module(late)
    assert action.seen == ["original"]


def test_failed_import_does_not_use_up_the_action(late, tmp_path):
    action, file = Action(), tmp_path / "late_package" / "late.py"
    good = file.read_text()
    file.write_text("raise RuntimeError('not today, and longer than before')\n")
    when_imported(late, action)
    with pytest.raises(RuntimeError, match="not today"):
        importlib.import_module(late)
    assert action.seen == []
    file.write_text(good)
    importlib.invalidate_caches()
    importlib.import_module(late)
    assert action.seen == ["original"]


def test_missing_module_stays_missing(late):
    when_imported("late_package.absent", Action())
    with pytest.raises(ModuleNotFoundError, match="late_package.absent"):
        importlib.import_module("late_package.absent")


def test_other_imports_are_left_alone(late):
    when_imported(late, Action())
    assert importlib.import_module("late_package").__name__ == "late_package"
    num_finders = len(sys.meta_path)
    importlib.import_module(late)
    assert len(sys.meta_path) == num_finders - 1  # the hook is gone


# ---- rebinding


class Owner:
    """Stands for a class of vLLM."""

    def method(self, number: int, *, twice: bool = False) -> int:
        """Docstring of vLLM."""
        return number * 2 if twice else number


def test_rebinding_twice_replaces_once(monkeypatch):
    """`register` runs more than once in a process; a second layer would apply every change twice."""
    monkeypatch.setattr(Owner, "method", Owner.method)  # put back afterwards

    def add_hundred(original, owner, *args, **kwargs):
        assert isinstance(owner, Owner)
        return original(owner, *args, **kwargs) + 100

    rebind(Owner, "method", add_hundred)
    rebound = Owner.method
    rebind(Owner, "method", add_hundred)
    assert Owner.method is rebound
    assert Owner().method(1) == 101
    assert Owner().method(3, twice=True) == 106
    assert (rebound.__name__, rebound.__doc__) == ("method", "Docstring of vLLM.")


# ---- who serves


@pytest.mark.parametrize(
    ("architecture", "settings", "ours"),
    [
        ("DFlashDraftModel", {}, True),
        ("DFlashDraftModel", {"dflash": {"enabled": False}}, False),
        ("DFlashLagunaForCausalLM", {}, False),
        ("DFlashMuseGlimmerAssistantModel", {}, False),
    ],
)
def test_proposer_is_ours_only_for_plain_drafters(architecture, settings, ours):
    """Variants have no `greedy_tokens`, which our proposer calls."""
    drafter = SimpleNamespace(architectures=[architecture])
    config = SimpleNamespace(speculative_config=SimpleNamespace(draft_model_config=drafter), additional_config=settings)
    assert is_served_by_us(config) is ours
