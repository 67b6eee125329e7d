"""A target served without speculation and with it, the latter with oracle drafts, as fixtures.

A plugin of pytest rather than a module to import, so that its assertions explain themselves:

    pytest_plugins = ["engine_pairs"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import Engine
from oracle_drafts import K, OracleDrafts, answers, ask
from tiny_bytes import VOCAB, write_byte_target
from tiny_models import write_tiny_drafter

#: What the engines of the fixture `pair` are started with.
SETTINGS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 16,
    "block_size": 32,
    "skip_tokenizer_init": False,
    # A random target would never leave whitespace.
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}


_known_answers: dict[tuple[int, str], list[Any]] = {}


class Pair:
    """One target without speculation and with it, the latter with oracle drafts."""

    def __init__(self, plain: Engine, dflash: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plain, self.dflash, self._monkeypatch = plain, dflash, monkeypatch
        self.oracle = self.set_right(0.7)

    def set_right(self, right: float, seed: int = 0) -> OracleDrafts:
        """Forget all texts and lengths, and draft right with this probability from now on."""
        self._monkeypatch.undo()
        self.oracle = OracleDrafts(self.dflash, right, seed)
        self._monkeypatch.setattr(self.dflash.runner, "take_draft_token_ids", self.oracle.take_draft_token_ids)
        return self.oracle

    def schedule(self, lengths: list[int] | None) -> None:
        """Draft so many tokens in each step, over and over; None leaves the lengths as they are."""
        if lengths is not None:
            from vllm_dflash.draft_length import ScheduledLengths
            from vllm_dflash.length_control import LengthControl

            control = LengthControl(ScheduledLengths(lengths), learns=True)
            self._monkeypatch.setattr(self.dflash.runner.drafter, "lengths", control)

    def plain_answers(self, prompts: list[list[int]], sampling: Any) -> list[Any]:
        """vLLM's outputs without speculation; asked once, so greedy or seeded ones only."""
        key = (id(self.plain), repr((prompts, sampling)))
        if key not in _known_answers:
            _known_answers[key] = ask(self.plain, prompts, sampling)
        return _known_answers[key]

    def learn(self, outputs: Iterable[Any]) -> None:
        """Draft these answers of vLLM from now on."""
        for output in outputs:
            for completion in output.outputs:
                self.oracle.learn(output.prompt_token_ids, completion.token_ids)

    def compare(self, prompts: list[list[int]], sampling: Any, beyond: dict[str, Any] | None = None) -> list[Any]:
        """Ask both engines; their answers have to be equal. Drafts are the plain ones, some altered.

        Args:
            sampling: arguments of `SamplingParams` for all prompts, or a list with one mapping for each.
            beyond: sampling under which the answers go on where they otherwise stop, for drafts beyond the end.

        Returns:
            vLLM's outputs with speculation.
        """
        if beyond is not None:
            self.learn(self.plain_answers(prompts, beyond))
        expected = self.plain_answers(prompts, sampling)
        self.learn(expected)
        outputs = ask(self.dflash, prompts, sampling)
        assert [answers(output) for output in outputs] == [answers(output) for output in expected]
        return outputs


@pytest.fixture(scope="session")
def byte_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target with a byte-level tokenizer."""
    return write_byte_target(tmp_path_factory.mktemp("bytes") / "target")


@pytest.fixture(scope="session")
def byte_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random drafter for `byte_target`."""
    return write_tiny_drafter(tmp_path_factory.mktemp("bytes") / "drafter", vocab_size=VOCAB)


@pytest.fixture
def make_pair(
    engine: Callable[..., Engine], byte_target: Path, byte_drafter: Path
) -> Iterator[Callable[[dict[str, Any]], Pair]]:
    """Pairs of the plain engine of `SETTINGS` and one with speculation and other settings, until the end of a test."""
    patches = []

    def make(settings: dict[str, Any]) -> Pair:
        monkeypatch = pytest.MonkeyPatch()
        patches.append(monkeypatch)
        dflash = engine(byte_target, drafter=byte_drafter, num_drafted=K, **settings)
        return Pair(engine(byte_target, **SETTINGS), dflash, monkeypatch)

    yield make
    for monkeypatch in patches:
        monkeypatch.undo()


@pytest.fixture
def pair(make_pair: Callable[[dict[str, Any]], Pair]) -> Pair:
    """The engines with which most features are tested."""
    return make_pair(SETTINGS)
