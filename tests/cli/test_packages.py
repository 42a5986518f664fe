"""Distributions by name: from honest, hostile and broken indexes, and from directories; kept by hash, once."""

from __future__ import annotations

import hashlib

import pytest
import trio

from prorld.cli import package_fetch, package_source
from prorld.cli.exits import UsageError
from prorld.cli.package_fetch import fetch
from prorld.cli.package_index import PackageError
from prorld.cli.package_settings import PUBLIC_INDEX, IndexSettings, settings
from prorld.handlers.packages import cached_package
from prorld.kit import http_download
from tests.certificates import own_certificate
from tests.cli.simple_index import serve_index

WHEEL = "sample-1.0-py3-none-any.whl"
SDIST = "sample-1.0.tar.gz"


@pytest.fixture
def index():
    with serve_index() as served:
        yield served


@pytest.fixture
def get(index, tmp_path, monkeypatch):
    """Fetch from the index into a directory of this test; no retry waits."""
    monkeypatch.setattr(package_source, "TRY_AGAIN_S", 0.0)

    async def call(requirement="sample", *, kind="wheel", sha256=None, settings=None, progress=None, **more):
        return await fetch(
            requirement, kind=kind, sha256=sha256, into=tmp_path / "packages",
            index=settings or IndexSettings(indexes=(index.root,)), progress=progress or (lambda line: None), **more,
        )  # fmt: skip

    return call


def files_in(tmp_path):
    """What is in the directory beside locks and notes."""
    return sorted(
        str(path.relative_to(tmp_path / "packages"))
        for path in (tmp_path / "packages").rglob("*")
        if path.is_file() and path.parent.name not in {".locks", ".versions"}
    )


@pytest.mark.parametrize("form", ["html", "json"])
async def test_a_wheel_is_fetched_by_name(index, get, tmp_path, form):
    """Into a directory named by its hash, where handlers find it."""
    ((_, _, sha, _), _) = index.put("sample", (WHEEL, b"wheel"), (SDIST, b"source"), form=form)
    found = await get("Sample")
    assert (found.sha256, found.fetched) == (sha, True)
    assert found.path.read_bytes() == b"wheel"
    assert files_in(tmp_path) == [f"{sha}/{WHEEL}"]
    assert cached_package(sha, tmp_path / "packages") == found.path
    assert (await get("sample==1.0", kind="sdist")).path.read_bytes() == b"source"


async def test_what_is_there_is_not_fetched_again(index, get):
    """A version is not even asked for; the newest is looked up, but taken from the directory."""
    index.put("sample", (WHEEL, b"wheel"))
    first = await get()
    asked = len(index.asked)
    again = await get("sample==1.0")
    by_hash = await get("sample==1.0", sha256=first.sha256)
    assert (again.path, again.fetched, by_hash.path) == (first.path, False, first.path)
    assert len(index.asked) == asked
    assert (await get()).fetched is False
    assert [path for path, _ in index.asked[asked:]] == ["/simple/sample/"]


async def test_one_that_was_changed_is_fetched_again(index, get):
    """What is kept is read through before it is given out."""
    index.put("sample", (WHEEL, b"wheel"))
    first = await get("sample==1.0")
    first.path.write_bytes(b"wheeL")
    again = await get("sample==1.0")
    assert again.fetched
    assert again.path.read_bytes() == b"wheel"


@pytest.mark.parametrize(
    ("names", "requirement", "taken"),
    [
        (["sample-1.9", "sample-1.10", "sample-2.0rc1"], "sample", "sample-1.10"),
        (["sample-2.0rc1", "sample-2.0b1"], "sample", "sample-2.0rc1"),
        (["sample-1.9", "sample-2.0rc1"], "sample==2.0rc1", "sample-2.0rc1"),
        (["sample-1.0.0", "sample-3"], "sample == 1", "sample-1.0.0"),
        (["sample-1", "other-2", "sample_extra-3", "sample-x", "evil"], "sample", "sample-1"),
    ],
)
async def test_the_version_is_the_one_that_pip_takes(index, get, names, requirement, taken):
    """No pre-release where there is another, unless it is asked for."""
    index.put("sample", *((f"{name}-py3-none-any.whl", name.encode()) for name in names))
    assert (await get(requirement)).path.read_bytes() == taken.encode()


