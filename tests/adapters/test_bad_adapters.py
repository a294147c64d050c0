"""Damaged and unsupported adapters: each is an error with its exit code, in one line, and nothing is written.

The adapters are written by hand: those of PEFT would need training, and PEFT does not write most of these.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ckptx
from ckptx.cli.main import cli
from ckptx.errors import CkptxError, InputError, OutputError, UnsupportedError, UsageError
from tests.support.checkpoint_writers import LLAMA, Value, array, llama, value, write_hf, write_safetensors
from tests.support.runner import CliRunner

WEIGHTS = "adapter_model.safetensors"
ARCHIVE = "adapter_model.bin"
CONFIG = "adapter_config.json"
HIDDEN, INNER, VOCAB, RANK = 8, 24, 16, 4
LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj")
Q = LAYERS[0]
LLAMA_CONFIG: dict[str, Any] = {
    **LLAMA, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": VOCAB,
}  # fmt: skip
LORA_CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "bias": "none",
    "base_model_name_or_path": "org/tiny", "use_dora": False, "use_rslora": False, "fan_in_fan_out": False,
    "init_lora_weights": True, "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None,
    "task_type": "CAUSAL_LM",
}  # fmt: skip


class Hostile:
    """Object whose pickle makes a directory in the working directory when it is executed."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, ("was-executed",)


def floats(*shape: int, seed: int = 0) -> Value:
    """Return a float32 tensor of normal random numbers."""
    return array(np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32))


def zeros(*shape: int) -> Value:
    return array(np.zeros(shape, np.float32))


def stored(name: str) -> str:
    """Return the stored name of a tensor of the adapter."""
    return f"base_model.model.{name}"


def a_of(module: str) -> str:
    return stored(f"{module}.lora_A.weight")


def b_of(module: str) -> str:
    return stored(f"{module}.lora_B.weight")


def lora_tensors(hidden: int = HIDDEN, inner: int = INNER, modules: tuple[str, ...] = LAYERS) -> dict[str, Value]:
    """Return the tensors of an adapter for some modules."""
    tensors = {}
    for seed, module in enumerate(modules):
        columns = inner if module.endswith("down_proj") else hidden
        tensors[a_of(module)] = floats(RANK, columns, seed=seed)
        tensors[b_of(module)] = floats(hidden, RANK, seed=seed + 100)
    return tensors


@dataclass
class Inputs:
    """A model, an adapter and a second adapter that a test can change before they are written.

    Attributes:
        root: Directory of all of them.
        tensors: Tensors of the adapter.
        config: Config of the adapter.
        second: Tensors of the second adapter.
        second_config: Config of the second adapter.
        base: Tensors of the model.
        base_config: Config of the model.
        model: Argument MODEL.
        adapter: Argument ADAPTER.
        dst: Argument DST.
        options: Options of `merge`.
    """

    root: Path
    tensors: dict[str, Value] = field(default_factory=lora_tensors)
    config: dict[str, Any] = field(default_factory=lambda: dict(LORA_CONFIG))
    second: dict[str, Value] = field(default_factory=lambda: lora_tensors(modules=LAYERS[:1]))
    second_config: dict[str, Any] = field(default_factory=lambda: dict(LORA_CONFIG))
    base: dict[str, Value] = field(default_factory=llama)
    base_config: dict[str, Any] = field(default_factory=lambda: dict(LLAMA_CONFIG))
    model: Path | str = ""
    adapter: Path | str = ""
    dst: Path = Path()
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model, self.adapter = self.root / "model", self.root / "adapter"
        self.dst = self.root / "out" / "merged"
        self.dst.parent.mkdir()

    def write(self) -> None:
        write_hf(Path(self.model), self.base, config=self.base_config)
        for name, tensors, config in (
            ("adapter", self.tensors, self.config), ("second", self.second, self.second_config)
        ):  # fmt: skip
            write_safetensors(self.root / name / WEIGHTS, tensors)
            (self.root / name / CONFIG).write_text(json.dumps(config))

    def merge(self) -> Any:
        return ckptx.merge(self.model, self.adapter, self.dst, **self.options)


def ignore(inputs: Inputs) -> None:
    """Change nothing."""


