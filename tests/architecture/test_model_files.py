"""The generated files: opened one at a time, by nobody's word but the index's, and written without touching others."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ckptx.architecture import class_table, model_files, transformers_version
from ckptx.architecture.class_decoding import ClassRecord, decode_class
from ckptx.architecture.class_table import lookup
from ckptx.architecture.infer_class import infer_class
from ckptx.architecture.lookup import find_architecture
from tests.support.import_tool import ROOT, tool
from tests.support.tables import architecture_of
from tests.support.transformers_version import IS_TABLES_VERSION, requires_tables_version

writer = tool("model_file_writer")


@pytest.fixture(scope="module", autouse=True)
def no_note_on_the_version() -> None:
    """Here it is said."""


@pytest.fixture(scope="module")
def build_tables() -> ModuleType:
    return tool("build_tables")


@pytest.fixture(scope="module")
def build_shapes(build_tables: ModuleType) -> ModuleType:
    return tool("build_shapes")


def test_the_build_refuses_an_unknown_model_type_at_once(
    build_tables: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build_tables.find_unknown_names(["llama", "LlamaForCausalLM", "xyz"]) == ["xyz"]
    monkeypatch.setattr(build_tables.sys, "argv", ["build_tables.py", "llama", "xyz"])
    monkeypatch.setattr(build_tables.multiprocessing, "get_context", lambda _: pytest.fail("it measures classes"))
    with pytest.raises(SystemExit):
        build_tables.main()
    assert "a class of transformers" in (err := capsys.readouterr().err) and "xyz; a class with custom code" in err


# ------------------------------------------------------------------------------------- the reader


def test_lookup_needs_the_model_type_to_agree_when_given() -> None:
    assert lookup("LlamaForCausalLM", "llama") is not None
    assert lookup("LlamaForCausalLM", "other") is None
    assert lookup("NoSuchClass") is None
    assert lookup("LlamaForCausal") is None, "a prefix of a class name is another class"


def test_lookup_opens_one_file_of_one_model_type(monkeypatch: pytest.MonkeyPatch) -> None:
    for cached in (class_table.find_class_record, model_files.read_index, model_files._read_model_file):
        cached.cache_clear()
    read: list[str] = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or real(path))
    architecture_of("Qwen2_5OmniForConditionalGeneration")
    assert read == ["classes.json", "qwen2_5_omni.json"]


@pytest.mark.parametrize("said", ["../../secret", "llama/../llama", "/etc/passwd", "", "llama\0", "LLAMA"])
def test_what_a_checkpoint_calls_itself_is_no_part_of_a_path(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or real(path))
    assert class_table.find_class_record(said) is None and class_table.shape_rules(said) is None
    assert class_table.find_class_record("LlamaForCausalLM", said) is None
    find_architecture({"architectures": [said], "model_type": said})
    infer_class({"model_type": said}, {})
    ours = {path.name for path in read if path.name.endswith(".json")}
    assert ours <= {"classes.json", "llama.json", "no-model-type.json"}
    assert not any(
        path.is_relative_to(model_files.MODELS_DIR) and path.parent != model_files.MODELS_DIR for path in read
    )


def test_every_file_is_small_whole_and_of_one_model_type() -> None:
    files = {path.name: path for path in model_files.MODELS_DIR.iterdir()}
    types = set(model_files.read_index()["classes"].values())
    assert files.keys() == {model_files.model_file(each).name for each in types}
    for model_type in types:
        text = model_files.model_file(model_type).read_text(encoding="utf-8")
        assert len(text) < 250_000
        sections = json.loads(text)
        assert set(sections["classes"]) == set(model_files.classes_of(model_type))
        assert {values["body"] for values in sections["classes"].values() if "body" in values} == set(
            sections["bodies"]
        )
        assert {values["body"] for values in sections["shapes"].values()} == set(sections["shape_bodies"])
        assert writer.encode_model(sections["source"], sections) == text


def test_every_file_is_what_its_classes_say() -> None:
    """What is read and written again is the same document, to the byte."""
    for model_type in set(model_files.read_index()["classes"].values()):
        names = model_files.classes_of(model_type)
        rows = {name: class_table.find_class_record(name) for name in names}
        rules = {
            name: (row.architecture.base_prefix, found)
            for name, row in rows.items()
            if row is not None and row.architecture is not None and (found := class_table.shape_rules(name)) is not None
        }
        sections = {**writer.encode_rows(rows.values()), **writer.encode_shapes(rules)}
        text = model_files.model_file(model_type).read_text(encoding="utf-8")
        assert writer.encode_model(model_files.source_of(names[0]), sections) == text, model_type


def test_lookup_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from ckptx.architecture.lookup import find_architecture\n"
        "from ckptx.architecture.tied import resolve_ties, StoredTensor\n"
        "found = find_architecture({'architectures': ['LlamaForCausalLM'], 'model_type': 'llama'})\n"
        "names = dict.fromkeys(['lm_head.weight', 'model.embed_tokens.weight'], StoredTensor((2, 2), 'f32'))\n"
        "resolve_ties(found, {}, names, lambda a, b: True)\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_rows_survive_being_written() -> None:
    row = class_table.find_class_record("LlavaForConditionalGeneration")
    assert row is not None
    empty = ClassRecord("Nameless", row.model_type, "a reason", None)
    sections = json.loads(json.dumps(writer.encode_rows([empty, row])))
    assert sections["classes"]["Nameless"] == {"introspect": "a reason"}
    assert row.structures and len(sections["structures"]) > 1
    assert decode_class(row.class_name, row.model_type, sections, model_files.read_index()["transformers"]) == row
    assert decode_class("Nameless", row.model_type, sections, "0") == empty


# ------------------------------------------------------------------------------ making the files


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The generated files, in another place, to be written over."""
    shutil.copytree(model_files.MODELS_DIR, tmp_path / "models")
    shutil.copy(model_files.INDEX_FILE, tmp_path)
    monkeypatch.setattr(model_files, "MODELS_DIR", tmp_path / "models")
    monkeypatch.setattr(model_files, "INDEX_FILE", tmp_path / "classes.json")
    caches = (
        class_table.find_class_record,
        class_table.shape_rules,
        model_files.read_index,
        model_files._read_model_file,
    )
    for each in caches:
        each.cache_clear()
    yield tmp_path
    for each in caches:
        each.cache_clear()


