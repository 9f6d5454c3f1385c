"""From a jsonl of conversations to .bin, .idx and mask: what is read, what is refused, and what is trained."""

import errno
import json
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sft_data import (
    EOS,
    MARKED,
    TEMPLATE,
    VOCABULARY,
    build_tokenizer,
    conversations,
    megatron_tokenizer,
    write_jsonl,
)

from wlb_megatron.cli import main
from wlb_megatron.documents.indexed import IndexedCorpus
from wlb_megatron.errors import WlbError
from wlb_megatron.sft.conversations import (
    BadLine,
    IndexFolder,
    Tokenizing,
    conversations_of,
    lines_before,
    lines_of,
    shards_of,
)

BY_ROLE = Tokenizing("", "nemotron-nano-v2")
USER, ANSWER, SYSTEM = (
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "yes"},
    {"role": "system", "content": "you are kind"},
)


def line_of(*messages: Any, **more: Any) -> bytes:
    return json.dumps({"messages": list(messages), **more}).encode()


BAD: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"{messages", "is not JSON"),
    "two objects": (line_of(USER, ANSWER) * 2, "more than one JSON value"),
    "a list": (b"[1]", "is a JSON list"),
    "null": (b"null", "is a JSON null"),
    "half a pair in a key": (b'{"\\ud800": 1}', "(keys: \\ud800)"),
    "a line end in a key": (b'{"a\\nb": 1}', "(keys: a b)"),
    "nesting": (b'{"messages": ' + b"[" * 200_000, "nested too deep"),
    "no UTF-8": (b'{"messages": "\xff"}', "not UTF-8"),
    "duplicate keys": (b'{"messages": [], "messages": []}', "has the key messages twice"),
    "prompt and completion": (b'{"prompt": "a", "completion": "b"}', "(keys: completion, prompt)"),
    "no turns": (line_of(), "not a list of turns"),
    "a turn that is text": (line_of("hello"), "turn 1 is a JSON string"),
    "no role": (line_of({"content": "x"}), "turn 1 has no role"),
    "another role": (line_of(USER, {"role": "Assistant", "content": "x"}), "turn 2 has the role 'Assistant'"),
    "no content": (line_of(USER, {"role": "assistant"}), "turn 2 has no content"),
    "content in parts": (line_of({"role": "user", "content": [1]}, ANSWER), "turn 1 has a list as content"),
    "an empty turn": (line_of(USER, {"role": "assistant", "content": " "}), "turn 2 (assistant) is empty"),
    "no answer": (line_of(SYSTEM, USER), "no assistant turn"),
    "no answer in one of two": (line_of(SYSTEM, USER, ANSWER, SYSTEM, USER), "no assistant turn"),
    "answer first": (line_of(ANSWER, USER, ANSWER, USER), "an assistant turn follows nothing"),
    "two answers": (line_of(USER, ANSWER, ANSWER), "follows assistant"),
    "a tool's turn": (line_of(USER, {"role": "tool", "content": "4"}, ANSWER), "turn 2 is of a tool"),
    "a call": (line_of(USER, {**ANSWER, "tool_calls": [1]}), "turn 2 is of a tool"),
    "tools": (line_of(USER, ANSWER, tools=[{}]), "has tools"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_refused_with_its_reason(case):
    line, reason = BAD[case]
    with pytest.raises(BadLine) as raised:
        conversations_of(line, BY_ROLE)
    assert reason in str(raised.value)


def test_a_line_splits_at_system_turns_alone_and_blank_lines_and_what_a_flag_accepts_pass():
    line = line_of(USER, ANSWER, SYSTEM, USER, ANSWER, USER, ANSWER, SYSTEM, USER, ANSWER)
    assert [len(made) for made in conversations_of(line, BY_ROLE)] == [2, 5, 3]
    assert conversations_of(b" \r\n", BY_ROLE) == []
    assert len(conversations_of(line_of(USER, ANSWER) + b"\r\n", BY_ROLE)) == 1
    tools = line_of(USER, {"role": "tool", "content": "4"}, ANSWER, tools=[{}])
    assert len(conversations_of(tools, replace(BY_ROLE, drops_tools=True))[0]) == 3
    assert conversations_of(line_of({"role": "critic", "content": "x"}), Tokenizing("", "default"))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.binary(max_size=9).map(lambda line: line.replace(b"\n", b"")), max_size=12),
    st.integers(1, 30),
    st.booleans(),
)
def test_shards_hold_each_line_once_whatever_their_size(tmp_path_factory, lines, size, ended):
    path = tmp_path_factory.mktemp("lines") / "f"
    path.write_bytes(b"\n".join(lines) + b"\n" * ended)
    whole = path.read_bytes().splitlines(keepends=True) if b"\r" not in path.read_bytes() else None
    read, numbers = [], []
    for begin, end in shards_of(path.stat().st_size, size):
        before = lines_before(path, begin)
        for number, line in enumerate(lines_of(path, begin, end), 1):
            read.append(line)
            numbers.append(before + number)
    assert b"".join(read) == path.read_bytes()
    assert numbers == list(range(1, len(read) + 1))
    assert whole is None or len(read) >= len(path.read_bytes().split(b"\n")) - 1


