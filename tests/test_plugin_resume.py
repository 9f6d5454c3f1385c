"""A checkpoint's packing state: of which iteration it is, and what is refused with it."""

import argparse
import json
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from packing_oracle import COST, make_planner
from saved_states import MAKERS, NEXT, TRAINED, noted
from saved_states import saved as saved_states
from training_jobs import training_job

from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.blend import Blend
from wlb_megatron.documents.corpus import Corpus, Rules
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.packing.carry import began_otherwise, saved_choices, weighs_equally
from wlb_megatron.packing.factory import make_packer
from wlb_megatron.packing.packer import PackingJob
from wlb_megatron.packing.planner import BatchSchedule, Planner
from wlb_megatron.plugin.job_state import part
from wlb_megatron.plugin.micro_batches.planning import ShardSettings, plan_iterations
from wlb_megatron.plugin.plans import resume
from wlb_megatron.plugin.plans.source import Source
from wlb_megatron.refusals import Refused
from wlb_megatron.workload.kernel_table import h100


def source(**settings: Any) -> Source:
    planner = make_planner([5, 9, 3, 16, 7, 12] * 9, window=16, micro_batches=4, endless=True)
    config = WlbConfig(quadratic_at=99.0, document_cost=0.0, **settings)
    return Source(Blend([]), planner, training_job().with_config(config), 4, 8.0, (), 0)


def megatron(iteration: int, samples: int | None = None) -> argparse.Namespace:
    """Megatron's arguments after it has loaded a checkpoint of these samples, 4 an iteration unless told."""
    trained = 4 * iteration if samples is None else samples
    return argparse.Namespace(iteration=iteration, consumed_train_samples=trained)


def restored(into: Source, args: argparse.Namespace) -> list[str]:
    return gone_on(into, args)[1]


def gone_on(into: Source, args: argparse.Namespace) -> tuple[Source, list[str]]:
    """The source with the choices of the checkpoint's run, and what the start says."""
    at = resume.LoadedAt(args.iteration, args.consumed_train_samples)
    batches = replace(into.job.batches, micro_batch_size=getattr(args, "micro_batch_size", 1))
    return resume.restore(replace(into, job=replace(into.job, batches=batches)), at)


