"""Figures, scenarios, and the command from a YAML file to JSON and PNG."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.bench.fleet import merged, run_plan
from app.bench.load import Run
from app.bench.scenario import Models, Scenario, add_flags, load_scenario
from app.bench.serve import add_flags as serve_flags
from app.bench.serve import main as serve_main
from app.bench.serve import served_models
from app.bench.stream import Outcome
from app.bench.summary import summarize
from punica_core.bench.latency import percentiles
from punica_core.bench.workload import PlannedRequest
from tests.load_tests.test_load import WHOLE
from tests.support.stub_server import StubHandler, serving


def outcome(planned: float, arrivals: list[float], tokens: int, error: str = "", model: str = "a") -> Outcome:
    ended = arrivals[-1] if arrivals else planned
    return Outcome(model, planned, planned, ended, arrivals, len(arrivals), 5, tokens, error)


def test_figures_are_those_of_complete_streams() -> None:
    run = Run(
        [outcome(0.0, [1.0, 2.0, 4.0], 4), outcome(1.0, [1.5], 1, model="b"), outcome(0.0, [9.0], 7, "truncated")],
        not_sent=2,
        seconds=10.0,
        client_cpu=0.2,
    )
    found = summarize(run)
    assert (found["requests"], found["completed"], found["not_sent"]) == (5, 2, 2)
    assert found["errors"] == {"truncated": 1}
    assert found["by_model"] == {"a": 2, "b": 1}
    assert found["generated_tokens"] == 5
    assert found["generated_tokens_per_second"] == 0.5
    assert found["ttft_ms"]["mean"] == 750.0
    assert found["inter_token_ms"]["max"] == 2000.0
    assert found["time_per_token_ms"]["mean"] == 1000.0
    assert found["latency_ms"]["max"] == 4000.0
    assert not found["client_is_bottleneck"]


def test_a_busy_or_late_client_is_named() -> None:
    assert summarize(Run([], 0, 1.0, client_cpu=0.95))["client_is_bottleneck"]
    assert summarize(Run([], 0, 1.0, client_cpu=0.1, client_lags=[0.2] * 10))["client_is_bottleneck"]
    assert not summarize(Run([], 0, 1.0, client_cpu=0.1, client_lags=[0.001] * 10))["client_is_bottleneck"]


def test_percentiles_of_nothing_are_nothing() -> None:
    assert percentiles([]) is None


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args(flags)


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("clients: 3\nrequests: 7\nmodels: [x, y]\n")
    scenario = load_scenario(file, parsed("--requests", "9", "--mode", "open"))
    assert (scenario.clients, scenario.requests, scenario.mode, scenario.models) == (3, 9, "open", ("x", "y"))
    assert scenario.seed == Scenario().seed
    assert load_scenario(file, parsed("--models", "p, q")).models == ("p", "q")


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("client: 3\n")
    with pytest.raises(ValueError, match=r"no key 'client'\. Did you mean 'clients'"):
        load_scenario(file, parsed())


@pytest.mark.parametrize(
    "flags", [["--requests", "0"], ["--requests", "100001"], ["--max-seconds", "9999"], ["--base-url", "http://a.b"]]
)
def test_unbounded_or_remote_scenarios_are_refused(flags: list[str]) -> None:
    with pytest.raises(ValueError, match=r"must be between|--allow-remote"):
        load_scenario(None, parsed(*flags))


def test_a_remote_server_can_be_allowed() -> None:
    assert load_scenario(None, parsed("--base-url", "http://a.b", "--allow-remote")).allow_remote


@pytest.mark.parametrize("file", sorted(Path("load_tests/scenarios").glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_scenarios_make_a_plan(file: Path) -> None:
    scenario = load_scenario(file, parsed())
    models = Models("base", ("a", "b", "c", "d"))
    for popularity in scenario.popularities:
        assert len(scenario.workload(popularity, models).plan()) == scenario.requests


def test_base_asks_for_no_adapter_and_the_others_for_nothing_else() -> None:
    scenario, models = Scenario(requests=9, popularity="base, distinct"), Models("m", ("a", "b", "c"))
    asked = {name: {r.model for r in scenario.workload(name, models).plan()} for name in scenario.popularities}
    assert asked == {"base": {"m"}, "distinct": {"a", "b", "c"}}


def prompts_of(*flags: str) -> list[set[tuple[int, ...]]]:
    """The prompts of each run of a scenario."""
    scenario = load_scenario(None, parsed("--requests", "9", "--popularity", "base,identical", *flags))
    plans = [scenario.workload(name, Models("m", ("a", "b"))).plan() for name in scenario.popularities]
    return [{request.prompt_ids for request in plan} for plan in plans]


def test_no_two_runs_send_the_same_prompt() -> None:
    runs = prompts_of() + prompts_of()
    assert len(set().union(*runs)) == sum(map(len, runs)) == 4 * 9


def test_prompts_are_repeated_where_their_seed_is_given() -> None:
    first, second = prompts_of("--prompt-seed", "7")
    assert prompts_of("--prompt-seed", "7") == [first, second]
    assert prompts_of("--prompt-seed", "8")[0] == second
    assert not first & second


def test_the_report_has_the_seed_that_repeats_its_prompts() -> None:
    scenario = load_scenario(None, parsed())
    assert scenario.prompt_seed >= 0
    again = load_scenario(None, parsed("--prompt-seed", str(scenario.prompt_seed)))
    plans = [each.workload("uniform", Models("m", ("a",))).plan() for each in (scenario, again)]
    assert plans[0] == plans[1]


class Handler(StubHandler):
    def do_GET(self) -> None:
        listed = [{"id": "m", "parent": None}, {"id": "a", "parent": "m"}, {"id": "b", "parent": "m"}]
        self.send(json.dumps({"data": listed}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body["model"] == "missing":
            self.send_error(404)
        else:
            self.send(b"".join(WHOLE), "text/event-stream")


@pytest.fixture
def server_url() -> Iterator[str]:
    with serving(Handler) as url:
        yield url


def serve(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    serve_flags(parser)
    return serve_main(parser.parse_args(flags))


def test_the_command_writes_json_and_a_picture_of_each_run(
    server_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "report"
    flags = ["--base-url", server_url, "--requests", "6", "--clients", "2", "--popularity", "base,distinct", "--warmup"]
    assert serve(*flags, "--out", str(out)) == 0
    report = json.loads(out.with_suffix(".json").read_text())
    assert {name: summary["completed"] for name, summary in report["runs"].items()} == {"base": 6, "distinct": 6}
    assert report["runs"]["base"]["by_model"] == {"m": 6}
    assert report["runs"]["distinct"]["by_model"] == {"a": 3, "b": 3}
    assert report["scenario"]["clients"] == 2
    for name in ("base", "distinct"):
        assert (tmp_path / "deep" / f"report-{name}.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "6 of 6 requests completed" in printed
    assert sum(line.startswith(("| base | ", "| distinct | ")) for line in printed.splitlines()) == 2


def test_failed_requests_are_an_exit_code_and_a_line(server_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("--base-url", server_url, "--models", "missing", "--requests", "2") == 1
    assert "http_404: 2" in capsys.readouterr().out


def test_a_warm_up_that_fails_is_not_measured_over(server_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("--base-url", server_url, "--models", "a,missing", "--requests", "2", "--warmup") == 2
    assert "'missing' ended with http_404" in capsys.readouterr().err


def test_a_wrong_word_is_a_message(server_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("--base-url", server_url, "--popularity", "fair") == 2
    assert "popularity is 'fair'" in capsys.readouterr().err


def test_servers_that_name_no_parents_have_equal_models(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = httpx.Response(200, json={"data": [{"id": "x"}, {"id": "y"}]}, request=httpx.Request("GET", "http://a"))
    monkeypatch.setattr(httpx, "get", lambda *args, **options: answer)
    assert served_models(Scenario()) == Models("x", ("x", "y"))


def by_processes(url: str, processes: int) -> Run:
    requests = [PlannedRequest("missing" if i % 4 == 1 else f"m{i}", (5, 6), 3) for i in range(10)]
    return run_plan(url, requests, clients=5, max_seconds=30.0, processes=processes)


def test_several_client_processes_send_the_plan_once_and_in_its_order(server_url: str) -> None:
    run = by_processes(server_url, 3)
    expected = [("missing", "http_404") if i % 4 == 1 else (f"m{i}", "") for i in range(10)]
    assert [(outcome.model, outcome.error) for outcome in run.outcomes] == expected
    assert run.not_sent == 0
    assert [(o.model, o.error) for o in by_processes(server_url, 1).outcomes] == expected


def test_runs_of_processes_are_put_together_by_their_places_in_the_plan() -> None:
    def part(*models: str, seconds: float, not_sent: int) -> Run:
        return Run([Outcome(model, 0.0) for model in models], not_sent, seconds, seconds / 10, [seconds])

    runs = [
        part("a", "d", seconds=3.0, not_sent=0),
        part("b", seconds=4.0, not_sent=1),
        part("c", seconds=1.0, not_sent=0),
    ]
    whole = merged(runs)
    assert [outcome.model for outcome in whole.outcomes] == ["a", "b", "c", "d"]
    assert (whole.not_sent, whole.seconds, whole.client_cpu, whole.client_lags) == (1, 4.0, 0.4, [3.0, 4.0, 1.0])
