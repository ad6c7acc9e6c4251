from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from openai.types import Model
from prometheus_client.parser import text_string_to_metric_families

from punica_core.errors import AdapterInvalid, ConfigError
from punica_core.protocol import AdapterLoad, Outputs, StepStarted, StepStats
from tests.app.conftest import BASE, MakeServer, Server


async def metrics_of(server: Server) -> dict[tuple[str, ...], float]:
    """(sample name, *label values in order of label name) → value."""
    text = (await server.http.get("/metrics")).text
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_models_lists_the_base_and_every_adapter(server: Server) -> None:
    listing = (await server.http.get("/v1/models")).json()
    assert listing["object"] == "list"
    cards = {card["id"]: card for card in listing["data"]}
    assert list(cards) == [BASE, "pirate", "sql"]
    assert (cards["sql"]["parent"], cards["sql"]["root"]) == (BASE, BASE)
    assert (cards[BASE]["parent"], cards[BASE]["root"]) == (None, BASE)
    for card in listing["data"]:
        Model.model_validate(card, strict=True)
    assert server.engine.submissions == []


@pytest.mark.parametrize("path", ["sql", "org/tiny", "org%2Ftiny", "v1.2", "a@b"])
async def test_a_model_is_retrieved_by_its_name(make_server: MakeServer, adapters_dir: Path, path: str) -> None:
    for name in ("org/tiny", "v1.2", "a@b"):
        (adapters_dir / name).mkdir(parents=True)
        (adapters_dir / name / "adapter_config.json").write_text("{}")
        (adapters_dir / name / "adapter_model.safetensors").write_bytes(b"x")
    async with make_server() as server:
        response = await server.http.get(f"/v1/models/{path}")
    assert response.status_code == 200
    assert response.json()["id"] == path.replace("%2F", "/")


async def test_an_unknown_model_cannot_be_retrieved(server: Server) -> None:
    for path in ("sqll", "..%2F..%2Fetc", "sql%00"):
        response = await server.http.get(f"/v1/models/{path}")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_base_name_with_a_colon_is_just_a_name(make_server: MakeServer) -> None:
    async with make_server(settings={"served_model_name": "gpt-oss:120b"}) as server:
        assert (await server.chat(model="gpt-oss:120b")).json()["model"] == "gpt-oss:120b"
        assert (await server.chat(model="gpt-oss")).status_code == 404


async def test_a_folder_with_the_bases_name_never_shadows_the_base(make_server: MakeServer, adapters_dir: Path) -> None:
    (adapters_dir / "sql").rename(adapters_dir / BASE)
    async with make_server() as server:
        listing = (await server.http.get("/v1/models")).json()["data"]
        await server.chat()
        (sequence,) = server.engine.submissions[0]
    assert [card["id"] for card in listing] == [BASE, "pirate"]
    assert sequence.adapter is None


