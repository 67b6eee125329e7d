"""Fixtures of the tests with other targets: a plugin of pytest, as `engine_pairs` is.

pytest_plugins = ["family_engines"]
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import targets
from oracle_drafts import K, OracleDrafts
from tiny_models import write_tiny_drafter


@pytest.fixture(scope="session")
def family_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny target by the name of its family, written once."""
    written: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in written:
            folder = tmp_path_factory.mktemp("families") / family
            written[family] = targets.write_target(getattr(targets, family), folder)
        return written[family]

    return get


@pytest.fixture(scope="session")
def family_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random drafter that fits all families."""
    return write_tiny_drafter(tmp_path_factory.mktemp("families") / "drafter")


@pytest.fixture
def with_oracle(monkeypatch: pytest.MonkeyPatch) -> Callable[..., OracleDrafts]:
    """Gives an engine drafts that are right as often as wanted, of lengths decided beforehand, for one test."""

    def change(served: Any, lengths: list[int] | None = None, right: float = 0.7) -> OracleDrafts:
        from vllm_dflash.draft_length import ScheduledLengths
        from vllm_dflash.length_control import LengthControl

        oracle = OracleDrafts(served, right)
        monkeypatch.setattr(served.runner, "take_draft_token_ids", oracle.take_draft_token_ids)
        control = LengthControl(ScheduledLengths(lengths or [K]), learns=True)
        monkeypatch.setattr(served.runner.drafter, "lengths", control)
        return oracle

    return change


@pytest.fixture
def expert_group(engine: Any, tiny_target: Path) -> None:
    """vLLM makes the group of expert-parallel ranks only in processes whose first model has experts."""
    from vllm.distributed import parallel_state

    engine(tiny_target)
    parallel_state._EP = parallel_state._EP or parallel_state.get_tp_group()  # of this rank alone
