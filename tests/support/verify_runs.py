"""Run `verify --run` on ranks of the pool, with and without injected faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ckptx.errors import CkptxError
from ckptx.layout.parallel_dims import ParallelDims
from ckptx.report.report import Log
from ckptx.report.verify_run import run_text
from tests.support.pool import GlooPool


def verify_on_rank(rank: int, world_size: int, reference: str, checkpoint: str, settings: dict[str, Any]) -> Any:
    """Run one rank of `verify --run`; return the report, or the class and text of its error."""
    from ckptx.options.verify import RunOptions
    from ckptx.runtime.parity.forward import verify_run

    injected = settings.pop("inject", None)
    options = RunOptions(**settings)
    try:
        with _INJECTIONS[injected]():
            report = verify_run(Path(reference), Path(checkpoint), options, Log())
    except CkptxError as error:
        return type(error).__name__, str(error)
    document = report.to_dict()
    json.loads(json.dumps(document, allow_nan=False))
    return document, run_text(report)


class _Nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class _FlippedSlice:
    """A block that flips one bit of the weights of rank 1 after loading."""

    def __enter__(self) -> None:
        from ckptx.runtime.parity import model_loaders

        self._load = model_loaders.load_from

        def load_from(model: Any, source: Any, **settings: Any) -> Any:
            ledger = self._load(model, source, **settings)
            name = "model.layers.1.mlp.up_proj.weight"
            parameter = dict(model.named_parameters()).get(name)
            if torch.distributed.get_rank() == 1 and hasattr(parameter, "to_local"):
                local = parameter.to_local().detach().view(torch.int32)  # type: ignore[union-attr]
                local[0, 0] ^= 1
            return ledger

        model_loaders.load_from = load_from  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        from ckptx.runtime.parity import model_loaders

        model_loaders.load_from = self._load


class _ZeroedGradient:
    """A block that loses the gradient of one parameter on every rank that has a shard of it."""

    def __enter__(self) -> None:
        from ckptx.runtime.parity import execution

        self._run = execution.run_step

        def run(model: Any, batches: Any, **settings: Any) -> Any:
            outcome = self._run(model, batches, **settings)
            for name, parameter in model.named_parameters():
                if name == "model.layers.0.self_attn.o_proj.weight" and hasattr(parameter, "to_local"):
                    parameter.grad = None if parameter.grad is None else parameter.grad * 0
            return outcome

        execution.run_step = run

    def __exit__(self, *_: object) -> None:
        from ckptx.runtime.parity import execution

        execution.run_step = self._run


class _OneUlp:
    """A block that changes the logits of the last stage by one ULP."""

    def __enter__(self) -> None:
        from ckptx.runtime.parity import stages as staging

        self._whole = staging.full_tensor
        staging.full_tensor = lambda tensor: torch.nextafter(self._whole(tensor), torch.tensor(torch.inf))

    def __exit__(self, *_: object) -> None:
        from ckptx.runtime.parity import stages as staging

        staging.full_tensor = self._whole


class _ImagesInSome:
    """A block that gives images to the first and the last of four microbatches, in other places on each data rank."""

    def __enter__(self) -> None:
        from ckptx.runtime.parity.model_loaders import ModelLoader

        self._batches = ModelLoader.make_batches

        def batches(loader: ModelLoader, *settings: Any) -> Any:
            found = self._batches(loader, *settings)
            return [each if index % 4 in (0, 3) else _without_images(each) for index, each in enumerate(found)]

        ModelLoader.make_batches = batches  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        from ckptx.runtime.parity.model_loaders import ModelLoader

        ModelLoader.make_batches = self._batches  # type: ignore[method-assign]


def _without_images(inputs: Any) -> Any:
    """Replace image tokens by text tokens."""
    kept = {name: value for name, value in inputs.batch.items() if value.shape == inputs.labels.shape}
    kept |= {name: torch.zeros_like(value) for name, value in kept.items() if name.endswith("token_type_ids")}
    kept["input_ids"] = torch.where(inputs.labels == -100, 7, kept["input_ids"])
    return inputs._replace(batch=kept, kinds=("text",))


_INJECTIONS: dict[str | None, Any] = {
    None: _Nothing, "slice": _FlippedSlice, "gradient": _ZeroedGradient, "last place": _OneUlp,
    "images in some": _ImagesInSome,
}  # fmt: skip


def run_verify(
    pool: GlooPool, reference: Path, checkpoint: Path, tp: int = 2, dp_shard: int = 2, **settings: Any
) -> tuple[dict[str, Any], str]:
    """Run `verify --run` on a mesh of the pool; return the JSON document and the printed text of rank 0.

    If the command fails, these are the class and the message of its error.
    """
    options = {"tp": tp, "dp_shard": dp_shard, **settings}
    ranks = tp * dp_shard * options.get("pp", 1) * options.get("dp_replicate", 1)
    found = pool.run(verify_on_rank, ranks, str(reference), str(checkpoint), options)
    assert all(type(each[0]) is type(found[0][0]) for each in found), "one rank fails alone"
    document, text = found[0]
    return document, text


def assert_equal(document: dict[str, Any], text: str, dims: ParallelDims, *, wrapped: int = 0) -> None:
    assert document["exit"] == 0, text
    assert (document["differing"], document["world_size"]) == ([], dims.world_size)
    assert document["checkpointed_layers"] == wrapped
    assert len(document["bytes_read_per_rank"]) == dims.world_size
    assert document["gradients"] > 0
    inconclusive_levels = {row["level"] for row in document["inconclusive"]}
    texts = {"config": "config", "bytes": "tensor bytes", "forward": "logits/loss", "gradients": "gradients"}
    tolerances = {
        "forward": [document["max_abs_tolerance"]],
        "gradients": [row["tolerance"] for row in document["gradient_differences"]],
    }
    groups: dict[str, list[str]] = {"EQUAL": [], "within tolerance": [], "INCONCLUSIVE": []}
    for level, text_of_level in texts.items():
        is_measured = any(map(float, tolerances.get(level, ())))
        title = "INCONCLUSIVE" if level in inconclusive_levels else "within tolerance" if is_measured else "EQUAL"
        groups[title].append(text_of_level)
    if inconclusive_levels:
        assert document["compute_dtype"] == "bfloat16"  # in float32, every tolerance could fail
    expected = "; ".join(f"{title}: {', '.join(found)}" for title, found in groups.items() if found)
    assert text.splitlines()[-2] == expected
