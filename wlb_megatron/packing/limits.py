"""What limits a job's plans: Lmax by a GPU's memory, and whatever keeps long documents from training in chunks.

For training and commands. It also says which jobs' ranks must keep in step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from wlb_megatron.config import WlbConfig
from wlb_megatron.errors import WlbError
from wlb_megatron.packing.chunk_packer import held
from wlb_megatron.pipeline.step_law import StageRoom
from wlb_megatron.workload.memory import (
    GIB,
    LEAST,
    MOST,
    StageMemory,
    chunked_bytes,
    chunked_stage_bytes,
    ends,
    memory_needed,
    micro_batches_in_flight,
    stage_memory,
    token_bytes,
    weight_bytes,
    working_bytes,
)
from wlb_megatron.workload.model import Layout, Model, symbols

LEAST_CHUNK = 8
"""A micro-batch with chunks has at least a window divided by this, so that fixed costs of kernels and hosts stay
small."""

MARGIN = WlbConfig().memory_margin
"""Share of the memory that is left free, if nothing else is set."""

LONGEST = (3, 4)
"""The longest micro-batch of a plan with chunks, in windows. A longer document is cut into chunks."""


def holds_whole(config: WlbConfig, window: int, alignment: int = 1) -> bool:
    """Whether micro-batches can hold uncut documents: Lmax is 1.25 windows or more, or not set."""
    return config.max_tokens is None or config.max_tokens // alignment * alignment * 4 >= window * 5


def chunk_capacity(window: int, max_tokens: int | None, alignment: int) -> int:
    """Tokens of the longest micro-batch of a plan with chunks. max_tokens: the flag's value; None: the longest
    useful.
    """
    longest_useful = window * LONGEST[0] // LONGEST[1]
    return max(alignment, min(longest_useful, max_tokens or longest_useful) // alignment * alignment)


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """What decides about a GPU's memory: `size` is its bytes, `window` and `alignment` are tokens, `margin` is the
    share that is left free. `layers` has those of each model chunk, by stage; None means that all have as many as the
    fullest. `depths` are the layers of multi-token prediction. Both are symbols if the model is a HybridModel."""

    size: int
    shape: Model
    layout: Layout
    window: int
    alignment: int
    margin: float = MARGIN
    layers: tuple[tuple[int | str, ...], ...] | None = None
    depths: int | str = 0

    @property
    def room(self) -> int:
        """Bytes that a plan may use: all but the margin."""
        return int(self.size * (1 - self.margin))

    def stage(self, stage: int, layers: Sequence[int | str] | None = None) -> StageMemory:
        """What a stage holds of a step. `layers` has those of each of its model chunks, if they are known better.
        Raises ValueError if the flags recompute no layers in full."""
        layers = layers or self._layers(stage)
        return stage_memory(self.shape, self.layout, stage, layers, depths=self.depths)

    def _layers(self, stage: int) -> tuple[int | str, ...]:
        """Layers of each model chunk, without multi-token prediction's."""
        if self.layers is not None:
            return self.layers[stage]
        virtual = self.layout.virtual
        assert isinstance(self.shape.layers, int) and isinstance(self.depths, int)
        return (-(-(self.shape.layers - self.depths) // virtual),) * virtual

    def available(self, stage: int) -> int:
        """Bytes for a step's activations on a stage, 0 where weights leave none."""
        return max(0, self.room - self.weights(stage))

    def weights(self, stage: int) -> int:
        """Bytes of a stage's weights, gradients and optimizer state."""
        layers = [*self._layers(stage), self.depths if stage == self.layout.pipeline - 1 else 0]
        shape = replace(self.shape, layers="".join(map(symbols, layers)))
        return weight_bytes(shape, self.layout, stage)

    def weights_problem(self) -> str | None:
        """A line with figure and cure, if weights, gradients and optimizer state alone do not fit; else None."""

        def needed(layout: Layout) -> int:
            return max(weight_bytes(self.shape, layout, stage) for stage in ends(layout))

        layout = self.layout
        if needed(layout) <= self.room:
            return None
        expert = "" if self.shape.experts is None else "--expert-model-parallel-size, "
        cures = [f"raise {expert}--tensor-model-parallel-size or --pipeline-model-parallel-size"]
        if not layout.fully_sharded and not layout.distributed_optimizer:
            cures.insert(0, "use --use-distributed-optimizer")
        elif needed(replace(layout, data=1 << 20)) <= self.room:
            shared = "all of it" if layout.fully_sharded else "the optimizer's state"
            cures.append(f"add data-parallel ranks, which share {shared}")
        return (
            f"weights, gradients and optimizer state alone need {needed(layout) / GIB:.1f} GiB a GPU, but "
            f"{self._room_there}: {', '.join(cures)}, or train a smaller model"
        )

    @property
    def _room_there(self) -> str:
        margin = f"{self.size / GIB:.1f} less a margin of {self.margin:.0%}"
        return f"{self.room / GIB:.1f} GiB are there ({margin})"

    def rooms(self) -> tuple[StageRoom, StageRoom] | None:
        """What the first and the last stage can keep of a step, for the packer's law. None where the flags recompute
        no layers in full, so that there is nothing to plan."""
        if self.layout.recompute != "full":
            return None
        first, last = (self._room(stage) for stage in (0, self.layout.pipeline - 1))
        return first, last

    def _room(self, stage: int) -> StageRoom:
        stage_held, context = self.stage(stage), self.layout.context
        chunks = stage_held.chunks
        more_bytes = sum(chunk.more()[-1] + chunk.switched for chunk in chunks)
        return StageRoom(
            available=self.available(stage) * context,
            floor=sum(chunk.floor for chunk in chunks) + stage_held.ends,
            more=more_bytes,
            working=max(stage_held.loss, *(chunk.working for chunk in chunks)),
            keys=stage_held.keys * sum(chunk.keyed for chunk in chunks),
        )

    def whole(self, least: tuple[int, int] = LEAST) -> int:
        """Tokens of the longest micro-batch of whole documents that fits, at most 4 windows. WlbError if fewer than
        `least` windows (a fraction) do."""
        shape, layout, alignment = self.shape, self.layout, self.alignment
        if problem := self.weights_problem():
            raise WlbError(problem)
        fitting = min(
            (self.room - weight_bytes(shape, layout, stage)) // token_bytes(shape, layout, stage)
            for stage in ends(layout)
        )
        tokens = min(fitting * layout.context, MOST * self.window) // alignment * alignment
        if tokens * least[1] < self.window * least[0]:
            # Up to a multiple of the alignment: 1.25 windows of 10 are 13 tokens, with alignment 8 these are 16.
            needed = -(-self.window * least[0] // (least[1] * alignment)) * alignment
            windows = "one window" if least == (1, 1) else f"{least[0] / least[1]:g} windows"
            weights = max(weight_bytes(shape, layout, stage) for stage in ends(layout))
            raise WlbError(
                f"a micro-batch of {windows} ({needed} tokens) needs {memory_needed(shape, layout, needed) / GIB:.1f} "
                f"GiB a GPU, {weights / GIB:.1f} of them for weights and optimizer, but {self._room_there}: raise "
                "--context-parallel-size or --tensor-model-parallel-size (with --sequence-parallel), use "
                "--recompute-granularity full or --use-distributed-optimizer, or lower --seq-length"
            )
        return tokens

    def in_chunks(self) -> int:
        """The same with documents in chunks, none longer than the window; at most what a plan with chunks uses. 0 if
        none fits."""
        shape, layout, alignment = self.shape, self.layout, self.alignment
        flying = held(self.window, layout.micro_batches, micro_batches_in_flight(layout))
        fitting = min(
            (self.room - chunked_stage_bytes(shape, layout, stage, 0, flying, self.window))
            // working_bytes(shape, layout, stage)
            for stage in ends(layout)
        )
        fitting_tokens = max(0, fitting * layout.context // alignment * alignment)
        return min(fitting_tokens, chunk_capacity(self.window, None, alignment))

    def longest_document(self, capacity: int) -> int:
        """Tokens of the longest document in chunks that fits beside all else of an iteration; 0 if none does. A
        micro-batch has at most `capacity` tokens."""
        shape, layout = self.shape, self.layout
        share, fitting = layout.micro_batches * self.window, []
        for stage in ends(layout):
            free = self.room - chunked_stage_bytes(shape, layout, stage, capacity, share, 0)
            bytes_per_token = chunked_stage_bytes(shape, layout, stage, 0, 1, 1) - weight_bytes(
                shape, layout, stage
            )
            fitting.append(free // bytes_per_token * layout.context)
        return max(0, min(fitting))

    def needed(self, config: WlbConfig, longest_tokens: int) -> tuple[int, int]:
        """Bytes that the fullest GPU needs at most: (with chunks, with whole documents).

        longest_tokens: tokens of the longest document in chunks. Whole documents are counted at the settings' Lmax (0:
        they are not trained).
        """
        chunked = chunked_bytes(
            *(self.shape, self.layout),
            longest=chunk_capacity(self.window, config.max_tokens, self.alignment),
            held=held(
                self.window, self.layout.micro_batches, micro_batches_in_flight(self.layout), longest_tokens
            ),
            document=max(self.window, longest_tokens),
        )
        if not holds_whole(config, self.window, self.alignment):
            return chunked, 0
        return chunked, memory_needed(self.shape, self.layout, lmax(config, self.window))


def with_lmax(
    config: WlbConfig, memory: GpuMemory | None, window: int, no_chunks: Sequence[tuple[str, str]]
) -> WlbConfig:
    """The settings with Lmax filled in: 1.5 windows, or what fits if that is less. A given value stays.

    If not even 1.25 windows fit, micro-batches are shorter and documents train in chunks, if they can; else WlbError.
    Fixed windows need room for one.
    memory: None: ignore memory. no_chunks: settings that cannot be combined with chunks.
    """
    if config.max_tokens is not None:
        return config
    usual = lmax(config, window)
    if memory is None:
        return replace(config, max_tokens=usual)
    try:
        least = (1, 1) if config.fixed_windows else LEAST
        return replace(config, max_tokens=min(usual, memory.whole(least)))
    except WlbError:
        whole_alone = config.chunks == "off" or config.fixed_windows or settings_refused(config) or no_chunks
        shorter = 0 if whole_alone else memory.in_chunks()
        if shorter * LEAST_CHUNK < window:
            raise
        return replace(config, max_tokens=shorter)


def no_memory_for_chunks(config: WlbConfig, memory: GpuMemory | None) -> list[tuple[str, str]]:
    """A row as in chunks_refused, if chunks may need more memory than the GPU has, and more than whole documents.

    Chunks can need more than whole documents at the same Lmax with many key heads under full recompute, whose keys
    exceed the activations that are kept. That alone is no reason: on two H200s with 64 layers, estimates of 60.1 and
    60.0 GiB once kept chunks off a GPU of 140.
    """
    if config.chunks != "auto" or config.overlong == "chunk" or memory is None:
        return []
    chunked, whole_bytes = memory.needed(config, memory.window)
    if not whole_bytes or chunked <= max(whole_bytes, memory.room):
        return []
    peaks = (
        f"a peak of {chunked / GIB:.1f} GiB on a GPU with {memory.room / GIB:.1f} to use, where whole documents need "
        f"{whole_bytes / GIB:.1f}"
    )
    return [(f"{peaks}: --wlb-chunks on allows it", "use fewer key heads (--num-query-groups)")]


def describe_memory(config: WlbConfig, memory: GpuMemory, longest_tokens: int, *, chunks: bool) -> str:
    """A line for people: how much of a GPU's memory it takes to make more micro-batches than windows.

    The longest document has `longest_tokens`; with `chunks`, long ones train in chunks. Whole documents free nothing:
    a micro-batch may still have Lmax tokens, and as many of these run at once as with one per window (arrange.py).
    """
    chunked_gib, whole_gib = (size / GIB for size in memory.needed(config, longest_tokens))
    start = "memory of the fullest GPU, at most"
    if chunks and not whole_gib:
        return f"{start}: {chunked_gib:.1f} GiB; whole documents do not fit"
    if chunks:
        freed = f"{'free' if chunked_gib < whole_gib else 'add'} {abs(whole_gib - chunked_gib):.1f}"
        return f"{start}: {chunked_gib:.1f} GiB, with whole documents {whole_gib:.1f}, so chunks {freed}"
    tokens = lmax(config, memory.window)
    return f"{start}: {whole_gib:.1f} GiB, however many micro-batches: each may hold {tokens:,} tokens"


def lmax(config: WlbConfig, window: int) -> int:
    """Tokens of the longest micro-batch of whole documents; 1.5 windows if nothing else is set."""
    return 3 * window // 2 if config.max_tokens is None else config.max_tokens


def settings_refused(config: WlbConfig) -> list[tuple[str, str]]:
    """(flag, cure) of each of the plugin's own settings that cannot be combined with documents in chunks."""
    rows = (
        (
            config.cp_mode == "dynamic",
            "--wlb-cp-mode dynamic",
            "groups take whole documents; use --wlb-cp-mode fixed",
        ),
        (
            bool(config.max_delay),
            f"--wlb-max-delay {config.max_delay}",
            "documents in chunks never wait; leave it out",
        ),
    )
    return [(flag, cure) for applies, flag, cure in rows if applies]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Megatron's settings that decide about chunks.

    Args:
        stages: pipeline stages.
        tensor, expert, expert_tensor: parallel sizes.
        balancing: kinds of routers' losses.
        shards_weights: FSDP of either kind.
        shares_scales: FP8 whose scales come from the largest values of all data-parallel ranks.
        offloads: offloads activations module by module.
        interleaves: has virtual stages.
        offloads_layers: offloads whole layers.
        replays_routes: experts' choices are recorded and replayed.
        hides_padding: its block gives layers that it does not recompute no padding mask.
        delta_nets: it has gated delta nets.
    """

    stages: int = 1
    tensor: int = 1
    experts: int = 0
    expert: int = 1
    expert_tensor: int | None = None
    balancing: tuple[str, ...] = ()
    shards_weights: bool = False
    shares_scales: bool = False
    offloads: bool = False
    interleaves: bool = False
    offloads_layers: bool = False
    replays_routes: bool = False
    hides_padding: bool = False
    delta_nets: bool = False

    def chunks_refused(self, chunks: str = "on") -> list[tuple[str, str]]:
        """(flag, cure) of each setting under which a step cannot run in groups of micro-batches, or runs so only if
        asked. `chunks` is the choice of --wlb-chunks."""
        rows = (
            (
                self.offloads and self.interleaves,
                "--fine-grained-activation-offloading over virtual stages",
                "it has learned in which order its first step ran model chunks, but chunks need another; use one model "
                "chunk a stage, or recompute instead",
            ),
            (
                self.offloads and chunks != "on",
                "--fine-grained-activation-offloading",
                "chunks were tried with it on CPUs alone, so give --wlb-chunks on",
            ),
            (
                self.offloads_layers,
                "--cpu-offloading-num-layers",
                "Transformer Engine frees a micro-batch's activations when the next forward begins, but chunks need "
                "those of several; recompute instead",
            ),
            (
                self.experts > 0 and self.replays_routes,
                "--moe-enable-routing-replay",
                "it replays experts' choices in the order of the forwards, but chunks run backward last first; drop it",
            ),
            (
                self.delta_nets,
                "gated delta nets (--hybrid-layer-pattern, --experimental-attention-variant)",
                "their state does not pass from chunk to chunk; train without chunks",
            ),
        )
        return [(flag, cure) for applies, flag, cure in rows if applies]

    def keeping_changes(self, chunks: str) -> str | None:
        """What comes out otherwise where some micro-batches keep a layer that others recompute; None: nothing.

        global_aux_loss is a mean over the micro-batches so far. One that is kept is counted in its forward, one that is
        recomputed before its backward. They come in the same order on a single stage without chunks alone. chunks: of
        --wlb-chunks.
        """
        if self.experts == 0:
            return None
        if "global_aux_loss" in self.balancing and (self.stages > 1 or chunks != "off"):
            return "global_aux_loss, a mean over the micro-batches so far (without a pipeline, --wlb-chunks off helps)"
        if self.hides_padding:
            return "routers' counts, for this Megatron's kept layers see no padding mask (dev)"
        return None

    @property
    def in_step(self) -> bool:
        """Whether data-parallel ranks need the same order of forwards and backwards, and so the same groups.

        They do where they exchange something inside a forward or a backward: experts tokens, routers counts of tokens,
        FSDP parameters and gradients, FP8 with delayed scaling its largest values. Ranks always run equally many
        micro-batches, so only groups of chunks can bring them out of step. All other exchanges between them come once a
        step, at the same place of it: parameters by bucket in the first forward (--overlap-param-gather), gradients by
        bucket in the last backward (--overlap-grad-reduce), and after it experts' biases, counts of tokens, norms and
        logged losses. (Read in Megatron 0.18, 0.19, main and dev, and in Transformer Engine 2.18 to 2.20.)
        """
        shared = self.expert > 1 or (self.expert_tensor or self.tensor) > self.tensor
        routed = self.experts > 0 and (shared or "global_aux_loss" in self.balancing)
        return routed or self.shards_weights or self.shares_scales
