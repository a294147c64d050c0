"""Encode a question and its answer as tensors of fixed length; only the answer has labels.

    ids       begin, image, question, answer, end, padding
    labels     -100   -100    -100    answer  end    -100

The answer is marked by `{% generation %}` of the chat template; without it, the answer begins where the conversation
with the answer differs from the one that asks for it. A sample that is too long loses the beginning of its question,
not its answer.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckptx.errors import InputError, UnsupportedError, UsageError, missing_package
from ckptx.runtime.model.build import read_config
from ckptx.runtime.parity.inputs.batch import inserts_for
from ckptx.runtime.parity.inputs.multimodal import MultimodalInput
from ckptx.runtime.training.rows import QuestionExample
from ckptx.untrusted.printable import one_line

IGNORED = -100
_PROCESSORS = ("processor_config.json", "preprocessor_config.json")
_MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROW = 1


class _Tokens(NamedTuple):
    """A tokenized conversation.

    Attributes:
        ids: Token ids.
        learned: True for each token of the answer.
        kept: Number of tokens at the beginning that must not be truncated.
    """

    ids: list[int]
    learned: list[bool]
    kept: int = 1


class Encoder:
    """Makes samples for the model of a checkpoint."""

    def __init__(self, source: Path, length: int, *, trust_remote_code: bool = False) -> None:
        """Read the tokenizer and config; an image processor is read when it is first used.

        Args:
            source: Directory of the checkpoint.
            length: Tokens per sample.
            trust_remote_code: Allow custom code from the checkpoint.

        Raises:
            InputError: The tokenizer cannot be read.
            UnsupportedError: The model is an encoder-decoder.
        """
        from transformers import AutoTokenizer

        self._source, self._length, self._trusts = source, length, trust_remote_code
        name, _, config = read_config(source, trust_remote_code=trust_remote_code)
        if config.is_encoder_decoder:
            raise UnsupportedError(
                f"{name}: is an encoder-decoder, and training requires a decoder-only model; choose another model"
            )
        self._config = config
        self._values: dict[str, Any] = {**config.to_dict(), "architectures": [name]}
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        except Exception as error:  # a tokenizer class may raise anything
            raise InputError(
                f"{source}: its tokenizer cannot be read: {type(error).__name__}: "
                f"{one_line((str(error).splitlines() or ['no reason'])[0], 300)}; add tokenizer.json"
            ) from error
        self._processor: Any = None
        template = getattr(self._tokenizer, "chat_template", None)
        self._has_template = bool(template)
        self._marks_answers = isinstance(template, str) and bool(_MARKS_ANSWERS.search(template))

    @property
    def padding(self) -> int:
        """Token that pads a sample."""
        for found in (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id, 0):
            if found is not None:
                return int(found)
        raise AssertionError

    def __call__(self, question: QuestionExample) -> dict[str, Tensor]:
        """Return a sample; the first dim of each tensor is 1, or the number of patches or tiles of its image.

        `input_ids`, `attention_mask` and `labels` are (1, length). A sample with an image also has the image arguments
        of the class.

        Raises:
            UsageError: The model takes no images, or an image does not fit the length.
        """
        if question.image is not None and any((self._source / each).is_file() for each in _PROCESSORS):
            return self._processed(question)
        insert = None if question.image is None else self._image(question.image)
        tokens = self._tokens(question)
        if insert is not None:
            first = 1 if self._tokenizer.bos_token_id in tokens.ids[:1] else 0
            tokens = _Tokens(
                [*tokens.ids[:first], *insert.tokens, *tokens.ids[first:]],
                [*tokens.learned[:first], *[False] * len(insert.tokens), *tokens.learned[first:]],
                first + len(insert.tokens),
            )
        sample = self._fitted(tokens)
        return sample | (self._blank(sample) if insert is None else self._shown(sample, insert))

    # ------------------------------------------------------------------------------------------------------------ text

    def _tokens(self, question: QuestionExample) -> _Tokens:
        prompt = [{"role": "user", "content": question.text}]
        whole = [*prompt, {"role": "assistant", "content": question.answer}]
        if not self._has_template:
            before: list[int] = self._tokenizer(f"{question.text}\n")["input_ids"]
            answer = self._tokenizer(question.answer, add_special_tokens=False)["input_ids"]
            if self._tokenizer.eos_token_id is not None:
                answer = [*answer, self._tokenizer.eos_token_id]
            return _Tokens([*before, *answer], [*[False] * len(before), *[True] * len(answer)])
        if self._marks_answers:
            found = self._tokenizer.apply_chat_template(whole, return_dict=True, return_assistant_tokens_mask=True)
            return _Tokens(list(found["input_ids"]), [bool(each) for each in found["assistant_masks"]])
        ids = list(self._tokenizer.apply_chat_template(whole, return_dict=True)["input_ids"])
        before = list(
            self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        )
        return _Tokens(ids, _behind(ids, before))

    def _fitted(self, tokens: _Tokens, further: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Truncate and pad tokens to the fixed length; `further` tensors, (1, tokens), likewise with zeros."""
        places = self._places(tokens)
        filled = self._length - len(places)
        ids = [tokens.ids[at] for at in places]
        labels = [tokens.ids[at] if tokens.learned[at] else IGNORED for at in places]
        sample = {
            "input_ids": torch.tensor([[*ids, *[self.padding] * filled]]),
            "attention_mask": torch.tensor([[*[1] * len(ids), *[0] * filled]]),
            "labels": torch.tensor([[*labels, *[IGNORED] * filled]]),
        }
        for name, tensor in (further or {}).items():
            sample[name] = torch.cat([tensor[:, places], tensor.new_zeros(_ROW, filled)], 1)
        return sample

    def _places(self, tokens: _Tokens) -> list[int]:
        """Return the tokens that stay: the beginning of the question is truncated first, then the end of the answer."""
        count = len(tokens.ids)
        excess = max(0, count - self._length)
        if tokens.kept >= self._length:
            raise UsageError(
                f"data.sequence_length is {self._length}, but an image has {tokens.kept} tokens in this model; "
                "increase data.sequence_length"
            )
        learned = tokens.learned.index(True) if True in tokens.learned else count
        dropped = range(tokens.kept, tokens.kept + min(excess, max(0, learned - tokens.kept)))
        return [at for at in range(count) if at not in dropped][: self._length]

    # ---------------------------------------------------------------------------------------------------------- images

    def _image(self, image: Any) -> MultimodalInput:
        """Return pixels in the form of the class, drawn with the image as seed: no processor can convert it."""
        number = int.from_bytes(blake2b(_bytes_of(image), digest_size=7).digest(), "little")
        insert = inserts_for(self._values, _ROW, torch.Generator().manual_seed(number)).get("images")
        if insert is None:
            raise UsageError(
                f"data.dataset has images, and no image inputs are known for {self._values['architectures'][0]}; use "
                "squad or synthetic_text"
            )
        return insert

    def _shown(self, sample: dict[str, Tensor], insert: MultimodalInput) -> dict[str, Tensor]:
        """Return the image arguments of the class."""
        ids, found = sample["input_ids"], dict(insert.tensors)
        if insert.types is not None:
            name, number = insert.types
            found[name] = torch.where(ids == insert.placeholder, number, torch.zeros_like(ids))
        if insert.row is not None:
            found |= insert.row(ids)
        return found

    def _blank(self, sample: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the arguments of a vision class for a sample without images."""
        insert = inserts_for(self._values, _ROW, torch.Generator()).get("images")
        ids = sample["input_ids"]
        found = {} if insert is None or insert.row is None else insert.row(ids)
        return found if insert is None or insert.types is None else {**found, insert.types[0]: torch.zeros_like(ids)}

    def _processed(self, question: QuestionExample) -> dict[str, Tensor]:
        """Return a sample made by the processor of the checkpoint."""
        if self._processor is None:
            self._processor = self._read_processor()
        content = [{"type": "image", "image": _picture(question.image)}, {"type": "text", "text": question.text}]
        prompt = [{"role": "user", "content": content}]
        whole = [*prompt, {"role": "assistant", "content": [{"type": "text", "text": question.answer}]}]
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        found = dict(self._processor.apply_chat_template(whole, **options))
        before = self._processor.apply_chat_template(prompt, add_generation_prompt=True, **options)["input_ids"]
        ids = found.pop("input_ids")
        found.pop("attention_mask", None)
        rows = {name: each for name, each in found.items() if each.shape == ids.shape}
        listed = ids[0].tolist()
        tokens = _Tokens(listed, _behind(listed, before[0].tolist()), self._behind_image(listed))
        return {**found, **self._fitted(tokens, rows)}

    def _read_processor(self) -> Any:
        from transformers import AutoProcessor

        try:
            return AutoProcessor.from_pretrained(self._source, trust_remote_code=self._trusts)
        except ImportError as error:
            raise missing_package(f"{self._source}: its processor", error) from error
        except Exception as error:  # a processor class may raise anything
            raise InputError(
                f"{self._source}: its processor cannot be read: {type(error).__name__}: "
                f"{one_line((str(error).splitlines() or ['no reason'])[0], 300)}; remove processor_config.json and "
                "preprocessor_config.json to use synthetic images"
            ) from error

    def _behind_image(self, ids: list[int]) -> int:
        """Return the number of tokens up to the end of the image."""
        names = ("image_token_id", "image_token_index")
        token = next((self._values[each] for each in names if self._values.get(each) is not None), None)
        special = set(self._tokenizer.all_special_ids)
        end = max((at for at, each in enumerate(ids) if each == token), default=0) + 1
        while end < len(ids) and ids[end] in special:
            end += 1
        return end


def _behind(ids: list[int], before: list[int]) -> list[bool]:
    """Return True for each token after the common prefix."""
    same = next((at for at, (a, b) in enumerate(zip(ids, before, strict=False)) if a != b), min(len(ids), len(before)))
    return [at >= same for at in range(len(ids))]


def _bytes_of(image: Any) -> bytes:
    if isinstance(image, Tensor):
        image = image.contiguous().numpy()
    if isinstance(image, Mapping):
        return bytes(image["bytes"])
    if hasattr(image, "tobytes"):
        return bytes(image.tobytes())
    return repr(image).encode()


def _picture(image: Any) -> Any:
    """Return an image as processors take it: an RGB PIL image, if it is not a tensor."""
    if isinstance(image, Mapping):  # encoded bytes, if the data set declares no image column
        try:
            from PIL import Image
        except ImportError as error:
            raise missing_package("an image of the data set", error) from error
        image = Image.open(io.BytesIO(image["bytes"]))
    return image.convert("RGB") if hasattr(image, "convert") else image
