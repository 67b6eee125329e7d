"""The drafter's own tokenizer, where its folder has one, against the target's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vllm_dflash.doctor.finding import Finding, error

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def check_tokenizer(folder: Path, name: str, target: str, target_vocabulary: Mapping[str, int]) -> list[Finding]:
    """Refuse a drafter that comes with other tokens than its target's; sizes may differ by padding.

    Args:
        folder: of the drafter; most have no tokenizer, and then there is nothing to compare.
        target_vocabulary: token -> id.
    """
    if not any((folder / file).is_file() for file in _FILES):
        return []
    from vllm_dflash.training.chat import load_tokenizer

    return compare_vocabularies(load_tokenizer(str(folder)).get_vocab(), target_vocabulary, name, target)


def compare_vocabularies(
    mine: Mapping[str, int], its: Mapping[str, int], name: str, target: str, repair: str | None = None
) -> list[Finding]:
    """Findings where an id stands for different strings in two vocabularies (token -> id)."""
    of_target = {token_id: token for token, token_id in its.items()}
    different = sorted(i for token, i in mine.items() if i in of_target and of_target[i] != token)
    if not different:
        return []
    of_drafter = {token_id: token for token, token_id in mine.items()}
    first = different[0]
    return [
        error(
            "tokenizer",
            f"the tokenizer of drafter '{name}' ({len(mine)} tokens) is not that of target '{target}' ({len(its)}): "
            f"{len(different)} ids stand for other strings, the first of them {first} ({of_drafter[first]!r} against "
            f"{of_target[first]!r})",
            repair or "use a drafter trained for this target",
        )
    ]
