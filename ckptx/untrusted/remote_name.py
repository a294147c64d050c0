"""Refuse URLs where a local path is required, before anything takes `s3://bucket/x` for a directory called `s3:`."""

from __future__ import annotations

import os
import re

from ckptx.errors import UnsupportedError

_URL = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*)://")
# A URL that was converted to a path: `pathlib.Path("s3://bucket/x")` is `s3:/bucket/x`.
_URL_AS_PATH = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]+):/")
_SCHEMES = frozenset({
    "abfs", "abfss", "adl", "az", "azure", "azureml", "b2", "bos", "cos", "dav", "davs", "dbfs", "dvc", "file", "ftp",
    "ftps", "gcs", "gdrive", "gitlab", "github", "gs", "hdfs", "hf", "http", "https", "ipfs", "ks3", "memory",
    "minio", "mlflow", "models", "msc", "nfs", "obs", "oci", "oss", "r2", "rsync", "runs", "s3", "s3a", "s3n", "scp",
    "sftp", "smb", "ssh", "swift", "tos", "viewfs", "wandb", "wasb", "wasbs", "webdav", "webhdfs",
})  # fmt: skip
_HUB = re.compile(r"https?:/+(www\.)?(huggingface\.co|hf\.co)/", re.IGNORECASE)


def refuse_remote(*names: str | os.PathLike[str] | None) -> None:
    """Refuse each name that is a URL; every command and function calls this for every path that it takes.

    Args:
        names: Paths as the caller gave them; None stands for a path that was not given. A `pathlib.Path` has lost one
            of the two slashes, so `s3:/bucket/x` is refused as well if the scheme is known and no such path exists.

    Raises:
        UnsupportedError: A name is a URL.
    """
    for name in names:
        text = "" if name is None else os.fsdecode(name)
        scheme = _find_scheme(text)
        if scheme is not None:
            raise UnsupportedError(f"{text}: {_reason(text, scheme)}")


def _find_scheme(text: str) -> str | None:
    """Return the scheme in lower case, or None for a local path or a Hub id."""
    match = _URL.match(text)
    if match is not None:
        return match[1].lower()
    match = _URL_AS_PATH.match(text)
    if match is None or match[1].lower() not in _SCHEMES or os.path.lexists(text):
        return None
    return match[1].lower()


def _reason(text: str, scheme: str) -> str:
    if scheme == "file":
        return "is a URL, and a local path is required; write the path without file://"
    if scheme == "hf" or _HUB.match(text.strip()):
        return "is a URL of the Hub, and a Hub id (org/name) or a local path is required; write the id alone"
    return f"is a URL ({scheme}://), and ckptx reads and writes local paths only; copy to or from a local directory"
