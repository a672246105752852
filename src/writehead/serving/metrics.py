"""Metrics for Prometheus, with the names of vLLM after `writehead_`."""

from collections.abc import Iterator

from writehead.serving.models import Models
from writehead.serving.worker import Job
from writehead.util.extras import requires

with requires("serve"):
    from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector

# seconds: of a token, and of a whole request
SHORT = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
LONG = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
MODEL = ("model_name",)


class Metrics:
    """Counts what a server does; `registry` has all metrics."""

    def __init__(self, models: Models) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(_Schedulers(models))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"writehead_{name}", text, MODEL, buckets=buckets, registry=registry)

        self.first_token = histogram(
            "time_to_first_token_seconds", "Time to the first token of a stream.", LONG
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds", "Time between two tokens of a stream.", SHORT
        )
        self.queued = histogram("request_queue_time_seconds", "Time until a slot was free.", LONG)
        self.whole = histogram("e2e_request_latency_seconds", "Time of a whole request.", LONG)
        self.prompt_tokens = Counter(
            "writehead_prompt_tokens", "Tokens of sources and prompts.", MODEL, registry=registry
        )
        self.ended = Counter(
            "writehead_request_success",
            "Requests that ended, by reason: stop, length or abort.",
            (*MODEL, "finished_reason"),
            registry=registry,
        )
        self.responses = Counter(
            "writehead_http_responses", "Responses by status.", ("status",), registry=registry
        )

    def observe_end(self, name: str, job: Job, arrived: float, now: float, reason: str) -> None:
        """Records a request that ended."""
        self.ended.labels(name, reason).inc()
        if job.started is not None:
            self.queued.labels(name).observe(job.started - arrived)
        self.whole.labels(name).observe(now - arrived)


class _Schedulers(Collector):
    """Reads the state of all schedulers when metrics are collected."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        def gauge(name: str, text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"writehead_{name}", text, labels=MODEL)

        families = (
            gauge("num_requests_running", "Sequences in slots."),
            gauge("num_requests_waiting", "Sequences that wait for a slot."),
            gauge("kv_cache_usage_perc", "Fraction of the slots' memory in use; 1 is all."),
            gauge("kv_cache_bytes", "Bytes of K, V and search of the slots in use."),
            gauge("kv_cache_planned_bytes", "Bytes of K, V and search of all slots."),
        )
        tokens = CounterMetricFamily(
            "writehead_generation_tokens", "Tokens that were decoded, one per step.", labels=MODEL
        )
        steps = CounterMetricFamily("writehead_steps", "Decoding steps.", labels=MODEL)
        for one in self._models:
            scheduler, label = one.engine.scheduler, [one.name]
            load = scheduler.load
            usage = load.used_bytes / load.bytes if load.bytes else 0.0
            values = (load.running, load.waiting, usage, load.used_bytes, load.bytes)
            for family, value in zip(families, values, strict=True):
                family.add_metric(label, value)
            tokens.add_metric(label, scheduler.stats.rows)
            steps.add_metric(label, scheduler.stats.steps)
        yield from (*families, tokens, steps)