def contents(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.rglob("*.json")}


@requires_tables_version
def test_a_change_to_one_model_changes_its_file_alone(copied: Path, build_tables: ModuleType) -> None:
    transformers = Path(str(importlib.util.find_spec("transformers").origin)).parent / "models"  # type: ignore[union-attr]
    before = contents(copied)

    def measured(model_type: str) -> list[Any]:
        names = model_files.classes_of(model_type)
        source = model_files.source_of(names[0])
        assert source is not None
        (directory,) = source["directories"]
        return [build_tables.MeasuredClass(class_table.find_class_record(name), directory, 0.0) for name in names]

    rows = [*measured("llama"), *measured("mistral")]
    assert build_tables.write_models(rows, transformers) == 0 and contents(copied) == before
    known_llama = rows[0].row
    changed = dataclasses.replace(
        known_llama, architecture=dataclasses.replace(known_llama.architecture, keep_in_fp32=("norm",))
    )
    rows[0] = rows[0]._replace(row=changed)
    assert build_tables.write_models(rows, transformers) == 1
    after = contents(copied)
    assert {name for name in after if after[name] != before.get(name)} == {"llama.json"}
    assert json.loads(after["llama.json"])["shapes"] == json.loads(before["llama.json"])["shapes"]


def test_the_list_of_classes_with_shapes_is_sorted_and_says_whose_shapes_are_known(build_shapes: ModuleType) -> None:
    listed = build_shapes.classes_to_measure()
    assert listed == [name for name in model_files.class_names() if class_table.shape_rules(name) is not None]


