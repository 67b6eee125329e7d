"""Prompts as token ids, from the user's rows or from a list made here."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_PLACES = ("a small harbour town", "the surface of Mars", "a mountain village", "a busy airport", "an old library")
_THINGS = ("bicycles", "bread", "batteries", "rainbows", "volcanoes", "chess", "tea", "bridges", "whales", "glass")
_NUMBERS = ((24, 3), (17, 5), (60, 4), (128, 7), (45, 12), (81, 9), (250, 6), (33, 8), (72, 11), (19, 13))

#: Asked where the user has no prompts: counting, prose, code, lists, translation, so that drafts are good and bad.
BUILT_IN = tuple(
    [f"Tom has {a} boxes with {b} pencils in each and gives 17 pencils away. How many are left?" for a, b in _NUMBERS]
    + [f"Explain to a child how {thing} came to be, in a few sentences." for thing in _THINGS]
    + [f"Write a short story that happens in {place} and is about {t}." for place in _PLACES for t in _THINGS]
    + [f"Write a Python function that counts how often {thing} occurs in a list of words." for thing in _THINGS]
    + [f"List five facts about {thing}, one per line, numbered." for thing in _THINGS]
    + [f"Compute {a} * {b} + {a - b} step by step." for a, b in _NUMBERS]
    + [f"Write a polite e-mail to a shop in {place} that sold you broken {t}." for place in _PLACES for t in _THINGS]
    + [f"Translate into French: 'I like {thing} because my mother told me about {thing}.'" for thing in _THINGS]
    + [f"Give a JSON object that describes {thing} with the keys name, kind and uses." for thing in _THINGS]
    + [f"Which is better for {place}: {a} or {b}?" for place in _PLACES for a, b in itertools.pairwise(_THINGS)]
)


@dataclass(frozen=True)
class Prompt:
    """A question for the target."""

    id: str
    token_ids: tuple[int, ...]


def load_prompts(
    model: str, source: str | None, limit: int, chat: bool = True, max_prompt_tokens: int | None = None
) -> list[Prompt]:
    """Up to `limit` prompts, spread evenly over the rows of `source`.

    Args:
        model: target, whose tokenizer and chat template are used; rows with `prompt_ids` need neither.
        source: file, folder or data set of rows with `prompt`, `messages` or `prompt_ids`; None for BUILT_IN.
        chat: put text into the target's chat template.
        max_prompt_tokens: longer prompts are left out.

    Raises:
        ValueError: no prompt is left, or a row asks nothing.
        FileNotFoundError: the target has no tokenizer and a row is text.
    """
    from vllm_dflash.training.rows import read_rows

    rows = list(read_rows(source)) if source else [(f"built-in:{i}", {"prompt": p}) for i, p in enumerate(BUILT_IN, 1)]
    encode = _Encoder(model, chat)
    prompts = [Prompt(str(row.get("id", where)), tuple(encode(row, where))) for where, row in rows]
    if max_prompt_tokens is not None:
        prompts = [prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_tokens]
    if not prompts:
        bound = f" with at most {max_prompt_tokens} tokens" if max_prompt_tokens is not None else ""
        raise ValueError(f"there is no prompt{bound} in '{source}'; give a file of prompts.")
    count = min(limit, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    """Hash of the token ids of all prompts, in order."""
    return hashlib.sha256(json.dumps([prompt.token_ids for prompt in prompts]).encode()).hexdigest()[:16]


class _Encoder:
    """Rows to token ids; the tokenizer is loaded when the first row needs it."""

    def __init__(self, model: str, chat: bool) -> None:
        self._model, self._chat, self._tokenizer = model, chat, None

    def __call__(self, row: dict[str, Any], where: str) -> list[int]:
        from vllm_dflash.training.chat import load_tokenizer, prompt_ids, read_messages

        if row.get("prompt_ids"):
            return list(row["prompt_ids"])
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._model)
        if "messages" in row:
            turns = read_messages(row["messages"], where)
            while turns and turns[-1]["role"] == "assistant":
                turns.pop()
        else:
            turns = [{"role": "user", "content": row["prompt"]}] if row.get("prompt") else []
        if not turns:
            raise ValueError(f"{where}: has {sorted(row)}; it needs 'prompt', 'prompt_ids', or 'messages' that ask.")
        if self._chat:
            return prompt_ids(turns, where, self._tokenizer)
        return list(self._tokenizer.encode("\n".join(turn["content"] for turn in turns)))  # type: ignore[attr-defined]
