"""Each private name of torch exists in the installed version and does what ckptx uses it for."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckptx.errors import EnvironmentProblem
from ckptx.runtime import torch_private
from tests.support.pool import GlooPool


@pytest.mark.parametrize("name", torch_private._NAMES)
def test_a_name_is_found(name: str) -> None:
    found = getattr(torch_private, name)
    assert callable(found) or found.__name__ == "torch.distributed._functional_collectives"


def test_a_name_that_is_not_listed_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="torch_private' has no attribute 'FakeTensors'"):
        operator.attrgetter("FakeTensors")(torch_private)


def test_a_name_that_torch_lacks_is_named_with_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_private._NAMES, "Gone", "torch._subclasses.fake_tensor.Gone")
    monkeypatch.setitem(torch_private._NAMES, "GoneToo", "torch._gone.module.Name")
    for name in ("Gone", "GoneToo"):
        with pytest.raises(EnvironmentProblem) as error:
            operator.attrgetter(name)(torch_private)
        assert error.value.exit_code == 7
        assert str(error.value) == (
            f"torch {torch.__version__}: has no {torch_private._NAMES[name]}, which ckptx uses; install a torch from "
            "2.11 to 2.14, or a newer ckptx"
        )


class _Bare:
    """An object of a torch that renamed every private attribute."""


@pytest.mark.parametrize(
    ("read", "missing"),
    [
        (torch_private.dtensor_spec, "_Bare._spec"),
        (torch_private.storage_key, "_Bare._cdata"),
        (torch_private.is_view, "_Bare._is_view"),
        (torch_private.get_overload_packet, "_Bare._overloadpacket"),
        (torch_private.compiled_call, "_Bare._compiled_call_impl"),
        (lambda bare: torch_private.apply_to_tensors(bare, lambda tensor: tensor), "_Bare._apply"),
    ],
)
def test_an_attribute_that_torch_lacks_is_named(read: Callable[[Any], Any], missing: str) -> None:
    with pytest.raises(EnvironmentProblem, match=f"^torch {torch.__version__.split('+')[0]}.*: has no {missing}, "):
        read(_Bare())


# -------------------------------------------------------------------------------------------------------------- tensors


def shards(rank: int, world_size: int) -> tuple[list[int], list[int], bool, bool]:
    """Return the shard of a DTensor on this rank, its shape, and checks of identity and of the store of the group."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    whole = torch.arange(8.0).reshape(4, 2)
    cut = distribute_tensor(whole, mesh, [Shard(0)])
    local, spec = torch_private.local_tensor(cut), torch_private.dtensor_spec(cut)
    is_same = torch_private.local_tensor(cut) is local and torch_private.local_tensor(whole) is whole
    store = torch_private.default_store()
    store.set(f"rank {rank}", "here")
    dist.barrier()
    are_all_there = store.check([f"rank {each}" for each in range(world_size)])
    torch_private.drop_group_references(mesh)
    assert tuple(spec.placements) == (Shard(0),) and spec.mesh is cut.device_mesh
    assert isinstance(cut, DTensor) and torch_private.StridedShard(0, split_factor=2) != Replicate()
    return local.flatten().int().tolist(), [*spec.shape], is_same, are_all_there


def test_shards_of_a_dtensor(pool: GlooPool) -> None:
    found = pool.run(shards, 2)
    assert [each[0] for each in found] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert all(each[1:] == ([4, 2], True, True) for each in found)


def test_a_storage_is_told_by_its_key() -> None:
    tensor = torch.zeros(4)
    key = torch_private.storage_key(tensor.untyped_storage())
    assert torch_private.storage_key(tensor[1:].untyped_storage()) == key
    assert torch_private.storage_key(torch.zeros(4).untyped_storage()) != key


def test_a_view_is_one() -> None:
    tensor = torch.zeros(4)
    assert torch_private.is_view(tensor[1:]) and not torch_private.is_view(tensor)


