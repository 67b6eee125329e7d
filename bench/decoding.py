"""Tokens per second while all requests of a batch are being decoded.

Prompts are left out, which cost the same with any draft length, and so is the end: requests of one length end together
without speculation and one after the other with it, and a server would have filled their places.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple


class Decoded(NamedTuple):
    """A batch that was answered."""

    tokens: int  # from when every request had one to when the first one ended
    seconds: float  # of that time
    texts: list[list[int]]  # all tokens of each request


def decode(llm: Any, prompts: list[list[int]], max_tokens: int, drafts: bool = True) -> Decoded:
    """Answer prompts (token ids), all at once, greedily; without drafts where these requests are to have none.

    Raises:
        RuntimeError: a request ended before the last one had a token.
    """
    from vllm import SamplingParams

    engine, label = llm.llm_engine, time.monotonic()
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args={"dflash": drafts})
    names = [f"{label}-{index}" for index in range(len(prompts))]
    for name, prompt in zip(names, prompts):
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    texts: dict[str, list[int]] = {}
    started: tuple[int, float] | None = None
    ended: tuple[int, float] | None = None
    while engine.has_unfinished_requests():
        outputs = engine.step()
        texts |= {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
        now = sum(map(len, texts.values())), time.perf_counter()
        if started is None and len(texts) == len(prompts):
            started = now
        if ended is None and any(output.finished for output in outputs):
            ended = now
    if started is None or ended is None or ended[1] <= started[1]:
        raise RuntimeError("a request ended before all had a token; raise --max-tokens.")
    return Decoded(ended[0] - started[0], ended[1] - started[1], [texts[name] for name in names])


def as_tokens(llm: Any, texts: list[str]) -> list[list[int]]:
    """Chat prompts of user messages."""
    template = llm.get_tokenizer().apply_chat_template
    conversations = [[{"role": "user", "content": text}] for text in texts]
    return [list(template(one, add_generation_prompt=True, return_dict=False)) for one in conversations]