@pytest.mark.parametrize("form", ["html", "json"])
async def test_withdrawn_ones_are_for_those_who_name_them(index, get, form):
    """A yanked file is taken for its exact version alone."""
    new, old = "sample-2.0-py3-none-any.whl", WHEEL
    rows = [(new, *index.file(new, b"new"), "bad wheel"), (old, *index.file(old, b"old"), False)]
    index.page("sample", rows, form=form)
    assert (await get()).path.read_bytes() == b"old"
    assert (await get("sample==2.0")).path.read_bytes() == b"new"


async def test_pure_wheels_come_first_and_others_are_read_all_the_same(index, get):
    """Those for another Python, too: they are data."""
    far = "sample-1.0-cp399-cp399-win_amd64.whl"
    index.put("sample", (far, b"far"))
    assert (await get("sample==1.0")).path.read_bytes() == b"far"
    index.put(
        "sample",
        ("sample-1.1-cp399-cp399-manylinux2014_x86_64.whl", b"built"),
        ("sample-1.1-py3-none-any.whl", b"pure"),
    )
    assert (await get("sample==1.1")).path.read_bytes() == b"pure"


@pytest.mark.parametrize(
    ("requirement", "sha256", "code"),
    [
        ("sample>=1", None, "bad_input"),
        ("sample==1.*", None, "bad_input"),
        ("sample @ https://h/x.whl", None, "bad_input"),
        ("../sample", None, "bad_input"),
        ("sample==../../1", None, "bad_input"),
        ("sample[extra]", None, "bad_input"),
        ("", None, "bad_input"),
        ("sample", "00", "bad_input"),
        ("sample==9", None, "package_not_found"),
        ("nothing", None, "package_not_found"),
        ("sample", "0" * 64, "package_mismatch"),
    ],
)
async def test_what_is_not_there_or_no_name_is_told(index, get, tmp_path, requirement, sha256, code):
    """Nothing is left behind."""
    index.put("sample", (WHEEL, b"wheel"))
    with pytest.raises(PackageError) as caught:
        await get(requirement, sha256=sha256)
    assert caught.value.stable_code == code
    assert not (tmp_path / "packages").exists() or files_in(tmp_path) == []


@pytest.mark.parametrize("who", ["index", "caller"])
async def test_a_wrong_hash_is_refused(index, get, tmp_path, who):
    """That of the index, and that of who asks; a page without one needs the caller's."""
    path, right = index.file(WHEEL, b"wheel")
    index.page("sample", [(WHEEL, path, "1" * 64 if who == "index" else None, False)])
    with pytest.raises(PackageError, match=f"has the SHA-256 {right}, and not 1111"):
        await get(sha256=None if who == "index" else "1" * 64)
    assert files_in(tmp_path) == []
    index.page("sample", [(WHEEL, path, None, False)])
    assert (await get(sha256=right)).fetched


async def test_a_hash_finds_its_file_among_others(index, get):
    """The second best wheel of a version, when that is the one that was meant."""
    other = "sample-1.0-cp311-cp311-win_amd64.whl"
    index.put("sample", (WHEEL, b"pure"), (other, b"other"))
    assert (await get("sample==1.0", sha256=hashlib.sha256(b"other").hexdigest())).path.name == other
    # It is no answer to the version alone.
    assert (await get("sample==1.0")).path.name == WHEEL


def endless(handler):
    """A body without an end."""
    handler.send_response(200)
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(b"x" * 65536)
    except OSError:
        pass


def silent(handler):
    """A head, a little, and then nothing."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b"x")
    handler.wfile.flush()
    handler.rfile.read(1)


def cut(handler):
    """Less than was promised."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b"x")