def save(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments that Megatron saves now."""
    return resume.wrap_generate_state_dict(lambda args, model: {"args": args}, args, None)["args"]


def saved(args: argparse.Namespace) -> dict[str, Any]:
    state = json.loads(save(args).wlb_state)
    del state["digest"]
    return state


def test_the_state_is_saved_when_megatron_has_applied_the_gradients():
    args, ours, planned = megatron(0), source(), []
    resume.remember(ours, ours.planner.snapshot())
    for _ in range(2):
        ours.planner.next_iteration()
        before = saved(args)
        resume.remember(ours, ours.planner.snapshot(), applied=False)
        assert saved(args) == before  # what Megatron saves of an iteration that it throws away
        resume.note_applied()
        planned.append(saved(args)["planner"]["iteration"])
    assert planned == [1, 2]


def test_the_state_is_made_when_megatron_saves_and_not_before():
    args, ours, made = megatron(0), source(), []
    for number in range(3):
        resume.remember(ours, lambda number=number: made.append(number) or {"at": number}, applied=False)
        resume.note_applied()
    assert made == []
    assert saved(args)["planner"] == {"at": 2} and made == [2]


def load(args: argparse.Namespace) -> argparse.Namespace:
    """Megatron's arguments after it has loaded a checkpoint that was saved with `args`."""
    now = argparse.Namespace()
    resume.wrap_load_base_checkpoint(lambda load_dir, now: ({"args": args}, ""), "folder", now)
    return now


def saved_after(iterations: int, of: Source) -> Source:
    """Save `of` after so many more iterations, and load that."""
    for _ in range(iterations):
        of.planner.next_iteration()
    resume.remember(of, of.planner.snapshot())
    load(save(megatron(0)))
    return of


def test_a_checkpoint_that_is_saved_again_before_training_keeps_its_state():
    """--ckpt-convert-format."""
    args, ours = megatron(0), source()
    resume.remember(ours, ours.planner.snapshot())
    save(args)
    text = args.wlb_state
    part(resume.PackingStates).make_next = None  # another process
    now = load(args)
    assert not hasattr(now, "wlb_state")  # Megatron prints its arguments
    assert save(now).wlb_state == text
    assert not hasattr(save(load(argparse.Namespace())), "wlb_state")


def test_a_state_continues_where_it_was_saved_and_counts_its_tokens():
    first, again = saved_after(3, source()), source()
    restored(again, megatron(3))
    assert again.planner.trained == first.planner.trained
    assert again.planner.next_iteration() == first.planner.next_iteration()


def test_a_resumed_run_keeps_the_weights_of_tokens_until_a_flag_says_otherwise():
    """Its documents wait, so auto is equal."""
    saved_after(1, source(token_weights="equal"))
    args = megatron(0)
    assert restored(source(token_weights="equal"), megatron(1)) == []
    told = "--wlb-token-weights is step from here on, where the checkpoint's run had equal"
    assert restored(source(token_weights="step"), megatron(1)) == [told]
    old = saved(args)
    old["choices"]["token_weights"] = "step"
    load(argparse.Namespace(wlb_state=json.dumps(old)))
    assert restored(source(token_weights="step"), megatron(1)) == []
    now, (line,) = gone_on(source(), megatron(1))
    assert line == "--wlb-token-weights stays step, as the run began: auto would be equal on this layout"
    assert not weighs_equally(now.config, now.planner.packer)
    resume.remember(now, now.planner.snapshot())
    assert saved(args)["choices"]["token_weights"] == "step"  # at the next resume, too
    now, (line,) = gone_on(source(token_weights="equal"), megatron(1))
    assert line == "--wlb-token-weights is equal from here on, where the checkpoint's run had step"
    assert weighs_equally(now.config, now.planner.packer)
    load(save(megatron(0)))
    now, lines = gone_on(source(), megatron(0))  # --finetune: a new run
    assert lines == [] and now.config.token_weights == "auto"


@pytest.mark.parametrize("name", MAKERS)
def test_a_state_of_an_earlier_commit_goes_on_with_its_order_its_delays_and_its_weights(name):
    of_then = saved_states("4273cd8")[name]
    load(argparse.Namespace(wlb_state=of_then["state"]))
    now, lines = gone_on(MAKERS[name](), megatron(TRAINED))
    assert lines == []
    planned = plan_iterations(now.planner, ShardSettings(0, 1, 1, "per-document", h100()))
    after = [(item.plan, item.micro_batches[0].summary) for item in islice(planned, NEXT)]
    assert [noted(plan, summary) for plan, summary in after] == of_then["next"]
    assert now.config.token_weights == json.loads(of_then["state"])["choices"]["token_weights"]


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "fixed windows"])
def test_a_run_keeps_its_batch_spread_until_the_flag_is_given(name):
    def resumed(state: str | dict[str, Any], spread: str, at: int = TRAINED) -> Source:
        load(argparse.Namespace(wlb_state=state if isinstance(state, str) else json.dumps(state)))
        first = MAKERS[name]()
        return gone_on(first.with_config(replace(first.config, batch_spread=spread)), megatron(at))[0]

    of_then = saved_states("4273cd8")[name]["state"]
    now = resumed(of_then, "1.2")
    assert now.planner.packer.batch_spread == 150, "of the packer that the flag made"
    now.planner.packer.batch_spread = 101  # as 1.01 makes it
    for _ in range(8):
        now.planner.next_iteration()
    resume.remember(now, now.planner.snapshot())
    again = resumed(saved(megatron(0)), "auto", TRAINED + 8)
    assert again.planner.packer.batch_spread == 101
    assert again.planner.above_spread == now.planner.above_spread
    for _ in range(4):
        assert again.planner.next_iteration() == now.planner.next_iteration()


def test_a_run_in_chunks_keeps_its_weights_on_a_layout_where_documents_wait():
    """There auto would be equal, which changes the gradient's scale within the run."""
    state = saved_states("4273cd8")["documents in chunks"]["state"]
    load(argparse.Namespace(wlb_state=state))
    now, (line,) = gone_on(source(), megatron(TRAINED))
    assert line.startswith("--wlb-token-weights stays step") and now.config.token_weights == "step"