@requires_tables_version
def test_a_removed_file_is_built_again_to_the_byte(
    copied: Path, build_tables: ModuleType, build_shapes: ModuleType
) -> None:
    before, names = contents(copied), model_files.classes_of("olmo2")
    transformers = Path(str(importlib.util.find_spec("transformers").origin)).parent / "models"  # type: ignore[union-attr]
    model_files.model_file("olmo2").unlink()
    assert build_tables.write_models([build_tables.measure_class(name) for name in names], transformers) == 1
    rows = [build_shapes.measure_class(name) for name in build_shapes.classes_to_measure() if name in names]
    assert [name for name, *_ in rows] == ["Olmo2ForCausalLM"]
    assert build_shapes.write_shapes({name: (prefix, rules) for name, prefix, rules, _ in rows}, {"olmo2"}) == 1
    assert contents(copied) == before


def test_shapes_of_classes_that_are_not_measured_go(copied: Path, build_shapes: ModuleType) -> None:
    before = contents(copied)
    rules = {
        name: ("model", found) for name in ("LlamaForCausalLM",) if (found := class_table.shape_rules(name)) is not None
    }
    assert len(json.loads(before["llama.json"])["shapes"]) > 1
    assert build_shapes.write_shapes(rules, {"llama", "olmo"}) == 2
    after = contents(copied)
    assert {name for name in after if after[name] != before[name]} == {"llama.json", "olmo.json"}
    assert set(json.loads(after["llama.json"])["shapes"]) == {"LlamaForCausalLM"}
    assert json.loads(after["llama.json"])["classes"] == json.loads(before["llama.json"])["classes"]
    assert json.loads(after["olmo.json"])["shapes"] == {}


def test_the_installed_transformers_is_noticed_where_it_is_another() -> None:
    transformers_version.version_note.cache_clear()
    assert (transformers_version.architecture_note(architecture_of("LlamaForCausalLM")) is None) is IS_TABLES_VERSION


@requires_tables_version
def test_another_transformers_is_noticed_where_its_code_differs(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "transformers"
    real = Path(str(importlib.util.find_spec("transformers").origin)).parent  # type: ignore[union-attr]
    for name in ("llama", "mistral"):
        shutil.copytree(real / "models" / name, package / "models" / name)
    (package / "__init__.py").write_text("raise SystemExit('nothing is imported to look')")
    (package.parent / "transformers-9.9.9.dist-info").mkdir()
    spec = importlib.util.spec_from_file_location("transformers", package / "__init__.py")
    monkeypatch.setattr(transformers_version, "find_spec", lambda name: spec)
    transformers_version.version_note.cache_clear()
    with (package / "models" / "mistral" / "modeling_mistral.py").open("a") as file:
        file.write("# one line more\n")
    assert transformers_version.architecture_note(architecture_of("LlamaForCausalLM")) is None
    note = transformers_version.architecture_note(architecture_of("MistralForCausalLM"))
    assert note is not None and note.startswith("MistralForCausalLM: ") and "5.23.0" in note
    assert transformers_version.architecture_note(None) is None
    asked = model_files.read_index()["transformers"]
    (package.parent / f"transformers-{asked}.dist-info").mkdir()
    transformers_version.version_note.cache_clear()
    assert transformers_version.architecture_note(architecture_of("MistralForCausalLM")) is None
    (package.parent / f"transformers-{asked}.dist-info").rmdir()

    def hidden(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    for finder in (lambda name: None, hidden):
        monkeypatch.setattr(transformers_version, "find_spec", finder)
        transformers_version.version_note.cache_clear()
        assert transformers_version.architecture_note(architecture_of("MistralForCausalLM")) is None
    transformers_version.version_note.cache_clear()
