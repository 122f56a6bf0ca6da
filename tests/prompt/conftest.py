"""Fixtures of the prompt room."""

from __future__ import annotations

import pytest
from prompt_models import TRACES, real_tokenizer


@pytest.fixture
def smollm2():
    tokenizer = real_tokenizer("smollm2")
    if tokenizer is None:
        pytest.skip("SmolLM2 is not on this machine")
    return tokenizer


@pytest.fixture
def qwen_coder():
    tokenizer = real_tokenizer("qwen2.5-coder-0.5b")
    if tokenizer is None:
        pytest.skip("Qwen2.5-Coder is not on this machine")
    return tokenizer


@pytest.fixture
def traces():
    if not TRACES.is_dir():
        pytest.skip("the shared traces are not beside this checkout")
    return sorted(p for p in TRACES.glob("*.json") if p.name != "MANIFEST.json")
