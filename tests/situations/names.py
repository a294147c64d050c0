"""Situations of names: several models in one checkpoint, one tensor under two names, prefixes nobody finds again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.situations.box import Box, situation
from tests.support.checkpoint_writers import LLAMA, Value, llama, value, write_dcp, write_hf

AREA = "names"
MODEL = llama(layers=1, hidden=4, vocab=6, inner=8)
NORM = "model.norm.weight"


def under(prefix: str, seed: int = 0, only: int | None = None) -> dict[str, Value]:
    """The model, or the first tensors of it, below a prefix; bytes differ from seed to seed."""
    return {
        prefix + name: value(tensor[0], *tensor[1], seed=seed + at) if seed else tensor
        for at, (name, tensor) in enumerate(list(MODEL.items())[:only])
    }


def dcp(box: Box, tensors: Mapping[str, Value], name: str = "step", config: Any = LLAMA, **settings: Any) -> Any:
    return write_dcp(box.root / name, tensors, config=config, **settings)


def dcp2hf(box: Box, source: Any, *options: Any) -> tuple[Any, ...]:
    return ("convert", "to-hf", source, box.dst, *options)


# -- several models

TWO = {
    "a model and its EMA": ("model.", "ema."),
    "a model without a prefix and one under ema.": ("", "ema."),
    "a model and an average below one container": ("state.model.", "state.ema."),
    "a student and a teacher, both under the same name": ("student.net.", "teacher.net."),
    "the average behind an index": ("model.", "averages.0."),
    "the average behind four components": ("model.", "a.b.c.d."),
    "the average inside the wrapper of torch.optim.swa_utils": ("model.", "ema.module."),
    "two prefixes with the same beginning": ("model.", "model_ema."),
    "one prefix inside the other": ("model.", "model.ema."),
    "a prefix of two dots": ("model.", "..",),
    "a prefix with a newline and an escape sequence in it": ("model.", "e\x1b[31m\nma."),
    "a prefix that is a name of the class": ("model.", "lm_head."),
}  # fmt: skip
for _name, _prefixes in TWO.items():

    @situation(AREA, f"two complete models, {_name}", 3, "holds 2 complete models.*--source-prefix")
    def _(box: Box, prefixes: tuple[str, str] = _prefixes) -> Any:
        return dcp2hf(box, dcp(box, under(prefixes[0]) | under(prefixes[1], seed=100)))

    @situation(AREA, f"two complete models, {_name}, and one is chosen", 0, "second model.*not converted")
    def _(box: Box, prefixes: tuple[str, str] = _prefixes) -> Any:
        return dcp2hf(box, dcp(box, under(prefixes[0]) | under(prefixes[1], seed=100)), "--source-prefix", prefixes[0])


@situation(AREA, "seven complete models", 3, "holds 7 complete models")
def _(box: Box) -> Any:
    tensors = {k: v for at in range(7) for k, v in under(f"expert{at}.", seed=100 * at).items()}
    return dcp2hf(box, dcp(box, tensors))


@situation(AREA, "400 complete models, whose prefixes are too many for one line", 3, "holds 400.*392 more")
def _(box: Box) -> Any:
    tiny = {name: value("BF16", 1) for name in MODEL}
    return dcp2hf(box, dcp(box, {f"m{at}.{name}": each for at in range(400) for name, each in tiny.items()}))


@situation(AREA, "an EMA of the trained parameters only", 0, 'part of a second model under "ema.": 5 tensors')
def _(box: Box) -> Any:
    return dcp2hf(box, dcp(box, under("model.") | under("ema.", seed=100, only=5)))


@situation(AREA, "the EMA is complete and the model is not", 0, 'part of a second model under "model."')
def _(box: Box) -> Any:
    return dcp2hf(box, dcp(box, under("ema.") | under("model.", seed=100, only=9)))


@situation(AREA, "a critic with another head", 0, 'part of a second model under "critic.": 11 tensors')
def _(box: Box) -> Any:
    return dcp2hf(
        box, dcp(box, under("actor.") | under("critic.", seed=100, only=11) | {"critic.v.w": value("F32", 1)})
    )


@situation(AREA, "moments under the names of the model", 0, "dropped: 24 tensors, 880 B")
def _(box: Box) -> Any:
    return dcp2hf(box, dcp(box, under("state.model.") | under("exp_avg.", seed=9) | under("exp_avg_sq.", seed=99)))


@situation(AREA, "--source-prefix of moments", 3, "optimizer state")
def _(box: Box) -> Any:
    return dcp2hf(box, dcp(box, under("model.") | under("exp_avg.", seed=9)), "--source-prefix", "exp_avg.")


@situation(AREA, "--source-prefix of a third model that is not there", 3, 'no tensor name begins with "teacher."')
def _(box: Box) -> Any:
    return dcp2hf(box, dcp(box, under("model.") | under("ema.", seed=9)), "--source-prefix", "teacher.")


@situation(AREA, "two models of a class that nobody knows", 0, 'the same names under "ema.", "model."')
def _(box: Box) -> Any:
    tensors = under("model.") | under("ema.", seed=9)
    return dcp2hf(box, dcp(box, tensors, config={"architectures": ["a-b"]}), "--base", "none")


for _command in ("verify", "diff"):

    @situation(AREA, f"{_command} of a step with two models", 3, "holds 2 complete models.*--source-prefix")
    def _(box: Box, command: str = _command) -> Any:
        return command, write_hf(box.root / "hf", MODEL), dcp(box, under("model.") | under("ema.", seed=9))

    @situation(AREA, f"{_command} of two steps with other models in each", 3, "holds 2 complete models")
    def _(box: Box, command: str = _command) -> Any:
        first = dcp(box, under("model.") | under("ema.", seed=9))
        return command, first, dcp(box, under("s.") | under("t.", seed=9), "b"), "--source-prefix", "model."

    @situation(AREA, f"{_command} with a prefix that neither has", 3, "neither .* with a model under")
    def _(box: Box, command: str = _command) -> Any:
        return command, dcp(box, under("model.")), dcp(box, MODEL, "b"), "--source-prefix", "ema."


@situation(AREA, "verify of the second model against the first", 1, "content|differ")
def _(box: Box) -> Any:
    first = write_hf(box.root / "hf", MODEL)
    return "verify", first, dcp(box, under("model.") | under("ema.", seed=9)), "--source-prefix", "ema."


@situation(AREA, "inspect of a step with two models", 0, "holds 2 complete models")
def _(box: Box) -> Any:
    return "inspect", dcp(box, under("model.") | under("ema.", seed=9))


@situation(AREA, "reshard of a step with two models", 3, "holds 2 complete models")
def _(box: Box) -> Any:
    return "reshard", dcp(box, under("model.") | under("ema.", seed=9)), box.dst, "--tp", "1"


# -- two names

SECOND = {
    "in one wrapper": f"_orig_mod.{NORM}",
    "in a wrapper far inside": "model.norm._checkpoint_wrapped_module.weight",
    "in two wrappers": "_fsdp_wrapped_module.model._orig_mod.norm.weight",
    "in module": f"module.{NORM}",
    "in the same wrapper twice": f"module.module.{NORM}",
    "without the base model's prefix": "norm.weight",
}
for _name, _second in SECOND.items():

    @situation(
        AREA, f"a tensor stored again {_name}, with other bytes", 3, "one parameter under two names.*different bytes"
    )
    def _(box: Box, second: str = _second) -> Any:
        return dcp2hf(box, dcp(box, MODEL | {second: value("BF16", 4, seed=77)}))

    @situation(
        AREA, f"a tensor stored again {_name}, with the same bytes", 0, "stored under two names with equal bytes"
    )
    def _(box: Box, second: str = _second) -> Any:
        return dcp2hf(box, dcp(box, MODEL | {second: MODEL[NORM]}))

    @situation(AREA, f"a tensor stored again {_name}, sharing its bytes", 0, "stored under two names with equal bytes")
    def _(box: Box, second: str = _second) -> Any:
        return dcp2hf(box, dcp(box, MODEL, aliases={second: NORM}))


@situation(AREA, "a tensor stored again in a wrapper, in another dtype", 3, "different dtypes, BF16 and F16")
def _(box: Box) -> Any:
    return dcp2hf(box, dcp(box, MODEL | {f"module.{NORM}": ("F16", *MODEL[NORM][1:])}))


@situation(AREA, "a tensor stored again in a wrapper, in another shape", 3, r"different shapes, \[4\] and \[2, 2\]")
def _(box: Box) -> Any:
    return dcp2hf(box, dcp(box, MODEL | {f"module.{NORM}": ("BF16", (2, 2), MODEL[NORM][2])}))


@situation(
    AREA, "a tensor with and without the prefix, with other bytes", 3, 'choose the first with --source-prefix "model."'
)
def _(box: Box) -> Any:
    return dcp2hf(box, dcp(box, under("model.") | {NORM: value("BF16", 4, seed=77)}))


@situation(AREA, "a tensor with and without the prefix, and the prefix is given", 0, "part of a second model without")
def _(box: Box) -> Any:
    return dcp2hf(box, dcp(box, under("model.") | {NORM: value("BF16", 4, seed=77)}), "--source-prefix", "model.")


@situation(AREA, "the damaged archive of a second name", 3)
def _(box: Box) -> Any:
    name = f"module.{NORM}"
    return dcp2hf(box, dcp(box, MODEL | {name: MODEL[NORM]}, payloads={name: b"PK\x03\x04" + bytes(90)}))


@situation(AREA, "moments with and without a wrapper that differ, and are kept", 3, "one parameter under two names")
def _(box: Box) -> Any:
    names = [f"optimizer.state.{lead}{NORM}.exp_avg" for lead in ("", "module.")]
    return "reshard", dcp(box, MODEL | {n: value("F32", 4, seed=at) for at, n in enumerate(names)}), box.dst


@situation(AREA, "moments with and without a wrapper that differ, and are dropped", 0, "2 tensors, 32 B")
def _(box: Box) -> Any:
    names = [f"optimizer.state.{lead}{NORM}.exp_avg" for lead in ("", "module.")]
    return dcp2hf(box, dcp(box, MODEL | {n: value("F32", 4, seed=at) for at, n in enumerate(names)}))


@situation(AREA, "a module called module next to the weight of its parent, in an unknown class", 0, '"module." kept')
def _(box: Box) -> Any:
    tensors = {"a.weight": value("F32", 2), "a.module.weight": value("F32", 2, seed=1)}
    return dcp2hf(box, dcp(box, tensors, config=None), "--base", "none")


@situation(AREA, "an old name next to the new one, with other bytes", 3, "one parameter under two names")
def _(box: Box) -> Any:
    names = {
        f"bert.embeddings.LayerNorm.{leaf}": value("F32", 2, seed=at) for at, leaf in enumerate(("gamma", "weight"))
    }
    source = write_hf(box.root / "hf", names, config={"architectures": ["BertModel"], "model_type": "bert"})
    return "convert", "to-dcp", source, box.dst, "--allow-config-mismatch"


@situation(AREA, "20,000 names in wrappers that collide", 3, "one parameter under two names")
def _(box: Box) -> Any:
    tensors = {f"model.layers.{at}.input_layernorm.weight": value("BF16", 1, seed=at) for at in range(10000)}
    wrapped = {f"module.{name}": value("BF16", 1, seed=-at - 1 & 0xFFFF) for at, name in enumerate(tensors)}
    return dcp2hf(box, dcp(box, tensors | wrapped), "--allow-config-mismatch")


# -- prefixes that are added

for _prefix in (
    "optimizer.", "state.optim.", "exp_avg.", "step.", "0.", "app.3.", "module.", "model._orig_mod.", "a.b.c.d.", "x",
    "lr_scheduler", "*.", "a.*.", "p" * 5000 + ".",
):  # fmt: skip

    @situation(AREA, f"convert to-dcp --prefix {_prefix[:20]}", 2, "--prefix .*choose another prefix")
    def _(box: Box, prefix: str = _prefix) -> Any:
        return "convert", "to-dcp", write_hf(box.root / "hf", MODEL), box.dst, "--prefix", prefix


for _prefix in ("optimizer.", "0.", "module."):

    @situation(AREA, f"reshard --to dcp --prefix {_prefix}", 2, "--prefix .*choose another prefix")
    def _(box: Box, prefix: str = _prefix) -> Any:
        source = write_hf(box.root / "hf", MODEL)
        return "reshard", source, box.dst, "--to", "dcp", "--prefix", prefix


@situation(
    AREA, "convert to-dcp --prefix to torchtitan's names, which are not found below one", 2, "choose another prefix"
)
def _(box: Box) -> Any:
    config = LLAMA | {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 4, "intermediate_size": 8}
    source = write_hf(box.root / "hf", MODEL, config=config | {"vocab_size": 6})
    return "convert", "to-dcp", source, box.dst, "--names", "torchtitan", "--prefix", "model."


@situation(AREA, "inspect --source-prefix of safetensors", 2, "--source-prefix")
def _(box: Box) -> Any:
    return "inspect", write_hf(box.root / "hf", MODEL), "--source-prefix", "model."
