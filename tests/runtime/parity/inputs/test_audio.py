"""Every class that listens hears its sound: the logits change with it, and all of its ears learn from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from ckptx.architecture.corrections import corrections_of
from ckptx.runtime.model.layers import layer_groups
from ckptx.runtime.parallel.activation_checkpointing.wrap import MODES, checkpoint_activations
from ckptx.runtime.parity.execution import run_step
from ckptx.runtime.parity.inputs.batch import Inputs, make_inputs
from tests.support.audio_models import AUDIO_MODELS, ENCODER, GRANITE_ENCODER
from tests.support.corrections import layers_rows, model_types_with_inputs, patched_corrections
from tests.support.models import VOCAB, randomize

# What the installed transformers has of them.
CLASSES = frozenset(dir(transformers))  # asked once: it takes a quarter of a second
HERE = [name for name, listener in AUDIO_MODELS.items() if listener.classes[1] in CLASSES]
WITH_IMAGES = ("gemma4", "gemma4_unified", "muse_spark", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
# Windows as long as those of real checkpoints: what is put into a row is counted from them.
LONG: dict[str, dict[str, Any]] = {
    "gemma3n": {"audio_soft_tokens_per_image": 188},
    "granite_speech": {"encoder_config": {**GRANITE_ENCODER, "context_size": 200, "max_pos_emb": 512}},
    "musicflamingo": {"audio_config": {**ENCODER, "model_type": "audioflamingo3_encoder"}},
    "qwen2_audio": {"audio_config": ENCODER},
    "qwen3_asr": {"audio_config": {**ENCODER, "output_dim": 32, "downsample_hidden_size": 8}},
    "voxtral": {"audio_config": {**AUDIO_MODELS["voxtral"].settings["audio_config"], "max_source_positions": 1500}},
    "whisper": {"max_source_positions": 1500, "max_target_positions": 448},
}
HEARD_AS = ("input_features", "input_values", "audio_input_features")
NOT_EARS = re.compile(
    r"language_model|lm_head|vision(?!_speech)|visual|image_embed|^model\.(layers|norm|embed_tokens\.|time_emb)"
)


def build(name: str, **changes: Any) -> nn.Module:
    """The model, small and random, in float32."""
    config, cls = (getattr(transformers, each) for each in AUDIO_MODELS[name].classes)
    torch.manual_seed(0)
    model = cls(config(**AUDIO_MODELS[name].settings | changes, architectures=[cls.__name__]))
    return randomize(model).eval()


def inputs_of(model: Any, **settings: Any) -> Inputs:
    return make_inputs(model.config.to_dict(), **settings)


def other_sound(inputs: Inputs) -> Inputs:
    """The same, with noise to be heard."""
    changed = {key: value.flip(-1) * 2 if key in HEARD_AS else value for key, value in inputs.batch.items()}
    return inputs._replace(batch=changed)


def changes(model: nn.Module, inputs: Inputs, other: Inputs) -> bool:
    """Whether other inputs give other logits, by more than rounding."""
    first, second = (run_step(model, [each], backward=False).logits[0] for each in (inputs, other))
    return bool((first - second).abs().max() > 1e-3 * first.std())


def unheard(model: nn.Module, inputs: Inputs) -> set[str]:
    """The trained parameters of the ears, of all of a model that only listens, without a gradient."""
    gradients = run_step(model, [inputs], backward=True).gradients
    ears = re.compile("$^") if "input_ids" not in inputs.batch else NOT_EARS
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad and not ears.search(name)]
    assert names
    return {name for name in names if name not in gradients or not gradients[name].any()}


@pytest.fixture(autouse=True)
def _without_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma3n's eyes are of another package; its ears can do without."""
    from transformers.models.gemma3n import modeling_gemma3n as gemma3n

    class Auto:
        @staticmethod
        def from_config(config: Any, **settings: Any) -> nn.Module:
            if config.model_type == "gemma3n_vision":
                return nn.Identity()
            made: nn.Module = transformers.AutoModel.from_config(config, **settings)
            return made

    monkeypatch.setattr(gemma3n, "AutoModel", Auto)


@pytest.fixture
def _blind() -> Iterator[None]:
    """No images, so that it is the sound that is tested."""
    with ExitStack() as stack:
        for name in model_types_with_inputs("images") & AUDIO_MODELS.keys():
            ears = tuple(row for row in corrections_of(name).inputs if row.kind != "images")
            stack.enter_context(patched_corrections(name, inputs=ears))
        yield


