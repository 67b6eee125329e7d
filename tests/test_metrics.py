"""Counters of draft length decisions as Prometheus gets them."""

from __future__ import annotations

from dataclasses import fields

from prometheus_client import REGISTRY

from vllm_dflash.draft_length import DraftCounters
from vllm_dflash.metrics import DraftMetrics


def value(name: str) -> float:
    return REGISTRY.get_sample_value(f"vllm_dflash:{name}_total") or 0.0


def test_growth_is_counted_once_and_engines_add_up():
    first, second = DraftMetrics(), DraftMetrics()
    before = value("accepted_tokens"), value("step_seconds_off")
    first.update(DraftCounters(steps=2, seconds=0.5, seconds_off=0.25, accepted=3))
    first.update(DraftCounters(steps=3, seconds=0.75, seconds_off=0.25, accepted=7))
    second.update(DraftCounters(accepted=10))
    assert value("accepted_tokens") - before[0] == 17
    assert value("step_seconds_off") - before[1] == 0.25


def test_every_counter_is_exported():
    DraftMetrics()
    exported = {sample.name for metric in REGISTRY.collect() for sample in metric.samples}
    assert len([name for name in exported if name.startswith("vllm_dflash:") and name.endswith("_total")]) == len(
        fields(DraftCounters)
    )
