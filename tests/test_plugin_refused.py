"""Wrong flags and broken inputs through Megatron's own parser: each gets its line, none a stack, none a run."""

import json
import re
import shlex
from pathlib import Path

import forked_ranks
import numpy as np
import pytest
from megatron_runs import ROOT, cpu_environment, flags, rewrite_corpus

from wlb_megatron.errors import PREFIX

MOE = "--num-experts 4 --moe-router-topk 2"
VIRTUAL = "--pipeline-model-parallel-size 4 --num-layers 8 --num-layers-per-virtual-pipeline-stage 1"
CHOICES = "packing best,sharding best,overlong keep,cp-mode some,rehearsal maybe"
SIZES = "global-batch-size seq-length context-parallel-size eval-interval log-interval"
WRONG: dict[str, str] = {
    **{f"--wlb-{choice}": "invalid choice" for choice in CHOICES.split(",")},
    **{f"--{size} 0": f"error: --{size} 0: give 1 or more" for size in SIZES.split()},
    **{f"--wlb-{number}": "is not a whole number from" for number in ("max-tokens many", "max-delay soon")},
    **{f"--reset-{what}": "drop them" for what in ("position-ids", "attention-mask")},
    **{f"--attention-backend {name}": "use auto or fused" for name in ("flash", "unfused")},
    **{f"--data-path FOLDER/{name}": "is truncated" for name in ("cut", "short")},
    **{f"--wlb-quadratic-at {tokens}": "quadratic-at" for tokens in (0, -5)},
    **{f"--wlb-thresholds {text}": "thresholds" for text in ("high", "50,20")},
    **{f"--wlb-{file}": "cannot write it" for file in ("log none/log.jsonl", "trace none/trace.json")},
    # Flags that the plugin refuses, with the cure.
    "--micro-batch-size 3": r"divisible by eval_micro_batch_size \(3\)",
    "--eod-mask-loss": "already predicts nothing",
    "--attention-dropout 0.1": "set --attention-dropout 0",
    "--mtp-num-layers 1 --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et|t|m|L": "the last stage",
    "--position-embedding-type learned_absolute": "use --position-embedding-type rope",
    "--multiple-validation-sets --eval-iters 1": "add --full-validation",
    "--full-validation --multiple-validation-sets --data-path CORPUS CORPUS --split 1,0,0": "no document is left",
    "--full-validation --multiple-validation-sets --data-path CORPUS --validation-set-names a b": "2 names for 1",
    "--dataloader-type cyclic": "--dataloader-type cyclic",
    "--mock-data": "give documents with --data-path; `python -m scripts.corpus PREFIX` makes some, in a clone",
    "--wlb-off --context-parallel-size 4": "own attention then needs Transformer Engine; install it, or compare with",
    "--sft": "set it, and --tokenizer-model to a folder",
    "--sft --tokenizer-type SFTTokenizer --tokenizer-model FOLDER": "reads conversations from jsonl files",
    "--sft --tokenizer-type SFTTokenizer --tokenizer-model FOLDER --wlb-overlong split": "without the earlier one",
    "--sft --wlb-sft-mask-data": "cannot read .*mask: No such file",
    "--wlb-sft-drop-tools": "add --sft",
    "--wlb-train-epochs 2": "--wlb-train-epochs with --train-iters: give one",
    "--wlb-train-epochs 2 --lr-warmup-iters 3": "it sets --train-samples; give --lr-warmup-samples",
    "--fim-data": "fill-in-the-middle",
    "--qk-clip": "--qk-clip",
    "--use-megatron-fsdp --ckpt-format fsdp_dtensor --use-distributed-optimizer": "CUDA_DEVICE_MAX_CONNECTIONS",
    "--use-torch-fsdp2 --no-gradient-accumulation-fusion --ckpt-format torch_dist": "CUDA_DEVICE_MAX_CONNECTIONS",
    "--transformer-impl local --distributed-backend nccl": "use transformer_engine",
    f"{MOE} --moe-token-dispatcher-type allgather --expert-model-parallel-size 4": "use alltoall",
    f"{MOE} --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type sinkhorn": "routes would differ",
    "--hybrid-context-parallel --calculate-per-token-loss": "drop it",
    "--experimental-attention-variant dsa": "dsa replaces core attention",
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --wlb-chunks on": "state does not pass",
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --wlb-profile p": "without their work",
    "--tp-comm-overlap --sequence-parallel --tensor-model-parallel-size 4": "micro-batches vary in length",
    "--defer-embedding-wgrad-compute --pipeline-model-parallel-size 4 --num-layers 4": "the first one's size",
    "--delay-wgrad-compute": "transformer_engine implementation",
    "--use-kitchen-attention": "replaces core attention",
    "--flash-attention-version 3": "cuDNN's kernels",
    "--batch-invariant-mode": "--deterministic-mode",
    "--logits-load-dir logits": "Megatron's own samples",
    "--inprocess-restart": "use ft_launcher or torchrun --max-restarts",
    "--cpu-offloading-num-layers 1 --cpu-offloading-retain-pinned-cpu-buffers": "of one shape",
    "--cuda-graph-impl local": "leave graphs off",
    "--perform-rl-step": "only pre-training",
    "--phase-transition-iterations 2": "one phase",
    "--dataloader-inter-document-masking": "masks between documents already",
    "--fp8-dot-product-attention": "unrecognized arguments",
    "--wlb-log-plans": "give --wlb-log PATH",
    "--wlb-trace t.json --wlb-trace-iteration 1": "is not a whole number from 2 to",
    f"--wlb-cp-mode dynamic {MOE} --moe-token-dispatcher-type alltoall --moe-z-loss-coeff 0.001": "depend on the",
    # The plugin's own settings.
    "--wlb-overlong chunk --wlb-chunks off": "use --wlb-overlong split",
    "--wlb-overlong chunk --max-position-embeddings 64": "the longest document that is to train whole",
    "--wlb-overlong chunk --cpu-offloading-num-layers 1": "chunk cannot be combined with --cpu-offloading-num-layers: ",
    "--wlb-max-tokens 70 --wlb-chunks off": "1.25",
    "--wlb-max-tokens 1 --wlb-chunks on --seq-length 128": "more than 64 micro-batches: set it to 2",
    "--wlb-max-tokens 0": "--wlb-max-tokens",
    "--wlb-max-delay -1": "max-delay",
    "--wlb-chunks on --wlb-max-delay 3": "cannot be combined with --wlb-max-delay 3: documents in chunks never wait",
    "--wlb-max-documents 0": "max-documents",
    "--wlb-document-cost -1": "document-cost",
    "--wlb-profile nothing.json": "nothing.json",
    "--wlb-dry-run --wlb-world-size 8": "start the script by python -m wlb_megatron.launch",
    "--spec no.such.module stack": "--spec no.such.module stack: no such module or attribute",
    "--spec wlb_megatron.errors stack": "--spec wlb_megatron.errors stack: no such module or attribute",
    "--wlb-no-such-flag": "error: unrecognized arguments: --wlb-no-such-flag$",
    "--wlb-max-token 96": "unrecognized arguments: --wlb-max-token 96 .did you mean --wlb-max-tokens",
    "--seq-lenght 64": "did you mean --seq-length",
    "--num-layers many": "error: argument --num-layers: invalid int value: 'many'",
    # Megatron's settings that do not fit together or the machine.
    "--context-parallel-size 3": "divisible",
    "--tensor-model-parallel-size 2": "divisible",
    f"{VIRTUAL} --global-batch-size 6 --wlb-packing original": "rank 6 micro-batches.*groups of 4.*: 8 would do",
    f"{VIRTUAL} --microbatch-group-size-per-virtual-pipeline-stage 3": "3 is below the 4 pipeline stages",
    "--step-batch-size-schedule 0:4": "error: Megatron refuses these flags: .*--step-batch-size-schedule",
    "--ddp-average-in-collective": "drop --ddp-average-in-collective",
    "--seq-length 66 --tensor-model-parallel-size 4 --num-query-groups 4": "error: --seq-length: 66 .* of 4.*to 68",
    "--context-parallel-size=-1": "error: --context-parallel-size -1: give 1 or more",
    "--tensor-model-parallel-size 0": "give 1 or more",
    "--num-workers=-1": "error: --num-workers -1: give 0 or more",
    "--seed=-1": "error: --seed -1: give 0 or more",
    "--split a,b,c": "--split 'a,b,c' has no shares to read",
    "--wlb-profile FOLDER": "--wlb-profile .* cannot be read: Is a directory",
    "--split 1,2,3,4": "split",
    "--split 0,1,0": "give at least one",
    "--rampup-batch-size 2 2 4": "give --train-samples",
    "--eval-iters 2 --split 1,0,0": "no document is left for validation",
    "--skip-train": "--skip-train with --eval-iters 0 does nothing",
    "--skip-train --eval-iters 2 --split 1,0,0": "no document is left for validation",
    # Corpora; CORPUS stands for a good one, FOLDER for where the broken ones are.
    "--data-path": "at least one",
    "--data-path FOLDER/missing": "cannot read index",
    "--data-path FOLDER/empty": "no token",
    "--data-path FOLDER/single": "nothing to train: no document has a second token.*single",
    "--data-path FOLDER/ending --split 50,50,0 --eval-iters 1": "nothing to evaluate: .*ending",
    "--data-path FOLDER/noise": "not a Megatron index",
    "--data-path s3://bucket/corpus": "s3://bucket/corpus is in object storage",
    "--data-path FOLDER/folder": "folder.bin is no file",
    "--data-path -1 CORPUS 2 CORPUS": "not be negative",
    "--data-path 0 CORPUS 0 CORPUS": "not be negative nor all 0",
    "--data-path 1 CORPUS CORPUS": "cannot read index 1.idx: No such file or directory; give a weight before every",
}
"""Flags after a good command line: words of the line to expect."""


