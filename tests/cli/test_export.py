"""``prorld export`` on a journal that a daemon left behind."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import trio
from pyarrow import parquet

from prorld.cli.export import instant
from prorld.cli.export_parquet import ROWS_PER_GROUP
from prorld.cli.extras import cure
from prorld.domain.outcome import Verdict
from prorld.export.formats import export
from prorld.export.names import FORMATS
from prorld.store import schema
from prorld.store.archive import ROWS_PER_LOOK
from prorld.store.jobs import JobAccepted, JobEnded
from prorld.store.journal import Change, Journal
from prorld.wire.codec import encode
from prorld.wire.jobs import JobRecord
from prorld.wire.trajectory import Trajectory, unpacked
from tests.export.documents import compacted, packed_document, tools
from tests.store.made import accepted, branch, ended

ROOT = Path(__file__).parents[2]


def write(directory: Path, n: int = 6, *, documents: Sequence[Trajectory] = ()) -> list[JobEnded]:
    """A journal with a live job and so many that ended, every other one to train on; with these documents if given."""
    directory.mkdir(exist_ok=True)
    made = [
        ended(
            accepted(serial, f"j{serial}", handler="even" if serial % 2 == 0 else "odd", group_id=f"g{serial // 3}"),
            ended_at=f"2026-01-0{1 + serial % 9}T00:00:00.000Z",
            verdict=Verdict.USE if serial % 2 else Verdict.DROP,
        )
        for serial in range(1, n + 1)
    ]
    for place, document in enumerate(documents):
        stored = msgspec.structs.replace(made[place].stored, trajectory=packed_document(document))
        made[place] = msgspec.structs.replace(made[place], stored=stored)

    async def main() -> None:
        journal = Journal(directory)
        await journal.open()
        async with trio.open_nursery() as nursery:
            await nursery.start(journal.run)
            for some in (made[i : i + 100] for i in range(0, n, 100)):
                changes: list[Change] = []
                for change in some:
                    changes += [_accepted(change), change]
                await journal.owe(*changes)
            await journal.commit(accepted(10_000, "live"))
            nursery.cancel_scope.cancel()

    trio.run(main)
    return made


def _accepted(change: JobEnded) -> JobAccepted:
    spec = change.stored.spec
    return accepted(change.serial, spec.job_id, handler=spec.handler, group_id=spec.group_id)


@pytest.fixture
def kept(tmp_path):
    """The state directory's journal."""
    return write(tmp_path / "state")


def test_every_ended_job_is_a_line_that_is_its_document(cli, kept):
    code, out, err = cli("export")
    assert (code, err) == (0, "")
    docs = [msgspec.json.decode(line, type=Trajectory) for line in out.splitlines()]
    assert docs == [unpacked(change.stored.trajectory) for change in kept]


@pytest.mark.parametrize(
    ("flags", "serials"),
    [
        (("--verdict", "use"), [1, 3, 5]),
        (("--verdict", "mask"), []),
        (("--handler", "even"), [2, 4, 6]),
        (("--group", "g1"), [3, 4, 5]),
        (("--group", "g1", "--handler", "even"), [4]),
        (("--job", "j5", "--job", "j2", "--job", "j5"), [2, 5]),
        (("--since", "2026-01-05T00:00:00Z"), [4, 5, 6]),
        (("--since", "2026-01-05T02:00:00+01:00"), [5, 6]),
        (("--since", "1s"), []),
        (("--tenant", "default"), [1, 2, 3, 4, 5, 6]),
        (("--tenant", "other"), []),
    ],
)
def test_what_is_wanted_is_what_comes(cli, kept, flags, serials):
    code, out, _ = cli("export", "--no-trajectories", *flags)
    assert code == 0
    records = [msgspec.json.decode(line, type=JobRecord) for line in out.splitlines()]
    assert records == [kept[serial - 1].record for serial in serials]


def test_many_come_in_several_looks_and_none_twice(cli, tmp_path):
    n = 2 * ROWS_PER_LOOK + 3
    write(tmp_path / "state", n)
    _, out, _ = cli("export", "--no-trajectories")
    assert [json.loads(line)["job_id"] for line in out.splitlines()] == [f"j{serial}" for serial in range(1, n + 1)]


