"""A profile as one JSON file: a model's shape, the profiler's samples of it on a GPU, and the costs fitted to them."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wlb_megatron.errors import WlbError
from wlb_megatron.whole_files import write_whole
from wlb_megatron.workload.cost_model import Costs
from wlb_megatron.workload.model import Experts, Model, ffn_parameters

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ProfiledModel(Model):
    """One layer of a model, on a rank of the layout it is measured for.

    ffn: with experts the width of those that a token passes. tp, cp: sizes of tensor and context parallelism. fused:
    gradients are added to fp32 ones inside the matrix products (gradient_accumulation_fusion).
    """

    layers: int | str = 1
    tp: int = 1
    cp: int = 1
    fused: bool = False

    @classmethod
    def from_dict(cls, sizes: dict[str, Any]) -> ProfiledModel:
        """The inverse of dataclasses.asdict; older profiles have no experts."""
        experts = sizes.get("experts")
        return cls(**{**sizes, "experts": experts and Experts(**experts)})

    @property
    def rank_heads(self) -> int:
        return self.heads // self.tp

    @property
    def rank_kv_heads(self) -> int:
        return max(1, self.kv_heads // self.tp)

    @property
    def _attention_parameters(self) -> int:
        return self.hidden * self.head_dim * 2 * (self.rank_heads + self.rank_kv_heads)

    @property
    def rank_parameters_passed(self) -> int:
        """Weights of one tensor-parallel rank that a token passes."""
        return self._attention_parameters + ffn_parameters(self, self.ffn) // self.tp

    @property
    def rank_experts(self) -> int:
        """Experts that are measured: this rank's, or as many as a token chooses if it has fewer."""
        experts = self.experts
        return 0 if experts is None else max(experts.count // experts.parallel, experts.chosen)

    @property
    def rank_parameters(self) -> int:
        """Weights of the measured layer, which the optimizer updates."""
        experts = self.experts
        if experts is None:
            return self.rank_parameters_passed
        width = (self.rank_experts * experts.ffn + experts.shared) // experts.tensor
        return self._attention_parameters + ffn_parameters(self, width) + self.hidden * self.rank_experts


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A profile as it is used.

    device: the GPU's name. host: the processor's name, empty in older profiles. fingerprint: a digest of samples.
    """

    path: str
    model: ProfiledModel
    device: str
    versions: dict[str, str]
    fingerprint: str
    costs: Costs
    host: str = ""

    def describe(self) -> str:
        """What it is of, for reports."""
        versions = ", ".join(f"{name} {value}" for name, value in self.versions.items())
        return f"{self.device}, {versions}, profile {self.fingerprint}"

    def refuse_other(self, shape: Model, tp: int, *, any_vocabulary: bool = False) -> None:
        """WlbError where the model to be trained or simulated, on `tp` tensor ranks, is not the profiled one."""
        profiled = self.model
        names = ["hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "gated"]
        if any_vocabulary:
            names.remove("vocab")
        routed = shape.experts or profiled.experts
        if routed:
            names.remove("ffn")  # says less than the experts do
        pairs = [(name, getattr(profiled, name), getattr(shape, name)) for name in names]
        pairs.append(("tp", profiled.tp, tp))
        # What experts' memory assumes is not measured.
        for name in ("count", "ffn", "parallel", "tensor", "chosen", "shared") if routed else ():
            there, here = (getattr(model.experts, name, None) for model in (profiled, shape))
            pairs.append((f"experts' {name}", there, here))
        differ = [f"{name} {there} there, {here} here" for name, there, here in pairs if there != here]
        if differ:
            raise WlbError(
                f"profile {self.path} is of another model or layout ({'; '.join(differ)}): run wlb-megatron profile "
                "for this one, or leave the profile out"
            )


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")  # compares as false with any limit, and rounds to -2**63


def read_profile(path: str | Path) -> Profile:
    """Read a profile. WlbError, naming the file, if it is missing, damaged or of another format."""
    again = "make it again with wlb-megatron profile"
    try:
        contents = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_no_number)
    except OSError as error:
        raise WlbError(
            f"profile {path} cannot be read: {error.strerror}; give the file that wlb-megatron profile wrote"
        ) from None
    except ValueError as error:
        raise WlbError(f"profile {path} is not JSON ({error}); {again}") from None
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        raise WlbError(f"profile {path} is not of format {FORMAT}; {again}")
    if not {"settings", "samples"} <= contents.keys() or contents.get("fingerprint") != fingerprint(contents):
        raise WlbError(f"profile {path} is damaged (its fingerprint does not match its samples); {again}")
    try:
        settings = contents["settings"]
        return Profile(
            path=str(path),
            model=ProfiledModel.from_dict(settings["model"]),
            device=str(settings["gpu"]),
            versions={str(name): str(value) for name, value in settings["versions"].items()},
            fingerprint=str(contents["fingerprint"]),
            costs=Costs.from_dict(contents["fit"]),
            host=str(settings.get("host", "")),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise WlbError(f"profile {path} is damaged ({error}); {again}") from None


def host_name() -> str:
    """The name of this machine's processor, or its architecture if Linux gives no name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def fingerprint(contents: dict[str, Any]) -> str:
    """Of settings and samples: two profiles with one fingerprint hold the same measurements."""
    text = json.dumps({"settings": contents["settings"], "samples": contents["samples"]}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def write_profile(path: Path, contents: dict[str, Any]) -> None:
    """Write a profile, whole or not at all; a line for each sample."""
    parts = {**contents, "fingerprint": fingerprint(contents)}
    samples = ",\n  ".join(map(json.dumps, parts.pop("samples")))
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in parts.items()]
    write_whole(path, "{\n" + ",\n".join([*lines, f' "samples": [\n  {samples}\n ]']) + "\n}\n", "--out")
