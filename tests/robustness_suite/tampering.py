"""Changes to a file or folder, as a trainer makes them that takes its checkpoint for a place to work in."""

import os
import shutil
from pathlib import Path


def tamper(path: Path, change: str) -> None:
    """Make a change of `CHANGES` or `NO_CHANGES`."""
    (CHANGES | NO_CHANGES)[change](path)


def _rewrite(path: Path, content: bytes) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    os.replace(new, path)


def _first_file(path: Path) -> Path:
    return next(each for each in sorted(path.iterdir()) if each.is_file()) if path.is_dir() else path


def _append(path: Path) -> None:
    with _first_file(path).open("ab") as file:
        file.write(b" ")


def _flip(path: Path) -> None:
    """Change one bit where it lies, and set the times back."""
    file = _first_file(path)
    before, content = file.stat(), bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    with file.open("r+b") as opened:
        opened.write(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _delete(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _link(path: Path) -> None:
    """Put a link to the same contents in its place."""
    moved = path.parent / f".{path.name}.moved"
    path.rename(moved)
    path.symlink_to(moved.name)


CHANGES = {
    "other contents": lambda path: _rewrite(_first_file(path), b"other"),
    "emptied": lambda path: _rewrite(_first_file(path), b""),
    "appended": _append,
    "one bit": _flip,
    "deleted": _delete,
    "renamed": lambda path: path.rename(path.with_name(f"{path.name}.old")),
    "added": lambda path: (path if path.is_dir() else path.parent).joinpath("extra.json").write_text("1"),
    "linked": _link,
}
NO_CHANGES = {
    "same contents": lambda path: _rewrite(_first_file(path), _first_file(path).read_bytes()),
    "touched": lambda path: os.utime(path, (1, 1)),
    "read": lambda path: _first_file(path).read_bytes(),
    "mode": lambda path: path.chmod(0o700),
}
