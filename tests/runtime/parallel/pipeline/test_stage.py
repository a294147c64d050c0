"""A stage has its own parameters and no others, and what stands in for the rest answers NaN in the right form."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptx.errors import UnsupportedError
from ckptx.layout.stages import Stack, StageMap
from ckptx.runtime.parallel.pipeline.boundaries import discover_boundaries, make_shared_stage
from ckptx.runtime.parallel.pipeline.stage import (
    LIKE_FIRST_INPUT,
    Stub,
    describe_output,
    make_stage,
    modules_on_layer_path,
)
from tests.support.models import EVERY
from tests.support.staged_models import (
    build_deep_model,
    max_relative_difference,
    microbatches,
    output_of,
    run_stages,
    run_unsplit,
    split_into_stages,
)

# Of a `language_model` inside, and none of them Gemma4, whose forward is special.
COMPOSITES = ("llava", "qwen2.5-vl", "mistral3", "internvl", "paligemma")


class Layer(nn.Module):  # type: ignore[misc]
    """Adds what it makes of the hidden state, and shows of which kind it is."""

    def __init__(self, index: int, width: int = 4) -> None:
        super().__init__()
        self.kind = "sliding" if index % 2 else "full"
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(hidden) * self.scale


class Pair(nn.Module):  # type: ignore[misc]
    """Answers a tuple of something of another shape and nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, hidden: Tensor) -> Any:
        return {"pooled": hidden.sum(1, keepdim=True) * self.weight[0], "count": 7}, (hidden.long(), None)


