"""Which image an instance runs in: the names that the field gives SIF files and references, tried in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from prorld_swe.task import SweTask

__all__ = ["find_image", "image_names"]

_SUFFIXES: Final = (".sif", "")
GLOBBED_MAX: Final = 100_000


def image_names(task: SweTask) -> tuple[str, ...]:
    """What the image of an instance may be called, the likeliest first, without directory and suffix."""
    name = task.instance_id
    ids = dict.fromkeys(
        each
        for base in (name, name.replace("__", "_1776_"), name.replace("__", "_s_"))
        for each in (base, base.lower())
    )
    names: list[str] = []
    for reference in task.images:
        stem = reference.rpartition("/")[2].removesuffix(".sif")
        names += [stem, stem.replace(":", "_"), stem.replace(":", "-"), stem.rpartition(":")[0] or stem]
    for each in ids:
        names += [each, f"sweb.eval.x86_64.{each}", f"xingyaoww_sweb.eval.x86_64.{each}"]
    return tuple(dict.fromkeys(names))


def find_image(task: SweTask, images_dir: Path | None) -> str | None:
    """A path below ``images_dir``, else what the instance names; ``None`` where it names none.

    Looks for the plain names first, then for any that ends with one of the instance's.
    """
    if images_dir is not None:
        names = image_names(task)
        for name in names:
            for suffix in _SUFFIXES:
                path = images_dir / f"{name}{suffix}"
                if path.is_file() or path.is_dir():
                    return str(path)
        if (found := _ending_with(images_dir, names)) is not None:
            return str(found)
    for reference in task.images:
        if reference.startswith("/"):
            if Path(reference).exists():
                return reference
            continue
        return reference if "://" in reference else f"docker://{reference}" if "/" in reference else reference
    return None if task.images or task.shape == "mutation" else _published(task)


def _ending_with(images_dir: Path, names: tuple[str, ...]) -> Path | None:
    if not images_dir.is_dir():
        return None
    wanted = [name.lower() for name in names]
    for number, path in enumerate(sorted(images_dir.iterdir())):
        if number >= GLOBBED_MAX:
            break
        stem = path.name.removesuffix(".sif").lower()
        for name in wanted:
            head, found, tail = stem.rpartition(name)
            # A longer name of another instance must not do: what is around the name is punctuation or a tag.
            if found and (not head or head[-1] in "._-/") and (not tail or tail in {"_latest", "-latest", ".latest"}):
                return path
    return None


def _published(task: SweTask) -> str:
    name = task.instance_id.lower()
    if task.shape == "wrapped":
        return f"docker://docker.io/xingyaoww/sweb.eval.x86_64.{name.replace('__', '_s_')}:latest"
    return f"docker://docker.io/swebench/sweb.eval.x86_64.{name.replace('__', '_1776_')}:latest"
