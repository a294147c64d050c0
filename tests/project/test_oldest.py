"""What is claimed to work is what is tested: the floors of pyproject.toml are the versions of `make test-oldest`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ckptx.cli.env import _TESTED_VERSIONS
from ckptx.errors import _EXTRA_BY_PACKAGE, missing_package

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Tools that check the code, or build the package and the docs site, and that no test runs.
NOT_RUN = {"build", "markdown-it-py", "mkdocs-material", "mutmut", "mypy", "pre-commit", "ruff", "setuptools", "twine"}


def pins(name: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9.-]+)==([^\s;]+)", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE))


def test_the_oldest_versions_are_the_floors() -> None:
    floors = {name: floor for name, floor in re.findall(r'"([a-z0-9.-]+)>=([\d.]+)"', PROJECT) if name not in NOT_RUN}
    oldest = pins("constraints-oldest.txt")
    assert len(floors) == 21
    wrong = {name: oldest.get(name) for name, floor in floors.items() if f"{oldest.get(name)}.".find(f"{floor}.")}
    assert not wrong


def test_the_extra_that_an_error_names_brings_the_package() -> None:
    project = PROJECT.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = dict(re.findall(r"^(\w+) = \[(.*)\]", project, re.MULTILINE))
    names = {"PIL": "pillow", "ruamel": "ruamel.yaml", "tokenizers": "transformers"}
    for module, extra in _EXTRA_BY_PACKAGE.items():
        assert re.search(rf'"{names.get(module, module)}\b', extras[extra]), module
        error = missing_package("x", ImportError(name=f"{module}.part"))
        assert f"requires {module}, which is not installed; pip install 'ckptx[{extra}]'" in str(error)


def test_the_oldest_python_is_the_floor() -> None:
    found = re.search(r'^requires-python = ">=(3\.\d+)"$', PROJECT, re.MULTILINE)
    assert found is not None and sys.version_info >= tuple(map(int, found[1].split(".")))
    digits = found[1].replace(".", "")
    assert f'target-version = "py{digits}"' in PROJECT and f'python_version = "{found[1]}"' in PROJECT
    assert f"python{found[1]}" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"Python {found[1]} or later" in README


def test_the_documents_list_the_tested_versions() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    found = re.search(r"The tests run with two sets of versions: .*?\n\n", page, re.DOTALL)
    assert found is not None
    words = set(re.findall(r"\d+(?:\.\d+)+", found[0]))
    for each in (pins("constraints.txt"), pins("constraints-oldest.txt")):
        assert {
            each[name] for name in ("torch", "transformers", "click", "huggingface-hub", "numpy", "safetensors")
        } <= words
        assert set(_TESTED_VERSIONS) == {"torch", "transformers", "click", "huggingface-hub", "numpy", "safetensors"}
        assert all(each[name] in re.split(", | and ", said) for name, said in _TESTED_VERSIONS.items())
