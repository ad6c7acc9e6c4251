"""What a real server says of its adapters when it is ready, against what it does with them."""

from __future__ import annotations

import time
from pathlib import Path

import httpx

from tests.support.peft_adapters import save_peft_adapter, tiny_llama
from tests.support.server import serve
from tests.support.tokenizer_folders import byte_level_tokenizer, write_folder


def test_an_adapter_of_another_base_is_counted_apart_and_named(tmp_path: Path) -> None:
    write_folder(tmp_path / "base", byte_level_tokenizer())
    tiny_llama().save_pretrained(tmp_path / "base")
    adapters, log = tmp_path / "adapters", tmp_path / "log"
    save_peft_adapter(adapters / "tuned")
    save_peft_adapter(adapters / "foreign", tiny_llama(hidden_size=128))
    flags = ("--model", str(tmp_path / "base"), "--adapters", str(adapters), "--device", "cpu", "--kv-tokens", "1024")
    with serve(log, *flags) as server:
        deadline = time.monotonic() + 30
        while "api_key=" not in log.read_text():
            assert time.monotonic() < deadline, "it says that it is ready"
            time.sleep(0.05)
        said = log.read_text()
        assert "with base and 1 adapter; 1 other is refused" in said
        assert "Adapter 'foreign' is refused" in said
        assert '"model":"tuned"' in said
        assert '"model":"foreign"' not in said
        listed = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [card["id"] for card in listed] == ["base", "foreign", "tuned"], "as others that are refused"
        for model, status in (("tuned", 200), ("foreign", 400)):
            body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 1}
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == status
