"""Attention of blocks over a paged context: kernel and twin against masks made by loops, and against each other.

Memory that no query may see is NaN throughout: free pages, the rest of the last page, buffers before they are written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from vllm_dflash.triton_kernels import block_attention_plan as plan
from vllm_dflash.triton_kernels.block_attention import block_attention, block_attention_torch
from vllm_dflash.triton_kernels.block_attention_launch import launch_block_attention
from vllm_dflash.triton_kernels.block_attention_merge import merge_splits, merge_splits_torch
from vllm_dflash.triton_kernels.block_rope import BlockRope

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = [
    pytest.param(block_attention_torch, id="twin"),
    pytest.param(launch_block_attention, id="kernel"),
]
NAN = float("nan")
#: dtype -> most error at one element and over all (RMS), relative to the RMS of the expected values. float32 differs by
#: the order of sums. Else an output is rounded (half a unit in the last place: 2^-9 of bf16, 2^-12 of fp16; large
#: elements are several RMS), and the kernel rounds the softmax's weights as well, which a twin in float32 does not.
TOLERANCES = {
    torch.float32: (2e-5, 2e-6),
    torch.bfloat16: (2**-5, 2**-8),
    torch.float16: (2**-8, 2**-11),
}


class Case(NamedTuple):
    """Shapes of a batch."""

    num_query: int
    group: int = 1
    num_kv_heads: int = 1
    head_dim: int = 64
    page_size: int = 16
    contexts: tuple[int, ...] = (37,)
    dtype: torch.dtype = torch.float32
    layout: str = "NHD"


@pytest.fixture(autouse=True)
def poisoned_buffers(monkeypatch):
    """What the launcher allocates is NaN before it is written."""
    empty = torch.Tensor.new_empty

    def new_empty(self: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        made = empty(self, *size, **options)
        return made.fill_(NAN) if made.is_floating_point() and made.element_size() > 1 else made

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


def batch(case: Case, seed: int = 0) -> dict[str, Any]:
    """Random arguments; queries, keys and values are views of one projection, as the model has them."""
    generator = torch.Generator().manual_seed(seed)
    num_reqs, heads = len(case.contexts), case.num_kv_heads
    num_rows = num_reqs * case.num_query
    sizes = [heads * case.group, heads, heads]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    qkv = random(num_rows, sum(sizes), case.head_dim)
    max_pages = max(max(case.contexts), 0) // case.page_size + 2
    num_pages = num_reqs * max_pages + 1
    pages = torch.full((num_pages, heads, case.page_size, 2 * case.head_dim), NAN, dtype=case.dtype)
    cache = pages.transpose(1, 2) if case.layout == "HND" else torch.full_like(pages.transpose(1, 2).contiguous(), NAN)
    table = torch.full((num_reqs, max_pages), 2**30, dtype=torch.int32)  # far beyond the cache
    free = torch.randperm(num_pages, generator=generator).tolist()
    for request, length in enumerate(case.contexts):
        for first in range(0, length, case.page_size):
            page, used = free.pop(), min(case.page_size, length - first)
            table[request, first // case.page_size] = page
            cache[page, :used] = random(used, heads, 2 * case.head_dim)
    key_cache, value_cache = cache.to(DEVICE).split(case.head_dim, -1)
    query, key, value = qkv.to(DEVICE).split(sizes, 1)
    return {
        "query": query,
        "key": key,
        "value": value,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_table": table.to(DEVICE),
        "context_lens": torch.tensor(case.contexts, dtype=torch.int32, device=DEVICE),
        "num_query_per_req": case.num_query,
        "scale": case.head_dim**-0.5,
    }


def attend(run: Callable[..., torch.Tensor], arguments: dict[str, Any], **more: Any) -> torch.Tensor:
    """The output, written into NaN; rows behind it stay as they are."""
    query = arguments["query"]
    memory = torch.full((len(query) + 2, *query.shape[1:]), NAN, dtype=query.dtype, device=DEVICE)
    memory[len(query) :] = 7.0
    out = run(**arguments, **more, out=memory[: len(query)])
    assert out._base is memory
    assert (memory[len(query) :] == 7.0).all()
    return out


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    most, rms = TOLERANCES[dtype or actual.dtype]
    error, size = (actual.double() - expected.double()), expected.double().pow(2).mean().sqrt()
    assert not actual.isnan().any()
    assert error.abs().max() <= most * size, (error.abs().max() / size).item()
    assert error.pow(2).mean().sqrt() <= rms * size, (error.pow(2).mean().sqrt() / size).item()


def by_loops(arguments: dict[str, Any], causal: bool = False, window: int = 0) -> torch.Tensor:
    """The output by torch's attention in float64, with a mask and a gather made token by token."""
    query, num_query = arguments["query"], arguments["num_query_per_req"]
    page_size, group = arguments["key_cache"].shape[1], query.shape[1] // arguments["key"].shape[1]
    outputs = []
    for request, length in enumerate(arguments["context_lens"].tolist()):
        rows = range(request * num_query, (request + 1) * num_query)
        tokens: dict[str, list[torch.Tensor]] = {"key": [], "value": []}
        for name, found in tokens.items():
            for position in range(length):
                page = int(arguments["block_table"][request, position // page_size])
                found.append(arguments[f"{name}_cache"][page, position % page_size])
            found.extend(arguments[name][row] for row in rows)
        mask = torch.zeros(num_query, length + num_query, dtype=torch.bool, device=DEVICE)
        for i in range(num_query):
            for position in range(length + num_query):
                distance = length + i - position
                is_after = causal and distance < 0
                mask[i, position] = not is_after and (window == 0 or abs(distance) < window)
        keys, values = (torch.stack(found).double().repeat_interleave(group, 1) for found in tokens.values())
        q, k, v = (x.transpose(0, 1) for x in (query[rows.start : rows.stop].double(), keys, values))
        outputs.append(scaled_dot_product_attention(q, k, v, mask, scale=arguments["scale"]).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("case", "causal", "window"),
    [
        pytest.param(Case(4, contexts=(0, 1, 16)), False, 0, id="empty, one token, page boundary"),
        pytest.param(Case(8, 3, contexts=(53, 0)), True, 0, id="three pages + 5, causal"),
        pytest.param(Case(13, 2, 2, page_size=32, contexts=(33,)), False, 5, id="window within the block"),
        pytest.param(Case(8, 3, contexts=(150,)), False, 88, id="query 0 sees the last token of the first tile"),
        pytest.param(Case(8, 3, contexts=(150, 3)), True, 87, id="query 0 sees nothing of the first tile"),
        pytest.param(Case(4, contexts=(20,)), False, 1, id="window of one token"),
        pytest.param(Case(4, contexts=(20,)), False, 1000, id="window larger than all"),
        pytest.param(Case(2, 3, head_dim=16, page_size=24, contexts=(50,)), True, 0, id="page that is no power of two"),
    ],
)
def test_attention_equals_torchs_with_a_mask_by_loops(run, case, causal, window):
    arguments = batch(case)
    actual = attend(run, arguments, causal=causal, sliding_window=window)
    assert_near(actual, by_loops(arguments, causal, window))


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (Case(16, 3, head_dim=128, contexts=(69,), dtype=torch.bfloat16), {}),
        (Case(16, 8, head_dim=128, page_size=128, contexts=(130,), dtype=torch.bfloat16), {"causal": True}),
        (Case(16, 16, head_dim=64, page_size=32, contexts=(40,), dtype=torch.bfloat16), {"sliding_window": 30}),
        (Case(13, 1, 2, head_dim=128, page_size=32, contexts=(96,), dtype=torch.float16), {}),
        (Case(4, 8, head_dim=128, contexts=(17,)), {}),
    ],
    ids=["group of 3", "group of 8", "two tiles of rows", "float16", "float32"],
)
def test_kernel_equals_twin(case, options):
    arguments = batch(case)
    expected = attend(block_attention_torch, arguments, **options)
    assert_near(attend(launch_block_attention, arguments, **options), expected)


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@pytest.mark.parametrize(("causal", "window"), [(False, 0), (True, 0), (False, 3), (True, 3), (False, 6), (True, 6)])
def test_visible_tokens(run, causal, window):
    """Zero queries weigh all that is visible equally, and values that are unit vectors show which tokens that is."""
    num_query, length = 4, 5
    arguments = batch(Case(num_query, contexts=(length,)))
    arguments["query"].zero_()
    page = int(arguments["block_table"][0, 0])
    arguments["value_cache"][page, :length, 0] = torch.eye(64, device=DEVICE)[:length]
    arguments["value"][:, 0] = torch.eye(64, device=DEVICE)[length : length + num_query]
    weights = attend(run, arguments, causal=causal, sliding_window=window)[:, 0]
    expected = {
        (False, 0): [[*range(9)]] * 4,
        (True, 0): [[*range(6)], [*range(7)], [*range(8)], [*range(9)]],
        (False, 3): [[3, 4, 5, 6, 7], [4, 5, 6, 7, 8], [5, 6, 7, 8], [6, 7, 8]],
        (True, 3): [[3, 4, 5], [4, 5, 6], [5, 6, 7], [6, 7, 8]],
        (False, 6): [[*range(9)], [*range(1, 9)], [*range(2, 9)], [*range(3, 9)]],
        (True, 6): [[*range(6)], [*range(1, 7)], [*range(2, 8)], [*range(3, 9)]],
    }[causal, window]
    assert [row.nonzero().flatten().tolist() for row in weights] == expected
    for row, visible in zip(weights, expected):
        assert_near(row[visible], torch.full((len(visible),), 1 / len(visible), device=DEVICE))


