"""One sound for each row: frames, masks and counts of tokens of each form, computed by hand from small configs.

That the classes take them and are trained by them is in `test_audio.py`; this is about the numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from ckptx.runtime.parity.inputs.multimodal import TEXT_LENGTH, MultimodalInput
from tests.support.model_inputs import form_of, maker, model_types

ROWS = 3
TOKEN = 90
WHISPER = {"num_mel_bins": 5, "max_source_positions": 20}  # a window of 40 mels


class Sound(NamedTuple):
    """A config, and what is to be heard.

    Attributes:
        kind: Its model type.
        audio: The part of the config that describes the ears.
        config: The rest.
        tokens: In the row.
        shapes: Of each tensor, without the rows.
        valid: How many numbers of a row of the mask are set; None without a mask.
    """

    kind: str
    audio: dict[str, Any]
    config: dict[str, Any]
    tokens: list[int]
    shapes: dict[str, tuple[int, ...]]
    valid: int | None = None


def mels(*shape: int, mask: str = "input_features_mask", frames: int | None = None) -> dict[str, tuple[int, ...]]:
    return {"input_features": shape, mask: (shape[1] if frames is None else frames,)}


FOUR = [TOKEN] * 4
ENDS = {"boa_token_id": 70, "eoa_token_index": 71, "eoa_token_id": 72}
SOUND: dict[str, Sound] = {
    "the begin of a window": Sound("audioflamingo3", WHISPER, {}, FOUR, mels(5, 40), 16),
    "a window that is shorter": Sound(
        "audioflamingo3", {**WHISPER, "max_source_positions": 4}, {}, FOUR[:2], mels(5, 8), 8,
    ),
    "between begin and end": Sound(
        "musicflamingo", WHISPER, {"audio_bos_token_id": 70, "audio_eos_token_id": 71}, [70, *FOUR, 71],
        mels(5, 40), 16,
    ),
    "a begin alone": Sound("musicflamingo", WHISPER, {"audio_bos_token_id": 70}, [70, *FOUR], mels(5, 40), 16),
    "under another name": Sound("qwen2_audio", WHISPER, {}, FOUR, mels(5, 40, mask="feature_attention_mask"), 16),
    "voxtral": Sound(
        "voxtral", {**WHISPER, "hidden_size": 8, "intermediate_size": 32}, {}, [TOKEN] * 5, {"input_features": (5, 40)},
    ),
    "added to text": Sound(
        "voxtral_realtime", WHISPER, {"downsample_factor": 3}, [], {"input_features": (5, 6 * TEXT_LENGTH)},
    ),
    "glm": Sound("glmasr", WHISPER, {}, FOUR, mels(5, 32), 32),
    "granite": Sound(
        "granite_speech", {}, {"window_size": 15, "downsample_rate": 5, "encoder_config": {"input_dim": 6}},
        [TOKEN] * 3, mels(15, 6, frames=3), 3,
    ),
    "three convolutions": Sound("qwen3_asr", {**WHISPER, "n_window": 50}, {}, FOUR, mels(5, 100), 32),
    "three convolutions, rounded up": Sound("qwen3_asr", {**WHISPER, "n_window": 10}, {}, FOUR[:3], mels(5, 20), 20),
    "two convolutions": Sound(
        "qwen2_5_omni_thinker", {**WHISPER, "n_window": 100},
        {"audio_start_token_id": 70, "audio_end_token_id": 71}, [70, *FOUR, 71],
        mels(5, 16, mask="feature_attention_mask"), 16,
    ),
    "a chunk that is shorter": Sound(
        "qwen3_omni_moe_thinker", {**WHISPER, "n_window": 9}, {}, FOUR[:3],
        mels(5, 18, mask="feature_attention_mask"), 18,
    ),
    "gemma4": Sound(
        "gemma4", {"subsampling_conv_channels": [10, 4]}, ENDS, [70, *FOUR, 71], mels(16, 8, frames=16), 16,
    ),
    "gemma4 without a tower": Sound(
        "gemma4_unified", {"audio_embed_dim": 6}, ENDS, [70, *FOUR, 71], mels(4, 6, frames=4), 4,
    ),
    "gemma3n": Sound(
        "gemma3n", {"sscp_conv_stride_size": [[2, 5], [3, 7]], "conf_reduction_factor": 4, "input_feat_size": 6},
        {**ENDS, "audio_soft_tokens_per_image": 6}, [70, *[TOKEN] * 6, 72], mels(96, 6, frames=96), 96,
    ),
    "gemma3n, few tokens": Sound(
        "gemma3n", {"sscp_conv_stride_size": [[2, 5], [3, 7]], "conf_reduction_factor": 4, "input_feat_size": 6},
        {**ENDS, "audio_soft_tokens_per_image": 2}, [70, TOKEN, TOKEN, 72], mels(48, 6, frames=48), 48,
    ),
    "phi4, rounded up": Sound(
        "phi4_multimodal", {"time_reduction": 8, "downsample_rate": 3, "input_size": 6, "audio_token_id": 91}, {},
        [91, 91], {"audio_input_features": (32, 6), "audio_embed_sizes": (), "audio_attention_mask": (32,)}, 32,
    ),
    "muse": Sound(
        "muse_spark", {"patch_sizes": [2, 3, 5]}, {}, FOUR, {"input_values": (120,), "input_values_mask": (120,)}, 120,
    ),
}  # fmt: skip


def made(sound: Sound, seed: int = 0) -> MultimodalInput:
    config = {"audio_token_id": TOKEN, "audio_config": sound.audio, **sound.config}
    found = maker("audio", sound.kind)(config, ROWS, torch.Generator().manual_seed(seed))
    assert found is not None
    return found


@pytest.mark.parametrize("name", SOUND)
def test_sounds(name: str) -> None:
    sound = SOUND[name]
    found, again, other = made(sound), made(sound), made(sound, seed=1)
    assert found.tokens == sound.tokens
    assert found.placeholder == next((each for each in sound.tokens if each in (TOKEN, 91)), -1)
    assert {key: tuple(each.shape) for key, each in found.tensors.items()} == {
        key: (ROWS, *shape) for key, shape in sound.shapes.items()
    }
    heard, *rest = found.tensors
    for key in found.tensors:
        assert torch.equal(found.tensors[key], again.tensors[key])
        assert torch.equal(found.tensors[key], other.tensors[key]) is (key in rest)
    assert not torch.equal(found.tensors[heard][0], found.tensors[heard][1])
    assert found.tensors[heard].dtype == torch.float32
    masks = [each for key, each in found.tensors.items() if "mask" in key]
    assert len(masks) == (sound.valid is not None)
    for mask in masks:  # what counts is at the begin
        assert mask.long().tolist() == [[1] * (sound.valid or 0) + [0] * (mask.shape[1] - (sound.valid or 0))] * ROWS
        assert not mask.is_floating_point()


def test_every_form_is_among_them() -> None:
    forms = {kind: form_of("audio", kind) for kind in model_types("audio")}
    assert {forms[sound.kind] for sound in SOUND.values()} == set(forms.values())


def test_the_placeholder_may_be_called_an_index() -> None:
    config = {"audio_token_index": 0, "audio_config": WHISPER}
    found = maker("audio", "qwen2_audio")(config, ROWS, torch.Generator())
    assert found is not None and (found.tokens, found.placeholder) == ([0] * 4, 0)


def test_phi4_says_how_many_tokens_a_sound_is() -> None:
    found = made(SOUND["phi4, rounded up"])
    assert found.tensors["audio_embed_sizes"].tolist() == [2] * ROWS


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_a_config_without_ears_gets_no_sound(kind: str) -> None:
    assert maker("audio", kind)({"audio_token_id": TOKEN, "audio_config": None}, ROWS, torch.Generator()) is None


SPEECHT5 = {"conv_kernel": [10, 3], "conv_stride": [5, 2]}


@pytest.mark.parametrize(
    ("kind", "config", "name", "shape"),
    [
        ("whisper", WHISPER, "input_features", (5, 40)),
        ("speecht5", SPEECHT5, "input_values", (10 + (3 + 3 * 2 - 1) * 5,)),
        ("moonshine", {}, "input_values", (127 + (7 + (3 + 3 * 2 - 1) * 3 - 1) * 64,)),
        (
            "seamless_m4t", {"adaptor_stride": 8, "feature_projection_input_dim": 6},
            "input_features", (32, 6),
        ),
        ("moonshine_streaming", {"encoder_config": {"sample_rate": 16000, "frame_ms": 5.0}}, "input_values", (1280,)),
        (
            "speech_to_text", {"num_conv_layers": 3, "input_feat_per_channel": 5, "input_channels": 2},
            "input_features", (32, 10),
        ),
    ],
)  # fmt: skip
def test_what_is_heard_while_a_decoder_writes(
    kind: str, config: dict[str, Any], name: str, shape: tuple[int, ...]
) -> None:
    first, again = (maker("encoder_audio", kind)(config, ROWS, torch.Generator().manual_seed(0)) for _ in range(2))
    assert {key: tuple(each.shape) for key, each in first.items()} == {name: (ROWS, *shape)}
    assert torch.equal(first[name], again[name])


@pytest.mark.parametrize("kind", ["speecht5", "moonshine"])
def test_convolutions_leave_four_frames_of_a_waveform(kind: str) -> None:
    kernels = [(127, 64), (7, 3), (3, 2)] if kind == "moonshine" else [(10, 5), (3, 2)]
    sound = maker("encoder_audio", kind)(SPEECHT5, ROWS, torch.Generator())["input_values"][:, None]
    for kernel, stride in kernels:
        sound = torch.nn.functional.conv1d(sound, torch.ones(1, 1, kernel), stride=stride)
    assert sound.shape == (ROWS, 1, 4)
