"""Training data: rows of text become token ids with a mask of what the target wrote.

Rows come from rows.py, conversations are rendered by chat.py; the accepted shapes of a row are listed in `to_example`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_dflash.training.chat import read_messages, render_chat
from vllm_dflash.training.rows import file_stem, read_rows

__all__ = ["Example", "data_hash", "load_examples", "read_rows", "to_example"]

_ACCEPTED = (
    "'input_ids' and 'loss_mask', 'prompt_ids' and 'response_ids', 'messages', 'conversations', 'prompt' and "
    "'response', or 'text'"
)


@dataclass(frozen=True)
class Example:
    """One sequence. A drafter learns to predict the tokens where `loss_mask` is True: those that the target wrote.

    These are the answers with their end-of-turn token. Prompts are context only: the target never generates them, so
    nothing is ever drafted there.
    """

    id: str
    source: str
    input_ids: list[int]
    loss_mask: list[bool]


def to_example(row: dict[str, Any], where: str, tokenizer: Any, max_length: int) -> Example | None:
    """Turn a row into token ids and mask, cut at `max_length` tokens; None where nothing is left to learn then.

    A row has one of these, the first that is found:
        input_ids, loss_mask        used as they are
        prompt_ids, response_ids    used as they are; the response is what the target wrote
        messages or conversations   rendered with the chat template; the assistant's turns are what the target wrote
        prompt, response            strings, one user turn and one assistant turn
        text                        running text; all tokens but the first count as written by the target

    Raises:
        ValueError: the row has another shape or does not fit the tokenizer; starts with `where`.
    """
    ids, mask = _tokens(row, where, tokenizer)
    if len(ids) != len(mask):
        raise ValueError(
            f"{where}: 'input_ids' has {len(ids)} entries, but 'loss_mask' has {len(mask)}; make them equal."
        )
    _check_vocabulary(ids, where, tokenizer)
    ids, mask = ids[:max_length], mask[:max_length]
    if not any(mask):
        return None
    return Example(str(row.get("id", where)), str(row.get("source", file_stem(where))), ids, mask)


def load_examples(
    paths: Sequence[str], tokenizer: Any, max_length: int, max_examples: int | None = None
) -> list[Example]:
    """Examples of several files, folders or data sets, in order; prints how many and how many were dropped.

    Raises:
        ValueError: a row cannot be used, or there is no usable row at all.
    """
    examples: list[Example] = []
    num_rows = 0
    for where, row in (pair for path in paths for pair in read_rows(path)):
        num_rows += 1
        example = to_example(row, where, tokenizer, max_length)
        if example is not None:
            examples.append(example)
        if len(examples) == max_examples:
            break
    names = ", ".join(f"'{path}'" for path in paths)
    if num_rows == 0:
        raise ValueError(f"there are no rows in {names}; give data with {_ACCEPTED}.")
    if not examples:
        raise ValueError(
            f"none of the {num_rows} rows in {names} has an answer token among its first {max_length} tokens; raise "
            f"the maximum length, or check that the masks are not all false."
        )
    num_tokens = sum(len(example.input_ids) for example in examples)
    num_supervised = sum(sum(example.loss_mask) for example in examples)
    print(
        f"data: {len(examples)} examples, {num_tokens} tokens, {num_supervised} of them supervised; "
        f"{num_rows - len(examples)} rows dropped, whose first {max_length} tokens hold no answer"
    )
    return examples


def data_hash(examples: Sequence[Example]) -> str:
    """SHA-256 of all token ids and masks in order: equal where a drafter would learn from the same data."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(len(example.input_ids).to_bytes(8, "little"))
        digest.update(np.asarray(example.input_ids, dtype="<i8").tobytes())
        digest.update(np.asarray(example.loss_mask, dtype=np.bool_).tobytes())
    return digest.hexdigest()


def _tokens(row: dict[str, Any], where: str, tokenizer: Any) -> tuple[list[int], list[bool]]:
    if {"input_ids", "loss_mask"} <= row.keys():
        return _int_list(row, "input_ids", where), [bool(m) for m in _int_list(row, "loss_mask", where)]
    if {"prompt_ids", "response_ids"} <= row.keys():
        prompt, response = _int_list(row, "prompt_ids", where), _int_list(row, "response_ids", where)
        return prompt + response, [False] * len(prompt) + [True] * len(response)
    for field in ("messages", "conversations"):
        if field in row:
            return render_chat(read_messages(row[field], where), where, tokenizer, row.get("tools"))
    if {"prompt", "response"} <= row.keys():
        user, assistant = (_string(row, field, where) for field in ("prompt", "response"))
        turns = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        return render_chat(turns, where, tokenizer)
    if "text" in row:
        ids = list(tokenizer.encode(_string(row, "text", where), verbose=False))
        return ids, [i > 0 for i in range(len(ids))]
    if "prompt" in row:
        raise ValueError(f"{where}: answers are missing: run vllm-dflash regenerate first.")
    raise ValueError(f"{where}: a row with {sorted(row)} is not training data; it needs {_ACCEPTED}.")


def _int_list(row: dict[str, Any], field: str, where: str) -> list[int]:
    values = row[field]
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise ValueError(f"{where}: '{field}' is not a list of whole numbers; tokenise with vllm-dflash prepare.")
    return values


def _string(row: dict[str, Any], field: str, where: str) -> str:
    if not isinstance(row[field], str):
        raise ValueError(
            f"{where}: '{field}' is a {type(row[field]).__name__}, not a string; give turns as 'messages'."
        )
    return row[field]


def _check_vocabulary(ids: list[int], where: str, tokenizer: Any) -> None:
    size = len(tokenizer)
    beyond = next((token for token in ids if not 0 <= token < size), None)
    if beyond is not None:
        raise ValueError(
            f"{where}: token id {beyond} is outside the vocabulary of '{tokenizer.name_or_path}' (0 to {size - 1}); "
            f"the row was tokenised for another target. Prepare it again with this one."
        )
