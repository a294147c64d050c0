"""Inputs for a model, from its config only: equal on every machine, so that two models can be compared.

Text is random tokens spread over the vocabulary, including both ends of each shard of a sharded embedding. Vision and
audio models get one image and one audio input per sequence, and their placeholder tokens, in the smallest form that the
config allows. Of other multimodal models, only the text part is run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ckptx.architecture.correction_schema import InvalidCorrectionError
from ckptx.architecture.correction_types import InputCorrection
from ckptx.architecture.corrections import corrections_of
from ckptx.errors import UnsupportedError
from ckptx.runtime.parity.inputs import audio, images
from ckptx.runtime.parity.inputs.multimodal import TEXT_LENGTH, Batch, MultimodalInput

_PADDING = 3  # padding tokens at the end of the first sequence
_FIRST_TEXT_TOKEN = 3  # smaller ids are padding, begin and end in most vocabularies
# `InputCorrection.kind` -> `InputCorrection.form` -> function that makes the input.
FORMS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "images": images.FORMS,
    "audio": audio.FORMS,
    "encoder_audio": audio.ENCODER_FORMS,
}
# Keys of a config that describe a tower, and the kind of input that the tower takes.
_TOWER_KINDS = {"vision_config": "images", "audio_config": "audio", "speech_config": "audio", "encoder_config": "audio"}


class Inputs(NamedTuple):
    """Inputs and labels of one batch.

    Attributes:
        batch: Arguments of `forward`; the first dim of each text tensor is the batch.
        labels: Target tokens, (batch, length), not shifted: the label of a position is its own token; -100 for tokens
            that are not predicted.
        kinds: Kinds of input in the batch: "text", "images", "audio".
        missing: Kinds of input that the model has a tower for, but the batch lacks.
        vocabulary_coverage: Number of distinct tokens in the text inputs, and size of the vocabulary.
    """

    batch: Batch
    labels: torch.Tensor
    kinds: tuple[str, ...]
    missing: tuple[str, ...]
    vocabulary_coverage: tuple[int, int] = (0, 0)


def make_inputs(
    config: Mapping[str, Any],
    *,
    batch_size: int = 2,
    seed: int = 0,
    shards: int = 1,
    min_tokens: int = 0,
    is_padded: bool = False,
    inserts_per_sequence: int = 1,
) -> Inputs:
    """Return inputs for a model with this `config.json`.

    Args:
        config: Config as a mapping, with the defaults of its class.
        batch_size: Batch size.
        seed: Seed of tokens, pixels and audio.
        shards: Number of vocabulary shards; the first and last token of each shard, special tokens aside, are in every
            batch.
        min_tokens: Minimum number of text tokens per sequence.
        is_padded: Pad the end of the first sequence, and add an attention mask. Without effect for a batch size of 1;
            an audio encoder-decoder gets no mask.
        inserts_per_sequence: Number of images, and number of audio inputs, per sequence, for a model that takes them.

    Raises:
        UnsupportedError: The model has no vocabulary, or one of special tokens only.
    """
    generator = torch.Generator().manual_seed(seed)
    is_padded = is_padded and batch_size > 1
    ids = _make_random_tokens(config, batch_size, generator, shards, min_tokens, is_padded)
    rows_by_kind = _find_rows_by_kind(config)
    encoder_row = rows_by_kind.get("encoder_audio")
    if encoder_row is not None and config.get("is_encoder_decoder"):  # a decoder without its encoder takes no audio
        batch = _make_form(encoder_row, config, batch_size, generator)
        return Inputs(
            {**batch, "decoder_input_ids": ids}, ids.clone(), ("audio",), (), _vocabulary_coverage(config, ids)
        )
    if config.get("is_encoder_decoder"):
        target = _make_random_tokens(config, batch_size, generator, shards, min_tokens)
        batch = {"input_ids": ids, "decoder_input_ids": target, **_make_mask(ids, is_padded)}
        return _collect_inputs(config, batch, target.clone(), ["text"])
    inserts = _repeat_inserts(config, batch_size, inserts_per_sequence, generator)
    batch, labels = _insert_placeholders(inserts.values(), ids) if inserts else ({"input_ids": ids}, ids.clone())
    if is_padded:
        labels[0, -_PADDING:] = -100
    batch |= _make_mask(batch["input_ids"], is_padded)
    return _collect_inputs(config, batch, labels, ["text", *inserts])


def make_inserts(config: Mapping[str, Any], batch_size: int, generator: torch.Generator) -> dict[str, MultimodalInput]:
    """Return one image and one audio input per sequence, by kind, as far as the model takes them.

    Args:
        config: Config as a mapping, with the defaults of its class.
        batch_size: Batch size.
        generator: Generator of pixels and audio.
    """
    rows_by_kind, inserts = _find_rows_by_kind(config), {}
    for name in ("images", "audio"):
        insert = _make_form(rows_by_kind[name], config, batch_size, generator) if name in rows_by_kind else None
        if insert is not None:  # None for a config without this tower
            inserts[name] = insert
    return inserts


def _repeat_inserts(
    config: Mapping[str, Any], batch_size: int, times: int, generator: torch.Generator
) -> dict[str, MultimodalInput]:
    """Return `make_inserts` with several of each kind per sequence, one after another."""
    if not times:
        return {}
    inserts = make_inserts(config, batch_size * times, generator)
    return {name: each._replace(tokens=[*each.tokens] * times) for name, each in inserts.items()}


def find_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config merged with the part of it that describes the language model, whose values take precedence.

    In a config with a thinker, only the thinker is considered. A config without such a part is returned as it is.
    """
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(key), Mapping):
            return {**config, **config[key]}
    thinker = config.get("thinker_config")
    return find_text_config(thinker) if isinstance(thinker, Mapping) else config


