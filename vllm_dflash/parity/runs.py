"""What is run: settings of all engines, and the files in which their answers are kept.

A file's name holds a hash of everything that decides its content, so that an interrupted command goes on with what is
there and a changed setting, model or version starts anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_dflash.parity.child import answer
from vllm_dflash.parity.prompts import Prompt, prompts_hash

#: Room behind the last token, for a block.
_SLACK = 32

#: Parts of the package that take no part in serving.
_NOT_SERVING = {"doctor", "parity", "training"}


@dataclass(frozen=True)
class Run:
    """A target, a drafter, and how all engines are set up; they differ in nothing but their drafts."""

    model: str
    draft: str
    work: Path
    prompts: Sequence[Prompt]
    sampling: dict[str, Any]  # of SamplingParams, for every request
    max_tokens: int
    dtype: str = "auto"
    max_num_seqs: int = 8
    draft_length: str = "fixed"
    seed: int = 0
    largest_draft: int = 15  # of all runs, so that all have the same context
    engine: dict[str, Any] = field(default_factory=dict)  # more arguments of LLM
    speculative: dict[str, Any] = field(default_factory=dict)  # more keys of its speculative_config
    ask: Callable[..., dict[str, Any]] = answer  # how an engine is had: a child process

    def answers(self, num_drafted: int | None, requests: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """Answers of one engine, from its file or from a child; `num_drafted` None is the plain engine.

        Raises:
            EngineDied: the child ended without them.
        """
        label = "without drafts" if num_drafted is None else f"with K = {num_drafted}"
        wanted = self.requests() if requests is None else requests
        name = "plain" if num_drafted is None else f"k{num_drafted}"
        file = self.work / f"{name}-{self.key(num_drafted)}.json"
        return self.ask(label, file, self._engine(num_drafted), self._sampling(), wanted)

    def scores(self, requests: list[dict[str, Any]], dtype: str) -> dict[str, Any]:
        """Log-probabilities of single tokens by a plain engine: requests with `logprob_token_ids` in their sampling."""
        engine = self._engine(None) | {"dtype": dtype}
        file = self.work / f"scores-{_digest([self.key(None), dtype])}.json"
        return self.ask("scoring differences", file, engine, {"temperature": 0, "max_tokens": 1}, requests)

    def requests(self) -> list[dict[str, Any]]:
        """One request for every prompt, named by its place."""
        return [{"id": str(i), "prompt_ids": list(prompt.token_ids)} for i, prompt in enumerate(self.prompts)]

    def key(self, num_drafted: int | None) -> str:
        """Hash of what decides the answers; of a plain engine, nothing about drafts."""
        from vllm_dflash.plugin import installed_vllm
        from vllm_dflash.training.run_record import machine

        parts: list[Any] = [
            self._engine(None),
            self._sampling(),
            prompts_hash(self.prompts),
            _fingerprint(self.model),
            installed_vllm(),
            machine(),
        ]
        if num_drafted is not None:
            parts += [self._engine(num_drafted), _fingerprint(self.draft), serving_code_hash()]
        return _digest(parts)

    def _sampling(self) -> dict[str, Any]:
        return self.sampling | {"max_tokens": self.max_tokens}

    def _engine(self, num_drafted: int | None) -> dict[str, Any]:
        import torch

        settings: dict[str, Any] = {
            "model": self.model,
            "dtype": self.dtype,
            "max_model_len": self._max_model_len(),
            "max_num_seqs": self.max_num_seqs,
            "seed": self.seed,
            "enforce_eager": not torch.cuda.is_available(),  # compiling for a CPU takes minutes and gains little
            "skip_tokenizer_init": not has_tokenizer(self.model),
            "use_tqdm_on_load": False,
        }
        if num_drafted is not None:
            settings |= {
                "speculative_config": {
                    "method": "dflash",
                    "model": self.draft,
                    "num_speculative_tokens": num_drafted,
                }
                | self.speculative,
                "additional_config": {"dflash": {"draft_length": self.draft_length}},
                "per_request_spec_decode_metrics": "detailed",
            }
        return settings | self.engine

    def _max_model_len(self) -> int:
        from vllm_dflash.training.target_features import load_target_config

        limit = load_target_config(self.model).get_text_config().max_position_embeddings
        longest = max(self.prompts, key=lambda prompt: len(prompt.token_ids))
        if len(longest.token_ids) >= limit:
            raise ValueError(
                f"prompt '{longest.id}' has {len(longest.token_ids)} tokens, but target '{self.model}' takes {limit} "
                f"with the answer; leave longer ones out with --max-prompt-tokens."
            )
        room = max(_SLACK, self.largest_draft + 1)
        return min(len(longest.token_ids) + self.max_tokens + room, limit)


def serving_code_hash() -> str:
    """Hash of the sources that serving runs: answers of other code are not these."""
    package = Path(__file__).parent.parent
    import vllm_dflash.triton_kernels as kernels

    digest = hashlib.sha256()
    for folder in (package, Path(str(kernels.__file__)).parent):
        for file in sorted(folder.rglob("*.py")):
            if file.relative_to(folder).parts[0] not in _NOT_SERVING:
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _fingerprint(model: str) -> Any:
    """Changes with the files of a local model; a model of the Hub is its name."""
    folder = Path(model)
    if not folder.is_dir():
        return model
    files = [file for file in sorted(folder.iterdir()) if file.suffix in (".json", ".safetensors", ".bin", ".gguf")]
    return [str(folder.resolve()), [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]]


def has_tokenizer(model: str) -> bool:
    """Does a model bring one? transformers makes an empty one up for a folder that has none."""
    folder = Path(model)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    return not folder.is_dir() or any((folder / name).is_file() for name in names)


def _digest(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
