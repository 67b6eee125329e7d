"""The corrections of vLLM's CPU backend: its own result is wrong, ours is right.

When a test named `test_vllm_...` fails, vLLM has mended the defect and the correction can go; cpu_backend.py says
which.
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from tiny_models import drafter_config, drafter_tensors, write_tiny_drafter, write_tiny_target

from vllm_dflash import cpu_backend

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="corrections of the CPU backend only")

TEMPERATURES = [0.7, 0.0, 1.3]
CU_NUM_TOKENS = [2, 5, 6]
EXPANDED = [0.7, 0.7, 1.0, 1.0, 1.0, 1.3]


@pytest.fixture(scope="module")
def vllms_own_expand(engine, tiny_target, tiny_drafter):
    """vLLM's function, compiled anew from its source so that no correction reaches it."""
    engine(tiny_target, drafter=tiny_drafter, num_drafted=4)  # registers the CPU kernels
    from vllm.v1.sample import rejection_sampler

    tree = ast.parse(Path(rejection_sampler.__file__).read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) == "expand_batch_to_tokens"]
    namespace = dict(vars(rejection_sampler))
    exec(compile(tree, rejection_sampler.__file__, "exec"), namespace)
    return namespace["expand_batch_to_tokens"]


def expand(function, values: torch.Tensor) -> list[float]:
    result = function(values, torch.tensor(CU_NUM_TOKENS, dtype=torch.int32), 6, replace_from=0, replace_to=1)
    assert result.dtype == values.dtype
    return result.tolist()


def test_expansion_of_temperatures_and_counts_is_exact():
    assert expand(cpu_backend.expand_batch_to_tokens, torch.tensor(TEMPERATURES)) == pytest.approx(EXPANDED)
    assert expand(cpu_backend.expand_batch_to_tokens, torch.tensor([5, 0, 9], dtype=torch.int32)) == [
        5,
        5,
        1,
        1,
        1,
        9,
    ]


def test_expansion_skips_requests_without_verified_rows():
    x, totals = torch.tensor([4.0, 5.0, 6.0]), torch.tensor([0, 2, 2], dtype=torch.int32)
    assert cpu_backend.expand_batch_to_tokens(x, totals, 2).tolist() == [5.0, 5.0]


def test_vllm_expands_temperatures_into_garbage(vllms_own_expand):
    torch.full((64,), 1e30)  # leave something in the allocator that is certainly not a temperature
    assert expand(vllms_own_expand, torch.tensor(TEMPERATURES)) != pytest.approx(EXPANDED)


