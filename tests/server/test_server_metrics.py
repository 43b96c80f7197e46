"""`/metrics`: names and values of a scrape over a socket, closed label sets, and the files for dashboards."""

from __future__ import annotations

import json
import math
import random
import re
import threading
import tomllib
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

import penstock.server
from penstock.server.engine_metrics import _GAUGES
from penstock.server.measures import RequestMeasures
from penstock.server.metrics import _Collector
from penstock.server.models import Progress
from support import hooks
from support.api.engines import make_engine, wait_until
from support.paths import DATA, ROOT
from support.server.serving import Served, at_rest, held, post, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from prometheus_client.core import Metric

DOCS = ROOT / "docs"
#: The metrics in a document of AIBrix.
ANSWER = DATA / "aibrix" / "vllm_metrics.txt"
OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5"
PATH = "/v1/completions"
#: The token of which an engine fails.
TOKEN = 78
KEY = {"Authorization": "Bearer secret"}
#: The labels of an engine's metrics.
MODEL = {"engine": "0", "model_name": "tiny"}

#: Gauges, counters and histograms of vLLM that a scrape has.
VLLM = {
    "gauge": """cache_config_info cpu_prefix_cache_hit_rate engine_sleep_state kv_cache_usage_perc
        lora_requests_info num_requests_running num_requests_swapped num_requests_waiting
        num_requests_waiting_by_reason""",
    "counter": """admission_rejections generation_tokens num_preemptions prefix_cache_hits
        prefix_cache_queries prompt_tokens prompt_tokens_by_source prompt_tokens_cached request_success
        spec_decode_num_accepted_tokens spec_decode_num_draft_tokens""",
    "histogram": """e2e_request_latency_seconds inter_token_latency_seconds iteration_tokens_total
        request_decode_time_seconds request_generation_tokens request_inference_time_seconds
        request_params_max_tokens request_params_n request_prefill_kv_computed_tokens
        request_prefill_time_seconds request_prompt_tokens request_queue_time_seconds
        request_time_per_output_token_seconds time_to_first_token_seconds""",
}
LEGACY = {
    "vllm:cpu_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:gpu_prefix_cache_hit_rate",
    "vllm:time_per_output_token_seconds",
}


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model, max_num_seqs=2, max_waiting=1) as engine:
        yield engine


@pytest.fixture
def server(engine: penstock.Engine) -> Iterator[Served]:
    settings = penstock.server.ServerSettings(admin_api_keys=("boss",))
    with serving(penstock.server.app({"tiny": engine}, settings)) as server:
        yield server