def garbage(handler):
    """No HTTP."""
    handler.wfile.write(b"SSH-2.0-hello\r\n\r\n")


async def test_a_body_without_end_is_bounded(index, get, tmp_path):
    """A file, and a page."""
    index.put("sample", (WHEEL, b"wheel"))
    index.answers[f"/files/{WHEEL}"] = endless
    with pytest.raises(PackageError) as caught:
        await get(bytes_max=1 << 20)
    assert caught.value.stable_code == "package_too_large"
    assert files_in(tmp_path) == []


async def test_a_page_without_end_is_bounded(index, get, monkeypatch):
    """As a file is."""
    monkeypatch.setattr(package_source, "PAGE_BYTES_MAX", 1 << 20)
    index.answers["/simple/sample/"] = endless
    with pytest.raises(PackageError) as caught:
        await get()
    assert caught.value.stable_code == "package_too_large"


@pytest.mark.parametrize("how", [silent, cut, garbage])
async def test_a_server_that_breaks_off_is_asked_again_and_then_given_up(index, get, tmp_path, monkeypatch, how):
    """Three times in all; one that recovers is enough."""
    # One that answers in any way is heard, however busy the machine is.
    monkeypatch.setattr(http_download, "SILENCE_SECONDS_MAX", 0.05 if how is silent else 30)
    index.put("sample", (WHEEL, b"wheel"))
    whole = index.answers[f"/files/{WHEEL}"]
    index.answers[f"/files/{WHEEL}"] = how
    with pytest.raises(PackageError) as caught:
        await get()
    assert (caught.value.stable_code, caught.value.may_retry) == ("index_failed", True)
    with trio.fail_after(10):
        # The server may not have read yet what the client has given up already.
        while [path for path, _ in index.asked].count(f"/files/{WHEEL}") < 3:  # noqa: ASYNC110 - it is a list of a thread
            await trio.sleep(0.01)
    assert [path for path, _ in index.asked].count(f"/files/{WHEEL}") == 3
    assert files_in(tmp_path) == []

    def once(handler):
        index.answers[f"/files/{WHEEL}"] = whole
        how(handler)

    index.answers[f"/files/{WHEEL}"] = once
    assert (await get()).path.read_bytes() == b"wheel"


@pytest.mark.parametrize(("status", "times"), [(500, 3), (429, 3), (403, 1), (410, 1)])
async def test_refusals_are_told_with_their_status(index, get, status, times):
    """Those that may pass are met again."""
    index.answers["/simple/sample/"] = (status, {}, b"no")
    with pytest.raises(PackageError, match=f"answers {status}"):
        await get()
    assert len(index.asked) == times


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"files": [{"filename": 3}]}', b"[" * 100_000])
async def test_a_page_that_is_no_page_is_told(index, get, body):
    """JSON of another shape."""
    index.answers["/simple/sample/"] = (200, {"Content-Type": "application/vnd.pypi.simple.v1+json"}, body)
    with pytest.raises(PackageError, match="is no page of an index"):
        await get()


async def test_names_of_files_can_not_lead_anywhere(index, get, tmp_path):
    """A page can't choose where something is written."""
    path, sha = index.file(WHEEL, b"wheel")
    evil = f"../../{WHEEL}"
    index.page("sample", [(evil, path, sha, False)], form="json")
    with pytest.raises(PackageError, match="no wheel of sample"):
        await get()
    crooked = f"/files/..%2f..%2f{WHEEL}"
    index.answers[crooked] = index.answers[path]
    index.page("sample", [("x", crooked, sha, False)])
    assert (await get()).path == tmp_path / "packages" / sha / WHEEL


