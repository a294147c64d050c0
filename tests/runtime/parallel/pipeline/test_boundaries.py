"""What travels between stages is what later ones need and no more; what travels otherwise is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptx.errors import UnsupportedError
from ckptx.layout.stages import Stack, StageMap
from ckptx.runtime.parallel.pipeline.boundaries import (
    StageBoundaries,
    discover_boundaries,
    make_shared_stage,
    stage_arguments,
)
from ckptx.runtime.parallel.pipeline.run import StageRunner
from tests.support.slow import slow_but
from tests.support.staged_models import build_deep_model, microbatches, output_of, run_stages, split_into_stages

LANGUAGE = "model.language_model"


def carried(name: str, how: str) -> list[list[str]]:
    """What each stage gets, but the first."""
    model = build_deep_model(name)
    carry = discover_boundaries(model, split_into_stages(model, 2, how), microbatches(name, 1), output_of)
    return [[str(slot) for slot in slots] for slots in carry.slots[1:]]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("llama-tied", "model.layers"), ("gpt2", "transformer.h"), ("gpt-neox", "gpt_neox.layers"),
        ("mixtral", "model.layers"), ("gemma3", "model.layers"), ("mamba", "backbone.layers"),
        ("llava", f"{LANGUAGE}.layers"), ("qwen2.5-vl", f"{LANGUAGE}.layers"), ("bert-mlm", "bert.encoder.layer"),
    ],
)  # fmt: skip
def test_the_hidden_state_alone(name: str, path: str) -> None:
    assert carried(name, "three") == [[f"{path}.1(0)"], [f"{path}.4(0)"]]


def test_inputs_of_every_layer_go_to_the_stages_behind() -> None:
    first, second = carried("gemma4-ple", "three")
    assert first == ["model.layers.1(0)", *(f"model.layers.{index}(1)" for index in range(1, 6))]
    assert second == ["model.layers.4(0)", "model.layers.4(1)", "model.layers.5(1)"]


@pytest.mark.parametrize(
    ("how", "layer", "kind"), [("balanced", 3, "sliding_attention"), ("rest | 1", 5, "full_attention")]
)
def test_keys_and_values_that_layers_share(how: str, layer: int, kind: str) -> None:
    ((hidden, *others),) = carried("gemma4-shared-kv", how)
    assert hidden == f"model.layers.{layer}(0)"
    shared = [f"model.layers.{layer}(shared_kv_states['{kind}'][{index}])" for index in (0, 1)]
    assert [each for each in others if "shared" in each] == shared
    assert [each for each in others if "shared" not in each] == [f"model.layers.{at}(1)" for at in range(layer, 6)]


def test_an_encoder_gives_states_and_biases() -> None:
    assert carried("t5", "balanced") == [["decoder(encoder_hidden_states)"]]
    assert carried("t5", "three") == [
        ["encoder.block.1(0)", "encoder.block.1(2)"],
        ["decoder(encoder_hidden_states)", "decoder.block.4(0)", "decoder.block.4(2)", "decoder.block.4(5)"],
    ]


@pytest.mark.parametrize("name", ["bart", "whisper"])
def test_an_encoder_without_biases_gives_states(name: str) -> None:
    assert carried(name, "three") == [
        ["model.encoder.layers.1(0)"], ["model.decoder(encoder_hidden_states)", "model.decoder.layers.4(0)"],
    ]  # fmt: skip


def test_states_of_an_image_go_as_far_as_layers_look_at_them() -> None:
    assert carried("mllama", "three") == [
        [f"{LANGUAGE}(cross_attention_states)", f"{LANGUAGE}.layers.1(0)"], [f"{LANGUAGE}.layers.4(0)"],
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["llama-tied", "gemma4-shared-kv", "t5", "mllama", "gemma3n"])
def test_without_any_one_of_what_travels_the_result_is_another(name: str) -> None:
    model = build_deep_model(name)
    stages = split_into_stages(model, 2, "rest | 1")
    (batch,) = microbatches(name, 1)
    carry = discover_boundaries(model, stages, [batch], output_of)
    with torch.no_grad():
        whole = output_of(model(**batch))
        assert torch.equal(run_forward(model, stages, carry, batch), whole)
        for index in range(len(carry.slots[1])):
            less = (*carry.slots[1][:index], *carry.slots[1][index + 1 :])
            try:
                found = run_forward(
                    model, stages, StageBoundaries((carry.slots[0], less), carry.output_structures), batch
                )
            except Exception:  # of a layer that is given None
                continue
            assert not torch.equal(found, whole)


def run_forward(model: nn.Module, stages: StageMap, carry: StageBoundaries, batch: dict[str, Tensor]) -> Tensor:
    values: tuple[Any, ...] = ()
    output = None
    for number in range(stages.count):
        part = StageRunner(make_shared_stage(model, stages, number, carry.output_structures), stages, number, carry)
        output, values = part(part.model, batch, values)
    return output_of(output)


@pytest.mark.parametrize(
    "name", slow_but(("llama-tied", "gemma4-ple", "qwen3-vl", "bart", "gemma3-vlm"), ("gemma4-ple", "qwen3-vl", "bart"))
)
def test_nan_never_reaches_the_logits(name: str) -> None:
    model = build_deep_model(name)
    (batch, other) = microbatches(name, 2)
    for how in ("1 | rest", "three"):
        stages = split_into_stages(model, 2, how)
        carry = discover_boundaries(model, stages, [batch], output_of)
        logits, gradients = run_stages(model, stages, carry, other)
        assert bool(logits.isfinite().all())
        assert all(bool(each.isfinite().all()) for each in gradients.values())


def test_images_go_to_the_first_stage_alone() -> None:
    batch = {
        "input_ids": torch.ones(1, 2, dtype=torch.int64),
        "pixel_values": torch.ones(1),
        "grid": torch.ones(1, 3).long(),
    }
    assert set(stage_arguments(0, batch)) == set(batch)
    assert set(stage_arguments(1, batch)) == {"input_ids", "grid"}
    del batch["input_ids"]
    assert set(stage_arguments(1, batch)) == {"pixel_values", "grid"}, (
        "a model that is given no tokens needs what there is"
    )


class Layer(nn.Module):  # type: ignore[misc]
    """Gives a part of what it computed to later layers, by a way that is not an argument."""

    def __init__(self, index: int, hidden_way: Any) -> None:
        super().__init__()
        self.index, self.hidden_way = index, hidden_way
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.linear(hidden)
        if self.hidden_way is not None:
            if self.index == 0:
                self.hidden_way.kept = hidden * 2
            elif self.index == 3 and self.hidden_way.kept is not None:
                hidden = hidden + self.hidden_way.kept
        return hidden


class Model(nn.Module):  # type: ignore[misc]
    """Four layers."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(kept=None)
        self.cache = nn.Identity()
        self.cache.kept = None
        self.embed = nn.Embedding(9, 4)
        self.layers = nn.ModuleList(
            Layer(index, {"config": self.config, "module": self.cache, "none": None}[way]) for index in range(4)
        )
        self.norm = nn.LayerNorm(4)

    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return SimpleNamespace(logits=self.norm(hidden))