def families_of(server: Served, **headers: str) -> dict[str, Metric]:
    """The metric families of a scrape, by name."""
    status, text, found = server.ask("/metrics", headers=headers)
    assert (status, found["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    families: list[Metric] = list(parse_text(text.decode()))
    names = {family.name: family for family in families}
    assert len(names) == len(families)
    samples = [(s.name, *sorted(s.labels.items())) for family in families for s in family.samples]
    assert len(set(samples)) == len(samples)
    return names


def openmetrics_of(server: Served) -> list[Metric]:
    """The metric families of a scrape in the format OpenMetrics."""
    status, text, headers = server.ask("/metrics", headers={"Accept": OPENMETRICS})
    assert (status, headers["content-type"].partition(";")[0]) == (200, "application/openmetrics-text")
    return list(parse_openmetrics(text.decode()))  # type: ignore[no-untyped-call]


class Scrape:
    """The values of a scrape."""

    def __init__(self, server: Served) -> None:
        self._values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families_of(server).values()
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        """The value of a metric of the model `tiny`."""
        return self._values[name, frozenset({**MODEL, **labels}.items())]

    def http(self, path: str, method: str, status: str) -> float:
        """The number of HTTP requests."""
        labels = {"handler": path, "method": method, "status": status}
        return self._values.get(("http_requests_total", frozenset(labels.items())), 0)


def test_scrape_has_the_names_and_types_of_vllm(server: Served) -> None:
    found: dict[str, set[str]] = {kind: set() for kind in VLLM}
    for name, family in families_of(server).items():
        if name.startswith("vllm:"):
            found[family.type].add(name.removeprefix("vllm:"))
            assert {"model_name", "engine"} <= set(family.samples[0].labels)
    assert found == {kind: set(names.split()) for kind, names in VLLM.items()}


def test_scrape_has_the_metrics_of_aibrix_documents(server: Served) -> None:
    documented = {family.name: family for family in parse_text(ANSWER.read_text())}
    found = families_of(server)
    absent = {"cpu_cache_usage_perc", "gpu_cache_usage_perc", "gpu_prefix_cache_hit_rate"}
    absent |= {"time_per_output_token_seconds"}  # with `legacy_metrics`
    names = {name for name in documented if name.startswith("vllm:")}
    assert names - found.keys() <= {f"vllm:{name}" for name in absent}
    for name in ("cache_config_info", "lora_requests_info"):
        labels = found[f"vllm:{name}"].samples[0].labels.keys()
        assert documented[f"vllm:{name}"].samples[0].labels.keys() <= labels


def test_collector_adds_the_engines_to_a_registry(server: Served, engine: penstock.Engine) -> None:
    never_open = make_engine("path/to/model")
    registry = CollectorRegistry(auto_describe=True)
    registry.register(penstock.server.EngineCollector({"tiny": engine, "alias": engine, "new": never_open}))
    engine.blocking.generate([5], max_tokens=3)
    found = {family.name: family for family in registry.collect()}
    scraped = families_of(server)
    of_server = {f"vllm:{name}" for name in vars(RequestMeasures(1))}
    engines = {name for name in scraped if name.startswith(("penstock:", "vllm:"))}
    assert found.keys() == engines - of_server
    for name in found.keys() - {"penstock:engine_state", "vllm:lora_requests_info"}:
        assert found[name].samples == scraped[name].samples, name
    states = [sample for sample in found["penstock:engine_state"].samples if sample.value]
    assert [(sample.labels["model_name"], sample.labels["state"]) for sample in states] == [
        ("tiny", "ok"),
        ("new", "stopped"),
    ]
    with pytest.raises(ValueError, match="uplicated"):
        registry.register(penstock.server.EngineCollector(engine))


@pytest.mark.parametrize(("mode", "swapped"), [("swap", 1), ("recompute", 0)])
def test_preempted_requests_in_the_host_tier_are_counted(tiny_model: Path, mode: str, swapped: int) -> None:
    with (
        make_engine(tiny_model, preemption_mode=mode, max_num_seqs=1, prefix_cache=False) as engine,
        serving(penstock.server.app({"tiny": engine})) as server,
    ):
        params = penstock.SamplingParams(max_tokens=400, ignore_eos=True, priority=1)
        with engine.blocking.stream([1, 2], params) as request:
            next(iter(request))
            with held(engine):  # its request has the priority 0
                wait_until(lambda: (engine.stats().running, engine.stats().waiting) == (1, 1))
                during = Scrape(server)
            request.cancel()
        wait_until(lambda: at_rest(engine))
        after = Scrape(server)
    for name in ("vllm:num_requests_swapped", "penstock:swapped"):
        assert (during(name), after(name)) == (swapped, 0)


def test_configuration_of_the_cache_has_the_values_in_effect(tiny_model: Path) -> None:
    options = {"block_size": 32, "kv_cache_blocks": 40, "host_cache_blocks": 5, "max_num_seqs": 2}
    with (
        make_engine(tiny_model, kv_cache_dtype="int8", **options) as engine,
        serving(penstock.server.app({"tiny": engine})) as server,
    ):
        [sample] = families_of(server)["vllm:cache_config_info"].samples
        host_bytes = engine.info.memory.host_cache
    assert host_bytes > 0
    assert sample.labels == {
        **MODEL,
        "block_size": "32",
        "cache_dtype": "int8",
        "calculate_kv_scales": "True",
        "cpu_offload_gb": "0",
        "enable_prefix_caching": "True",
        "gpu_memory_utilization": "0.9",
        "is_attention_free": "False",
        "num_cpu_blocks": "5",
        "num_gpu_blocks": "40",
        "num_gpu_blocks_override": "40",
        "sliding_window": "None",
        "swap_space_bytes": str(host_bytes),
    }


@pytest.mark.needs("sources")
def test_scrape_has_all_stats_with_their_kinds(server: Served) -> None:
    definitions = tomllib.loads((ROOT / "rust/frontend/definitions/stats.toml").read_text())["class"]
    kinds = {field["name"]: field["kind"] for field in definitions[0]["field"]}
    assert {name for name, kind in kinds.items() if kind == "gauge"} == _GAUGES
    found = {
        name.removeprefix("penstock:").removesuffix("_seconds"): family.type
        for name, family in families_of(server).items()
        if name.startswith("penstock:")
    }
    own = ("engine_state", "kv_cache_reserved_bytes", "kv_cache_used_bytes")
    assert found == {**kinds, **dict.fromkeys(own, "gauge")}


def test_memory_of_the_kv_cache_is_reserved_and_used(tiny_model: Path) -> None:
    with make_engine(tiny_model) as engine, serving(penstock.server.app({"tiny": engine})) as server:

        def size(name: str) -> float:
            [sample] = families_of(server)[f"penstock:kv_cache_{name}_bytes"].samples
            return sample.value

        reserved = engine.info.memory.kv_cache
        block = reserved // engine.stats().blocks_total
        assert (size("reserved"), size("used")) == (reserved, 0)
        engine.blocking.generate([1] * 40, max_tokens=1)
        wait_until(lambda: engine.stats().running == 0)
        assert (size("reserved"), size("used")) == (reserved, engine.stats().blocks_cached * block)
        assert size("used") > 0


def test_openmetrics_scrape_has_the_same_samples(server: Served) -> None:
    families = openmetrics_of(server)
    names = {sample.name for family in families for sample in family.samples}
    assert names == {sample.name for family in families_of(server).values() for sample in family.samples}


def test_values_follow_requests_that_run_and_end(server: Served, engine: penstock.Engine) -> None:
    long = {"prompt": [1, 2], "max_tokens": 100, "ignore_eos": True, "stream": True}
    with held(engine):
        connections = [server.send(post(PATH, long)) for _ in range(2)]
        wait_until(lambda: (engine.stats().running, engine.stats().waiting) == (2, 1))
        during = Scrape(server)
        assert server.ask(PATH, {"prompt": [1], "max_tokens": 1})[0] == 429
        for connection in connections:
            connection.close()
        wait_until(lambda: not server.application.state.calls.generations)
    wait_until(lambda: at_rest(engine))
    after = Scrape(server)
    assert during("vllm:num_requests_running") == during("penstock:running") == 2
    assert during("vllm:num_requests_waiting") == 1
    assert during("vllm:num_requests_waiting_by_reason", reason="capacity") == 1
    assert 0 < during("vllm:kv_cache_usage_perc") < 1
    assert after("vllm:num_requests_running") == after("vllm:kv_cache_usage_perc") == 0
    assert after("vllm:request_success_total", finished_reason="abort") == 2
    assert after("vllm:request_success_total", finished_reason="length") == 1
    assert after("vllm:admission_rejections_total", reason="capacity") >= 1
    assert after("vllm:e2e_request_latency_seconds_count") == 0  # none had a result
    assert after.http(PATH, "POST", "4xx") == 1


@pytest.mark.parametrize("streams", [False, True])
def test_ended_request_is_in_the_histograms(server: Served, engine: penstock.Engine, streams: bool) -> None:  # noqa: FBT001
    prompt = list(range(100))
    request = {"prompt": prompt, "max_tokens": 5, "ignore_eos": True}
    for _ in range(2):
        if streams:
            server.events(PATH, request)
        else:
            server.ask(PATH, request)
    wait_until(lambda: Scrape(server).http(PATH, "POST", "2xx") == 2)
    found, stats = Scrape(server), engine.stats()
    assert stats.prefix_hit_tokens > 0
    assert found("vllm:prompt_tokens_total") == 200
    assert found("vllm:prompt_tokens_cached_total") == stats.prefix_hit_tokens
    assert found("vllm:prefix_cache_hits_total") == stats.prefix_hit_tokens
    assert found("vllm:prefix_cache_queries_total") == 200
    assert found("vllm:generation_tokens_total") == 10
    assert found("vllm:request_success_total", finished_reason="length") == 2
    assert found("vllm:time_to_first_token_seconds_count") == 2
    assert found("vllm:time_to_first_token_seconds_sum") == stats.time_to_first_token.sum
    assert found("vllm:inter_token_latency_seconds_count") == 8
    assert found("vllm:request_prompt_tokens_sum") == 200
    assert found("vllm:request_prompt_tokens_bucket", le="50.0") == 0
    assert found("vllm:request_prompt_tokens_bucket", le="100.0") == 2
    assert found("vllm:request_generation_tokens_sum") == 10
    assert found("vllm:request_prefill_kv_computed_tokens_sum") == stats.prompt_tokens
    assert found("vllm:request_params_max_tokens_sum") == 10
    assert found("vllm:request_params_n_bucket", le="1.0") == 2
    total, prefill, decode = (
        found(f"vllm:{name}_seconds_sum")
        for name in ("request_inference_time", "request_prefill_time", "request_decode_time")
    )
    assert total == pytest.approx(prefill + decode)
    assert found("vllm:request_time_per_output_token_seconds_sum") == pytest.approx(decode / 4)
    assert found("vllm:e2e_request_latency_seconds_sum") >= total


def test_batches_and_choices_are_counted(server: Served) -> None:
    server.ask(PATH, {"prompt": [[1, 2], [3]], "max_tokens": 2, "ignore_eos": True})
    server.events(PATH, {"prompt": [1], "max_tokens": 2, "n": 2, "ignore_eos": True})
    found = Scrape(server)
    assert found("vllm:request_params_n_count") == 3
    assert found("vllm:request_params_n_sum") == 4
    assert found("vllm:request_prompt_tokens_sum") == 4
    assert found("vllm:request_generation_tokens_sum") == 8
    assert found("vllm:request_time_per_output_token_seconds_count") == 2


@pytest.mark.needs("hooks")
def test_failed_request_counts_as_error(server: Served, engine: penstock.Engine, tiny_model: Path) -> None:
    engine._session.adopt(hooks.failing_engine(tiny_model, engine.config, TOKEN))
    assert server.ask(PATH, {"prompt": [TOKEN], "max_tokens": 1})[0] == 500
    assert server.events(PATH, {"prompt": [TOKEN], "max_tokens": 1})[-1] != "[DONE]"
    wait_until(lambda: Scrape(server).http(PATH, "POST", "2xx") == 1)
    found = Scrape(server)
    assert found("vllm:request_success_total", finished_reason="error") == 2
    assert found("vllm:request_params_n_count") == 0  # none had a result
    assert found.http(PATH, "POST", "5xx") == 1


@pytest.mark.needs("hooks")
def test_scrape_works_after_the_device_is_lost(
    server: Served, engine: penstock.Engine, tiny_model: Path
) -> None:
    engine._session.adopt(hooks.losing_engine(tiny_model, engine.config, TOKEN))
    server.ask(PATH, {"prompt": [1], "max_tokens": 3, "ignore_eos": True, "bad_token_ids": [TOKEN]})
    assert server.ask(PATH, {"prompt": [TOKEN], "max_tokens": 1})[0] == 503
    found = Scrape(server)
    assert found("penstock:engine_state", state="stopped") == 1
    assert found("vllm:generation_tokens_total") == 3


def test_loading_model_has_only_its_state(tiny_model: Path) -> None:
    application = penstock.server.app({"tiny": penstock.Engine(tiny_model)})
    application.state.models["tiny"].progress = Progress()
    with serving(application) as server:
        assert Scrape(server)("penstock:engine_state", state="loading") == 1
        names = {name for name in families_of(server) if not name.startswith(("http_", "process_"))}
    assert names == {"penstock:engine_state"}


def test_sleep_and_end_are_states(server: Served, engine: penstock.Engine) -> None:
    awake = Scrape(server)
    assert awake("vllm:engine_sleep_state", sleep_state="awake") == 1
    assert awake("penstock:engine_state", state="ok") == 1
    server.ask("/sleep", method="POST", headers={"Authorization": "Bearer boss"})
    asleep = Scrape(server)
    assert asleep("vllm:engine_sleep_state", sleep_state="awake") == 0
    assert asleep("vllm:engine_sleep_state", sleep_state="discard_all") == 1
    assert asleep("penstock:engine_state", state="asleep") == 1
    engine.close()
    assert Scrape(server)("penstock:engine_state", state="stopped") == 1


def test_models_have_their_own_labels(engine: penstock.Engine, tiny_model: Path) -> None:
    closed = penstock.Engine(tiny_model)
    with make_engine(tiny_model) as other:
        engines = {"tiny": engine, "alias": engine, 'o"ther\n': other, "closed": closed}
        with serving(penstock.server.app(engines)) as server:
            server.ask(PATH, {"model": 'o"ther\n', "prompt": [1, 2, 3], "max_tokens": 1})
            families = families_of(server)
            strict = {family.name: family for family in openmetrics_of(server)}
    for found in (families, strict):
        tokens = {s.labels["model_name"]: s.value for s in found["vllm:prompt_tokens"].samples}
        assert tokens == {"tiny": 0, 'o"ther\n': 3}
    states = {s.labels["model_name"] for s in families["penstock:engine_state"].samples}
    assert states == {"tiny", 'o"ther\n', "closed"}


def test_histograms_are_complete_in_both_formats(server: Served) -> None:
    server.ask(PATH, {"prompt": list(range(100)), "max_tokens": 5, "ignore_eos": True})
    wait_until(lambda: Scrape(server).http(PATH, "POST", "2xx") == 1)
    for families in (list(families_of(server).values()), openmetrics_of(server)):
        histograms = [family for family in families if family.type == "histogram"]
        assert len(histograms) >= 18
        for family in histograms:
            counts: dict[frozenset[tuple[str, str]], list[float]] = {}
            totals = {}
            for sample in family.samples:
                assert math.isfinite(sample.value)
                labels = frozenset(item for item in sample.labels.items() if item[0] != "le")
                if sample.name.endswith("_bucket"):
                    counts.setdefault(labels, []).append(sample.value)
                elif sample.name.endswith("_count"):
                    totals[labels] = sample.value
            assert counts
            assert all(found == sorted(found) for found in counts.values()), family.name
            assert totals == {labels: found[-1] for labels, found in counts.items()}, family.name


def test_load_is_a_header_on_demand(server: Served, engine: penstock.Engine) -> None:
    body = {"prompt": [1], "max_tokens": 1}

    def load(kind: str, *, streams: bool = False) -> str:
        headers = {"Endpoint-Load-Metrics-Format": kind}
        return server.ask(PATH, {**body, "stream": streams}, headers=headers)[2]["endpoint-load-metrics"]

    with held(engine):
        long = {"prompt": [1, 2], "max_tokens": 1}
        connections = [server.send(post(PATH, long)) for _ in range(2)]
        wait_until(lambda: engine.stats().waiting == 1)
        before = engine.stats().blocks_used
        status, _, headers = server.ask(PATH, body, headers={"Endpoint-Load-Metrics-Format": "JSON"})
        after = engine.stats().blocks_used
        for connection in connections:
            connection.close()
    assert status == 429
    name, _, report = headers["endpoint-load-metrics"].partition(" ")
    found = json.loads(report)["named_metrics"]
    assert (name, found.pop("num_requests_waiting")) == ("JSON", 1)
    assert before <= found.pop("kv_cache_usage_perc") * engine.stats().blocks_total <= after
    assert found == {}
    wait_until(lambda: at_rest(engine))
    for streams in (False, True):
        text = load("text", streams=streams)
        assert re.fullmatch(
            r"TEXT named_metrics\.kv_cache_usage_perc=0\.\d+, named_metrics\.num_requests_waiting=0", text
        )
    for others in ({}, {"Endpoint-Load-Metrics-Format": "XML"}):
        assert "endpoint-load-metrics" not in server.ask(PATH, body, headers=others)[2]


def test_load_of_a_closed_model_is_no_header(tiny_model: Path) -> None:
    with serving(penstock.server.app(make_engine(tiny_model))) as server:
        headers = {"Endpoint-Load-Metrics-Format": "JSON"}
        status, _, found = server.ask(PATH, {"prompt": [1]}, headers=headers)
    assert (status, "endpoint-load-metrics" in found) == (503, False)


def test_scrape_is_formatted_beside_the_event_loop(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers while the thread that formats is held, and counts what it answers."""
    is_begun, may_continue = threading.Event(), threading.Event()
    original = _Collector._add_http

    def add(collector: _Collector, families: Any) -> None:
        is_begun.set()
        assert may_continue.wait(60)
        original(collector, families)

    monkeypatch.setattr(_Collector, "_add_http", add)
    with server.send(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n") as connection:
        assert is_begun.wait(60)
        assert server.ask(PATH, {"prompt": [1], "max_tokens": 1})[0] == 200
        may_continue.set()
        assert b" 200 " in connection.recv(1000)


def test_random_paths_and_methods_add_no_labels(engine: penstock.Engine) -> None:
    application = penstock.server.app({"tiny": engine})
    generator = random.Random(14)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(_message: object) -> None:
        pass

    async def ask_all() -> None:
        for _ in range(10_000):
            method = generator.choice(["GET", "POST", "PUT", "HEAD", generator.randbytes(4).hex()])
            path = generator.choice(["/", "/tokenize", "/v1/models/", "/v1/completions/"])
            path += generator.choice(["", generator.randbytes(4).hex()])
            scope = {
                "type": "http",
                "method": method,
                "path": path,
                "query_string": generator.randbytes(2),
                "headers": [],
            }
            await application(scope, receive, send)

    anyio.run(ask_all)
    with serving(application) as server:
        families = families_of(server)
    samples = [s for s in families["http_requests"].samples if s.name == "http_requests_total"]
    assert sum(sample.value for sample in samples) == 10_000
    values = {name: {sample.labels[name] for sample in samples} for name in samples[0].labels}
    routes = {"/", "/tokenize", "/v1/completions", "/v1/models", "/v1/models/{name:path}"}
    assert values["handler"] == {"none", *routes}
    assert values["method"] == {"GET", "POST", "PUT", "HEAD", "other"}
    assert values["status"] <= {"2xx", "4xx"}


def test_probes_and_scrapes_are_not_counted(server: Served) -> None:
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert server.ask(path)[0] == 200
    assert "http_requests" not in families_of(server)


def test_scrape_needs_a_key_and_works_in_a_drain(engine: penstock.Engine) -> None:
    settings = penstock.server.ServerSettings(api_keys=("secret",))
    application = penstock.server.app({"tiny": engine}, settings)
    with serving(application) as server:
        assert server.ask("/metrics")[0] == 401
        application.state.calls.is_draining = True
        families = families_of(server, **KEY)
        assert "vllm:prompt_tokens" in families
        states = {s.labels["state"]: s.value for s in families["penstock:engine_state"].samples}
        assert {state for state, value in states.items() if value} == {"draining"}
        assert application.state.calls.num_active == 0


def test_former_names_are_behind_a_setting(server: Served, engine: penstock.Engine) -> None:
    settings = penstock.server.ServerSettings(legacy_metrics=True)
    with serving(penstock.server.app({"tiny": engine}, settings)) as other:
        assert families_of(other).keys() - families_of(server).keys() == LEGACY


@pytest.mark.needs("sources")
def test_prometheus_file_scrapes_the_route(server: Served) -> None:
    config = yaml.safe_load((DOCS / "prometheus.yml").read_text())
    assert config.keys() == {"global", "scrape_configs"}
    [job] = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]
    assert server.ask(job["metrics_path"])[0] == 200


@pytest.mark.needs("sources")
def test_grafana_board_uses_metrics_that_exist(server: Served) -> None:
    server.ask(PATH, {"prompt": [1], "max_tokens": 1})
    wait_until(lambda: Scrape(server).http(PATH, "POST", "2xx") == 1)
    samples = [sample for family in families_of(server).values() for sample in family.samples]
    labels: dict[str, set[str]] = {}
    for sample in samples:
        labels.setdefault(sample.name, set()).update(sample.labels)
    board = json.loads((DOCS / "grafana.json").read_text())
    panels = board["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len({panel["id"] for panel in panels}) == len(panels)
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries.append(board["templating"]["list"][1]["query"]["query"])
    for query in queries:
        names = re.findall(r"\b(?:vllm:|penstock:|http_|process_)\w+", query)
        assert names, query
        assert set(names) <= labels.keys(), query
        used = re.findall(r"(\w+)=~?\"", query) + re.findall(
            r"\w+", " ".join(re.findall(r"by \((.*?)\)", query))
        )
        assert set(used) <= {label for name in names for label in labels[name]}, query
