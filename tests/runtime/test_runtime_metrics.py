"""`/metrics` of the runtime: the engine's metrics, their common names, and engines that fail."""

from __future__ import annotations

import http.client
import random
import string
import threading
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from penstock.runtime import RuntimeSettings
from support.api.engines import wait_until
from support.paths import DATA
from support.runtime.runtime import Answer, FakeEngine, Runtime, closed_port, running, runtime_of

ANSWERS = DATA / "aibrix"
MODEL = 'model_name="m"'


def gauge(name: str, value: float, labels: str = MODEL) -> str:
    return f"# HELP {name} text\n# TYPE {name} gauge\n{name}{{{labels}}} {value}\n"


def scraped(text: str, /, **settings: Any) -> dict[str, Any]:
    """The families of a runtime in front of an engine with these metrics."""
    engine = FakeEngine()
    engine.show_metrics(text)
    with runtime_of(engine, **settings) as runtime:
        return runtime.families()


def only_value(families: dict[str, Any], name: str) -> float:
    [sample] = families[name].samples
    return float(sample.value)


def test_samples_of_the_document_are_returned_unchanged() -> None:
    text = (ANSWERS / "vllm_metrics.txt").read_text()
    engine = FakeEngine()
    engine.show_metrics(text)
    with runtime_of(engine) as runtime:
        _, body, _ = runtime.ask("/metrics")
        assert runtime.families(body)["vllm:num_requests_running"].type == "gauge"
    lines = body.decode().splitlines()
    assert set(text.splitlines()) <= set(lines)
    assert len(lines) == len(set(lines))


def test_queue_size_is_a_copy_with_the_same_labels() -> None:
    families = scraped(gauge("vllm:num_requests_waiting", 3, 'engine="0",model_name="m"'))
    assert only_value(families, "vllm:num_requests_waiting") == 3
    [sample] = families["aibrix:queue_size"].samples
    assert (sample.value, sample.labels) == (3, {"engine": "0", "model_name": "m"})


def test_counters_keep_total_under_the_common_name() -> None:
    families = scraped(
        "# TYPE vllm:prompt_tokens_total counter\nvllm:prompt_tokens_total 148\n"
        "# TYPE vllm:prompt_tokens_created gauge\nvllm:prompt_tokens_created 1.7e9\n"
    )
    [sample] = families["aibrix:prompt_tokens"].samples
    assert (sample.name, sample.value) == ("aibrix:prompt_tokens_total", 148)
    assert only_value(families, "vllm:prompt_tokens_created") == 1.7e9


def test_counter_without_total_keeps_its_name() -> None:
    engine = FakeEngine()
    engine.show_metrics("# TYPE tgi_request_count counter\ntgi_request_count 5\n")
    with runtime_of(engine, engine="tgi") as runtime:
        _, body, _ = runtime.ask("/metrics")
    assert b"\ntgi_request_count 5.0\n" in body
    assert b"tgi_request_count_total" not in body


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        ("gpu_cache_usage_perc", {"gpu_cache_usage_perc", "kv_cache_usage_perc"}),
        ("kv_cache_usage_perc", {"gpu_cache_usage_perc", "kv_cache_usage_perc"}),
        ("time_per_output_token_seconds", {"time_per_output_token_seconds"}),
        ("inter_token_latency_seconds", {"time_per_output_token_seconds"}),
        ("request_time_per_output_token_seconds", {"time_per_output_token_seconds"}),
    ],
)
def test_old_and_new_names_have_one_common_name(source: str, targets: set[str]) -> None:
    families = scraped(gauge(f"vllm:{source}", 0.5))
    found = {name.removeprefix("aibrix:"): name for name in families if name.startswith("aibrix:")}
    assert {name for name in found if name.endswith(("_perc", "_seconds"))} == targets
    assert all(only_value(families, found[name]) == 0.5 for name in targets)


