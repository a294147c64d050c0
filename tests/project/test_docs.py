"""README, CONTRIBUTING and docs: links, anchors, options, tables; `tools/check_docs.py` runs what they say."""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from pathlib import Path
from textwrap import dedent

import click
import pytest

from ckptx.architecture import model_files
from ckptx.architecture.correction_schema import decode_corrections
from ckptx.catalog.dtype import DTYPES_BY_NAME
from ckptx.catalog.format_traits import TRAITS_BY_FORMAT
from ckptx.cli.main import cli, commands
from ckptx.errors import CkptxError, InternalError
from ckptx.formats.unsupported import UNSUPPORTED_KINDS
from ckptx.report.robustness_phrases import CAUSES, CHECK_MEANINGS
from ckptx.robustness_suite.faults import FAULTS
from tests.support.import_tool import tool

ROOT = Path(__file__).resolve().parents[2]
GENERATED = "docs/situations.md"  # has hostile options, and links to nothing
# Options of other programs that the pages name.
FOREIGN = {
    "--junitxml": "pytest",
    "--nproc-per-node": "torchrun",
    "--safe_serialization": "zero_to_fp32.py",
    "--ckpt-format": "Megatron",
    "--dist-ckpt-strictness": "Megatron",
    "--dist-ckpt-optim-fully-reshardable": "Megatron",
    "--load": "Megatron",
    "--make-vocab-size-divisible-by": "Megatron",
    "--pipeline-model-parallel-size": "Megatron",
    "--tensor-model-parallel-size": "Megatron",
    "--untie-embeddings-and-output-weights": "Megatron",
    "--use-checkpoint-args": "Megatron",
    "--exclude": "diff",
    "--ckptx-recipe": "pytest",
    "--ckptx-set": "pytest",
    "--dist": "pytest-xdist",
    "--index-url": "pip",
}
MISSPELLED = {"covnert"}  # commands in docs/troubleshooting.md whose error is shown
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")


check_docs = tool("check_docs")
PAGES = (*check_docs.PAGES, "CHANGELOG.md")


def text_of(page: str) -> str:
    """A page."""
    return (ROOT / page).read_text(encoding="utf-8")


def prose_of(text: str) -> str:
    """A page without its fenced blocks."""
    kept, inside = [], ""
    for line in text.splitlines():
        fence = re.match(r" *(`{3,})", line)
        if fence and not inside:
            inside = fence[1]
        elif fence and line.strip() == inside:
            inside = ""
        elif not inside:
            kept.append(line)
    return "\n".join(kept)


# ------------------------------------------------------------------------------------------------------------- links