def test_vllm_normalises_every_layer_by_the_first_layers_weight(engine, tiny_target, tiny_drafter):
    """`ops.rms_norm` with a [layers, head_dim] weight, as qwen3_dflash.py calls it."""
    engine(tiny_target, drafter=tiny_drafter, num_drafted=4)
    from vllm import _custom_ops as ops

    torch.manual_seed(0)
    keys, weights = torch.randn(3, 5, 2, 32), 1 + torch.arange(3.0)[:, None].expand(3, 32).contiguous()
    right = keys * (keys.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weights[:, None, None]
    theirs = torch.empty_like(keys)
    ops.rms_norm(theirs, keys, weights, 1e-6)
    torch.testing.assert_close(theirs[0], right[0])
    assert (theirs[1:] - right[1:]).abs().max() > 0.5


def test_context_keys_are_normalised_by_each_layers_own_weight(engine, tiny_target, tiny_drafter):
    served = engine(tiny_target, drafter=tiny_drafter, num_drafted=4)
    context_kv = served.runner.drafter.model.model.context_kv
    keys = torch.randn(3, 5, 2, 32)
    weights = context_kv.k_norm_weights
    assert (weights[0] - weights[1]).abs().max() > 0.5
    right = keys * (keys.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weights[:, None, None]
    torch.testing.assert_close(context_kv._norm(keys), right)


# ---- the distribution of sampled text

VOCAB, NUM_SAMPLES, NUM_POSITIONS = 8, 2500, 4
SETTINGS = {"max_num_seqs": 256, "max_model_len": 64}
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "max_tokens": NUM_POSITIONS}


@pytest.fixture(scope="module")
def dflash(engine, tmp_path_factory):
    """An engine whose target has eight tokens, so that a random drafter is often right."""
    return engine(*write_pair(tmp_path_factory), num_drafted=3, **SETTINGS)


@pytest.fixture(scope="module")
def plain_texts(engine, tmp_path_factory):
    """Texts sampled from the same target without speculation."""
    target, _ = write_pair(tmp_path_factory)
    return sample(engine(target, **SETTINGS))[0]


def write_pair(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("eight")
    tensors = drafter_tensors(drafter_config(vocab_size=VOCAB), seed=3)
    target = write_tiny_target(folder / "target", vocab_size=VOCAB)
    return target, write_tiny_drafter(folder / "drafter", tensors, vocab_size=VOCAB)


def sample(engine) -> tuple[Counter[tuple[int, ...]], int]:
    """How often each text of a few tokens is sampled, and how many drafted tokens were accepted on the way."""
    results = engine.generate([[3, 5, 7]] * NUM_SAMPLES, **SAMPLING)
    return Counter(tuple(result.token_ids) for result in results), sum(result.num_accepted for result in results)


def p_value(first: Counter[tuple[int, ...]], second: Counter[tuple[int, ...]]) -> float:
    """Chi-square test that two samples of texts have one distribution; rare texts are pooled."""
    texts = sorted(first.keys() | second.keys())
    common = [t for t in texts if first[t] + second[t] >= 20]
    rows = [[counts[t] for t in common] for counts in (first, second)]
    for row in rows:
        row.append(NUM_SAMPLES - sum(row))
    if sum(row[-1] for row in rows) < 20:
        rows = [row[:-1] for row in rows]
    return float(stats.chi2_contingency(rows).pvalue)


def test_sampled_text_has_the_plain_distribution(dflash, plain_texts):
    texts, num_accepted = sample(dflash)
    assert num_accepted > 200  # some drafts are accepted, most are not
    assert p_value(plain_texts, texts) > 1e-3


def test_vllm_samples_from_another_distribution(dflash, plain_texts, vllms_own_expand, monkeypatch):
    from vllm.v1.sample import rejection_sampler

    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", vllms_own_expand)
    assert p_value(plain_texts, sample(dflash)[0]) < 1e-6


@pytest.fixture(scope="module")
def drafter(engine, tiny_target, tiny_drafter):
    """The proposer of an engine."""
    return engine(tiny_target, drafter=tiny_drafter, num_drafted=4).runner.drafter


def assert_same(ours: torch.Tensor, vllms: torch.Tensor) -> None:
    assert ours.dtype == vllms.dtype
    assert ours.tolist() == vllms.tolist()


@pytest.mark.parametrize("num_drafts", [[0, 0, 0], [2, 0, 1]])
def test_metadata_of_a_step_is_vllms_with_drafts_and_without(drafter, num_drafts):
    runner = drafter.runner
    rows = np.cumsum(np.array([4, 1, 1]) + num_drafts).astype(np.int32)  # the first has a prompt
    ours = runner._calc_spec_decode_metadata(np.array(num_drafts, dtype=np.int32), rows)
    vllms = type(runner)._calc_spec_decode_metadata.__wrapped__(runner, np.array(num_drafts, dtype=np.int32), rows)
    for field in fields(vllms):
        mine, theirs = getattr(ours, field.name), getattr(vllms, field.name)
        if isinstance(theirs, torch.Tensor):
            assert_same(mine, theirs)
        else:
            assert mine == theirs


@pytest.mark.parametrize("is_prompt", [[False] * 3, [False, True, False]])
def test_anchors_of_plain_steps_are_vllms(drafter, monkeypatch, is_prompt):
    """A request whose prompt goes on has no token yet."""
    batch = SimpleNamespace(num_reqs=3, req_ids=["a", "b", "c"], num_tokens_no_spec=[5, 6, 7], vocab_size=64)
    requests = {name: SimpleNamespace(get_token_id=lambda index: 10 + index) for name in batch.req_ids}
    mask = np.array(is_prompt)
    monkeypatch.setattr(drafter.runner, "discard_request_mask", SimpleNamespace(np=mask))
    arguments = (torch.tensor([[3], [4], [5]]), requests, batch, torch.from_numpy(mask))
    ours = drafter.prepare_next_token_ids_padded(*arguments)
    vllms = super(type(drafter), drafter).prepare_next_token_ids_padded(*arguments)
    for mine, theirs in zip(ours, vllms):
        assert_same(mine, theirs)
    assert ours[0].tolist() == ([3, 15, 5] if is_prompt[1] else [3, 4, 5])


@pytest.mark.parametrize("num_drafts", [[0, 0], [1, 0]])
def test_rows_of_plain_steps_are_vllms(drafter, num_drafts):
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, 1 + num_drafts[0], 2 + sum(num_drafts)], dtype=torch.int32)
    metadata = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([8, 9], dtype=torch.int32),
        num_reqs=2,
        num_actual_tokens=int(starts[-1]),
        max_query_len=1 + max(num_drafts),
        max_seq_len=9,
        block_table_tensor=torch.zeros(2, 1, dtype=torch.int32),
        slot_mapping=torch.arange(int(starts[-1])),
    )
    drafts = drafter.runner._calc_spec_decode_metadata(np.array(num_drafts, dtype=np.int32), starts[1:].numpy())
    arguments = (metadata, drafts, torch.ones(2, dtype=torch.int32))
    ours = drafter.prepare_inputs_padded(*arguments)
    vllms = super(type(drafter), drafter).prepare_inputs_padded(*arguments)
    for mine, theirs in zip(ours[1:], vllms[1:]):
        assert_same(mine, theirs)
    assert_same(ours[0].query_start_loc, vllms[0].query_start_loc)
    assert_same(ours[0].slot_mapping, vllms[0].slot_mapping)
    assert ours[2].tolist() == num_drafts
