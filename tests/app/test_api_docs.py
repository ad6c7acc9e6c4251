"""What docs/api.md says by example and in its table of metrics is what the server does and has."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.core import Metric

from app.keys import ApiKey
from app.limits import KeyUsages
from app.metrics import Metrics
from app.settings import Settings
from punica_core.protocol import StepStats
from tests.support.fake_engine import FakeEngine
from tests.support.thread_server import serving

DOCS = Path(__file__).parents[2] / "docs" / "api.md"
URL = "http://127.0.0.1:8000"
BEGIN, END = "<!-- metrics: begin -->\n", "<!-- metrics: end -->\n"


def commands() -> list[str]:
    """Of the section "By hand", each as it would be pasted."""
    block = DOCS.read_text().partition("## By hand\n")[2].partition("```bash\n")[2].partition("```")[0]
    lines = block.replace("\\\n", " ").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def paste(command: str, url: str, key: str = "") -> subprocess.CompletedProcess[str]:
    assert command.startswith("curl -s")
    assert URL in command
    shell = command.replace("curl -s", "curl --fail-with-body -s", 1).replace(URL, url)
    environment = {"PATH": "/usr/bin:/bin:/usr/local/bin", "PUNICA_API_KEY": key, "no_proxy": "*"}
    return subprocess.run(["sh", "-c", shell], capture_output=True, text=True, env=environment, timeout=60, check=False)


def server(model_dir: Path, adapters_dir: Path, api_key: str = "") -> Iterator[str]:
    chosen = Settings(model=str(model_dir), adapters=str(adapters_dir), enable_admin=True, api_key=api_key)
    with serving(chosen, lambda: FakeEngine(model_dir=str(model_dir))) as url:
        yield url


@pytest.fixture
def open_server(model_dir: Path, adapters_dir: Path) -> Iterator[str]:
    yield from server(model_dir, adapters_dir)


@pytest.fixture
def locked_server(model_dir: Path, adapters_dir: Path) -> Iterator[str]:
    yield from server(model_dir, adapters_dir, api_key="a-secret-of-tests")


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_each_line_to_paste_is_answered(open_server: str) -> None:
    assert len(commands()) == 9
    answers = {command: paste(command, open_server) for command in commands()}
    assert {command: done.stdout for command, done in answers.items() if done.returncode} == {}
    (stream,) = (done.stdout for command, done in answers.items() if "curl -sN" in command)
    assert stream.count("data: ") > 2
    wrong = commands()[1].replace("pirate", "privateer")
    assert wrong != commands()[1]
    assert paste(wrong, open_server).returncode != 0, "what the server refuses would be noticed"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_line_with_a_key_needs_it(locked_server: str) -> None:
    (command,) = (command for command in commands() if "PUNICA_API_KEY" in command)
    assert paste(command, locked_server, "a-secret-of-tests").returncode == 0
    assert paste(command, locked_server, "another-secret").returncode != 0


def families() -> list[Metric]:
    """All that a server with everything to tell has."""
    usages = KeyUsages()
    usages.set_keys([ApiKey("acme")])
    metrics = Metrics(lambda: 0, lambda: 0, lambda: 0)
    metrics.on_stats(StepStats(steps=1))
    return [*metrics.collect(), *usages.collect()]


def row(family: Metric) -> str:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    labels = ", ".join(f"`{label}`" for label in getattr(family, "_labelnames", ()))
    return f"| `{name}` | {family.type} | {labels} | {family.documentation} |"


def test_all_metrics_are_listed_with_their_labels() -> None:
    table = "\n".join(["| name | | labels | |", "|---|---|---|---|", *map(row, families())]) + "\n"
    listed = DOCS.read_text().partition(BEGIN)[2].partition(END)[0]
    assert listed == table, f"between the marks in {DOCS.name} goes:\n{table}"
