"""Inputs for a model, from its config only: equal on every machine, so that two models can be compared.

Text is random tokens spread over the vocabulary, including both ends of each shard of a sharded embedding. Vision and
audio models get one image and one sound per sequence, and their placeholder tokens, in the smallest form that the
config allows. Of other multimodal models, only the text part is run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ckptx.architecture.correction_rows import InputRow
from ckptx.architecture.correction_schema import InvalidCorrectionError
from ckptx.architecture.corrections import corrections_of
from ckptx.errors import UnsupportedError
from ckptx.runtime.parity.inputs import audio, images
from ckptx.runtime.parity.inputs.multimodal import LENGTH, Batch, MultimodalInput

_PADDING = 3  # tokens
_FIRST = 3  # smaller ids are padding, begin and end in most vocabularies
# Form functions by kind of correction row.
FORMS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "images": images.FORMS,
    "audio": audio.FORMS,
    "heard": audio.ENCODER_FORMS,
}
# Keys of a config that describe a tower, and the kind of input that the tower takes.
_TOWERS = {"vision_config": "images", "audio_config": "audio", "speech_config": "audio", "encoder_config": "audio"}


class Inputs(NamedTuple):
    """Inputs and labels of one batch.

    Attributes:
        batch: Arguments of `forward`; the first dim of each text tensor is the batch.
        labels: Target tokens, (batch, length); -100 for positions without a loss.
        kinds: Kinds of input in the batch: "text", "images", "audio".
        missing: Kinds of input that the model has a tower for, but the batch lacks.
        words: Number of distinct text tokens, and size of the vocabulary.
    """

    batch: Batch
    labels: torch.Tensor
    kinds: tuple[str, ...]
    missing: tuple[str, ...]
    words: tuple[int, int] = (0, 0)


def inputs_for(
    config: Mapping[str, Any],
    *,
    rows: int = 2,
    seed: int = 0,
    shards: int = 1,
    at_least: int = 0,
    is_padded: bool = False,
    images: int | None = None,
) -> Inputs:
    """Return inputs for a model with this `config.json`.

    Args:
        config: Config as a mapping, with the defaults of its class.
        rows: Batch size.
        seed: Seed of tokens, pixels and sounds.
        shards: Number of vocabulary shards; the first and last token of each shard are in every batch.
        at_least: Minimum number of text tokens per sequence.
        is_padded: Pad the end of the first sequence, and add an attention mask.
        images: Images, and sounds, per sequence, for a model that takes them. None is one of each.

    Raises:
        UnsupportedError: The model has no vocabulary, or one of special tokens only.
    """
    generator = torch.Generator().manual_seed(seed)
    is_padded = is_padded and rows > 1
    ids = _tokens(config, rows, generator, shards, at_least, is_padded)
    forms = _rows_by_kind(config)
    heard = forms.get("heard")
    if heard is not None and config.get("is_encoder_decoder"):  # a decoder on its own takes no sound
        batch = _made(heard, config, rows, generator)
        return Inputs({**batch, "decoder_input_ids": ids}, ids.clone(), ("audio",), (), _words(config, ids))
    if config.get("is_encoder_decoder"):
        target = _tokens(config, rows, generator, shards, at_least)
        batch = {"input_ids": ids, "decoder_input_ids": target, **_mask(ids, is_padded)}
        return _named(config, batch, target.clone(), ["text"])
    inserts = _repeated(config, rows, 1 if images is None else images, generator)
    batch, labels = _with(inserts.values(), ids) if inserts else ({"input_ids": ids}, ids.clone())
    if is_padded:
        labels[0, -_PADDING:] = -100
    batch |= _mask(batch["input_ids"], is_padded)
    return _named(config, batch, labels, ["text", *inserts])


def inserts_for(config: Mapping[str, Any], rows: int, generator: torch.Generator) -> dict[str, MultimodalInput]:
    """Return one image and one sound per sequence, by kind, as far as the model takes them.

    Args:
        config: Config as a mapping, with the defaults of its class.
        rows: Batch size.
        generator: Generator of pixels and sounds.
    """
    forms, inserts = _rows_by_kind(config), {}
    for name in ("images", "audio"):
        insert = _made(forms[name], config, rows, generator) if name in forms else None
        if insert is not None:  # None for a config without this tower
            inserts[name] = insert
    return inserts


def _repeated(
    config: Mapping[str, Any], rows: int, times: int, generator: torch.Generator
) -> dict[str, MultimodalInput]:
    """Return `inserts_for` with several of each kind per sequence, one after another."""
    if not times:
        return {}
    found = inserts_for(config, rows * times, generator)
    return {name: each._replace(tokens=[*each.tokens] * times) for name, each in found.items()}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes the language model."""
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(key), Mapping):
            return {**config, **config[key]}
    thinker = config.get("thinker_config")
    return text_config(thinker) if isinstance(thinker, Mapping) else config


def _rows_by_kind(config: Mapping[str, Any]) -> dict[str, InputRow]:
    """Return the correction rows about the inputs of a class, by kind."""
    names = ("", *(config.get("architectures") or ()))
    rows = corrections_of(str(config.get("model_type"))).inputs
    return {row.kind: row for row in rows if row.class_name in names}