def test_tensors_are_scaled_and_measured_together() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0])]
    assert [float(each) for each in torch_private.compute_norms(tensors, 2.0, torch.float64)] == [5.0, 10.0]
    torch_private.scale_all(tensors, torch.tensor(0.5))
    assert [each.tolist() for each in tensors] == [[1.5, 2.0], [3.0, 4.0]]


# ----------------------------------------------------------------------------------------------------------- operations


def test_an_operation_has_a_schema_and_a_packet() -> None:
    operation = torch.ops.aten.add_.Tensor
    assert torch_private.get_schema(operation).name == "aten::add_" and torch_private.get_schema(operation).is_mutable
    assert torch_private.get_overload_packet(operation) is torch.ops.aten.add_
    assert torch_private.get_schema(torch.ops.higher_order.cond) is None


def test_a_mode_sees_operations_but_not_without_dispatch() -> None:
    class Listening(torch_private.TorchDispatchMode):  # type: ignore[misc]  # torch says Any
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(torch_private.get_schema(operation).name)
            return operation(*args, **(kwargs or {}))

    seen: list[str] = []
    with Listening():
        tensor = torch.ones(2)
        with torch_private.disable_dispatch():
            torch.zeros(2)
        tensor.mul(2)
    assert seen == ["aten::ones", "aten::mul"]


def unseen(rank: int, world_size: int) -> list[tuple[int, ...]]:
    """Return the shapes that a mode sees while a DTensor is multiplied."""
    mesh = init_device_mesh("cpu", (world_size,))
    left = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    right = distribute_tensor(torch.ones(4, 10), mesh, [Replicate()])
    seen: list[tuple[int, ...]] = []

    class Listening(torch_private.TorchDispatchMode):  # type: ignore[misc]  # torch says Any
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(each is not Tensor for each in types):
                return NotImplemented if DTensor in types else operation(*args, **(kwargs or {}))
            found = operation(*args, **(kwargs or {}))
            seen.append(tuple(found.shape))
            return found

    with torch_private.hide_dtensor_shape_inference(), Listening():
        left @ right
    return seen


def test_shapes_that_dtensor_looks_for_are_not_seen(pool: GlooPool) -> None:
    for seen in pool.run(unseen, 2):
        assert (3, 10) in seen and (6, 10) not in seen


def test_tensors_are_fake_within_their_mode() -> None:
    with torch_private.FakeTensorMode() as mode:
        fake = torch.ones(3)
        copied = torch_private.make_fake_tensor(torch.empty(2, 4, device="meta"), fake)
        assert copied.shape == (2, 4) and copied.device == fake.device and copied.fake_mode is mode
        with torch_private.unset_fake_temporarily():
            real = torch.ones(3)
        with pytest.raises(torch_private.DataDependentOutputException):
            fake.sum().item()
        with pytest.raises(torch_private.DynamicOutputShapeException):
            fake.nonzero()
    assert isinstance(fake, torch_private.FakeTensor) and not isinstance(real, torch_private.FakeTensor)


def test_nested_arguments_are_walked_through() -> None:
    nested = {"a": [1, (2, "b")]}
    assert torch_private.tree_leaves(nested) == [1, 2, "b"]
    assert torch_private.tree_map_only(int, lambda each: each + 1, nested) == {"a": [2, (3, "b")]}


def test_products_are_never_recomputed() -> None:
    assert torch.ops.aten.mm in [*torch_private.list_compute_intensive_operations()]


def test_compiled_graphs_can_be_tried_in_their_order() -> None:
    torch_private.use_first_compiled_graph()


# ------------------------------------------------------------------------------------------------------------- autograd


def test_a_backward_pass_has_a_number_and_so_has_each_node_of_it() -> None:
    found: list[tuple[int | None, int | None]] = []

    class Seen(torch.autograd.Function):  # type: ignore[misc]  # torch says Any
        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Tensor:
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            found.append((torch_private.current_backward_id(), torch_private.running_node_number()))
            return gradients[0]

    assert torch_private.current_backward_id() is None and torch_private.running_node_number() is None
    numbers = []
    for _ in range(2):
        numbers.append(torch_private.next_node_number())
        Seen.apply(torch.ones(1, requires_grad=True)).backward()
    (first, node), (second, other) = found
    assert first is not None and second is not None and second > first
    assert [node, other] == numbers


