"""Resolve Hub ids: `org/name` becomes the local directory of a snapshot; everything after that is local."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ckptx.errors import EnvironmentProblem, InputError
from ckptx.storage.files import read_status
from ckptx.untrusted.remote_name import refuse_remote

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

# Files of a Hub repository that are downloaded by default: weights, config, tokenizer, code and license.
_PATTERNS = (
    "*.json",
    "*.safetensors",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.py",
    "*.tiktoken",
    "*.md",
    "*.bin",
    "LICENSE*",
)
# Environment variables that name the cache for huggingface_hub.
_CACHE_VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME")
CONFIG_FILES = ("config.json", "*.py")  # enough to build a model without its weights


def resolve_source(
    source: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    patterns: Sequence[str] = _PATTERNS,
) -> Path:
    """Return the local path of a source: the path itself if it exists, else a snapshot of the Hub id.

    With `HF_HUB_OFFLINE=1` no socket is opened and only the cache is searched.

    Args:
        source: A path or a Hub id.
        revision: Branch, tag or commit on the Hub; None for the default branch.
        token: Access token for the Hub; None for the one of `hf auth login`.
        cache_dir: Cache directory of the Hub; None for the default of huggingface_hub.
        patterns: Glob patterns of the files to download.

    Raises:
        InputError: It is neither an existing path nor a Hub id that can be downloaded.
        UnsupportedError: The source or the cache directory is a URL.
        EnvironmentProblem: huggingface_hub is missing.
    """
    refuse_remote(source, cache_dir)
    if not source:  # an unset variable of a shell, not the current directory
        raise InputError('"": no such file or directory')
    path = Path(source)
    if read_status(path, follow_links=False) is not None:
        return path
    if not _HUB_ID.fullmatch(source):
        raise InputError(f"{source}: no such file or directory")
    # If the parent directory exists, this is probably a mistyped path. It is still tried as a Hub id; only the error
    # message differs.
    is_in_directory = path.parent.is_dir()
    missing = f"no such file or directory in {path.parent}" if is_in_directory else "no such path"
    try:
        from huggingface_hub import is_offline_mode, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise EnvironmentProblem(f"{source}: a Hub id requires huggingface_hub; pip install huggingface-hub") from error
    refuse_remote(*(os.environ.get(name) for name in _CACHE_VARIABLES))
    try:
        snapshot = snapshot_download(
            source, revision=revision, token=token, cache_dir=cache_dir, allow_patterns=list(patterns)
        )
    except LocalEntryNotFoundError as error:
        reason = "HF_HUB_OFFLINE is set" if is_offline_mode() else "the Hub cannot be reached"
        advice = "" if is_in_directory else f"; download it first (hf download {source})"
        raise InputError(f"{source}: {missing}, and not in the Hub cache ({reason}){advice}") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise InputError(
            f"{source}: {missing}, and not available on the Hub: {(str(error).splitlines() or ['no reason'])[0]}"
        ) from error
    return Path(snapshot)