def test_preferred_source_wins_when_an_engine_has_both() -> None:
    old, new = "vllm:time_per_output_token_seconds", "vllm:inter_token_latency_seconds"
    families = scraped(gauge(new, 2) + gauge(old, 1))
    assert only_value(families, "aibrix:time_per_output_token_seconds") == 1


def test_histogram_is_copied_with_all_its_samples() -> None:
    name = "vllm:e2e_request_latency_seconds"
    lines = [
        f"# TYPE {name} histogram",
        f'{name}_bucket{{le="1.0"}} 1',
        f'{name}_bucket{{le="+Inf"}} 2',
        f"{name}_count 2",
        f"{name}_sum 3.5",
    ]
    families = scraped("\n".join(lines) + "\n")
    common = families["aibrix:e2e_request_latency_seconds"]
    assert common.type == "histogram"
    names = {sample.name.removeprefix("aibrix:e2e_request_latency_seconds") for sample in common.samples}
    assert (names, len(common.samples)) == ({"_bucket", "_count", "_sum"}, 4)


def test_duplicate_samples_and_families_appear_once() -> None:
    text = gauge("vllm:num_requests_running", 1)
    other = 'vllm:x{a="1",b="2"} 1\nvllm:x{b="2",a="1"} 1\n'
    families = scraped(text + text + other + gauge("other", 1) + "vllm:num_requests_running 5\n")
    assert len(families["vllm:num_requests_running"].samples) == 1
    assert len(families["vllm:x"].samples) == 1


def test_families_of_the_runtime_win_over_those_of_the_engine() -> None:
    families = scraped(gauge("aibrix:engine_up", 7, "") + gauge("aibrix:queue_size", 8))
    assert only_value(families, "aibrix:engine_up") == 1
    assert only_value(families, "aibrix:queue_size") == 8


@pytest.mark.parametrize(
    ("engine", "source", "target"),
    [
        ("sglang", "sglang:num_queue_reqs", "aibrix:queue_size"),
        ("SGLang", "sglang:gen_throughput", "aibrix:generation_throughput"),
        ("sglang", "sglang:token_usage", "aibrix:token_usage"),
        ("sglang", "sglang:cache_hit_rate", "aibrix:cache_hit_rate"),
        ("trtllm", "kv_cache_utilization", "aibrix:kv_cache_usage_perc"),
        ("trtllm", "trtllm_kv_cache_utilization", "aibrix:kv_cache_usage_perc"),
        ("trtllm", "trtllm_e2e_request_latency_seconds", "aibrix:e2e_request_latency_seconds"),
        ("penstock", "vllm:num_requests_waiting", "aibrix:queue_size"),
    ],
)
def test_other_engines_have_common_names(engine: str, source: str, target: str) -> None:
    families = scraped(gauge(source, 2), engine=engine)
    assert (only_value(families, source), only_value(families, target)) == (2, 2)


def test_unknown_engine_has_its_own_names_only() -> None:
    families = scraped(gauge("llamacpp:requests_deferred", 2), engine="llamacpp")
    assert only_value(families, "llamacpp:requests_deferred") == 2
    assert "aibrix:queue_size" not in families


def test_transformation_can_be_disabled() -> None:
    families = scraped(gauge("vllm:num_requests_waiting", 3), rename_metrics=False)
    assert "vllm:num_requests_waiting" in families
    assert "aibrix:queue_size" not in families


def test_raw_mode_returns_the_text_of_the_engine() -> None:
    engine = FakeEngine()
    text = "# a comment\nvllm:num_requests_waiting   3\n\nlast 1"
    engine.show_metrics(text)
    with runtime_of(engine, raw_metrics=True) as runtime:
        _, body, _ = runtime.ask("/metrics")
    assert body.startswith(text.encode() + b"\n")
    assert b"aibrix:engine_up 1.0" in body
    assert b"aibrix:queue_size" not in body


