"""Conversations as token ids, with a mask of what the target wrote.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    ------------------- context ------------------------------ answer ------- context

The target's own chat template draws the borders: an answer begins where the rendering of everything before it, with
its generation prompt, ends. It ends with the end-of-turn token. What a template puts behind that token (the newline
above) is never generated, so no drafter should learn to propose it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

#: Names of roles in the wild -> names that chat templates know. Other roles are passed on as they are.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}


#: Stands for an answer where only what a template puts behind it matters.
_STAND_IN = "The answer stands here."


@dataclass(frozen=True)
class _Piece:
    text: str
    # tail: what follows an answer; its first token may be the end-of-turn token that closes the answer.
    kind: Literal["context", "answer", "rewritten answer", "tail"]


def load_tokenizer(target: str) -> Any:
    """The tokenizer of a target.

    Raises:
        FileNotFoundError: there is none of that name.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"there is no tokenizer for target '{target}' ({str(error).splitlines()[0]}); give a folder, or the name "
            f"of a model on the Hugging Face hub. 'vllm-dflash target' prints the folder of the demo target."
        ) from error


def read_messages(turns: Any, where: str) -> list[dict[str, Any]]:
    """Messages with `role` and `content`, from those or from ShareGPT's `from` and `value`.

    Raises:
        ValueError: no messages, or one of another shape; starts with `where`.
    """
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise ValueError(f"{where}: the conversation is empty; give a list of messages, or leave the row out.")
    messages = []
    for turn in turns:
        fields = set(turn) if isinstance(turn, dict) else {type(turn).__name__}
        if {"role", "content"} <= fields:
            role, content = turn["role"], turn["content"]
        elif {"from", "value"} <= fields:
            role, content = turn["from"], turn["value"]
        else:
            raise ValueError(
                f"{where}: a message has {sorted(fields)}; it needs 'role' and 'content', or 'from' and 'value'."
            )
        rest = {key: value for key, value in turn.items() if key not in ("role", "content", "from", "value")}
        messages.append({"role": _ROLES.get(role, role), "content": content} | rest)
    return messages


def prompt_ids(messages: Sequence[dict[str, Any]], where: str, tokenizer: Any) -> list[int]:
    """Token ids after which the target answers the last of `messages`.

    Raises:
        ValueError: the template is missing or refuses the messages; starts with `where`.
    """
    return _encode(tokenizer, _render(messages, where, tokenizer, None, add_generation_prompt=True))


def follow_up_ids(
    history: Sequence[dict[str, Any]], question: Sequence[dict[str, Any]], where: str, tokenizer: Any
) -> list[int]:
    """Token ids between the end of the last answer in `history`, which came to its end of turn, and the next answer.

    They continue the very tokens that the target wrote, which rendering its text again may change.

    Raises:
        ValueError: the template does not allow this; starts with `where`.
    """
    before = _render(history[:-1], where, tokenizer, None, add_generation_prompt=True)
    stand_in = [*history[:-1], {"role": "assistant", "content": _STAND_IN}, *question]
    full = _render(stand_in, where, tokenizer, None, add_generation_prompt=True)
    _check_prefix(before, full, where, tokenizer, len(history) - 1)
    ids = _encode(tokenizer, full[full.index(_STAND_IN, len(before)) + len(_STAND_IN) :])
    end = _end_of_turn(ids, tokenizer)
    return ids if end is None else ids[end + 1 :]