def configured(**values: Any) -> Callable[[Inputs], None]:
    """Return a change of values in the config of the adapter; the value `...` removes one."""

    def change(inputs: Inputs) -> None:
        inputs.config |= values
        for name in [name for name, each in values.items() if each is ...]:
            del inputs.config[name]

    return change


def changed(**tensors: Value | None) -> Callable[[Inputs], None]:
    """Return a change of A or B of the first layer; None removes it."""

    def change(inputs: Inputs) -> None:
        for kind, tensor in tensors.items():
            name = stored(f"{Q}.lora_{kind}" + (".weight" if kind in "AB" else ""))
            inputs.tensors.pop(name, None)
            if tensor is not None:
                inputs.tensors[name] = tensor

    return change


def added(**tensors: Value) -> Callable[[Inputs], None]:
    """Return a change that adds tensors to the adapter; `__` in a name stands for a dot."""

    def change(inputs: Inputs) -> None:
        inputs.tensors |= {stored(name.replace("__", ".")): tensor for name, tensor in tensors.items()}

    return change


def called(**options: Any) -> Callable[[Inputs], None]:
    """Return a change of the options of `merge`; in texts, {second} is the second adapter and {adapter} the first."""

    def change(inputs: Inputs) -> None:
        paths = {"second": str(inputs.root / "second"), "adapter": str(inputs.adapter)}
        for name, each in options.items():
            is_list = isinstance(each, list)
            inputs.options[name] = [text.format(**paths) for text in each] if is_list else each

    return change


def both(*changes: Callable[[Inputs], None]) -> Callable[[Inputs], None]:
    def change(inputs: Inputs) -> None:
        for each in changes:
            each(inputs)

    return change


def base_of(**settings: Any) -> Callable[[Inputs], None]:
    """Return a change of the model to a Llama of other sizes."""

    def change(inputs: Inputs) -> None:
        inputs.base = llama(**settings)
        names = {"hidden": "hidden_size", "layers": "num_hidden_layers"}
        inputs.base_config |= {names[key]: each for key, each in settings.items() if key in names}

    return change


def other_model(inputs: Inputs) -> None:
    renamed = {name.replace("model.layers", "transformer.h"): each for name, each in inputs.base.items()}
    inputs.base, inputs.base_config = renamed, {"architectures": ["TinyForCausalLM"], "model_type": "tiny"}


