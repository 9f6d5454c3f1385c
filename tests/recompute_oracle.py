"""What a pipeline stage holds, counted slowly event by event, and the best plan of all."""

from collections.abc import Sequence
from itertools import product

from wlb_megatron.pipeline.kept_layers import Load
from wlb_megatron.pipeline.orders import Step
from wlb_megatron.workload.memory import ModelChunk, StageMemory

Numbers = Sequence[Sequence[int]]
"""Recomputed layers [micro-batch][model chunk]."""


def by_the_flags(loads: Sequence[Load], memory: StageMemory) -> list[list[int]]:
    return [[chunk.recomputed for chunk in memory.chunks] for _ in loads]


def held_bytes(
    order: Sequence[Step], loads: Sequence[Load], memory: StageMemory, recomputed: Numbers
) -> list[int]:
    """Bytes while each step of the order runs, in its order."""
    stored: dict[tuple[int, int], int] = {}
    events = []
    for step in order:
        load, chunk = loads[step.micro_batch], memory.chunks[step.chunk]
        number = recomputed[step.micro_batch][step.chunk]
        layers = load.tokens * chunk.floor
        if number < chunk.recomputed:
            kept = sum(kept_bytes(chunk, layer) - chunk.input for layer in range(number, chunk.recomputed))
            layers += load.tokens * (chunk.switched + kept)
        layers += load.chunk_tokens * chunk.keyed * memory.keys
        if step.chunk == 0:
            layers += load.tokens * memory.ends
        stored[step.micro_batch, step.chunk] = layers  # a backward holds it until its end
        work = load.tokens * chunk.forward
        if step.backward:
            begins_recomputed = number == chunk.recomputed
            work = load.tokens * (chunk.working + chunk.remade * begins_recomputed)
        work += load.earlier * memory.attended
        if step.chunk == len(memory.chunks) - 1:
            work = max(work, load.tokens * memory.loss)
        events.append(sum(stored.values()) + work)
        if step.backward:
            del stored[step.micro_batch, step.chunk]
    assert not stored
    return events


def kept_bytes(chunk: ModelChunk, layer: int) -> int:
    return chunk.unlike[layer].kept if chunk.unlike else chunk.kept


def saved_work(loads: Sequence[Load], memory: StageMemory, recomputed: Numbers) -> int:
    """Work that is not done again, in thousandths of the loads' units times layers."""
    saved = 0
    for load, numbers in zip(loads, recomputed, strict=True):
        for chunk, number in zip(memory.chunks, numbers, strict=True):
            for layer in range(number, chunk.recomputed):
                linear, attends = chunk.unlike[layer][1:] if chunk.unlike else (1000, True)
                saved += load.linear * linear + 1000 * (load.work - load.linear) * attends
    return saved


def most_saved(order: Sequence[Step], loads: Sequence[Load], memory: StageMemory, available: int) -> int:
    """Over all plans that fit; -1 if none does."""
    choices = [range(chunk.recomputed + 1) for _ in loads for chunk in memory.chunks]
    number, best = len(memory.chunks), -1
    for plan in product(*choices):
        rows = [plan[at : at + number] for at in range(0, len(plan), number)]
        saved = saved_work(loads, memory, rows)
        if saved > best and max(held_bytes(order, loads, memory, rows)) <= available:
            best = saved
    return best
