"""`vllm-dflash regenerate`: have the target itself answer prompts, because a drafter must learn what the target writes.

    {"id", "prompt"}              -> {"id", "source", "prompt", "response", "finish", "prompt_ids", "response_ids"}
    {"id", "messages": [...]}     -> {"id", "source", "messages", "finish", "input_ids", "loss_mask"}

Answers that are there already are replaced. In a conversation each question is asked after the target's own earlier
answers. Token ids are kept as generated: a text can often be tokenised in another way than the target wrote it.

Every finished row is written at once. A run that was stopped goes on when it is started again with the same flags.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dflash.training.chat import follow_up_ids, load_tokenizer, prompt_ids, read_messages
from vllm_dflash.training.rows import file_stem, read_rows

if TYPE_CHECKING:
    from vllm_dflash.training.generators import Answer, Generator

_ASKING_ROLES = ("system", "developer", "user")


@dataclass
class _Conversation:
    """A row on its way: questions still to ask, and what has been said."""

    id: str
    source: str
    where: str
    questions: list[list[dict[str, Any]]]  # messages before each answer
    is_prompt: bool  # a row with one 'prompt'; else messages
    history: list[dict[str, Any]] = field(default_factory=list)
    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    finish: str = ""

    def ask(self, tokenizer: Any) -> list[int]:
        """Token ids of everything up to the next answer."""
        question = self.questions.pop(0)
        if self.history:
            new = follow_up_ids(self.history, question, self.where, tokenizer)
        else:
            new = prompt_ids(question, self.where, tokenizer)
        self.history += question
        self.input_ids += new
        self.loss_mask += [False] * len(new)
        return self.input_ids

    def hear(self, answer: Answer, tokenizer: Any) -> None:
        """Take the answer; one that was cut short is the last."""
        text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        self.history.append({"role": "assistant", "content": text})
        self.input_ids += answer.token_ids
        self.loss_mask += [True] * len(answer.token_ids)
        self.finish = answer.finish
        if answer.finish == "length":
            self.questions.clear()

    def withdraw_question(self) -> None:
        """Undo the last `ask`, which nobody can answer, and ask nothing more."""
        while self.history and self.history[-1]["role"] != "assistant":
            self.history.pop()
        while self.loss_mask and not self.loss_mask[-1]:
            self.input_ids.pop()
            self.loss_mask.pop()
        self.questions.clear()

    def row(self) -> dict[str, Any]:
        """What is written."""
        row: dict[str, Any] = {"id": self.id, "source": self.source}
        if self.is_prompt:
            split = self.loss_mask.index(True)
            row |= {"prompt": self.history[0]["content"], "response": self.history[1]["content"]}
            row |= {"finish": self.finish, "prompt_ids": self.input_ids[:split], "response_ids": self.input_ids[split:]}
        else:
            row |= {"messages": self.history, "finish": self.finish, "input_ids": self.input_ids}
            row["loss_mask"] = [int(supervised) for supervised in self.loss_mask]
        return row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    shown = "(default %(default)s)"
    parser.add_argument("--target", required=True, help="target that answers")
    parser.add_argument(
        "--data", required=True, nargs="+", help="files, folders or Hugging Face data sets with prompts"
    )
    parser.add_argument("--output", required=True, help="file of answers, .jsonl; rows that it has are not made again")
    parser.add_argument(
        "--engine", choices=("auto", "vllm", "transformers"), default="auto", help="auto: vLLM if there"
    )
    parser.add_argument("--max-tokens", type=int, default=512, help=f"tokens per answer {shown}")
    parser.add_argument("--max-length", type=int, default=4096, help=f"tokens of prompt and answers together {shown}")
    parser.add_argument("--temperature", type=float, default=0.0, help=f"0 is greedy decoding {shown}")
    parser.add_argument("--batch-size", type=int, default=64, help=f"answers made at the same time {shown}")
    parser.add_argument("--limit", type=int, default=None, metavar="N", help="only the first N rows of the data")
    parser.add_argument("--seed", type=int, default=0, help=f"of sampling {shown}")


def run(args: argparse.Namespace) -> int:
    """Answer all rows that the output lacks; returns the exit code.

    Raises:
        ValueError: a row has no prompt, or the output is not one of this command.
    """
    output = Path(args.output)
    if output.suffix != ".jsonl":
        raise ValueError(f"--output is '{output}'; its name must end in .jsonl, so that rows can be added.")
    done = _finished_ids(output)
    rows = list(itertools.islice((pair for path in args.data for pair in read_rows(path)), args.limit))
    conversations: dict[str, _Conversation] = {}
    for where, row in rows:
        conversation = _conversation(row, where)
        conversations.setdefault(conversation.id, conversation)
    todo = [c for c in conversations.values() if c.id not in done]
    print(
        f"{len(rows)} rows: {len(rows) - len(conversations)} repeat an id, {len(conversations) - len(todo)} are "
        f"answered already, {len(todo)} to do"
    )
    if not todo:
        return 0
    tokenizer = load_tokenizer(args.target)
    generator = _generator(args, tokenizer)
    output.parent.mkdir(parents=True, exist_ok=True)
    num_skipped = _answer_all(todo, generator, tokenizer, output, args.seed)
    print(
        f"{len(todo) - num_skipped} rows answered into '{output}'; {num_skipped} skipped, whose prompt leaves no room "
        f"in {generator.max_length} tokens"
    )
    return 0


def _answer_all(todo: list[_Conversation], generator: Generator, tokenizer: Any, output: Path, seed: int) -> int:
    """Answer and write; returns how many had to be skipped."""
    from tqdm import tqdm

    waiting, asked, num_skipped = iter(todo), {}, 0

    def submit(conversation: _Conversation) -> bool:
        ids = conversation.ask(tokenizer)
        if len(ids) >= generator.max_length:
            conversation.withdraw_question()
            return False
        asked[conversation.id] = conversation
        generator.submit(conversation.id, ids, _seed(seed, conversation))
        return True

    with open(output, "a", encoding="utf-8") as file, tqdm(total=len(todo), unit="row") as progress:
        num_tokens = 0
        while True:
            while len(asked) < generator.window and (conversation := next(waiting, None)) is not None:
                if not submit(conversation):
                    num_skipped += 1
                    progress.update()
            if not asked:
                return num_skipped
            for key, answer in generator.step():
                conversation = asked.pop(key)
                conversation.hear(answer, tokenizer)
                num_tokens += len(answer.token_ids)
                if not (conversation.questions and submit(conversation)):
                    file.write(json.dumps(conversation.row(), ensure_ascii=False) + "\n")
                    file.flush()
                    progress.update()
            progress.set_postfix_str(f"{num_tokens / max(progress.format_dict['elapsed'], 1e-9):.0f} tok/s")


def _conversation(row: dict[str, Any], where: str) -> _Conversation:
    prompt = row.get("prompt")
    turns = row.get("messages") or row.get("conversations")
    if turns:
        questions = _questions(read_messages(turns, where), where)
    elif isinstance(prompt, str) and prompt:
        questions = [[{"role": "user", "content": prompt}]]
    else:
        raise ValueError(
            f"{where}: a row with {sorted(row)} has no prompt; it needs 'prompt', a string, or 'messages'."
        )
    source = str(row.get("source", file_stem(where)))
    return _Conversation(str(row.get("id", where)), source, where, questions, is_prompt=not turns)


def _questions(messages: list[dict[str, Any]], where: str) -> list[list[dict[str, Any]]]:
    """The messages before each answer. Answers to no one are left out, a last question without answer is asked."""
    questions: list[list[dict[str, Any]]] = [[]]
    for message in messages:
        if message["role"] == "assistant":
            if questions[-1]:
                questions.append([])
        elif message["role"] in _ASKING_ROLES:
            questions[-1].append({"role": message["role"], "content": message["content"]})
        else:
            raise ValueError(
                f"{where}: a message of role '{message['role']}' answers a call that the target may not make again; "
                f"leave the row out."
            )
    questions = [question for question in questions if question]
    if not questions:
        raise ValueError(f"{where}: the conversation asks nothing; it needs a message of role 'user'.")
    return questions


def _generator(args: argparse.Namespace, tokenizer: Any) -> Generator:
    from vllm_dflash.training.generators import GenerationSettings, TransformersGenerator, VllmGenerator

    settings = GenerationSettings(args.max_tokens, args.max_length, args.temperature, args.batch_size)
    has_vllm = importlib.util.find_spec("vllm") is not None
    if args.engine == "vllm" and not has_vllm:
        raise RuntimeError("--engine vllm needs vLLM, which is not installed; install it or use --engine transformers.")
    uses_vllm = has_vllm if args.engine == "auto" else args.engine == "vllm"
    print(f"answers by {'vLLM' if uses_vllm else 'transformers'}")
    if uses_vllm:
        return VllmGenerator(args.target, settings)
    return TransformersGenerator(args.target, tokenizer, settings)


def _finished_ids(output: Path) -> set[str]:
    """Ids of the rows in an earlier output; a last line that was not written to its end is removed from it."""
    if not output.exists():
        return set()
    content = output.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with open(output, "r+b") as file:
            file.truncate(whole)
    try:
        return {str(json.loads(line)["id"]) for line in content[:whole].splitlines()}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"'{output}' exists and holds something else than answers ({type(error).__name__}: {error}); give another "
            f"file, or delete it."
        ) from error


def _seed(seed: int, conversation: _Conversation) -> int:
    """A seed for the next answer that depends on nothing but its row."""
    name = f"{seed}/{conversation.id}/{len(conversation.history)}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