def of_one_rank(inputs: Inputs) -> None:
    inputs.tensors[b_of(Q)] = floats(HIDDEN // 2, RANK)


def two_adapters_in_one(inputs: Inputs) -> None:
    first = {name.replace(".weight", ".default.weight"): each for name, each in inputs.tensors.items()}
    inputs.tensors = first | {name.replace(".default.", ".other."): each for name, each in first.items()}


def two_adapters_of_other_layers(inputs: Inputs) -> None:
    inputs.tensors = {
        name.replace(".weight", f".{'default' if '.0.' in name else 'other'}.weight"): each
        for name, each in inputs.tensors.items()
    }


def with_magnitudes(inputs: Inputs) -> None:
    inputs.tensors |= {stored(f"{module}.lora_magnitude_vector"): floats(HIDDEN) for module in LAYERS}


def with_dora(inputs: Inputs) -> None:
    with_magnitudes(inputs)
    inputs.config["use_dora"] = True


def dora_overflow(inputs: Inputs) -> None:
    with_dora(inputs)
    changed(A=array(np.full((RANK, HIDDEN), 1e10, np.float32)), B=array(np.full((HIDDEN, RANK), 1e10, np.float32)))(
        inputs
    )


def dora_of_zeros(inputs: Inputs) -> None:
    with_dora(inputs)
    inputs.base[f"{Q}.weight"] = ("BF16", (HIDDEN, HIDDEN), bytes(2 * HIDDEN * HIDDEN))
    inputs.tensors[b_of(Q)] = zeros(HIDDEN, RANK)


def experts(inputs: Inputs) -> None:
    inputs.config["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    module = "model.layers.0.mlp.experts"
    inputs.tensors |= {
        stored(f"{module}.base_layer.lora_A.weight"): floats(8, 8), stored(f"{module}.base_layer.lora_B.weight"):
        floats(8, 8), a_of(module): floats(8, 8), b_of(module): floats(8, 8),
    }  # fmt: skip


def long_name(inputs: Inputs) -> None:
    inputs.config["rank_pattern"] = {".*.*q_proj": RANK}
    inputs.tensors |= {a_of("q" * 400): floats(RANK, HIDDEN), b_of("q" * 400): floats(HIDDEN, RANK)}


def zero_b(inputs: Inputs) -> None:
    inputs.tensors |= {b_of(module): zeros(HIDDEN, RANK) for module in LAYERS}


def fp16_overflow(inputs: Inputs) -> None:
    inputs.base = llama(dtype="F16")
    changed(A=array(np.full((RANK, HIDDEN), 300, np.float32)), B=array(np.full((HIDDEN, RANK), 300, np.float32)))(
        inputs
    )


def quantized(inputs: Inputs) -> None:
    for name in [name for name in inputs.base if name.endswith("_proj.weight")]:
        shape = inputs.base[name][1]
        inputs.base[name] = value("F8_E4M3", *shape)
        inputs.base[f"{name}_scale_inv"] = floats(1, 1)
    inputs.base_config["quantization_config"] = {
        "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"
    }  # fmt: skip


def integer_model(inputs: Inputs) -> None:
    inputs.base[f"{Q}.weight"] = value("I32", HIDDEN, HIDDEN)


def written(change: Callable[[Inputs], None]) -> Callable[[Inputs], None]:
    """Return a change of the files after they are written."""

    def change_files(inputs: Inputs) -> None:
        inputs.write()
        inputs.write = lambda: None  # type: ignore[method-assign]
        change(inputs)

    return change_files


def file_with(name: str, content: bytes | None) -> Callable[[Inputs], None]:
    """Return a change that writes a file of the adapter; None removes it."""

    def change(inputs: Inputs) -> None:
        file = inputs.root / "adapter" / name
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)

    return written(change)


@written
def truncated(inputs: Inputs) -> None:
    file = inputs.root / "adapter" / WEIGHTS
    file.write_bytes(file.read_bytes()[:-10])


@written
def hostile_pickle(inputs: Inputs) -> None:
    (inputs.root / "adapter" / WEIGHTS).unlink()
    torch.save({a_of(Q): Hostile()}, inputs.root / "adapter" / ARCHIVE)


@written
def hostile_old_pickle(inputs: Inputs) -> None:
    (inputs.root / "adapter" / WEIGHTS).unlink()
    (inputs.root / "adapter" / ARCHIVE).write_bytes(pickle.dumps(Hostile()))


@written
def large_config(inputs: Inputs) -> None:
    file = inputs.root / "adapter" / CONFIG
    text = file.read_text()
    with file.open("w") as opened:
        opened.write(text[:-1])
        opened.truncate(200 << 20)


def config_text(text: str) -> Callable[[Inputs], None]:
    return file_with(CONFIG, text.encode())


def swapped(inputs: Inputs) -> None:
    inputs.write()
    inputs.write = lambda: None  # type: ignore[method-assign]
    inputs.model, inputs.adapter = inputs.adapter, inputs.model


def adapter_is_model(inputs: Inputs) -> None:
    inputs.write()
    inputs.write = lambda: None  # type: ignore[method-assign]
    inputs.adapter = shutil.copytree(inputs.model, inputs.root / "other")


def dst_at(*parts: str) -> Callable[[Inputs], None]:
    def change(inputs: Inputs) -> None:
        inputs.dst = inputs.root.joinpath(*parts)

    return change


def saved_head(inputs: Inputs) -> None:
    inputs.config["modules_to_save"] = ["lm_head"]
    inputs.tensors[stored("lm_head.weight")] = floats(VOCAB, HIDDEN)


def second_saved_head(inputs: Inputs) -> None:
    inputs.second_config["modules_to_save"] = ["lm_head"]
    inputs.second[stored("lm_head.weight")] = floats(VOCAB, HIDDEN)


def second_on_head(inputs: Inputs) -> None:
    inputs.second = {a_of("lm_head"): floats(RANK, HIDDEN), b_of("lm_head"): floats(VOCAB, RANK)}


def in_hub_cache(inputs: Inputs) -> None:
    inputs.model = inputs.root / "models--org--name" / "snapshots" / "abc"
    inputs.config["base_model_name_or_path"] = "other/name"


def t5(inputs: Inputs) -> None:
    """Change the output head only of a T5, whose class always ties it to the embedding."""
    shapes: dict[str, tuple[int, ...]] = {"shared.weight": (VOCAB, HIDDEN)}
    for side in ("encoder", "decoder"):
        shapes[f"{side}.final_layer_norm.weight"] = (HIDDEN,)
        kinds = [(0, "SelfAttention", "qkvo")] + ([(1, "EncDecAttention", "qkvo")] if side == "decoder" else [])
        for index, attention, names in kinds:
            block = f"{side}.block.0.layer.{index}"
            shapes |= {f"{block}.{attention}.{each}.weight": (HIDDEN, HIDDEN) for each in names}
            shapes[f"{block}.layer_norm.weight"] = (HIDDEN,)
        shapes[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = (32, 2)
        block = f"{side}.block.0.layer.{len(kinds)}"
        shapes |= {f"{block}.DenseReluDense.wi.weight": (INNER, HIDDEN), f"{block}.layer_norm.weight": (HIDDEN,)}
        shapes[f"{block}.DenseReluDense.wo.weight"] = (HIDDEN, INNER)
    inputs.base = {name: value("F32", *shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    inputs.base_config = {
        "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_model": HIDDEN, "d_kv": 4,
        "d_ff": INNER, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2, "vocab_size": VOCAB,
        "tie_word_embeddings": True, "torch_dtype": "float32",
    }  # fmt: skip
    inputs.tensors = {a_of("lm_head"): floats(RANK, HIDDEN), b_of("lm_head"): floats(VOCAB, RANK)}


class Case(NamedTuple):
    """An input that is refused.

    Attributes:
        name: Name of the test.
        change: Changes the inputs before they are written.
        error: Class of the error.
        message: Part of its message.
    """

    name: str
    change: Callable[[Inputs], None]
    error: type[CkptxError]
    message: str


NAN = floats(RANK, HIDDEN)
NAN = (NAN[0], NAN[1], np.float32(np.nan).tobytes() + NAN[2][4:])
INF = (NAN[0], NAN[1], np.float32(np.inf).tobytes() + NAN[2][4:])
WRONG_MODEL = "pass the model that the adapter was trained on"
INCOMPLETE = "the adapter is incomplete, save it again"
# fmt: off
# Python 3.10 accepts flags that are not at the beginning of the expression, and so does PEFT there.
_LATE_FLAGS = ["(?i)Q_PROJ"] if sys.version_info >= (3, 11) else []
CASES = [
    # The model is another one.
    Case("other hidden size", base_of(hidden=16), InputError, WRONG_MODEL),
    Case("fewer layers", base_of(layers=1), InputError, WRONG_MODEL),
    Case("another model", other_model, InputError, WRONG_MODEL),
    Case("model and adapter exchanged", swapped, UnsupportedError, "is an adapter, not a model"),
    Case("adapter is a model", adapter_is_model, InputError, "is not an adapter (format: huggingface)"),
    Case("another model in the Hub cache", in_hub_cache, InputError, "was trained on other/name"),
    Case("quantized model", quantized, UnsupportedError, "--dequantize"),
    Case("integer weight", integer_model, UnsupportedError, "stored as I32"),
    Case("T5 head", t5, UnsupportedError, "always ties"),
    # Tensors of the adapter.
    Case("half of B", of_one_rank, InputError, WRONG_MODEL),
    Case("A of ZeRO-3", changed(A=floats(0)), InputError, "[rank, in] and [out, rank] are required"),
    Case("one-dimensional A", changed(A=floats(RANK * HIDDEN)), InputError, "a rank saved its own part"),
    Case("no B", changed(B=None), InputError, f"no lora_B; {INCOMPLETE}"),
    Case("no A", changed(A=None), InputError, f"no lora_A; {INCOMPLETE}"),
    Case("ranks of A and B differ", changed(B=floats(HIDDEN, 2)), InputError, "A has shape [4, 8] and B [8, 2]"),
    Case("A of an embedding", changed(embedding_A=floats(RANK, 8)), InputError, "no lora_embedding_B"),
    Case("zero B", zero_b, InputError, "changes nothing"),
    Case("NaN", changed(A=NAN), InputError, "NaN or infinite"),
    Case("infinity", changed(A=INF), InputError, "NaN or infinite"),
    Case("overflow of float16", fp16_overflow, InputError, "out of range for F16"),
    Case("overflow of the scaling", configured(lora_alpha=1e308), InputError, "NaN or out of range for BF16"),
    Case("overflow of the norms of DoRA", dora_overflow, InputError, "a norm that is out of range"),
    Case("a row of zeros with DoRA", dora_of_zeros, InputError, "is zero or has a norm"),
    Case("integers", changed(A=value("I32", RANK, HIDDEN)), UnsupportedError, "has dtype I32"),
    Case("float8", changed(A=value("F8_E4M3", RANK, HIDDEN)), UnsupportedError, "has dtype F8_E4M3"),
    Case("two adapters", two_adapters_in_one, InputError, "save one adapter into each directory"),
    Case("two adapters of layers", two_adapters_of_other_layers, InputError, 'several adapters ("default", "other")'),
    Case("replaced by another shape", added(lm_head__weight=floats(9, 8)), InputError, "vocabulary that grew"),
    Case("unknown tensor", added(model__x__weight=floats(9, 8)), InputError, 'changes "model.x.weight"'),
    Case("prompt", added(prompt_embeddings=floats(2, 8)), UnsupportedError, "a kind of adapter"),
    Case("experts of another class", experts, InputError, "fit none of its parameters"),
    # Settings.
    Case("no alpha", configured(lora_alpha=...), InputError, "lora_alpha is missing"),
    *(
        Case(f"alpha {alpha!r:.12}", configured(lora_alpha=alpha), InputError, "a finite number other than 0")
        for alpha in (0, float("nan"), float("inf"), "8", True, [8])
    ),
    Case("alpha of 401 digits", configured(lora_alpha=10**400), InputError, "a number of more than 320 bits"),
    Case("no r", configured(r=...), InputError, "r is missing"),
    *(
        Case(f"r {rank!r}", configured(r=rank), InputError, "a rank, an integer from 1")
        for rank in (0, -4, 4.0, "4", True, 1 << 40)
    ),
    Case("r of other tensors", configured(r=8), InputError, "have rank 4, but the config gives it rank 8"),
    Case("rank_pattern of other tensors", configured(rank_pattern={"q_proj": 2}), InputError, "gives it rank 2"),
    Case("rank_pattern is a list", configured(rank_pattern=["q_proj"]), InputError, "an object is required"),
    Case("rank_pattern of strings", configured(rank_pattern={"q_proj": "4"}), InputError, "a rank, an integer"),
    *(
        Case(f"rank_pattern {pattern!r}", configured(rank_pattern={pattern: 4}), InputError, "a regular expression")
        for pattern in ("(q_proj", "*", "(?P<a>.)(?P=b)", *_LATE_FLAGS, "x\n(", "[z-a]")
    ),
    *(
        Case(f"rank_pattern {pattern:.20}", configured(rank_pattern={pattern: 4}), UnsupportedError, "very long")
        for pattern in (
            "(a+)+$", "(.*)*x", "(.*){30}x", "((m|o|d|e|l|.)+)+x", ".*.*.*.*.*.*x", ".?" * 60 + "x", "(.|.)" * 40 + "x",
            ".*" * 200, "(" + "|" * 90 + ")" + "(" + "|" * 90 + ")" + "(" + "|" * 90 + ")" + "x", r"\\*.*\\*.*\\*.*x",
            "(?x:(.+) #x\n+)x", "q" * 500,
        )
    ),
    Case("very long name", long_name, UnsupportedError, "a name of 400 characters"),
    Case("alpha_pattern", configured(alpha_pattern={"(a+)+$": 4}), UnsupportedError, "very long"),
    Case("alpha_pattern of 0", configured(alpha_pattern={"q_proj": 0}), InputError, "a finite number other than 0"),
    Case("no type", configured(peft_type=...), UnsupportedError, "has no peft_type"),
    *(
        Case(f"type {kind!r:.9}", configured(peft_type=kind), UnsupportedError, "reads LoRA adapters only")
        for kind in ("IA3", "LOHA", "ADALORA", ["LORA"], "x\n" * 9, "x" * 9999)
    ),
    Case("DoRA without magnitudes", configured(use_dora=True), InputError, "no lora_magnitude_vector"),
    Case("magnitudes without DoRA", with_magnitudes, InputError, "use_dora is false"),
    Case("use_dora is a string", configured(use_dora="yes"), InputError, "true or false is required"),
    *(
        Case(init, configured(init_lora_weights=init), UnsupportedError, "changes the weights of the base")
        for init in ("pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga")
    ),
    *(
        Case(name, configured(**{name: setting}), UnsupportedError, name)
        for name, setting in {
            "alora_invocation_tokens": [1, 2], "arrow_config": {"top_k": 2}, "layer_replication": [[0, 2], [1, 2]],
            "trainable_token_indices": [1], "use_qalora": True, "use_bdlora": {"target_modules_bd_a": []},
            "megatron_config": {"x": 1},
        }.items()
    ),
    Case("bias", configured(bias="some"), InputError, '"lora_only" is required'),
    Case("base is a list", configured(base_model_name_or_path=[1]), InputError, "a string is required"),
    Case("modules_to_save", configured(modules_to_save="lm_head"), InputError, "a list of names is required"),
    # Files.
    Case("no config", file_with(CONFIG, None), UnsupportedError, "without both adapter_config.json and"),
    Case("no weights", file_with(WEIGHTS, None), UnsupportedError, "without both adapter_config.json and"),
    Case("empty config", config_text(""), InputError, "adapter_config.json"),
    Case("config is a list", config_text("[]"), InputError, "expected a JSON object, found a list"),
    Case("duplicate keys", config_text('{"peft_type": "LORA", "r": 4, "r": 8}'), InputError, '"r"'),
    Case("large config", large_config, InputError, "adapter_config.json"),
    Case("empty weights", file_with(WEIGHTS, b""), InputError, WEIGHTS),
    Case("no tensors", lambda inputs: inputs.tensors.clear(), InputError, "no tensors"),
    Case("truncated weights", truncated, InputError, "truncated"),
    Case("hostile pickle", hostile_pickle, InputError, ARCHIVE),
    Case("hostile old pickle", hostile_old_pickle, InputError, ARCHIVE),
    # Arguments.
    Case("DST is the adapter", both(dst_at("adapter"), called(overwrite=True)), OutputError, "overlaps the input"),
    Case("DST in the adapter", dst_at("adapter", "merged"), OutputError, "overlaps the input"),
    Case("DST contains the adapter", dst_at(), OutputError, "overlaps the input"),
    Case("DST is an added adapter", both(dst_at("second"), called(add=["{second}"], overwrite=True)), OutputError,
         "overlaps"),
    *(
        Case(f"--add {text}", called(add=[text]), UsageError, "must be ADAPTER or ADAPTER:FACTOR")
        for text in ("{second}:0", "{second}:nan", "{second}:inf", "{second}:1e999", "{second}:x", "", ":", ":0.5")
    ),
    Case("an empty path", lambda inputs: setattr(inputs, "adapter", ""), InputError, "no such file"),
    Case("the same adapter", called(add=["{adapter}"]), UsageError, "the same adapter twice"),
    Case("the same adapter, spelled", called(add=["{adapter}/."]), UsageError, "the same adapter twice"),
    Case("the same adapter, added", called(add=["{second}", "{second}:1.0"]), UsageError, "the same adapter twice"),
    Case("--tp of HF", called(to="hf", tp=2), UsageError, "--tp requires --to dcp or --to safetensors"),
    Case("--files of HF", called(to="hf", files=2), UsageError, "--files requires --to dcp"),
    # Several adapters.
    Case(
        "factor of modules_to_save", both(second_saved_head, called(add=["{second}:0.5"])), UnsupportedError,
        "a factor of 0.5 applies to B * A only",
    ),
    Case(
        "two replacements", both(saved_head, second_saved_head, called(add=["{second}"])), UnsupportedError,
        "which another adapter replaces as well",
    ),
    Case(
        "replaced and changed", both(saved_head, second_on_head, called(add=["{second}"])), UnsupportedError,
        "replaced by one adapter and changed by another",
    ),
    Case("DoRA and another", both(with_dora, called(add=["{second}"])), UnsupportedError, "DoRA normalizes their sum"),
]
# fmt: on


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bad_adapter_is_an_error(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inputs = Inputs(tmp_path)
    case.change(inputs)
    inputs.write()
    before = tree(tmp_path)
    with pytest.raises(CkptxError) as caught:
        inputs.merge()
    assert type(caught.value) is case.error or case.error in type(caught.value).__mro__, repr(caught.value)
    assert case.message in str(caught.value)
    assert_one_line(caught.value)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["half of B", "type 'IA3'", "--add {second}:0"])
def test_the_command_line_prints_the_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (case,) = (case for case in CASES if case.name == name)
    inputs = Inputs(tmp_path)
    case.change(inputs)
    inputs.write()
    before = tree(tmp_path)
    words = ["merge", str(inputs.model), str(inputs.adapter), str(inputs.dst)]
    words += [word for text in inputs.options.get("add", ()) for word in ("--add", text)]
    result = CliRunner().invoke(cli, words, standalone_mode=False)
    assert result.return_value == case.error.exit_code
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and case.message in line
    assert tree(tmp_path) == before


def test_a_layer_with_zero_b_is_noted(tmp_path: Path) -> None:
    inputs = Inputs(tmp_path)
    inputs.tensors[b_of(Q)] = zeros(HIDDEN, RANK)
    inputs.write()
    report = inputs.merge()
    assert any(
        f'B is zero in 1 of 3 modules, which the adapter does not change: "{Q}"' in note for note in report.notes
    )
    assert changed_names(inputs) == {f"{module}.weight" for module in LAYERS[1:]}


@pytest.mark.parametrize(
    "change",
    [
        configured(lora_alpha=-8),
        configured(rank_pattern={r"layers\.(0|1)\.self_attn.*": RANK}, alpha_pattern={"^model.layers.0.*": 2.5}),
        configured(rank_pattern={f"q{i}": 1 for i in range(2000)}),
        both(in_hub_cache, called(allow_config_mismatch=True)),
        both(in_hub_cache, configured(base_model_name_or_path="Org/Name")),
        both(in_hub_cache, configured(base_model_name_or_path="/data/name")),
        both(in_hub_cache, configured(base_model_name_or_path=None)),
        both(quantized, called(dequantize=True)),
        called(add=["{second}"]),
        called(add=["{adapter}:-0.5"]),
    ],
)
def test_an_unusual_adapter_is_merged(change: Callable[[Inputs], None], tmp_path: Path) -> None:
    inputs = Inputs(tmp_path)
    change(inputs)
    inputs.write()
    inputs.merge()
    if "dequantize" not in inputs.options:
        assert changed_names(inputs) == {f"{module}.weight" for module in LAYERS}


def test_names_of_a_tied_weight_changed_by_two_adapters_are_refused(tmp_path: Path) -> None:
    """With `ensure_weight_tying` both names have one change, so that neither of two adapters may be dropped."""
    inputs = Inputs(tmp_path)
    inputs.base, inputs.base_config = llama(head=False), {**LLAMA_CONFIG, "tie_word_embeddings": True}
    inputs.tensors = {a_of("lm_head"): floats(RANK, HIDDEN), b_of("lm_head"): floats(VOCAB, RANK)}
    module = stored("model.embed_tokens")
    inputs.second = {
        f"{module}.lora_embedding_A": floats(RANK, VOCAB), f"{module}.lora_embedding_B": floats(HIDDEN, RANK)
    }  # fmt: skip
    inputs.config["ensure_weight_tying"] = True
    called(add=["{second}"])(inputs)
    inputs.write()
    before = tree(tmp_path)
    with pytest.raises(UnsupportedError, match="merge the first, then the second") as caught:
        inputs.merge()
    assert_one_line(caught.value)
    assert tree(tmp_path) == before


def test_an_adapter_that_keeps_ties_does_not_tie_the_changes_of_another(tmp_path: Path) -> None:
    inputs = Inputs(tmp_path)
    inputs.base, inputs.base_config = llama(head=False), {**LLAMA_CONFIG, "tie_word_embeddings": True}
    inputs.config["ensure_weight_tying"] = True
    second_on_head(inputs)
    called(add=["{second}"])(inputs)
    inputs.write()
    inputs.merge()
    before, after = bits_of(Path(inputs.model)), bits_of(inputs.dst)
    assert after["model.embed_tokens.weight"] == before["model.embed_tokens.weight"] != after["lm_head.weight"]


def changed_names(inputs: Inputs) -> set[str]:
    """Return the names of the tensors of the output that differ from the model."""
    before, after = (bits_of(Path(each)) for each in (inputs.model, inputs.dst))
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


def bits_of(directory: Path) -> dict[str, bytes]:
    """Return the bytes of each tensor of an HF directory."""
    data = (directory / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    spans = {name: each["data_offsets"] for name, each in header.items() if name != "__metadata__"}
    return {name: data[8 + size + begin : 8 + size + end] for name, (begin, end) in spans.items()}


VALUES = (
    None, True, False, 0, 1, -1, 4, 2.5, -0.0, 1e-320, 1e308, -1e308, 1 << 70, float("nan"), float("inf"), "", "x",
    "a\nb\x1b[2J", "lora", "LORA", "none", "all", "(", ".*", [], [1], ["q_proj"], [["q_proj"]], {}, {"q_proj": 4},
    {"(": 4}, {".*": 1e308}, {"q_proj": None}, {"": ""}, {"a\nb": "c\nd"}, "\u202e" * 200, [None] * 50,
)  # fmt: skip


def test_any_value_in_the_config_is_refused_or_merged(tmp_path: Path) -> None:
    """Random values at every key that is read, one or two at a time."""
    inputs = Inputs(tmp_path)
    inputs.write()
    keys = [*LORA_CONFIG, "revision", "target_parameters", "ensure_weight_tying", "lora_bias", "use_qalora", "unknown"]
    generator = random.Random(0)
    changes = [{key: each} for key in keys for each in generator.sample(VALUES, 15)]
    changes += [{generator.choice(keys): generator.choice(VALUES) for _ in range(2)} for _ in range(50)]
    refused = 0
    for change in changes:
        (inputs.root / "adapter" / CONFIG).write_text(json.dumps({**LORA_CONFIG, **change}))
        refused += is_refused(inputs, str(change))
    assert 100 < refused < len(changes) - 100


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, ARCHIVE])
def test_flipped_and_truncated_files_are_refused_or_merged(name: str, tmp_path: Path) -> None:
    inputs = Inputs(tmp_path)
    inputs.write()
    file, generator = inputs.root / "adapter" / name, random.Random(name)
    if name == ARCHIVE:
        save_as_archive(inputs.root / "adapter")
    whole = file.read_bytes()
    header_size = int.from_bytes(whole[:8], "little") if name == WEIGHTS else len(whole)
    refused = 0
    for i in range(200):
        position, size = generator.randrange(len(whole)), generator.randrange(len(whole))
        if i % 2:  # most flips in the header: those of values change a number only
            position = generator.randrange(min(len(whole), header_size))
        flipped = bytearray(whole)
        flipped[position] ^= generator.randrange(1, 256)
        file.write_bytes(whole[:size] if i % 4 == 0 else flipped)
        refused += is_refused(inputs, f"{i}: {position} {size}")
    assert refused > 50


def save_as_archive(adapter: Path) -> None:
    """Replace the weights of an adapter by those that torch saves."""
    tensors = load_file(adapter / WEIGHTS)
    (adapter / WEIGHTS).unlink()
    torch.save(tensors, adapter / ARCHIVE)


def is_refused(inputs: Inputs, what: str) -> bool:
    """Merge and inspect, and return True if merging is refused; then nothing was written."""
    before = tree(inputs.root)
    try:
        inputs.merge()
    except CkptxError as error:
        assert error.exit_code in (3, 4), f"{what}: exit {error.exit_code}: {error}"
        assert "\n" not in str(error) and len(str(error)) < 1000, f"{what}: {error}"
        assert tree(inputs.root) == before, what
        is_refused = True
    else:
        assert tree(inputs.root) != before, what
        shutil.rmtree(inputs.dst)
        is_refused = False
    try:
        report = ckptx.inspect(inputs.adapter)
    except CkptxError as error:
        assert is_refused and error.exit_code in (3, 4), f"{what}: {error}"
    else:
        assert is_refused or report.adapter is not None, what
    return is_refused


def assert_one_line(error: CkptxError) -> None:
    assert "\n" not in str(error) and len(str(error)) < 1000, str(error)


def tree(root: Path) -> list[str]:
    """Return all paths below a directory."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))
