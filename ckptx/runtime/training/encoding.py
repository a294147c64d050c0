"""Encode a question and its answer as tensors of fixed length; only the answer has labels.

    ids       begin, image, question, answer, end, padding
    labels     -100   -100    -100    answer  end    -100

Labels are not shifted: the model or the loss shifts them by one token. The answer is marked by `{% generation %}` of a
tokenizer's chat template. If the template does not have it, and with a processor of images, the answer begins where the
token ids of the conversation with the answer differ from those of the prompt alone. Without a chat template, question
and answer are tokenized separately. A sample that is too long loses the beginning of its question, and if that is not
enough, the end of its answer.
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
from ckptx.runtime.parity.inputs.batch import make_inserts
from ckptx.runtime.parity.inputs.multimodal import MultimodalInput
from ckptx.runtime.training.samples import QuestionExample
from ckptx.untrusted.printable import one_line

IGNORE_INDEX = -100
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_BATCH_SIZE = 1


class _TokenizedConversation(NamedTuple):
    """A tokenized conversation.

    Attributes:
        ids: Token ids.
        is_answer: True for each token of the answer.
        protected_count: Number of tokens at the beginning that must not be truncated: the begin token, and those of the
            image.
    """

    ids: list[int]
    is_answer: list[bool]
    protected_count: int = 1


class Encoder:
    """Encodes questions with answers as arguments and labels for the model of a checkpoint."""

    def __init__(self, source: Path, length: int, *, trust_remote_code: bool = False) -> None:
        """Read the tokenizer and config; an image processor is read when it is first used.

        Args:
            source: Directory of the checkpoint.
            length: Tokens per sample.
            trust_remote_code: Allow custom code from the checkpoint.

        Raises:
            InputError: The tokenizer or config.json cannot be read.
            UnsupportedError: The model is an encoder-decoder, or its class is unknown.
            EnvironmentProblem: A package that the class requires is missing.
        """
        from transformers import AutoTokenizer

        self._source, self._length, self._trust_remote_code = source, length, trust_remote_code
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
        self._marks_answers = isinstance(template, str) and bool(_GENERATION_TAG.search(template))

    @property
    def padding_id(self) -> int:
        """Id of the token that pads a sample: the padding token, else the end token, else 0."""
        for token_id in (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id, 0):
            if token_id is not None:
                return int(token_id)
        raise AssertionError

    def __call__(self, question: QuestionExample) -> dict[str, Tensor]:
        """Return a sample; the first dim of each tensor is 1, or the number of patches or tiles of its image.

        `input_ids`, `attention_mask` and `labels` are (1, length). A sample with an image also has the image arguments
        of the class. A sample without one has the arguments that such a class requires for each token, such as token
        types.

        Raises:
            UsageError: The model does not take images, or an image does not fit the length.
            InputError: The image processor cannot be read.
            EnvironmentProblem: A package that the processor requires is missing.
        """
        if question.image is not None and any((self._source / each).is_file() for each in _PROCESSOR_FILES):
            return self._encode_with_processor(question)
        insert = None if question.image is None else self._make_synthetic_image(question.image)
        tokens = self._tokenize(question)
        if insert is not None:
            first = 1 if self._tokenizer.bos_token_id in tokens.ids[:1] else 0
            tokens = _TokenizedConversation(
                [*tokens.ids[:first], *insert.tokens, *tokens.ids[first:]],
                [*tokens.is_answer[:first], *[False] * len(insert.tokens), *tokens.is_answer[first:]],
                first + len(insert.tokens),
            )
        sample = self._fit_to_length(tokens)
        return sample | (
            self._blank_image_arguments(sample) if insert is None else self._image_arguments(sample, insert)
        )

    # ------------------------------------------------------------------------------------------------------------ text

    def _tokenize(self, question: QuestionExample) -> _TokenizedConversation:
        prompt = [{"role": "user", "content": question.text}]
        whole = [*prompt, {"role": "assistant", "content": question.answer}]
        if not self._has_template:
            prompt_ids: list[int] = self._tokenizer(f"{question.text}\n")["input_ids"]
            answer = self._tokenizer(question.answer, add_special_tokens=False)["input_ids"]
            if self._tokenizer.eos_token_id is not None:
                answer = [*answer, self._tokenizer.eos_token_id]
            return _TokenizedConversation([*prompt_ids, *answer], [*[False] * len(prompt_ids), *[True] * len(answer)])
        if self._marks_answers:
            encoded = self._tokenizer.apply_chat_template(whole, return_dict=True, return_assistant_tokens_mask=True)
            return _TokenizedConversation(
                list(encoded["input_ids"]), [bool(each) for each in encoded["assistant_masks"]]
            )
        ids = list(self._tokenizer.apply_chat_template(whole, return_dict=True)["input_ids"])
        prompt_ids = list(
            self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        )
        return _TokenizedConversation(ids, _mark_after_prefix(ids, prompt_ids))

    def _fit_to_length(
        self, tokens: _TokenizedConversation, extra_tensors: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Truncate and pad tokens to the fixed length; `extra_tensors`, (1, tokens), are padded with zeros."""
        positions = self._select_positions(tokens)
        padding_count = self._length - len(positions)
        ids = [tokens.ids[each] for each in positions]
        labels = [tokens.ids[each] if tokens.is_answer[each] else IGNORE_INDEX for each in positions]
        sample = {
            "input_ids": torch.tensor([[*ids, *[self.padding_id] * padding_count]]),
            "attention_mask": torch.tensor([[*[1] * len(ids), *[0] * padding_count]]),
            "labels": torch.tensor([[*labels, *[IGNORE_INDEX] * padding_count]]),
        }
        for name, tensor in (extra_tensors or {}).items():
            sample[name] = torch.cat([tensor[:, positions], tensor.new_zeros(_BATCH_SIZE, padding_count)], 1)
        return sample

    def _select_positions(self, tokens: _TokenizedConversation) -> list[int]:
        """Return the positions of the tokens to keep.

        The beginning of the question is truncated first, then the end of the answer.
        """
        count = len(tokens.ids)
        excess = max(0, count - self._length)
        if tokens.protected_count >= self._length:
            raise UsageError(
                f"data.sequence_length is {self._length}, but an image has {tokens.protected_count} tokens in this "
                "model; increase data.sequence_length"
            )
        answer_start = tokens.is_answer.index(True) if True in tokens.is_answer else count
        dropped = range(
            tokens.protected_count, tokens.protected_count + min(excess, max(0, answer_start - tokens.protected_count))
        )
        return [each for each in range(count) if each not in dropped][: self._length]

    # ---------------------------------------------------------------------------------------------------------- images

    def _make_synthetic_image(self, image: Any) -> MultimodalInput:
        """Return the tokens of an image, and random pixels in a shape that the class takes, seeded by the image.

        This replaces a processor if the checkpoint has none, such as one with random weights.
        """
        image_seed = int.from_bytes(blake2b(_bytes_of(image), digest_size=7).digest(), "little")
        insert = make_inserts(self._values, _BATCH_SIZE, torch.Generator().manual_seed(image_seed)).get("images")
        if insert is None:
            raise UsageError(
                f"data.dataset has images, and no image inputs are known for {self._values['architectures'][0]}; use "
                "squad or synthetic_text"
            )
        return insert

    def _image_arguments(self, sample: dict[str, Tensor], insert: MultimodalInput) -> dict[str, Tensor]:
        """Return the image arguments of the class for a sample with a synthetic image."""
        ids, arguments = sample["input_ids"], dict(insert.tensors)
        if insert.token_types is not None:
            name, number = insert.token_types
            arguments[name] = torch.where(ids == insert.placeholder, number, torch.zeros_like(ids))
        if insert.make_text_arguments is not None:
            arguments |= insert.make_text_arguments(ids)
        return arguments

    def _blank_image_arguments(self, sample: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the per-token arguments of a vision class for a sample without images; empty for a text class."""
        insert = make_inserts(self._values, _BATCH_SIZE, torch.Generator()).get("images")
        ids = sample["input_ids"]
        arguments = {} if insert is None or insert.make_text_arguments is None else insert.make_text_arguments(ids)
        return (
            arguments
            if insert is None or insert.token_types is None
            else {**arguments, insert.token_types[0]: torch.zeros_like(ids)}
        )

    def _encode_with_processor(self, question: QuestionExample) -> dict[str, Tensor]:
        """Return a sample made by the processor of the checkpoint."""
        if self._processor is None:
            self._processor = self._read_processor()
        content = [{"type": "image", "image": _to_rgb_image(question.image)}, {"type": "text", "text": question.text}]
        prompt = [{"role": "user", "content": content}]
        whole = [*prompt, {"role": "assistant", "content": [{"type": "text", "text": question.answer}]}]
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        encoded = dict(self._processor.apply_chat_template(whole, **options))
        prompt_ids = self._processor.apply_chat_template(prompt, add_generation_prompt=True, **options)["input_ids"]
        ids = encoded.pop("input_ids")
        encoded.pop("attention_mask", None)
        token_tensors = {name: each for name, each in encoded.items() if each.shape == ids.shape}
        token_ids = ids[0].tolist()
        tokens = _TokenizedConversation(
            token_ids, _mark_after_prefix(token_ids, prompt_ids[0].tolist()), self._find_image_end(token_ids)
        )
        return {**encoded, **self._fit_to_length(tokens, token_tensors)}

    def _read_processor(self) -> Any:
        from transformers import AutoProcessor

        try:
            return AutoProcessor.from_pretrained(self._source, trust_remote_code=self._trust_remote_code)
        except ImportError as error:
            raise missing_package(f"{self._source}: its processor", error) from error
        except Exception as error:  # a processor class may raise anything
            raise InputError(
                f"{self._source}: its processor cannot be read: {type(error).__name__}: "
                f"{one_line((str(error).splitlines() or ['no reason'])[0], 300)}; remove processor_config.json and "
                "preprocessor_config.json to use synthetic images"
            ) from error

    def _find_image_end(self, ids: list[int]) -> int:
        """Return the number of tokens up to the end of the last image and of the special tokens that follow it.

        Without an image token, only the first token and the special tokens after it count.
        """
        names = ("image_token_id", "image_token_index")
        token = next((self._values[each] for each in names if self._values.get(each) is not None), None)
        special = set(self._tokenizer.all_special_ids)
        end = max((index for index, each in enumerate(ids) if each == token), default=0) + 1
        while end < len(ids) and ids[end] in special:
            end += 1
        return end


def _mark_after_prefix(ids: list[int], prefix: list[int]) -> list[bool]:
    """Return, for each token of `ids`, True if it is after the common prefix of both lists."""
    common_length = next(
        (index for index, (a, b) in enumerate(zip(ids, prefix, strict=False)) if a != b), min(len(ids), len(prefix))
    )
    return [index >= common_length for index in range(len(ids))]


def _bytes_of(image: Any) -> bytes:
    """Return bytes that identify an image of `QuestionExample`: its pixels, or its encoded file."""
    if isinstance(image, Tensor):
        image = image.contiguous().numpy()
    if isinstance(image, Mapping):
        return bytes(image["bytes"])
    if hasattr(image, "tobytes"):
        return bytes(image.tobytes())
    return repr(image).encode()


def _to_rgb_image(image: Any) -> Any:
    """Return an image as processors take it: a tensor unchanged, any other image as an RGB PIL image."""
    if isinstance(image, Mapping):  # encoded bytes, if the dataset does not declare an image column
        try:
            from PIL import Image
        except ImportError as error:
            raise missing_package("an image of the dataset", error) from error
        image = Image.open(io.BytesIO(image["bytes"]))
    return image.convert("RGB") if hasattr(image, "convert") else image
