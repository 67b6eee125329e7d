"""Tool calls that a chat request requires: vLLM's own parser turns them into a grammar, and every call is valid."""

from __future__ import annotations

import json

import jsonschema  # type: ignore[import-untyped]
import pytest
from oracle_drafts import LENGTHS
from tiny_bytes import byte_tokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

pytest_plugins = ["engine_pairs"]

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Romeoville"]}, "days": {"enum": [1, 2, 14]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("weather", "weather_at_sea")
]
QUESTIONS = [f"What will the weather be like in {place}?" for place in ("Rome", "Oslo", "Lima", "Bonn", "Nice", "Cork")]


def sampling_of(tokenizer, question: str, tool_choice) -> tuple[list[int], dict]:
    """Prompt and sampling parameters of a chat request, as the OpenAI server makes them."""
    request = ChatCompletionRequest(
        model="bytes",
        messages=[{"role": "user", "content": question}],
        tools=TOOLS,
        tool_choice=tool_choice,
        parallel_tool_calls=False,
        temperature=0,
    )
    adjusted = ToolParserManager.get_tool_parser("granite")(tokenizer, request.tools).adjust_request(request)
    assert adjusted.structured_outputs is not None
    parameters = adjusted.to_sampling_params(max_tokens=150, default_sampling_params={})
    prompt = tokenizer.apply_chat_template(request.messages, add_generation_prompt=True, return_dict=False)
    return prompt, {"structured_outputs": parameters.structured_outputs, "max_tokens": 150}


@pytest.mark.feature("tool calls", "required and named, as the chat API makes them; text equals plain's, all valid")
@pytest.mark.case("F11")
@pytest.mark.parametrize("named", [False, True], ids=["required", "named"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_required_tool_calls_are_valid(pair, lengths, named):
    pair.schedule(lengths)
    tokenizer = byte_tokenizer()
    choice = {"type": "function", "function": {"name": "weather"}} if named else "required"
    prompts, sampling = zip(*[sampling_of(tokenizer, question, choice) for question in QUESTIONS])
    outputs = pair.compare(list(prompts), list(sampling))
    finished = [output for output in outputs if output.outputs[0].finish_reason == "stop"]
    assert len(finished) > 3  # a random target may go on with ever more calls
    for output in finished:
        answer = json.loads(output.outputs[0].text)
        calls = [answer] if named else [call["parameters"] for call in answer]
        assert calls
        for call in calls:
            jsonschema.validate(call, PARAMETERS)
    assert sum(accepted > 1 for _, accepted in pair.oracle.patterns.elements()) > 10
