"""One sound for each row, in the smallest form that the config of a class allows: a function for each form.

Which form a class takes, the section `inputs` of its corrections says, with settings. Shapes, masks and the number of
tokens are those that the processors and towers of transformers 5.17 to 5.23 agree on. Where a tower wants a window of
fixed length (Whisper's 30 seconds), the sound is at its beginning and the mask says so; towers without a mask hear all
of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import ceil, prod
from typing import Any

import torch

from ckptx.runtime.parity.inputs.multimodal import LENGTH, Batch, MultimodalInput, random_of

Config = Mapping[str, Any]
Sound = Callable[..., MultimodalInput | None]  # of a config, rows and a generator, with the settings of its row
Heard = Callable[..., Batch]

_TOKENS = 4  # for a sound, where its length is free


def _insert(config: Config, count: int, tensors: Batch, begin: str = "", end: str = "") -> MultimodalInput:
    """`count` placeholders, between the tokens that these keys of the config name."""
    token = int(config["audio_token_id"] if "audio_token_id" in config else config["audio_token_index"])
    first, last = ([int(config[key])] if config.get(key) is not None else [] for key in (begin, end))
    return MultimodalInput([*first, *[token] * count, *last], token, tensors)


def _mask(rows: int, total: int, valid: int) -> torch.Tensor:
    """Which frames count: the first ones, (rows, total), 0 or 1."""
    return (torch.arange(total) < valid).long().repeat(rows, 1)


def _halved(length: int, times: int) -> int:
    """What convolutions of stride 2 leave, with the padding that keeps the first frame."""
    for _ in range(times):
        length = (length + 1) // 2
    return length


def _window(
    config: Config, rows: int, generator: torch.Generator, mask: str, begin: str = "", end: str = ""
) -> MultimodalInput:
    """Whisper's encoder with a pooling behind it: a full window of mels, and a mask for what is in it."""
    audio = config["audio_config"]
    total = 2 * int(audio["max_source_positions"])
    valid = min(4 * _TOKENS, total)
    tensors = {
        "input_features": random_of(generator, rows, int(audio["num_mel_bins"]), total),
        mask: _mask(rows, total, valid),
    }
    return _insert(config, valid // 4, tensors, begin, end)


def _whole_window(config: Config, rows: int, generator: torch.Generator) -> MultimodalInput:
    """A full window of mels without a mask; `intermediate_size` numbers of the encoder make a token."""
    audio = config["audio_config"]
    positions = int(audio["max_source_positions"])
    features = random_of(generator, rows, int(audio["num_mel_bins"]), 2 * positions)
    count = positions * int(audio["hidden_size"]) // int(audio["intermediate_size"])
    return _insert(config, count, {"input_features": features})


def _added_to_text(config: Config, rows: int, generator: torch.Generator) -> MultimodalInput:
    """Sound is added to every token of the text, so that it has no token of its own."""
    audio = config["audio_config"]
    frames = 2 * int(config["downsample_factor"]) * LENGTH
    features = random_of(generator, rows, int(audio["num_mel_bins"]), frames)
    return MultimodalInput([], -1, {"input_features": features})


def _four_frames(config: Config, rows: int, generator: torch.Generator) -> MultimodalInput:
    """Four frames behind the convolutions make a token: the class has this number in its code, not in its config."""
    audio = config["audio_config"]
    frames = 2 * 4 * _TOKENS
    tensors = {
        "input_features": random_of(generator, rows, int(audio["num_mel_bins"]), frames),
        "input_features_mask": _mask(rows, frames, frames),
    }
    return _insert(config, _TOKENS, tensors)


def _one_window(config: Config, rows: int, generator: torch.Generator) -> MultimodalInput:
    """One window of the projector; the mask is about the tokens that it gives."""
    window, mels = int(config["window_size"]), int(config["encoder_config"]["input_dim"])
    count = window // int(config["downsample_rate"])
    tensors = {
        "input_features": random_of(generator, rows, window, mels),
        "input_features_mask": torch.ones(rows, count, dtype=torch.bool),
    }
    return _insert(config, count, tensors)


def _masked_chunk(config: Config, rows: int, generator: torch.Generator) -> MultimodalInput:
    """One chunk of the encoder: three convolutions."""
    audio = config["audio_config"]
    total = 2 * int(audio["n_window"])
    valid = min(8 * _TOKENS, total)
    tensors = {
        "input_features": random_of(generator, rows, int(audio["num_mel_bins"]), total),
        "input_features_mask": _mask(rows, total, valid),
    }
    return _insert(config, _halved(valid, 3), tensors)


def _chunk(config: Config, rows: int, generator: torch.Generator, convolutions: int) -> MultimodalInput:
    """At most one chunk of the encoder. A pooling halves as a convolution does where it is about whole pairs."""
    audio = config["audio_config"]
    frames = min(2**convolutions * _TOKENS, 2 * int(audio["n_window"]))
    tensors = {
        "input_features": random_of(generator, rows, int(audio["num_mel_bins"]), frames),
        "feature_attention_mask": _mask(rows, frames, frames),
    }
    return _insert(config, _halved(frames, convolutions), tensors, "audio_start_token_id", "audio_end_token_id")


def _two_convolutions(config: Config, rows: int, generator: torch.Generator) -> MultimodalInput | None:
    """Two convolutions. How many mels there are stands in the channels of the first: a projection is made for them."""
    audio = config["audio_config"]
    if audio is None:
        return None
    mels = int(audio["subsampling_conv_channels"][0]) // 4 * 4
    tensors = {
        "input_features": random_of(generator, rows, 4 * _TOKENS, mels),
        "input_features_mask": torch.ones(rows, 4 * _TOKENS, dtype=torch.bool),
    }
    return _insert(config, _TOKENS, tensors, "boa_token_id", "eoa_token_index")


def _frames(config: Config, rows: int, generator: torch.Generator) -> MultimodalInput | None:
    """No tower: a frame of the waveform is a token."""
    if config["audio_config"] is None:
        return None
    tensors = {
        "input_features": random_of(generator, rows, _TOKENS, int(config["audio_config"]["audio_embed_dim"])),
        "input_features_mask": torch.ones(rows, _TOKENS, dtype=torch.bool),
    }
    return _insert(config, _TOKENS, tensors, "boa_token_id", "eoa_token_index")


def _filled(config: Config, rows: int, generator: torch.Generator) -> MultimodalInput:
    """However short a sound, the class fills it up to a fixed number of tokens."""
    audio, count = config["audio_config"], int(config["audio_soft_tokens_per_image"])
    per_token = prod(int(time) for time, _ in audio["sscp_conv_stride_size"]) * int(audio["conf_reduction_factor"])
    frames = per_token * min(_TOKENS, count)
    tensors = {
        "input_features": random_of(generator, rows, frames, int(audio["input_feat_size"])),
        "input_features_mask": torch.ones(rows, frames, dtype=torch.bool),
    }
    return _insert(config, count, tensors, "boa_token_id", "eoa_token_id")


def _embedded_sizes(config: Config, rows: int, generator: torch.Generator) -> MultimodalInput:
    audio = config["audio_config"]
    frames = int(audio["time_reduction"]) * _TOKENS
    count = ceil(_TOKENS / int(audio["downsample_rate"]))
    tensors = {
        "audio_input_features": random_of(generator, rows, frames, int(audio["input_size"])),
        "audio_embed_sizes": torch.full((rows,), count),
        "audio_attention_mask": torch.ones(rows, frames, dtype=torch.bool),
    }
    return _insert(audio, count, tensors)


def _folded_waveform(config: Config, rows: int, generator: torch.Generator) -> MultimodalInput:
    """A waveform; every layer of the tower folds some samples into one."""
    samples = prod(int(size) for size in config["audio_config"]["patch_sizes"]) * _TOKENS
    tensors = {
        "input_values": random_of(generator, rows, samples),
        "input_values_mask": _mask(rows, samples, samples),
    }
    return _insert(config, _TOKENS, tensors)


# By the name that the rows of a model type say: sounds in a row of text. None for a config without a tower.
FORMS: Mapping[str, Sound] = {
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


def _mel_window(config: Config, rows: int, generator: torch.Generator) -> Batch:
    frames = 2 * int(config["max_source_positions"])
    return {"input_features": random_of(generator, rows, int(config["num_mel_bins"]), frames)}


def _waveform(
    config: Config, rows: int, generator: torch.Generator, *, convolutions: Iterable[tuple[int, int]]
) -> Batch:
    """As many samples as convolutions without padding, (kernel, stride) from the first to the last, need for a few."""
    samples = _TOKENS
    for kernel, stride in reversed(list(convolutions)):
        samples = kernel + (samples - 1) * stride
    return {"input_values": random_of(generator, rows, samples)}


def _waveform_of_config(config: Config, rows: int, generator: torch.Generator) -> Batch:
    """A waveform for the convolutions that the config says."""
    convolutions = zip(config["conv_kernel"], config["conv_stride"], strict=True)
    return _waveform(config, rows, generator, convolutions=convolutions)


def _stacked_mels(config: Config, rows: int, generator: torch.Generator) -> Batch:
    """Stacked mels; an adaptor behind the encoder folds them."""
    frames = int(config["adaptor_stride"]) * _TOKENS
    return {"input_features": random_of(generator, rows, frames, int(config["feature_projection_input_dim"]))}


def _framed_waveform(config: Config, rows: int, generator: torch.Generator) -> Batch:
    """A waveform in frames of some milliseconds, behind them two convolutions."""
    audio = config["encoder_config"]
    frame = round(int(audio["sample_rate"]) * float(audio["frame_ms"]) / 1000)
    return {"input_values": random_of(generator, rows, frame * 4 * _TOKENS)}


def _mels(config: Config, rows: int, generator: torch.Generator) -> Batch:
    frames = 2 ** int(config["num_conv_layers"]) * _TOKENS
    width = int(config["input_feat_per_channel"]) * int(config["input_channels"])
    return {"input_features": random_of(generator, rows, frames, width)}


# What an encoder hears while its decoder writes; there are no tokens of input.
HEARD: Mapping[str, Heard] = {
    "framed_waveform": _framed_waveform,
    "mel_window": _mel_window,
    "mels": _mels,
    "stacked_mels": _stacked_mels,
    "waveform": _waveform,
    "waveform_of_config": _waveform_of_config,
}
