"""The OpenAPI document against the server: schemathesis makes requests from it and holds the answers to it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import checks

from app.settings import Settings
from tests.app.conftest import BASE, write_adapters
from tests.support.fake_engine import FakeEngine
from tests.support.thread_server import serving
from tests.support.tokenizer_folders import byte_level_tokenizer, write_folder

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
PLAIN = {
    "model": BASE, "max_tokens": 4, "max_completion_tokens": None, "min_tokens": None, "n": 1, "best_of": None,
    "stream_options": None, "prompt_logprobs": None, "logit_bias": None, "stop_token_ids": None, "top_logprobs": None,
    "continue_final_message": None, "messages": [{"role": "user", "content": "hi"}], "prompt": "hi",
}  # fmt: skip
"""In half of the bodies: what the document cannot say of fields and their company makes most others a 400."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("schema")
    model_dir = write_folder(root / BASE, byte_level_tokenizer())
    chosen = Settings(model=str(model_dir), adapters=str(write_adapters(root / "adapters")))
    with serving(chosen, lambda: FakeEngine(model_dir=str(model_dir))) as address:
        yield address


@pytest.fixture(scope="module")
def document(url: str) -> Any:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/version"),
    ("GET", "/metrics"),
]
ADMIN = {("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter")}  # off here: there is nothing to try


def test_every_operation_is_tried(document: Any) -> None:
    described = {(operation.ok().method.upper(), operation.ok().path) for operation in document.get_all_operations()}
    assert described == {*OPERATIONS, *ADMIN}


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=lambda value: value.strip("/"))
def test_answers_are_what_the_document_says(document: Any, method: str, path: str) -> None:
    statuses: Counter[int] = Counter()
    turns = itertools.count()

    @given(case=document[path][method].as_strategy())
    @settings(
        max_examples=30 if method == "POST" else 5,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def try_it(case: Any) -> None:
        known = next(turns) % 2 == 0
        if known and isinstance(case.body, dict):
            case.body |= {name: value for name, value in PLAIN.items() if name in case.body}
        if known and "name" in case.path_parameters:
            case.path_parameters["name"] = "sql"
        response = case.call(timeout=30)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    try_it()
    assert statuses[200] > 0, statuses
