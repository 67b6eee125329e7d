"""What a step contained and how long it took: the unit that the cost model is fitted to and that a trace records.

A step is one target pass with what follows it: accept or reject, context K/V of the new rows, and a draft pass for some
of the requests. Its drafted tokens come from the draft pass of the step before.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Final

#: Context rows of plain steps that may wait, and are then written at once: three times as dear as one.
BACKLOG_ROWS: Final = 128


@dataclass(frozen=True)
class StepSize:
    """Counts that a step's time depends on."""

    num_requests: int  # R, requests in the target pass
    num_tokens: int  # rows of the target pass: anchors, drafted tokens, prompt chunks
    num_verified: int = 0  # drafted tokens among them
    context_tokens: int = 0  # sum over requests of the tokens in their cache: K/V that the target reads
    attended_tokens: int = 0  # sum over rows of the context that each attends to; context_tokens where R == num_tokens
    num_drafting: int = 0  # D, requests in the draft pass; 0 = no draft pass
    query_rows: int = 0  # D * draft_block_size
    head_rows: int = 0  # D * P, rows that go through the drafter's LM head
    draft_context_tokens: int = 0  # context_tokens of the D requests
    context_rows: int = 0  # rows whose context K/V are written, those that waited included

    def __post_init__(self) -> None:
        if self.num_requests < 1 or self.num_tokens < self.num_requests:
            raise ValueError(
                f"a step has at least one request and one token for each, but here are {self.num_requests} requests and"
                f" {self.num_tokens} tokens."
            )
        negative = [field.name for field in fields(self) if getattr(self, field.name) < 0]
        if negative:
            raise ValueError(f"counts of a step are not negative, but {', '.join(negative)} is: {self}.")


@dataclass(frozen=True)
class TimedStep:
    """A step and its seconds; parts that were not timed by themselves are None and counted in the whole."""

    size: StepSize
    seconds: float  # the whole step
    draft_seconds: float | None = None  # of them: draft pass, its LM head included; 0 where there was none
    context_seconds: float | None = None  # of them: context K/V

    @property
    def target_seconds(self) -> float | None:
        """Seconds of everything but the draft pass and context K/V; None where these were not timed."""
        if self.draft_seconds is None or self.context_seconds is None:
            return None
        return self.seconds - self.draft_seconds - self.context_seconds

    def to_json(self) -> dict[str, Any]:
        """As JSON knows it; counts that are 0 and parts that were not timed are left out."""
        size = {name: count for name, count in asdict(self.size).items() if count}
        parts = {"draft_seconds": self.draft_seconds, "context_seconds": self.context_seconds}
        timed = {name: value for name, value in parts.items() if value is not None}
        return {"size": size, "seconds": self.seconds} | timed

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TimedStep:
        """The inverse of `to_json`.

        Raises:
            ValueError: a key is missing or unknown, or a count is impossible.
        """
        try:
            return cls(**{**values, "size": StepSize(**values["size"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a timed step: {error}; see StepSize and TimedStep for the keys.") from error
