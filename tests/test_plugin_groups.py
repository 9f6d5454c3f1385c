"""Steps in groups as Megatron's loops see them: which tensors a backward gets, and that nothing of a step stays."""

import contextlib
import gc
import inspect
import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from training_jobs import trainer_with

from wlb_megatron.attention.kv_exchange import KeyCache
from wlb_megatron.pipeline.orders import grouped_orders
from wlb_megatron.plan import IterationPlan, MicroBatch, Piece
from wlb_megatron.plugin.micro_batches import planning
from wlb_megatron.plugin.step import grouped_steps
from wlb_megatron.plugin.step.pipeline_shapes import (
    ShapeQueue,
    transfer_orders,
)
from wlb_megatron.sharding.attention_calls import CachedKeys, Kept
from wlb_megatron.workload.kernel_table import h100


class Loop:
    """Megatron's 1F1B of one stage, or its loop without a pipeline, with forwards and backwards that take notes."""

    def __init__(self, stage: int, stages: int, micro_batches: int) -> None:
        self.stage, self.stages, self.micro_batches = stage, stages, micro_batches
        self.ran: list[str] = []
        self.quiet: list[bool] = []
        self.outputs: list[weakref.ref[torch.Tensor]] = []
        self.config = SimpleNamespace(no_sync_func=self.no_sync)
        self._quiet = False
        self.forward = partial(grouped_steps.wrap_forward_step, self._forward)
        self.backward = partial(grouped_steps.wrap_backward_step, self._backward)
        self.total_stages = partial(grouped_steps.wrap_total_stages, lambda _: stages)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._quiet = self._quiet, True
        yield
        self._quiet = before

    def _forward(
        self, func: Any, data: Any, model: Any, count: int, inputs: Any, vp_stage: int | None = None
    ) -> Any:
        chunk = 100 * (vp_stage or 0)
        number = chunk + sum(name[0] == "F" and int(name[1:]) // 100 * 100 == chunk for name in self.ran)
        self.ran.append(f"F{number}")
        output = torch.tensor(float(number))
        self.outputs.append(weakref.ref(output))
        return [output] if isinstance(inputs, list) else output, 0

    def _backward(self, inputs: Any, outputs: Any, gradient: Any, config: Any) -> Any:
        (output,) = outputs if isinstance(outputs, list) else [outputs]
        self.ran.append(f"B{int(output)}")
        self.quiet.append(self._quiet)
        return [gradient]

    def pipelined(self, fail_after: int = -1) -> None:
        ahead = min(self.micro_batches, self.total_stages(self) - self.stage - 1)
        waiting: list[Any] = []
        for done in range(self.micro_batches + ahead):
            if done == fail_after:
                raise RuntimeError("a fault")
            if done < self.micro_batches:
                inputs: list[Any] = [None]
                output, _ = self.forward(None, None, None, self.micro_batches, inputs)
                waiting.append((inputs, output))
            if done >= ahead:
                assert self.backward(*waiting.pop(0), [done], self.config) == [[done]]

    def alone(self) -> None:
        with self.no_sync():
            for _ in range(self.micro_batches - 1):
                self._both()
        self._both()

    def _both(self) -> None:
        output, _ = self.forward(None, None, None, self.micro_batches, None)
        self.backward(None, output, None, self.config)


@pytest.fixture
def stages(monkeypatch):
    def of(count: int) -> None:
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: count)

    return of


def _names(order: Any) -> list[str]:
    return ["FB"[step.backward] + str(step.micro_batch) for step in order]


@pytest.mark.parametrize("sizes", [(1, 3, 2), (6,), (2, 1, 1, 2)])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_megatrons_loop_runs_the_order_that_was_planned(stage, sizes, stages):
    stages(3)
    loop = Loop(stage, 3, 6)
    with grouped_steps.running(sizes):
        loop.pipelined()
    assert loop.ran == _names(grouped_orders(3, sizes)[stage])


