"""What several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a small .bin/.idx pair with documents of megatron_runs.LENGTHS."""
    from megatron_runs import LENGTHS, write_corpus

    prefix = tmp_path_factory.mktemp("corpus") / "documents"
    write_corpus(prefix, LENGTHS)
    return prefix
