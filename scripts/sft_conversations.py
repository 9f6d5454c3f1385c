#!/usr/bin/env python3
"""Conversations about the Python standard library, and a tokenizer of their words: small data to try --sft with.

A line asks what a function or class does and answers with its docstring. The tokenizer is a byte-pair encoding of
2,048 tokens with a chat template that marks answers.
"""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from scripts.corpus import text_files

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
)
SPECIAL = ["<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
SYSTEM = "You explain the Python standard library."


def conversations(most: int) -> Iterator[list[dict[str, str]]]:
    """At most `most`, in a fixed order."""
    count = 0
    for path in text_files(Path(sysconfig.get_paths()["stdlib"]), "*.py"):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # files that test the parser
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            answer = ast.get_docstring(node)
            if not answer or not answer.isascii():
                continue
            if count == most:
                return
            count += 1
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            yield [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"What does the {kind} {node.name} of {path.stem} do?"},
                {"role": "assistant", "content": answer},
            ]


def build(folder: Path, most: int = 3000) -> tuple[Path, Path, Path]:
    """train.jsonl, held_out.jsonl (each tenth) and tokenizer/ in the folder, unless they are there."""
    paths = folder / "train.jsonl", folder / "held_out.jsonl", folder / "tokenizer"
    if (paths[2] / "tokenizer_config.json").exists():
        return paths
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"messages": messages}) + "\n" for messages in conversations(most)]
    paths[0].write_text("".join(line for at, line in enumerate(lines) if at % 10), encoding="utf-8")
    paths[1].write_text("".join(lines[::10]), encoding="utf-8")
    _build_tokenizer(paths[2], [text for messages in conversations(most) for text in _texts(messages)])
    return paths


def _texts(messages: list[dict[str, str]]) -> list[str]:
    return [turn["content"] for turn in messages]


def _build_tokenizer(folder: Path, texts: list[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
