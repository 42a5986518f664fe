"""Metrics: a registry of their own, documented names, and what the verbs count."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from prorld.metrics import NAMES, EngineSample, Metrics


def test_two_daemons_count_apart():
    """No registry is shared, so several can live in one process."""
    one, two = Metrics(), Metrics()
    one.job_accepted("math")
    assert one.value("prorld_jobs_accepted_total", handler="math") == 1
    assert two.value("prorld_jobs_accepted_total", handler="math") is None


def test_jobs_are_counted_by_their_end():
    """Accepted, refused, retried and ended are apart, ends by handler, outcome and verdict."""
    metrics = Metrics()
    metrics.job_accepted("math")
    metrics.job_refused("overloaded")
    metrics.job_retried("env_error")
    metrics.job_ended("math", outcome="ok", verdict="use")
    metrics.job_ended("math", outcome="timeout", verdict="mask")
    assert metrics.value("prorld_jobs_refused_total", code="overloaded") == 1
    assert metrics.value("prorld_jobs_retried_total", outcome="env_error") == 1
    assert metrics.value("prorld_jobs_ended_total", handler="math", outcome="ok", verdict="use") == 1
    assert metrics.value("prorld_jobs_ended_total", handler="math", outcome="timeout", verdict="mask") == 1


def test_a_stage_tells_waiting_from_running():
    """Time at the gate and time in the stage are two things."""
    metrics = Metrics()
    metrics.stage_passed("init", waited_s=2.0, ran_s=0.3)
    metrics.stage_seen("init", workers=4, active=3, waiting=2)
    assert metrics.value("prorld_stage_wait_seconds_sum", stage="init") == 2.0
    assert metrics.value("prorld_stage_run_seconds_sum", stage="init") == pytest.approx(0.3)
    assert metrics.value("prorld_stage_run_seconds_bucket", stage="init", le="0.5") == 1
    assert metrics.value("prorld_stage_run_seconds_bucket", stage="init", le="0.1") == 0
    assert metrics.value("prorld_stage_workers", stage="init") == 4
    assert metrics.value("prorld_stage_active", stage="init") == 3
    assert metrics.value("prorld_stage_waiting", stage="init") == 2


def test_engines_sandboxes_and_the_loop():
    """Calls by kind and result, tokens by policy, sandboxes by runtime, lateness of the loop."""
    metrics = Metrics()
    metrics.engine_called("vllm", result="ok", seconds=1.5)
    metrics.tokens_counted("default", prompted=100, sampled=20)
    metrics.tokens_counted("default", prompted=0, sampled=5)
    metrics.sandbox_started("bubblewrap", seconds=0.04)
    metrics.sandbox_failed("bubblewrap")
    metrics.loop_lagged(0.003)
    assert metrics.value("prorld_engine_call_seconds_count", kind="vllm", result="ok") == 1
    assert metrics.value("prorld_tokens_prompted_total", policy="default") == 100
    assert metrics.value("prorld_tokens_sampled_total", policy="default") == 25
    assert metrics.value("prorld_sandboxes_started_total", runtime="bubblewrap") == 1
    assert metrics.value("prorld_sandboxes_failed_total", runtime="bubblewrap") == 1
    assert metrics.value("prorld_loop_lag_seconds_bucket", le="0.005") == 1


def test_engines_are_counted_as_long_as_they_are_there():
    """One series per engine that is shown; the series of one that is gone are gone, so their number is bounded."""
    metrics = Metrics()
    row = EngineSample("b-1", "default", calls=3, errors={"engine_busy": 2}, cached=7, busy_s=1.5, call_limit=32)
    metrics.engines_seen([row, EngineSample("b-2", "other", migrated_away=1)])
    assert metrics.value("prorld_backend_calls_total", backend="b-1", policy="default") == 3
    assert metrics.value("prorld_backend_errors_total", backend="b-1", policy="default", code="engine_busy") == 2
    assert metrics.value("prorld_backend_tokens_total", backend="b-1", policy="default", origin="cached") == 7
    assert metrics.value("prorld_backend_busy_seconds_total", backend="b-1", policy="default") == 1.5
    assert metrics.value("prorld_backend_call_limit", backend="b-1", policy="default") == 32
    assert metrics.value("prorld_backend_migrations_total", backend="b-2", policy="other", direction="away") == 1
    metrics.engines_seen([])
    assert metrics.value("prorld_backend_calls_total", backend="b-1", policy="default") is None


def test_the_page_is_what_the_names_say():
    """Every documented name is on the page, with its documentation, and no other of ours is."""
    page = Metrics().page().decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    ours = {
        name: family
        for name, family in families.items()
        if name.startswith("prorld_") and not name.endswith("_created")
    }
    assert set(ours) == {name.removesuffix("_total") for name in NAMES}
    for name, words in NAMES.items():
        assert ours[name.removesuffix("_total")].documentation == words


def test_the_page_holds_the_process_itself():
    """Memory and open files of the daemon are there without being asked for."""
    assert b"process_resident_memory_bytes" in Metrics().page()
