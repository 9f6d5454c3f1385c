"""Which jobs cannot train documents in chunks, and which jobs' ranks must keep in step. For training and commands."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_RELEASE = (0, 17)
"""The first megatron-core whose schedule can run more forwards ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Megatron's settings that decide about chunks.

    Args:
        stages: pipeline stages.
        tensor, expert, expert_tensor: parallel sizes.
        mtp: further tokens that are predicted.
        balancing: kinds of routers' losses.
        shards_weights: FSDP of either kind.
        shares_scales: FP8 whose scales come from the largest values of all data-parallel ranks.
        offloads: offloads activations module by module.
        interleaves: has virtual stages.
        offloads_layers: offloads whole layers.
        replays_routes: experts' choices are recorded and replayed.
        release: the one of megatron-core.
        unknown_schedule: it interleaves stages in a way that the plugin does not know.
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
    mtp: int = 0
    offloads: bool = False
    interleaves: bool = False
    offloads_layers: bool = False
    replays_routes: bool = False
    release: str | None = None
    unknown_schedule: bool = False
    hides_padding: bool = False
    delta_nets: bool = False

    def chunks_refused(self, chunks: str = "on") -> list[tuple[str, str]]:
        """(flag, cure) of each setting under which a step cannot run in groups of micro-batches, or runs so only if
        asked. `chunks` is the choice of --wlb-chunks."""
        rows = (
            (
                self.release is not None
                and self.stages > 1
                and tuple(map(int, self.release.split(".")[:2])) < LEAST_RELEASE,
                f"megatron-core {self.release} with --pipeline-model-parallel-size above 1",
                "its schedule cannot run more forwards ahead; use 0.17 or later",
            ),
            (
                self.unknown_schedule,
                "--num-virtual-stages-per-pipeline-rank / --num-layers-per-virtual-pipeline-stage",
                "this Megatron's interleaved schedule is not the one that was tried; use one model chunk a stage, or a "
                "release that was tried",
            ),
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
            return "routers' counts, for this Megatron's kept layers see no padding mask (0.17, dev)"
        return None

    @property
    def in_step(self) -> bool:
        """Whether data-parallel ranks need the same order of forwards and backwards, and so the same groups."""
        return bool(self.meetings())

    def meetings(self) -> list[str]:
        """What data-parallel ranks exchange inside a forward or a backward. Each must then be in the same one.

        Ranks always run equally many micro-batches, so only groups of chunks can bring them out of step. All other
        exchanges between them come once a step, at the same place of it: parameters by bucket in the first forward
        (--overlap-param-gather), gradients by bucket in the last backward (--overlap-grad-reduce), and after it
        experts' biases, counts of tokens, norms and logged losses. (Read in Megatron 0.16 to 0.19, main and dev, and
        in Transformer Engine 2.18 to 2.20.)
        """
        shared = self.expert > 1 or (self.expert_tensor or self.tensor) > self.tensor
        rows = (
            (self.experts > 0 and shared, "experts exchange tokens"),
            (
                self.experts > 0 and "global_aux_loss" in self.balancing,
                "routers exchange counts of tokens, again under recompute",
            ),
            (self.shards_weights, "FSDP exchanges parameters and gradients"),
            (self.shares_scales, "FP8 with delayed scaling takes its largest values, again under recompute"),
        )
        return [what for applies, what in rows if applies]