def anchors_of(text: str) -> set[str]:
    """What GitHub calls the headings of a page."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.+)$", prose_of(text), re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")
        found[name] = found.get(name, -1) + 1
        if found[name]:
            found[f"{name}-{found[name]}"] = 0
    return set(found)


def broken_links(page: str, text: str) -> list[str]:
    """Links of a page that lead nowhere in the repository."""
    broken = []
    for target in re.findall(r"\]\(\s*([^)\s]+)\s*\)", prose_of(text)):
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        if "://" in target:
            continue
        there = path.read_text(encoding="utf-8") if name and anchor and path.is_file() else text
        if not path.exists() or (anchor and anchor not in anchors_of(there)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES)
def test_links_and_anchors_lead_somewhere(page: str) -> None:
    assert broken_links(page, text_of(page)) == []


def test_an_injected_link_is_found() -> None:
    text = "# A `b` -- c?\n\n[a](#a-b----c) [b](#b) [c](docs/none.md) [d](docs/report.md#env) [e](docs/report.md#none)"
    assert broken_links("README.md", text) == ["#b", "docs/none.md", "docs/report.md#none"]


def test_every_page_is_linked_from_the_list() -> None:
    listed = text_of("docs/README.md")
    for path in (ROOT / "docs").glob("*.md"):
        assert path.name == "README.md" or f"]({path.name})" in listed, path.name


# ------------------------------------------------------------------------------------------ paths and names of the code

CODE = [path for folder in ("ckptx", "tests", "tools", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
# Names of other programs and libraries, and placeholders.
OTHER_NAMES = re.compile(
    r"NAME|hello|<model_type>|MODEL|CKPTX_|_pretrained|constraints|\.(txt|yml|toml|json|md|venv)|^-|^[<#]"
)

# Pages that name files of checkpoints, or options of other programs.
OTHER_PAGES = {GENERATED, "CHANGELOG.md", "docs/formats.md", "docs/options.md"} | {
    f"docs/from_{trainer}.md" for trainer in ("accelerate", "deepspeed", "megatron", "torchtitan", "verl")
}


def unknown_code(text: str) -> list[str]:
    """Return the inline code of a page that names a path or an identifier that the repository does not have."""
    paths = {f"/{path.relative_to(ROOT)}" for path in CODE} | {f"/{path.parent.relative_to(ROOT)}/" for path in CODE}
    words = {word for path in CODE for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    words |= {path.stem for path in CODE}
    found = []
    for code in re.findall(r"`([^`]+)`", prose_of(text)):
        names = re.findall(r"\b(?:[A-Z]\w*[a-z]\w*|\w*[a-z]_\w+)\b", code)
        is_path = re.fullmatch(r"[\w/]+(?:/|\.py)", code) is not None
        exists = not is_path or (ROOT / code).exists() or any(f"/{code}" in path for path in paths)
        if not OTHER_NAMES.search(code) and not (exists and words.issuperset(names)):
            found.append(code)
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if page not in OTHER_PAGES])
def test_paths_and_names_exist(page: str) -> None:
    assert unknown_code(text_of(page)) == []


def test_a_name_that_is_gone_is_found() -> None:
    gone = "no_such" + "_function", "ckptx/formats/" + "gone.py", "No" + "ClassOfThisName"
    assert unknown_code(f"`{gone[0]}` `{gone[1]}` `a() -> {gone[2]}` `formats/registry.py` `_locate_file`") == [
        gone[0],
        gone[1],
        f"a() -> {gone[2]}",
    ]


# ----------------------------------------------------------------------------------------------------------- options


def options_of(command: click.Command) -> set[str]:
    """Every spelling of the options of a command."""
    return {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)} | {"--help"}


COMMANDS = {words: options_of(command) for words, command in commands().items()}
OWN = set().union(*COMMANDS.values()) | options_of(cli)
SCRIPTS = {
    flag
    for folder in ("benchmarks", "tools", "tests/fuzz")
    for path in (ROOT / folder).glob("*.py")
    for flag in re.findall(r'add_argument\(\s*"(--[\w-]+)"', path.read_text(encoding="utf-8"))
}


def unknown_options(text: str) -> list[str]:
    """Options that neither ckptx has nor anything else that the pages speak of."""
    known = OWN | SCRIPTS | FOREIGN.keys()
    return [flag for flag in _FLAG.findall(text) if flag not in known]


def misplaced_options(block: str) -> list[str]:
    """Options of calls of ckptx in a block that the command at hand does not have."""
    found = []
    for line in block.splitlines():
        call = re.search(r"(?<![-\w/.])ckptx ((?:convert \w+)|\w+)\b([^#]*)", line)
        if call is not None and call[1] in COMMANDS:
            found += [f"{call[1]} {flag}" for flag in _FLAG.findall(call[2]) if flag not in COMMANDS[call[1]]]
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if page != GENERATED])
def test_options_exist(page: str) -> None:
    text = text_of(page)
    left_out = {"--turbo", "--name"} if page == "CONTRIBUTING.md" else set()  # of the made-up command
    assert set(unknown_options(text)) <= left_out
    for block in check_docs.blocks_of(page, text):
        assert misplaced_options(block.text) == [], str(block)


def test_an_injected_option_is_found() -> None:
    assert unknown_options("`--tp 2`, `--turbo`, a--b, `--no-backward`, `--rounds`") == ["--turbo"]
    assert misplaced_options("torchrun -m ckptx reshard A B --tp 2  # --none\nckptx diff A B --tp 2") == ["diff --tp"]
    assert misplaced_options("$ ckptx convert dcp2hf A B --files 2") == ["convert dcp2hf --files"]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in (GENERATED, "CONTRIBUTING.md", "CHANGELOG.md")])
def test_commands_exist(page: str) -> None:
    groups = {words.split()[0] for words in COMMANDS}
    for block in check_docs.blocks_of(page, text_of(page)):
        for word in re.findall(r"(?:^|\$ |-m )ckptx (?!-)(\w+)", block.text, re.MULTILINE):
            assert word in groups or word in MISSPELLED, f"{block}: {word}"


# ------------------------------------------------------------------------------------------------- blocks that are run


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_or_says_why_not(page: str) -> None:
    for block in check_docs.blocks_of(page, text_of(page)):
        assert block.language in (*check_docs.RUN, *check_docs.NOT_RUN), f"{block}: needs a language"


def test_blocks_are_found() -> None:
    text = "a\n```sh\nb\n```\n\n1. c\n\n   <!-- not run: d -->\n   ```python\n   e\n     f\n   ```\n\n```\ng\n```\n"
    assert list(check_docs.blocks_of("p", text)) == [
        ("p", 2, "sh", "b\n", ""),
        ("p", 9, "python", "e\n  f\n", "d"),
        ("p", 14, "", "g\n", ""),
    ]


def test_a_session_is_its_commands_and_what_they_print(tmp_path: Path) -> None:
    text = "$ echo 0.5 s, more\n0.1 s, more\n\n$ true\n"
    assert check_docs.commands_of(text) == [("echo 0.5 s, more", "0.1 s, more"), ("true", "")]
    assert check_docs.run(check_docs.Block("p", 1, "console", text), tmp_path) == ""


@pytest.mark.parametrize(
    ("language", "text", "said"),
    [
        ("console", "$ echo 3 tensors\n4 tensors\n", "the page has"),
        ("console", "$ false\n", "ended with 1"),
        ("sh", "false\ntrue\n", "ended with 1"),
        ("sh", "ckptx inspect none | cat\n", "ended with 3"),
        ("python", "assert False\n", "AssertionError"),
    ],
)
def test_an_injected_fault_is_found(tmp_path: Path, language: str, text: str, said: str) -> None:
    assert said in check_docs.run(check_docs.Block("p", 1, language, text), tmp_path)


@pytest.mark.slow
def test_every_block_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["check_docs.py"])
    assert check_docs.main() == 0, capsys.readouterr().out


# -------------------------------------------------------------------------------------------- tables that code can tell


def rows_of(text: str) -> set[tuple[str, ...]]:
    """The rows of every table of a page."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return {tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines}


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_figures_are_those_that_were_measured(page: str) -> None:
    measured = set().union(*(rows_of(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.md")))
    found = rows_of(text_of(page))
    assert len(found) > 5
    assert found <= measured


def test_formats_and_dtypes_are_those_of_the_code() -> None:
    text = text_of("docs/formats.md")
    rows = rows_of(text)
    assert {row[0].strip("`") for row in rows if row[0].startswith("`")} >= TRAITS_BY_FORMAT.keys()
    for kind in UNSUPPORTED_KINDS:
        assert (kind.description.rstrip(","), kind.next_step) in rows
    dtypes = {row[0]: set(row[1].split()) for row in rows if len(row) == 2}
    assert dtypes["may be cast"] == {each.name for each in DTYPES_BY_NAME.values() if each.is_castable}
    assert dtypes["copied only, in safetensors"] == {
        each.name for each in DTYPES_BY_NAME.values() if each.torch_name is None
    }
    assert dtypes["copied only, in torch formats"] == {
        each.name for each in DTYPES_BY_NAME.values() if not each.in_safetensors
    }
    kinds = ("may be cast", "copied only", "copied only, in safetensors", "copied only, in torch formats")
    assert set().union(*(dtypes[row] for row in kinds)) == DTYPES_BY_NAME.keys()


def test_what_is_known_is_counted() -> None:
    text = " ".join(text_of("docs/formats.md").split())
    classes = model_files.read_index()["classes"]
    counted = f"{len(classes):,} classes of {len(set(classes.values()))} model types"
    assert counted in text and counted in " ".join(text_of("README.md").split())
    assert f"transformers {model_files.read_index()['transformers'].rpartition('.')[0]}" in text
    shapes = sum(len(json.loads(path.read_bytes())["shapes"]) for path in model_files.MODELS_DIR.glob("*.json"))
    assert f"{shapes} of these classes" in text


def test_the_imports_of_the_examples_exist() -> None:
    count = 0
    for block in re.findall(r"```python\n(.*?)```", text_of("CONTRIBUTING.md"), re.DOTALL):
        for module, imported in re.findall(r"^from (ckptx\.[\w.]+) import (.+)$", dedent(block), re.MULTILINE):
            if not module.endswith(".hello"):
                missing = [name for name in imported.split(", ") if not hasattr(import_module(module), name)]
                assert not missing, f"{module} has no {missing}"
                count += 1
    assert count > 5


def test_the_corrections_of_the_recipe_can_be_read() -> None:
    (example,) = (b.text for b in check_docs.blocks_of("p", text_of("CONTRIBUTING.md")) if b.language == "json")
    assert decode_corrections(example, "llama.json").plan


def test_every_oracle_is_explained() -> None:
    cells = {row[0] for row in rows_of(text_of("docs/ci.md")) if len(row) == 3}
    assert {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)} == CAUSES.keys()
    assert CHECK_MEANINGS.keys() == CAUSES.keys()


def test_every_fault_has_its_check() -> None:
    cells = [row for row in rows_of(text_of("docs/robustness.md")) if len(row) == 3 and row[1].isdecimal()]
    listed = {
        fault: (int(phase), check.strip("`"))
        for faults, phase, check in cells
        for fault in re.findall(r"`(\w+)`", faults)
    }
    assert listed == {name: (fault.phase, fault.oracle) for name, fault in FAULTS.items()}


def test_exit_codes_are_those_of_the_errors() -> None:
    python = {row[0].strip("`"): row[1] for row in rows_of(text_of("docs/python.md")) if len(row) == 3}
    codes = {row[0] for row in rows_of(text_of("docs/troubleshooting.md"))}
    for each in (*CkptxError.__subclasses__(), InternalError):
        if each.exit_code > 1:
            assert python[each.__name__] == str(each.exit_code)
            assert str(each.exit_code) in codes