@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 90, "causal": True}, {"sliding_window": 4}],
    ids=["full", "window", "short window"],
)
def test_number_of_splits_changes_nothing(options):
    """Some splits have no token, and in the short window query 3 sees none of the tokens 384 and 385 of split 1."""
    arguments = batch(Case(4, 2, contexts=(386, 5, 0)))
    sinks = torch.tensor([0.5, -1.0], device=DEVICE)
    one = attend(launch_block_attention, arguments, num_splits=1, sinks=sinks, **options)
    assert_near(one, attend(block_attention_torch, arguments, sinks=sinks, **options))
    for num_splits in (2, 5):
        assert_near(attend(launch_block_attention, arguments, num_splits=num_splits, sinks=sinks, **options), one)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_padded_requests_get_zeros_and_read_nothing(num_splits):
    arguments = batch(Case(4, 2, contexts=(-1, 20, -5)))
    for name in ("query", "key", "value"):
        arguments[name][:4] = NAN
        arguments[name][8:] = NAN
    out = attend(launch_block_attention, arguments, num_splits=num_splits)
    assert (out[:4] == 0).all()
    assert (out[8:] == 0).all()
    assert_near(out, attend(block_attention_torch, arguments))


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_no_request(run):
    arguments = batch(Case(4, contexts=(3,)))
    for name in ("query", "key", "value", "block_table", "context_lens"):
        arguments[name] = arguments[name][:0]
    assert attend(run, arguments).shape == (0, 1, 64)


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_sinks_weigh_as_one_more_token_without_value(run):
    """Zero queries: every one of the 12 tokens weighs 1, the sink exp(sink)."""
    arguments = batch(Case(4, 2, contexts=(8,)))
    arguments["query"].zero_()
    page = int(arguments["block_table"][0, 0])
    arguments["value_cache"][page, :8] = 1.0
    arguments["value"][:] = 1.0
    sinks = torch.tensor([0.0, 3.0], device=DEVICE)
    out = attend(run, arguments, sinks=sinks)
    assert_near(out[:, 0], torch.full((4, 64), 12 / 13, device=DEVICE))
    assert_near(out[:, 1], torch.full((4, 64), 12 / (12 + 20.085536923187668), device=DEVICE))


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@pytest.mark.parametrize("as_bytes", [False, True])
def test_fp8_cache_is_scaled_and_the_block_is_not(run, as_bytes):
    arguments = batch(Case(8, 3, contexts=(70,), dtype=torch.bfloat16))
    scales = {"k_scale": torch.tensor([0.25], device=DEVICE), "v_scale": torch.tensor([1.5], device=DEVICE)}
    plain = dict(arguments)
    for name, scale in zip(("key_cache", "value_cache"), scales.values()):
        narrow = arguments[name].to(torch.float8_e4m3fn)
        plain[name] = (narrow.float() * scale).bfloat16()  # exact: a power of two, and 4 bits times 2
        arguments[name] = narrow.view(torch.uint8) if as_bytes else narrow
    assert_near(attend(run, arguments, **scales), by_loops(plain), torch.bfloat16)