@pytest.mark.usefixtures("_blind")
@pytest.mark.parametrize("name", HERE)
def test_a_sound_changes_the_logits_and_trains_all_of_the_ears(name: str) -> None:
    model = build(name)
    inputs = inputs_of(model)
    assert "audio" in inputs.kinds and "audio" not in inputs.missing
    assert changes(model, inputs, other_sound(inputs))
    assert {each.removeprefix("model.") for each in unheard(model, inputs)} == AUDIO_MODELS[name].unreached


@pytest.mark.usefixtures("_blind")
@pytest.mark.parametrize("name", LONG)
def test_windows_of_real_length_are_filled(name: str) -> None:
    model = build(name, **LONG[name])
    assert changes(model, inputs_of(model), other_sound(inputs_of(model)))


@pytest.mark.parametrize("name", [name for name in WITH_IMAGES if name in HERE])
def test_images_and_sounds_stand_in_one_row(name: str) -> None:
    model = build(name)
    inputs = inputs_of(model)
    assert inputs.kinds == ("text", "images", "audio") and not inputs.missing
    assert changes(model, inputs, other_sound(inputs))
    other_image = inputs.batch | {"pixel_values": inputs.batch["pixel_values"].flip(-1)}
    assert changes(model, inputs, inputs._replace(batch=other_image))


@pytest.mark.usefixtures("_blind")
@pytest.mark.parametrize("name", ["qwen2_audio", "gemma4", "whisper"])
def test_deaf_ears_are_noticed(name: str) -> None:
    model: Any = build(name)
    tower = model.model.encoder if name == "whisper" else model.model.audio_tower
    tower.register_forward_hook(lambda module, args, output: _silenced(output))
    inputs = inputs_of(model)
    assert not changes(model, inputs, other_sound(inputs))
    assert unheard(model, inputs) >= {
        name for name, each in model.named_parameters() if each.requires_grad and "conv1." in name
    }


def _silenced(output: Any) -> Any:
    output["last_hidden_state"] = output["last_hidden_state"].detach() * 0
    return output


def test_every_registered_class_that_listens_gets_a_sound() -> None:
    classes = {AUDIO_MODELS[name].classes[1] for name in AUDIO_MODELS}
    listening = {name for name, paths in layers_rows().items() if paths.audio}
    assert {each for each in listening if hasattr(transformers, each)} - classes == set()
    assert AUDIO_MODELS.keys() == model_types_with_inputs("audio", "encoder_audio")
    for name in HERE:
        config, cls = AUDIO_MODELS[name].classes
        assert name in (getattr(transformers, config).model_type, cls)


def test_a_config_without_ears_gets_no_sound() -> None:
    inputs = inputs_of(build("gemma4", audio_config=None))
    assert (inputs.kinds, inputs.missing) == (("text", "images"), ())
    assert not set(HEARD_AS) & inputs.batch.keys()


def test_a_decoder_by_itself_reads_tokens() -> None:
    config = transformers.WhisperConfig(**AUDIO_MODELS["whisper"].settings)
    model = transformers.WhisperForCausalLM(config).eval()
    inputs = inputs_of(model)
    assert (list(inputs.batch), inputs.kinds) == (["input_ids"], ("text",))
    assert run_step(model, [inputs], backward=False).logits[0].shape == (*inputs.labels.shape, VOCAB)


@pytest.mark.parametrize("name", ["qwen2_audio", "whisper"])
def test_a_seed_makes_the_sound(name: str) -> None:
    model: Any = build(name)
    first, again, other = (inputs_of(model, seed=seed).batch["input_features"] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "none"])
@pytest.mark.parametrize("name", ["whisper", "qwen2_audio", "gemma4"])
def test_ears_compute_the_same_bits_when_they_are_checkpointed(name: str, mode: str) -> None:
    plain = build(name)
    wanted = run_step(plain, [inputs_of(plain)], backward=True)
    model = build(name)
    layers = [layer for group in layer_groups(model).values() for layer in group]
    assert checkpoint_activations(model, mode) == len(layers) >= 2
    found = run_step(model, [inputs_of(model)], backward=True)
    assert found.loss == wanted.loss and torch.equal(found.logits[0], wanted.logits[0])
    assert found.gradients.keys() == wanted.gradients.keys()
    assert all(torch.equal(found.gradients[each], wanted.gradients[each]) for each in wanted.gradients)