def test_one_stage_runs_backwards_when_their_group_is_whole_and_without_groups_as_megatron_does(stages):
    stages(1)
    loop = Loop(0, 1, 6)
    with grouped_steps.running((2, 1, 3)):
        loop.alone()
    assert " ".join(loop.ran) == "F0 F1 B1 B0 F2 B2 F3 F4 F5 B5 B4 B3"
    assert loop.quiet == [True] * 5 + [False]
    assert loop.ran == _names(grouped_orders(1, (2, 1, 3))[0])
    stages(2)
    loop = Loop(0, 2, 3)
    with grouped_steps.running(()):
        loop.pipelined()
    assert loop.ran == _names(grouped_orders(2, (1, 1, 1))[0])


def test_a_step_that_fails_in_the_middle_leaves_nothing_behind(stages):
    stages(2)
    loop, cache = Loop(0, 2, 4), KeyCache()
    use = CachedKeys(micro_batch=0, keeps=(Kept(0, None),), takes=(), prefixed=False)

    def keep_keys() -> None:
        cache.start(use)
        cache.keep(use, torch.ones(3))

    keep_keys()  # of an earlier step that was not in groups
    with grouped_steps.running((3, 1)):
        assert not cache._entries
        keep_keys()
    assert not cache._entries
    with pytest.raises(RuntimeError, match="a fault"), grouped_steps.running((3, 1)):
        keep_keys()
        loop.pipelined(fail_after=3)
    assert not cache._entries
    gc.collect()
    assert len(loop.outputs) == 3 and not any(output() is not None for output in loop.outputs)
    again = Loop(0, 2, 3)
    again.pipelined()
    assert again.ran == _names(grouped_orders(2, (1, 1, 1))[0])


def test_tensors_of_a_micro_batch_are_free_after_its_backward(stages):
    stages(2)
    loop = Loop(1, 2, 3)
    alive: list[list[int]] = []
    original = loop._backward

    def noting(*args: Any) -> Any:
        gc.collect()
        alive.append([number for number, output in enumerate(loop.outputs) if output() is not None])
        return original(*args)

    loop.backward = partial(grouped_steps.wrap_backward_step, noting)
    with grouped_steps.running((3,)):
        loop.pipelined()
    assert alive == [[0, 1, 2], [0, 1], [0]]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_recomputation_takes_its_own_micro_batchs_scales(stage, stages, monkeypatch):
    """Of two modules, whose queues Transformer Engine makes in their first forward and takes the oldest scale from."""
    stages(2)
    queues: list[deque[str]] = []
    quantization = ModuleType("transformer_engine.pytorch.quantization")
    state = SimpleNamespace(fp8_tensors_recompute_buffer=queues)
    quantization.__dict__["FP8GlobalStateManager"] = SimpleNamespace(quantization_state=state)
    monkeypatch.setitem(sys.modules, quantization.__name__, quantization)
    loop, taken = Loop(stage, 2, 6), []
    forward, backward = loop._forward, loop._backward

    def scaled(*args: Any) -> Any:
        result = forward(*args)
        queues.extend(deque() for _ in range(2 - len(queues)))
        for name, queue in zip("ab", queues, strict=True):
            queue.append(loop.ran[-1][1:] + name)
        return result

    def recomputed(*args: Any) -> Any:
        result = backward(*args)
        taken.append((loop.ran[-1][1:], [queue.popleft() for queue in queues]))
        return result

    loop.forward = partial(grouped_steps.wrap_forward_step, scaled)
    loop.backward = partial(grouped_steps.wrap_backward_step, recomputed)
    with grouped_steps.running((1, 3, 2)):
        loop.pipelined()
    assert taken == [(number, [f"{number}a", f"{number}b"]) for number in "032154"]
    assert not any(queues)


