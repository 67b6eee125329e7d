"""Tile sizes are measured at start-up only, once for each shape, and kept."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import triton

from vllm_dflash.triton_kernels import tuning
from vllm_dflash.triton_kernels.tuning import best_config, config, measuring, power_of_two

CONFIGS = [config(4, 3, ROW_TILE=16), config(8, 2, ROW_TILE=64), config(4, 2, ROW_TILE=128)]
MILLISECONDS = dict(zip(CONFIGS, [3.0, 1.0, 2.0]))


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No choices of other tests, and a clock for what is launched."""
    launched: list = []
    monkeypatch.setattr(tuning, "_chosen", {})

    def do_bench(run, **_):
        run()
        return MILLISECONDS[launched[-1]]

    monkeypatch.setattr(triton, "testing", SimpleNamespace(do_bench=do_bench))
    return launched


def forget() -> None:
    """As in a new process."""
    tuning._chosen.clear()


def test_nothing_is_measured_while_serving(fresh):
    assert best_config("kernel", (8,), CONFIGS, fresh.append) == CONFIGS[0]
    assert fresh == []


def test_the_fastest_is_kept_for_later_processes(fresh, tmp_path):
    with measuring(tmp_path):
        assert best_config("kernel", (8, "bf16"), CONFIGS, fresh.append) == CONFIGS[1]
    assert fresh == CONFIGS
    assert best_config("kernel", (8, "bf16"), CONFIGS, fresh.append) == CONFIGS[1]  # also while serving
    assert best_config("kernel", (16, "bf16"), CONFIGS, fresh.append) == CONFIGS[0]  # another shape
    forget()
    with measuring(tmp_path):
        assert best_config("kernel", (8, "bf16"), CONFIGS, fresh.append) == CONFIGS[1]
    assert fresh == CONFIGS
    (file,) = tmp_path.iterdir()
    assert triton.__version__ in file.name
    assert json.loads(file.read_text()) == {
        "kernel 8 bf16": {"tiles": {"ROW_TILE": 64}, "num_warps": 8, "num_stages": 2}
    }


def test_a_choice_that_is_no_candidate_any_more_is_measured_anew(fresh, tmp_path):
    with measuring(tmp_path):
        best_config("kernel", (8,), CONFIGS, fresh.append)
        forget()
        fresh.clear()
        assert best_config("kernel", (8,), CONFIGS[::2], fresh.append) == CONFIGS[2]
    assert fresh == CONFIGS[::2]


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_damaged_file_is_replaced(fresh, tmp_path, content):
    with measuring(tmp_path):
        best_config("kernel", (8,), CONFIGS, fresh.append)
        (file,) = tmp_path.iterdir()
        file.write_text(content)
        forget()
        assert best_config("kernel", (8,), CONFIGS, fresh.append) == CONFIGS[1]
    assert list(json.loads(file.read_text())) == ["kernel 8"]


def test_what_the_gpu_cannot_run_loses(fresh, tmp_path):
    from triton.runtime.errors import OutOfResources

    def launch(candidate):
        fresh.append(candidate)
        if candidate != CONFIGS[2]:
            raise OutOfResources(300_000, 232_448, "shared memory")

    with measuring(tmp_path):
        assert best_config("kernel", (8,), CONFIGS, launch) == CONFIGS[2]


def test_nothing_is_measured_while_a_graph_is_captured(fresh, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with measuring(tmp_path):
        assert best_config("kernel", (8,), CONFIGS, fresh.append) == CONFIGS[0]
    assert fresh == []
    assert list(tmp_path.iterdir()) == []


def test_rows_fall_into_powers_of_two():
    assert [power_of_two(rows) for rows in (0, 1, 2, 3, 8, 9, 8192)] == [1, 1, 2, 4, 8, 16, 8192]
