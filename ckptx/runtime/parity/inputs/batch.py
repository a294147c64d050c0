"""Inputs for a model from its config alone: the same on every machine, so that two models can be compared.

Text is random tokens, from everywhere in the vocabulary: an embedding that is cut over the vocabulary is looked up in
every part, at both ends. Models that look at images or listen get one image and one sound per row, and the tokens that
stand for them, in the smallest form their config allows. Of other multimodal models the text part is run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ckptx.architecture.correction_rows import InputRow
from ckptx.architecture.correction_schema import FaultyCorrectionError
from ckptx.architecture.corrections import corrections_of
from ckptx.errors import UnsupportedError
from ckptx.runtime.parity.inputs import audio, images
from ckptx.runtime.parity.inputs.multimodal import LENGTH, Batch, MultimodalInput

_PADDING = 3  # tokens
_FIRST = 3  # the ids before are those of padding, begin and end in most vocabularies
# The functions that rows name, by the kind of the row.
FORMS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "images": images.FORMS,
    "audio": audio.FORMS,
    "heard": audio.HEARD,
}
# Parts of a config that describe a tower, and what it takes.
_TOWERS = {"vision_config": "images", "audio_config": "audio", "speech_config": "audio", "encoder_config": "audio"}


class Inputs(NamedTuple):
    """What to run a model on.

    Attributes:
        batch: Arguments of `forward`, the first dim of each text tensor is the batch.
        labels: What the logits are held against, (batch, length); -100 where they do not count.
        kinds: What is in it: "text", "images", "audio".
        missing: What the model has a tower for, and these inputs lack.
        words: How many different tokens of text there are, and how many the model knows.
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
    """Inputs for a model with this `config.json`.

    Args:
        config: As a mapping, with the defaults of its class.
        rows: Rows of the batch.
        seed: Other seeds give other tokens, pixels and sounds.
        shards: Parts that the vocabulary may be cut into; the first and the last token of each are in every batch.
        at_least: Tokens of text in a row.
        is_padded: Whether the end of the first row is padding, and a mask says so.
        images: In each row, of a model that looks at them; with 0, nothing to listen to either. One of each when left
            out.

    Raises:
        UnsupportedError: The model neither reads text nor writes it, or has special tokens alone.
    """
    generator = torch.Generator().manual_seed(seed)
    is_padded = is_padded and rows > 1
    ids = _tokens(config, rows, generator, shards, at_least, is_padded)
    forms = _rows_by_kind(config)
    heard = forms.get("heard")
    if heard is not None and config.get("is_encoder_decoder"):  # its decoder by itself only reads
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
    """One image and one sound for each row, by kind, of what a model with this `config.json` looks at and listens to.

    Args:
        config: As a mapping, with the defaults of its class.
        rows: Rows of the batch.
        generator: For pixels and sounds.
    """
    forms, inserts = _rows_by_kind(config), {}
    for name in ("images", "audio"):
        insert = _made(forms[name], config, rows, generator) if name in forms else None
        if insert is not None:  # else a config without this tower
            inserts[name] = insert
    return inserts


def _repeated(
    config: Mapping[str, Any], rows: int, times: int, generator: torch.Generator
) -> dict[str, MultimodalInput]:
    """`inserts_for` with several of each in a row, one after another."""
    if not times:
        return {}
    found = inserts_for(config, rows * times, generator)
    return {name: each._replace(tokens=[*each.tokens] * times) for name, each in found.items()}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model."""
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(key), Mapping):
            return {**config, **config[key]}
    thinker = config.get("thinker_config")
    return text_config(thinker) if isinstance(thinker, Mapping) else config


def _rows_by_kind(config: Mapping[str, Any]) -> dict[str, InputRow]:
    """What is known of the inputs of a class, by kind."""
    names = ("", *(config.get("architectures") or ()))
    rows = corrections_of(str(config.get("model_type"))).inputs
    return {row.kind: row for row in rows if row.class_name in names}


def _made(row: InputRow, config: Mapping[str, Any], rows: int, generator: torch.Generator) -> Any:
    """What the form of a row makes of a config."""
    make, forms = FORMS[row.kind].get(row.form), ", ".join(FORMS[row.kind])
    if make is None:
        raise FaultyCorrectionError(
            f'{config.get("model_type")}: "{row.form}" is no form of {row.kind}, needed one of {forms}'
        )
    try:
        inspect.signature(make).bind(config, rows, generator, **row.settings)
    except TypeError as error:
        raise FaultyCorrectionError(
            f'{config.get("model_type")}: the form "{row.form}" cannot take its settings: {error}'
        ) from error
    return make(config, rows, generator, **row.settings)


def _mask(ids: torch.Tensor, is_padded: bool) -> Batch:
    """Which tokens count, (rows, length): not the last of the first row, where there is padding."""
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
    """Random tokens that stand for nothing but themselves, (rows, length); with padding, the first row ends with one.

    Raises:
        UnsupportedError: The model reads no tokens, or has none but special ones.
    """
    words = text_config(config).get("vocab_size")
    if not isinstance(words, int):
        raise UnsupportedError(
            f"{config.get('model_type')}: its config has no vocab_size, needed a model that reads text; compare the "
            "bytes without --run"
        )
    special = {value for key, value in _numbers(config) if key.endswith(("_token_id", "_token_index"))}
    allowed = torch.tensor([token for token in range(_FIRST, words) if token not in special], dtype=torch.long)
    if not len(allowed):
        raise UnsupportedError(
            f"{config.get('model_type')}: found a vocab_size of {words}, needed a token from {_FIRST} on that is not "
            "special; compare the bytes without --run"
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
    """The first and the last token of each part of the vocabulary, cut as DTensor cuts it: in parts of one size."""
    size = -(-words // shards)
    begins = torch.arange(0, words, size)
    first = torch.searchsorted(allowed, begins)
    last = torch.searchsorted(allowed, begins + size) - 1
    is_filled = first <= last  # a part of special tokens alone has none
    return allowed[torch.cat([first[is_filled], last[is_filled]])].unique()


def _with(inserts: Iterable[MultimodalInput], ids: torch.Tensor) -> tuple[Batch, torch.Tensor]:
    """The arguments of `forward` and the labels, with everything put in after the first two tokens."""
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
    """Every whole number in a config, with its key."""
    found = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            found += _numbers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            found.append((str(key), value))  # Aria's has numbers for keys
    return found