def render_chat(
    messages: Sequence[dict[str, Any]], where: str, tokenizer: Any, tools: Any = None
) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, and True for those that the target wrote: its answers with their end of turn.

    An answer to no one (first) and a question without answer (last) are left out.

    Raises:
        ValueError: there is no answer, or the template does not allow this; starts with `where`.
    """
    messages = _answered(messages)
    if not messages:
        raise ValueError(f"{where}: answers are missing: run vllm-dflash regenerate first.")
    ids: list[int] = []
    mask: list[bool] = []
    before: list[int] = []
    text = ""
    for piece in _pieces(messages, where, tokenizer, tools):
        text += piece.text
        whole = _encode(tokenizer, text)
        # Where a token would span the border, the piece is encoded on its own: no target generates half a token.
        is_clean = whole[: len(before)] == before
        new = whole[len(before) :] if is_clean else _encode(tokenizer, piece.text)
        ids += new
        mask += _mask(piece, new, tokenizer)
        before = whole
    return ids, mask


def _answered(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    is_answer = [message["role"] == "assistant" for message in messages]
    first = is_answer.index(False) if False in is_answer else len(is_answer)
    last = max((i for i, answer in enumerate(is_answer) if answer), default=-1)
    return list(messages[first : last + 1])


def _pieces(messages: list[dict[str, Any]], where: str, tokenizer: Any, tools: Any) -> Iterator[_Piece]:
    """The rendering, cut where answers begin and end."""
    full = _render(messages, where, tokenizer, tools)
    starts = {}
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = _render(messages[:i], where, tokenizer, tools, add_generation_prompt=True)
            _check_prefix(prompt, full, where, tokenizer, i)
            starts[i] = len(prompt)
    position = 0
    for i, end in zip(starts, [*list(starts.values())[1:], len(full)]):
        yield _Piece(full[position : starts[i]], "context")
        region, content = full[starts[i] : end], messages[i]["content"]
        found = next((c for c in (content, content.strip()) if c and c in region), None) if content else None
        if found is None:
            yield _Piece(region, "rewritten answer")
        else:
            split = region.index(found) + len(found)
            yield _Piece(region[:split], "answer")
            yield _Piece(region[split:], "tail")
        position = end


def _mask(piece: _Piece, ids: list[int], tokenizer: Any) -> list[bool]:
    if piece.kind in ("context", "answer"):
        return [piece.kind == "answer"] * len(ids)
    end = _end_of_turn(ids, tokenizer, follows_at_once=piece.kind == "tail")
    return [end is not None and i <= end for i in range(len(ids))]


def _end_of_turn(ids: list[int], tokenizer: Any, follows_at_once: bool = True) -> int | None:
    """Index of the first special token; None if there is none, or if it does not follow at once (but for spaces)."""
    ends = {tokenizer.eos_token_id, *tokenizer.all_special_ids}
    end = next((i for i, token in enumerate(ids) if token in ends), None)
    # A special token after other text belongs to the next turn, in a template that does not end turns with one.
    return None if end is not None and follows_at_once and tokenizer.decode(ids[:end]).strip() else end


def _check_prefix(prompt: str, full: str, where: str, tokenizer: Any, num_messages: int) -> None:
    if not full.startswith(prompt):
        raise ValueError(
            f"{where}: the chat template of '{tokenizer.name_or_path}' renders the {num_messages} messages before an "
            f"answer differently when the answer follows ({_difference(prompt, full)}), so that no answer can be found "
            f"in it. Run vllm-dflash regenerate with one question per row: token ids, which it keeps, need no template."
        )


def _render(
    messages: Sequence[dict[str, Any]], where: str, tokenizer: Any, tools: Any, add_generation_prompt: bool = False
) -> str:
    if not tokenizer.chat_template:
        raise ValueError(
            f"{where}: the tokenizer of '{tokenizer.name_or_path}' has no chat template, so messages cannot be "
            f"rendered; use an instruction-tuned target, or rows with 'text' or token ids."
        )
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )
    except Exception as error:  # Jinja's errors, and whatever a template's own code runs into
        roles = ", ".join(str(message["role"]) for message in messages)
        raise ValueError(
            f"{where}: the chat template of '{tokenizer.name_or_path}' refuses messages of roles {roles}: {error}. "
            f"Change or leave out the row."
        ) from error


def _difference(prompt: str, full: str) -> str:
    common = next((i for i, (a, b) in enumerate(zip(prompt, full)) if a != b), min(len(prompt), len(full)))
    return f"{prompt[common : common + 40]!r} becomes {full[common : common + 40]!r}"


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))