# Below: through Megatron's tokenizer.


def made_of(
    jsonl: Path, tokenizer: Path, cache: Path, prompt_format: str = "nemotron-nano-v2", **options: Any
) -> Any:
    pytest.importorskip("transformers")
    from wlb_megatron.plugin.sft.indexed import index_all

    build = {name: options.pop(name) for name in ("processes", "shard_bytes") if name in options}
    tokenizing = Tokenizing(str(tokenizer), prompt_format, **options)
    (indexed,) = index_all([jsonl], tokenizing, cache, say=print, **build)
    return indexed


def documents_of(indexed: Any) -> list[tuple[list[int], list[int]]]:
    """Tokens and mask of each document."""
    corpus = IndexedCorpus(indexed.files.prefix)
    mask = np.fromfile(f"{indexed.files.prefix}.mask", dtype=np.uint8)
    bounds = np.concatenate(([0], np.cumsum(corpus.index.lengths)))
    assert len(mask) == bounds[-1]
    lengths = enumerate(corpus.index.lengths.tolist())
    return [(corpus.read(d, 0, n).tolist(), mask[bounds[d] : bounds[d + 1]].tolist()) for d, n in lengths]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    pytest.importorskip("tokenizers")
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("prompt_format", ["nemotron-nano-v2", "nemotron-h-aligned", "default", "identity"])
def test_tokens_and_targets_are_those_of_megatrons_tokenizer(prompt_format, tokenizer, tmp_path):
    """Lines of one, two and three conversations; targets where Megatron's are not -100, but for a first token's."""
    pytest.importorskip("transformers")
    parts = conversations(12)
    lines = [parts[0], parts[1] + parts[2], parts[3] + parts[4] + parts[5], *parts[6:]]
    jsonl = write_jsonl(tmp_path / "c.jsonl", lines)
    megatron = megatron_tokenizer(tokenizer, prompt_format)
    try:
        expected = [megatron.tokenize_conversation(part, True, False) for part in parts]
    except AssertionError:
        # identity of main: it masks turns, whose tokens must not depend on the next
        assert prompt_format == "identity"
        says = "Megatron's tokenizer fails on it: AssertionError: expected turn tokens"
        with pytest.raises(WlbError, match=says):
            made_of(jsonl, tokenizer, tmp_path / "k", prompt_format)
        return
    made = documents_of(made_of(jsonl, tokenizer, tmp_path / "k", prompt_format))
    for (tokens, mask), (wanted, targets) in zip(made, expected, strict=True):
        assert tokens == wanted.tolist()
        assert mask == [0, *(targets[1:] != -100).astype(int).tolist()]


def by_template(
    template: str | None, turns: Any, folder: Path, **options: Any
) -> list[tuple[list[int], list[int]]]:
    """Tokens and mask of each conversation by a tokenizer with this chat template."""
    pytest.importorskip("tokenizers")
    pad = options.pop("pad", "<pad>")
    tokenizer = build_tokenizer(folder / "t", template=template, pad=pad)
    jsonl = write_jsonl(folder / "c.jsonl", turns)
    return documents_of(made_of(jsonl, tokenizer, folder, "default", **options))


EIGHT = (
    "{% for m in messages %}{{ m['role'] + ' ' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<eos>' }}{% endgeneration %}{% else %}{{ m['content'] + ' ' }}{% endif %}{% endfor %}"
)


