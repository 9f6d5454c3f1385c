"""What Megatron counts of a planned run: losses per token, learning rate, FLOPs, tokens, and iterations run again.

One run on two data-parallel ranks, of which Megatron runs each iteration but the first twice: it is made to take a
result for wrong (--error-injection-rate), runs the iteration again, and goes on as the difference is not fatal.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_combinations import FSDP2, MOE
from megatron_runs import (
    failure,
    flags,
    launch,
    output_of,
    read_ranks,
    refusal_of,
    run_script,
    train,
    whole_gradients,
)

pytestmark = pytest.mark.megatron

ITERATIONS, SAMPLES = 4, 4
RUN = f"--global-batch-size {SAMPLES} --save-interval 10 --train-samples {ITERATIONS * SAMPLES}"
AGAIN = "--no-check-for-nan-in-loss-and-grad --check-for-spiky-loss --error-injection-rate 1"
RATE = "--min-lr 1e-4 --lr-decay-style cosine --lr-warmup-samples 6"
LOG = "--log-throughput --log-params-norm --log-num-zeros-in-grad --timing-log-level 2"


@dataclass(frozen=True)
class Run:
    """Its log, and of each rank [iteration][run of it][micro-batch]: documents (id, start, end), loss, predictions."""

    log: str
    out: Path
    ranks: list[list[list[list[tuple[Any, float, int]]]]]

    def last(self, iteration: int) -> list[tuple[Any, float, int]]:
        """Micro-batches of all ranks in the run of the iteration that was kept."""
        return [micro_batch for rank in self.ranks for micro_batch in rank[iteration][-1]]

    def tokens(self, iteration: int) -> list[int]:
        """Lengths of the documents that the iteration trained."""
        return [end - start for pieces, _, _ in self.last(iteration) for _, start, end in pieces]

    def logged(self, pattern: str) -> list[float]:
        """What the iterations' lines say, in order."""
        return [float(value) for value in re.findall(pattern, self.log)]


