"""What others read in a source and in the output made of it: safetensors' library and stock torch, held side by side.

A process of its own, because the fuzzer forks from one in which torch is absent:

    python -m tests.fuzz.others        a line `{"source": DIR, "output": DIR, "dtype": null}` in, a line of answer out
"""

from __future__ import annotations

import io
import json
import select
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

SECONDS = 30


class Others:
    """The reading process, started when it is first asked, and again after it hung or fell."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self.judged = 0
        """How many outputs were held against a source that others could read as well."""
        self.unread = 0
        """How many could not be, because others cannot read the source."""

    def difference(self, source: str, output: str, dtype: str | None) -> str | None:
        """What is in one and not in the other; None without a difference, or where others cannot read the source."""
        answer = self._ask({"source": source, "output": output, "dtype": dtype})
        if answer["unread"]:
            self.unread += 1
            return None
        self.judged += 1
        return answer["difference"]

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            words = [sys.executable, "-m", "tests.fuzz.others"]
            self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        ready, _, _ = select.select([self._process.stdout], [], [], SECONDS)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self.close()
            return {"unread": False, "difference": "the process that reads as others do hung or fell"}
        answer: dict[str, Any] = json.loads(line)
        return answer


def _answer(source: str, output: str, dtype: str | None) -> dict[str, Any]:
    try:
        before = _read(Path(source))
    except BaseException as error:  # torch's CheckpointException is no Exception
        return {"unread": str(error)[:200] or type(error).__name__, "difference": None}
    try:
        after = _read(Path(output))
    except BaseException as error:  # whatever another reader raises, it cannot read the output
        return {"unread": None, "difference": f"cannot be read: {str(error)[:200]}"}
    if dtype == "fp32":
        before = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in before.items()}
    return {"unread": None, "difference": _difference(before, after)}


def _read(root: Path) -> Tensors:
    """Every tensor of a checkpoint, whole, by its name, as stock software reads it."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    if (root / ".metadata").exists():
        reader = FileSystemReader(root)
        for place in reader.read_metadata().storage_data.values():
            data = (root / place.relative_path).read_bytes()
            _refuse_damaged(data[place.offset : place.offset + place.length])
        return _load(reader)
    index, found = root / "model.safetensors.index.json", sorted(root.glob("*.safetensors"))
    if index.exists():
        return _indexed(root, json.loads(index.read_bytes())["weight_map"])
    if found == [root / "model.safetensors"]:
        return _indexed(root, dict.fromkeys(_names(found[0]), found[0].name))
    if found:
        return _load(HuggingFaceStorageReader(str(root)))
    ranks = sorted(root.glob("model_world_size_*_rank_*.pt"))
    if ranks:
        return _of_ranks(ranks)
    _refuse_damaged((root / "pytorch_model.bin").read_bytes())
    loaded: Tensors = torch.load(root / "pytorch_model.bin", weights_only=True)
    return loaded


def _of_ranks(files: list[Path]) -> Tensors:
    """The tensors of FSDP ranks on a mesh of one dim, put together as verl's merger does: local tensors in a row.

    Raises:
        ValueError: They are not those of one save.
    """
    import torch
    from torch.distributed.tensor import DTensor, Shard

    states = []
    for file in files:
        _refuse_damaged(file.read_bytes())
        states.append(torch.load(file, weights_only=True))
    found = {}
    for name, first in states[0].items():
        parts = [state[name] for state in states]
        locals_ = [part._local_tensor if isinstance(part, DTensor) else part for part in parts]
        placement = first._spec.placements[0] if isinstance(first, DTensor) else None
        whole = torch.cat(locals_, dim=placement.dim) if isinstance(placement, Shard) else locals_[0]
        if whole.shape != first.shape or any(part.shape != first.shape for part in parts):
            raise ValueError(f"{name[:80]}: parts of {list(whole.shape)}, needed {list(first.shape)}")
        found[name] = whole
    return found


def _refuse_damaged(data: bytes) -> None:
    """torch.load checks no CRC, and takes a member that is marked as a directory for read: it gives back other bytes.

    Raises:
        ValueError: Python's zipfile finds the archive damaged, or there is a directory in it.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            damaged = archive.testzip() or next((m for m in archive.infolist() if m.external_attr & 0x10), None)
    except Exception as error:  # zipfile raises a dozen kinds
        raise ValueError(f"no zip: {error}") from error
    if damaged is not None:
        raise ValueError(f"damaged: {damaged}")


def _load(reader: Any) -> Tensors:
    import torch
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    known = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in known.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(state, storage_reader=reader, no_dist=True)
    return state


def _names(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return list(file.keys())


def _indexed(root: Path, files: dict[str, str]) -> Tensors:
    from safetensors import safe_open

    found = {}
    for each in set(files.values()):
        with safe_open(root / each, "pt") as file:
            found.update({name: file.get_tensor(name) for name in files if files[name] == each})
    return found


def _difference(before: Tensors, after: Tensors) -> str | None:
    """The first tensor that is changed, lost or new; a name without its prefixes, a tied tensor under any of its names.

    In a small checkpoint of random numbers a tensor is known by what is in it, whatever it is called.
    """
    old = {_plain(name): _contents(tensor) for name, tensor in _experts_apart(before).items()}
    new = {_plain(name): _contents(tensor) for name, tensor in _experts_apart(after).items()}
    for name, contents in new.items():
        if contents != old.get(name, contents):
            return f"{name[:80]}: {contents[:2]}, of {old[name][:2]}" + " with other bytes" * (
                contents[:2] == old[name][:2]
            )
        if contents not in old.values():
            return f"{name[:80]}: is in no tensor of the source"
    for name, contents in old.items():
        if contents not in new.values():
            return f"{name[:80]}: is in no tensor of the output"
    return None


def _experts_apart(tensors: Tensors) -> Tensors:
    """Each expert under a name of its own, as they are published; transformers' model has them in two tensors."""
    found = {}
    for name, tensor in tensors.items():
        lead, _, kind = name.rpartition(".")
        if not lead.endswith(".experts") or kind not in ("gate_up_proj", "down_proj") or tensor.ndim != 3:
            found[name] = tensor
            continue
        for index, expert in enumerate(tensor):
            parts = expert.chunk(2) if kind == "gate_up_proj" else (expert,)
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            found |= {f"{lead}.{index}.{each}.weight": part for each, part in zip(kinds, parts, strict=True)}
    return found


def _plain(name: str) -> str:
    while name.startswith("model."):
        name = name.removeprefix("model.")
    return name


def _contents(tensor: torch.Tensor) -> tuple[str, list[int], bytes]:
    import torch

    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else b""
    return str(tensor.dtype), list(tensor.shape), bytes(data)


def main() -> None:
    """Answers until nobody asks any more; whatever torch prints stays out of the answers."""
    warnings.simplefilter("ignore")
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(_answer(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