def _find_rows_by_kind(config: Mapping[str, Any]) -> dict[str, InputCorrection]:
    """Return the correction rows about the inputs of a class, by kind."""
    names = ("", *(config.get("architectures") or ()))
    rows = corrections_of(str(config.get("model_type"))).inputs
    return {row.kind: row for row in rows if row.class_name in names}


def _make_form(row: InputCorrection, config: Mapping[str, Any], batch_size: int, generator: torch.Generator) -> Any:
    """Return the input that a correction row describes.

    Returns:
        A `MultimodalInput`, or None for a config without this tower; for the kind "encoder_audio" a `Batch`.

    Raises:
        InvalidCorrectionError: The row names an unknown form, or settings that it does not take.
    """
    make_form, forms = FORMS[row.kind].get(row.form), ", ".join(FORMS[row.kind])
    if make_form is None:
        raise InvalidCorrectionError(
            f'{config.get("model_type")}: "{row.form}" is not a form of {row.kind}; use one of {forms}'
        )
    try:
        inspect.signature(make_form).bind(config, batch_size, generator, **row.settings)
    except TypeError as error:
        raise InvalidCorrectionError(
            f'{config.get("model_type")}: the form "{row.form}" does not accept its settings: {error}'
        ) from error
    return make_form(config, batch_size, generator, **row.settings)


def _make_mask(ids: torch.Tensor, is_padded: bool) -> Batch:
    """Return an attention mask (batch, length) without the padding of the first sequence; empty without padding."""
    if not is_padded:
        return {}
    mask = torch.ones_like(ids)
    mask[0, -_PADDING:] = 0
    return {"attention_mask": mask}