def test_both_paths_answer_without_a_redirect() -> None:
    engine = FakeEngine()
    engine.show_metrics(gauge("vllm:num_requests_waiting", 3))
    engine.answer("/v1/models", Answer(body=b"{}"))
    with runtime_of(engine) as runtime:
        for path in ("/metrics", "/metrics/"):
            status, body, _ = runtime.ask(path)
            assert (status, b"aibrix:queue_size" in body) == (200, True)
        for path in ("/healthz/", "/ready/", "/v1/models/", "/v1/model/list/"):
            assert runtime.ask(path)[0] == 200
        assert runtime.ask("/v1/lora_adapter/load/", {})[0] == 422
        assert runtime.value("aibrix:api_request_total", endpoint="/metrics") >= 1


def failures(runtime: Runtime) -> dict[str, float]:
    samples = runtime.families()["aibrix:engine_scrape_errors"].samples
    return {sample.labels["reason"]: sample.value for sample in samples if sample.name.endswith("_total")}


def test_engine_down_leaves_the_numbers_of_the_runtime() -> None:
    settings = RuntimeSettings(engine_endpoint=f"http://127.0.0.1:{closed_port()}")
    with running(settings) as runtime:
        families = runtime.families()
        assert only_value(families, "aibrix:engine_up") == 0
        assert all(name.startswith("aibrix:") for name in families)
        assert failures(runtime) == {"ConnectionError": 2}


def queue_sizes(runtime: Runtime) -> list[float]:
    """The size of the queue, if a scrape has it."""
    families = runtime.families()
    return [only_value(families, "aibrix:queue_size")] if "aibrix:queue_size" in families else []


def test_engine_that_hangs_ends_the_scrape_in_time() -> None:
    engine = FakeEngine()
    engine.show_metrics(gauge("vllm:num_requests_waiting", 3))
    with runtime_of(engine, scrape_timeout=0.05) as runtime:
        engine.may_answer.clear()
        assert runtime.value("aibrix:engine_up") == 0
        assert runtime.ask("/healthz")[0] == 200
        engine.may_answer.set()
        # The numbers are those of this scrape, not of an earlier one. A slow machine may need several.
        engine.show_metrics(gauge("vllm:num_requests_waiting", 4))
        wait_until(lambda: queue_sizes(runtime) == [4])
        assert set(failures(runtime)) == {"TimeoutError"}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(500, b"vllm:x 1\n"), "status"),
        (Answer(body=b"vllm:x 1\n" * 200), "ServerError"),
        (Answer(body=b"vllm:x{ 1\n"), "invalid"),
        (Answer(body=b"\xff\xfe\x00"), "invalid"),
        (Answer(307, headers={"location": "http://127.0.0.1:1/metrics"}), "ConnectionError"),
        (Answer(307, headers={"location": "/metrics"}), "ConnectionError"),  # without end
    ],
)
def test_bad_answer_is_counted_and_left_out(answer: Answer, reason: str) -> None:
    engine = FakeEngine()
    engine.answer("/metrics", answer)
    with runtime_of(engine, max_metrics_bytes=1000) as runtime:
        assert runtime.value("aibrix:engine_up") == 0
        assert "vllm:x" not in runtime.families()
        assert failures(runtime).keys() == {reason}


def test_redirect_to_the_same_engine_is_followed() -> None:
    engine = FakeEngine()
    engine.answer("/metrics", Answer(307, headers={"location": "/metrics/"}))
    engine.answer("/metrics/", Answer(body=gauge("vllm:num_requests_waiting", 3).encode()))
    with runtime_of(engine) as runtime:
        assert runtime.value("aibrix:queue_size") == 3


def test_scrape_path_and_key_of_the_engine_are_used() -> None:
    engine = FakeEngine()
    engine.answer("/prometheus/metrics", Answer(body=b"x 1\n"))
    for path in ("prometheus/metrics", "/prometheus/metrics?a=b"):
        with runtime_of(engine, scrape_path=path, engine_key="secret") as runtime:
            assert runtime.value("x") == 1
        assert engine.calls[-1].headers["authorization"] == "Bearer secret"