def rotated_by_loops(x: torch.Tensor, weight: torch.Tensor | None, rope: BlockRope) -> torch.Tensor:
    """Heads normalised and then turned pair by pair, as complex numbers."""
    rows = x.double().cpu()
    if weight is not None:
        rows = rows / (rows.pow(2).mean(-1, keepdim=True) + rope.eps).sqrt() * weight.double().cpu()
    half = rope.cos_sin_cache.shape[1] // 2
    out = rows.clone()
    for row, position in enumerate(rope.positions.tolist()):
        for i in range(half):
            a, b = (i, i + half) if rope.is_neox_style else (2 * i, 2 * i + 1)
            turn = complex(rope.cos_sin_cache[position, i], rope.cos_sin_cache[position, half + i])
            for head in range(rows.shape[1]):
                turned = complex(rows[row, head, a], rows[row, head, b]) * turn
                out[row, head, a], out[row, head, b] = turned.real, turned.imag
    return out.to(DEVICE)


def rope_of(
    num_rows: int, head_dim: int, rotary_dim: int, is_neox: bool, has_norm: bool, dtype: torch.dtype
) -> BlockRope:
    generator = torch.Generator().manual_seed(1)
    angles = torch.randn(50, rotary_dim // 2, generator=generator)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(DEVICE)
    weights = [(1 + torch.randn(head_dim, generator=generator) / 3).to(dtype).to(DEVICE) for _ in range(2)]
    positions = torch.randint(0, 50, (num_rows,), generator=generator).to(DEVICE)
    return BlockRope(*(weights if has_norm else (None, None)), 1e-6, cos_sin, positions, is_neox)


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("rotary_dim", "is_neox", "has_norm"), [(64, True, True), (64, False, True), (16, True, True), (16, False, False)]
)
def test_fused_norm_and_rope_equal_those_before(run, rotary_dim, is_neox, has_norm):
    arguments = batch(Case(5, 2, contexts=(20,)))
    rope = rope_of(5, 64, rotary_dim, is_neox, has_norm, torch.float32)
    before = dict(arguments)
    for name, weight in (("query", rope.q_norm_weight), ("key", rope.k_norm_weight)):
        before[name] = rotated_by_loops(arguments[name], weight, rope)
    assert_near(attend(run, arguments, rope=rope), by_loops(before))


