"""The profiler on a CPU, where it measures Megatron's local layer: real timings of a small grid."""

import json
import os
import runpy
import sys
import time
from typing import Any

import pytest
import torch
from forked_ranks import spawn
from megatron_runs import free_port

from wlb_megatron.attention.device_layout import device_layout
from wlb_megatron.cli import main
from wlb_megatron.profiler import run
from wlb_megatron.profiler.layer import AttentionBench, _alone, _Part, layer_step, leave, megatron_layer
from wlb_megatron.profiler.points import GRIDS, MOST_ROWS, attention_points
from wlb_megatron.profiler.run import Clock
from wlb_megatron.sharding.attention_calls import attention_layout
from wlb_megatron.workload.model import Experts
from wlb_megatron.workload.profile import ProfiledModel, host_name, read_profile

_ARGUMENTS = """--grid tiny --backend torch --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4
--num-query-groups 2 --vocab-size 128 --swiglu"""
FLAGS = _ARGUMENTS.split()
MODEL = ProfiledModel(hidden=32, ffn=64, heads=4, kv_heads=2, head_dim=8, vocab=128)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def profile_path(tmp_path_factory):
    out = tmp_path_factory.mktemp("profile") / "profile.json"
    assert main(["profile", "--out", str(out), *FLAGS]) == 0
    return out


def test_a_profile_says_what_it_is_of_and_how_sure_it_is(profile_path):
    profiled = json.loads(profile_path.read_text())
    settings = profiled["settings"]
    assert settings["model"]["hidden"] == 32 and settings["versions"]["torch"] == torch.__version__
    assert settings["host"] == host_name()
    assert "CPU" in settings["gpu"] and len(profiled["fingerprint"]) == 16
    parts = {sample["part"] for sample in profiled["samples"]}
    every = "layer embedding loss optimizer call rectangle diagonal documents share"
    assert parts >= set(every.split())
    for sample in profiled["samples"]:
        for way in ("forward", "backward"):
            middle, low, high = sample[way]
            assert 0 < low <= middle <= high, sample
        assert sample["repeats"] >= 3
    assert set(profiled["leave_out"]) >= {"documents", "share"}
    assert read_profile(profile_path).costs.quadratic_at > 0
    assert [path.name for path in profile_path.parent.iterdir()] == ["profile.json"]

    layer = [
        s for s in profiled["samples"] if s["part"] == "layer"
    ]  # timings are real: a longer one takes longer
    # The quickest of each: a busy machine makes others longer.
    times = {s["sizes"]["tokens"]: min(s["forward"]) for s in layer}
    assert times[512] > times[16]


def test_a_layer_that_cannot_be_built_ends_in_one_line(tmp_path, capsys):
    """Megatron's dispatcher of tokens makes a CUDA stream. Without Megatron it is one line, too."""
    flags = ["profile", "--out", str(tmp_path / "p.json"), *FLAGS]
    assert main([*flags, "--num-experts", "4", "--moe-router-topk", "2"]) == 2
    leave()
    error = capsys.readouterr().err
    assert "Megatron's layer cannot be built" in error and "wlb-megatron doctor" in error
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "wlb_megatron.profiler.layer")
        patch.setitem(sys.modules, "megatron.core", None)
        assert main(flags) == 2
    error = capsys.readouterr().err
    assert "profiling needs megatron.core" in error and "pip install" in error and error.count("\n") == 1