def test_a_run_goes_on_in_chunks_or_whole_as_it_began_until_a_flag_says_otherwise():
    """This run would take the other kind."""
    chunks, whole = (MAKERS[name]().planner.packer for name in ("documents in chunks", "documents wait"))
    for name, now in (("documents in chunks", whole), ("documents wait", chunks)):
        saved = saved_choices(json.loads(saved_states("4273cd8")[name]["state"]))
        assert saved["chunks"] == (name == "documents in chunks")
        config = began_otherwise(WlbConfig(), now, saved)
        assert config is not None and config.chunks == ("on" if saved["chunks"] else "off")
        assert began_otherwise(WlbConfig(chunks="on"), now, saved) is None
        same = whole if now is chunks else chunks
        assert began_otherwise(WlbConfig(), same, saved) is None


def test_a_state_of_another_iteration_than_the_checkpoint_is_refused():
    saved_after(1, source())
    with pytest.raises(Refused, match="has trained 4 samples, the checkpoint of iteration 2 8"):
        restored(source(), megatron(2))


def test_a_release_checkpoint_goes_on_with_its_order_and_so_does_what_it_saves():
    """Megatron begins at iteration 0 and counts samples on."""
    first, again = saved_after(3, source()), source()
    assert restored(again, megatron(0, samples=12)) == ["the document order goes on at sample 12"]
    assert again.planner.next_iteration() == first.planner.next_iteration()
    saved_after(0, again)
    requeued = source()
    assert restored(requeued, megatron(1, samples=16)) == []
    assert requeued.planner.next_iteration() == first.planner.next_iteration()
    with pytest.raises(Refused, match="has trained 16 samples, the release checkpoint 12: load"):
        restored(source(), megatron(0, samples=12))


