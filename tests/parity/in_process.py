"""What `vllm_dflash.parity.child.answer` does, by engines of this process: starting one takes seconds less."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engines import Engine

from vllm_dflash.parity.answers import answer_all, facts


class InProcess:
    """In place of a child: `ask` of `Run`; `alter`, where set, changes the answers of a label before they are seen."""

    def __init__(self, engine: Callable[..., Engine]) -> None:
        self._engine = engine
        self.alter: Callable[[str, dict[str, Any]], None] | None = None
        self.asked: list[str] = []

    def __call__(
        self, label: str, output: Path, engine: dict[str, Any], sampling: dict[str, Any], requests: list[Any]
    ) -> dict[str, Any]:
        self.asked.append(label)
        speculative = engine.get("speculative_config")
        llm = self.start(engine, speculative).llm
        answers: dict[str, Any] = {}
        with torch.compiler.set_stance("force_eager"):  # compiling vLLM's rank of a log-probability takes 20 s
            for finished in answer_all(llm, sampling, requests, 2 * engine["max_num_seqs"]):
                answers |= finished
        found = {"facts": facts(llm), "answers": answers}
        if self.alter is not None:
            self.alter(label, found["answers"])
        return found

    def start(self, engine: dict[str, Any], speculative: dict[str, Any] | None) -> Engine:
        """The shared engine of these arguments."""
        settings: dict[str, Any] = {"dtype": engine["dtype"]} if engine["dtype"] != "auto" else {}
        if engine["max_num_seqs"] != 8:
            settings["max_num_seqs"] = engine["max_num_seqs"]
        if speculative is None:
            return self._engine(Path(engine["model"]), **settings)
        return self._engine(
            Path(engine["model"]),
            drafter=Path(speculative["model"]),
            num_drafted=speculative["num_speculative_tokens"],
            per_request_spec_decode_metrics="detailed",
            **settings,
        )
