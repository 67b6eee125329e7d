"""Rows of a step, fused features and context K/V on a shape, for bench_kernels.py."""

from __future__ import annotations

from typing import Any

import torch
from floors import KV_BLOCK_SIZE, Case
from implementations import ROUNDED, SQUARES, Implementations, Outputs, compared, vllm_ops
from torch.nn import functional

from vllm_dflash.triton_kernels import context_kv as injection
from vllm_dflash.triton_kernels import draft_inputs as inputs
from vllm_dflash.triton_kernels import feature_fusion as fusion
from vllm_dflash.triton_kernels.cache_table import CacheTable

CONTEXT = 4096  # where the context rows of a step stand
MASK_TOKEN_ID = 1
EPS = 1e-6


def draft_inputs(case: Case, device: str, is_interpreted: bool) -> Implementations:
    """As many requests as there are blocks of context rows; each rejected one row less than it has."""
    queries = case.model.num_query_per_req
    starts = torch.arange(0, case.rows + queries, queries, dtype=torch.int32).clamp(max=case.rows)
    counts = starts.diff()
    num_reqs = len(counts)
    positions = torch.cat([CONTEXT + torch.arange(int(count)) for count in counts])
    pages = -(-(CONTEXT + 2 * queries) // KV_BLOCK_SIZE)
    table = torch.randperm(num_reqs * pages).int().view(num_reqs, pages)
    anchors = torch.arange(num_reqs, dtype=torch.int32)
    on_cpu = (anchors, positions, starts, counts - 1, table, torch.arange(num_reqs))
    arguments = tuple(tensor.to(device) for tensor in on_cpu)
    options = (KV_BLOCK_SIZE, MASK_TOKEN_ID, queries, CONTEXT + 2 * queries)
    run: Any = inputs._launch if is_interpreted else inputs.draft_inputs

    def baseline() -> Outputs:
        from vllm.v1.spec_decode import utils

        anchor, position, start, rejected, pages_of, _ = arguments
        rows = inputs.DraftRows(
            *(position.new_empty(case.rows) for _ in range(2)),
            anchor.new_empty(num_reqs * queries),
            *(position.new_empty(num_reqs * queries) for _ in range(2)),
            anchor.new_empty(num_reqs * (queries - 1)),
        )
        utils._copy_and_expand_dflash_inputs(
            next_token_ids_ptr=anchor,
            target_positions_ptr=position,
            out_input_ids_ptr=rows.query_ids,
            out_context_positions_ptr=rows.context_positions,
            out_query_positions_ptr=rows.query_positions,
            out_context_slot_mapping_ptr=rows.context_slots,
            out_query_slot_mapping_ptr=rows.query_slots,
            out_token_indices_ptr=rows.sample_indices,
            block_table_ptr=pages_of,
            block_table_stride=pages_of.stride(0),
            query_start_loc_ptr=start,
            num_rejected_tokens_ptr=rejected,
            parallel_drafting_token_id=MASK_TOKEN_ID,
            block_size=KV_BLOCK_SIZE,
            num_query_per_req=queries,
            num_speculative_tokens=queries - 1,
            total_input_tokens=case.rows,
            max_tokens_per_req=2 * queries,
            triton_block_size=2 * queries,
            has_num_rejected=True,
        )
        return rows._asdict()

    missing = {"twin": "works on a CPU's memory", "compiled": "the twin is written in numpy"}
    return Implementations(
        {
            "ours": lambda: run(*arguments, *options)._asdict(),
            "twin": lambda: inputs.draft_inputs_torch(*on_cpu, *options)._asdict(),
            "baseline": baseline,
        },
        lambda actual, expected: compared(actual, expected, dict.fromkeys(inputs.DraftRows._fields)),
        missing if device == "cuda" else missing | {"baseline": "vLLM launches a Triton kernel"},
    )


def feature_fusion(case: Case, device: str, is_interpreted: bool) -> Implementations:
    model = case.model
    features = [
        torch.randn(case.rows, model.hidden, device=device, dtype=torch.bfloat16) for _ in range(model.num_features)
    ]
    fan_in = model.num_features * model.hidden
    weight = torch.randn(model.hidden, fan_in, device=device, dtype=torch.bfloat16) * fan_in**-0.5
    run: Any = fusion._launch if is_interpreted else fusion.feature_fusion

    def differences(actual: Outputs, expected: Outputs) -> list[str]:
        # How many tiles the sum of squares has is the implementation's affair.
        actual, expected = (one | {"sum_squares": one["sum_squares"].sum(1)} for one in (dict(actual), dict(expected)))
        return compared(actual, expected, {"values": ROUNDED, "sum_squares": SQUARES})

    return Implementations(
        {
            "ours": lambda: run(features, weight)._asdict(),
            "twin": lambda: fusion.feature_fusion_torch(features, weight)._asdict(),
            "baseline": lambda: {"values": functional.linear(torch.cat(features, -1), weight)},
        },
        differences,
    )


def context_kv(case: Case, device: str, is_interpreted: bool) -> Implementations:
    """One row has no slot, as a rejected one. The sums of squares are there, as `feature_fusion` leaves them."""
    model, rows, layers = case.model, case.rows, case.model.num_layers
    heads, head_dim = model.num_kv_heads, model.head_dim

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    features, weight = randn(rows, model.hidden), randn(model.kv_rows, model.hidden) * model.hidden**-0.5
    hidden_norm, k_norm = 1 + 0.1 * randn(model.hidden), 1 + 0.1 * randn(layers, head_dim)
    folded = injection.fold_norm(weight, hidden_norm)
    squares = features.float().square().sum(1, keepdim=True)
    angles = torch.rand(CONTEXT, head_dim // 2, device=device) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).bfloat16()
    positions = torch.randint(CONTEXT, (rows,), device=device)
    num_pages = -(-rows // KV_BLOCK_SIZE) + 1
    slots = torch.randperm(num_pages * KV_BLOCK_SIZE, device=device)[:rows]
    if rows > 1:
        slots[0] = inputs.PAD_SLOT_ID

    def caches() -> Outputs:
        # As vLLM keeps them in its order NHD. What stays zero in both caches adds nothing to errors or values.
        shape = (layers, num_pages, KV_BLOCK_SIZE, heads, 2 * head_dim)
        keys, values = torch.zeros(shape, device=device, dtype=torch.bfloat16).chunk(2, -1)
        return {"keys": keys, "values": values}

    written = {name: caches() for name in ("ours", "twin", "baseline")}
    tables = {name: CacheTable(list(one["keys"]), list(one["values"])) for name, one in written.items()}
    arguments = (features, squares, folded, None, k_norm, cos_sin, positions, slots)

    def stored(name: str, run: Any) -> Outputs:
        run(*arguments, tables[name], EPS, EPS, True)
        return written[name]

    def baseline() -> Outputs:
        ops = vllm_ops()
        normed = torch.empty_like(features)
        ops.rms_norm(normed, features, hidden_norm, EPS)
        kv = functional.linear(normed, weight).view(rows, layers, 2, heads, head_dim)
        raw_keys, values = kv.permute(2, 1, 0, 3, 4).contiguous()
        keys = torch.empty_like(raw_keys)
        ops.rms_norm(keys, raw_keys, k_norm, EPS)
        flat = keys.view(layers * rows, heads * head_dim)
        ops.rotary_embedding(positions.repeat(layers), flat, None, head_dim, cos_sin, True)
        for layer in range(layers):
            cache = (written["baseline"]["keys"][layer], written["baseline"]["values"][layer])
            ops.reshape_and_cache_flash(keys[layer], values[layer], *cache, slots, "auto", one, one)
        return written["baseline"]

    def torch_ops() -> Outputs:
        # For machines without vLLM: the same steps by torch, with two launches more for norm and rotation, and an
        # insert for keys and one for values.
        normed = functional.rms_norm(features, (model.hidden,), hidden_norm, EPS)
        kv = functional.linear(normed, weight).view(rows, layers, 2, heads, head_dim)
        raw_keys, values = kv.permute(2, 1, 0, 3, 4).contiguous()
        keys = functional.rms_norm(raw_keys, (head_dim,), None, EPS) * k_norm[:, None, None]
        cos, sin = cos_sin[positions][:, None].chunk(2, -1)
        first, second = keys.chunk(2, -1)
        keys = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        for layer in range(layers):
            written["baseline"]["keys"][layer].flatten(0, 1).index_copy_(0, some_slots, keys[layer])
            written["baseline"]["values"][layer].flatten(0, 1).index_copy_(0, some_slots, values[layer])
        return written["baseline"]

    one, some_slots = torch.ones(1, device=device), slots.clamp(min=0)
    ours: Any = injection._launch if is_interpreted else injection.context_kv
    return Implementations(
        {
            "ours": lambda: stored("ours", ours),
            "twin": lambda: stored("twin", injection.context_kv_torch),
            "baseline": baseline,
            "torch_ops": torch_ops,
        },
        lambda actual, expected: compared(actual, expected, {"keys": ROUNDED, "values": ROUNDED}),
        {} if device == "cuda" else {"baseline": "vLLM writes such a cache on GPUs only"},
    )
