"""What a run loads: torch, transformers and numpy stay out of commands that do not need them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ckptx.options.commands import COMMANDS
from tests.support.checkpoint_writers import LLAMA, llama, write_dcp, write_hf

_LOADED = """
import json, sys
from pathlib import Path
import ckptx
heavy = "torch", "transformers", "huggingface_hub", "safetensors", "numpy", "tqdm", "msgspec", "jinja2"
before = sorted(set(heavy) & set(sys.modules))
assert not before, before
here = Path(sys.argv[1])
{work}
print(json.dumps(sorted(set(heavy) & set(sys.modules))))
"""


def loaded(here: Path, work: str) -> set[str]:
    """Which heavy packages a process has loaded after `work`."""
    done = subprocess.run(
        [sys.executable, "-c", _LOADED.format(work=work), str(here)], capture_output=True, text=True, cwd=Path.cwd()
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("imports")
    write_hf(root / "hf", llama(), shards=2)
    write_dcp(root / "dcp", llama(), config=LLAMA)
    return root


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "work",
    [
        pytest.param("ckptx.inspect(here / 'hf')", id="inspect HF"),
        pytest.param("ckptx.inspect(here / 'dcp', tensors=True)", id="inspect DCP"),
        pytest.param("ckptx.diff(here / 'hf', here / 'dcp')", id="diff"),
        pytest.param("ckptx.verify(here / 'hf', here / 'dcp')", id="verify"),
        pytest.param("ckptx.convert('hf2dcp', here / 'hf', here / 'a')", id="hf2dcp"),
        pytest.param("ckptx.convert('dcp2hf', here / 'dcp', here / 'b')", id="dcp2hf"),
        pytest.param("ckptx.convert('dcp2hf', here / 'dcp', here / 'c', base=here / 'hf')", id="dcp2hf --base"),
        pytest.param(
            "from click.testing import CliRunner; from ckptx.cli.main import cli\n"
            "for words in (['--help'], ['env'], ['convert', 'hf2dcp', '--help'], ['inspect', str(here / 'hf')]):\n"
            "    assert CliRunner().invoke(cli, words, standalone_mode=False).return_value in (0, None)",
            id="help, env and inspect on the command line",
        ),
    ],
)
def test_nothing_heavy_is_loaded(here: Path, work: str) -> None:
    assert loaded(here, work) == set()


def test_a_cast_loads_numpy_alone(here: Path) -> None:
    assert loaded(here, "ckptx.convert('hf2dcp', here / 'hf', here / 'd', dtype='fp16')") == {"numpy"}


_SPECIAL = {  # modules for checkpoints of other kinds, which take several milliseconds to import
    "architecture.trainer_naming.megatron", "conversion.outputs.megatron", "formats.torch_checkpointing.metadata",
    "model_view.megatron_names", "model_view.megatron_tensors", "quantization.declared", "quantization.tensors",
}  # fmt: skip
_OF_WEIGHTS = {"quantization.computed_files", "transfer.stream"}
_OF_DCP = {"conversion.outputs.dcp", "formats.dcp.metadata", "formats.torch_archive.archive"}


@pytest.mark.parametrize(
    ("work", "absent"),
    [
        ("ckptx.inspect(here / 'hf')", _SPECIAL | _OF_WEIGHTS | _OF_DCP),
        ("ckptx.diff(here / 'hf', here / 'hf')", _SPECIAL | _OF_WEIGHTS | _OF_DCP),
        ("ckptx.verify(here / 'hf', here / 'hf')", _SPECIAL | _OF_DCP),
        ("ckptx.reshard(here / 'hf', here / 'e', tp=2)", _SPECIAL | _OF_DCP),
        ("ckptx.verify(here / 'hf', here / 'dcp')", _SPECIAL),
        ("ckptx.convert('hf2dcp', here / 'hf', here / 'f')", _SPECIAL | {"conversion.outputs.huggingface"}),
        ("ckptx.convert('dcp2hf', here / 'dcp', here / 'g')", _SPECIAL | {"conversion.outputs.dcp"}),
    ],
)
def test_plain_checkpoints_load_no_modules_for_others(here: Path, work: str, absent: set[str]) -> None:
    program = f"import sys, ckptx\nfrom pathlib import Path\nhere = Path(sys.argv[1])\n{work}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, str(here)], capture_output=True, text=True, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    assert sorted({f"ckptx.{name}" for name in absent} & {*done.stdout.split()}) == []


def test_the_probe_would_notice(here: Path) -> None:
    assert loaded(here, "import numpy, tqdm") == {"numpy", "tqdm"}


def test_importing_ckptx_loads_nothing_of_it() -> None:
    work = "import sys, ckptx; print(sorted(name for name in sys.modules if name.startswith('ckptx.')))"
    done = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, cwd=Path.cwd())
    assert done.stdout.strip() == "['ckptx.processes', 'ckptx.processes.imports', 'ckptx.version']"


def test_the_python_api_offers_what_it_names() -> None:
    import ckptx

    functions = {command.function.partition(":")[2] for command in COMMANDS.values() if command.function}
    assert functions <= {*ckptx.__all__}, "name the function in ckptx/__init__.py: among the imports and in __all__"
    for name in ckptx.__all__:
        assert getattr(ckptx, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ckptx.nonsense