@pytest.mark.parametrize("sizes", [(1, 3, 2), (6,), (2, 1, 1, 2)])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_megatrons_interleaved_loop_runs_the_order_that_was_planned(stage, sizes, stages, monkeypatch):
    """As its loop asks: how many forwards run ahead, and the table. Before and after the step the answers are its
    own."""
    stages(3)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: stage)
    group = SimpleNamespace(size=lambda: 3, rank=lambda: stage)
    communicator = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=2)
    own_counts = inspect.unwrap(schedules.get_pp_rank_microbatches)
    counts = partial(grouped_steps.wrap_get_pp_rank_microbatches, own_counts)
    own_table = inspect.unwrap(schedules.get_schedule_table)
    table = partial(grouped_steps.wrap_get_schedule_table, own_table)

    def asked() -> tuple[Any, list[tuple[int, int]]]:
        return counts(6, 2, 3, p2p_communicator=communicator), table(6, 2, 3)

    before = asked()
    assert before == (own_counts(6, 2, 3, p2p_communicator=communicator), own_table(6, 2, 3))
    loop = Loop(stage, 3, 6)
    released = []
    with grouped_steps.running(sizes, 2):
        (total, all_ahead, ahead, rest), forwards = asked()
        assert (total, all_ahead, rest) == (12, ahead == 12, 12 - ahead)
        for at in range(total + ahead):
            if at < total:
                inputs = torch.ones(8, requires_grad=True)
                released.append(inputs)
                loop.forward(None, None, None, 6, inputs, vp_stage=forwards[at][1])
            if at >= ahead:
                loop.backward("the oldest", "the oldest", at, loop.config)
    order = grouped_orders(3, sizes, 2)[stage]
    assert loop.ran == [f"{'FB'[step.backward]}{step.micro_batch + 100 * step.chunk}" for step in order]
    assert all(inputs.numel() == 1 for inputs in released)
    assert asked() == before


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_schedule_of_another_order_than_planned_ends_the_step(stages, chunks):
    """As on a Megatron whose interleaved loop does not ask for its table."""
    stages(3)
    loop = Loop(2, 3, 6)
    line = (
        r"forward of micro-batch 0 in model chunk 1 out of turn: this Megatron's schedule .* --wlb-chunks off"
    )
    with pytest.raises(RuntimeError, match=line), grouped_steps.running((1, 3, 2), chunks):
        for chunk in (0, 1):
            loop.forward(None, None, None, 6, torch.ones(8, requires_grad=True), vp_stage=chunk)
    line = "backward of micro-batch 5 in model chunk 0 out of turn"
    with pytest.raises(RuntimeError, match=line), grouped_steps.running((6,)):
        loop.backward("the oldest", "the oldest", 0, loop.config)


def test_gradients_pass_between_stages_in_the_order_of_backwards():
    back = [0, 3, 2, 1, 5, 4]
    assert grouped_steps.GroupedStep((1, 3, 2), 3).order == back
    for stage in range(3):
        orders = transfer_orders(get_schedule_table(6, 1, 1), back, stage, 3)
        assert orders["send forward"] == ([] if stage == 2 else [*range(6)])
        assert orders["receive forward"] == ([] if stage == 0 else [*range(6)])
        assert orders["send backward"] == ([] if stage == 0 else back)
        assert orders["receive backward"] == ([] if stage == 2 else back)


def test_groups_are_of_this_rank_or_of_all_that_meet_in_every_step():
    def batch(*pieces: Piece) -> MicroBatch:
        return MicroBatch(pieces, 1)

    whole = batch(Piece(0, 1, 0, 4))
    head, tail = batch(Piece(0, 2, 0, 4)), batch(Piece(0, 2, 4, 8, 4))
    plan = IterationPlan(0, (), ((whole, head), (whole, tail), (whole, whole)), ())

    def of(rank: int, in_step: bool) -> tuple[int, ...]:
        settings = planning.ShardSettings(rank, 1, 1, "hybrid", h100(), in_step=in_step)
        return planning.chunk_groups(plan, settings)

    assert [of(0, False), of(1, False), of(0, True), of(1, True)] == [(), (2, 1), (2, 1), (2, 1)]


