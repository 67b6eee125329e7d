"""Nothing of ours needs Triton on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROMPTS = [[3, 5, 7], list(range(20, 60))]


@pytest.mark.case("F48")
@pytest.mark.feature("no Triton installed", "a process that cannot import it serves the same text, with drafts")
def test_it_serves_where_triton_cannot_be_imported(engine, tiny_target, tiny_drafter):
    script = Path(__file__).parent / "without_triton.py"
    command = [sys.executable, str(script), str(tiny_target), str(tiny_drafter), json.dumps(PROMPTS)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in output.stdout.splitlines() if line.startswith("answer: ")]
    assert lines, output.stderr[-4000:]
    answer = json.loads(lines[0].removeprefix("answer: "))
    assert answer["texts"] == engine(tiny_target).token_ids(PROMPTS, max_tokens=24)
    assert min(answer["drafts"]) > 15
