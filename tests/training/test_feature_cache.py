"""The cache of features: what is extracted when, what is refused, and what a kill or a full disk leaves behind."""

from __future__ import annotations

import dataclasses
import shutil
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import full_disk

from vllm_dflash.training import feature_cache
from vllm_dflash.training.data import Example
from vllm_dflash.training.feature_cache import FeatureCache, FeatureSource, extract, shard_path
from vllm_dflash.training.target_features import SequenceFeatures

SOURCE = FeatureSource("some/target", "f00d", (1, 8), feature_size=4, top_k=2, vocabulary_hash="")

DiskUsage = namedtuple("DiskUsage", "total used free")


class WrittenTarget:
    """Features that can be told from the token: [token, 2 token, position, 0]. Remembers what it was asked for."""

    def __init__(self, width: int = 4) -> None:
        self.width = width
        self.asked: list[list[int]] = []

    def extract(self, sequences: Sequence[Sequence[int]]) -> list[SequenceFeatures]:
        self.asked += [list(ids) for ids in sequences]
        return [expected(ids, self.width) for ids in sequences]


def expected(ids: Sequence[int], width: int = 4) -> SequenceFeatures:
    tokens = torch.tensor(ids)
    features = torch.zeros(len(ids), width)
    features[:, 0], features[:, 1], features[:, 2] = tokens, 2 * tokens, torch.arange(len(ids))
    top_ids = torch.stack([tokens, tokens + 1], dim=1).int()
    return SequenceFeatures(features.bfloat16(), top_ids, -top_ids.bfloat16())


def example(*ids: int) -> Example:
    return Example(f"row {ids}", "rows", list(ids), [True] * len(ids))


EXAMPLES = [example(5, 6, 7), example(8), example(9, 10), example(11, 12, 13, 14), example(15, 16)]


def extracted(
    folder: Path,
    examples: Sequence[Example],
    target: WrittenTarget | None = None,
    source: FeatureSource = SOURCE,
    **options: Any,
) -> FeatureCache:
    reader: Any = target or WrittenTarget()
    return extract(folder, source, reader, examples, **{"examples_per_shard": 2} | options)


def assert_holds(cache: FeatureCache, examples: Sequence[Example]) -> None:
    for each in examples:
        found, wanted = cache.read(each), expected(each.input_ids)
        for name, tensor in vars(wanted).items():
            assert torch.equal(getattr(found, name), tensor), (each.id, name)
            assert getattr(found, name).dtype == tensor.dtype


@pytest.mark.parametrize("batch_size", [1, 2])
def test_features_come_back_as_they_were(tmp_path: Path, batch_size: int) -> None:
    assert_holds(extracted(tmp_path, EXAMPLES, batch_size=batch_size), EXAMPLES)
    assert_holds(FeatureCache(tmp_path, SOURCE), EXAMPLES)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "features-00000.safetensors",
        "features-00001.safetensors",
        "features-00002.safetensors",
        "index.json",
    ]


def test_without_soft_labels_there_are_none(tmp_path: Path) -> None:
    cache = extracted(tmp_path, EXAMPLES, source=dataclasses.replace(SOURCE, top_k=0))
    assert cache.read(EXAMPLES[0]).top_ids is None
    assert torch.equal(cache.read(EXAMPLES[3]).features, expected(EXAMPLES[3].input_ids).features)


def test_only_new_sequences_are_extracted(tmp_path: Path) -> None:
    extracted(tmp_path, EXAMPLES[:3])
    target = WrittenTarget()
    reordered = [*EXAMPLES[::-1], EXAMPLES[4]]  # the last twice
    assert_holds(extracted(tmp_path, reordered, target), EXAMPLES)
    assert target.asked == [[15, 16], [11, 12, 13, 14]]


