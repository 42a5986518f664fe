"""What may be configured: one frozen Struct per section, each field with its unit, bound, default and reason.

The words beside a field are its documentation: ``prorld check-config`` and the docs print them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from prorld.config.batches import Batches
from prorld.config.compat import Compat
from prorld.config.loopback import is_loopback
from prorld.config.sandboxes import Sandbox, Warm
from prorld.config.units import Bytes, Count, Seconds, Share, Workers
from prorld.domain.outcome import OutcomeKind, Verdict

__all__ = [
    "Admission",
    "Audit",
    "BackendEntry",
    "Batches",
    "Breaker",
    "Compat",
    "Config",
    "Engine",
    "EngineKey",
    "Fairness",
    "Gc",
    "Handlers",
    "Limits",
    "Log",
    "Metrics",
    "PolicyEntry",
    "Sandbox",
    "Server",
    "Stages",
    "State",
    "Timeouts",
    "Verdicts",
    "Verification",
    "Warm",
    "is_loopback",
]


class Server(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP listener."""

    host: Annotated[str, Meta(min_length=1, description="Address to listen on; loopback unless you mean it.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Meta(ge=0, le=65_535, description="TCP port; 0 takes a free one.")] = 8650
    unix_socket: Annotated[
        str | None, Meta(description="Listen on this Unix socket (mode 0600) instead of host and port.")
    ] = None
    no_auth: Annotated[
        bool, Meta(description="Ask for no token; refused where others than this machine can connect.")
    ] = False
    body_bytes_max: Annotated[Bytes, Meta(description="Largest request body; more is answered 413.")] = 64 << 20
    connections_max: Annotated[Count, Meta(description="Open connections; further ones are answered 503.")] = 8192
    send_stall_s: Annotated[Seconds, Meta(description="A peer that reads nothing for so long is cut off.")] = 30.0
    keep_alive_s: Annotated[Seconds, Meta(description="An idle connection is closed after this.")] = 75.0

    def __post_init__(self) -> None:
        if self.no_auth and self.unix_socket is None and not is_loopback(self.host):
            raise ValueError(f"no_auth needs a loopback address or a Unix socket, and host is {self.host!r}")


class State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the daemon keeps its token, its address and its work."""

    dir: Annotated[
        str | None,
        Meta(
            description="State directory. --state-dir and $PRORLD_STATE win; unset: prorld/ in the XDG state directory."
        ),
    ] = None


class Stages(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many jobs may be in each stage at once; 0 pauses a stage, and all can be changed while the daemon runs."""

    init: Annotated[Workers, Meta(description="Jobs that make their sandbox at the same time.")] = 8
    run: Annotated[Workers, Meta(description="Jobs whose agent runs at the same time.")] = 32
    eval: Annotated[Workers, Meta(description="Jobs that are graded at the same time.")] = 8
    ahead: Annotated[
        Count, Meta(description="Jobs that INIT may have begun before RUN has a place for them; each holds a sandbox.")
    ] = 16


class Fairness(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who goes first where jobs wait for a stage with the same priority."""

    weights: Annotated[
        dict[str, Annotated[float, Meta(gt=0, le=1000)]],
        Meta(description="Places that a tenant gets beside others, by its name; one that is not named weighs 1."),
    ] = {}


class Breaker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When too many attempts fail for one cause that is not the policy's, no more of the kind are begun for a while."""

    share: Annotated[Share, Meta(description="More failures of one stage and cause than this share open it.")] = 0.5
    window: Annotated[int, Meta(ge=1, le=100_000, description="The last so many ends of attempts are looked at.")] = 64
    window_s: Annotated[Seconds, Meta(description="Ends that are older are forgotten.")] = 600.0
    min_count: Annotated[
        int, Meta(ge=1, le=100_000, description="It stays closed before so many ends were seen in the window.")
    ] = 16
    cooldown_s: Annotated[
        Seconds, Meta(description="Until a few are let through to try; doubles each time they fail.")
    ] = 30.0
    cooldown_max_s: Annotated[Seconds, Meta(description="The longest that it becomes.")] = 960.0
    probes: Annotated[
        int, Meta(ge=1, le=1000, description="So many are let through to try; all of them must do well to close it.")
    ] = 4

    def __post_init__(self) -> None:
        if self.min_count > self.window:
            raise ValueError(f"min_count is {self.min_count}, more than the window of {self.window}")
        if self.cooldown_max_s < self.cooldown_s:
            raise ValueError(f"cooldown_max_s is {self.cooldown_max_s:g}, below cooldown_s, {self.cooldown_s:g}")


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of what the daemon holds in memory."""

    jobs_max: Annotated[Count, Meta(description="Jobs queued or active; over it a submit is answered 503.")] = 10_000
    accepted_bytes_max: Annotated[Bytes, Meta(description="Bytes of jobs queued or active, as they were sent.")] = (
        1 << 30
    )
    results_count_max: Annotated[
        Count, Meta(description="Ended jobs kept in memory; older ones are read from the journal.")
    ] = 10_000
    results_bytes_max: Annotated[Bytes, Meta(description="Bytes of ended jobs kept in memory, by estimate.")] = (
        256 << 20
    )
    mailbox_size: Annotated[Count, Meta(description="Messages waiting for one actor; over it callers get 503.")] = 1024


class Retention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the journal keeps of ended jobs: the one that ended first goes first, never one that awaits its receipt."""

    age_s: Annotated[float, Meta(gt=0, le=100 * 366 * 86_400, description="Ended jobs are forgotten after this.")] = (
        14 * 86_400.0
    )
    count_max: Annotated[Count, Meta(description="Ended jobs kept; of older ones only the id.")] = 1_000_000
    bytes_max: Annotated[Bytes, Meta(description="Bytes of ended jobs kept, as they lie on the disk.")] = 20 << 30
    reserve_bytes: Annotated[
        Bytes, Meta(description="With less free space nothing is accepted: it is for results of what was.")
    ] = 256 << 20


class Timeouts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Deadlines of the daemon itself; those of a job come with the job."""

    boot_s: Annotated[Seconds, Meta(description="For the warden and the check of sandboxes to come up.")] = 120.0
    drain_s: Annotated[
        Seconds,
        Meta(description="For running jobs to end after the first signal; what is left runs again at the next start."),
    ] = 30.0
    load_s: Annotated[Seconds, Meta(description="For an engine to load the weights of an update.")] = 1800.0
    engine_stall_s: Annotated[
        Seconds, Meta(description="An engine that has calls and works on no token of them for so long is given up.")
    ] = 120.0
    engine_call_s: Annotated[
        Seconds | None,
        Meta(description="For one engine call; it is made again elsewhere. Unset: as long as its stage."),
    ] = None


class Engine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The embedded engine: a small real model in a child process of the daemon."""

    enabled: Annotated[bool | None, Meta(description="Start it; unset: only where no backends are configured.")] = None
    slots: Annotated[int, Meta(ge=1, le=256, description="Sequences decoded at the same time.")] = 4
    context_tokens: Annotated[int, Meta(ge=256, le=1 << 20, description="Context of one slot, in tokens.")] = 4096
    threads: Annotated[int, Meta(ge=0, le=1024, description="Threads; 0: half of the usable cores, four at most.")] = 0
    weights_bytes_max: Annotated[Bytes, Meta(description="The largest file of weights that an update may name.")] = (
        16 << 30
    )


class BackendEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine to use from the start; more can come and go over HTTP."""

    url: Annotated[str, Meta(pattern=r"^https?://[^\s/@]+(/[^\s]*)?$", description="Where it listens.")]
    kind: Annotated[
        Literal["vllm", "sglang", "llamacpp", "openai", "prorl"], Meta(description="Which API it speaks.")
    ] = "vllm"
    policy: Annotated[str, Meta(min_length=1, description="Which policy it serves.")] = "default"
    model: Annotated[str | None, Meta(description="Name of the model there; unset: the one it serves.")] = None
    max_inflight: Annotated[Count | None, Meta(description="Most calls at once; unset: as many as it bears.")] = None
    weight: Annotated[float, Meta(gt=0, le=1000, description="Its share of leases beside other engines.")] = 1.0


class EngineKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key that engines under one address ask for. Clients can add engines, but not say where a key goes."""

    url: Annotated[
        str, Meta(pattern=r"^https?://[^\s/@]+(/[^\s]*)?$", description="It goes to this address and what is below it.")
    ]
    env: Annotated[
        str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="The environment variable that holds it.")
    ]


class Admission(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many calls an engine is given at once; what is over that waits in line, the highest priority first."""

    enabled: Annotated[
        bool, Meta(description="Let the limit of each engine follow its load; else `max_inflight` alone is the limit.")
    ] = True
    start: Annotated[
        Count, Meta(description="Calls at once for an engine that has just come; doubles while it does well.")
    ] = 32
    floor: Annotated[Count, Meta(description="The limit never falls below this.")] = 4
    step: Annotated[Count, Meta(description="What the limit grows by, once pressure has been met.")] = 4
    shrink: Annotated[
        float, Meta(gt=0, lt=1, description="The factor that makes the limit smaller under pressure.")
    ] = 0.7
    kv_high: Annotated[Share, Meta(description="A KV cache that is fuller than this is pressure.")] = 0.95
    waiting_share: Annotated[
        Share, Meta(description="More calls waiting in the engine than this share of those running is pressure.")
    ] = 0.25


class PolicyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named model."""

    tokenizer: Annotated[
        str | None, Meta(description="Directory or file of its tokenizer; unset: asked of the engine.")
    ] = None
    renderer: Annotated[
        str | None,
        Meta(description="auto (unset), jinja, or a model family by name: who turns its messages into tokens."),
    ] = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="Variables for its chat template.")] = {}
    max_staleness: Annotated[
        Annotated[int, Meta(ge=0, le=10**9)] | None,
        Meta(description="Versions that it may go on while a job runs; beyond that the job ends `stale`. Unset: any."),
    ] = None


class Verdicts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What training may do with each outcome. Whatever this says, a rollout without a grade is never ``use``."""

    ok: Annotated[Verdict, Meta(description="The episode ended by itself and was graded.")] = Verdict.USE
    policy_limit: Annotated[Verdict, Meta(description="The policy used up a budget and was graded.")] = Verdict.USE
    timeout: Annotated[Verdict, Meta(description="A stage or the job ran out of time.")] = Verdict.MASK
    env_error: Annotated[Verdict, Meta(description="The sandbox failed.")] = Verdict.DROP
    llm_error: Annotated[Verdict, Meta(description="The engine failed.")] = Verdict.DROP
    handler_error: Annotated[Verdict, Meta(description="The handler failed.")] = Verdict.DROP
    grader_error: Annotated[Verdict, Meta(description="The grader did not run to its end.")] = Verdict.DROP
    cancelled: Annotated[Verdict, Meta(description="Somebody asked for the end.")] = Verdict.DROP
    lost: Annotated[Verdict, Meta(description="The daemon died with it.")] = Verdict.DROP

    def table(self) -> Mapping[OutcomeKind, Verdict]:
        """The section as the table that the domain decides with."""
        return {kind: getattr(self, kind.value) for kind in OutcomeKind}


class Verification(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far recorded log-probabilities may be from those that an engine of the same version gives later."""

    tolerance_mean: Annotated[
        float,
        Meta(
            ge=0, le=1000, description="Mean absolute difference over the tokens of one version; over it they drifted."
        ),
    ] = 0.02
    tolerance_mean_varying: Annotated[
        float,
        Meta(
            ge=0,
            le=1000,
            description="The same for engines whose results depend on their load: llama.cpp, and vLLM on a CPU.",
        ),
    ] = 0.07
    tolerance_max: Annotated[
        float, Meta(ge=0, le=1000, description="Absolute difference at any one token; over it the version drifted.")
    ] = 1.0


class Audit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ended jobs whose tokens an engine scores again without being asked."""

    share: Annotated[
        float, Meta(ge=0, le=1, description="Share of ended jobs, chosen by a hash of their id; 0 audits none.")
    ] = 0.01


class Handlers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which kinds of tasks are there, and their own settings."""

    enabled: Annotated[
        list[str] | None,
        Meta(
            description="Load these and no others; unset: all that are installed. A broken one is named and left out."
        ),
    ] = None
    config: Annotated[
        dict[str, dict[str, Any]],
        Meta(description="One table per handler, decoded strictly into the handler's own type."),
    ] = {}

    def __post_init__(self) -> None:
        unused = sorted(set(self.config) - set(self.enabled)) if self.enabled is not None else []
        if unused:
            raise ValueError(f"config has a table for {', '.join(unused)}, which enabled leaves out")


class Log(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is told to the operator."""

    level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="Least level that is shown.")] = (
        "info"
    )
    format: Annotated[
        Literal["auto", "json", "pretty"],
        Meta(description="auto: pretty on a terminal, else one line of JSON an event."),
    ] = "auto"


class Metrics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is measured for Prometheus."""

    loop_lag_interval_s: Annotated[
        Seconds, Meta(description="How often the lateness of the event loop is measured.")
    ] = 0.25


class Gc(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Python's garbage collector; its defaults stall the event loop at a thousand agents."""

    # The loop stands still for as long as a collection takes, and that is by how much there is to look at. So there are
    # many small ones, none of the middle generation has more than a hundred thousand objects, and full ones are rare.
    threshold0: Annotated[Count, Meta(description="Allocations until a collection of the youngest objects.")] = 10_000
    threshold1: Annotated[Count, Meta(description="Young collections until one of the middle generation.")] = 10
    threshold2: Annotated[Count, Meta(description="Middle collections until a full one.")] = 1_000
    freeze: Annotated[
        bool, Meta(description="After start, leave out of collections what lives as long as the daemon.")
    ] = True


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration."""

    server: Server = Server()
    compat: Compat = Compat()
    state: State = State()
    stages: Stages = Stages()
    fairness: Fairness = Fairness()
    breaker: Breaker = Breaker()
    limits: Limits = Limits()
    retention: Retention = Retention()
    batches: Batches = Batches()
    timeouts: Timeouts = Timeouts()
    sandbox: Sandbox = Sandbox()
    warm: Warm = Warm()
    engine: Engine = Engine()
    backends: Annotated[list[BackendEntry], Meta(max_length=4096, description="Engines, each a table.")] = []
    engine_keys: Annotated[list[EngineKey], Meta(max_length=256, description="Keys of engines, each a table.")] = []
    admission: Admission = Admission()
    policies: Annotated[
        dict[str, PolicyEntry], Meta(description="Policies by name; default exists without being named.")
    ] = {}
    verdicts: Verdicts = Verdicts()
    verification: Verification = Verification()
    audit: Audit = Audit()
    handlers: Handlers = Handlers()
    log: Log = Log()
    metrics: Metrics = Metrics()
    gc: Gc = Gc()

    def __post_init__(self) -> None:
        urls = [entry.url.rstrip("/") for entry in self.backends]
        twice = sorted({url for url in urls if urls.count(url) > 1})
        if twice:
            raise ValueError(f"backends names {', '.join(twice)} more than once")
        if self.limits.jobs_max < self.stages.run:
            raise ValueError(
                f"limits.jobs_max is {self.limits.jobs_max}, fewer than the {self.stages.run} of stages.run"
            )

    @property
    def embedded_engine(self) -> bool:
        """Whether the daemon starts its own engine."""
        return not self.backends if self.engine.enabled is None else self.engine.enabled
