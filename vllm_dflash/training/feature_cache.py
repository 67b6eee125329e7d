"""Features of a data set, extracted once and kept on disk: shards of safetensors and an index.

    index.json                  what the features are of (target, layers), and where each sequence lies
    features-00000.safetensors  several sequences, one after another: features [N, F * hidden] bf16, and where soft
                                labels are kept top_ids [N, k] int32, top_logprobs [N, k] bf16

Sequences are found by a hash of their tokens, so data may be reordered, and after more is added only the new is
extracted. A shard is written under a temporary name and renamed, then the index is, so a run that is killed goes on
from the last whole shard, and a reader sees only whole ones.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from vllm_dflash.atomic import write_atomically
from vllm_dflash.training.data import Example
from vllm_dflash.training.target_features import SequenceFeatures, TargetFeatures

#: Free disk space that is left alone, bytes.
_RESERVE = 512 * 2**20


@dataclass(frozen=True)
class FeatureSource:
    """What features are of."""

    target: str  # its name, to be read
    fingerprint: str  # what tells it from other targets
    target_layer_ids: tuple[int, ...]
    feature_size: int  # F * hidden
    top_k: int
    vocabulary_hash: str  # of the draft vocabulary that top_k is over; "" for the whole

    @property
    def bytes_per_token(self) -> int:
        """Size on disk: bf16 features, and 6 bytes per soft label."""
        return 2 * self.feature_size + 6 * self.top_k

    def provides(self, wanted: FeatureSource) -> bool:
        """Are features of this kind all that is wanted? More soft labels than wanted, or unwanted ones, do no harm."""
        own = replace(self, target=wanted.target)
        if not wanted.top_k:
            return replace(own, top_k=0, vocabulary_hash="") == replace(wanted, vocabulary_hash="")
        return own.top_k >= wanted.top_k and replace(own, top_k=wanted.top_k) == wanted


class _Place(NamedTuple):
    """Where a sequence lies."""

    shard: int
    start: int  # first row in the shard
    length: int


@dataclass
class _Index:
    source: FeatureSource
    shard_bytes: list[int] = field(default_factory=list)
    places: dict[str, _Place] = field(default_factory=dict)


class FeatureCache:
    """Read access to a cache; rows are read from the memory-mapped shards when asked for.

    Raises:
        ValueError: no cache there, a shard is missing or cut short, or it is of something else than `expected`.
    """

    def __init__(self, folder: Path, expected: FeatureSource | None = None) -> None:
        self.folder = folder
        index = _read_index(folder)
        if index is None:
            raise ValueError(f"'{folder}' holds no features: it has no index.json. Extract them first.")
        self.source, self._places = expected or index.source, index.places
        if not index.source.provides(self.source):
            raise _other_features(folder, index.source, self.source)
        _check_shards(folder, index)
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, example: Example) -> bool:
        return _key(example) in self._places

    def read(self, example: Example) -> SequenceFeatures:
        """Features of an example.

        Raises:
            ValueError: it is not in the cache, or its shard is corrupt.
        """
        place = self._places.get(_key(example))
        if place is None:
            raise ValueError(f"'{self.folder}' has no features of example '{example.id}'; extract them first.")
        path = shard_path(self.folder, place.shard)
        rows = slice(place.start, place.start + place.length)
        try:
            if place.shard not in self._open:
                self._open[place.shard] = safe_open(path, framework="pt")
            shard = self._open[place.shard]
            names = ["features"] + ["top_ids", "top_logprobs"] * bool(self.source.top_k)
            tensors = {name: shard.get_slice(name)[rows, : self._width(name)] for name in names}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"shard '{path}' is corrupt ({error}); delete the folder and extract again.") from error
        return SequenceFeatures(tensors["features"], tensors.get("top_ids"), tensors.get("top_logprobs"))

    def _width(self, name: str) -> int:
        return self.source.feature_size if name == "features" else self.source.top_k


def extract(
    folder: Path,
    source: FeatureSource,
    target: TargetFeatures,
    examples: Sequence[Example],
    *,
    batch_size: int = 1,
    examples_per_shard: int = 64,
) -> FeatureCache:
    """Extract the features that `folder` lacks of these examples.

    Args:
        batch_size: sequences per target pass; 1 is best on a CPU.

    Raises:
        ValueError: the folder holds features of something else.
        RuntimeError: the disk is too small; nothing has been written then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    index = _read_index(folder) or _Index(source)
    todo = list({_key(e): e for e in examples if _key(e) not in index.places}.values())
    if not todo:
        return FeatureCache(folder, source)
    if replace(index.source, target=source.target) != source:
        raise _other_features(folder, index.source, source)
    _check_shards(folder, index)
    _check_space(folder, source, todo)
    with tqdm(total=sum(len(e.input_ids) for e in todo), unit="tok", unit_scale=True, desc="features") as progress:
        for start in range(0, len(todo), examples_per_shard):
            chunk = todo[start : start + examples_per_shard]
            found = []
            for batch in _batches(chunk, batch_size):
                found += target.extract([e.input_ids for e in batch])
                progress.update(sum(len(e.input_ids) for e in batch))
            _append_shard(folder, index, chunk, found)
    return FeatureCache(folder, source)