def _made(row: InputRow, config: Mapping[str, Any], rows: int, generator: torch.Generator) -> Any:
    """Call the form function of a correction row.

    Raises:
        InvalidCorrectionError: The row names an unknown form, or settings that it does not take.
    """
    make, forms = FORMS[row.kind].get(row.form), ", ".join(FORMS[row.kind])
    if make is None:
        raise InvalidCorrectionError(
            f'{config.get("model_type")}: "{row.form}" is not a form of {row.kind}; use one of {forms}'
        )
    try:
        inspect.signature(make).bind(config, rows, generator, **row.settings)
    except TypeError as error:
        raise InvalidCorrectionError(
            f'{config.get("model_type")}: the form "{row.form}" does not accept its settings: {error}'
        ) from error
    return make(config, rows, generator, **row.settings)


def _mask(ids: torch.Tensor, is_padded: bool) -> Batch:
    """Return an attention mask (batch, length) without the padding of the first sequence; empty without padding."""
    if not is_padded:
        return {}
    mask = torch.ones_like(ids)
    mask[0, -_PADDING:] = 0
    return {"attention_mask": mask}


def _tokens(
    config: Mapping[str, Any],
    rows: int,
    generator: torch.Generator,
    shards: int,
    at_least: int = 0,
    is_padded: bool = False,
) -> torch.Tensor:
    """Return random tokens that are not special, (batch, length); with padding, the first sequence ends with one token.

    Raises:
        UnsupportedError: The model has no vocabulary, or one of special tokens only.
    """
    words = text_config(config).get("vocab_size")
    if not isinstance(words, int):
        raise UnsupportedError(
            f"{config.get('model_type')}: the config has no vocab_size, and --run requires a model that reads text; "
            "compare the bytes without --run"
        )
    special = {value for key, value in _numbers(config) if key.endswith(("_token_id", "_token_index"))}
    allowed = torch.tensor([token for token in range(_FIRST, words) if token not in special], dtype=torch.long)
    if not len(allowed):
        raise UnsupportedError(
            f"{config.get('model_type')}: vocab_size {words} leaves no token from {_FIRST} on that is not special; "
            "compare the bytes without --run"
        )
    ends = _ends(allowed, words, shards)
    padding = _PADDING if is_padded else 0
    length = max(LENGTH, at_least, -(-(len(ends) + padding) // rows))
    parts = rows * length - len(ends) - padding
    drawn = ((torch.arange(parts) + torch.rand(parts, generator=generator)) * (len(allowed) / max(1, parts))).long()
    tokens = torch.cat([ends, allowed[drawn.clamp(max=len(allowed) - 1)]])
    tokens = tokens[torch.randperm(len(tokens), generator=generator)]
    filler = allowed[:1].expand(padding)
    return torch.cat([tokens[: length - padding], filler, tokens[length - padding :]]).reshape(rows, length)


def _ends(allowed: torch.Tensor, words: int, shards: int) -> torch.Tensor:
    """Return the first and last allowed token of each vocabulary shard; DTensor shards have equal size."""
    size = -(-words // shards)
    begins = torch.arange(0, words, size)
    first = torch.searchsorted(allowed, begins)
    last = torch.searchsorted(allowed, begins + size) - 1
    is_filled = first <= last  # a shard of special tokens only has none
    return allowed[torch.cat([first[is_filled], last[is_filled]])].unique()


def _with(inserts: Iterable[MultimodalInput], ids: torch.Tensor) -> tuple[Batch, torch.Tensor]:
    """Return the arguments of `forward` and the labels, with all placeholders inserted after the first two tokens."""
    inserts = list(inserts)
    tokens = [token for each in inserts for token in each.tokens]
    middle = torch.tensor(tokens, dtype=torch.long).expand(len(ids), -1)
    ids = torch.cat([ids[:, :2], middle, ids[:, 2:]], 1)
    batch, labels = {"input_ids": ids}, ids.clone()
    for each in inserts:
        is_here = ids == each.placeholder
        labels[is_here] = -100
        batch |= each.tensors
        if each.types is not None:
            name, number = each.types
            batch[name] = torch.where(is_here, number, batch.get(name, torch.zeros_like(ids)))
        if each.row is not None:
            batch |= each.row(ids)
    return batch, labels


def _named(config: Mapping[str, Any], batch: Batch, labels: torch.Tensor, kinds: list[str]) -> Inputs:
    towers = {kind for key, kind in _TOWERS.items() if isinstance(config.get(key), Mapping)}
    words = _words(config, *(batch[name] for name in ("input_ids", "decoder_input_ids") if name in batch))
    return Inputs(batch, labels, tuple(kinds), tuple(sorted(towers - set(kinds))), words)


def _words(config: Mapping[str, Any], *ids: torch.Tensor) -> tuple[int, int]:
    return len(torch.cat([each.reshape(-1) for each in ids]).unique()), int(text_config(config)["vocab_size"])


def _numbers(config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return every integer of a config, with its key."""
    found = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            found += _numbers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            found.append((str(key), value))  # Aria's config has integer keys
    return found
