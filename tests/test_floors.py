"""Bytes, flops and floors of the kernels against numbers worked out by hand, and the page made from them."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "bench"))
floors = importlib.import_module("floors")
sys.path.pop(0)

MODELS = {model.name: model for model in floors.MODELS}
H200, B200 = floors.GPUS


def case(kernel, model="Qwen3-8B", rows=1, context=0):
    return floors.Case(kernel, MODELS[model], rows, context)


def test_fusion_of_qwen3_8b_reads_168_mb_of_weights():
    """5 features of 4096 to 4096 in bfloat16: 5 * 4096 * 4096 * 2 = 167,772,160 bytes, and one row of each."""
    work = case("feature_fusion").work
    assert work.num_bytes == 167_772_160 + 5 * 4096 * 2 + 4096 * 2 + 4
    assert work.flops == 2 * 83_886_080
    assert floors.bound_by(work, H200) == "memory"
    assert floors.floor_seconds(work, H200) == pytest.approx(35.0e-6, rel=2e-3)  # 167.8 MB / 4.8 TB/s
    assert floors.floor_seconds(work, B200) == pytest.approx(21.0e-6, rel=2e-3)


def test_context_kv_of_a_prompt_is_bound_by_compute():
    """8192 rows times 5 * 2 * 8 * 128 = 10,240 rows of 4096: 2 * 8192 * 41,943,040 flops."""
    work = case("context_kv", rows=8192).work
    assert work.flops == 687_194_767_360
    assert floors.bound_by(work, H200) == "compute"
    assert floors.floor_seconds(work, H200) == pytest.approx(694.8e-6, rel=1e-3)
    # Weights 83.9 MB; in 67.1 MB of features, 2.1 MB of cos and sin; out 167.8 MB; 1,280 bytes of K-norm; 20 a row.
    assert work.num_bytes == 83_886_080 + 67_108_864 + 2_097_152 + 167_772_160 + 1_280 + 8192 * 20


def test_attention_reads_each_cached_row_once_for_all_heads_of_a_group():
    """A cached row is K and V of 8 heads of 128: 4,096 bytes; 32 requests at 32,768 make 4.29 GB."""
    work = case("block_attention", rows=32, context=32768).work
    cached, pages = 32 * 32768 * 4096, 32 * (2048 + 1) * 4
    block = 32 * 16 * (2 * 32 * 128 + 2 * 8 * 128) * 2
    assert cached == 4_294_967_296
    assert work.num_bytes == cached + pages + block
    assert work.flops == 32 * 4 * 16 * 32 * 128 * (32768 + 16)
    assert floors.bound_by(work, H200) == "memory"


def test_draft_head_never_counts_logits():
    work = case("draft_head", "SmolLM2-135M", rows=16).work
    assert work.num_bytes == 49152 * 576 * 2 + 16 * 576 * 2 + 16 * 16
    assert case("draft_head_fp8", "SmolLM2-135M", rows=16).work.num_bytes == 49152 * (576 + 4) + 16 * 576 * 2 + 16 * 16


def test_small_work_is_bound_by_its_launch():
    work = case("draft_inputs", rows=16).work
    assert work.num_bytes == 16 * 24 + 16 * 20 + 15 * 8 + 24
    assert floors.bound_by(work, H200) == "launch"
    assert floors.floor_seconds(work, B200) == floors.LAUNCH_SECONDS


def test_loss_takes_two_products():
    assert case("draft_loss", rows=1024).work.flops == 2 * case("draft_head", rows=1024).work.flops


def test_fraction_is_one_at_the_floor():
    work = case("feature_fusion").work
    assert floors.fraction_of_floor(2 * floors.floor_seconds(work, H200), work, H200) == pytest.approx(0.5)


def test_cases_cover_every_kernel_and_size():
    found = {(one.kernel, one.model.name, one.size) for one in floors.cases()}
    assert len(found) == len(floors.cases()) == 4 * (6 * 5 + 8)
    assert ("block_attention", "Qwen3-4B", "batch=32 context=131072") in found
    assert ("draft_head", "Qwen3-Coder-30B-A3B", "M=8192") in found


def test_ratio_comes_from_the_last_run_on_that_gpu(tmp_path: Path):
    """70 us on an H200 is twice the floor of 35.0; other implementations and other GPUs do not count."""
    file = tmp_path / "kernels.csv"
    rows = [
        ("1x NVIDIA H200", "ours", 140.0),
        ("1x NVIDIA H200", "ours", 70.0),
        ("1x NVIDIA H200", "vllm", 35.0),
        ("1x NVIDIA L4", "ours", 1.0),
    ]
    lines = ["machine,kernel,model,size,implementation,median_us"]
    lines += [f"{machine},feature_fusion,Qwen3-8B,M=1,{by},{us}" for machine, by, us in rows]
    file.write_text("\n".join(lines))
    page = floors.markdown(floors.measured(file))
    row = next(line for line in page.splitlines() if line.startswith("| Qwen3-8B | M=1 | 167.8"))
    assert row.split(" | ")[4:] == ["35.0", "memory", "2.00", "21.0", "memory", "not measured |"]


def test_page_is_the_one_that_the_script_writes():
    page = (floors.RESULTS / "floors.md").read_text()
    assert page == floors.markdown(floors.measured(floors.RESULTS / "kernels.csv")), "run `python bench/floors.py`"
    assert not re.search(r"\b(nan|inf)\b", page)
