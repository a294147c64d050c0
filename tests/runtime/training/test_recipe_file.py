"""Recipes are found, changed and refused: every mistake ends in one line that names the key and what it may hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptx.errors import CkptxError, UnsupportedError, UsageError
from ckptx.options.recipes import list_shipped_recipes
from ckptx.runtime.training.recipe_file import find_recipe, read_recipe

TINY = "llama_tiny"


def written(directory: Path, text: str) -> Path:
    path = directory / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", list_shipped_recipes())
def test_every_shipped_recipe_is_right(name: str) -> None:
    recipe = read_recipe(name)
    assert recipe.name == name
    assert recipe.description
    assert not recipe.notes


def test_an_unknown_name_offers_the_nearest_and_all() -> None:
    with pytest.raises(UsageError, match=r'did you mean "llama_tiny"\? Known names: .*llama_tiny') as caught:
        find_recipe("lama_tiny")
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="no such file"):
        find_recipe("there/is/none.yaml")


def test_a_file_is_a_recipe_with_its_name(tmp_path: Path) -> None:
    recipe = read_recipe(written(tmp_path, "model: {config: {rms_norm_eps: 1e-6}}\noptimizer: {lr: 1e-5, eps: 1}\n"))
    assert (recipe.name, recipe.optimizer.lr, recipe.optimizer.eps) == ("mine", 1e-5, 1.0)
    assert type(recipe.optimizer.eps) is float
    assert recipe.model.config == {"rms_norm_eps": 1e-6}


def test_changes_are_made_in_order_and_reach_into_mappings() -> None:
    recipe = read_recipe(
        TINY,
        [
            "layout.tp=2", "layout.dp_shard=null", "model.config.num_hidden_layers=2", "model.config.rope.x=1e-3",
            "optimizer.lr=3", "optimizer.lr=4", "training.clip=", "model.freeze=[vision, embeddings]",
        ],
        world_size=4,
    )  # fmt: skip
    assert (recipe.layout.tp, recipe.layout.dp_shard, recipe.optimizer.lr, recipe.training.clip) == (2, 2, 4.0, None)
    assert recipe.model.config["num_hidden_layers"] == 2
    assert recipe.model.config["hidden_size"] == 64
    assert recipe.model.config["rope"] == {"x": 1e-3}
    assert recipe.model.freeze == ("vision", "embeddings")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("layout.tpp=2", 'layout.tpp: is unknown; did you mean "tp"?'),
        ("modle.dtype=float32", 'modle: is unknown; did you mean "model"?'),
        ("name=x", "name: is unknown"),
        ("notes=[x]", "notes: is unknown"),
        ("layout.tp=two", 'layout.tp: expected an integer, found the string "two"'),
        ("layout.tp=2.0", "expected an integer, found 2.0"),
        ("training.steps=true", "expected an integer, found true"),
        ("optimizer.lr='1e-5'", 'expected a number, found the string "1e-5"'),
        ("training.clip=big", 'expected a number or null, found the string "big"'),
        ("model.dtype=float16", 'expected float32, bfloat16, found the string "float16"; did you mean "bfloat16"?'),
        ("model.freeze=[eyes]", "model.freeze[0]: expected"),
        ("model.freeze=vision", "expected a list of"),
        ("model=3", "model: expected a mapping, found 3"),
        ("training.steps.a=3", "training.steps is 6, not a mapping"),
        ("trainer.can_save_without_step=true", "trainer.command is missing, expected a string; add it"),
        ("checks.layouts=[{tp: x}]", "checks.layouts[0].tp: expected an integer"),
        ("optimizer.lr=.nan", "found .nan, but numbers must be finite"),
        ("optimizer.lr=1e999", "but numbers must be finite"),
        ("optimizer.lr=-1", "optimizer.lr is -1.0 and must be 0 or more"),
        ("optimizer.betas=[0.9]", "optimizer.betas is a list of 1 number and must be a list of two"),
        ("optimizer.betas=[0.9, 1]", "optimizer.betas[1] is 1.0"),
        ("layout.tp=0", "layout.tp is 0 and must be 1 to"),
        ("layout.pp=-2", "layout.pp is -2"),
        ("training.clip=0", "must be a number above 0, or null"),
        ("training.global_batch=6", "must be a multiple of 4, which is training.local_batch (2) x data-parallel ranks"),
        ("training.microbatch=4", "must be a multiple of training.microbatch, which is 4"),
        ("training.save_at=[7]", "is step 7 and must be 1 to training.steps, which is 6"),
        ("training.save_at=[4, 2]", "must have distinct steps in ascending order"),
        ("training.total_steps=3", "training.total_steps is 3 and must be 6 or more"),
        ("training.seed=4294967296", "training.seed is 4294967296 and must be 0 to"),
        ("layout.pp=4", "requires at least 4 microbatches for 4 stages, not 2"),
        ("layout.schedule=1f2b", "unknown schedule; choose one of 1f1b"),
        ("layout.pp_split=2,x", 'layout.pp_split is "2,x" and must be even'),
        ("=3", "expected KEY=VALUE"),
        ("training", "expected KEY=VALUE"),
        ("training..steps=3", "expected KEY=VALUE"),
        ("model.config=[", "invalid YAML"),
    ],
)  # fmt: skip
def test_a_change_that_means_nothing_is_refused(option: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_recipe(TINY, [option])
    message = str(caught.value)
    assert message.startswith(f"--set {option}: ")
    assert said in message
    assert "\n" not in message


def test_a_mistake_of_the_file_names_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "training:\n  stepz: 3\n")
    with pytest.raises(UsageError) as caught:
        read_recipe(path, ["layout.tp=1"])
    assert str(caught.value) == f'{path}: training.stepz: is unknown; did you mean "steps"?'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("training: {steps: 1}\ntraining: {}\n", 'in line 2 key "training" appears twice'),
        ("model:\n  config: {a: 1, a: 2}\n", 'key "a" appears twice'),
        ("a: &x 1\nb: *x\n", "an alias, *x"),
        ("model: {config: {1: 2}}", "a key that is not a string, 1;"),
        ("model: {config: {[1]: 2}}", "a key that is not a string, but a mapping or a list;"),
        ("model: !!python/name:os.system x", "a tag"),
        ("model: {pretrained: !!str 5}", "a tag"),
        ("- 1", "expected a mapping with the blocks of a recipe, found a list"),
        ("", "expected a mapping with the blocks of a recipe, found null"),
        ("--- {}\n--- {}\n", "another document"),
        ("a: [", "invalid YAML"),
        ("a: \x00", "is not valid YAML"),
        ("a: " + "[" * 40 + "]" * 40, "nested deeper than 32 levels"),
        ("[" * 5000, "nested deeper than 32 levels"),
        ("training: {seed: 99999999999999999999}", "more than 63 bits"),
    ],
)
def test_what_a_recipe_has_no_use_for_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_recipe(written(tmp_path, text))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"model: \xff\xfe")
    with pytest.raises(UsageError, match=r"byte 7 is not valid UTF-8"):
        read_recipe(path)
    path.write_bytes(b" " * (1 << 20) + b"x")
    with pytest.raises(UsageError, match="more than 1,048,576 bytes"):
        read_recipe(path)


def test_scalars_are_those_of_the_core_schema(tmp_path: Path) -> None:
    text = "model: {config: {a: 1e-5, b: 010, c: 1:30, d: no, e: 2020-01-01, f: '1', g: ~, h: True, i: .5, j: 1.}}"
    found = read_recipe(written(tmp_path, text)).model.config
    assert dict(found) == {
        "a": 1e-5, "b": 10, "c": "1:30", "d": "no", "e": "2020-01-01", "f": "1", "g": None, "h": True, "i": 0.5,
        "j": 1.0,
    }  # fmt: skip


def test_scalars_that_only_other_schemas_know_are_strings(tmp_path: Path) -> None:
    text = "%YAML 1.1\n---\nmodel: {config: {a: 1_000, b: 0b1, c: 0x1f, d: 0o7, e: =, <<: yes, g: 1e-5}}"
    found = read_recipe(written(tmp_path, text)).model.config
    assert dict(found) == {"a": "1_000", "b": "0b1", "c": "0x1f", "d": "0o7", "e": "=", "<<": "yes", "g": 1e-5}


def test_data_ranks_are_those_that_are_left() -> None:
    free = ["layout.dp_shard=null", "checks.layouts=[{tp: 2}]", "training.global_batch=24"]
    assert read_recipe(TINY, free[:1]).layout.dp_shard == 1
    recipe = read_recipe(TINY, free, world_size=6)
    assert (recipe.layout.dp_shard, recipe.checks.layouts[0].dp_shard) == (6, 3)
    with pytest.raises(
        UsageError, match="tp x pp x dp_replicate is 4, which does not divide 6 ranks; start a multiple of 4"
    ):
        read_recipe(TINY, [*free, "layout.tp=4"], world_size=6)
    with pytest.raises(UsageError, match="is 2, but there are 3 ranks; start 2"):
        read_recipe(TINY, world_size=3)


def test_a_mesh_of_checks_may_need_more_ranks_than_there_are() -> None:
    more = ["checks.layouts=[{tp: 2, pp: 2}]"]
    for world_size in (None, 2):
        (layout,) = read_recipe(TINY, more, world_size).checks.layouts
        assert (layout.dp_shard, layout.dims.world_size) == (1, 4)
    uneven = ["layout.dp_shard=3", "training.global_batch=24", "checks.layouts=[{tp: 2}]"]
    with pytest.raises(
        UsageError, match=r"checks.layouts\[0\]: tp x pp x dp_replicate is 2, which does not divide 3 ranks"
    ):
        read_recipe(TINY, uneven)


def test_few_microbatches_are_refused_with_1f1b_and_noted_otherwise() -> None:
    few = ["layout.pp=2", "training.local_batch=1", "checks.layouts=[]"]
    with pytest.raises(UsageError, match="requires at least 2 microbatches for 2 stages, not 1"):
        read_recipe(TINY, few)
    (note,) = read_recipe(TINY, [*few, "layout.schedule=gpipe"]).notes
    assert "1 microbatch for 2 stages" in note


def test_a_schedule_that_is_wrong_with_fsdp_keeps_its_exit_code() -> None:
    with pytest.raises(UnsupportedError, match="wrong gradients") as caught:
        read_recipe(TINY, ["layout.pp=2", "layout.schedule=zbvzerobubble"])
    assert isinstance(caught.value, CkptxError)
    assert caught.value.exit_code == 4


def test_a_trainer_that_is_not_ours_needs_no_model(tmp_path: Path) -> None:
    recipe = read_recipe(
        written(tmp_path, "trainer: {command: run, environment: {A: '1'}}\ntraining: {global_batch: 7}\n")
    )
    assert recipe.trainer is not None
    assert recipe.trainer.environment == {"A": "1"}
    with pytest.raises(UsageError, match=r"trainer.environment.A: expected a string, found 1"):
        read_recipe(written(tmp_path, "trainer: {command: run, environment: {A: 1}}\n"))
