"""One audio input per sequence, in the smallest form that the config of a class allows: a function for each form.

The section `inputs` in `architecture/corrections/<model_type>.json` names the form and the settings of a class. Shapes,
masks and the number of tokens are those that the processors and towers of transformers 5.17 to 5.23 agree on. If a
tower requires a window of fixed length (Whisper's 30 seconds), the valid frames are at its beginning, and the mask
marks them; towers without a mask process the whole window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import ceil, prod
from typing import Any

import torch

from ckptx.runtime.parity.inputs.multimodal import TEXT_LENGTH, Batch, MultimodalInput, make_random_tensor

Config = Mapping[str, Any]
# Both take a config, a batch size, a generator, and `InputCorrection.settings`.
AudioForm = Callable[..., MultimodalInput | None]
EncoderForm = Callable[..., Batch]

_TOKENS = 4  # length of an audio input in tokens, unless the class fixes it


def _make_insert(config: Config, count: int, tensors: Batch, begin: str = "", end: str = "") -> MultimodalInput:
    """Return `count` placeholders, between the tokens of the config keys `begin` and `end`; no token for "" or None."""
    token = int(config["audio_token_id"] if "audio_token_id" in config else config["audio_token_index"])
    first, last = ([int(config[key])] if config.get(key) is not None else [] for key in (begin, end))
    return MultimodalInput([*first, *[token] * count, *last], token, tensors)


def _make_mask(batch_size: int, total: int, valid: int) -> torch.Tensor:
    """Return a mask (batch_size, total) of 0 and 1 whose first frames are valid."""
    return (torch.arange(total) < valid).long().repeat(batch_size, 1)


def _halve(length: int, times: int) -> int:
    """Return the length after stride-2 convolutions with padding that keeps the first frame."""
    for _ in range(times):
        length = (length + 1) // 2
    return length


def _window(
    config: Config, batch_size: int, generator: torch.Generator, mask: str, begin: str = "", end: str = ""
) -> MultimodalInput:
    """Make a full window of mel features and a mask of the valid frames, for a Whisper encoder followed by pooling.

    Four frames become one token.

    Args:
        config: Config of the class.
        batch_size: Batch size.
        generator: Generator of the mel features.
        mask: Name of the argument for the mask.
        begin: Config key of the token before the placeholders; empty for none.
        end: Config key of the token after the placeholders; empty for none.
    """
    audio = config["audio_config"]
    total = 2 * int(audio["max_source_positions"])
    valid = min(4 * _TOKENS, total)
    tensors = {
        "input_features": make_random_tensor(generator, batch_size, int(audio["num_mel_bins"]), total),
        mask: _make_mask(batch_size, total, valid),
    }
    return _make_insert(config, valid // 4, tensors, begin, end)


def _whole_window(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make a full window of mel features without a mask; `intermediate_size` features of the encoder make a token."""
    audio = config["audio_config"]
    positions = int(audio["max_source_positions"])
    features = make_random_tensor(generator, batch_size, int(audio["num_mel_bins"]), 2 * positions)
    count = positions * int(audio["hidden_size"]) // int(audio["intermediate_size"])
    return _make_insert(config, count, {"input_features": features})