def _make_random_tokens(
    config: Mapping[str, Any],
    batch_size: int,
    generator: torch.Generator,
    shards: int,
    min_tokens: int = 0,
    is_padded: bool = False,
) -> torch.Tensor:
    """Return random tokens that are not special, (batch, length).

    With padding, the last 3 tokens of the first sequence are one repeated token.

    Raises:
        UnsupportedError: The model has no vocabulary, or one of special tokens only.
    """
    vocabulary_size = find_text_config(config).get("vocab_size")
    if not isinstance(vocabulary_size, int):
        raise UnsupportedError(
            f"{config.get('model_type')}: the config has no vocab_size, and --run requires a model that reads text; "
            "compare the bytes without --run"
        )
    special = {value for key, value in _find_integers(config) if key.endswith(("_token_id", "_token_index"))}
    allowed = torch.tensor(
        [token for token in range(_FIRST_TEXT_TOKEN, vocabulary_size) if token not in special], dtype=torch.long
    )
    if not len(allowed):
        raise UnsupportedError(
            f"{config.get('model_type')}: vocab_size {vocabulary_size} leaves no token from {_FIRST_TEXT_TOKEN} on "
            "that is not special; compare the bytes without --run"
        )
    edge_tokens = _find_shard_edge_tokens(allowed, vocabulary_size, shards)
    padding = _PADDING if is_padded else 0
    length = max(TEXT_LENGTH, min_tokens, -(-(len(edge_tokens) + padding) // batch_size))
    drawn_count = batch_size * length - len(edge_tokens) - padding
    indices = (
        (torch.arange(drawn_count) + torch.rand(drawn_count, generator=generator))
        * (len(allowed) / max(1, drawn_count))
    ).long()
    tokens = torch.cat([edge_tokens, allowed[indices.clamp(max=len(allowed) - 1)]])
    tokens = tokens[torch.randperm(len(tokens), generator=generator)]
    filler = allowed[:1].expand(padding)
    return torch.cat([tokens[: length - padding], filler, tokens[length - padding :]]).reshape(batch_size, length)


def _find_shard_edge_tokens(allowed: torch.Tensor, vocabulary_size: int, shards: int) -> torch.Tensor:
    """Return the first and last allowed token of each vocabulary shard; shards are ceil-chunks, as in DTensor."""
    size = -(-vocabulary_size // shards)
    begins = torch.arange(0, vocabulary_size, size)
    first = torch.searchsorted(allowed, begins)
    last = torch.searchsorted(allowed, begins + size) - 1
    is_filled = first <= last  # a shard of special tokens only has none
    return allowed[torch.cat([first[is_filled], last[is_filled]])].unique()


def _insert_placeholders(inserts: Iterable[MultimodalInput], ids: torch.Tensor) -> tuple[Batch, torch.Tensor]:
    """Return the arguments of `forward` and the labels, with all placeholders inserted after the first two tokens."""
    inserts = list(inserts)
    tokens = [token for each in inserts for token in each.tokens]
    inserted = torch.tensor(tokens, dtype=torch.long).expand(len(ids), -1)
    ids = torch.cat([ids[:, :2], inserted, ids[:, 2:]], 1)
    batch, labels = {"input_ids": ids}, ids.clone()
    for each in inserts:
        is_placeholder = ids == each.placeholder
        labels[is_placeholder] = -100
        batch |= each.tensors
        if each.token_types is not None:
            name, number = each.token_types
            batch[name] = torch.where(is_placeholder, number, batch.get(name, torch.zeros_like(ids)))
        if each.make_text_arguments is not None:
            batch |= each.make_text_arguments(ids)
    return batch, labels


def _collect_inputs(config: Mapping[str, Any], batch: Batch, labels: torch.Tensor, kinds: list[str]) -> Inputs:
    """Return `Inputs` with these values; find the missing kinds, and count the distinct tokens."""
    towers = {kind for key, kind in _TOWER_KINDS.items() if isinstance(config.get(key), Mapping)}
    coverage = _vocabulary_coverage(
        config, *(batch[name] for name in ("input_ids", "decoder_input_ids") if name in batch)
    )
    return Inputs(batch, labels, tuple(kinds), tuple(sorted(towers - set(kinds))), coverage)


def _vocabulary_coverage(config: Mapping[str, Any], *ids: torch.Tensor) -> tuple[int, int]:
    """Return the number of distinct tokens, and the size of the vocabulary."""
    return len(torch.cat([each.reshape(-1) for each in ids]).unique()), int(find_text_config(config)["vocab_size"])


def _find_integers(config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return (key, value) of every integer in a config and its nested configs, without booleans."""
    integers = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            integers += _find_integers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            integers.append((str(key), value))  # Aria's config has integer keys
    return integers
