"""Checkpoints of runs without the plugin, with it, and without it again: the same keys, weights and counts."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_runs import flags, output_of, without_plugin
from torch.distributed.checkpoint import FileSystemReader

pytestmark = pytest.mark.megatron

RUN = "--global-batch-size 4 --save-interval 2 --split 1,0,0 --override-opt-param-scheduler"


@dataclass(frozen=True)
class Chain:
    """Folders of checkpoints, and logs, by run."""

    saved: dict[str, Path]
    logs: dict[str, str]

    def numbers(self, run: str, pattern: str) -> list[float]:
        return [float(value) for value in re.findall(pattern, self.logs[run])]


@pytest.fixture(scope="module")
def chain(corpus, tmp_path_factory):
    """Without the plugin two iterations, saved in Megatron's torch format; with it two more, saved as torch_dist;
    without it one more. `tuned`: another run with the plugin from the first one's weights alone, at rate 0."""
    out = tmp_path_factory.mktemp("chain")
    saved: dict[str, Path] = {}
    logs: dict[str, str] = {}

    def run(name: str, samples: int, more: str, load: str = "", stock: bool = False) -> None:
        saved[name] = out / name
        samples_and_folder = f"--data-path {corpus} --train-samples {samples} --save {saved[name]}"
        arguments = flags(RUN, samples_and_folder, more, f"--load {saved[load]}" if load else "")
        arguments = without_plugin(arguments) if stock else arguments
        logs[name] = output_of(arguments, 1, out=out / f"{name} seen", stock=stock)

    run("first", 8, "--ckpt-format torch", stock=True)
    run("with", 16, "--wlb-fresh-order", load="first")
    run("without", 20, "", load="with", stock=True)
    still = "--lr 0 --min-lr 0 --weight-decay 0 --ckpt-format torch"
    run("tuned", 4, f"--finetune --no-load-optim --no-load-rng {still}", load="first")
    return Chain(saved, logs)


def weights(folder: Path, iteration: int) -> dict[str, Any]:
    path = folder / f"iter_{iteration:07d}" / "mp_rank_00" / "model_optim_rng.pt"
    model: dict[str, Any] = torch.load(path, weights_only=False)["model"]
    return model


def distributed(folder: Path, iteration: int) -> dict[str, Any]:
    """Shapes of the tensors of a torch_dist checkpoint by key; None for what is no tensor."""
    metadata = FileSystemReader(folder / f"iter_{iteration:07d}").read_metadata()
    return {key: getattr(value, "size", None) for key, value in metadata.state_dict_metadata.items()}


def test_a_run_goes_on_with_the_plugin_and_without_it_again(chain):
    """Longer training at a resume stretches the learning rate: it falls by 1e-3 over all samples."""
    for name, samples, all_samples in (("first", [4, 8], 8), ("with", [12, 16], 16), ("without", [20], 20)):
        assert chain.numbers(name, r"consumed samples: +(\d+)") == samples
        rates = [1e-3 * (1 - n / all_samples) for n in samples]
        assert chain.numbers(name, r"learning rate: (\S+)") == pytest.approx(rates, abs=1e-9)
        assert all(math.isfinite(loss) for loss in chain.numbers(name, r"lm loss: (\S+)"))
    assert "at iteration 2" in chain.logs["with"] and "at iteration 4" in chain.logs["without"]


def test_keys_and_shapes_are_those_of_a_run_without_the_plugin(chain):
    ours, theirs = distributed(chain.saved["with"], 4), distributed(chain.saved["without"], 5)
    assert ours == theirs
    assert sum(size is not None for size in ours.values()) > 20


def test_finetuning_takes_the_weights_alone_to_the_last_bit(chain):
    before, after = weights(chain.saved["first"], 2), weights(chain.saved["tuned"], 1)
    assert before.keys() == after.keys()
    tensors = [name for name, value in before.items() if isinstance(value, torch.Tensor)]
    assert len(tensors) > 8
    for name in tensors:
        assert torch.equal(before[name], after[name]), name
    assert chain.numbers("tuned", r"consumed samples: +(\d+)") == [4]
