"""The same questions to several engines, round after round."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from decoding import decode_in_turn, greedy


class Answered(NamedTuple):
    """What an engine made of a round's questions."""

    rate: float  # tokens per second
    texts: list[list[int]]  # tokens of each


def measure(
    engines: dict[str, Any],
    options: argparse.Namespace,
    ask: Callable[[int], list[str]],
    answer: Callable[[dict[str, Any], list[str], int], dict[str, Answered]],
) -> dict[str, list[float]]:
    """Tokens per second of each engine in each round; raises if greedy float32 texts differ.

    Args:
        ask: the questions of a round.
        answer: gets the engines, the questions and max_tokens.
    """
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for round_number in range(options.rounds + 1):  # the first one warms up
        questions = ask(round_number)
        # Reversing every other round keeps a slow drift of the machine from favouring one place in the order.
        order = list(engines)[:: 1 if round_number % 2 else -1]
        answered = answer({name: engines[name] for name in order}, questions, options.max_tokens)
        texts = [one.texts for one in answered.values()]
        if options.dtype == "float32" and any(text != texts[0] for text in texts):
            raise SystemExit(
                f"texts differ in round {round_number} with {len(questions)} questions; no speed is reported."
            )
        if round_number > 0:
            for name, one in answered.items():
                rates[name].append(one.rate)
    return rates


def while_decoding(engines: dict[str, Any], questions: list[str], max_tokens: int) -> dict[str, Answered]:
    """For `measure`: what decoding.py counts, engines in turn."""
    requests = greedy(next(iter(engines.values())), questions, max_tokens)
    return {name: Answered(one.rate, one.texts) for name, one in decode_in_turn(engines, requests).items()}
