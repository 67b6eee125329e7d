"""How many drafted tokens each request gets verified, and when not to draft at all.

    cost.py         seconds of a step from what it contains, first from a profile, then corrected from timed steps
    acceptance.py   probability that a drafted token is accepted, from the drafter's maximum probability
    memory.py       what is remembered of each request
    policy.py       verify lengths that maximise tokens per second, once a block has been drafted
    plan.py         which requests are worth a draft pass, before it is made
    seeded.py       lengths of sampled requests with a seed: their own history decides, nothing else
    controller.py   the three calls of a proposer's step: plan, choose, observe
    per_step.py     one length for all requests of a step, where the scheduler sets it
    rung_times.py   by how much steps of one length differ from what the cost model says
    guess.py        prices before anything is measured
    schedule.py     the same three calls with lengths given in advance
    trace.py        records of all this in a file, for bench/simulate.py

Pure Python and NumPy; imports neither vLLM nor torch, and never reads a clock: times come in as arguments.
"""

from vllm_dflash.draft_length.acceptance import AcceptanceEstimate
from vllm_dflash.draft_length.controller import DraftLengthController, DraftLengthSettings
from vllm_dflash.draft_length.cost import CostModel
from vllm_dflash.draft_length.counters import CounterReports, DraftCounters
from vllm_dflash.draft_length.decision import DraftDecision, DraftPlan
from vllm_dflash.draft_length.per_step import DraftRows, StepLengthController, StepLengthSettings, ladder_of
from vllm_dflash.draft_length.policy import choose_lengths
from vllm_dflash.draft_length.schedule import ScheduledLengths, ScheduledStepLengths
from vllm_dflash.draft_length.steps import BACKLOG_ROWS, StepSize, TimedStep
from vllm_dflash.draft_length.trace import Trace, TraceWriter, read_trace

__all__ = [
    "BACKLOG_ROWS",
    "AcceptanceEstimate",
    "CostModel",
    "CounterReports",
    "DraftCounters",
    "DraftDecision",
    "DraftLengthController",
    "DraftLengthSettings",
    "DraftPlan",
    "DraftRows",
    "ScheduledLengths",
    "ScheduledStepLengths",
    "StepLengthController",
    "StepLengthSettings",
    "StepSize",
    "TimedStep",
    "Trace",
    "TraceWriter",
    "choose_lengths",
    "ladder_of",
    "read_trace",
]
