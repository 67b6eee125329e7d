"""Which target a drafter fits, and how many tokens it may draft: the refusals name both sides and the repair."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from test_config import TARGET, naming, read, speculators, z_lab

from vllm_dflash.config import DFlashConfig, TargetShape

# ---- pairs that do not fit

TARGET_REFUSALS = {
    "layer beyond": (z_lab({"target_layer_ids": [0, 7]}), ["[0, 7]", "4 layers (0 to 3)", "trained for this target"]),
    "aux layer beyond": (speculators(aux_hidden_state_layer_ids=[1, 5]), ["[0, 4]", "4 layers (0 to 3)", "use a"]),
    "negative layer": (z_lab({"target_layer_ids": [-1, 2]}), ["[-1, 2]", "4 layers (0 to 3)", "use a drafter"]),
    "embeddings": (speculators(aux_hidden_state_layer_ids=[0, 3]), ["[-1, 2]", "4 layers (0 to 3)", "use a"]),
    "last layer": (z_lab({"target_layer_ids": [0, 3]}), ["layer 3, the last", "final norm", "layers below 3"]),
    "last aux layer": (speculators(aux_hidden_state_layer_ids=[1, 4]), ["layer 3, the last", "layers below 3"]),
    "feature size": (z_lab(target_hidden_size=96), ["size 96", "is 64", "trained for this target"]),
    "hidden size": (speculators({"hidden_size": 80}), ["size 80", "is 64", "trained for this target"]),
    "number of layers": (z_lab(num_target_layers=36), ["with 36 layers", "has 4", "trained for this target"]),
    "mask token of a larger vocabulary": (
        z_lab({"mask_token_id": 150}, vocab_size=160),
        ["vocabulary of 160 with mask token 150", "has 128 tokens", "Use a drafter trained for this target"],
    ),
    "vocabulary larger by one": (z_lab(vocab_size=129), ["vocabulary of 129", "has 128 tokens", "tokenizers"]),
}


@pytest.mark.parametrize("case", TARGET_REFUSALS)
def test_pair_that_does_not_fit_is_refused(case):
    raw, fragments = TARGET_REFUSALS[case]
    with pytest.raises(ValueError, match=naming("drafter 'my/drafter'", "target 'small/target'", *fragments)):
        read(raw).check_target(TARGET)


@pytest.mark.parametrize("dialect", [z_lab, speculators])
def test_pair_that_fits_is_accepted(dialect):
    read(dialect()).check_target(TARGET)
    read(dialect(num_target_layers=None)).check_target(TARGET)
    read(dialect(draft_vocab_size=20)).check_target(TARGET)


@pytest.mark.case("F52")
def test_up_to_512_padded_rows_are_not_another_tokenizer():
    config = read(z_lab())
    config.check_target(dataclasses.replace(TARGET, vocab_size=128 + 512))
    with pytest.raises(ValueError, match=naming("vocabulary of 128", "has 641 tokens", "trained for this target")):
        config.check_target(dataclasses.replace(TARGET, vocab_size=128 + 513))


def test_shipped_drafter_fits_its_target_alone(drafter):
    config = DFlashConfig.from_dict(json.loads((drafter / "config.json").read_text()), str(drafter))
    smollm2 = TargetShape("SmolLM2-135M-Instruct", num_layers=30, hidden_size=576, vocab_size=49152)
    config.check_target(smollm2)
    assert config.aux_layer_ids == (2, 9, 15, 21, 28)
    assert config.resolve_num_speculative_tokens(None) == (7, None)
    with pytest.raises(ValueError, match=naming("30 layers", "32", "use a drafter")):
        config.check_target(dataclasses.replace(smollm2, name="SmolLM2-360M-Instruct", num_layers=32))


# ---- K


@pytest.mark.case("F27")
def test_omitted_k_is_the_trained_block_less_its_anchor():
    config = read(z_lab(block_size=16))
    assert config.max_speculative_tokens == 15
    assert config.resolve_num_speculative_tokens(None) == (15, None)


@pytest.mark.parametrize("requested", [1, 4, 7])
@pytest.mark.case("F27")
def test_k_within_the_trained_block_is_untouched(requested):
    assert read(z_lab(block_size=8)).resolve_num_speculative_tokens(requested) == (requested, None)


@pytest.mark.parametrize("requested", [8, 15])
@pytest.mark.case("F27")
def test_k_beyond_the_trained_block_is_clamped_with_a_warning(requested):
    """Slots that were never trained spoil all others, because a block is bidirectional."""
    number, warning = read(z_lab(block_size=8)).resolve_num_speculative_tokens(requested)
    assert number == 7
    assert warning is not None
    assert re.search(naming(f"num_speculative_tokens {requested}", "my/drafter", "a block of 8", "Using 7"), warning)


@pytest.mark.parametrize("requested", [0, -1, "7", 7.0, True])
def test_k_that_drafts_nothing_is_refused(requested):
    with pytest.raises(ValueError, match=naming(f"is {requested!r}", "my/drafter", "1 to 7", "choose")):
        read(z_lab(block_size=8)).resolve_num_speculative_tokens(requested)


def test_unknown_block_needs_k():
    config = read(z_lab(block_size=None))
    assert config.max_speculative_tokens is None
    assert config.resolve_num_speculative_tokens(40) == (40, None)
    with pytest.raises(ValueError, match=naming("my/drafter", "block size", "set 'num_speculative_tokens'")):
        config.resolve_num_speculative_tokens(None)
    with pytest.raises(ValueError, match=naming("is 0", "my/drafter", "at least 1")):
        config.resolve_num_speculative_tokens(0)
