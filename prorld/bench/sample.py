"""Small parts of the benches of sandboxes and tools: samples, what a process has used, figures by wall."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from prorld.bench.figures import Aim, lines_of, quantile

__all__ = [
    "NO_DEATHS",
    "Machine",
    "MachineFigures",
    "by_wall",
    "cpu_ms",
    "left_out",
    "missed_of",
    "p50_p95",
    "pss_kb",
    "ratio",
    "tree_cpu_ms",
]


class MachineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What every bench says of the machine and of itself; ``notes`` say why a figure is null.

    ``warden_deaths`` is how often the warden died: all sandboxes end with it, and another one is started.
    """

    notes: list[str]
    warden_deaths: int
    cores: int
    load_1m_before: float
    load_1m_after: float
    seconds: float


NO_DEATHS = Aim(figure="warden_deaths", bound=0, how="at most")


class Machine:
    """The machine from when this is made on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._load_before = os.getloadavg()[0]

    def figures(self, notes: Sequence[str], warden_deaths: int) -> dict[str, Any]:
        """The fields of ``MachineFigures``."""
        return {
            "notes": list(notes),
            "warden_deaths": warden_deaths,
            "cores": len(os.sched_getaffinity(0)),
            "load_1m_before": self._load_before,
            "load_1m_after": os.getloadavg()[0],
            "seconds": time.monotonic() - self._began,
        }


def by_wall(walls: Iterable[str], names: Iterable[str]) -> list[tuple[str, Any, None]]:
    """Fields of a struct of figures: each of the names behind each of the walls, ``null`` until measured."""
    return [(f"{wall}_{name}", float | None, None) for wall in walls for name in names]


def p50_p95(name: str, samples: Sequence[float]) -> dict[str, float]:
    """Two figures in milliseconds; none where nothing was measured."""
    if not samples:
        return {}
    return {f"{name}_p50_ms": quantile(samples, 0.5), f"{name}_p95_ms": quantile(samples, 0.95)}


def ratio(found: Mapping[str, float], name: str, over: str, under: str) -> dict[str, float]:
    """One figure over another, where there are both."""
    return {name: found[over] / found[under]} if over in found and found.get(under) else {}


def cpu_ms(pids: Iterable[int] = ()) -> float:
    """CPU of this process, and of the main threads of others, which have none besides."""
    return time.process_time() * 1e3 + sum(map(_thread_ms, pids))


def _thread_ms(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e6
    except FileNotFoundError:
        # Kernels built without scheduler statistics.
        return sum(int(field) for field in _stat(pid)[11:13]) * 1e3 / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def tree_cpu_ms(pid: int) -> float:
    """CPU of this process, of another one, and of all that the other one has waited for; in clock ticks."""
    ticks = sum(int(field) for field in _stat(pid)[11:15])
    return time.process_time() * 1e3 + ticks * 1e3 / os.sysconf("SC_CLK_TCK")


def pss_kb(pids: Iterable[int], proc: Path = Path("/proc")) -> float | None:
    """Their memory, what is shared divided among those that share it; ``None`` where the kernel does not say."""
    total = 0
    for pid in pids:
        try:
            lines = (proc / str(pid) / "smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except (FileNotFoundError, ProcessLookupError):  # it has gone
            continue
        except OSError:
            return None
    return float(total)


def missed_of(figures: msgspec.Struct, aims: Sequence[Aim]) -> list[str]:
    """One line per aim that the figures miss; what could not be measured misses its aim."""
    lines: list[str] = []
    for aim in aims:
        if getattr(figures, aim.figure) is None:
            lines.append(f"{aim.figure} is not measured: should be {aim.how} {aim.bound:g}")
        else:
            lines += lines_of(figures, [aim])
    return lines


def left_out(walls: Iterable[str], chosen: Sequence[str], missing: Mapping[str, str]) -> list[str]:
    """A line for each wall that is not measured."""
    return [missing.get(wall, f"{wall}: left out") for wall in walls if wall in missing or wall not in chosen]