def _key(example: Example) -> str:
    return hashlib.blake2b(json.dumps(example.input_ids).encode(), digest_size=16).hexdigest()


def shard_path(folder: Path, shard: int) -> Path:
    """File of a shard."""
    return folder / f"features-{shard:05d}.safetensors"


def _append_shard(folder: Path, index: _Index, chunk: Sequence[Example], found: Sequence[SequenceFeatures]) -> None:
    number, start = len(index.shard_bytes), 0
    for example in chunk:
        length = len(example.input_ids)
        index.places[_key(example)] = _Place(number, start, length)
        start += length
    tensors = {"features": torch.cat([f.features.cpu() for f in found])}
    if index.source.top_k:
        tensors["top_ids"] = torch.cat([f.top_ids.cpu() for f in found if f.top_ids is not None])
        tensors["top_logprobs"] = torch.cat([f.top_logprobs.cpu() for f in found if f.top_logprobs is not None])
    path = shard_path(folder, number)
    write_atomically(path, lambda temporary: save_file(tensors, temporary))
    index.shard_bytes.append(path.stat().st_size)
    text = json.dumps({"source": asdict(index.source), "shard_bytes": index.shard_bytes, "places": index.places})
    write_atomically(folder / "index.json", lambda temporary: temporary.write_text(text))


def _read_index(folder: Path) -> _Index | None:
    path = folder / "index.json"
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text())
        raw["source"]["target_layer_ids"] = tuple(raw["source"]["target_layer_ids"])
        places = {key: _Place(*values) for key, values in raw["places"].items()}
        return _Index(FeatureSource(**raw["source"]), raw["shard_bytes"], places)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"'{path}' is not an index of features ({error}); delete '{folder}' and extract again."
        ) from error


def _other_features(folder: Path, found: FeatureSource, wanted: FeatureSource) -> ValueError:
    pairs = {name: (asdict(found)[name], value) for name, value in asdict(wanted).items()}
    details = "; ".join(f"{name} {there} there, {here} here" for name, (there, here) in pairs.items() if there != here)
    return ValueError(f"'{folder}' holds features of something else: {details}. Give another folder, or delete it.")


def _check_shards(folder: Path, index: _Index) -> None:
    for shard, size in enumerate(index.shard_bytes):
        path = shard_path(folder, shard)
        found = path.stat().st_size if path.is_file() else 0
        if found != size:
            raise ValueError(
                f"shard '{path}' has {found} bytes, but the index says {size}; delete the folder and extract again."
            )


def _check_space(folder: Path, source: FeatureSource, todo: Sequence[Example]) -> None:
    needed = sum(len(e.input_ids) for e in todo) * source.bytes_per_token
    free = shutil.disk_usage(folder).free
    print(f"features of {len(todo)} examples take {needed / 1e9:.2f} GB in '{folder}' ({free / 1e9:.1f} GB are free)")
    if needed + _RESERVE > free:
        raise RuntimeError(
            f"features take {needed / 1e9:.2f} GB, but '{folder}' has {free / 1e9:.2f} GB free; give a folder on a "
            f"larger disk, fewer examples, or no cache (features are then computed in every epoch)."
        )


def _batches(examples: Sequence[Example], size: int) -> Iterator[Sequence[Example]]:
    for start in range(0, len(examples), size):
        yield examples[start : start + size]
