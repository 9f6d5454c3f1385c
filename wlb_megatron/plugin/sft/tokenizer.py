"""Megatron's own SFT tokenizer, and which tokens of a conversation it trains."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wlb_megatron.errors import WlbError, install, installed_version
from wlb_megatron.sft.conversations import BadLine, Conversation, Tokenizing

IGNORED = -100
"""Megatron's target of a token that is not trained."""

PREFIX_TOKENS = 3
"""Of each answer, not trained under nemotron-nano-v2, however many tokens its prefix really has."""


class ConversationTokenizer:
    """Tokens of a conversation and which of them are trained targets.

    digest: a digest of the vocabulary, the chat template, Megatron's code and the versions of its libraries.
    token_type: numpy's, of token ids in the .bin, as Megatron's preprocessing chooses it.
    """

    def __init__(self, tokenizing: Tokenizing) -> None:
        """WlbError if the tokenizer cannot be loaded, or its template cannot be used."""
        self.tokenizing = tokenizing
        self._megatron = _load(tokenizing)
        self._hugging_face = self._megatron._tokenizer
        config = self._megatron._prompt_config
        self._template: str | None = config.custom_chat_template
        self._check_template()
        special = {str(token) for token in self._hugging_face.all_special_tokens}
        # identity is for turns that are written out already, special tokens and all.
        special_tokens = special if tokenizing.prompt_format != "identity" else set()
        self._special = re.compile("|".join(map(re.escape, sorted(special_tokens))) or r"(?!)")
        from megatron.core.datasets.indexed_dataset import DType

        self.token_type: Any = DType.optimal_dtype(int(self._megatron.vocab_size))
        self.digest = self._digest(config)

    def tokenize(self, conversation: Conversation) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """int64[n] tokens, and uint8[n]: 1 where Megatron's target is not -100. The first token is never one: nothing
        precedes that could predict it. BadLine where the tokenizer fails."""
        try:
            if self.tokenizing.assistant_only:
                tokens, is_target = self._marked(conversation)
            else:
                tokens, targets = self._megatron.tokenize_conversation(
                    conversation, return_target=True, add_generation_prompt=False
                )
                is_target = np.asarray(targets) != IGNORED
        except Exception as error:  # of a template, of Megatron's asserts, of the library
            reason = " ".join(str(error).split())[:160]
            raise BadLine(f"Megatron's tokenizer fails on it: {type(error).__name__}: {reason}") from None
        mask = np.asarray(is_target, dtype=np.uint8)
        mask[:1] = 0
        return np.asarray(tokens, dtype=np.int64), mask

    def holds_special_text(self, conversation: Conversation) -> bool:
        """Whether a turn's text spells a special token, such as one that ends a turn."""
        return any(self._special.search(str(turn.get("content") or "")) for turn in conversation)

    def notes(self) -> list[str]:
        """What the log says of this format, a line each."""
        lines = []
        kind = self.tokenizing.prompt_format
        code = inspect.getsource(type(self._megatron).tokenize_conversation)
        unmasked = kind == "default" or (
            kind == "identity" and '"identity"]' in code
        )  # some releases mask identity
        if unmasked and not self.tokenizing.assistant_only:
            lines.append(
                f"the prompt format {kind} trains every token, prompts too, as in Megatron; with default and a chat "
                "template with {% generation %}, --wlb-sft-assistant-only trains answers alone"
            )
        if kind == "nemotron-h-aligned":
            lines.append(
                "the prompt format nemotron-h-aligned has no token that ends an answer: none is trained"
            )
        if kind == "nemotron-nano-v2":
            prefix = self._hugging_face.encode("<SPECIAL_11>Assistant\n", add_special_tokens=False)
            if len(prefix) != PREFIX_TOKENS:
                lines.append(
                    f"WARNING: Megatron leaves out {PREFIX_TOKENS} tokens at the begin of an answer, but the prefix "
                    f"of nemotron-nano-v2 has {len(prefix)} in this tokenizer: targets begin at the wrong token"
                )
        return lines

    def _marked(self, conversation: Conversation) -> tuple[Any, Any]:
        """Tokens, and those that the template marks by {% generation %}."""
        encoded = self._hugging_face.apply_chat_template(
            conversation,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            add_generation_prompt=False,
            chat_template=self._template,
        )
        return encoded["input_ids"], encoded["assistant_masks"]

    def _check_template(self) -> None:
        tokenizing, template = self.tokenizing, self._template
        if template is None:
            raise WlbError(
                f"{tokenizing.tokenizer} has no chat template, which --sft-tokenizer-prompt-format default needs: add "
                "one to its tokenizer_config.json, or use another format"
            )
        text = template if isinstance(template, str) else json.dumps(template)
        if "strftime_now" in text:
            raise WlbError(
                f"the chat template of {tokenizing.tokenizer} prints today's date (strftime_now), so tokens would "
                "depend on the day: write a fixed date into the template"
            )
        marks = re.search(r"{%-?\s*generation\s*-?%}", text) is not None
        if tokenizing.assistant_only and (tokenizing.prompt_format != "default" or not marks):
            raise WlbError(
                "--wlb-sft-assistant-only needs --sft-tokenizer-prompt-format default and a chat template that marks "
                "answers by {% generation %} .. {% endgeneration %}"
            )

    def _digest(self, config: Any) -> str:
        backend = getattr(self._hugging_face, "backend_tokenizer", None)
        vocabulary = (
            backend.to_str()
            if backend is not None
            else json.dumps(self._hugging_face.get_vocab(), sort_keys=True)
        )
        code = inspect.getsource(type(self._megatron).tokenize_conversation)
        parts = (
            vocabulary,
            json.dumps(self._template, sort_keys=True),
            json.dumps(
                {key: str(value) for key, value in self._hugging_face.special_tokens_map.items()},
                sort_keys=True,
            ),
            f"{config.assistant_prefix_len} {config.has_bos} {config.has_system_role}",
            code,
            *(f"{name} {installed_version(name) or '?'}" for name in ("transformers", "tokenizers")),
        )
        digest = hashlib.sha256()
        for part in parts:
            digest.update(hashlib.sha256(part.encode()).digest())
        return digest.hexdigest()


