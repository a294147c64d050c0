"""The byte path of every recipe and popular class without torch: shapes, names and plans come from the tables."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models import EVERY, RECIPES, write
from tests.support.popular_models import LANGUAGE, OTHERS, build

_WORK = """
import json, sys
from pathlib import Path
import ckptx

found = {}
for source in sorted(Path(sys.argv[1]).iterdir()):
    here = Path(sys.argv[2]) / source.name
    here.mkdir(parents=True)
    steps = {
        "inspect": lambda: ckptx.inspect(source),
        "hf2dcp": lambda: ckptx.convert("hf2dcp", source, here / "dcp"),
        "dcp2hf": lambda: ckptx.convert("dcp2hf", here / "dcp", here / "hf"),
        "reshard": lambda: ckptx.reshard(source, here / "cut", tp=2, pp=1),
        "reshard to DCP": lambda: ckptx.reshard(source, here / "cut-dcp", tp=2, to="dcp"),
        "verify": lambda: ckptx.verify(source, here / "cut"),
        "diff": lambda: ckptx.diff(source, here / "cut-dcp"),
    }
    for step, run in steps.items():
        report = run()
        assert report.ok, (source.name, step, report.to_dict())
        loaded = {"torch", "transformers"} & set(sys.modules)
        if loaded:
            found[source.name] = step
            for name in [each for each in sys.modules if each.split(".")[0] in loaded]:
                del sys.modules[name]  # the next one is asked anew
            break
print(json.dumps(found))
"""


def _loaded(names: list[str], root: Path) -> dict[str, str]:
    """Per recipe or class the first step that imported torch."""
    for name in names:
        if name in EVERY:
            write(EVERY[name], root / "sources" / name)
        else:
            build(name).save_pretrained(root / "sources" / name)
    arguments = [sys.executable, "-c", _WORK, str(root / "sources"), str(root / "out")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("without-torch")


def test_no_recipe_imports_torch_on_the_byte_path(root: Path) -> None:
    assert _loaded(list(RECIPES), root / "recipes") == {}


@pytest.mark.slow
def test_no_recipe_of_the_wide_matrix_does(root: Path) -> None:
    assert _loaded([name for name in EVERY if name not in RECIPES], root / "wide") == {}


def test_no_class_whose_layers_share_modules_or_take_other_forms_on_disk_does(root: Path) -> None:
    assert _loaded(["Zamba2ForCausalLM", "ZambaForCausalLM", "NemotronHForCausalLM"], root / "few") == {}


@pytest.mark.slow
def test_no_popular_class_of_the_table_does(root: Path) -> None:
    assert _loaded([*LANGUAGE, *OTHERS], root / "popular") == {}
