"""Which jobs cannot train documents in chunks, and which jobs' ranks must keep in step. For training and commands."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_RELEASE = (0, 17)
"""The first megatron-core whose schedule can run more forwards ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Megatron's settings that decide about chunks.

    stages, virtual: pipeline stages, model chunks per stage. tensor, expert, expert_tensor: parallel sizes. mtp:
    further tokens that are predicted. balancing: kinds of routers' losses. shards_weights: FSDP of either kind.
    offloads: offloads activations in the order of micro-batches. offloads_layers: offloads whole layers. release: of
    megatron-core.
    """

    stages: int = 1
    virtual: int = 1
    tensor: int = 1
    experts: int = 0
    expert: int = 1
    expert_tensor: int | None = None
    balancing: tuple[str, ...] = ()
    shards_weights: bool = False
    mtp: int = 0
    offloads: bool = False
    offloads_layers: bool = False
    release: str | None = None

    def chunks_refused(self) -> list[tuple[str, str]]:
        """(flag, cure) of each setting under which a step cannot run in groups of micro-batches."""
        rows = (
            (
                self.virtual > 1,
                "--num-virtual-stages-per-pipeline-rank / --num-layers-per-virtual-pipeline-stage",
                "chunks run in the non-interleaved schedule alone; use one model chunk a stage",
            ),
            (
                self.release is not None and self.stages > 1 and _parts(self.release) < LEAST_RELEASE,
                f"megatron-core {self.release} with --pipeline-model-parallel-size above 1",
                "its schedule cannot run more forwards ahead; use 0.17 or later",
            ),
            (
                self.mtp > 0,
                "--mtp-num-layers",
                "a chunk's last tokens would have no further tokens to predict; train whole documents",
            ),
            (
                self.experts > 0 and "seq_aux_loss" in self.balancing,
                "--moe-router-load-balancing-type seq_aux_loss",
                "it is a mean over a document, whose chunks are routed one after the other; use aux_loss",
            ),
            (
                self.offloads,
                "--fine-grained-activation-offloading",
                "it reloads activations in the order of the forwards, but chunks run backward last first; "
                "recompute instead",
            ),
            (
                self.offloads_layers,
                "--cpu-offloading-num-layers",
                "it holds one micro-batch's activations at a time, but chunks need those of several; recompute instead",
            ),
        )
        return [(flag, cure) for applies, flag, cure in rows if applies]

    @property
    def in_step(self) -> bool:
        """Whether data-parallel ranks communicate in every forward and backward, so that they need the same groups.

        Ranks that share experts exchange tokens there. Routers that balance over all ranks exchange counts (again
        under recompute). FSDP's ranks exchange parameters and gradients.
        """
        experts = self.experts > 0 and (
            self.expert > 1
            or (self.expert_tensor or self.tensor) > self.tensor
            or "global_aux_loss" in self.balancing
        )
        return experts or self.shards_weights


def _parts(release: str) -> tuple[int, int]:
    major, minor = release.split(".")[:2]
    return int(major), int(minor)
