"""What the target is asked: built-in questions or the user's rows, rendered with or without the chat template."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vllm_dflash.training.chat import read_messages
from vllm_dflash.training.rows import file_stem, read_rows

#: Of the kinds that drafters are measured on: word problems, code, explanations, lists.
BUILT_IN = (
    "A train drives 60 miles per hour for 3 hours and then 20 miles more. How far does it go?",
    "Write a Python function that returns the largest number of a list.",
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that checks whether a string is a palindrome.",
    "Natalia sold clips to 48 friends in April, and half as many in May. How many clips did she sell in all?",
    "Give three tips for staying healthy.",
    "What is the capital of France, and what is it known for?",
    "If x + 7 = 19, what is 3x? Show your steps.",
    "Mia buys 4 apples for $2 each and pays with a $20 note. How much change does she get?",
    "Write a short letter that invites a friend to dinner.",
    "Translate into French: The weather is nice today, and we are going to the beach.",
    "List the planets of the solar system in order, with one fact about each.",
)

#: Share of prompts of token ids that may change when they are decoded and encoded again, before they count as random.
_MAX_CHANGED = 0.5


@dataclass(frozen=True)
class Rendering:
    """How questions become token ids."""

    template: Literal["target", "none"] | str = "target"  # or the text of a Jinja template
    thinking: bool | None = None  # enable_thinking of the template; None leaves it to the template
    template_name: str = ""  # of a template from a file

    @property
    def label(self) -> str:
        """For people."""
        names = {"target": "chat template of the target", "none": "no chat template"}
        thinking = "" if self.thinking is None else f", enable_thinking={self.thinking}"
        return names.get(self.template, f"chat template in {self.template_name or 'a file'}") + thinking


@dataclass(frozen=True)
class Question:
    """A question for the target: messages, or token ids as they are sent."""

    id: str
    messages: list[dict[str, Any]]
    token_ids: list[int] | None = None


def questions(file: str | None, number: int) -> list[Question]:
    """The first `number` built-in questions, or rows of a file as `eval --engine vllm` takes them.

    Raises:
        ValueError: a row asks nothing, or there is none; or random tokens are asked for.
    """
    if file is None:
        chosen = BUILT_IN[:number]
        return [Question(f"built-in {i}", [{"role": "user", "content": text}]) for i, text in enumerate(chosen, 1)]
    if file == "random" and not Path(file).exists():
        raise ValueError(_random_refusal("random prompts were asked for"))
    found = [_question(where, row) for where, row in itertools.islice(read_rows(file), number)]
    if not found:
        raise ValueError(f"there are no rows in '{file}'; give a file with 'prompt', 'messages' or 'prompt_ids'.")
    return found


def dataset_name(file: str | None) -> str:
    """For the report."""
    return "built-in questions" if file is None else file_stem(f"{file}:1")


def render(asked: Sequence[Question], rendering: Rendering, tokenizer: Any) -> list[list[int]]:
    """Token ids after which the target answers each question.

    Raises:
        ValueError: there is no chat template, or it refuses the messages.
    """
    return [_render(question, rendering, tokenizer) for question in asked]


def refuse_random_tokens(asked: Sequence[Question], tokenizer: Any) -> None:
    """Refuse prompts of drawn token ids: what the target writes behind noise is not what anybody serves.

    Text that is decoded and encoded again gives the same tokens; drawn ids hardly ever do.

    Raises:
        ValueError: more than half of the prompts that are token ids are noise.
    """
    given = [q.token_ids for q in asked if q.token_ids]
    changed = [ids for ids in given if tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) != ids]
    if len(changed) > _MAX_CHANGED * len(given):
        raise ValueError(_random_refusal(f"{len(changed)} of {len(given)} prompts are token ids that no text gives"))


def knows_thinking(tokenizer: Any) -> bool:
    """Does the target's chat template have a thinking mode to switch?"""
    return "enable_thinking" in str(tokenizer.chat_template or "")


def alternatives(rendering: Rendering, tokenizer: Any) -> list[Rendering]:
    """Other renderings that the drafter may have been trained with."""
    found = []
    if rendering.template != "target" and tokenizer.chat_template:
        found.append(Rendering())
    elif rendering.template == "target" and knows_thinking(tokenizer):
        found += [replace(rendering, thinking=value) for value in (True, False) if value != rendering.thinking]
    return found


def _question(where: str, row: dict[str, Any]) -> Question:
    name = str(row.get("id", where))
    ids = row.get("prompt_ids")
    if ids is None and "response_ids" not in row and isinstance(row.get("input_ids"), list):
        ids = list(itertools.takewhile(lambda i: not row.get("loss_mask", [])[i], range(len(row.get("loss_mask", [])))))
        ids = [row["input_ids"][i] for i in ids]
    key = next((key for key in ("messages", "conversations") if key in row), None)
    turns = read_messages(row[key], where) if key else []
    if not turns and isinstance(row.get("prompt"), str):
        turns = [{"role": "user", "content": row["prompt"]}]
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    if not turns and not ids:
        raise ValueError(f"{where}: has {sorted(row)}; it needs a question: 'prompt', 'messages' or 'prompt_ids'.")
    return Question(name, turns, list(ids) if ids else None)


def _render(question: Question, rendering: Rendering, tokenizer: Any) -> list[int]:
    if question.token_ids is not None and (rendering.template == "none" or not question.messages):
        return question.token_ids
    if rendering.template == "none":
        text = "\n".join(str(message["content"]) for message in question.messages)
        return list(tokenizer.encode(text))
    if rendering.template == "target" and not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of '{tokenizer.name_or_path}' has no chat template; give --chat-template none, or a file."
        )
    options: dict[str, Any] = {} if rendering.thinking is None else {"enable_thinking": rendering.thinking}
    if rendering.template != "target":
        options["chat_template"] = rendering.template
    try:
        text = tokenizer.apply_chat_template(question.messages, tokenize=False, add_generation_prompt=True, **options)
    except Exception as problem:  # Jinja's errors, and whatever a template's own code runs into
        raise ValueError(f"{question.id}: {rendering.label} refuses the messages: {problem}.") from problem
    return list(tokenizer.encode(text, add_special_tokens=False))


def _random_refusal(what: str) -> str:
    return (
        f"{what}; acceptance on random tokens says nothing about acceptance on text, so no claim is made from them. "
        f"Give prompts of real text with --prompts, or leave it out for the built-in ones."
    )