class Body(nn.Module):  # type: ignore[misc]
    """Embedding, a parameter that is added, layers, a norm, and a shift."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.position = nn.Parameter(torch.ones(1, 4))
        self.layers = nn.ModuleList(Layer(index) for index in range(count))
        self.norm = nn.LayerNorm(4)
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids) + self.position
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden) + self.shift


def body(count: int = 4) -> tuple[Body, StageMap]:
    torch.manual_seed(0)
    stack = Stack("layers", count, before=("embed", "position"), after=("norm", "shift"))
    return Body(count), StageMap([stack], 2)


def stored(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} | set(model.state_dict())


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", list(EVERY))
def test_every_parameter_is_where_the_map_says_and_nowhere_else(name: str) -> None:
    model = build_deep_model(name, 4)
    stages = split_into_stages(model, 3)
    found: Counter[str] = Counter()
    for number in range(stages.count):
        own = stored(make_shared_stage(model, stages, number, {}))
        assert own == {each for each in stored(model) if stages.stage_of(each) == number}
        found.update(own)
    assert found == Counter(stored(model))


def test_lists_of_layers_keep_their_length() -> None:
    model, stages = body()
    make_stage(model, stages, 1, {})
    assert len(model.layers) == 4
    assert [type(each).__name__ for each in model.layers] == ["Stub", "Stub", "Layer", "Layer"]
    assert sorted(name for name, _ in model.named_parameters()) == sorted(
        ["layers.2.linear.weight", "layers.2.linear.bias", "layers.3.linear.weight", "layers.3.linear.bias",
         "norm.weight", "norm.bias", "shift"]
    )  # fmt: skip


def test_a_stage_keeps_what_its_parameters_are() -> None:
    model, stages = body()
    own = dict(model.named_parameters())
    part = make_shared_stage(model, stages, 0, {})
    assert all(parameter is own[name] for name, parameter in part.named_parameters())
    assert sorted(dict(model.named_parameters())) == sorted(own), "the whole model is as before"


def test_attributes_of_what_is_elsewhere_can_be_read() -> None:
    model, stages = body()
    make_stage(model, stages, 1, {})
    assert [each.kind for each in model.layers] == ["full", "sliding", "full", "sliding"]
    assert bool(model.layers[0].scale.isnan().all())
    assert model.embed.num_embeddings == 11
    assert bool(model.embed.weight.isnan().all())
    with pytest.raises(AttributeError):
        _ = model.layers[0].what_no_layer_has


def test_what_stands_in_has_nothing_that_is_trained_or_stored() -> None:
    model, stages = body()
    make_stage(model, stages, 1, {})
    for each in (model.embed, model.layers[0]):
        assert isinstance(each, Stub)
        assert not list(each.parameters())
        assert not each.state_dict()
        assert not list(each.children())


def test_a_parameter_beside_the_layers_is_nan_and_takes_no_memory() -> None:
    model, stages = body()
    whole = model.position
    make_stage(model, stages, 1, {})
    assert not isinstance(model.position, nn.Parameter)
    assert (model.position.shape, model.position.dtype) == (whole.shape, whole.dtype)
    assert bool(model.position.isnan().all())
    assert model.position.untyped_storage().nbytes() == 4
    first, stages = body()
    make_stage(first, stages, 0, {})
    assert first.shift.shape == (), "what it is added to is like an input of the model"
    assert bool(first.shift.isnan())
    assert isinstance(first.position, nn.Parameter)


def test_without_what_it_lacks_a_stage_computes_nan() -> None:
    model, stages = body()
    for number in (0, 1):
        part = make_shared_stage(
            model,
            stages,
            number,
            {"layers.0": LIKE_FIRST_INPUT, "layers.2": LIKE_FIRST_INPUT, "norm": LIKE_FIRST_INPUT},
        )
        assert bool(part(torch.arange(6).reshape(2, 3)).isnan().all())


@pytest.mark.parametrize("asked", [torch.ones(2, 3), torch.ones(5, 1), torch.ones(0, 3)], ids=["2x3", "5x1", "0x3"])
def test_a_stub_answers_in_the_form_of_the_original(asked: Tensor) -> None:
    original = Pair()
    wanted = original(asked)
    found = Stub(original.to("meta"), None, "cpu")(asked)
    assert [type(each) for each in found] == [dict, tuple]
    assert found[0]["count"] == 7
    assert found[0]["pooled"].shape == wanted[0]["pooled"].shape
    assert bool(found[0]["pooled"].isnan().all())
    assert (found[1][0].dtype, found[1][1]) == (torch.int64, None)
    assert not found[1][0].any(), "zeros, where nothing can be NaN"


def test_a_stub_with_a_form_asks_nobody() -> None:
    form = describe_output((torch.ones(2), {"mask": None}, [torch.ones(1)]))
    assert form == (LIKE_FIRST_INPUT, {"mask": None}, [LIKE_FIRST_INPUT])
    stub = Stub(nn.Linear(1, 1), form, "cpu")
    first, masks, rest = stub(hidden_states=torch.ones(3, 2))
    assert (first.shape, masks, [each.shape for each in rest]) == ((3, 2), {"mask": None}, [(3, 2)])
    first.add_(1)  # some models change in place what a layer gave
    assert bool(first.isnan().all())


def test_a_stub_that_is_given_no_tensor_says_so() -> None:
    with pytest.raises(UnsupportedError) as caught:
        Stub(nn.Linear(1, 1), LIKE_FIRST_INPUT, "cpu")(None, mask=3)
    assert str(caught.value) == (
        "Linear: gets no tensor, so no pipeline stage can replace it by a placeholder; leave out --pp"
    )


def test_a_module_of_several_stages_is_refused() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([Layer(0), Layer(1)])
    model.ends = nn.ModuleDict({"first": nn.Linear(1, 1), "last": nn.Linear(1, 1)})
    stages = StageMap([Stack("layers", 2, before=("ends.first",), after=("ends.last",))], 2)
    with pytest.raises(UnsupportedError) as caught:
        make_stage(model, stages, 0, {})
    assert "ends would be on several pipeline stages (0, 1), must be on one; leave out --pp" in str(caught.value)


def test_the_ways_to_layers_go_from_the_outermost_in() -> None:
    stages = StageMap([Stack("model.text.layers", 2), Stack("model.layers", 2)], 2)
    assert modules_on_layer_path(stages) == ["", "model", "model.text", "model.layers", "model.text.layers"]


@pytest.mark.parametrize("name", COMPOSITES)
def test_nothing_of_a_class_is_patched(name: str) -> None:
    model = build_deep_model(name)
    classes = {type(each) for each in model.modules()}
    before = {(each, key): value for each in classes for key, value in vars(each).items() if not key.startswith("_abc")}
    (batch,) = microbatches(name, 1)
    whole = run_unsplit(model, [batch])
    stages = split_into_stages(model, 2)
    carry = discover_boundaries(model, stages, [batch], output_of)
    logits, gradients = run_stages(model, stages, carry, batch)
    assert torch.equal(logits, whole.logits[0])
    assert max_relative_difference(whole.gradients, gradients) < 3e-7, (
        "float32, a tied gradient is summed in another order"
    )
    after = {(each, key): value for each in classes for key, value in vars(each).items() if not key.startswith("_abc")}
    assert after.keys() == before.keys()
    assert all(after[key] is value for key, value in before.items())
    for number in range(stages.count):
        part = make_shared_stage(model, stages, number, carry.output_structures)
        assert type(part) is type(model)
        for path, module in part.named_modules():
            assert "forward" not in vars(module), path
            if not isinstance(module, Stub):
                assert type(module) in classes


def test_a_class_that_was_derived_at_run_time_is_cut_like_its_base() -> None:
    model = build_deep_model("llama-untied")
    (batch,) = microbatches("llama-untied", 1)
    whole = run_unsplit(model, [batch])
    stages = split_into_stages(model, 2)
    for module in (model, model.model, *model.model.layers):
        module.__class__ = type(f"Wrapped{type(module).__name__}", (type(module),), {})
    carry = discover_boundaries(model, stages, [batch], output_of)
    logits, gradients = run_stages(model, stages, carry, batch)
    assert torch.equal(logits, whole.logits[0])
    assert max_relative_difference(whole.gradients, gradients) == 0