def seen(trained: dict[str, Any], micro_batches: int) -> list[list[list[tuple[Any, float, int]]]]:
    iterations: list[list[list[tuple[Any, float, int]]]] = [[] for _ in range(ITERATIONS)]
    for at, ((iteration, index, pieces, _), loss) in enumerate(
        zip(trained["documents"], trained["losses"], strict=True)
    ):
        assert index == at % micro_batches
        if index == 0:
            iterations[iteration].append([])
        real = [tuple(piece[1:]) for piece in pieces if piece[1] >= 0]
        iterations[iteration][-1].append((real, *loss))
    return iterations


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("accounts")
    arguments = flags(RUN, AGAIN, RATE, LOG, f"--data-path {corpus} --save {out}/saved --ckpt-format torch")
    said = output_of(arguments, 2, out=out)
    return Run(said, out, [seen(rank, SAMPLES // 2) for rank in read_ranks(out, 2)])


def test_an_iteration_that_is_run_again_gets_the_same_micro_batches(run):
    for rank in run.ranks:
        assert [len(runs) for runs in rank] == [1, 2, 2, 2]
        for runs in rank:
            assert all(again == runs[0] for again in runs)  # documents and losses, to the last bit


def test_the_logged_loss_is_the_mean_over_all_tokens_of_all_ranks(run):
    """F4: micro-batches differ in tokens, and a mean of their means would not be this."""
    means = []
    for iteration in range(ITERATIONS):
        losses = run.last(iteration)
        means.append(sum(loss for _, loss, _ in losses) / sum(count for _, _, count in losses))
        assert len({count for _, _, count in losses}) > 1
        assert sum(count for _, _, count in losses) == sum(n - 1 for n in run.tokens(iteration))
    # Megatron does not reset its sums after the first iteration: it logs the mean of the first two as the second.
    expected = [means[0], (means[0] + means[1]) / 2, *means[2:]]
    assert run.logged(r"lm loss: (\S+)") == pytest.approx(expected, rel=1e-6)


def test_the_learning_rate_follows_the_samples_that_have_trained(run):
    """F5: a warm-up over 6 samples, then a cosine down to 1e-4 at 16; a sample is a window, run once or twice."""
    assert run.logged(r"consumed samples: +(\d+)") == [4, 8, 12, 16]
    expected = [
        1e-3 * n / 6 if n < 6 else 1e-4 + 9e-4 * (1 + math.cos(math.pi * (n - 6) / 10)) / 2
        for n in (4, 8, 12, 16)
    ]
    assert run.logged(r"learning rate: (\S+)") == pytest.approx(expected, rel=1e-6)


def test_flops_are_those_of_the_documents_counted_by_hand(run):
    """F13: two layers of 32, 4 heads and 2 groups of 8, a gated ffn of 64, 128 logits; multiply and add are 2 FLOPs,
    backward twice the forward; an attended pair costs 2 x 32 multiplications, a document of n tokens has n*n/2."""
    saved = torch.load(run.out / "saved/iter_0000004/mp_rank_00/model_optim_rng.pt", weights_only=False)
    per_token = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64) + 32 * 128
    lengths = [n for iteration in range(ITERATIONS) for n in run.tokens(iteration)]
    pairs = 2 * 2 * 32 * sum(n * n for n in lengths) / 2
    assert saved["num_floating_point_operations_so_far"] == 6 * (per_token * sum(lengths) + pairs)
    assert len(run.logged(r"throughput per GPU \(TFLOP/s/GPU\): (\S+)")) == ITERATIONS


def test_tokens_are_counted_as_they_are_trained(run):
    counts = [sum(run.tokens(iteration)) for iteration in range(ITERATIONS)]
    assert run.logged(r"tokens: (\d+), \d+ so far") == counts
    assert run.logged(r"tokens: \d+, (\d+) so far") == [sum(counts[: k + 1]) for k in range(ITERATIONS)]


def test_megatrons_other_figures_are_logged(run):
    norms, zeros = run.logged(r"params norm: (\S+)"), run.logged(r"num zeros: (\S+)")
    assert len(norms) == len(zeros) == ITERATIONS and all(norm > 0 for norm in norms)
    assert all(count < 10_000 for count in zeros)  # embeddings of tokens that did not come
    for timer in ("batch-generator", "forward-compute", "backward-compute", "optimizer"):
        assert re.search(rf"^ +{timer}[ .]*: \([\d.]+, [\d.]+\)", run.log, re.MULTILINE), timer


def test_a_result_that_is_not_a_number_leaves_a_checkpoint_from_before_it(corpus, run, tmp_path):
    """It is not a number again: Megatron saves, exits with 16 to be tried on another GPU, and notes the rejection.
    From that checkpoint, whose packing state has to be of iteration 2, the iteration is run again."""
    saved, tracker = tmp_path / "saved", tmp_path / "rejected.txt"
    arguments = flags(RUN, f"--data-path {corpus} --save {saved} --load {saved}")
    arguments += ["--result-rejected-tracker-filename", str(tracker)]
    for attempt in ("first", "from the checkpoint, on the same GPU"):
        done = launch(arguments, 1, out=tmp_path / attempt, WORKER_NAN="3")
        assert done.returncode == 16, failure(done)
        assert (saved / "latest_checkpointed_iteration.txt").read_text() == "2"
        assert "FIRST_RERUN_REPRODUCIBLE result=nan message='found NaN" in tracker.read_text()
    replayed = read_ranks(tmp_path / attempt, 1)[0]["documents"]
    pieces = [tuple(piece[1:]) for _, _, of, _ in replayed for piece in of if piece[1] >= 0]
    assert sorted(pieces) == sorted(piece for of, _, _ in run.last(2) for piece in of)


NAN_RUN = """
import os, sys
from megatron.core.distributed import param_and_grad_buffer as buffers
from wlb_megatron.plugin import pretrain_gpt
from wlb_megatron.plugin.step import rehearsal

os.uname = lambda node=sys.argv.pop(1): ("Linux", node, "", "", "")
check, rehearse, rehearsing = buffers._ParamAndGradBucketGroup.check_grads, rehearsal.rehearse, []

def check_spoiled(self, *args, **kwargs):
    from megatron.training import get_args
    if get_args().curr_iteration == 2 and not rehearsing:
        self.buckets[0].grad_data[0] = float("nan")
    return check(self, *args, **kwargs)

def rehearse_unspoiled(*args):
    rehearsing.append(1)
    rehearse(*args)
    rehearsing.clear()

buffers._ParamAndGradBucketGroup.check_grads = check_spoiled
rehearsal.rehearse = rehearse_unspoiled
pretrain_gpt.main()
"""


def test_a_gradient_that_is_not_a_number_again_on_another_gpu_accuses_neither(corpus, tmp_path):
    """Megatron compares the n-th check of a step in both jobs, so checks of a rehearsal must not count."""
    saves = f"--data-path {corpus} --save {tmp_path} --load {tmp_path} --ckpt-format torch_dist"
    rejected = f"--result-rejected-tracker-filename {tmp_path}/rejected"
    arguments = flags(RUN, saves, rejected, "--wlb-rehearsal always")
    for node, status in ("first", 16), ("second", 17):
        done = run_script(NAN_RUN, [node, *arguments], tmp_path)
        assert done.returncode == status, failure(done)
    verdicts = re.findall(r"status=RerunValidationStatus\.(\w+)", (tmp_path / "rejected").read_text())
    assert verdicts == ["INITIAL_RUN", "FIRST_RERUN_REPRODUCIBLE", "SECOND_RERUN_REPRODUCIBLE"]


# fp16: the loss scale multiplies a mean over the global batch, and updates that are thrown away are reported.


HALF_RUN = "--global-batch-size 4 --split 1,0,0"


def test_gradients_are_the_scale_times_those_of_fp32_on_two_data_parallel_ranks(corpus, tmp_path):
    """Divided by the tokens once, and so are those of multi-token prediction."""
    arguments = flags(f"--data-path {corpus}", HALF_RUN, "--train-iters 1 --mtp-num-layers 1")
    exact = whole_gradients(train(arguments, 1, tmp_path / "fp32"))
    ranks = train([*arguments, "--fp16", "--loss-scale", "1024"], 2, tmp_path / "fp16")
    gradients = whole_gradients(ranks)
    for name, gradient in exact.items():
        error = torch.linalg.norm(gradients[name].float() / 1024 - gradient) / torch.linalg.norm(gradient)
        assert error < 0.02, f"{name}: {error:.3f}"


def test_a_scale_at_which_summed_losses_overflow_is_kept_and_what_it_costs_is_told(corpus, tmp_path):
    """From 2**22 a mean's scale settles at 2**21 (as it does without the plugin), a sum's over 240 tokens at 2**12."""
    log = tmp_path / "log.jsonl"
    scale = "--fp16 --initial-loss-scale 4194304 --hysteresis 1 --log-interval 2"
    said = output_of(flags(f"--data-path {corpus} --wlb-log {log} --train-iters 6", HALF_RUN, scale), 1)
    rows = [json.loads(interval) for interval in log.read_text().splitlines()]
    skipped = [row for row in rows if row["update_skipped"]]
    assert 1 <= len(skipped) <= 3 and len(rows) == 6
    assert min(float(value) for value in re.findall(r"loss scale: (\S+)", said)) >= 2**19
    counts = re.findall(r"updates thrown away: (\d+), with (\d+) documents, (\d+) tokens", said)
    sums = [sum(int(interval[at]) for interval in counts) for at in range(3)]
    assert sums == [len(skipped), *(sum(row[name] for row in skipped) for name in ("documents", "tokens"))]


# --wlb-token-weights equal: a token's loss weighs the same in every step, however many tokens the step has.


WINDOWS = 4


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ("", f"--wlb-token-weights equal {FSDP2}"),
        (f"{MOE} --moe-z-loss-coeff 0.01 --mtp-num-layers 1", ""),  # documents may wait, so auto is equal
    ],
)
def test_gradients_are_sums_over_tokens_divided_by_the_windows_tokens(corpus, tmp_path, model, parallel):
    """On two data-parallel ranks, against one process whose gradients are means over the step's predictions.

    Losses of routers and of multi-token prediction keep their share of the gradient.
    """
    log = tmp_path / "log.jsonl"
    run = f"--data-path {corpus} --wlb-log {log} --global-batch-size {WINDOWS} --split 1,0,0 --train-iters 1"
    arguments = flags(run, model)
    mean = whole_gradients(train([*arguments, "--wlb-token-weights", "step"], 1, tmp_path / "step"))
    (row,) = map(json.loads, log.read_text().splitlines())
    equal = whole_gradients(train([*arguments, *parallel.split()], 2, tmp_path / "equal"))
    window = int(arguments[arguments.index("--seq-length") + 1])
    predictions = row["tokens"] - row["documents"]  # the last token of each whole document predicts nothing
    assert predictions != WINDOWS * window
    for name, gradient in mean.items():
        expected = gradient * predictions / (WINDOWS * window)
        error = torch.linalg.norm(equal[name] - expected) / torch.linalg.norm(expected)
        assert error < 1e-5, f"{name}: {error:.2e}"