async def test_an_adapters_folder_that_is_missing_stops_the_start(make_server: MakeServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        async with make_server(settings={"adapters": str(tmp_path / "nowhere")}):
            pass


async def test_a_model_folder_that_is_missing_stops_the_start_before_the_engine(
    make_server: MakeServer, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        async with make_server(settings={"model": str(tmp_path / "nowhere")}, start_error=ConfigError("engine")):
            pass


async def test_a_folder_that_is_no_model_stops_the_start_before_the_engine(
    make_server: MakeServer, tmp_path: Path
) -> None:
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty has no config\.json"):
        async with make_server(settings={"model": str(empty)}, start_error=ConfigError("engine")):
            pass
    (empty / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"^engine$"):
        async with make_server(settings={"model": str(empty)}, start_error=ConfigError("engine")):
            pass


async def test_a_hub_id_is_left_to_the_engine(make_server: MakeServer) -> None:
    async with make_server(settings={"model": "owner/name"}) as server:
        assert (await server.chat(model="name")).status_code == 200


async def test_an_adapter_in_place_of_the_folder_of_adapters_is_explained(
    make_server: MakeServer, adapters_dir: Path
) -> None:
    with pytest.raises(ConfigError, match=f"an adapter itself; .* '{adapters_dir}'"):
        async with make_server(settings={"adapters": str(adapters_dir / "sql")}):
            pass


async def test_a_failing_first_start_is_the_callers_and_leaves_no_engine(make_server: MakeServer) -> None:
    with pytest.raises(ConfigError, match="no weights"):
        async with make_server(start_error=ConfigError("no weights")):
            pass


async def test_version_names_the_parts(server: Server) -> None:
    found = (await server.http.get("/version")).json()
    assert (found["model"], found["architecture"]) == (BASE, "FakeForCausalLM")
    assert found["version"]


async def test_health_and_ready_fail_while_the_engine_is_away_and_recover(make_server: MakeServer) -> None:
    async with make_server(auto=False) as server:
        assert [(await server.http.get(path)).status_code for path in ("/health", "/ready")] == [200, 200]
        server.engine.lose()
        assert [(await server.http.get(path)).status_code for path in ("/health", "/ready")] == [503, 503]
        refused = await server.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_restarting")
        while len(server.engines) < 2 or not server.service.is_healthy:
            await asyncio.sleep(0.01)
        assert [(await server.http.get(path)).status_code for path in ("/health", "/ready")] == [200, 200]
        request = asyncio.create_task(server.chat(max_tokens=1))
        while not server.engine.submissions:
            await asyncio.sleep(0)
        server.engine.step()
        assert (await request).status_code == 200


async def test_ready_fails_and_health_does_not_while_the_server_drains(server: Server) -> None:
    server.service.begin_drain()
    assert [(await server.http.get(path)).status_code for path in ("/health", "/ready")] == [200, 503]
    response = await server.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")


async def test_traffic_is_booked_under_the_name_asked_for(server: Server) -> None:
    names = [BASE] * 3 + ["sql"] * 5 + ["pirate"] * 2
    await asyncio.gather(*(server.complete(model=name, max_tokens=4) for name in names))
    found = await metrics_of(server)
    for name, count in ((BASE, 3), ("sql", 5), ("pirate", 2)):
        assert found["punica_requests_total", name, "ok"] == count
        assert found["punica_generated_tokens_total", name] == 4 * count
        assert found["punica_prompt_tokens_total", name] == 5 * count
        assert found["punica_time_to_first_token_seconds_count", name] == count
        assert found["punica_inter_token_seconds_count", name] == 3 * count
        assert found["punica_request_seconds_count", name] == count


async def test_unknown_names_share_one_label(server: Server) -> None:
    for index in range(50):
        await server.chat(model=f"random-{index}")
    text = (await server.http.get("/metrics")).text
    assert "random" not in text
    assert (await metrics_of(server))["punica_requests_total", "unknown", "model_not_found"] == 50


async def test_series_of_a_removed_adapter_go_away(make_server: MakeServer, adapters_dir: Path) -> None:
    async with make_server() as server:
        await server.chat(model="sql")
        assert ("punica_requests_total", "sql", "ok") in await metrics_of(server)
        for file in (adapters_dir / "sql").iterdir():
            file.unlink()
        (adapters_dir / "sql").rmdir()
        server.service.registry._listing._listing = None  # a listing may be a second old
        found = await metrics_of(server)
    assert not [key for key in found if "sql" in key]


async def test_refusals_count_under_the_adapter(make_server: MakeServer) -> None:
    async with make_server(reply=lambda sequence: AdapterInvalid("damaged")) as server:
        await server.chat(model="sql")
        found = await metrics_of(server)
    assert found["punica_requests_total", "sql", "adapter_invalid"] == 1


async def test_engine_numbers_come_from_its_reports(server: Server) -> None:
    loads = [AdapterLoad("sql", "host", 0.2, 100, "ok"), AdapterLoad("x", "host", 0.1, 0, "adapter_invalid")]
    stats = StepStats(
        running=3, waiting=2, waiting_by_reason={"no_blocks": 2}, adapter_evictions=4, adapter_loads=loads
    )
    server.engine.emit(Outputs([], stats))
    found = await metrics_of(server)
    assert found["punica_running",] == 3
    assert found["punica_waiting_by_reason", "no_blocks"] == 2
    assert found["punica_adapter_evictions_total",] == 4
    assert found["punica_adapter_loads_total", "adapter_invalid", "host"] == 1
    assert found["punica_adapter_load_seconds_count", "host"] == 2
    server.engine.emit(StepStarted(busy=False))
    idle = await metrics_of(server)
    assert idle["punica_running",] == idle["punica_waiting",] == 0


async def test_reasons_to_wait_are_gone_when_nothing_waits(server: Server) -> None:
    # all that waited was cancelled after the step that noted why
    server.engine.emit(Outputs([], StepStats(waiting_by_reason={"adapter_no_room": 15})))
    assert (await metrics_of(server))["punica_waiting_by_reason", "adapter_no_room"] == 15
    server.engine.emit(StepStarted(busy=False))
    assert ("punica_waiting_by_reason", "adapter_no_room") not in await metrics_of(server)


_GAUGES = {
    *("punica_running", "punica_waiting", "punica_free_blocks", "punica_cached_blocks", "punica_adapters_host"),
    *("punica_adapters_gpu", "punica_adapter_host_bytes_used", "punica_adapter_gpu_bytes_used"),
}
_STEP_GAUGES = {"punica_last_step_seconds", "punica_slowest_step_seconds"}


async def test_gauges_that_nobody_knows_have_no_series(make_server: MakeServer) -> None:
    async def shown(server: Server) -> set[str]:
        return {key[0] for key in await metrics_of(server)} & (_GAUGES | _STEP_GAUGES)

    async with make_server() as server:
        assert await shown(server) == set()
        server.engine.emit(Outputs([], StepStats(free_blocks=64)))
        assert await shown(server) == _GAUGES
        assert (await metrics_of(server))["punica_free_blocks",] == 64
        server.engine.emit(Outputs([], StepStats(free_blocks=64, steps=1, last_step_seconds=0.1)))
        assert await shown(server) == _GAUGES | _STEP_GAUGES
        server.engine.lose()
        assert await shown(server) == set()
        assert (await metrics_of(server))["punica_steps_total",] == 1  # what was counted stays true


async def test_totals_outlive_the_worker(server: Server) -> None:
    server.engine.emit(Outputs([], StepStats(preemptions=7)))
    server.engine.lose()
    while not server.service.is_healthy:
        await asyncio.sleep(0.01)
    server.engine.emit(Outputs([], StepStats(preemptions=1)))
    found = await metrics_of(server)
    assert found["punica_preemptions_total",] == 8
    assert found["punica_worker_restarts_total",] == 1
    assert found["punica_worker_up",] == 1


async def test_metrics_are_put_together_off_the_event_loop(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    service = server.service
    render = service.metrics.render
    monkeypatch.setattr(
        service.metrics, "render", lambda names: (threads.append(threading.get_ident()), render(names))[1]
    )
    assert (await server.http.get("/metrics")).is_success
    assert threads
    assert threading.get_ident() not in threads
