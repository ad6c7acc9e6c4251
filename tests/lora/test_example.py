"""The example's five answers are PEFT's own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from examples.batch_lora import ADAPTERS, PROMPTS, answer_all
from tests.support.demo import ROOT, demo_model, peft_answers
from tests.support.peft_adapters import peft_warnings_ignored


@pytest.mark.slow
def test_one_call_gives_the_answers_of_five_models() -> None:
    model_dir = demo_model()
    got = answer_all(model_dir, max_tokens=40)
    with peft_warnings_ignored():
        want = {
            name: peft_answers(
                model_dir, None if name == "base" else ADAPTERS / name, [[{"role": "user", "content": prompt}]], 40
            )[0].text
            for name, prompt in PROMPTS.items()
        }
    assert got == want
    assert len(set(got.values())) == len(got)


@pytest.mark.slow
def test_the_librarys_first_snippet_runs_as_it_stands() -> None:
    snippet = (ROOT / "docs" / "library.md").read_text().partition("```python\n")[2].partition("```")[0]
    demo_model()
    done = subprocess.run([sys.executable, "-c", snippet], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    sql, *others = done.stdout.strip().splitlines()
    assert sql.startswith("SELECT COUNT(*) FROM singers")
    assert not any(line.startswith("SELECT") for line in others), "the others are answers of pirate and the base"
