"""A tiny word-level Hugging Face tokenizer in a folder, and seeded conversations of its words."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORDS = [
    *("hello", "you", "are", "kind", "what", "is", "two", "plus"),
    *("four", "seven", "red", "blue", "green", "yes", "no", "maybe"),
]
SPECIAL = ["<unk>", "<pad>", "<eos>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_233>"]
VOCABULARY = [*SPECIAL, "System", "User", "Assistant", "\n", "system", "user", "assistant", "tool", *WORDS]

EOS = VOCABULARY.index("<eos>")
TEMPLATE = (
    "{% for m in messages %}{{ '<SPECIAL_11>' + m['role'] + '\n' + m['content'] + '<eos>' }}{% endfor %}"
)
MARKED = (
    "{% for m in messages %}{{ '<SPECIAL_11>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<eos>' }}{% endgeneration %}{% else %}{{ m['content'] + '<eos>' }}{% endif %}"
    "{% endfor %}"
)


def build_tokenizer(
    folder: Path, *, template: str | None = TEMPLATE, pad: str = "<pad>", words: Sequence[str] = VOCABULARY
) -> Path:
    """A token for each special token, line end and word; anything else is <unk>."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    pattern = Regex(r"<[A-Za-z0-9_]+>|\n|[^\s<]+")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "removed", invert=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "<eos>"}
    settings |= {"pad_token": pad} | ({} if template is None else {"chat_template": template})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def megatron_tokenizer(folder: Path, prompt_format: str) -> Any:
    """Megatron's own. Before 0.18 it was written for transformers 4, whose templates give tokens, not a dict."""
    from megatron.core.tokenizers.text.libraries.sft_tokenizer import SFTTokenizer

    made = SFTTokenizer(str(folder), prompt_format)
    if not hasattr(made, "_extract_token_ids"):
        apply = made._tokenizer.apply_chat_template
        made._tokenizer.apply_chat_template = lambda *args, **more: apply(*args, return_dict=False, **more)
    return made


def words(generator: random.Random, count: int) -> str:
    return " ".join(generator.choice(WORDS) for _ in range(count))


def conversation(
    generator: random.Random, turns: Sequence[tuple[int, int]], system: int = 3
) -> list[dict[str, Any]]:
    """Turns of a user and of an assistant, in words."""
    made = [{"role": "system", "content": words(generator, system)}]
    for asked, answered in turns:
        made += [
            {"role": "user", "content": words(generator, asked)},
            {"role": "assistant", "content": words(generator, answered)},
        ]
    return made


def conversations(count: int, seed: int = 1, longest: int = 20) -> list[list[dict[str, Any]]]:
    generator = random.Random(seed)

    def turns() -> list[tuple[int, int]]:
        few = range(generator.randint(1, 2))
        return [(generator.randint(1, longest), generator.randint(1, longest)) for _ in few]

    return [conversation(generator, turns()) for _ in range(count)]


def write_jsonl(path: Path, lines: Sequence[list[dict[str, Any]]]) -> Path:
    text = "".join(json.dumps({"messages": messages}) + "\n" for messages in lines)
    path.write_text(text, encoding="utf-8")
    return path
