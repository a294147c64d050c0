"""Files that GitHub, pre-commit, mkdocs and pip read: they agree with the rest of the repository."""

from __future__ import annotations

import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.support.import_tool import tool

ROOT = Path(__file__).resolve().parents[2]
docs_site = tool("docs_site")
check_dist = tool("check_dist")
GITHUB = "https://github.com/ckptx/ckptx"


def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_hooks_have_the_versions_of_make_check() -> None:
    pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text_of("constraints.txt"), re.MULTILINE))
    hooks = re.findall(r"\[ruff==(\S+)\]", text_of(".pre-commit-config.yaml"))
    assert hooks == [pins["ruff"]] * 2


def test_workflows_call_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE)) | {".venv/ready"}
    called = {
        target
        for path in (ROOT / ".github/workflows").glob("*.yml")
        for target in re.findall(r"run: make (\S+)", path.read_text(encoding="utf-8"))
    }
    assert {"check", "test", "test-oldest", "docs", "docs-site", "dist", "tables"} <= called <= targets


def test_workflows_pin_actions_by_commit() -> None:
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        for used in re.findall(r"uses: (.+)", path.read_text(encoding="utf-8")):
            assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", used), f"{path.name}: {used}"


def test_the_address_is_the_same_everywhere() -> None:
    for path in ("pyproject.toml", "mkdocs.yml"):
        assert GITHUB in text_of(path)


def test_every_page_is_in_the_navigation_once() -> None:
    nav = text_of("mkdocs.yml").partition("\nnav:\n")[2].partition("\n\n")[0]
    pages = re.findall(r": (\S+\.md)$", nav, re.MULTILINE)
    own = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert sorted(pages) == sorted(own | set(docs_site.EXTRA_PAGES.values()))


@pytest.mark.parametrize(
    ("target", "source", "link"),
    [
        ("docs/formats.md#ties", "README.md", "formats.md#ties"),
        ("../README.md", "docs/formats.md", "index.md"),
        ("../CONTRIBUTING.md#set-up", "docs/ci.md", "contributing.md#set-up"),
        ("docs/README.md", "README.md", "index.md"),
        ("report.schema.json", "docs/report.md", "report.schema.json"),
        ("../ckptx/errors.py", "docs/python.md", f"{GITHUB}/blob/main/ckptx/errors.py"),
        ("fixtures", "CONTRIBUTING.md", f"{GITHUB}/tree/main/fixtures"),
        ("#set-up", "CONTRIBUTING.md", "#set-up"),
        ("https://pytorch.org", "README.md", "https://pytorch.org"),
    ],
)
def test_links_lead_to_pages_or_to_github(target: str, source: str, link: str) -> None:
    assert docs_site.site_link(target, source, GITHUB) == link
    assert docs_site.with_site_links(f"[a]({target})", source, GITHUB) == f"[a]({link})"


def test_a_link_to_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"docs/ci\.md: the link none\.md leads to no file"):
        docs_site.site_link("none.md", "docs/ci.md", GITHUB)


def test_links_in_code_stay() -> None:
    text = "```text\n[a](../README.md)\n```"
    assert docs_site.with_site_links(text, "docs/ci.md", GITHUB) == text


@pytest.mark.parametrize(
    ("text", "wide"),
    [
        ("a\n* b\n  c\n* d", "a\n\n* b\n    c\n* d"),
        (
            "1. a\n\n   b\n\n   ```sh\n   c\n     d\n   ```\n\ne",
            "1. a\n\n    b\n\n    ```sh\n    c\n      d\n    ```\n\ne",
        ),
        ("1. a\n   * b\n   * c\n2. d", "1. a\n    * b\n    * c\n2. d"),
        ("```\n* a\n  b\n```", "```\n* a\n  b\n```"),
    ],
)
def test_lists_are_indented_for_the_site(text: str, wide: str) -> None:
    assert docs_site.with_wide_lists(text) == wide


def test_pipes_in_code_of_tables() -> None:
    assert docs_site.with_plain_pipes("| `a\\|b` | c\\|d |\n`e\\|f`") == "| `a|b` | c\\|d |\n`e\\|f`"


def test_a_file_that_the_wheel_lacks_is_found(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("ckptx/py.typed", "")
    assert check_dist.missing_files(tmp_path / "a.whl", {"ckptx/py.typed"}) == []
    assert check_dist.missing_files(tmp_path / "a.whl", {"ckptx/py.typed", "ckptx/a.json"}) == ["ckptx/a.json"]
    tracked = check_dist.package_files()
    assert {"ckptx/py.typed", "ckptx/report/layout.js"} <= tracked


def test_inputs_of_the_action_never_enter_a_script() -> None:
    for script in re.findall(r"^ +run: (.*(?:\n {8,}.*)*)", text_of("action.yml"), re.MULTILINE):
        assert "${{" not in script
        subprocess.run(["bash", "-n", "-c", script.removeprefix(">-").strip("'\n")], check=True)
