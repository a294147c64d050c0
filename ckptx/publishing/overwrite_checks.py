"""Check that `--overwrite` replaces only a checkpoint, without deleting unrelated files.

A directory is replaced as a whole, so every name in it is checked first. Weights, sidecars (config, tokenizer and other
files next to the weights) and trainer state are recognized by name; other files that ckptx wrote are recognized by the
digest in its manifest, unless they were edited, and reports and HTML pages by their first bytes. Any other file, at any
depth, is unrelated to the checkpoint.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath

from ckptx.catalog.catalog import Catalog
from ckptx.catalog.manifest_parser import read_manifest
from ckptx.errors import CkptxError, OutputError
from ckptx.formats.registry import open_checkpoint
from ckptx.formats.sidecars import MANIFEST, TRAINER_STATE_DIRECTORIES, is_known_sidecar, is_trainer_state_file
from ckptx.publishing.output_checks import refuse_files_inside
from ckptx.publishing.report_file import is_earlier_output
from ckptx.storage.directory_handle import DirectoryHandle
from ckptx.storage.files import output_errors
from ckptx.storage.interface import local_path
from ckptx.transfer.digest import file_digest
from ckptx.untrusted.printable import one_line
from ckptx.wording import counted

_BLOCK_NBYTES = 1 << 20
_MAX_LISTED = 3  # unrelated files that an error message names
_MAX_REMOVED = 20  # removed files that a note names

_WEIGHTS = re.compile(
    r"\.metadata|.+\.(safetensors|distcp|gguf)|.+\.(safetensors|bin|h5|msgpack)\.index\.json|"
    r"(pytorch_model|adapter_model|consolidated|tf_model|flax_model|model)([-_.][\w.-]+)?"
    r"\.(bin|pt|pth|h5|msgpack|onnx|onnx_data)|shard-\d+-model-\d+-of-\d+\.\w+"
)
# Pattern of the relative path of a subdirectory that trainers or the Hub client make, and pattern of the file names
# that are allowed in it; None for those that are allowed in the checkpoint directory itself (`_is_known_base_name`).
_KNOWN_DIRECTORIES = (
    (re.compile(r"(model|optim|optimizer|weights|pytorch_model_fsdp_\d+|optimizer_\d+|train|\.hf_metadata)"), None),
    (re.compile("|".join(sorted(TRAINER_STATE_DIRECTORIES))), re.compile(r"[\w.-]+\.(pt|json)")),
    (re.compile(r"\.cache/huggingface(/download)?"), re.compile(r"[\w.-]+\.(metadata|lock)|\.gitignore|CACHEDIR\.TAG")),
)


def refuse_unrelated_files(target: Path, backup: Path | None = None) -> None:
    """Refuse to replace a directory that is not a checkpoint or contains unrelated files; it may be absent or empty.

    Args:
        target: The directory.
        backup: A directory with copies of files of `target`; a file with a copy there, of the same name and bytes, may
            be replaced even if it is unrelated. None for no copies.

    Raises:
        OutputError: It is not a checkpoint, or contains unrelated files, of which the message names up to three.
    """
    resolved = Path(os.path.realpath(target))
    with output_errors(target):
        if not resolved.is_dir() or not os.listdir(resolved):
            return
    digests = _read_digests(resolved)
    with ExitStack() as stack:
        directory = stack.enter_context(DirectoryHandle.open_path(resolved))
        backup_directory = None if backup is None else stack.enter_context(DirectoryHandle.open_path(backup))
        unrelated = sorted(_iterate_unrelated_files(directory, digests or {}, backup_directory))
    if unrelated:
        listed = ", ".join(one_line(name) for name in unrelated[:_MAX_LISTED])
        more = f" and {len(unrelated) - _MAX_LISTED} more" if len(unrelated) > _MAX_LISTED else ""
        raise OutputError(
            f"{target}: contains files that do not belong to a checkpoint: {listed}{more}; --overwrite would delete "
            "them; move them elsewhere, or choose another DST"
        )
    if digests is None and not _is_checkpoint(resolved):
        raise OutputError(
            f"{target}: cannot be opened as a checkpoint and has no {MANIFEST}; --overwrite replaces only checkpoints; "
            "remove it yourself, or choose another DST"
        )


def list_removed_files(target: Path, written_names: Collection[str]) -> list[str]:
    """List the files that are lost when a checkpoint is replaced, such as a README.md that the user wrote.

    Weights are not listed, nor are unchanged files that ckptx wrote. The manifest of the old directory shows which
    files were added or edited: these are listed even if the new output has a file of the same name. Without a valid
    manifest this is not known, and files whose names are in the new output are not listed.

    Args:
        target: Directory that will be replaced.
        written_names: Names of the files of the new output.

    Returns:
        Relative paths, sorted; empty if the target is absent or cannot be listed.
    """
    resolved = Path(os.path.realpath(target))
    digests = _read_digests(resolved)
    try:
        with DirectoryHandle.open_path(resolved) as directory:
            return sorted(
                name
                for name, _ in directory.walk()
                if name != MANIFEST
                and (digests is not None or name not in written_names)
                and not _WEIGHTS.fullmatch(PurePosixPath(name).name)
                and not _is_written_by_ckptx(directory, name, digests or {})
            )
    except (CkptxError, OSError):
        return []  # absent; other errors are reported where it is replaced


def removal_note(target: Path, names: Sequence[str], *, dry_run: bool) -> str:
    """Return the note that lists files that are lost when a checkpoint is replaced.

    Args:
        target: The replaced directory.
        names: Result of `list_removed_files`, not empty.
        dry_run: True if nothing is replaced, and the note says what would be removed.
    """
    verb = "would remove" if dry_run else "removed"
    listed = ", ".join(one_line(name) for name in names[:_MAX_REMOVED])
    more = f" and {len(names) - _MAX_REMOVED} more" if len(names) > _MAX_REMOVED else ""
    return f"{target}: --overwrite {verb} {counted(len(names), 'file')} of the old directory: {listed}{more}"


def refuse_input_files(catalog: Catalog, target: Path) -> None:
    """Refuse a target that contains a file of an input; see `refuse_files_inside`.

    Raises:
        OutputError: Target and input overlap.
    """
    names = {*catalog.identities, *catalog.files, *(sidecar.name for sidecar in catalog.sidecars), *catalog.verbatim}
    refuse_files_inside((local_path(catalog.root / name) for name in sorted(names)), target)


def _is_checkpoint(root: Path) -> bool:
    """Return True if a directory is itself a checkpoint that can be opened, rather than containing one."""
    try:
        return local_path(open_checkpoint(root).root).samefile(root)
    except (CkptxError, OSError):
        return False


def _read_digests(root: Path) -> Mapping[str, str] | None:
    """Return the digest of each file that ckptx wrote, by name, or None without a valid manifest."""
    try:
        manifest = read_manifest(root / MANIFEST)
        return {name: file.digest for name, file in {**manifest.files, **manifest.sidecars}.items()}
    except (CkptxError, OSError):
        return None


def _iterate_unrelated_files(
    directory: DirectoryHandle, digests: Mapping[str, str], backup: DirectoryHandle | None
) -> Iterator[str]:
    """Yield the relative path of each file, link or special file that does not belong to the checkpoint."""
    for name, status in directory.walk():
        if stat.S_ISLNK(status.st_mode):
            is_unrelated = not is_known_name(name)
        elif stat.S_ISREG(status.st_mode):
            is_unrelated = not (
                is_known_name(name)
                or _is_written_by_ckptx(directory, name, digests)
                or _is_in_backup(directory, name, backup)
            )
        else:
            is_unrelated = True
        if is_unrelated:
            yield name


def is_known_name(name: str) -> bool:
    """Return True if a relative path is usual for a file of a checkpoint.

    These are weights, sidecars, trainer state, the manifest, and files in the cache directory of the Hub client.
    """
    path = PurePosixPath(name)
    base, directory = path.name, str(path.parent)
    if directory == ".":
        return _is_known_base_name(base) or base == MANIFEST
    for directory_pattern, name_pattern in _KNOWN_DIRECTORIES:
        if directory_pattern.fullmatch(directory):
            return _is_known_base_name(base) if name_pattern is None else name_pattern.fullmatch(base) is not None
    return False


def _is_known_base_name(base: str) -> bool:
    return is_known_sidecar(base) or is_trainer_state_file(base) or _WEIGHTS.fullmatch(base) is not None


def _is_written_by_ckptx(directory: DirectoryHandle, name: str, digests: Mapping[str, str]) -> bool:
    """Return True for a file with the digest in the manifest, or a report, HTML page or JUnit XML of ckptx."""
    try:
        with directory.open_file(name) as file:
            return file_digest(file).hex() == digests[name] if name in digests else is_earlier_output(file)
    except (CkptxError, OSError):
        return False


def _is_in_backup(directory: DirectoryHandle, name: str, backup: DirectoryHandle | None) -> bool:
    """Return True for a file that `backup` also contains, with the same bytes."""
    if backup is None:
        return False
    try:
        with directory.open_file(name) as file, backup.open_file(name) as other:
            blocks = zip(file.blocks(_BLOCK_NBYTES), other.blocks(_BLOCK_NBYTES), strict=False)
            return file.size == other.size and all(a == b for a, b in blocks)
    except (CkptxError, OSError):
        return False
