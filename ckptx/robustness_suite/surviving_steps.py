"""Check the directory of steps after a killed save: the last good step loads, and no other step looks complete.

`StepDirectories` determines which steps look complete, and the latest one. Stock torch and ckptx must load each of them
with the same bytes. No other directory may be named like a step or be loadable by stock torch, unless a part of its
path begins with a dot.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckptx.errors import CkptxError, InputError
from ckptx.runtime.checkpointing.stored_state import compute_digest, open_state
from ckptx.runtime.training.checkpoints import LATEST, StepDirectories


class SurvivingSteps(NamedTuple):
    """State of a directory of steps.

    Attributes:
        published: Numbers of the complete steps.
        latest: Step to resume from; None if there is none.
        note: Note of `ResumePoint` on the selection of `latest`; "" for none.
        digests: Step -> digest of its contents, without steps that do not load.
        hidden: Directories that loaders ignore, relative to the root: remains of interrupted saves and removals.
        violations: Sentence for each violated requirement; empty if the directory is valid.
    """

    published: list[int]
    latest: int | None
    note: str
    digests: Mapping[int, str]
    hidden: list[str]
    violations: list[str]


def check_steps(
    root: Path,
    *,
    good_step: int | None = None,
    expected_digests: Mapping[int, str] | None = None,
    next_save: Callable[[], int] | None = None,
) -> SurvivingSteps:
    """Return the state of a directory of steps, checked in one process.

    Args:
        root: Directory of all steps.
        good_step: Latest published step before the kill; it or a newer step must be the latest. None skips this check.
        expected_digests: Step -> digest, from an earlier check; other steps are not compared. None compares no step.
        next_save: Function that saves a step on all ranks and returns its number; it must succeed, and that step must
            become the latest. None skips this check.
    """
    steps = StepDirectories(root)
    published, choice = steps.published(), steps.choose()
    violations, digests = [], {}
    for step in published:
        try:
            digests[step] = content_digest(steps.path(step))
        except Exception as error:  # a loader may raise any error
            violations.append(f"step-{step}: looks complete, but does not load: {type(error).__name__}: {error}")
        else:
            if (expected_digests or {}).get(step, digests[step]) != digests[step]:
                violations.append(f"step-{step}: contents differ from what was saved")
    violations += _check_latest(steps, published, choice.step, good_step)
    hidden = []
    for path in _list_directories(root):
        name = str(path.relative_to(root))
        if path.parent == root and path.name in {f"step-{each}" for each in published}:
            continue
        if any(part.startswith(".") for part in path.relative_to(root).parts):
            hidden.append(name)
        elif path.name.startswith("step-") or _is_loadable(path):
            violations.append(f"{name}: is incomplete, but loaders may load it")
    if next_save is not None:
        violations += _check_next_save(root, next_save, expected_digests)
    return SurvivingSteps(published, choice.step, choice.note, digests, hidden, violations)


def _check_latest(
    steps: StepDirectories, published: list[int], latest: int | None, good_step: int | None
) -> Iterator[str]:
    if latest is not None and latest not in published:
        yield f"step-{latest}: is selected as latest, but is incomplete"
    latest_file = steps.root / LATEST
    if os.path.lexists(latest_file) and latest_file.read_text().strip() not in {f"step-{each}" for each in published}:
        yield f"{LATEST}: names {latest_file.read_text().strip()}, which is incomplete"
    if good_step is not None and (latest is None or latest < good_step):
        latest_text = "no step" if latest is None else f"step-{latest}"
        yield f"step-{good_step}: was complete, but {latest_text} is now the latest"


def _check_next_save(root: Path, next_save: Callable[[], int], expected_digests: Mapping[int, str] | None) -> list[str]:
    try:
        step = next_save()
    except CkptxError as error:
        return [f"the next save: {type(error).__name__}: {error}"]
    result = check_steps(root, good_step=step, expected_digests=expected_digests)
    violations = [f"after the next save: {each}" for each in result.violations]
    if result.latest != step:
        violations.append(f"the next save: step-{step} is not the latest, step-{result.latest} is")
    return violations + [f"the next save: left {each}" for each in result.hidden if each.startswith(f".step-{step}.")]


def content_digest(path: Path) -> str:
    """Return a digest of all contents of a DCP as stock torch loads it, and check that ckptx reads the same tensors.

    Raises:
        CkptxError: ckptx cannot read it, or torch cannot.
        ValueError: ckptx and torch read different bytes of a tensor.
        Exception: torch cannot read its metadata; the class depends on the damage.
    """
    state = _load_with_torch(path)
    with open_state(path) as stored:
        for name, entry in stored.tensors.items():
            tensor = torch.empty(entry.shape, dtype=getattr(torch, str(entry.dtype.torch_name)))
            stored.fill(name, tensor)
            if compute_digest(tensor) != compute_digest(state[name]):
                raise ValueError(f'tensor "{name}" has different bytes in stock torch')
    hasher = blake2b(digest_size=16)
    for name in sorted(state):
        value = state[name]
        hasher.update(f"{name} {compute_digest(value.contiguous() if isinstance(value, Tensor) else value)}\n".encode())
    return hasher.hexdigest()


def _load_with_torch(path: Path) -> dict[str, Any]:
    """Load all contents of a DCP with stock torch in this process."""
    reader = dcp.FileSystemReader(path)
    state: dict[str, Any] = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        is_tensor = isinstance(entry, TensorStorageMetadata)
        state[name] = torch.zeros(entry.size, dtype=entry.properties.dtype) if is_tensor else None
    try:
        with warnings.catch_warnings():  # the missing process group is intended
            warnings.simplefilter("ignore")
            dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    except CheckpointException as failed:  # a BaseException
        raise InputError(f"{path}: stock torch cannot load it: {next(iter(failed.failures.values()))[0]}") from failed
    return state


def _is_loadable(path: Path) -> bool:
    try:
        _load_with_torch(path)
    except Exception:  # a loader may raise any error
        return False
    return True


def _list_directories(root: Path) -> Iterator[Path]:
    for parent, names, _ in os.walk(root):
        yield from (Path(parent, name) for name in sorted(names))