def readme_command(corpus: Path, folder: Path) -> list[str]:
    """The flags of the README's command for eight GPUs, with this corpus and without fused kernels."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(
        r"^torchrun --nproc-per-node 8 -m wlb_megatron.launch (.*--wlb-log.*)$", text, re.MULTILINE
    )
    words = [word.replace("~/data/corpus_text_document", str(corpus)) for word in shlex.split(line)[1:]]
    words = [word.replace("~/checkpoints", str(folder)) for word in words]
    cpu = "--distributed-backend gloo --transformer-impl local --no-persist-layer-norm --no-rope-fusion"
    small = "--no-gradient-accumulation-fusion --split 90,10,0 --seq-length 64 --max-position-embeddings 128"
    return [*words, *cpu.split(), *small.split()]


@pytest.fixture(scope="module")
def lines(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    index, tokens = corpus.with_suffix(".idx").read_bytes(), corpus.with_suffix(".bin").read_bytes()
    files = ("cut", index, tokens[:-10]), ("short", index[:-8], tokens), ("noise", b"x" * 99, b"")
    for name, idx, data in files:
        (folder / f"{name}.idx").write_bytes(idx)
        (folder / f"{name}.bin").write_bytes(data)
    (folder / "folder.idx").write_bytes(index)
    (folder / "folder.bin").mkdir()
    rewrite_corpus(folder / "empty", [np.empty(0, dtype=np.int32)] * 3)
    rewrite_corpus(folder / "single", [np.ones(1, dtype=np.int32)] * 9)
    rewrite_corpus(folder / "ending", [np.ones(1 + at // 2, dtype=np.int32) for at in (9, 9, 0, 0)])
    good = flags("--global-batch-size 4 --train-iters 2 --split 90,10,0")
    cases = [{"flags": [*good, "--data-path", str(corpus)], "world": 1}]
    for wrong in WRONG:
        words = wrong.replace("CORPUS", str(corpus)).replace("FOLDER", str(folder)).split()
        before = [] if "--data-path" in words or "--mock-data" in words else ["--data-path", str(corpus)]
        cases.append({"flags": [*good, *before, *words], "world": 4 if "-size 4" in wrong else 1})
    cases.append({"flags": readme_command(corpus, folder), "world": 8})
    experts = f"{MOE} --moe-token-dispatcher-type alltoall --data-path {corpus}"
    cases.append({"flags": [*good, *experts.split()], "world": 1})
    (folder / "cases.json").write_text(json.dumps(cases))
    judge, given = [str(ROOT / "tests" / "refused_flags.py")], [str(folder / "cases.json")]
    done = forked_ranks.run(judge, given, 1, cpu_environment(), timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(["", *WRONG, "README", "experts"], json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.megatron
def test_right_command_lines_are_accepted_and_each_wrong_one_gets_its_line(lines):
    """One test, so that the process that judges all of them starts once, however tests are dealt out."""
    assert lines[""] == lines["README"] == "accepted"
    assert lines["experts"] == "accepted, 200000 sizes"
    assert len(WRONG) >= 60
    missed = {wrong: lines[wrong] for wrong, wanted in WRONG.items() if not _says(lines[wrong], wanted)}
    assert not missed


def _says(line: str, wanted: str) -> bool:
    """Whether it is the wanted line, and names one wrong flag."""
    if line == "accepted" or line.startswith(("Traceback", "exit")):
        return False
    return bool(wanted in line or re.search(wanted, line)) and line.count(PREFIX) <= 1