async def test_redirects_are_followed_so_far(index, get):
    """Of a page and of a file, relative ones too; not for ever, and nowhere that is no web server."""
    (row,) = index.put("sample", (WHEEL, b"wheel"))
    index.answers["/simple/sample/"], page = (301, {"Location": "moved/"}, b""), index.answers["/simple/sample/"]
    index.answers["/simple/sample/moved/"] = page
    index.answers["/elsewhere"] = index.answers[row[1]]
    index.answers[row[1]] = (302, {"Location": f"http://localhost:{index.port}/elsewhere"}, b"")
    assert (await get()).path.read_bytes() == b"wheel"
    index.answers["/simple/loop/"] = (302, {"Location": "/simple/loop/"}, b"")
    with pytest.raises(PackageError, match="more than 5 redirects"):
        await get("loop")
    index.answers["/simple/file/"] = (302, {"Location": "file:///etc/passwd"}, b"")
    with pytest.raises(PackageError, match="no web server"):
        await get("file")


async def test_a_password_goes_to_its_own_server_alone_and_is_never_shown(index, get):
    """Also not after a redirect, and also not in what is said of a failure."""
    (row,) = index.put("sample", (WHEEL, b"wheel"))
    index.answers["/elsewhere"] = index.answers[row[1]]
    index.answers[row[1]] = (302, {"Location": f"http://localhost:{index.port}/elsewhere"}, b"")
    root = f"http://me:s%40cret@127.0.0.1:{index.port}/simple/"
    said: list[str] = []
    assert (await get(settings=IndexSettings(indexes=(root,)), progress=said.append)).fetched
    sent = {path: headers.get("authorization") for path, headers in index.asked}
    assert sent == {
        "/simple/sample/": "Basic bWU6c0BjcmV0",
        row[1]: "Basic bWU6c0BjcmV0",
        "/elsewhere": None,
    }
    index.answers["/simple/other/"] = (401, {}, b"")
    with pytest.raises(PackageError) as caught:
        await get("other", settings=IndexSettings(indexes=(root,)))
    assert "cret" not in " ".join([caught.value.message, *said])


async def test_without_tls_only_this_machine_and_those_that_are_trusted_are_asked(get):
    """As pip has it."""
    with pytest.raises(PackageError, match=r"index\.invalid would be asked without TLS"):
        await get(settings=IndexSettings(indexes=("http://index.invalid/simple",)))
    with pytest.raises(PackageError, match=r"can't connect to index\.invalid"):
        await get(settings=IndexSettings(indexes=("http://index.invalid/simple",), trusted_hosts=("index.invalid",)))


@pytest.mark.slow
async def test_with_tls_the_authorities_that_were_named_are_trusted(get, tmp_path):
    """And none else; what is served with TLS never leads to what is not."""
    certificate, context = own_certificate(tmp_path)
    with serve_index(context) as index:
        index.put("sample", (WHEEL, b"wheel"))
        trusting = IndexSettings(indexes=(index.root,), certificates=str(certificate))
        with pytest.raises(PackageError, match="no TLS with") as caught:
            await get(settings=IndexSettings(indexes=(index.root,)))
        assert caught.value.may_retry
        assert (await get(settings=trusting)).path.read_bytes() == b"wheel"
        index.answers["/simple/other/"] = (302, {"Location": f"http://127.0.0.1:{index.port}/simple/sample/"}, b"")
        with pytest.raises(PackageError, match="redirects to an address without TLS"):
            await get("other", settings=trusting)
    with pytest.raises(UsageError, match="no-such-file can't be read"):
        await get(settings=IndexSettings(certificates=str(tmp_path / "no-such-file")))


async def test_several_places_are_one(index, get, tmp_path):
    """The newest of all indexes, directories and pages; one that fails is told of and taken nothing from."""
    index.put("sample", (WHEEL, b"one"))
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "sample-1.5-py3-none-any.whl").write_bytes(b"directory")
    local = tmp_path / "local" / "sample"
    local.mkdir(parents=True)
    (tmp_path / "local" / "sample-1.7.tar.gz").write_bytes(b"local")
    (local / "index.html").write_text('<a href="../sample-1.7.tar.gz">x</a>')
    index.answers["/simple/broken/sample/"] = (403, {}, b"")
    said: list[str] = []
    places = IndexSettings(
        indexes=(index.root, f"{index.root}/broken", (tmp_path / "local").as_uri()), links=(str(mine),)
    )  # fmt: skip
    assert (await get(settings=places, progress=said.append)).path.read_bytes() == b"directory"
    assert any("answers 403" in line for line in said)
    assert (await get(kind="sdist", settings=places)).path.read_bytes() == b"local"
    only = IndexSettings(indexes=(), links=(mine.as_uri(),))
    assert (await get("sample==1.5", settings=only)).path.read_bytes() == b"directory"


