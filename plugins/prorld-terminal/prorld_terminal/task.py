"""A task as both formats mean it: read from ``task.toml`` (Harbor) or ``task.yaml`` (Terminal-Bench)."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from prorld_terminal.dockerfile import Recipe, Unsupported, read_recipe
from prorld_terminal.folder import bad, read_text

__all__ = ["ARTIFACTS_DIR", "Task", "load_task"]

ARTIFACTS_DIR = "/logs/artifacts"
DEFAULT_WORKDIR = "/app"
ARTIFACTS_MAX = 32

Seconds = Annotated[float, Meta(gt=0)]
_TEMPLATE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")


class _Environment(msgspec.Struct, frozen=True, kw_only=True):
    docker_image: str | None = None
    os: str = "linux"
    memory_mb: Annotated[int, Meta(gt=0)] | None = None
    memory: str | None = None
    storage_mb: Annotated[int, Meta(gt=0)] | None = None
    gpus: int | None = None
    tpu: Any = None
    mcp_servers: list[Any] = []
    env: dict[str, str] = {}
    workdir: str | None = None
    network_mode: str = "public"
    allow_internet: bool | None = None


class _Verifier(msgspec.Struct, frozen=True, kw_only=True):
    timeout_sec: Seconds = 600.0
    env: dict[str, str] = {}
    environment_mode: Literal["shared", "separate"] | None = None
    environment: _Environment | None = None
    collect: list[Any] = []


class _Agent(msgspec.Struct, frozen=True, kw_only=True):
    timeout_sec: Seconds | None = None


class _Solution(msgspec.Struct, frozen=True, kw_only=True):
    env: dict[str, str] = {}


class _Artifact(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    service: str | None = None


class _Harbor(msgspec.Struct, frozen=True, kw_only=True):
    metadata: dict[str, Any] = {}
    verifier: _Verifier = _Verifier()
    agent: _Agent = _Agent()
    environment: _Environment = _Environment()
    solution: _Solution = _Solution()
    steps: list[Any] | None = None
    artifacts: Annotated[list[str | _Artifact], Meta(max_length=ARTIFACTS_MAX)] = []


class _Bench(msgspec.Struct, frozen=True, kw_only=True):
    instruction: Annotated[str, Meta(min_length=1)]
    difficulty: str = "unknown"
    parser_name: str = "pytest"
    max_agent_timeout_sec: Seconds = 360.0
    max_test_timeout_sec: Seconds = 60.0


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One task, in the words of this package. ``context`` is where the Dockerfile's files come from."""

    name: str
    kind: Literal["harbor", "terminal-bench"]
    folder: str
    instruction: str
    difficulty: str = "unknown"
    image: str | None = None
    recipe: Recipe | None = None
    context: str = ""
    workdir: str = DEFAULT_WORKDIR
    env: dict[str, str] = {}
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    wants_network: bool = False
    agent_s: float | None = None
    verify_s: float = 600.0
    separate: bool = False
    verifier_image: str | None = None
    verifier_env: dict[str, str] = {}
    solution_env: dict[str, str] = {}
    artifacts: tuple[str, ...] = ()


def load_task(folder: Path) -> Task:
    """Read the few small files that say what a task is. Raises ``HandlerError`` that names the file and field."""
    toml = read_text(folder, "task.toml")
    if toml is not None:
        return _harbor(folder, toml)
    described = read_text(folder, "task.yaml")
    if described is not None:
        return _bench(folder, described)
    raise bad(folder, "it has neither task.toml nor task.yaml")


def _harbor(folder: Path, toml: str) -> Task:
    try:
        given = msgspec.convert(tomllib.loads(toml), _Harbor)
    except tomllib.TOMLDecodeError as exc:
        raise bad(folder, f"task.toml: {exc}") from exc
    except msgspec.ValidationError as exc:
        raise bad(folder, f"task.toml: {exc}") from exc
    environment, verifier = given.environment, given.verifier
    _refuse(folder, given)
    instruction = read_text(folder, "instruction.md")
    if not instruction or not instruction.strip():
        raise bad(folder, "instruction.md is missing or empty")
    if not (folder / "tests" / "test.sh").is_file():
        raise bad(folder, "tests/test.sh is missing")
    recipe = _recipe(folder, "environment/Dockerfile")
    sources = [entry if isinstance(entry, str) else entry.source for entry in given.artifacts]
    allowed = environment.allow_internet
    own = verifier.environment
    return Task(
        name=folder.name,
        kind="harbor",
        folder=str(folder),
        instruction=instruction,
        difficulty=str(given.metadata.get("difficulty", "unknown")),
        image=environment.docker_image,
        recipe=recipe,
        context=str(folder / "environment"),
        workdir=_workdir(environment.workdir, recipe),
        env=_resolved(folder, "environment.env", environment.env),
        memory_bytes=_memory(folder, environment),
        disk_bytes=None if environment.storage_mb is None else environment.storage_mb << 20,
        wants_network=environment.network_mode == "public" if allowed is None else allowed,
        agent_s=given.agent.timeout_sec,
        verify_s=verifier.timeout_sec,
        separate=verifier.environment_mode == "separate" or own is not None,
        verifier_image=None if own is None else own.docker_image,
        verifier_env=_resolved(folder, "verifier.env", verifier.env),
        solution_env=_resolved(folder, "solution.env", given.solution.env),
        artifacts=tuple(_artifact(folder, source) for source in sources),
    )


