"""Time and memory of one training step: blocks attended a few at a time, against one dense mask over all, in one run.

    python bench/bench_training_step.py

The dense form is what z-lab-style trainers do without Flex Attention: one mask [blocks, context + blocks] for
scaled_dot_product_attention. Each measurement is a process of its own, so that its peak memory is its own. The time of
a step should grow with the context only by attention and by the context's keys and values.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from setting import append_csv, circumstances

VOCABULARY = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--anchors", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", nargs=2, metavar=("KIND", "CONTEXT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], int(options.one[1]), options)))
        return
    rows = []
    for context in options.contexts:
        found = {kind: in_own_process(kind, context) for kind in ("blockwise", "dense")}
        for kind, result in found.items():
            ratio = found["dense"]["seconds"] / result["seconds"]
            row = {"attention": kind, "context": context, "anchors": options.anchors, "block": options.block_size,
                   "layers": options.layers, "seconds": f"{result['seconds']:.3f}",
                   "range": f"{result['low']:.3f}-{result['high']:.3f}", "dense_over_this": f"{ratio:.2f}",
                   "peak_MiB_over_model": round(result["peak_mib"]), "rounds": options.rounds}  # fmt: skip
            print(row, flush=True)
            rows.append(row | circumstances())
    append_csv("training_step", rows)


def in_own_process(kind: str, context: int) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--one", kind, str(context)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(kind: str, context: int, options: argparse.Namespace) -> dict[str, float]:
    import torch

    from vllm_dflash.training import model
    from vllm_dflash.training.loss import mix_labels, slot_cross_entropy

    torch.manual_seed(0)
    if kind == "dense":
        model.block_attention = dense_attention
    drafter, row, blocks, embedding = make_step(context, options)
    head = torch.randn(VOCABULARY, 576)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(options.rounds + 1):
        started = time.perf_counter()
        hidden = drafter(row, blocks, embedding)
        losses, _ = slot_cross_entropy(hidden.flatten(0, 1), head, mix_labels(blocks.labels.flatten(), None, None, 0.0))
        losses.mean().backward()
        drafter.zero_grad()
        seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    measured = seconds[1:]
    return {
        "seconds": statistics.median(measured),
        "low": min(measured),
        "high": max(measured),
        "peak_mib": peak / 1024,
    }


def make_step(context: int, options: argparse.Namespace) -> tuple[Any, Any, Any, Any]:
    """A drafter, one document of `context` tokens, and blocks spread over it."""
    import torch

    from vllm_dflash.config import DFlashConfig
    from vllm_dflash.training.blocks import draw_anchors, make_blocks, pack
    from vllm_dflash.training.model import Drafter
    from vllm_dflash.training.target_features import SequenceFeatures

    raw = {
        "architectures": ["DFlashDraftModel"], "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": options.layers, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "vocab_size": VOCABULARY, "block_size": options.block_size, "rope_theta": 100000.0,
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": [1, 8, 14, 20, 27]},
    }  # fmt: skip
    drafter = Drafter(DFlashConfig.from_dict(raw, "bench"))
    ids = torch.randint(VOCABULARY, (context,))
    features = SequenceFeatures(torch.randn(context, 5 * 576).bfloat16(), None, None)
    row = pack([(ids, torch.ones(context, dtype=torch.bool), features)])
    generator = torch.Generator().manual_seed(0)
    anchors = draw_anchors(row, options.anchors, options.block_size, "random", generator)
    return drafter, row, make_blocks(row, anchors, options.block_size), torch.randn(VOCABULARY, 576)


def dense_attention(q: Any, block_kv: Any, context_kv: Any, blocks: Any, visibility: Any, backend: str) -> Any:
    """All blocks at once under one dense mask."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    keys, values = (torch.cat([c, b.flatten(0, 1)]) for c, b in zip(context_kv, block_kv))
    group = q.shape[2] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    num_blocks, num_slots, length = len(q), q.shape[1], blocks.length
    rows = torch.arange(len(context_kv[0]))
    context = (rows >= blocks.document_start[:, None]) & (rows < blocks.anchors[:, None])
    block = torch.arange(num_blocks)
    own = block.repeat_interleave(num_slots)[:, None] == block.repeat_interleave(length)
    mask = torch.cat([context.repeat_interleave(num_slots, 0), own], 1)
    out = scaled_dot_product_attention(
        q.flatten(0, 1).transpose(0, 1)[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], attn_mask=mask
    )
    return out[0].transpose(0, 1).reshape(q.shape)


if __name__ == "__main__":
    main()