def _added_to_text(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make audio features that are added to every text token, so that there are no audio tokens."""
    audio = config["audio_config"]
    frames = 2 * int(config["downsample_factor"]) * TEXT_LENGTH
    features = make_random_tensor(generator, batch_size, int(audio["num_mel_bins"]), frames)
    return MultimodalInput([], -1, {"input_features": features})


def _four_frames(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make frames of which four are a token after the convolutions, a constant in the code of the class."""
    audio = config["audio_config"]
    frames = 2 * 4 * _TOKENS
    tensors = {
        "input_features": make_random_tensor(generator, batch_size, int(audio["num_mel_bins"]), frames),
        "input_features_mask": _make_mask(batch_size, frames, frames),
    }
    return _make_insert(config, _TOKENS, tensors)


def _one_window(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make one window of the projector; the mask covers the tokens that it returns."""
    window, mels = int(config["window_size"]), int(config["encoder_config"]["input_dim"])
    count = window // int(config["downsample_rate"])
    tensors = {
        "input_features": make_random_tensor(generator, batch_size, window, mels),
        "input_features_mask": torch.ones(batch_size, count, dtype=torch.bool),
    }
    return _make_insert(config, count, tensors)


def _masked_chunk(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make one chunk of an encoder with three stride-2 convolutions: eight frames become one token."""
    audio = config["audio_config"]
    total = 2 * int(audio["n_window"])
    valid = min(8 * _TOKENS, total)
    tensors = {
        "input_features": make_random_tensor(generator, batch_size, int(audio["num_mel_bins"]), total),
        "input_features_mask": _make_mask(batch_size, total, valid),
    }
    return _make_insert(config, _halve(valid, 3), tensors)


def _chunk(config: Config, batch_size: int, generator: torch.Generator, convolutions: int) -> MultimodalInput:
    """Make at most one chunk of an encoder with this many stride-2 convolutions.

    A pooling layer counts as one of them: it halves an even length in the same way.
    """
    audio = config["audio_config"]
    frames = min(2**convolutions * _TOKENS, 2 * int(audio["n_window"]))
    tensors = {
        "input_features": make_random_tensor(generator, batch_size, int(audio["num_mel_bins"]), frames),
        "feature_attention_mask": _make_mask(batch_size, frames, frames),
    }
    return _make_insert(config, _halve(frames, convolutions), tensors, "audio_start_token_id", "audio_end_token_id")


def _two_convolutions(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput | None:
    """Make mel features for two stride-2 convolutions; the projection after them fits only this number of mel bins."""
    audio = config["audio_config"]
    if audio is None:
        return None
    mels = int(audio["subsampling_conv_channels"][0]) // 4 * 4
    tensors = {
        "input_features": make_random_tensor(generator, batch_size, 4 * _TOKENS, mels),
        "input_features_mask": torch.ones(batch_size, 4 * _TOKENS, dtype=torch.bool),
    }
    return _make_insert(config, _TOKENS, tensors, "boa_token_id", "eoa_token_index")


def _frames(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput | None:
    """Make frames of a waveform for a class without a tower: each frame is a token."""
    if config["audio_config"] is None:
        return None
    tensors = {
        "input_features": make_random_tensor(
            generator, batch_size, _TOKENS, int(config["audio_config"]["audio_embed_dim"])
        ),
        "input_features_mask": torch.ones(batch_size, _TOKENS, dtype=torch.bool),
    }
    return _make_insert(config, _TOKENS, tensors, "boa_token_id", "eoa_token_index")


def _filled(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make audio of the smallest size; the class pads audio of any length to a fixed number of tokens."""
    audio, count = config["audio_config"], int(config["audio_soft_tokens_per_image"])
    per_token = prod(int(time) for time, _ in audio["sscp_conv_stride_size"]) * int(audio["conf_reduction_factor"])
    frames = per_token * min(_TOKENS, count)
    tensors = {
        "input_features": make_random_tensor(generator, batch_size, frames, int(audio["input_feat_size"])),
        "input_features_mask": torch.ones(batch_size, frames, dtype=torch.bool),
    }
    return _make_insert(config, count, tensors, "boa_token_id", "eoa_token_id")


def _embedded_sizes(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make features for a tower that takes the number of embeddings of each audio input, `audio_embed_sizes`."""
    audio = config["audio_config"]
    frames = int(audio["time_reduction"]) * _TOKENS
    count = ceil(_TOKENS / int(audio["downsample_rate"]))
    tensors = {
        "audio_input_features": make_random_tensor(generator, batch_size, frames, int(audio["input_size"])),
        "audio_embed_sizes": torch.full((batch_size,), count),
        "audio_attention_mask": torch.ones(batch_size, frames, dtype=torch.bool),
    }
    return _make_insert(audio, count, tensors)


def _folded_waveform(config: Config, batch_size: int, generator: torch.Generator) -> MultimodalInput:
    """Make a waveform; every layer of the tower merges several samples into one."""
    samples = prod(int(size) for size in config["audio_config"]["patch_sizes"]) * _TOKENS
    tensors = {
        "input_values": make_random_tensor(generator, batch_size, samples),
        "input_values_mask": _make_mask(batch_size, samples, samples),
    }
    return _make_insert(config, _TOKENS, tensors)


# Functions by the name that the corrections of a model type use. If the tower of the class is optional, the function
# returns None for a config without it.
FORMS: Mapping[str, AudioForm] = {
    "added_to_text": _added_to_text,
    "chunk": _chunk,
    "embedded_sizes": _embedded_sizes,
    "filled": _filled,
    "folded_waveform": _folded_waveform,
    "four_frames": _four_frames,
    "frames": _frames,
    "masked_chunk": _masked_chunk,
    "one_window": _one_window,
    "two_convolutions": _two_convolutions,
    "whole_window": _whole_window,
    "window": _window,
}


def _mel_window(config: Config, batch_size: int, generator: torch.Generator) -> Batch:
    """Make a full window of mel features for an encoder that halves the number of frames, as Whisper's does."""
    frames = 2 * int(config["max_source_positions"])
    return {"input_features": make_random_tensor(generator, batch_size, int(config["num_mel_bins"]), frames)}


def _waveform(
    config: Config, batch_size: int, generator: torch.Generator, *, convolutions: Iterable[tuple[int, int]]
) -> Batch:
    """Make a waveform for which unpadded convolutions, (kernel, stride) in order, return `_TOKENS` outputs."""
    samples = _TOKENS
    for kernel, stride in reversed(list(convolutions)):
        samples = kernel + (samples - 1) * stride
    return {"input_values": make_random_tensor(generator, batch_size, samples)}


def _waveform_of_config(config: Config, batch_size: int, generator: torch.Generator) -> Batch:
    """Make a waveform for the convolutions of the config."""
    convolutions = zip(config["conv_kernel"], config["conv_stride"], strict=True)
    return _waveform(config, batch_size, generator, convolutions=convolutions)


def _stacked_mels(config: Config, batch_size: int, generator: torch.Generator) -> Batch:
    """Make stacked mel features, which an adaptor after the encoder downsamples."""
    frames = int(config["adaptor_stride"]) * _TOKENS
    return {
        "input_features": make_random_tensor(generator, batch_size, frames, int(config["feature_projection_input_dim"]))
    }


def _framed_waveform(config: Config, batch_size: int, generator: torch.Generator) -> Batch:
    """Make a waveform split into frames of `frame_ms` milliseconds, for an encoder with two convolutions."""
    audio = config["encoder_config"]
    frame = round(int(audio["sample_rate"]) * float(audio["frame_ms"]) / 1000)
    return {"input_values": make_random_tensor(generator, batch_size, frame * 4 * _TOKENS)}


def _mels(config: Config, batch_size: int, generator: torch.Generator) -> Batch:
    """Make mel features for an encoder whose stride-2 convolutions leave `_TOKENS` outputs."""
    frames = 2 ** int(config["num_conv_layers"]) * _TOKENS
    width = int(config["input_feat_per_channel"]) * int(config["input_channels"])
    return {"input_features": make_random_tensor(generator, batch_size, frames, width)}


# Inputs of an encoder whose decoder generates text; these have no tokens.
ENCODER_FORMS: Mapping[str, EncoderForm] = {
    "framed_waveform": _framed_waveform,
    "mel_window": _mel_window,
    "mels": _mels,
    "stacked_mels": _stacked_mels,
    "waveform": _waveform,
    "waveform_of_config": _waveform_of_config,
}