def _refuse(folder: Path, given: _Harbor) -> None:
    """What this package does not do is said at once, and not found out by a zero."""
    environment, verifier = given.environment, given.verifier
    compose = (folder / "environment" / "docker-compose.yaml").exists()
    own = verifier.environment
    services = [
        entry for entry in given.artifacts if not isinstance(entry, str) and entry.service not in {None, "main"}
    ]
    reasons = {
        "several steps": bool(given.steps),
        "an operating system other than Linux": environment.os.lower() != "linux",
        "a GPU or TPU": bool(environment.gpus) or environment.tpu is not None,
        "MCP servers": bool(environment.mcp_servers),
        "several containers": compose or bool(services),
        "commands that collect (verifier.collect)": bool(verifier.collect),
        "environment_mode shared beside an environment of the verifier's": own is not None
        and verifier.environment_mode == "shared",
        "an environment of the verifier's without docker_image": own is not None and own.docker_image is None,
    }
    for words, so in reasons.items():
        if so:
            raise bad(folder, f"it asks for {words}, which is not supported")


def _bench(folder: Path, described: str) -> Task:
    try:
        given = msgspec.convert(yaml.safe_load(described), _Bench)
    except (yaml.YAMLError, RecursionError, ValueError) as exc:
        words = " ".join(str(exc).split())[:300]
        raise bad(folder, f"task.yaml: {words}") from exc
    if given.parser_name != "pytest":
        raise bad(folder, f"task.yaml: the parser {given.parser_name} is not supported; pytest is")
    for needed in ("run-tests.sh", "tests"):
        if not (folder / needed).exists():
            raise bad(folder, f"{needed} is missing")
    _one_service(folder)
    recipe = _recipe(folder, "Dockerfile")
    return Task(
        name=folder.name,
        kind="terminal-bench",
        folder=str(folder),
        instruction=given.instruction,
        difficulty=given.difficulty,
        recipe=recipe,
        context=str(folder),
        workdir=_workdir(None, recipe),
        agent_s=given.max_agent_timeout_sec,
        verify_s=given.max_test_timeout_sec,
    )


def _one_service(folder: Path) -> None:
    text = read_text(folder, "docker-compose.yaml")
    if text is None:
        return
    try:
        compose = yaml.safe_load(text)
        services = compose.get("services") or {}
    except (yaml.YAMLError, RecursionError, ValueError, AttributeError) as exc:
        raise bad(folder, "docker-compose.yaml can't be read") from exc
    if len(services) > 1:
        raise bad(folder, "docker-compose.yaml has several services, which is not supported")


def _recipe(folder: Path, name: str) -> Recipe | None:
    text = read_text(folder, name)
    if text is None:
        return None
    try:
        return read_recipe(text)
    except Unsupported as exc:
        # Only a problem where the image was not built; it is told then.
        return Recipe(base="", trouble=f"{name}: {exc}")


def _workdir(named: str | None, recipe: Recipe | None) -> str:
    return named or (recipe.workdir if recipe else None) or DEFAULT_WORKDIR


def _memory(folder: Path, environment: _Environment) -> int | None:
    if environment.memory_mb is not None:
        return environment.memory_mb << 20
    if environment.memory is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GMK])[iI]?[bB]?", environment.memory.strip().upper())
    if match is None:
        raise bad(folder, f"task.toml: environment.memory can't be {environment.memory!r}")
    return int(float(match[1]) * {"G": 1 << 30, "M": 1 << 20, "K": 1 << 10}[match[2]])


def _resolved(folder: Path, field: str, env: dict[str, str]) -> dict[str, str]:
    """Defaults of templates are used; nothing of the daemon's own environment gets into a sandbox."""
    found: dict[str, str] = {}
    for name, value in env.items():
        wanted = [match[1] for match in _TEMPLATE.finditer(value) if match[2] is None]
        if wanted:
            raise bad(folder, f"task.toml: {field}.{name} needs ${wanted[0]} of the host, which no task gets")
        found[name] = _TEMPLATE.sub(lambda match: match[2], value)
    return found


def _artifact(folder: Path, source: str) -> str:
    if not source.startswith("/") or ".." in source.split("/") or source.rstrip("/") == "" or "\0" in source:
        raise bad(folder, f"task.toml: the artifact {source!r} is no absolute path")
    return source.rstrip("/")
