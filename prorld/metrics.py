"""What is counted, under which names, for Prometheus.

One ``Metrics`` is made by the daemon and handed to the rooms, which call its verbs; only this file knows the library.
No label takes a value that a client chooses freely, so the number of series is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Literal, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

__all__ = ["CONTENT_TYPE", "NAMES", "EngineSample", "EngineSeries", "Metrics"]

CONTENT_TYPE = CONTENT_TYPE_LATEST

StageName = Literal["init", "run", "eval"]

NAMES: Mapping[str, str] = {
    "prorld_jobs_accepted_total": "Jobs accepted, by handler.",
    "prorld_jobs_refused_total": "Submits that were answered with an error, by its code.",
    "prorld_jobs_ended_total": "Jobs that ended, by handler, outcome and verdict.",
    "prorld_jobs_retried_total": "Attempts that were followed by another one, by outcome.",
    "prorld_stage_wait_seconds": "Time a job waited at a stage's gate.",
    "prorld_stage_run_seconds": "Time a job spent in a stage.",
    "prorld_stage_workers": "Jobs that may be in a stage at once.",
    "prorld_stage_active": "Jobs in a stage.",
    "prorld_stage_waiting": "Jobs at a stage's gate.",
    "prorld_engine_call_seconds": "Time of one engine call, by kind of engine and result.",
    "prorld_tokens_sampled_total": "Tokens that engines sampled, by policy.",
    "prorld_tokens_prompted_total": "Tokens sent to engines as prompts, by policy.",
    "prorld_tokens_cached_total": "Of those, tokens that the engine had computed already, where it says so.",
    "prorld_policy_version": "The version of a policy.",
    "prorld_policy_updates_total": "Updates of policies, by how the weights came and how it ended.",
    "prorld_policy_paused_seconds_total": "Time in which no generation of a policy could begin.",
    "prorld_policy_calls_cut_total": "Engine calls that were cut off because their engine did not stop by itself.",
    "prorld_backend_calls_total": "Calls begun, by engine.",
    "prorld_backend_errors_total": "Calls that failed, by engine and code.",
    "prorld_backend_tokens_total": "Tokens that an engine was sent, had cached, and sampled, by origin.",
    "prorld_backend_migrations_total": "Jobs that came to an engine from another one, or left it for one.",
    "prorld_backend_busy_seconds_total": "Time with at least one call in the engine.",
    "prorld_backend_leases": "Jobs that hold a lease on the engine.",
    "prorld_backend_inflight": "Calls in the engine.",
    "prorld_backend_queued": "Calls that wait for a place in the engine.",
    "prorld_backend_call_limit": "Calls that the engine is given at once; it follows the engine's load.",
    "prorld_backend_strikes": "Faults that are held against the engine.",
    "prorld_sandboxes_started_total": "Sandboxes that came up, by runtime.",
    "prorld_sandboxes_failed_total": "Sandboxes that did not, by runtime.",
    "prorld_sandbox_start_seconds": "Time until a job has its sandbox, by runtime.",
    "prorld_sandboxes_taken_total": "Sandboxes that jobs got, by runtime, warm or cold.",
    "prorld_sandboxes_unused_total": "Warm sandboxes that ended before a job had them, by runtime and reason.",
    "prorld_sandboxes_warm": "Sandboxes that wait for a job, by runtime.",
    "prorld_sandbox_starts_active": "Sandboxes that are being started, by runtime.",
    "prorld_sandbox_starts_waiting": "Starts of sandboxes that wait for their turn, by runtime.",
    "prorld_audits_total": "Ended jobs that were chosen to be scored again, by result.",
    "prorld_audit_tokens_total": "Sampled tokens that an audit compared with what an engine says of them later.",
    "prorld_audit_logprob_gap": "Mean absolute difference of log-probabilities, one observation an audit.",
    "prorld_batches_running": "Batches that run, by purpose.",
    "prorld_groups_ended_total": "Groups that ended in a batch, by purpose and end; a carried one has not.",
    "prorld_wasted_jobs_total": "Jobs that ended in groups that no trainer gets.",
    "prorld_wasted_tokens_total": "Tokens that were sampled in those.",
    "prorld_wasted_seconds_total": "Time that those spent in their stages.",
    "prorld_breakers_open": "Circuit breakers that keep training batches from starting.",
    "prorld_journal_commit_seconds": "Time of one commit of the journal, until it was on the disk.",
    "prorld_journal_changes_total": "Changes that those commits held.",
    "prorld_journal_waiting": "Changes that wait for the next commit.",
    "prorld_journal_failing": "1 while the journal accepts nothing, since its disk fails or is full.",
    "prorld_loop_lag_seconds": "How late the event loop ran a task that was due.",
}

# From a gate that is open at once to the longest stage there is by default.
_STAGE_SECONDS = (0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_CALL_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_START_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_GAPS = (1e-6, 1e-5, 1e-4, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1)
_COMMIT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_LAG_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)


MetricT = TypeVar("MetricT", bound=MetricWrapperBase)


class EngineSample(NamedTuple):
    """What is counted of one engine that is there."""

    backend: str
    policy: str
    calls: int = 0
    errors: Mapping[str, int] = {}
    prompted: int = 0
    sampled: int = 0
    cached: int = 0
    migrated_in: int = 0
    migrated_away: int = 0
    busy_s: float = 0.0
    inflight: int = 0
    queued: int = 0
    leases: int = 0
    call_limit: int = 0
    strikes: int = 0


class EngineSeries(Collector):
    """The series of the engines that are there now. One that is removed takes its series along, so they are bounded."""

    def __init__(self) -> None:
        self.samples: tuple[EngineSample, ...] = ()

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """All engines, family by family."""
        for name, labels, rows in self._counters():
            counter = CounterMetricFamily(name, NAMES[name], labels=("backend", "policy", *labels))
            for sample, values, value in rows:
                counter.add_metric((sample.backend, sample.policy, *values), value)
            yield counter
        for field in ("leases", "inflight", "queued", "call_limit", "strikes"):
            name = f"prorld_backend_{field}"
            gauge = GaugeMetricFamily(name, NAMES[name], labels=("backend", "policy"))
            for sample in self.samples:
                gauge.add_metric((sample.backend, sample.policy), getattr(sample, field))
            yield gauge

    def _counters(self) -> Iterator[tuple[str, tuple[str, ...], list[tuple[EngineSample, tuple[str, ...], float]]]]:
        seen = self.samples
        yield "prorld_backend_calls_total", (), [(s, (), s.calls) for s in seen]
        yield "prorld_backend_errors_total", ("code",), [(s, (c,), n) for s in seen for c, n in s.errors.items()]
        yield (
            "prorld_backend_tokens_total", ("origin",),
            [(s, (o,), getattr(s, o)) for s in seen for o in ("prompted", "cached", "sampled")],
        )  # fmt: skip
        yield (
            "prorld_backend_migrations_total", ("direction",),
            [(s, (d,), getattr(s, f"migrated_{d}")) for s in seen for d in ("in", "away")],
        )  # fmt: skip
        yield "prorld_backend_busy_seconds_total", (), [(s, (), s.busy_s) for s in seen]


class Metrics:
    """The counters of one daemon, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._jobs_accepted = self._counter("prorld_jobs_accepted_total", "handler")
        self._jobs_refused = self._counter("prorld_jobs_refused_total", "code")
        self._jobs_ended = self._counter("prorld_jobs_ended_total", "handler", "outcome", "verdict")
        self._jobs_retried = self._counter("prorld_jobs_retried_total", "outcome")
        self._stage_wait = self._histogram("prorld_stage_wait_seconds", _STAGE_SECONDS, "stage")
        self._stage_run = self._histogram("prorld_stage_run_seconds", _STAGE_SECONDS, "stage")
        self._stage_workers = self._gauge("prorld_stage_workers", "stage")
        self._stage_active = self._gauge("prorld_stage_active", "stage")
        self._stage_waiting = self._gauge("prorld_stage_waiting", "stage")
        self._engine_call = self._histogram("prorld_engine_call_seconds", _CALL_SECONDS, "kind", "result")
        self._tokens_sampled = self._counter("prorld_tokens_sampled_total", "policy")
        self._tokens_prompted = self._counter("prorld_tokens_prompted_total", "policy")
        self._policy_version = self._gauge("prorld_policy_version", "policy")
        self._policy_updates = self._counter("prorld_policy_updates_total", "how", "result")
        self._policy_paused = self._counter("prorld_policy_paused_seconds_total", "policy")
        self._policy_cut = self._counter("prorld_policy_calls_cut_total", "policy")
        self._policy_seen: dict[str, tuple[float, int]] = {}
        self._tokens_cached = self._counter("prorld_tokens_cached_total", "policy")
        self._engines = EngineSeries()
        self._registry.register(self._engines)
        self._sandboxes_started = self._counter("prorld_sandboxes_started_total", "runtime")
        self._sandboxes_failed = self._counter("prorld_sandboxes_failed_total", "runtime")
        self._sandbox_start = self._histogram("prorld_sandbox_start_seconds", _START_SECONDS, "runtime")
        self._sandboxes_taken = self._counter("prorld_sandboxes_taken_total", "runtime", "how")
        self._sandboxes_unused = self._counter("prorld_sandboxes_unused_total", "runtime", "reason")
        self._sandboxes_warm = self._gauge("prorld_sandboxes_warm", "runtime")
        self._starts_active = self._gauge("prorld_sandbox_starts_active", "runtime")
        self._starts_waiting = self._gauge("prorld_sandbox_starts_waiting", "runtime")
        self._audits = self._counter("prorld_audits_total", "result")
        self._audit_tokens = self._counter("prorld_audit_tokens_total")
        self._audit_gap = self._histogram("prorld_audit_logprob_gap", _GAPS)
        self._batches_running = self._gauge("prorld_batches_running", "purpose")
        self._groups_ended = self._counter("prorld_groups_ended_total", "purpose", "end")
        self._wasted_jobs = self._counter("prorld_wasted_jobs_total")
        self._wasted_tokens = self._counter("prorld_wasted_tokens_total")
        self._wasted_seconds = self._counter("prorld_wasted_seconds_total")
        self._breakers_open = self._gauge("prorld_breakers_open")
        self._journal_commit = self._histogram("prorld_journal_commit_seconds", _COMMIT_SECONDS)
        self._journal_changes = self._counter("prorld_journal_changes_total")
        self._journal_waiting = self._gauge("prorld_journal_waiting")
        self._journal_failing = self._gauge("prorld_journal_failing")
        self._loop_lag = self._histogram("prorld_loop_lag_seconds", _LAG_SECONDS)

    def job_accepted(self, handler: str) -> None:
        """A job was accepted."""
        self._jobs_accepted.labels(handler).inc()

    def job_refused(self, code: str) -> None:
        """A submit was refused; ``code`` is one of the stable codes of ``prorld.errors``."""
        self._jobs_refused.labels(code).inc()

    def job_ended(self, handler: str, *, outcome: str, verdict: str) -> None:
        """A job had its one end."""
        self._jobs_ended.labels(handler, outcome, verdict).inc()

    def job_retried(self, outcome: str) -> None:
        """An attempt ended so and is followed by another one."""
        self._jobs_retried.labels(outcome).inc()

    def stage_passed(self, stage: StageName, *, waited_s: float, ran_s: float) -> None:
        """A job left a stage."""
        self._stage_wait.labels(stage).observe(waited_s)
        self._stage_run.labels(stage).observe(ran_s)

    def stage_seen(self, stage: StageName, *, workers: int, active: int, waiting: int) -> None:
        """How full a stage is now; asked for before each page."""
        self._stage_workers.labels(stage).set(workers)
        self._stage_active.labels(stage).set(active)
        self._stage_waiting.labels(stage).set(waiting)

    def engine_called(self, kind: str, *, result: str, seconds: float) -> None:
        """An engine call ended; ``result`` is ``ok``, ``cancelled`` or an error's stable code."""
        self._engine_call.labels(kind, result).observe(seconds)

    def tokens_counted(self, policy: str, *, prompted: int, sampled: int, cached: int = 0) -> None:
        """An engine call moved so many tokens; ``cached`` are those of the prompt that it had computed already."""
        self._tokens_prompted.labels(policy).inc(prompted)
        self._tokens_sampled.labels(policy).inc(sampled)
        self._tokens_cached.labels(policy).inc(cached)

    def engines_seen(self, samples: Iterable[EngineSample]) -> None:
        """The engines there are, and what is counted of them; asked for before each page."""
        self._engines.samples = tuple(samples)

    def policy_version(self, policy: str, version: int) -> None:
        """What a policy has now."""
        self._policy_version.labels(policy).set(version)

    def policy_updated(self, how: str, *, result: str) -> None:
        """An update ended."""
        self._policy_updates.labels(how, result).inc()

    def policy_seen(self, policy: str, *, closed_s: float, cut: int) -> None:
        """How long a policy has been paused and how many of its calls were cut off so far; asked before each page."""
        before_s, before = self._policy_seen.get(policy, (0.0, 0))
        self._policy_paused.labels(policy).inc(max(0.0, closed_s - before_s))
        self._policy_cut.labels(policy).inc(max(0, cut - before))
        self._policy_seen[policy] = (closed_s, cut)

    def sandbox_started(self, runtime: str, *, seconds: float) -> None:
        """A sandbox came up."""
        self._sandboxes_started.labels(runtime).inc()
        self._sandbox_start.labels(runtime).observe(seconds)

    def sandbox_failed(self, runtime: str) -> None:
        """A sandbox did not come up."""
        self._sandboxes_failed.labels(runtime).inc()

    def sandbox_taken(self, runtime: str, how: Literal["warm", "cold"]) -> None:
        """A job got a sandbox that was there already, or one that was started for it."""
        self._sandboxes_taken.labels(runtime, how).inc()

    def sandbox_unused(self, runtime: str, reason: str) -> None:
        """A warm sandbox ended before a job had it; ``reason`` is one of ``prorld.sandbox.warm``."""
        self._sandboxes_unused.labels(runtime, reason).inc()

    def sandboxes_seen(self, runtime: str, *, warm: int, starting: int, waiting: int) -> None:
        """How many wait for a job now, how many start, and how many wait to start."""
        self._sandboxes_warm.labels(runtime).set(warm)
        self._starts_active.labels(runtime).set(starting)
        self._starts_waiting.labels(runtime).set(waiting)

    def audited(self, result: str) -> None:
        """A chosen job was audited, or could not be; ``result`` is one of ``prorld.rollout.audit``."""
        self._audits.labels(result).inc()

    def audit_compared(self, tokens: int, *, gap: float) -> None:
        """An audit compared so many tokens, and this is how far apart they were on average."""
        self._audit_tokens.inc(tokens)
        self._audit_gap.observe(gap)

    def batches_seen(self, *, train: int, evals: int, open_breakers: int) -> None:
        """How many run now; asked for before each page."""
        self._batches_running.labels("train").set(train)
        self._batches_running.labels("eval").set(evals)
        self._breakers_open.set(open_breakers)

    def group_ended(self, purpose: str, end: str) -> None:
        """A group had its end."""
        self._groups_ended.labels(purpose, end).inc()

    def wasted(self, jobs: int, tokens: int, seconds: float) -> None:
        """Work that no trainer gets."""
        self._wasted_jobs.inc(jobs)
        self._wasted_tokens.inc(tokens)
        self._wasted_seconds.inc(seconds)

    def journal_committed(self, changes: int, *, seconds: float) -> None:
        """So many changes are on the disk."""
        self._journal_changes.inc(changes)
        self._journal_commit.observe(seconds)

    def journal_seen(self, *, waiting: int, failing: bool) -> None:
        """What waits for the disk now, and whether it takes anything."""
        self._journal_waiting.set(waiting)
        self._journal_failing.set(failing)

    def loop_lagged(self, seconds: float) -> None:
        """One measurement of the event loop's lateness."""
        self._loop_lag.observe(seconds)

    def page(self) -> bytes:
        """Everything, in the text format that ``CONTENT_TYPE`` names."""
        return generate_latest(self._registry)

    def value(self, name: str, **labels: str) -> float | None:
        """One sample as it stands, for status and for tests; ``None`` where nothing was counted yet."""
        return self._registry.get_sample_value(name, labels)

    def _counter(self, name: str, *labels: str) -> Counter:
        return _remembering(Counter(name, NAMES[name], labels, registry=self._registry))

    def _gauge(self, name: str, *labels: str) -> Gauge:
        return _remembering(Gauge(name, NAMES[name], labels, registry=self._registry))

    def _histogram(self, name: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return _remembering(Histogram(name, NAMES[name], labels, buckets=buckets, registry=self._registry))


def _remembering(metric: MetricT) -> MetricT:
    """Look each set of labels up once: the library's own look takes a lock, and longer than the counting.

    It keeps all that it has found anyway, so this holds no more.
    """
    metric.labels = cache(metric.labels)  # type: ignore[method-assign]
    return metric
