"""Features and soft labels of a target against Hugging Face's own outputs, and which layers may be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_dflash.training.initialise import drafter_config
from vllm_dflash.training.settings import TrainSettings
from vllm_dflash.training.target_features import (
    TargetFeatures,
    default_layer_ids,
    fingerprint,
    load_target,
    load_target_config,
)

#: Of different lengths, so that all but the longest are padded.
SEQUENCES = [[5, 9, 3, 77, 21, 8], [11, 4], [60, 61, 62, 63]]

#: bf16 has 8 bits of mantissa; padding moves the last bits of float32, which may tip the rounding.
BF16_ROUNDING = 2**-8


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Any:
    return load_target(str(tiny_target), torch.device("cpu"))


def count_layer_calls(target: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Indices of the layers, in the order they run."""
    calls: list[int] = []
    for index, layer in enumerate(target.get_decoder().layers):
        forward = layer.forward

        def counted(*arguments: Any, _index: int = index, _forward: Any = forward, **more: Any) -> Any:
            calls.append(_index)
            return _forward(*arguments, **more)

        monkeypatch.setattr(layer, "forward", counted)
    return calls


def test_features_are_the_outputs_of_their_layers_in_padded_batches_too(target: Any) -> None:
    for ids, found in zip(SEQUENCES, TargetFeatures(target, (0, 2)).extract(SEQUENCES), strict=True):
        states = target(torch.tensor([ids]), output_hidden_states=True).hidden_states  # [0] is the embedding
        assert found.features.dtype == torch.bfloat16
        expected = torch.cat([states[1][0], states[3][0]], dim=-1)
        torch.testing.assert_close(found.features.float(), expected, rtol=BF16_ROUNDING, atol=1e-6)
        assert found.top_ids is None
        assert found.top_logprobs is None


def test_the_pass_stops_behind_the_last_feature_layer(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = target(torch.tensor([SEQUENCES[0]])).logits
    calls = count_layer_calls(target, monkeypatch)
    TargetFeatures(target, (0, 2)).extract(SEQUENCES)
    assert calls == [0, 1, 2]
    calls.clear()
    TargetFeatures(target, (0, 2), top_k=1).extract(SEQUENCES)
    assert calls == [0, 1, 2, 3]
    # The model is still whole: it also gives a drafter its first layers, and generates answers.
    assert torch.equal(target(torch.tensor([SEQUENCES[0]])).logits, before)


@pytest.mark.parametrize("vocabulary", [None, torch.tensor([3, 5, 6, 40, 41, 90, 127])])
def test_soft_labels_are_the_likeliest_tokens_of_the_drafted_vocabulary(
    target: Any, vocabulary: torch.Tensor | None
) -> None:
    members = list(range(128)) if vocabulary is None else vocabulary.tolist()
    extracted = TargetFeatures(target, (0, 2), top_k=3, vocabulary=vocabulary).extract(SEQUENCES)
    for ids, found in zip(SEQUENCES, extracted, strict=True):
        logits = target(torch.tensor([ids])).logits[0].double()
        assert found.top_ids is not None
        assert found.top_logprobs is not None
        for position in range(len(ids)):
            by_token = {token: float(logits[position, token]) for token in members}
            likeliest = sorted(by_token, key=lambda token: -by_token[token])[:3]
            assert found.top_ids[position].tolist() == likeliest
            total = sum(torch.tensor(list(by_token.values()), dtype=torch.float64).exp().tolist())
            expected = torch.tensor([by_token[token] for token in likeliest]) - torch.tensor(total).log()
            torch.testing.assert_close(
                found.top_logprobs[position].float(), expected.float(), rtol=BF16_ROUNDING, atol=1e-3
            )


@pytest.mark.parametrize(
    ("num_target_layers", "num_features", "layer_ids"),
    [
        (30, 5, (1, 8, 14, 20, 27)),  # 20.5 goes to the even neighbour, as in z-lab's rule
        (36, 5, (1, 9, 17, 25, 33)),
        (28, 1, (14,)),
        (4, 5, (1,)),  # each layer may be read once
    ],
)
def test_default_feature_layers(num_target_layers: int, num_features: int, layer_ids: tuple[int, ...]) -> None:
    assert default_layer_ids(num_target_layers, num_features) == layer_ids


def test_a_target_too_shallow_for_the_rule() -> None:
    with pytest.raises(
        ValueError, match=r"at least 4 layers, but it has 3; name them with --target-layer-ids \(0 to 1"
    ):
        default_layer_ids(3, 5)


@pytest.mark.parametrize("layer_ids", [(0, 3), (3,)])
def test_the_last_layer_is_never_a_feature(tiny_target: Path, layer_ids: tuple[int, ...]) -> None:
    """Hugging Face gives its output behind the final norm, vLLM before it."""
    settings = TrainSettings(target=str(tiny_target), output="out", num_layers=1, target_layer_ids=layer_ids)
    with pytest.raises(ValueError, match="reads the output of layer 3, the last of target .* below 3"):
        drafter_config(settings, load_target_config(str(tiny_target)), mask_token_id=0)


def test_soft_labels_go_through_the_targets_softcap(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.config, "final_logit_softcapping", 0.5, raising=False)
    (found,) = TargetFeatures(target, (0, 2), top_k=128).extract(SEQUENCES[:1])
    logits = target(torch.tensor(SEQUENCES[:1])).logits[0].double()
    capped = (0.5 * torch.tanh(logits / 0.5)).log_softmax(-1)
    assert found.top_ids is not None
    assert found.top_logprobs is not None
    torch.testing.assert_close(
        found.top_logprobs.double(), capped.gather(1, found.top_ids.long()), rtol=BF16_ROUNDING, atol=1e-6
    )


def test_a_fingerprint_is_of_the_weights(target: Any) -> None:
    before = fingerprint(target)
    weight = target.get_decoder().layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight[0, 0] += 1
        changed = fingerprint(target)
        weight[0, 0] -= 1
    assert fingerprint(target.bfloat16()) == before == fingerprint(target.float())
    assert changed != before