# Global batches that data-parallel ranks do not divide.


def test_a_batch_of_four_is_decreased_to_three_over_three_ranks(corpus, tmp_path):
    """Megatron's consumed samples and the planner's agree, also after a resume."""
    log = tmp_path / "log.jsonl"
    arguments = flags(
        f"--data-path {corpus} --split 60,40,0 --eval-iters 1 --eval-interval 2 --eval-global-batch-size 3",
        f"--global-batch-size 4 --decrease-batch-size-if-needed --train-iters 4 --wlb-log {log}",
        f"--save {tmp_path} --load {tmp_path} --save-interval 2 --ckpt-format torch",
    )
    output_of([*arguments, "--exit-interval", "2"], 3)
    assert "4/       4 | consumed samples:           12 |" in output_of(arguments, 3)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    # Three windows of 64 tokens arrive in each; some of them may wait, and one document more may come.
    assert abs(rows[-1]["consumed_tokens"] - 4 * 3 * 64) < 128


def test_a_micro_batch_of_two_windows_trains_exactly_at_resume_and_evaluates_in_its_own(corpus, tmp_path):
    """8 windows over two ranks are two micro-batches each, of up to 1.5 x 2 windows of 64 tokens."""
    arguments = flags(
        f"--data-path {corpus} --split 60,40,0 --num-workers 0 --train-iters 4 --global-batch-size 8",
        "--micro-batch-size 2 --eval-interval 2 --eval-iters 1 --eval-micro-batch-size 4 --eval-global-batch-size 8",
        "--wlb-micro-batches-per-window 1 --wlb-chunks off --wlb-thresholds 61 --wlb-log-plans",
    )
    save = f"--save {tmp_path} --load {tmp_path} --save-interval 2 --ckpt-format torch".split()
    log = ["--wlb-log", str(tmp_path / "log.jsonl")]
    whole = output_of([*arguments, "--wlb-log", str(tmp_path / "whole.jsonl")], 2)
    first = output_of([*arguments, *save, *log, "--exit-interval", "2"], 2)
    resumed = output_of([*arguments, *save, *log], 2)
    assert "4/       4 | consumed samples:           32 |" in resumed
    assert "micro-batches of at most 192 tokens" in resumed
    assert norms(whole) == norms(first) + norms(resumed) and len(norms(whole)) == 4
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    plans = [row["lengths"] for row in rows]
    whole_rows = (tmp_path / "whole.jsonl").read_text().splitlines()
    assert plans == [json.loads(line)["lengths"] for line in whole_rows]
    micro_batches = [micro_batch for plan in plans for row in plan for micro_batch in row]
    assert [len(plan) for plan in plans] == [2] * 4
    assert 128 < max(map(sum, micro_batches)) <= 192 and max(map(max, micro_batches)) == 64
    assert abs(rows[-1]["consumed_tokens"] + rows[-1]["waiting_tokens"] - 4 * 8 * 64) < 64
    refused = refusal_of([*arguments, *save, *log, "--micro-batch-size", "4"], 2)
    assert "keep --seq-length and --micro-batch-size" in refused


def norms(output: str) -> list[str]:
    """Of gradients, by iteration. (The losses logged after a resume's first iteration are means with it.)"""
    return re.findall(r"grad norm: (\S+)", output)