async def test_two_at_once_fetch_once(index, get):
    """The other one waits, and finds it."""
    index.put("sample", (WHEEL, b"wheel"))
    found = []

    async def one():
        found.append(await get("sample==1.0"))

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(one)
    assert sorted(each.fetched for each in found) == [False, False, False, True]
    assert [path for path, _ in index.asked].count(f"/files/{WHEEL}") == 1


async def test_a_lock_that_stays_is_waited_for_until_the_deadline(index, get, tmp_path, monkeypatch):
    """And not longer."""
    index.put("sample", (WHEEL, b"wheel"))
    monkeypatch.setattr(package_fetch, "LOCK_POLL_S", 0.01)
    said: list[str] = []
    async with package_fetch.alone(tmp_path / "packages", "sample", said.append):
        with pytest.raises(PackageError, match=r"within 0\.05 s"):
            await get(deadline_s=0.05, progress=said.append)
    assert "another process fetches sample; waiting for it" in said
    assert (await get()).fetched


async def test_a_directory_that_can_not_be_written_is_told(index, get, tmp_path):
    """With its name."""
    index.put("sample", (WHEEL, b"wheel"))
    (tmp_path / "packages").write_text("a file")
    with pytest.raises(PackageError, match="packages can't be written"):
        await get()


# --- which index ------------------------------------------------------------------------------------------------------


def conf(path, text):
    """A file of pip's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_settings_it_is_the_public_index(tmp_path):
    """And nothing else."""
    found = settings(
        {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}, tmp_path
    )
    assert found == IndexSettings()
    assert found.indexes == (PUBLIC_INDEX,)


def test_variables_come_before_files_and_pip_before_uv(tmp_path):
    """What binds nearest wins, each setting by itself."""
    conf(
        tmp_path / ".config" / "pip" / "pip.conf",
        "[global]\nindex-url = https://file/simple\nfind-links =\n    /a\n    /b\ncert=/ca.pem\n"
        "[install]\ntrusted_host = h1 h2:81\n",
    )
    conf(tmp_path / "env" / "pip.conf", "[global]\nextra-index-url = https://more/simple\n")
    env = {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path)}
    found = settings(env, tmp_path / "env")
    assert found == IndexSettings(
        indexes=("https://file/simple", "https://more/simple"), links=("/a", "/b"), trusted_hosts=("h1", "h2:81"),
        certificates="/ca.pem",
    )  # fmt: skip
    env |= {
        "UV_DEFAULT_INDEX": "corp=https://uv/simple",
        "UV_INDEX": "x=https://x/s?a=b https://y/s",
        "PIP_NO_INDEX": "0",
    }
    assert settings(env, tmp_path / "none").indexes == ("https://uv/simple", "https://x/s?a=b", "https://y/s")
    env |= {"PIP_INDEX_URL": "https://pip/simple", "PIP_EXTRA_INDEX_URL": "https://e/s"}
    assert settings(env, tmp_path / "none").indexes == ("https://pip/simple", "https://e/s")
    assert settings(env | {"PIP_NO_INDEX": "1"}, tmp_path / "none").indexes == ()


def test_a_file_that_can_not_be_read_is_named_and_not_shown(tmp_path):
    """It may hold a password."""
    conf(tmp_path / "mine.conf", "index-url = https://me:secret@host/simple\n")
    with pytest.raises(UsageError, match=r"mine\.conf can't be read: MissingSectionHeaderError") as caught:
        settings({"PIP_CONFIG_FILE": str(tmp_path / "mine.conf"), "HOME": str(tmp_path)}, tmp_path)
    assert "secret" not in str(caught.value)