def test_the_worked_example_of_eight_tokens_in_the_docs_and_a_template_that_marks_answers(tmp_path):
    turns = [{**SYSTEM, "content": "kind"}, USER, {**ANSWER, "content": "yes no"}]
    ((tokens, mask),) = by_template(EIGHT, [turns], tmp_path, assistant_only=True)
    assert " ".join(VOCABULARY[token] for token in tokens) == "system kind user hello assistant yes no <eos>"
    assert mask == [0, 0, 0, 0, 0, 1, 1, 1]
    turns = [USER, {**ANSWER, "content": "yes no"}]
    ((tokens, mask),) = by_template(MARKED, [turns], tmp_path, assistant_only=True)
    assert [VOCABULARY[token] for token, on in zip(tokens, mask, strict=True) if on] == ["yes", "no", "<eos>"]


def test_an_end_token_trains_where_it_is_also_the_padding(tmp_path):
    """Stock masks every target equal to the padding."""
    made = by_template(TEMPLATE, conversations(5), tmp_path, pad="<eos>")
    ends = [mask[at] for tokens, mask in made for at, token in enumerate(tokens) if token == EOS]
    assert len(ends) > 10 and all(ends)


@pytest.mark.parametrize(
    ("template", "assistant_only", "words"),
    [
        (None, False, "has no chat template"),
        ("{{ strftime_now('%d') }}", False, "prints today's date"),
        (TEMPLATE, True, "needs --sft-tokenizer-prompt-format default and a chat template that marks"),
    ],
    ids=["no template", "today's date", "no marks"],
)
def test_a_template_that_cannot_be_used_is_refused(template, assistant_only, words, tmp_path):
    with pytest.raises(WlbError, match=words):
        by_template(template, conversations(2), tmp_path, assistant_only=assistant_only)


def test_bad_lines_are_listed_with_file_and_number_or_skipped_and_counted(tokenizer, tmp_path):
    """A byte order mark, blank lines and Windows' line ends pass. Shards of 200 bytes: numbers are of the file."""
    jsonl = tmp_path / "c.jsonl"
    good = [line_of(*each) for each in conversations(6)]
    rows = [b"\xef\xbb\xbf" + good[0], b"", good[1] + b"\r", b"{", *good[2:4]]
    rows += [BAD["two answers"][0], *good[4:]]
    jsonl.write_bytes(b"\n".join(rows))
    with pytest.raises(WlbError) as raised:
        made_of(jsonl, tokenizer, tmp_path / "k", shard_bytes=1 << 20)
    listed = str(raised.value).splitlines()[1:3]
    assert [line.split(":")[1] for line in listed] == ["4", "7"] and "follows assistant" in listed[1]
    with pytest.raises(WlbError, match=f"{jsonl}:4: "):
        made_of(jsonl, tokenizer, tmp_path / "small", processes=1, shard_bytes=200)
    skipped = made_of(jsonl, tokenizer, tmp_path / "k", skips_bad=True, processes=1, shard_bytes=200)
    assert (skipped.counts.conversations, skipped.counts.bad_lines, skipped.counts.lines) == (6, 2, 8)
    with pytest.raises(WlbError, match=f"{jsonl}:7: "):  # the files are there, but the flag is not
        made_of(jsonl, tokenizer, tmp_path / "k")


def test_texts_that_spell_a_special_token_are_counted_and_a_file_that_trains_nothing_is_refused(
    tokenizer, tmp_path
):
    from wlb_megatron.plugin.sft.indexed import described

    spelled = [{**USER, "content": "hello <eos>"}, ANSWER]
    jsonl = write_jsonl(tmp_path / "c.jsonl", [spelled, [USER, ANSWER]])
    indexed = made_of(jsonl, tokenizer, tmp_path, "default")
    assert indexed.counts.special_text == 1 and "in 1 the text of a turn spells" in described(indexed)
    for text in (b"", b"\n\n", b"{\n"):
        (tmp_path / "c.jsonl").write_bytes(text)
        with pytest.raises(WlbError, match="trains nothing"):
            made_of(tmp_path / "c.jsonl", tokenizer, tmp_path, skips_bad=True)


def files_of(indexed: Any) -> list[bytes]:
    return [Path(f"{indexed.files.prefix}.{suffix}").read_bytes() for suffix in ("bin", "idx", "mask")]


