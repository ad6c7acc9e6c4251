"""`python -m load_tests.run`: put load on an OpenAI-compatible server and report what its clients saw."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import uvloop

from app.bench.load import run_load
from app.bench.summary import summarize
from load_tests.report import draw, text_lines, write_json
from load_tests.scenario import Scenario, add_flags, load_scenario


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 all requests completed, 1 some did not, 2 the scenario or the server cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m load_tests.run", description=__doc__)
    parser.add_argument("scenario", nargs="?", type=Path, help="YAML file with any of the keys below")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.png")
    add_flags(parser)
    flags = parser.parse_args(arguments)
    try:
        scenario = load_scenario(flags.scenario, flags)
        models = scenario.models or listed_models(scenario.base_url)
        plan = scenario.workload(models).plan()
    except (ValueError, OSError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    run = uvloop.run(run_load(scenario.base_url, plan, clients=scenario.clients, max_seconds=scenario.max_seconds))
    summary = summarize(run)
    print("\n".join(text_lines(summary)))
    if flags.out:
        write_json(flags.out.with_suffix(".json"), {"scenario": dataclasses.asdict(scenario), "summary": summary})
        try:
            draw(flags.out.with_suffix(".png"), run, title_of(scenario, len(models)))
        except ModuleNotFoundError:
            print("no picture: pip install 'punica[bench]'", file=sys.stderr)
    return 0 if summary["completed"] == summary["requests"] else 1


def listed_models(base_url: str) -> list[str]:
    """The models that the server lists: the base first, if the server does as we do."""
    answer = httpx.get(f"{base_url}/v1/models", timeout=30.0, trust_env=False).raise_for_status().json()
    return [model["id"] for model in answer["data"]]


def title_of(scenario: Scenario, num_models: int) -> str:
    load = f"{scenario.clients} clients" if scenario.mode == "closed" else f"{scenario.arrivals} {scenario.rate}/s"
    return (
        f"{load} · {scenario.popularity} over {num_models} models · {scenario.lengths} · {scenario.requests} requests"
    )


if __name__ == "__main__":
    sys.exit(main())