def test_a_run_killed_between_shard_and_index_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = feature_cache.write_atomically

    def killed(path: Path, write_it: Any) -> None:
        if path.name == "index.json" and shard_path(tmp_path, 1).exists():
            raise KeyboardInterrupt
        write(path, write_it)

    with monkeypatch.context() as patch:
        patch.setattr(feature_cache, "write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            extracted(tmp_path, EXAMPLES)
    assert_holds(FeatureCache(tmp_path, SOURCE), EXAMPLES[:2])  # a reader sees what the index lists
    assert len(FeatureCache(tmp_path)) == 2
    target = WrittenTarget()
    # In another order, so that the shard without an index would be taken for something else if it stayed.
    assert_holds(extracted(tmp_path, EXAMPLES[::-1], target), EXAMPLES)
    assert target.asked == [e.input_ids for e in EXAMPLES[:1:-1]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "other/target", "fingerprint": "beef"}, "target some/target there, other/target here; fingerprint"),
        ({"target_layer_ids": (1, 9)}, r"target_layer_ids \(1, 8\) there, \(1, 9\) here"),
        ({"top_k": 4}, "top_k 2 there, 4 here"),
        ({"vocabulary_hash": "abc"}, "vocabulary_hash  there, abc here"),
    ],
)
def test_features_of_something_else_are_not_mixed(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    extracted(tmp_path, EXAMPLES[:2])
    other, target = dataclasses.replace(SOURCE, **changes), WrittenTarget()
    with pytest.raises(ValueError, match=message + ".*. Give another folder, or delete it"):
        extracted(tmp_path, EXAMPLES, target, other)
    with pytest.raises(ValueError, match=message):
        FeatureCache(tmp_path, other)
    assert target.asked == []


def test_a_target_that_moved_is_the_same_target(tmp_path: Path) -> None:
    extracted(tmp_path, EXAMPLES)
    moved, target = dataclasses.replace(SOURCE, target="/elsewhere/target"), WrittenTarget()
    assert_holds(extracted(tmp_path, EXAMPLES, target, moved), EXAMPLES)
    assert target.asked == []


def test_shards_that_are_cut_short_or_missing(tmp_path: Path) -> None:
    extracted(tmp_path, EXAMPLES)
    path = shard_path(tmp_path, 1)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    message = f"features-00001.safetensors' has {len(content) - 1} bytes, but the index says {len(content)}; delete"
    with pytest.raises(ValueError, match=message):
        FeatureCache(tmp_path)
    path.unlink()
    target = WrittenTarget()
    with pytest.raises(ValueError, match="features-00001.safetensors' has 0 bytes, but the index says"):
        extracted(tmp_path, [*EXAMPLES, example(20, 21)], target)
    assert target.asked == []  # said before hours are spent


def test_a_shard_of_the_right_size_with_wrong_content(tmp_path: Path) -> None:
    extracted(tmp_path, EXAMPLES)
    path = shard_path(tmp_path, 0)
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(ValueError, match=r"features-00000.safetensors' is corrupt .*; delete the folder and extract"):
        FeatureCache(tmp_path).read(EXAMPLES[0])


@pytest.mark.parametrize("content", [b"", b'{"source": {"tar', b"[]", b"{}", b'{"source": 3}', b"\xff\xfe\x00"])
def test_a_corrupt_index(tmp_path: Path, content: bytes) -> None:
    extracted(tmp_path, EXAMPLES)
    (tmp_path / "index.json").write_bytes(content)
    for use in (lambda: FeatureCache(tmp_path), lambda: extracted(tmp_path, EXAMPLES)):
        with pytest.raises(
            ValueError, match=r"index.json' is not an index of features .*; delete .* and extract again"
        ):
            use()


def test_no_cache_and_an_example_that_is_not_in_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no features: it has no index.json"):
        FeatureCache(tmp_path)
    cache = extracted(tmp_path, EXAMPLES[:2])
    assert EXAMPLES[1] in cache
    assert EXAMPLES[2] not in cache
    with pytest.raises(ValueError, match=r"has no features of example 'row \(9, 10\)'; extract them first"):
        cache.read(EXAMPLES[2])


@pytest.mark.case("F45")
def test_the_size_is_announced_before_anything_is_extracted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Stopped(WrittenTarget):
        def extract(self, sequences: Sequence[Sequence[int]]) -> list[SequenceFeatures]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # 12 tokens of 2 MB
        extracted(tmp_path, EXAMPLES, Stopped(), dataclasses.replace(SOURCE, feature_size=10**6))
    assert f"features of 5 examples take 0.02 GB in '{tmp_path}'" in capsys.readouterr().out


def test_a_disk_too_small_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extracted(tmp_path, EXAMPLES[:2])
    before, target = {file: file.read_bytes() for file in tmp_path.iterdir()}, WrittenTarget()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: DiskUsage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(
        RuntimeError, match=r"features take 0.00 GB, but .* has 0.00 GB free; give a folder on a larger"
    ):
        extracted(tmp_path, EXAMPLES, target)
    assert target.asked == []
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert_holds(extracted(tmp_path, EXAMPLES[:2]), EXAMPLES[:2])  # what is there takes no space


def test_a_disk_that_fills_up_leaves_nothing_half_written(tmp_path: Path) -> None:
    long, wide = example(*range(100)), dataclasses.replace(SOURCE, feature_size=1000)
    extracted(tmp_path, EXAMPLES[:2], WrittenTarget(1000), wide)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with (
        full_disk(max_file_size=100_000),
        pytest.raises(RuntimeError, match=r"features-00001.safetensors' could not be written .*[Ff]ile too large.*"),
    ):
        extracted(tmp_path, [*EXAMPLES[:2], long], WrittenTarget(1000), wide)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert long in extracted(tmp_path, [long], WrittenTarget(1000), wide)
