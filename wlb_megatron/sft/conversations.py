"""Reads lines of conversations in Megatron's form, {"messages": [..]}, and says what is wrong with one.

Megatron reads several faults in silence, or fails without naming the line: a role written "Assistant" makes its turn
vanish, a missing content trains the word None. Here each is a reason that goes with file and line number.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Conversation = list[dict[str, Any]]
"""Turns, each with role and content."""

ROLES = ("system", "user", "assistant", "tool")
"""Roles that the formats which mask by role know, spelled so."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class BadLine(Exception):
    """Why a line cannot be trained; its text is the reason, a line that can be printed."""

    def __init__(self, reason: str) -> None:
        super().__init__(" ".join(reason.encode("utf-8", "backslashreplace").decode().split()))


@dataclass(frozen=True, slots=True)
class Reading:
    """by_role: the prompt format writes and masks turns by their roles, so that it knows no others. drops_tools: turns
    and calls of tools, which such a format leaves out, are accepted."""

    by_role: bool
    drops_tools: bool = False


def conversations_of(line: bytes, reading: Reading) -> list[Conversation]:
    """The conversations of one line: a new one begins at each system turn, as in Megatron. [] for a blank line.

    BadLine for anything else than an object with a list `messages` of turns.
    """
    text = _text(line)
    if not text:
        return []
    record = _parse(text)
    if not isinstance(record, dict):
        raise BadLine(f"is a JSON {_kind(record)}, not an object with messages")
    if "messages" not in record:
        keys = ", ".join(sorted(map(str, record))[:8]) or "none"
        raise BadLine(f"has no messages (keys: {keys})")
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise BadLine("messages is not a list of turns")
    if record.get("tools") and not reading.drops_tools:
        raise BadLine(
            "has tools, which Megatron's tokenizer does not read (--wlb-sft-drop-tools leaves them out)"
        )
    for number, turn in enumerate(messages, 1):
        _check_turn(turn, number, reading)
    conversations = _split(messages)
    for conversation in conversations:
        _check_order(conversation, reading)
    return conversations


def _text(line: bytes) -> str:
    try:
        return line.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise BadLine("is not UTF-8") from None


def _parse(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise BadLine("is nested too deep") from None
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise BadLine("holds more than one JSON value") from None
        raise BadLine(f"is not JSON ({error.msg} at character {error.pos + 1})") from None
    except ValueError:  # a number of too many digits
        raise BadLine("is not JSON") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        raise BadLine(f"has the key {next(name for name in names if names.count(name) > 1)} twice")
    return record


def _check_turn(turn: Any, number: int, reading: Reading) -> None:
    if not isinstance(turn, dict):
        raise BadLine(f"turn {number} is a JSON {_kind(turn)}, not an object with role and content")
    role, content = turn.get("role"), turn.get("content")
    if not isinstance(role, str):
        raise BadLine(f"turn {number} has no role")
    calls = bool(turn.get("tool_calls"))
    if reading.by_role and role not in ROLES:
        raise BadLine(f"turn {number} has the role {role[:20]!r}; known are {', '.join(ROLES)}")
    if reading.by_role and not reading.drops_tools and (calls or role == "tool"):
        raise BadLine(
            f"turn {number} is of a tool, which this prompt format leaves out (--wlb-sft-drop-tools accepts that)"
        )
    if content is None and calls and not reading.by_role:
        return  # a template prints the calls
    if not isinstance(content, str):
        raise BadLine(
            f"turn {number} has {'no content' if content is None else f'a {_kind(content)} as content'}"
        )
    if not content.strip() and role != "system" and not calls:
        raise BadLine(f"turn {number} ({role[:20]}) is empty")


def _split(messages: Conversation) -> list[Conversation]:
    conversations: list[Conversation] = []
    for turn in messages:
        if turn["role"] == "system" or not conversations:
            conversations.append([])
        conversations[-1].append(turn)
    return conversations


def _check_order(conversation: Conversation, reading: Reading) -> None:
    """What Megatron's tokenizer asks of a format that masks: an answer follows a question."""
    if not reading.by_role:
        return
    roles = [turn["role"] for turn in conversation]
    if "assistant" not in roles:
        raise BadLine("a conversation has no assistant turn")
    for before, role in zip(["", *roles], roles, strict=False):
        if role == "assistant" and before not in ("user", "tool"):
            raise BadLine(f"an assistant turn follows {before or 'nothing'}, not a user turn")


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