@pytest.mark.parametrize("state", ["none", "the run's", "damaged"])
@pytest.mark.parametrize(("samples", "micro_batch_size"), [(0, 1), (1, 2), (12, 1), (13, 2)])
def test_one_command_with_the_flag_works_at_any_start_and_goes_on_at_every_requeue(
    state, samples, micro_batch_size
):
    """At iteration 0, with windows that have trained (a release checkpoint) or without."""

    def job(fresh: bool) -> Source:
        return documents(fresh=fresh, bins=4, each=micro_batch_size, packing="varlen")

    def at(iteration: int) -> argparse.Namespace:
        args = megatron(iteration, samples + 4 * iteration)
        args.micro_batch_size = micro_batch_size
        return args

    if state == "the run's":
        saved_after(samples // 4, job(fresh=False))
    elif state == "damaged":
        load(argparse.Namespace(wlb_state="half a stat"))
    else:
        load(argparse.Namespace())
    run, lines = gone_on(job(fresh=True), at(0))
    assert "document order" in lines[0]
    for iteration in (1, 2, 3):
        saved_after(1, run)
        assert run.planner.samples == at(iteration).consumed_train_samples // micro_batch_size
        requeued, (line,) = gone_on(job(fresh=True), at(iteration))
        assert "goes on: --wlb-fresh-order is done" in line
        assert requeued.planner.state() == run.planner.state()
        run = requeued


def test_a_release_checkpoint_without_a_state_is_refused_and_its_batches_grow_by_megatrons_count():
    """Global batches of 2 windows up to sample 10, then 4."""

    def growing(**settings: Any) -> Source:
        ours = source(**settings)
        ours.planner.schedule = BatchSchedule(((0, 2), (10, 4)))
        return ours

    load(argparse.Namespace())
    with pytest.raises(Refused, match=r"the release checkpoint holds no packing state.*--wlb-fresh-order"):
        restored(growing(), megatron(0, samples=8))
    anew = growing(fresh_order=True)
    restored(anew, megatron(0, samples=8))
    counts = []
    for _ in range(3):
        anew.planner.next_iteration()
        counts.append(anew.planner.samples)
    assert counts == [10, 14, 18]


def test_a_checkpoint_without_a_state_needs_to_be_told_to_begin_anew_and_says_nothing_of_its_weights():
    load(argparse.Namespace())
    with pytest.raises(Refused, match=r"iteration 3 holds no packing state.*--wlb-fresh-order"):
        restored(source(), megatron(3))
    anew, lines = gone_on(source(fresh_order=True), megatron(3))
    assert lines == ["the document order begins at sample 12: the checkpoint has none"]
    assert weighs_equally(anew.config, anew.planner.packer)  # as a new run on this layout
    assert anew.planner.samples == 12
    assert anew.planner.trained == 12 * 16  # windows of 16 tokens
    unread = source()
    assert restored(unread, megatron(0)) == []  # --finetune: a new run
    assert unread.planner.samples == 0


def documents(*, fresh: bool = False, cost: float = 0.0, **changed: Any) -> Source:
    """Training on one corpus in windows of 16 tokens, two a batch. changed: of lengths, weight, window, seed, bins, and
    of settings of packing."""
    lengths = changed.pop("lengths", [5, 9, 3, 16, 7, 12] * 4)
    window, bins, each = changed.pop("window", 16), changed.pop("bins", 2), changed.pop("each", 1)
    corpus = Corpus("one", np.array(lengths), weight=changed.pop("weight", 1.0))
    rules = Rules(window, seed=changed.pop("seed", 3), endless=True)
    settings = {"chunks": "off", "micro_batches_per_window": "1"} | changed
    config = WlbConfig(quadratic_at=99.0, document_cost=cost, fresh_order=fresh, **settings)
    packer = make_packer(PackingJob(config, COST, window=window * each, micro_batches=bins // each))
    planner = Planner(DocumentStream([corpus], rules), packer, global_tokens=bins * window)
    return Source(Blend([]), planner, training_job().with_config(config), bins, 8.0, (), 0)


CHANGES: dict[str, dict[str, Any]] = {
    "sha256 of lengths was": {"lengths": [5, 9, 3, 16, 12, 7] * 4},
    "documents was 24, is 12": {"lengths": [5, 9, 3, 16, 7, 12] * 2},
    "weight was 1.0, is 2.0": {"weight": 2.0},
    "windows of 16 tokens, this run of 32": {"window": 32},
    "seed was 3, is 4": {"seed": 4},
    "--global-batch-size": {"bins": 4},
    "packing was 'varlen', is 'original'": {"packing": "original"},
    "max_documents was 4096, is 9": {"max_documents": 9},
    "--wlb-document-cost was 0.0, is 2.0": {"cost": 2.0},
}
"""What a refusal says, of what changed."""


@pytest.mark.parametrize("words", CHANGES)
def test_what_changed_is_refused_with_the_flag_that_takes_it_up_and_taken_up_with_it(words):
    args = megatron(4, samples=8)
    before = saved_after(4, documents())
    with pytest.raises(Refused) as refused:
        restored(documents(**CHANGES[words]), args)
    (line,) = str(refused.value).splitlines()
    assert words in line and "or add --wlb-fresh-order: documents that wait train first" in line
    now = documents(fresh=True, **CHANGES[words])
    lines = restored(now, args)
    assert lines[0].startswith("takes up the document order at sample 8: ") and words in lines[0]
    assert (now.planner.samples, now.planner.trained) == (8, before.planner.trained)
    waiting = before.planner.packer.waiting
    assert waiting
    arrived = now.planner.next_iteration().arrived
    if "lengths" in CHANGES[words]:
        assert lines[1:3] == ["corpora: 1 are new, 1 are gone", lines[2]] and "do not train" in lines[2]
        assert all(piece.start == piece.epoch == 0 for piece in arrived)
        assert len({piece.document for piece in arrived}) == len(arrived)
    else:
        kept = sum(piece.tokens for piece in waiting)
        assert f"{len(waiting)} documents ({kept} tokens) that waited train first" in lines
        assert set(arrived[: len(waiting)]) <= set(waiting)
        does = "begin an epoch" if words.startswith(("seed", "windows")) else "go on where they stood"
        assert lines[1] == f"corpora: 1 {does}"


def test_a_run_that_has_taken_up_an_order_goes_on_with_it_when_it_is_queued_again():
    """The job's flags are the same at each start: the order is not begun anew each time."""
    args = megatron(4, samples=8)
    saved_after(4, documents())
    changed = documents(fresh=True, packing="original")
    restored(changed, args)
    saved_after(2, changed)
    args = megatron(6, samples=12)
    again = documents(fresh=True, packing="original")
    (line,) = restored(again, args)
    assert line == "the document order taken up at sample 8 goes on: --wlb-fresh-order is done"
    for _ in range(5):
        assert again.planner.next_iteration() == changed.planner.next_iteration()
    other = documents(fresh=True, packing="original", max_documents=7)  # a second change is taken up, too
    assert "max_documents was 4096, is 7" in restored(other, args)[0]
    assert other.planner.began == 12


@pytest.mark.parametrize("trained", [8, 9])
def test_windows_of_a_micro_batch_are_counted_as_megatrons_samples(trained):
    """Two a micro-batch from the fifth iteration on, also where those before had another number of samples."""
    args = megatron(4, trained)
    before = documents()
    before.planner.begin_at(1 if trained % 2 else 0)
    before = saved_after(4, before)
    args.micro_batch_size = 2
    with pytest.raises(Refused, match="keep --seq-length and --micro-batch-size"):
        restored(documents(each=2), args)
    now = documents(each=2, fresh=True)
    restored(now, args)
    assert (now.planner.samples, now.planner.trained) == (4, before.planner.trained)
    saved_after(3, now)
    args.iteration, args.consumed_train_samples = 7, trained + 3 * 2
    again = documents(each=2)
    assert restored(again, args) == []
    assert again.planner.next_iteration() == now.planner.next_iteration()
    args.consumed_train_samples += 2
    with pytest.raises(Refused, match=r"has trained 14 samples, the checkpoint of iteration 7 1[67]"):
        restored(documents(each=2), args)


def test_the_flag_alone_begins_an_epoch_of_every_corpus():
    args = megatron(4, samples=8)
    before = saved_after(4, documents())
    now = documents(fresh=True)
    lines = restored(now, args)
    assert lines[:2] == ["takes up the document order at sample 8: as --wlb-fresh-order asks", lines[1]]
    assert lines[1] == "corpora: 1 begin an epoch"
    waiting = before.planner.packer.waiting
    arrived = now.planner.next_iteration().arrived
    assert sorted(arrived[: len(waiting)]) == sorted(waiting)[: len(arrived)]
    assert {piece.epoch for piece in arrived if piece not in waiting} <= {1}


WITH_WAITING = documents()
for _ in range(4):
    WITH_WAITING.planner.next_iteration()
WHOLE = {"settings": resume._settings_of(WITH_WAITING), "planner": WITH_WAITING.planner.state()}


def with_planner(**damage: Any) -> str:
    """A state of a release without digests, in which this of the planner is another."""
    return json.dumps({**WHOLE, "planner": WHOLE["planner"] | damage})


DAMAGED = {
    "no packer": with_planner(packer={}),
    "another kind of packer": with_planner(packer=3, version=9),
    "no stream": with_planner(stream={}),
    "no settings": "{}",
    "no state": "3",
    "no text": 3,
    "half": json.dumps(WHOLE)[:99],
    "one number that changed": resume._sealed(WHOLE).replace('"cursor": 16', '"cursor": 15'),
    "a piece that is missing": resume._sealed(WHOLE).replace('"waiting": "eAFj', '"waiting": "eAGj'),
}


def test_a_digest_takes_what_was_saved_and_what_has_none():
    assert resume._opened(resume._sealed(WHOLE)) == resume._opened(json.dumps(WHOLE))
    assert resume._sealed(WHOLE) not in DAMAGED.values()  # each damage has changed something


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_state_that_cannot_be_read_is_said_to_be_and_all_begins(damage):
    args = megatron(4, samples=8)
    load(argparse.Namespace(wlb_state=DAMAGED[damage]))
    with pytest.raises(Refused, match="--wlb-fresh-order"):
        restored(documents(), args)
    now = documents(fresh=True)
    assert "cannot be read" in restored(now, args)[1]
    assert now.planner.next_iteration().arrived == documents().planner.next_iteration().arrived


def test_a_state_of_wrong_kinds_of_values_is_refused_with_a_line():
    for wrong in (with_planner(iteration=float("inf")), json.dumps({**WHOLE, "settings": None})):
        load(argparse.Namespace(wlb_state=wrong))
        with pytest.raises(Refused, match="the packing state is damaged: resume from another checkpoint; or"):
            restored(documents(), megatron(4))


def test_a_resumed_run_says_at_which_length_documents_are_split_if_it_could_take_longer_ones():
    short, wide = (
        DocumentStream.of_lengths([300, 5, 80], Rules(longest, "chunk", seed=3, endless=True))
        for longest in (128, 256)
    )
    planner = make_planner([5], window=16, micro_batches=4)
    ours, before = replace(source(), planner=planner), wide.state()
    planner.stream = wide
    wide.load_state(short.state())
    assert resume._length_kept(ours, before) == [
        "documents are split at 128 tokens, as in the checkpoint; this run could train 256 whole"
    ]
    assert resume._length_kept(ours, wide.state()) == []
