"""`punica bench serve`: put load on an OpenAI-compatible server and report what its clients saw.

A scenario is a number of clients that each have one request in flight (closed loop), or arrivals at planned times,
however slow the server is (open loop). Latencies count from the planned arrival. Each popularity that is asked for is
one run; `load_tests/README.md` says more.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import httpx
import uvloop

from app.bench.fleet import run_plan
from app.bench.load import Run, run_load
from app.bench.report import draw, table, text_lines
from app.bench.scenario import BASE, Models, Scenario, load_scenario
from app.bench.scenario import add_flags as add_scenario_flags
from app.bench.summary import summarize
from punica_core.bench import record
from punica_core.bench.plots import say_no_picture
from punica_core.bench.workload import PlannedRequest

WARMUP_CLIENTS = 8


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `punica bench serve`."""
    parser.add_argument("scenario", nargs="?", type=Path, help="YAML file with any of the keys below")
    parser.add_argument("--out", type=Path, help="write OUT.json, and a picture of each run beside it")
    add_scenario_flags(parser)


def main(options: argparse.Namespace) -> int:
    """Exit codes: 0 all requests completed, 1 some did not, 2 the scenario or the server cannot be used."""
    try:
        scenario = load_scenario(options.scenario, options)
        models = served_models(scenario)
        plans = {name: scenario.workload(name, models).plan() for name in scenario.popularities}
        if scenario.warmup:
            warm_up(scenario, models)
    except (ValueError, OSError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report: dict[str, Any] = {
        "provenance": record.provenance(),
        "scenario": dataclasses.asdict(scenario),
        "num_adapters": len(models.adapters),
        "runs": {},
    }
    for popularity, plan in plans.items():
        run = run_plan(
            scenario.base_url,
            plan,
            clients=scenario.clients,
            max_seconds=scenario.max_seconds,
            processes=scenario.processes,
        )
        summary = report["runs"][popularity] = summarize(run)
        print(f"{popularity}: " + "\n".join(text_lines(summary)), flush=True)
        if options.out:
            record.write(options.out.with_suffix(".json"), report)  # after each run: a later one may be cut off
            save_picture(options.out, popularity, run, title_of(scenario, popularity, models))
    print("\n" + table(report["runs"]))
    return 0 if all(s["completed"] == s["requests"] for s in report["runs"].values()) else 1


def served_models(scenario: Scenario) -> Models:
    """The models to ask for: those named, else those that the server lists. The base is what others name as their
    parent; if nothing has a parent, every model counts as one of equals, and the first as the base."""
    if scenario.models and (scenario.base or BASE not in scenario.popularities):
        return Models(scenario.base or scenario.models[0], scenario.models)
    address = f"{scenario.base_url}/v1/models"
    answer = httpx.get(address, timeout=30.0, trust_env=False).raise_for_status().json()
    parents = {model["id"]: model.get("parent") for model in answer["data"]}
    if not parents:
        raise ValueError(f"{address} lists no models.")
    adapters = tuple(name for name, parent in parents.items() if parent is not None) or tuple(parents)
    base = next((name for name, parent in parents.items() if parent is None), adapters[0])
    return Models(scenario.base or base, scenario.models or adapters)


def warm_up(scenario: Scenario, models: Models) -> None:
    """Ask every model for two tokens. Raises ValueError if one does not answer."""
    low = scenario.token_low
    asked = [
        PlannedRequest(name, tuple(range(low, low + 16)), 2, ignore_eos=scenario.ignore_eos)
        for name in dict.fromkeys((models.base, *models.adapters))
    ]
    run = uvloop.run(run_load(scenario.base_url, asked, clients=WARMUP_CLIENTS, max_seconds=scenario.max_seconds))
    failed = [outcome for outcome in run.outcomes if outcome.error]
    if failed or run.not_sent:
        kind = f"{failed[0].model!r} ended with {failed[0].error}" if failed else "max_seconds was over"
        raise ValueError(f"the warm-up failed for {len(failed) + run.not_sent} of {len(asked)} models: {kind}.")


def save_picture(out: Path, popularity: str, run: Run, title: str) -> None:
    """OUT-POPULARITY.png, if there is a plotting library."""
    name = f"{out.stem}-{popularity.replace(':', '')}.png"
    try:
        draw(out.with_name(name), run, title)
    except ModuleNotFoundError:
        say_no_picture()


def title_of(scenario: Scenario, popularity: str, models: Models) -> str:
    load = f"{scenario.clients} clients" if scenario.mode == "closed" else f"{scenario.arrivals} {scenario.rate}/s"
    over = "the base model" if popularity == BASE else f"{popularity} over {len(models.adapters)} models"
    return f"{load} · {over} · {scenario.lengths} · {scenario.requests} requests"