def test_fused_rope_in_bfloat16_equals_twin():
    arguments = batch(Case(16, 4, head_dim=128, contexts=(40,), dtype=torch.bfloat16))
    rope = rope_of(16, 128, 128, True, True, torch.bfloat16)
    expected = attend(block_attention_torch, arguments, rope=rope)
    assert_near(attend(launch_block_attention, arguments, rope=rope), expected)


def test_cache_layouts_give_the_same_bits():
    by_layout = [
        attend(launch_block_attention, batch(Case(4, 2, 2, contexts=(21, 3), layout=layout)), num_splits=1)
        for layout in ("NHD", "HND")
    ]
    assert torch.equal(*by_layout)


def test_merge_never_reads_what_a_split_without_keys_left():
    generator = torch.Generator().manual_seed(0)
    partial = torch.randn((1, 2, 5, 16, 32), generator=generator).to(DEVICE)
    log_sums = torch.randn((1, 2, 5, 16), generator=generator).to(DEVICE) * 4
    log_sums[:, :, 3] = log_sums[0, 1, :, 7] = float("-inf")
    partial[log_sums == float("-inf")] = NAN
    partial[:, :, :, 9:] = NAN  # rows of padding: three queries with three heads in a group
    actual, expected = (torch.full((3, 6, 32), NAN, device=DEVICE) for _ in range(2))
    merge_splits(partial, log_sums, actual)
    merge_splits_torch(partial, log_sums, expected)
    assert_near(actual, expected)
    assert (actual[2, 4] == 0).all()  # key/value head 1, row 7 = query 2, head 1 of the group
    weights = torch.tensor([2.0, 1.0], device=DEVICE).double().exp2()
    merge_splits(
        partial[:, :1, :2],
        torch.tensor([2.0, 1.0], device=DEVICE).view(1, 1, 2, 1).expand(-1, -1, -1, 16).contiguous(),
        actual[:, :3],
    )
    right = (weights[:, None] * partial[0, 0, :2, 4]).sum(0) / weights.sum()
    assert_near(actual[1, 1], right)