def made_up(way: str) -> StageBoundaries:
    model = Model(way)
    stages = StageMap([Stack("layers", 4, before=("embed",), after=("norm",))], 2)
    return discover_boundaries(model, stages, [{"input_ids": torch.arange(6).reshape(2, 3)}], output_of)


def test_a_class_that_hides_nothing_is_cut() -> None:
    assert [[str(slot) for slot in slots] for slots in made_up("none").slots] == [[], ["layers.2(0)"]]


@pytest.mark.parametrize("way", ["module", "config"])
def test_state_that_travels_by_an_attribute_is_refused(way: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        made_up(way)
    assert str(caught.value) == (
        "Model: pipeline stage 1 differs from the whole model even when its layers get the same arguments; state "
        "passes between layers other than as an argument; leave out --pp"
    )


def test_what_the_first_stage_has_not_is_refused() -> None:
    class Later(Model):
        """Its first layer is given something that only the norm behind the last has."""

        def forward(self, input_ids: Tensor) -> Any:
            hidden = self.embed(input_ids) * self.norm.weight
            for layer in self.layers:
                hidden = layer(hidden)
            return SimpleNamespace(logits=self.norm(hidden))

    stages = StageMap([Stack("layers", 4, before=("embed",), after=("norm",))], 2)
    with pytest.raises(UnsupportedError) as caught:
        discover_boundaries(Later("none"), stages, [{"input_ids": torch.arange(6).reshape(2, 3)}], output_of)
    assert "Later: the first pipeline stage lacks layers.0(0), which later stages need" in str(caught.value)