def test_a_budget_too_small_for_a_fit_writes_no_profile(tmp_path, capsys):
    out = tmp_path / "p.json"
    assert main(["profile", "--out", str(out), *FLAGS, "--budget", "0"]) == 2
    assert "the profile lacks" in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "give --out"),
        ("--out /nowhere/at/all/p.json", "there is no folder"),
        ("--out p.json --backend te", "needs a GPU"),
        ("--out p.json", "no GPU was found"),
        ("--out p.json --backend torch --num-attention-heads 3 --num-query-groups 2", "not a multiple of"),
        ("--refit p.json", "measure again"),
    ],
)
def test_wrong_flags_end_in_one_line(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_pattern_of_layers_is_noted_not_measured(tmp_path, capsys):
    words = ["--budget", "0", "--", "--hybrid-layer-pattern", "*-*-"]
    assert main(["profile", "--out", str(tmp_path / "p.json"), *FLAGS, *words]) == 2
    note = "> note: --hybrid-layer-pattern is not predicted: one layer of attention"
    assert note in capsys.readouterr().err


def one_of_two(rank: int, port: int, flags: list[str]) -> None:
    """As torchrun starts it."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in places.items()}}
    torch.set_num_threads(1)
    sys.argv = ["profiler", *flags]
    with pytest.raises(SystemExit) as end:
        runpy.run_module("wlb_megatron.profiler", run_name="__main__", alter_sys=True)
    assert end.value.code == 0


def test_several_processes_measure_the_network(tmp_path):
    out = tmp_path / "p.json"
    spawn(one_of_two, (free_port(), ["--out", str(out), *FLAGS]), 2)
    links = read_profile(out).costs.links
    assert links is not None and set(links) == {"all_gather", "reduce_scatter", "all_to_all", "p2p"}


def test_a_clock_measures_forward_and_backward_apart():
    clock = Clock(torch.device("cpu"), seconds=0.02)
    timing = clock.measure(lambda: time.sleep(0.002), lambda _: time.sleep(0.02))
    assert 2e6 <= timing.forward[0] < timing.backward[0] and timing.backward[0] >= 20e6
    assert timing.repeats >= 3 and timing.host_forward == 0


def test_the_full_grid_covers_long_and_tiny_segments_and_fills_the_device():
    model = ProfiledModel(hidden=4096, ffn=11008, heads=32, kv_heads=8, head_dim=128, vocab=128256, tp=4)
    points = list(attention_points(GRIDS["full"], model))
    assert len(set(map(str, points))) == len(points)
    for point in points:
        if point.part == "rectangle":
            ((queries, keys, copies),) = point.sizes["rectangles"]
            tiles = copies * -(-min(queries, keys) // 128) * 8
            assert tiles >= 2112 or (copies + 1) * max(queries, keys) > MOST_ROWS
    assert sum(point.part == "share" for point in points) >= 50
    assert points == list(attention_points(GRIDS["full"], model))  # seeded
    tiny = list(map(str, attention_points(GRIDS["tiny"], MODEL)))
    assert len(set(tiny)) == len(tiny)


def test_a_share_alone_attends_to_as_many_keys_as_in_its_group():
    bench = AttentionBench(MODEL, _Counting(), torch.device("cpu"), torch.float32)
    for point in attention_points(GRIDS["tiny"], MODEL):
        if point.plan is None:
            continue
        bench.kernels.seen.clear()
        forward, backward = bench.step(point)
        backward(forward())
        rows = point.plan.ranks[point.rank]
        pairs = sum((e * (e + 1) - s * (s + 1)) // 2 for _, s, e in rows.tolist())
        assert bench.kernels.seen[0] == pairs
        layout = _alone(attention_layout(point.plan, point.rank))
        assert device_layout(layout, "cpu").tokens == int((rows[:, 2] - rows[:, 1]).sum())


class _Counting:
    """torch's kernels, which note the query-key pairs of each forward; of all of a step's, the sum comes first."""

    def __init__(self) -> None:
        from wlb_megatron.attention.kernels.torch_backend import TorchKernels

        self.inner = TorchKernels()
        self.seen: dict[int, int] = {}
        self.separate = True

    def buffer_rows(self, call: Any) -> tuple[int, int]:
        return self.inner.buffer_rows(call)

    def forward(self, call: Any, q: Any, kv: Any, scale: float) -> Any:
        pairs = sum(a * (b + 1) // 2 if call.causal else a * b for a, b in call.sizes)
        self.seen[0] = self.seen.get(0, 0) + pairs
        return self.inner.forward(call, q, kv, scale)

    def backward(self, *args: Any) -> Any:
        return self.inner.backward(*args)


def test_a_layer_keeps_its_gradients_in_fp32_and_gives_the_inputs():
    layer = megatron_layer(MODEL, torch.device("cpu"), torch.float32)
    weights = sum(weight.numel() for weight in layer.parameters())
    assert weights == MODEL.rank_parameters + 2 * MODEL.hidden
    forward, backward = layer_step(layer, MODEL, 8, torch.empty(0))
    out = forward()
    assert out.shape == (8, 1, 32)
    backward(out)
    for parameter in layer.parameters():
        weight: Any = parameter
        assert weight.grad is None and float(weight.main_grad.abs().sum()) > 0
    leave()


def test_a_layers_experts_are_counted_and_see_their_part_of_the_tokens():
    """Of 8 experts over 2 ranks 4 are measured, on half of the tokens: TP 2, expert-tensor 1."""
    experts = Experts(8, 16, parallel=2, tensor=1, chosen=2, shared=8)
    sizes = {"hidden": 32, "ffn": 40, "heads": 4, "kv_heads": 2, "head_dim": 8, "vocab": 128}
    model = ProfiledModel(**sizes, tp=2, experts=experts)
    attention, router = 32 * 8 * 2 * (2 + 1), 32 * 4
    assert model.rank_experts == 4
    assert model.rank_parameters == attention + router + 3 * 32 * (4 * 16 + 8)
    x = torch.randn(6, 1, 32)
    out, bias = _Part(lambda rows, **_: (2 * rows, None), 2)(x)
    assert torch.equal(out, torch.cat((2 * x[:3], x[3:]))) and bias is None


def test_a_profile_with_experts_is_of_them_alone(tmp_path, capsys, monkeypatch):
    """Of a launch command; analyze then needs no flags of experts, and refuses other ones."""
    launch = """torchrun --nproc-per-node 4 pretrain_gpt.py --hidden-size 32 --num-attention-heads 4 --swiglu
    --num-query-groups 2 --group-query-attention --vocab-size 128 --num-experts 8 --moe-router-topk 2
    --moe-ffn-hidden-size 32 --expert-model-parallel-size 2 --lr 1e-4 --num-layers 2"""
    out = tmp_path / "p.json"
    flags = ["--out", str(out), "--grid", "tiny", "--backend", "torch"]
    dense = ProfiledModel(hidden=32, ffn=64, heads=4, kv_heads=2)  # experts need a GPU
    monkeypatch.setattr(run, "megatron_layer", lambda _, *device: megatron_layer(dense, *device))
    assert main(["profile", *flags, "--", *launch.split()]) == 0
    sizes = read_profile(out).model
    assert (sizes.ffn, sizes.rank_experts, sizes.experts) == (64, 4, Experts(8, 32, parallel=2))
    job = f"analyze --profile {out} --lengths 30,40,9,64 --window 64 --iterations 1 --cp 2".split()
    capsys.readouterr()
    assert main([*job, "--no-split", "--search", "none", "--num-layers", "2"]) == 0
    assert "(--expert-imbalance)" in capsys.readouterr().out
    assert main([*job, "--moe-router-topk", "4"]) == 2
    assert "experts' chosen 2 there, 4 here" in capsys.readouterr().err
    assert main(["profile", *flags, "--model", "deepseek-v3"]) == 2
    assert "multi-latent attention is not measured" in capsys.readouterr().err


class _Time:
    """A clock that only work moves on, in nanoseconds."""

    now = 0

    @classmethod
    def perf_counter_ns(cls) -> int:
        return cls.now

    @classmethod
    def work(cls, ns: int) -> None:
        cls.now += ns


class _Event:
    """A CUDA event of a device that works at once."""

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0

    def record(self) -> None:
        self.at = _Time.now

    def elapsed_time(self, later: "_Event") -> float:
        return (later.at - self.at) / 1e6


def test_a_gpus_clock_heats_the_device_and_tells_launches_apart(monkeypatch):
    asleep: list[int] = []
    monkeypatch.setattr(run, "time", _Time)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", asleep.append)
    ran: list[str] = []

    def forward() -> str:
        ran.append("forward")
        _Time.work(2_000_000)
        return "made"

    def backward(profile_path: str) -> None:
        ran.append(profile_path)
        _Time.work(4_000_000)

    timing = Clock(torch.device("cuda"), seconds=0.05).measure(forward, backward)
    assert timing.forward[0] == pytest.approx(2e6) and timing.backward[0] == pytest.approx(4e6)
    assert timing.host_forward == pytest.approx(2e6) and timing.host_backward == pytest.approx(4e6)
    assert ran[::2] == ["forward"] * (len(ran) // 2) and ran[1::2] == ["made"] * (len(ran) // 2)
    assert all(cycles > 0 for cycles in asleep)
    asleep.clear()
    Clock(torch.device("cuda"), seconds=0.05).measure(forward, backward, waits=True)
    assert asleep == [0, 0], "a host that waits for the device would measure its sleep"