def test_shards_processes_and_a_kill_leave_the_same_files(tokenizer, tmp_path):
    """One process at once, two in parallel, and one that is killed in the middle and started again."""
    jsonl = write_jsonl(tmp_path / "c.jsonl", conversations(3000, longest=40))
    whole = files_of(made_of(jsonl, tokenizer, tmp_path / "one", processes=1))
    parallel = made_of(jsonl, tokenizer, tmp_path / "two", processes=2, shard_bytes=300_000)
    assert files_of(parallel) == whole
    script = (
        "import sys; from pathlib import Path; from wlb_megatron.plugin.sft.indexed import index_all\n"
        "from wlb_megatron.sft.conversations import IndexFolder, Tokenizing\n"
        "index_all([Path(sys.argv[1])], Tokenizing(sys.argv[2], 'nemotron-nano-v2'), Path(sys.argv[3]), say=print,"
        " processes=1, shard_bytes=100_000)"
    )
    cache = tmp_path / "killed"
    command = [sys.executable, "-W", "ignore", "-c", script, str(jsonl), str(tokenizer), str(cache)]
    with subprocess.Popen(command) as job:
        while not (done := list(cache.glob("wlb_sft/.*.partial/shard-*.json"))):
            assert job.poll() is None
            time.sleep(0.02)
        job.kill()
    assert not list(cache.glob("wlb_sft/[!.]*"))
    before = {path: path.stat().st_mtime_ns for path in done}
    assert files_of(made_of(jsonl, tokenizer, cache, processes=1, shard_bytes=100_000)) == whole
    assert before and not list(cache.glob("wlb_sft/.*.partial"))