def test_a_file_appears_when_it_is_whole(cli, kept, tmp_path, monkeypatch):
    target = tmp_path / "out.jsonl"
    code, out, err = cli("export", "-o", str(target))
    assert (code, out) == (0, "")
    assert "6 jobs in" in err
    assert len(target.read_text().splitlines()) == 6
    before = target.read_bytes()
    monkeypatch.setattr("prorld.cli.export_out.Lines.write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
    code, _, err = cli("export", "-o", str(target))
    assert code == 2
    assert "can't be written" in err
    assert target.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_parquet_has_a_row_for_each_branch(cli, kept, tmp_path):
    target = tmp_path / "out.parquet"
    assert cli("export", "-o", str(target))[0] == 0
    table = parquet.read_table(target).to_pylist()
    docs = [unpacked(change.stored.trajectory) for change in kept]
    assert [row["job_id"] for row in table] == [doc.job.job_id for doc in docs]
    for row, doc in zip(table, docs, strict=True):
        (made,) = doc.branches
        assert (row["token_ids"], row["mask"], row["logprobs"]) == (made.token_ids, made.mask, made.logprobs)
        assert (row["reward"], row["verdict"], row["outcome"]) == (1.0, doc.verdict.value, "ok")
        assert dict(row["metrics"]) == doc.job.metrics
        assert json.loads(row["instance"]) == doc.job.instance
        assert json.loads(row["segments"]) == msgspec.to_builtins(made.segments)
    columns = parquet.read_schema(target)
    assert [str(columns.field(name).type.value_type) for name in ("token_ids", "mask", "logprobs")] == [
        "int32", "uint8", "float",
    ]  # fmt: skip
    codec = parquet.ParquetFile(target).metadata.row_group(0).column(0).compression
    assert codec == "ZSTD"


def test_parquet_of_records_and_of_nothing(cli, tmp_path):
    """Row groups are bounded; a file without rows has its columns all the same."""
    write(tmp_path / "state", ROWS_PER_GROUP + 1)
    target = tmp_path / "out.parquet"
    assert cli("export", "--no-trajectories", "-o", str(target))[0] == 0
    found = parquet.ParquetFile(target)
    assert (found.metadata.num_rows, found.metadata.num_row_groups) == (ROWS_PER_GROUP + 1, 2)
    assert "token_ids" not in found.schema_arrow.names
    assert cli("export", "--verdict", "mask", "-o", str(target))[::2] == (
        0,
        f"no ended job is like that; {target} is empty\n",
    )
    found = parquet.ParquetFile(target)
    assert found.metadata.num_rows == 0
    assert "token_ids" in found.schema_arrow.names


@pytest.mark.parametrize("form", FORMATS)
def test_a_trainers_rows_are_those_of_the_exporter(cli, kept, form):
    """One a line, as keyword arguments or columns; jobs that gave none are counted."""
    code, out, err = cli("export", "--format", form)
    made = [export(change.stored.trajectory, form) for change in kept]
    assert [json.loads(line) for line in out.splitlines()] == [json.loads(encode(row)) for rows in made for row in rows]
    assert code == 0
    empty = sum(not rows for rows in made)
    assert err == (f"{sum(map(len, made))} rows of 6 jobs, {empty} of which gave none\n" if empty else "")


def test_a_job_that_a_format_has_no_place_for_is_named_and_left_out(cli, tmp_path):
    """The others are written; the exit code says that not all were."""
    fork, plain = compacted(), tools()
    write(tmp_path / "state", 2, documents=[fork, plain])
    target = tmp_path / "rows.jsonl"
    code, _, err = cli("export", "--format", "openrlhf", "-o", str(target))
    assert code == 1
    assert [json.loads(line)["reward"] for line in target.read_text().splitlines()] == [1.0]
    assert "job compacted has 2 branches, and OpenRLHF has one row for a rollout" in err
    assert "1 row of 1 job in" in err
    assert "1 job can't be said in this format and is left out" in err


def test_a_format_that_there_is_not_and_one_without_trajectories_are_refused(cli, kept):
    """What was probably meant is named."""
    code, _, err = cli("export", "--format", "nemo-rl")
    assert code == 2
    assert "did you mean nemo_rl?" in err
    code, _, err = cli("export", "--format", "verl", "--no-trajectories")
    assert code == 2
    assert "leave --no-trajectories out" in err


def test_without_pyarrow_it_says_what_to_install(cli, kept, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    target = tmp_path / "out.parquet"
    code, _, err = cli("export", "-o", str(target))
    assert (code, target.exists()) == (2, False)
    assert "extra parquet`" in err or "prorld[parquet]" in err


def test_what_is_missing_is_installed_beside_this_very_prorld(monkeypatch):
    """By the repository's own recipe, by the pip of this environment, or by uv where it has none."""
    monkeypatch.setattr(sys, "prefix", str(ROOT / ".venv"))
    monkeypatch.chdir(ROOT)
    assert cure("parquet") == "`./just extra parquet`"
    monkeypatch.chdir("/")
    assert cure("parquet") == f"`{ROOT}/just extra parquet`"
    monkeypatch.setattr(sys, "prefix", "/opt/prorld")
    monkeypatch.setattr(sys, "executable", "/opt/prorld/bin/python")
    monkeypatch.setattr("prorld.cli.extras.find_spec", lambda name: object())
    assert cure("parquet") == "`/opt/prorld/bin/python -m pip install 'prorld[parquet]'`"
    monkeypatch.setattr("prorld.cli.extras.find_spec", lambda name: None)
    assert cure("parquet") == "`uv pip install --python /opt/prorld/bin/python 'prorld[parquet]'`"


def test_jobs_that_are_not_there_are_named(cli, kept):
    code, out, err = cli("export", "--job", "j1", "--job", "nobody\x1b", "--job", "live", "--no-trajectories")
    assert (code, len(out.splitlines())) == (1, 1)
    assert "job nobody\\x1b is not among the ended ones: unknown here" in err
    assert "job live is not among the ended ones: it has not ended" in err


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_where_nothing_is_exported_for_an_error_there_is_no_file(cli, tmp_path, name):
    """For jobs that are not there, that can't be read, or that the format has no place for; an old file stays."""
    write(tmp_path / "state", 2, documents=[compacted()])
    with closing(sqlite3.connect(tmp_path / "state" / "journal.sqlite", isolation_level=None)) as db:
        db.execute("DELETE FROM bodies WHERE serial = 2")
    target = tmp_path / name
    asked = [("--job", "nope"), ("--job", "j2"), ("--job", "compacted", "--format", "openrlhf")]
    for flags in asked if name.endswith("l") else asked[:2]:
        code, _, err = cli("export", *flags, "-o", str(target))
        assert (code, target.exists()) == (1, False)
        assert f"nothing was exported, and {target} was not written" in err
        assert "no ended job is like that" not in err
    target.write_text("old")
    assert cli("export", "--job", "nope", "-o", str(target))[0] == 1
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_what_is_damaged_is_left_out_and_told(cli, kept, tmp_path):
    """Whether the body can't be read, or is one whose arrays are cut off, or the record is none."""
    cut = ended(accepted(4, "j4"))
    odd = msgspec.structs.replace(branch(4, 8), token_ids=b"\1\2\3")
    trajectory = msgspec.structs.replace(cut.stored.trajectory, branches=[odd])
    with closing(sqlite3.connect(tmp_path / "state" / "journal.sqlite", isolation_level=None)) as db:
        db.execute("UPDATE bodies SET body = x'00' WHERE serial = 2")
        db.execute("DELETE FROM bodies WHERE serial = 3")
        JobEnded(serial=4, record=cut.record, stored=msgspec.structs.replace(cut.stored, trajectory=trajectory)).apply(
            db
        )
        db.execute("UPDATE jobs SET record = 'x' WHERE serial = 5")
    code, out, err = cli("export", "--no-trajectories")
    assert (code, [json.loads(line)["job_id"] for line in out.splitlines()]) == (1, ["j1", "j2", "j3", "j4", "j6"])
    code, out, err = cli("export")
    assert code == 1
    assert [json.loads(line)["job"]["job_id"] for line in out.splitlines()] == ["j1", "j5", "j6"]
    assert "3 jobs could not be read whole" in err


def test_what_is_no_journal_is_refused(cli, tmp_path):
    code, _, err = cli("export")
    assert code == 2
    assert "there is no journal in" in err
    (tmp_path / "state").mkdir()
    path = tmp_path / "state" / "journal.sqlite"
    path.write_bytes(b"nonsense" * 1000)
    assert cli("export")[0] == 78
    path.unlink()
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(f"PRAGMA user_version = {schema.SCHEMA + 1}")
    code, _, err = cli("export")
    assert code == 78
    assert "use the newer prorld" in err


def test_it_reads_beside_a_journal_that_is_written(cli, tmp_path):
    """A running daemon's file: what is committed is exported, and neither waits for the other."""
    directory = tmp_path / "state"
    write(directory)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.store.committer", str(directory), "20000", "64"],
        cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            for _ in range(50):
                assert process.stdout is not None
                assert process.stdout.readline()
            code, out, _ = cli("export", "--no-trajectories")
        finally:
            process.kill()
    assert code == 0
    assert len(out.splitlines()) > 6


@pytest.mark.parametrize("text", ["yesterday", "24", "24w", "2026-13-01", "-1h", "999999d"])
def test_a_time_that_is_none_is_refused(cli, text):
    assert cli("export", f"--since={text}")[0] == 2


def test_an_instant_is_written_as_records_have_it():
    assert instant("2026-01-31T12:00:00.5+02:00") == "2026-01-31T10:00:00.500Z"
    assert instant("2026-01-31") == "2026-01-31T00:00:00.000Z"