@pytest.mark.parametrize(
    ("num_reqs", "bound", "expected"),
    [
        (1, 40960, 33),  # 264 places on an H200 for 8 key/value heads
        (1, 400, 4),  # 128 tokens at least
        (1, 0, 1),
        (32, 16384, 1),  # the GPU is full without splits
        (32, 131072, 8),  # but one long request must not keep a single program busy
        (1, 10**7, 256),
    ],
)
def test_number_of_splits(num_reqs, bound, expected):
    multiprocessors = 132 if bound < 10**7 else 10**4
    assert plan.number_of_splits(num_reqs * 8, bound, 64, multiprocessors) == expected


def test_fp8_type_follows_the_gpu(monkeypatch):
    arguments = batch(Case(4, contexts=(3,)))
    for name in ("key_cache", "value_cache"):
        arguments[name] = arguments[name].to(torch.float8_e4m3fn)
    monkeypatch.setattr(plan, "gpu", lambda: ("cuda", "80"))
    with pytest.raises(NotImplementedError, match="--kv-cache-dtype auto"):
        launch_block_attention(**arguments)
    monkeypatch.setattr(plan, "gpu", lambda: ("hip", "gfx942"))
    assert str(plan.fp8_type(torch.uint8)) == "fp8e4b8"
    assert str(plan.fp8_type(torch.float8_e4m3fn)) == "fp8e4nv"


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_query_per_req": 17}, "requests of 17 queries"),
        ({"num_query_per_req": 2}, "pad or cut"),
        ({"query": torch.zeros(4, 3, 48)}, "Use vLLM's attention"),
        ({"key": torch.zeros(4, 1, 32)}, "does not fit query"),
        ({"key_cache": torch.zeros(2, 16, 1, 64, dtype=torch.float16)}, "the cache holds"),
        ({"value": torch.zeros(4, 1, 128)[..., ::2]}, "contiguous"),
        ({"rope": BlockRope(None, None, 1e-6, torch.zeros(9, 48), torch.zeros(4).long())}, "rotary_dim is 48"),
    ],
)
def test_what_does_not_fit_is_refused(run, change, message):
    arguments = batch(Case(4, contexts=(3,))) | {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in change.items()
    }
    with pytest.raises(ValueError, match=message):
        run(**arguments)


def test_launcher_chooses_by_device():
    """On a CPU the twin runs, even where triton is installed."""
    arguments = batch(Case(4, contexts=(3,)))
    assert_near(block_attention(**arguments), by_loops(arguments))
