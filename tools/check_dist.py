"""Build the sdist and the wheel, check them, and try the wheel in an empty environment (`make dist`).

    python tools/check_dist.py

The steps in order; the run ends at the first that fails:

    build    the sdist, and the wheel from it, in dist/
    check    the metadata, with the checks of PyPI (`twine check`); every file of ckptx/ that git tracks is in the wheel
    try      the wheel in a new virtual environment without extras: `ckptx --version`, `ckptx env`, and a small
             checkpoint converted to a DCP and back to the same bytes, verified, resharded and inspected
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"


def package_files() -> set[str]:
    """Return the files of the package that git tracks."""
    process = subprocess.run(["git", "ls-files", "-z", "ckptx"], cwd=ROOT, check=True, capture_output=True, text=True)
    return set(process.stdout.split("\0")) - {""}


def missing_files(wheel: Path, expected: set[str]) -> list[str]:
    """Return the files that the wheel lacks, sorted."""
    with zipfile.ZipFile(wheel) as archive:
        return sorted(expected - set(archive.namelist()))


def write_checkpoint(directory: Path) -> None:
    """Write a checkpoint of a Llama with one layer.

    The file is written byte by byte, because this environment may lack torch and safetensors.
    """
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "intermediate_size": 16,
        "model_type": "llama",
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "vocab_size": 16,
    }
    layer = "model.layers.0"
    shapes = {"lm_head.weight": [16, 8], "model.embed_tokens.weight": [16, 8], "model.norm.weight": [8]}
    shapes |= {f"{layer}.self_attn.{name}_proj.weight": [8, 8] for name in "qkvo"}
    shapes |= {f"{layer}.mlp.{name}_proj.weight": [16, 8] for name in ("gate", "up")}
    shapes |= {f"{layer}.mlp.down_proj.weight": [8, 16]}
    shapes |= {f"{layer}.{name}_layernorm.weight": [8] for name in ("input", "post_attention")}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    payload = b""
    for name, shape in sorted(shapes.items()):
        num_values = shape[0] * (shape[1] if len(shape) == 2 else 1)
        values = struct.pack(f"<{num_values}f", *(float(len(payload) % 97 + i) for i in range(num_values)))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(payload), len(payload) + len(values)]}
        payload += values
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header_bytes)) + header_bytes + payload)


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Print a command and run it."""
    print("$", *(str(word).removeprefix(f"{ROOT}/") for word in command), flush=True)
    subprocess.run(command, cwd=cwd, check=True)


def build() -> tuple[Path, Path]:
    """Build both packages and return their paths: sdist and wheel."""
    for stale_directory in (DIST, ROOT / "build" / "lib"):  # a deleted module would remain in the wheel
        shutil.rmtree(stale_directory, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST)
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    return sdist, wheel


def try_wheel(wheel: Path) -> None:
    """Install the wheel in a new environment without extras and run commands on a small checkpoint."""
    with tempfile.TemporaryDirectory(prefix="ckptx-dist-") as work:
        folder = Path(work)
        run(sys.executable, "-m", "venv", folder / "venv")
        run(folder / "venv/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
        ckptx = folder / "venv/bin/ckptx"
        write_checkpoint(folder / "model")
        run(ckptx, "--version", cwd=folder)
        run(ckptx, "env", cwd=folder)
        run(ckptx, "convert", "hf2dcp", "model", "dcp", cwd=folder)
        run(ckptx, "verify", "model", "dcp", cwd=folder)
        run(ckptx, "reshard", "model", "sharded", "--tp", "2", cwd=folder)
        run(ckptx, "inspect", "sharded", "--ranks", "--html", "layout.html", cwd=folder)
        run(ckptx, "convert", "dcp2hf", "dcp", "back", cwd=folder)
        for path in (folder / "model").iterdir():
            if path.read_bytes() != (folder / "back" / path.name).read_bytes():
                raise SystemExit(f"{path.name}: the bytes differ after a round trip")


def main() -> int:
    """Build, check and try the packages; print their sizes."""
    sdist, wheel = build()
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    if missing := missing_files(wheel, package_files()):
        raise SystemExit(f"{wheel.name}: {len(missing)} files of ckptx/ are missing: {', '.join(missing)}")
    try_wheel(wheel)
    for path in (sdist, wheel):
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 2**20:.2f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