def _load(tokenizing: Tokenizing) -> Any:
    try:
        from megatron.core.tokenizers.text.libraries.sft_tokenizer import SFTTokenizer
    except ImportError as error:
        if error.name == "megatron":
            raise WlbError(f"Megatron tokenizes, and is not installed: {install('gpu')}") from None
        raise WlbError(f"this Megatron has no SFT tokenizer ({error}): use 0.18.2 or later") from None
    folder = Path(tokenizing.tokenizer)
    try:
        if not folder.is_dir() and not _cached(tokenizing.tokenizer):
            raise WlbError(f"there is no folder {folder}: correct --tokenizer-model, or download it first")
        return SFTTokenizer(tokenizing.tokenizer, tokenizing.prompt_format)
    except ImportError:
        raise WlbError(f"Megatron's SFT tokenizer needs transformers: {install('sft')}") from None
    except WlbError:
        raise
    except NotImplementedError:
        raise WlbError(
            f"this Megatron does not know the prompt format {tokenizing.prompt_format!r}: give "
            "--sft-tokenizer-prompt-format default, identity, nemotron-nano-v2 or nemotron-h-aligned"
        ) from None
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise WlbError(
            f"cannot load the tokenizer {tokenizing.tokenizer}: {reason}; give a local folder"
        ) from None


def _cached(name: str) -> bool:
    """Whether a tokenizer of this name on Hugging Face's hub was downloaded before. The hub is not asked: each rank
    would, and without a network each tries for half a minute."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "tokenizer_config.json"), str)
    except HFValidationError:  # no name that the hub could have
        return False