def test_settings_that_chunks_cannot_be_trained_with_are_told_with_a_cure():
    assert trainer_with().chunks_refused() == []
    assert trainer_with(virtual_pipeline_model_parallel_size=2).chunks_refused() == []
    ((refused, cure),) = trainer_with(cpu_offloading_num_layers=2).chunks_refused()
    assert refused == "--cpu-offloading-num-layers" and cure
    offloads = trainer_with(fine_grained_activation_offloading=True)
    assert offloads.chunks_refused() == []
    ((refused, cure),) = offloads.chunks_refused("auto")
    assert refused == "--fine-grained-activation-offloading" and "give --wlb-chunks on" in cure
    virtual = {"fine_grained_activation_offloading": True, "virtual_pipeline_model_parallel_size": 2}
    ((refused, cure),) = trainer_with(**virtual).chunks_refused()
    assert refused == "--fine-grained-activation-offloading over virtual stages" and cure
    assert trainer_with(moe_enable_routing_replay=True).chunks_refused() == []  # a dense model has no routers
    replays = {"num_experts": 4, "moe_enable_routing_replay": True}
    assert [flag for flag, _ in trainer_with(**replays).chunks_refused()] == ["--moe-enable-routing-replay"]
    by_document = {"num_experts": 4, "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"]}
    assert trainer_with(**by_document).chunks_refused() == []


@pytest.mark.parametrize(
    ("settings", "meet"),
    [
        ({}, False),
        ({"num_experts": 4}, False),
        ({"num_experts": 4, "expert_model_parallel_size": 2}, True),
        ({"num_experts": 4, "expert_tensor_parallel_size": 2}, True),
        ({"num_experts": 4, "moe_router_load_balancing_type": ["global_aux_loss"]}, True),
        ({"moe_router_load_balancing_type": ["global_aux_loss"]}, False),
        ({"use_megatron_fsdp": True}, True),
        ({"use_torch_fsdp2": True}, True),
        ({"fp8": None, "fp8_recipe": "delayed"}, False),
        ({"fp8": "hybrid"}, True),
        ({"fp8": "e4m3", "fp8_recipe": "delayed"}, True),
        ({"fp8": "hybrid", "fp8_recipe": "custom"}, True),
        ({"fp8": "hybrid", "fp8_recipe": "delayed", "tp_only_amax_red": True}, False),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, False),
        ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, False),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, False),
        ({"te_precision_config_file": "recipes.yaml"}, True),
        ({"fp8": "hybrid", "use_torch_fsdp2": True}, True),
    ],
)
def test_ranks_that_meet_in_a_forward_or_a_backward_keep_in_step(settings, meet):
    assert trainer_with(**settings).in_step == meet


# The shapes of what passes between stages, in the order of Megatron's schedules.


@pytest.mark.parametrize("micro_batches", [4, 6, 8])
@pytest.mark.parametrize(("stages", "chunks", "group"), [(2, 1, 1), (2, 2, 2), (4, 2, 4), (2, 3, 4)])
def test_the_order_is_that_of_megatrons_schedule_table(micro_batches, stages, chunks, group):
    """Every stage runs Megatron's table; walking it as a pipeline gives what passes between neighbours."""
    table, turns = get_schedule_table(micro_batches, chunks, group), range(micro_batches)
    assert chunks > 1 or table == [(i, 0) for i in turns]
    forward = defaultdict(deque)
    for stage in range(stages):
        for index, chunk in table:
            if (stage, chunk) != (stages - 1, chunks - 1):
                forward[(stage + 1) % stages].append(index)
    for stage in range(stages):
        orders = transfer_orders(table, turns, stage, stages)
        following = transfer_orders(table, turns, (stage + 1) % stages, stages)
        assert orders["send forward"] == following["receive forward"]
        assert orders["receive backward"] == following["send backward"]
        assert orders["receive forward"] == list(forward[stage])


def test_a_tensor_of_another_shape_than_planned_is_an_error_on_the_host():
    """E3: 2 stages of 2 chunks, the last stage sends its first chunk's outputs back to the first stage."""

    class Tensor:
        shape = (24, 1, 8)

    orders = transfer_orders(get_schedule_table(2, 2, 2), range(2), stage=1, stages=2)
    queue = ShapeQueue([(24, 1, 8), (40, 1, 8)], orders)
    queue.check("send forward", Tensor())
    with pytest.raises(RuntimeError, match="planned"):
        queue.check("send forward", Tensor())
    with pytest.raises(RuntimeError, match="send forward: one more pipeline transfer than the step has"):
        queue.check("send forward", Tensor())