@pytest.mark.parametrize("locks", [True, False])
def test_processes_at_once_make_the_same_files_one_of_them_where_there_are_locks(
    tokenizer, tmp_path, monkeypatch, capsys, locks
):
    """A fault is found by each that tries. Without locks the last one finds the shards gone and the files there."""
    from wlb_megatron.plugin.sft import build

    jsonl = write_jsonl(tmp_path / "c.jsonl", conversations(300))
    expected, joined, join = files_of(made_of(jsonl, tokenizer, tmp_path / "alone")), [], build._join
    together = threading.Barrier(1 if locks else 3)

    def slow_join(*arguments: Any) -> None:
        joined.append(together.wait(20))
        time.sleep(0.3)
        join(*arguments)

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(build, "_join", slow_join)
    monkeypatch.setattr(build, "of_this_process", lambda: f"host.{threading.get_ident()}")
    if not locks:
        monkeypatch.setattr(build.fcntl, "flock", refuse)
    made: list[list[bytes]] = []
    processes = [
        threading.Thread(
            target=lambda: made.append(files_of(made_of(jsonl, tokenizer, tmp_path / "k", processes=1)))
        )
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert made == [expected] * 3 and len(joined) == (1 if locks else 3)
    assert ("waits for a process that tokenizes c.jsonl" in capsys.readouterr().out) == locks


def test_a_rank_waits_while_files_are_made_and_ends_with_a_line_if_nobody_makes_them(tmp_path, monkeypatch):
    from wlb_megatron.plugin.sft import build

    into, held_seconds = IndexFolder(tmp_path / "k", "c"), 1.0
    monkeypatch.setattr(build, "PATIENCE", 0.2)
    monkeypatch.setattr(build, "LOOK", 0.01)
    into.partial.mkdir(parents=True)
    lock = (into.partial / "lock").open("w")
    build.fcntl.flock(lock, build.fcntl.LOCK_EX)
    threading.Timer(held_seconds, lock.close).start()
    start = time.monotonic()
    with pytest.raises(WlbError, match=r"no process makes .* its own line says why"):
        build.wait_for_files(into)
    assert time.monotonic() - start > held_seconds
    into.folder.mkdir(parents=True)
    (into.folder / "index.json").write_text("{}", encoding="utf-8")
    build.wait_for_files(into)


def any_line(generator: random.Random, good: list[bytes], bad: list[bytes]) -> bytes:
    kind, line = generator.random(), generator.choice(good)
    if kind < 0.2:
        return generator.choice([*bad, b"", b" \t"])
    if kind > 0.4:
        return line
    at, byte = generator.randrange(len(line)), generator.choice(b'"\\{}[],: \x00\xe2u0a\x7f')
    return line[:at] + generator.choice([b"", bytes([byte])]) + line[at + generator.randint(0, 1) :]


def expected(megatron: Any, line: bytes) -> list[tuple[list[int], list[int]]] | None:
    """Tokens and mask of each conversation of the line; None if it is a bad one."""
    try:
        text = line.decode()
        if not text.strip():
            return []
        record, parts = json.loads(text, object_pairs_hook=once), []
        assert not record.get("tools")
        for turn in record["messages"]:
            role, content = turn["role"], turn["content"]
            assert role in ("system", "user", "assistant") and not turn.get("tool_calls")
            assert isinstance(content, str) and (content.strip() or role == "system")
            if role == "system" or not parts:
                parts.append([])
            parts[-1].append(turn)
        assert parts
        for part in parts:
            assert part[0]["role"] != "assistant" and any(turn["role"] == "assistant" for turn in part)
        made = [megatron.tokenize_conversation(part, True, False) for part in parts]
    except Exception:
        return None
    return [(tokens.tolist(), [0, *(targets[1:] != -100).astype(int).tolist()]) for tokens, targets in made]


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def test_200_random_files_with_faults_are_either_refused_by_line_or_trained(tokenizer, tmp_path, monkeypatch):
    """Good lines, bad ones, and good ones with a byte changed, taken away or put in, in shards of any size. The bad
    ones' numbers are listed; skipped, they leave the tokens and targets of the others, as Megatron has them."""
    from wlb_megatron.plugin.sft import indexed
    from wlb_megatron.plugin.sft.tokenizer import ConversationTokenizer

    monkeypatch.setattr(indexed, "ConversationTokenizer", cache(ConversationTokenizer))
    generator = random.Random(5)
    good = [line_of(*each) for each in conversations(30, seed=3, longest=4)]
    good += [line.replace(b"yes", b"\\u0079es").replace(b'{"m', b' {"id": null, "m') for line in good[:9]]
    bad = [line for name, (line, _) in BAD.items() if name != "nesting"]
    trained = cache(partial(expected, megatron_tokenizer(tokenizer, "nemotron-nano-v2")))
    for number in range(200):
        rows = [any_line(generator, good, bad) for _ in range(generator.randint(1, 8))]
        jsonl = tmp_path / f"{number}.jsonl"
        end = generator.choice([b"\n", b"\r\n"])
        mark, last = generator.choice([b"", b"\xef\xbb\xbf"]), end * generator.randint(0, 2)
        jsonl.write_bytes(mark + end.join(rows) + last)
        documents = [trained(row) for row in rows]
        wrong = [at for at, made in enumerate(documents, 1) if made is None]
        shards = {"processes": 1, "shard_bytes": generator.choice([50, 300, 1 << 20])}
        kept = [each for made in documents for each in made or ()]
        if kept:
            made = made_of(jsonl, tokenizer, tmp_path / "k", skips_bad=True, **shards)
            assert (made.counts.bad_lines, documents_of(made)) == (len(wrong), kept)
        if wrong or not kept:
            with pytest.raises(WlbError) as raised:
                made_of(jsonl, tokenizer, tmp_path / "k", **shards)
            listed = [line.split(":")[1] for line in str(raised.value).splitlines()[1:] if ":" in line]
            some = len(listed) if listed and not kept else len(wrong)  # a build ends at the first bad shard
            assert listed == [str(at) for at in wrong[:some]]


def test_sft_index_takes_a_job_s_flags_in_their_own_names(tmp_path, tokenizer, capsys):
    """The table of docs/sft.md pasted; a tokenizer that is not there is named with its flag."""
    pytest.importorskip("transformers")
    jsonl = tmp_path / "conversations.jsonl"
    jsonl.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in conversations(3)) + "{}\n")
    flags = f"--sft-tokenizer-prompt-format nemotron-nano-v2 --data-cache-path {tmp_path}/cache"
    command = f"sft-index {jsonl} {flags} --wlb-sft-skip-bad-lines --wlb-sft-drop-tools".split()
    assert main([*command, "--tokenizer-model", str(tokenizer)]) == 0
    assert list((tmp_path / "cache").rglob("*.mask"))
    for missing in (str(tmp_path / "absent"), "nobody/absent", "absent"):  # the last two the hub could have
        assert main([*command, "--tokenizer-model", missing]) == 2
        cure = "correct --tokenizer-model, or download it first"
        assert f"there is no folder {missing}: {cure}" in capsys.readouterr().err