def test_gradients_of_inputs_and_weights_come_apart() -> None:
    layer, rows = nn.Linear(2, 3), torch.ones(1, 2, requires_grad=True)
    output = layer(rows).sum()
    gradients, groups = torch_private.stage_backward_input([output], None, [rows], layer.parameters())
    assert torch.equal(gradients[0], layer.weight.sum(0, keepdim=True)) and layer.weight.grad is None
    torch_private.stage_backward_weight(layer.parameters(), groups)
    assert torch.equal(layer.weight.grad, torch.ones(3, 2))


# ------------------------------------------------------------------------------------------------------------- sending


def kept_after_send(rank: int, world_size: int) -> list[tuple[bool, bool, bool]]:
    """Return if a sent tensor is alive: without a reference to it, after its work has waited, and without the work."""
    found = []
    for send in (send_alone, send_in_batch):
        tensor = torch.ones(4)
        reference = weakref.ref(tensor.untyped_storage())
        works = send(tensor, 1 - rank)
        del tensor
        kept = reference() is not None
        for work in works:
            work.wait()
        waited = reference() is not None
        del works, work
        found.append((kept, waited, reference() is not None))
    return found


def send_alone(tensor: Tensor, peer: int) -> list[Any]:
    """Send a tensor as a batch of sends of a schedule does, and receive one."""
    operation = dist.P2POp(dist.isend, tensor.detach(), peer)
    assert operation.op == dist.isend
    received = dist.irecv(torch.empty(4), peer)
    return [operation.op(operation.tensor, group=None, tag=0, group_dst=peer), received]


def send_in_batch(tensor: Tensor, peer: int) -> list[Any]:
    """Send and receive tensors in one batch."""
    return list(
        dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensor.detach(), peer), dist.P2POp(dist.irecv, torch.empty(4), peer)]
        )
    )


def test_a_work_of_a_fake_group_keeps_a_sent_tensor_as_one_of_gloo_does(pool: GlooPool) -> None:
    real = pool.run(kept_after_send, 2)
    assert real == [[(True, True, False)] * 2] * 2
    isend = dist.isend
    dist.init_process_group("fake", store=torch_private.FakeStore(), rank=0, world_size=2)
    try:
        without = kept_after_send(0, 2)
        with torch_private.keep_sent_tensors():
            found = kept_after_send(0, 2)
    finally:
        dist.destroy_process_group()
    assert without == [(False, False, False)] * 2
    assert found == real[0]
    assert dist.isend is isend is dist.distributed_c10d.isend


# -------------------------------------------------------------------------------------------------------------- modules


def test_a_compiled_call_can_be_replaced() -> None:
    module = nn.Linear(2, 2)
    assert torch_private.compiled_call(module) is None
    module.compile(backend="eager")
    assert torch_private.compiled_call(module) is not None
    torch_private.set_compiled_call(module, lambda rows: rows + 1)
    assert module(torch.zeros(2)).tolist() == [1, 1]


def test_every_tensor_of_a_module_is_replaced() -> None:
    module = nn.BatchNorm1d(2)
    torch_private.apply_to_tensors(module, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    assert {each.dtype for each in (*module.parameters(), *module.buffers())} == {torch.float64, torch.int64}


def test_a_wrapper_recomputes_a_layer() -> None:
    class Layer(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            calls.append("forward")
            return rows.exp().exp()

    layer, calls = Layer(), list[str]()
    wrapped = torch_private.checkpoint_wrapper(layer, checkpoint_impl=torch_private.CheckpointImpl.NO_REENTRANT)
    wrapped(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert isinstance(wrapped, torch_private.CheckpointWrapper) and calls == ["forward", "forward"]


def test_dropout_modules_have_one_base() -> None:
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    assert all(issubclass(kind, torch_private.DropoutNd) for kind in kinds)
