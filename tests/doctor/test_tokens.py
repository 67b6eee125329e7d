"""A drafter that brings a tokenizer of its own: its size may differ by padding, its strings may not."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_chat import WORDS, tiny_tokenizer

from vllm_dflash.doctor.tokens import check_tokenizer, compare_vocabularies

ITS = {word: i for i, word in enumerate(WORDS)}


@pytest.mark.case("F52")
def test_same_size_with_other_strings_is_refused():
    mine = ITS | {"hello": ITS["bye"], "bye": ITS["hello"]}
    assert len(mine) == len(ITS)
    (found,) = compare_vocabularies(mine, ITS, "my/drafter", "small/target")
    assert (found.name, found.level) == ("tokenizer", "error")
    for fragment in ("'my/drafter' (64 tokens)", "'small/target' (64)", "2 ids", "8 ('bye' against 'hello')"):
        assert fragment in found.message
    assert found.repair == "use a drafter trained for this target"


@pytest.mark.case("F52")
@pytest.mark.parametrize("padding", [1, 448])
def test_padding_on_either_side_with_the_same_strings_is_accepted(padding):
    padded = ITS | {f"<pad{i}>": len(ITS) + i for i in range(padding)}
    assert compare_vocabularies(padded, ITS, "my/drafter", "small/target") == []
    assert compare_vocabularies(ITS, padded, "my/drafter", "small/target") == []


@pytest.mark.case("F52")
def test_tokenizer_files_of_a_drafter_are_read(tmp_path: Path):
    assert check_tokenizer(tmp_path, "my/drafter", "small/target", ITS) == []  # it has none
    tiny_tokenizer().save_pretrained(tmp_path)
    vocabulary = tiny_tokenizer().get_vocab()
    assert check_tokenizer(tmp_path, "my/drafter", "small/target", vocabulary) == []
    others = {word: (i + 1) % len(vocabulary) for word, i in vocabulary.items()}
    (found,) = check_tokenizer(tmp_path, "my/drafter", "small/target", others)
    assert found.name == "tokenizer"