def test_stranger_reads_no_metrics_with_the_key_of_the_engine() -> None:
    engine = FakeEngine()
    engine.show_metrics("x 1\n")
    with runtime_of(engine, engine_key="key", tokens=("secret",)) as runtime:
        for headers in ({}, {"X-API-Key": "other"}, {"X-API-Key": "secret"}):
            assert runtime.ask("/metrics", headers=headers)[0] == 200
    with runtime_of(engine, engine_key="key") as runtime:
        for headers in ({"X-Forwarded-For": "10.0.0.1"}, {}):
            assert runtime.ask("/metrics", headers=headers)[0] == 200
    found = [call.headers.get("authorization") for call in engine.calls]
    assert found == [None, None, "Bearer key", None, "Bearer key"]


def test_scrape_does_not_wait_for_loads_of_adapters() -> None:
    engine = FakeEngine()
    engine.show_metrics("x 1\n")
    engine.answer("/v1/load_lora_adapter", Answer())
    with runtime_of(engine) as runtime:
        engine.may_answer.clear()
        bodies = [{"lora_name": f"a{number}", "lora_path": "org/repo"} for number in range(12)]
        threads = [
            threading.Thread(target=runtime.ask, args=("/v1/lora_adapter/load", body)) for body in bodies
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(engine.calls) >= 10)
        runtime.ask("/metrics")  # ends after its timeout: the engine answers nothing
        assert "/metrics" in {call.path for call in engine.calls}
        engine.may_answer.set()
        for thread in threads:
            thread.join()


def test_scrapes_at_the_same_time_share_one() -> None:
    engine = FakeEngine()
    engine.show_metrics(gauge("vllm:num_requests_waiting", 3))
    tokens = {"engine_key": "key", "tokens": ("secret",), "scrape_timeout": 20}
    with runtime_of(engine, **tokens) as runtime, ExitStack() as stack:
        engine.may_answer.clear()
        scrapes = runtime.application.state.scrapes

        def num_waiting(name: str, number: int) -> bool:
            return bool(scrapes.num_requests(name) == number)

        answers: list[Any] = []

        def scrape(**headers: str) -> None:
            answers.append(runtime.ask("/metrics", headers=headers))

        threads = [threading.Thread(target=scrape, kwargs={"X-API-Key": "secret"}) for _ in range(8)]
        for thread in threads:
            thread.start()
        wait_until(partial(num_waiting, "own", 8))
        # Strangers have a limit of their own.
        for number in range(32):
            lines = f"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {number % 2}\r\n\r\n"
            stack.enter_context(runtime.send(lines.encode()))
        wait_until(partial(num_waiting, "other", 32))
        status, error, headers = runtime.ask("/metrics")
        assert (status, error["type"], headers["retry-after"]) == (503, "OverloadedError", "1")
        wait_until(lambda: len(engine.calls) == 2)
        stack.close()
        wait_until(partial(num_waiting, "other", 0))
        engine.may_answer.set()
        for thread in threads:
            thread.join()
    assert {status for status, _, _ in answers} == {200}
    assert all(b"aibrix:queue_size" in body for _, body, _ in answers)
    assert [call.headers["authorization"] for call in engine.calls].count("Bearer key") == 1


def test_random_paths_and_methods_have_bounded_labels() -> None:
    engine = FakeEngine()
    with runtime_of(engine) as runtime:
        rng = random.Random(1)
        connection = http.client.HTTPConnection("127.0.0.1", runtime.port)
        for _ in range(10_000):
            path = "/" + "".join(rng.choices(string.ascii_letters + "/%20.", k=12))
            connection.request(rng.choice(["GET", "POST", "PROPFIND", "PUT"]), path)
            connection.getresponse().read()
        connection.close()
        samples = runtime.families()["aibrix:api_request"].samples
        assert sum(sample.value for sample in samples if sample.name.endswith("_total")) >= 10_000
        assert len(samples) <= 8
        assert {sample.labels["endpoint"] for sample in samples} <= {"none", "/metrics"}
