"""Children: messages of those that die, and what they leave."""

from __future__ import annotations

import json
import shutil

import pytest

from vllm_dflash.parity import child


def test_a_dead_child_is_reported_with_the_tail_of_its_log(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("".join(f"line {i}\n\n" for i in range(40)) + "RuntimeError: out of memory\n")
    notice = child.death_notice("with K = 3", 1, log)
    assert notice.startswith(f"the engine with K = 3 ended with exit code 1; the end of its log, {log}:")
    assert "RuntimeError: out of memory" in notice
    assert "line 39" in notice
    assert "line 20" not in notice
    assert "signal SIGKILL" in child.death_notice("with K = 3", -9, log)


def test_parameters_that_this_vllm_refuses_are_named(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("Traceback ...\nThe min_p ... parameters are not yet supported with speculative decoding.\n")
    assert "leave --min-p and --logit-bias out" in child.death_notice("with K = 3", 1, log)


def test_a_real_child_that_cannot_start(tmp_path, tiny_target):
    """A target without weights, which only the engine notices."""
    target = tmp_path / "target"
    target.mkdir()
    shutil.copy(tiny_target / "config.json", target)
    engine = {"model": str(target), "max_num_seqs": 2, "seed": 0, "enforce_eager": True, "skip_tokenizer_init": True}
    with pytest.raises(child.EngineDied, match="the engine in vain ended with exit code 1") as raised:
        child.answer("in vain", tmp_path / "answers.json", engine, {}, [{"id": "0", "prompt_ids": [3]}])
    assert "Cannot find any model weights" in str(raised.value)
    assert child.read_answers(tmp_path / "answers.json") == {}


def test_no_child_is_started_where_all_answers_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(child.subprocess, "Popen", None)
    content = {"facts": {}, "answers": {"0": {"token_ids": [1]}, "1": {"token_ids": [2]}}}
    file = tmp_path / "answers.json"
    file.write_text(json.dumps(content))
    assert child.answer("", file, {"max_num_seqs": 1}, {}, [{"id": "1", "prompt_ids": [3]}]) == content
