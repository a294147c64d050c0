"""The dtype in config.json: one rule for every source and output, with the loader of transformers as the judge."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptx
from tests.conversion.test_base_dtypes import HELD, SHAPES, config, encoded, written
from tests.support.checkpoint_writers import SINGLE, Value, write_dcp, write_hf

TORCH = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
SOURCES = ("safetensors", "shards", "pt", "pytorch_model.bin", "dcp", "dcp of ckptx", "sharded")
OUTPUTS = ("hf", "dcp", "sharded")
DTYPES = ("auto", "base", "bf16", "fp16", "fp32")
STORED = ("BF16", "F16", "F32", "mixed")
CAST = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


def values() -> dict[str, np.ndarray[Any, Any]]:
    """Numbers that need 10 bits of mantissa: F16 and F32 hold them, BF16 rounds them."""
    found = {}
    for seed, (name, shape) in enumerate(sorted(SHAPES.items())):
        steps = np.random.default_rng(seed).integers(1025, 2047, shape)
        found[name] = (steps / 2048).astype(np.float32)
    return found


def tensors(stored: str) -> dict[str, Value]:
    """A model in one dtype; of a mixed one, norms are in float32 and the rest is in bfloat16."""
    return {
        name: (dtype, array.shape, encoded(array, dtype))
        for name, array in values().items()
        for dtype in [stored if stored != "mixed" else "F32" if "norm" in name else "BF16"]
    }


def as_torch(stored: Mapping[str, Value]) -> dict[str, torch.Tensor]:
    return {
        name: torch.frombuffer(bytearray(data), dtype=getattr(torch, TORCH[dtype])).reshape(shape)
        for name, (dtype, shape, data) in stored.items()
    }


def write_source(root: Path, kind: str, stored: str, own: dict[str, Any] | None = None) -> Path:
    """A checkpoint of one format, without a config unless one is given."""
    root.mkdir(parents=True)
    if kind in ("pt", "pytorch_model.bin"):
        path = root / ("sd.pt" if kind == "pt" else kind)
        torch.save(as_torch(tensors(stored)), path)
        if own is not None:
            (root / "config.json").write_text(json.dumps(own))
        return path if kind == "pt" else root
    if kind == "dcp":
        return write_dcp(root, tensors(stored), config=own)
    if kind in ("safetensors", "shards"):
        return write_hf(root, tensors(stored), shards=1 if kind == "safetensors" else 2, config=own)
    plain = write_hf(root / "plain", tensors(stored), config=own or config(dtype="float32"))
    made = root / "made"
    if kind == "dcp of ckptx":
        ckptx.convert("hf2dcp", plain, made)
    else:
        ckptx.reshard(plain, made, tp=2, to="safetensors")
    if own is None:
        (made / "config.json").unlink()
    return made


def convert(source: Path, kind: str, output: str, dst: Path, **options: Any) -> None:
    if output == "hf":
        ckptx.convert("dcp2hf", source, dst, **options)
    else:
        to = "dcp" if output == "dcp" else "safetensors"
        ckptx.reshard(source, dst, to=to, tp=2, **options)


def loaded(root: Path, files: Path) -> dict[str, torch.Tensor]:
    """What transformers makes of a directory, asked to follow its config; `files` has the same tensors as HF."""
    from transformers import AutoModelForCausalLM

    if files != root:
        (files / "config.json").write_bytes((root / "config.json").read_bytes())
    model = AutoModelForCausalLM.from_pretrained(files, dtype="auto")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


CASES = [
    (source, output, said, stored, dtype)
    for source, output, said, stored, dtype in product(SOURCES, OUTPUTS, sorted(HELD), STORED, DTYPES)
    if not (output == "hf" and source in ("safetensors", "shards"))  # dcp2hf takes no safetensors with whole tensors
]


@pytest.mark.sampled(40)
@pytest.mark.parametrize(("source", "output", "said", "stored", "dtype"), CASES)
def test_the_config_of_a_base_never_rounds_what_the_files_hold(
    tmp_path: Path, source: str, output: str, said: str, stored: str, dtype: str
) -> None:
    """The base is in the dtype that its config names, so whatever is stored otherwise came later."""
    base_dtype = next(name for name, word in TORCH.items() if word == said)
    base = write_hf(tmp_path / "base", tensors(base_dtype), config=config(dtype=said))
    made = write_source(tmp_path / "in", source, stored)
    convert(made, source, output, tmp_path / "out", base=str(base), dtype=dtype)
    now = json.loads((tmp_path / "out" / "config.json").read_text())["dtype"]
    kinds = {name: each[0] for name, each in written(tmp_path / "out").items()}
    before = {name: each[0] for name, each in tensors(stored).items()}
    if dtype == "auto":
        assert kinds == before
    elif dtype == "base":
        assert set(kinds.values()) == {base_dtype}
    else:
        kept = {
            name for name in kinds if dtype != "fp32" and before[name] == "F32" == base_dtype and kinds[name] == "F32"
        }
        assert {kinds[name] for name in kinds if name not in kept} <= {CAST[dtype]}
    assert set(kinds.values()) <= HELD[now], f"loading by {now} rounds {set(kinds.values())}"
    if set(kinds.values()) <= HELD[said] and (dtype not in CAST or set(before.values()) == set(kinds.values())):
        assert now == said, "edited without need"


@pytest.mark.parametrize(
    ("source", "output", "stored"), [(source, output, "F32") for source, output, said, stored, dtype in CASES
                                     if (said, stored, dtype) == ("bfloat16", "F32", "auto")]
)  # fmt: skip
def test_a_loader_gets_every_bit_of_the_files(tmp_path: Path, source: str, output: str, stored: str) -> None:
    base = write_hf(tmp_path / "base", tensors("BF16"), config=config(dtype="bfloat16"))
    made = write_source(tmp_path / "in", source, stored)
    convert(made, source, output, tmp_path / "out", base=str(base))
    files = tmp_path / "out"
    if output != "hf":  # what any loader of the tensors would see, in the form that transformers reads
        files = write_hf(tmp_path / "files", written_whole(tmp_path / "out"), config=None)
    got = loaded(tmp_path / "out", files)
    for name, tensor in as_torch(tensors(stored)).items():
        assert torch.equal(got[name], tensor), name
        assert got[name].dtype is tensor.dtype


def written_whole(root: Path) -> dict[str, Value]:
    """The tensors of a checkpoint in parts, put together by the code of `verify`."""
    from ckptx.catalog.region import full_region
    from ckptx.formats.dcp.reader import locate_payloads
    from ckptx.formats.registry import open_checkpoint
    from ckptx.storage.files import FilePool
    from ckptx.transfer.stream import TensorReader

    class Keep:
        def __init__(self) -> None:
            self.data = bytearray()

        def space(self, nbytes: int) -> memoryview:
            return memoryview(bytearray(nbytes))

        def commit(self, view: memoryview) -> None:
            self.data += view

    catalog, found = open_checkpoint(root), {}
    with FilePool(root) as files:
        if catalog.traits.has_archives:
            catalog = locate_payloads(catalog, files)
        for name, entry in catalog.tensors.items():
            keep = Keep()
            TensorReader(files).stream(entry, full_region(entry.shape), keep)
            found[name] = entry.dtype.name, entry.shape, bytes(keep.data)
    return found


@pytest.mark.sampled(50)
@pytest.mark.parametrize(("source", "output", "stored", "said"), [
    (source, output, stored, said) for source, output, said, stored, dtype in CASES if dtype == "auto"
])  # fmt: skip
def test_the_own_config_stays_unless_a_trainer_wrote_the_files(
    tmp_path: Path, source: str, output: str, stored: str, said: str
) -> None:
    """Published weights and what ckptx made of them keep their config to the byte, also one that is wrong."""
    made = write_source(tmp_path / "in", source, stored, config(dtype=said))
    beside = (made if made.is_dir() else made.parent) / "config.json"
    convert(made, source, output, tmp_path / "out")
    text = (tmp_path / "out" / "config.json").read_bytes()
    kinds = {each[0] for each in tensors(stored).values()}
    if source in ("dcp", "pt") and stored != "mixed" and not kinds <= HELD[said]:
        assert kinds <= HELD[json.loads(text)["dtype"]]
    elif source not in ("dcp", "pt"):
        assert text == beside.read_bytes()


def test_a_directory_with_one_file_is_what_the_cases_say(tmp_path: Path) -> None:
    assert (write_source(tmp_path / "in", "safetensors", "F32") / SINGLE).is_file()
    assert len(CASES) > 1000
