"""Sources: what is written is read by stock transformers and by the runtime, and is the same for the same recipe."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from ckptx.errors import InputError, UnsupportedError, UsageError
from ckptx.formats.hf.reader import read_json
from ckptx.options.recipes import list_shipped_recipes
from ckptx.runtime.checkpointing.load import load
from ckptx.runtime.model.build import build_model, materialize, read_config
from ckptx.runtime.parity.inputs.batch import make_inputs
from ckptx.runtime.training.recipe import Recipe
from ckptx.runtime.training.recipe_file import read_recipe
from ckptx.runtime.training.shrinking import reduce_layers
from ckptx.runtime.training.source import make_random_model, merge_config, prepare_source, write_shrunk_config

LARGE = ("gemma4_31b", "gemma4_31b_tp4_pp2", "gemma4_31b_tp4_pp4", "phi_4_squad")
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
NEEDS_NO_NETWORK = [name for name in list_shipped_recipes() if read_recipe(name).trainer is None]


def offline(name: str, *sets: str) -> Recipe:
    """A recipe as it is run without a network."""
    shrunk = [*(["model.shrunk=true"] if name in LARGE else []), "model.dtype=float32"]
    return read_recipe(name, [*shrunk, *sets])


def digests(root: Path) -> dict[str, str]:
    return {each.name: blake2b(each.read_bytes()).hexdigest() for each in sorted(root.iterdir())}


@pytest.mark.parametrize("name", NEEDS_NO_NETWORK)
def test_stock_transformers_and_the_runtime_read_it_alike(name: str, tmp_path: Path) -> None:
    recipe = offline(name)
    root = prepare_source(recipe, tmp_path / "source")
    class_name, cls, config = read_config(root)
    stock, info = cls.from_pretrained(root, output_loading_info=True)
    assert not any(info.values())
    for key, tensor in stock.state_dict().items():
        assert tensor.isfinite().all(), key
        assert not tensor.is_floating_point() or tensor.numel() == 1 or tensor.float().std() > 0, key
    batch = make_inputs({**config.to_dict(), "architectures": [class_name]}).batch
    attention = recipe.model.attn_implementation or "sdpa"  # which the runtime does not take from the config
    ours = build_model(root, dtype=torch.float32, attn_implementation=attention)
    materialize(ours)
    load(ours, root)
    with torch.no_grad():
        logits = stock(**batch).logits
        assert torch.equal(logits, ours(**batch).logits)
    assert 0.3 < logits.std(-1).mean() < 3
    if recipe.model.attn_implementation is not None:
        assert stock.config._attn_implementation == recipe.model.attn_implementation


def test_the_same_recipe_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    first, again = (prepare_source(offline("llama_tiny"), tmp_path / each) for each in "ab")
    assert digests(first) == digests(again)
    other = prepare_source(offline("llama_tiny", "training.seed=1"), tmp_path / "c")
    assert digests(other)["model.safetensors"] != digests(first)["model.safetensors"]
    assert digests(other)["tokenizer.json"] == digests(first)["tokenizer.json"]


def test_random_numbers_of_the_process_are_left_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    prepare_source(offline("llama_tiny"), tmp_path)
    assert torch.equal(before, torch.get_rng_state())


class Drawn(TorchDispatchMode):  # type: ignore[misc]  # torch says Any
    """Counts the random numbers of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.normal_, torch.ops.aten.uniform_) and made.dim() > 1:
            self.count += made.numel()
        return made


@pytest.mark.parametrize(
    "build",
    [
        lambda: (transformers.LlamaForCausalLM, transformers.LlamaConfig(**SMALL)),  # type: ignore[arg-type]  # ints
        lambda: (transformers.MixtralForCausalLM, transformers.MixtralConfig(**SMALL, num_local_experts=4)),  # type: ignore[arg-type]  # ints
        lambda: (transformers.ViTModel, transformers.ViTConfig(**SMALL)),  # draws truncated normals
    ],
    ids=["llama", "experts", "truncated"],
)
def test_each_number_of_a_matrix_is_drawn_once(build: Callable[[], tuple[Any, Any]]) -> None:
    cls, config = build()
    with Drawn() as drawn:
        model = make_random_model(cls, config, torch.float32, seed=1)
    assert drawn.count == sum(each.numel() for each in model.parameters() if each.dim() > 1)
    assert all(each.isfinite().all() and each.std() > 0 for each in model.parameters())


def test_dropout_is_set_in_every_part(tmp_path: Path) -> None:
    root = prepare_source(offline("gemma4_vlm_tiny", "training.dropout=0.25"), tmp_path)
    config = json.loads((root / "config.json").read_text())
    assert config["text_config"]["attention_dropout"] == config["vision_config"]["attention_dropout"] == 0.25


def test_of_a_large_model_few_layers_of_each_kind_stay(tmp_path: Path) -> None:
    config = read_config(prepare_source(offline("gemma4_31b"), tmp_path / "a"))[2]
    assert config.text_config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert config.vision_config.num_hidden_layers == 2
    assert config.text_config.vocab_size < 400
    more = offline("gemma4_31b", "model.config.text_config.num_hidden_layers=12")
    assert read_config(prepare_source(more, tmp_path / "b"))[2].text_config.num_hidden_layers == 12


@pytest.mark.parametrize("name", ["phi_4_squad", "gemma4_31b"])
def test_a_forecast_gets_the_config_of_the_shrunk_model_that_is_trained(name: str, tmp_path: Path) -> None:
    recipe = offline(name, "model.attn_implementation=eager", "training.dropout=0.1")
    trained = read_json(prepare_source(recipe, tmp_path / "trained") / "config.json")
    assert read_json(write_shrunk_config(recipe, tmp_path / "forecast") / "config.json") == trained
    assert [each.name for each in (tmp_path / "forecast").iterdir()] == ["config.json"]


def test_layers_that_a_list_points_at_stay() -> None:
    config = transformers.LlamaConfig(num_hidden_layers=12)
    assert reduce_layers({"num_hidden_layers": 12, "no_rope_layers": [1] * 12}, config, {}) == {
        "num_hidden_layers": 4,
        "no_rope_layers": [1] * 4,
    }
    pointing = {"num_hidden_layers": 12, "some_layers": [3, 9]}
    assert reduce_layers(pointing, config, {}) == pointing
    assert reduce_layers({}, config, {"num_hidden_layers": 12}) == {}


def test_a_checkpoint_that_nothing_changes_stays_where_it_is(tmp_path: Path) -> None:
    there = prepare_source(offline("llama_tiny"), tmp_path / "there")
    plain = ["model.config=", "training.dropout=", f"model.pretrained={there}"]
    assert prepare_source(read_recipe("llama_tiny", [*plain[1:], "model.config={}"]), tmp_path / "no") == there
    assert not (tmp_path / "no").exists()


def test_a_changed_config_stands_beside_the_same_weights(tmp_path: Path) -> None:
    there = prepare_source(offline("llama_tiny", "training.dropout=0.0"), tmp_path / "there")
    sets = ["model.config={rms_norm_eps: 1e-3}", f"model.pretrained={there}", "model.attn_implementation=eager"]
    here = prepare_source(read_recipe("llama_tiny", [*sets, "training.dropout=0.5"]), tmp_path / "here")
    found, before = (json.loads((each / "config.json").read_text()) for each in (here, there))
    changes = {"rms_norm_eps": 1e-3, "attention_dropout": 0.5, "attn_implementation": "eager"}
    assert found == before | changes
    names = {each.name for each in there.iterdir()}
    assert {each.name for each in here.iterdir()} == names
    assert (here / "model.safetensors").resolve() == there / "model.safetensors"
    assert transformers.AutoModelForCausalLM.from_pretrained(here).config._attn_implementation == "eager"
    with pytest.raises(UsageError, match=r"is the checkpoint of model.pretrained"):
        prepare_source(read_recipe("llama_tiny", sets), there)
    for keys, said in [
        ("{rms_norm_ep: 1e-3}", 'did you mean "rms_norm_eps"'),
        ("{model_type: mistral}", 'is "mistral", but that of LlamaForCausalLM is "llama"'),
        ("{hidden_act: [1]}", "from model.config of the recipe: "),
    ]:
        wrong = read_recipe("llama_tiny", [f"model.config={keys}", f"model.pretrained={there}"])
        with pytest.raises((UsageError, UnsupportedError)) as caught:
            prepare_source(wrong, tmp_path / "wrong")
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("sets", "error", "said"),
    [
        (["model.config={}"], UsageError, "has neither pretrained nor config"),
        (["model.config={model_type: llama}"], InputError, '"architectures" names no class'),
        (["model.config.num_hidden_layer=2"], UsageError, 'did you mean "num_hidden_layers"?'),
        (["model.config.vocab_size=200"], UsageError, "vocab_size is 200"),
        (["model.config.hidden_act=nope"], UnsupportedError, "cannot build it from model.config of the recipe: "),
        (["model.config.hidden_size=0"], UnsupportedError, "cannot build it from model.config of the recipe: "),
        (["model.config.model_type=[1]"], InputError, "of the recipe: model_type is [1] and must be a string"),
        (["model.config.model_type=nope"], UsageError, 'is "nope", but that of LlamaForCausalLM is "llama"'),
        (["model.pretrained=no/such", "model.shrunk=true", "model.config={}"], InputError, "or set model.shrunk_from"),
        (["model.pretrained=no/such"], InputError, "no/such"),
    ],
)
def test_what_cannot_be_made_is_refused(
    sets: list[str], error: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(error) as caught:
        prepare_source(read_recipe("llama_tiny", sets), tmp_path / "source")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mappings_are_merged_and_lists_replaced() -> None:
    before: dict[str, Any] = {"a": {"b": 1, "c": [1, 2]}, "d": 1}
    assert merge_config(before, {"a": {"c": [3]}, "d": {"e": 1}}) == {"a": {"b": 1, "c": [3]}, "d": {"e": 1}}
    assert before == {"a": {"b": 1, "c": [1, 2]}, "d": 1}


def test_every_text_is_a_text_of_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(prepare_source(offline("gemma4_vlm_tiny"), tmp_path))
    ids = tokenizer("naïve 文 \t\n<image>").input_ids
    assert tokenizer.decode(ids) == "naïve 文 \t\n<image>"
    assert max(ids) < 304
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 2)
    assert tokenizer.convert_tokens_to_ids("<image>") == 4
