"""`get`, against a server on this machine."""

import hashlib
import io
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from natgrad_lab.data import SOURCES, DataError, RemoteFile, archive, command, get
from natgrad_lab.data.follow import Lines

CONTENT = bytes(range(256)) * 4000


class Server(ThreadingHTTPServer):
    """Serves `files`; can ignore ranges or break off."""

    files: dict[str, bytes]
    ranges: list[str | None]
    obey_ranges = True
    break_after: int | None = None


class Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        body = self.server.files.get(self.path)
        if body is None:
            self.send_error(404)
            return
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        start = 0
        if wanted and self.server.obey_ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
        if start >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start:][: self.server.break_after])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    served = Server(("127.0.0.1", 0), Handler)
    served.files, served.ranges = {"/a.bin": CONTENT}, []
    thread = threading.Thread(target=served.serve_forever, args=(0.01,))
    thread.start()
    yield served
    served.shutdown()
    thread.join()
    served.server_close()


def remote(server: Server, path: str = "/a.bin", **settings) -> RemoteFile:
    body = server.files.get(path, b"")
    return RemoteFile(
        url=f"http://127.0.0.1:{server.server_port}{path}",
        sha256=hashlib.sha256(body).hexdigest(),
        size=len(body),
        **settings,
    )


def fetch(root: Path, *files: RemoteFile, progress=None) -> Path:
    return get("it", root, progress, sources={"it": files})


def test_a_file_arrives_with_progress(server, tmp_path):
    told = []
    fetch(
        tmp_path, remote(server, folder="sub"), progress=lambda *now: told.append(now)
    )
    assert (tmp_path / "sub" / "a.bin").read_bytes() == CONTENT
    assert not list(tmp_path.rglob("*.part"))
    assert told[-1] == ("a.bin", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


class Terminal(io.StringIO):
    """Takes what is written; says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def asked(server, tmp_path, monkeypatch) -> str:
    """What `natgrad data get` writes to its standard error, whatever that is."""
    monkeypatch.setitem(SOURCES, "cifar10", (remote(server),))
    assert command.main(["get", "cifar10", "--root", str(tmp_path)]) == 0
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert isinstance(sys.stderr, io.StringIO)
    return sys.stderr.getvalue()


def test_a_terminal_shows_a_bar(server, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    shown = asked(server, tmp_path, monkeypatch)
    assert "a.bin" in shown
    assert "━" in shown
    assert "1.0/1.0 MB" in shown


def test_without_a_terminal_there_are_plain_lines(server, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    lines = asked(server, tmp_path, monkeypatch).splitlines()
    assert all(line.startswith("a.bin: ") for line in lines)
    assert lines[-1] == "a.bin: 1.0 of 1.0 MB (100 %)"
    assert "\x1b" not in "".join(lines)


def test_lines_come_at_every_tenth_or_after_ten_seconds(capsys):
    now = 0.0
    follow = Lines(clock=lambda: now)
    for done in range(0, 1001, 10):
        follow("big", done * 10**6, 1000 * 10**6)
    assert len(capsys.readouterr().err.splitlines()) == 11
    follow("slow", 0, 10**9)
    for second in range(1, 41):
        now = float(second)
        follow("slow", second, 10**9)
    written = capsys.readouterr().err.splitlines()
    assert written == ["slow: 0.0 of 1000.0 MB (0 %)"] * 5


def test_images_that_are_read_soon_are_not_told(capsys):
    now = 0.0
    follow = Lines("images", clock=lambda: now)
    for second in range(5):
        now = float(second)
        follow("mean image", 1000 * second, 4000)
    assert capsys.readouterr().err.splitlines() == [
        "mean image: 2,000 of 4,000 images (50 %)",
        "mean image: 3,000 of 4,000 images (75 %)",
        "mean image: 4,000 of 4,000 images (100 %)",
    ]


def test_a_file_that_is_there_is_not_asked_for(server, tmp_path):
    fetch(tmp_path, remote(server))
    fetch(tmp_path, remote(server))
    assert len(server.ranges) == 1


def test_a_damaged_file_is_replaced(server, tmp_path):
    (tmp_path / "a.bin").write_bytes(b"damaged")
    fetch(tmp_path, remote(server))
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_broken_download_goes_on_from_there(server, tmp_path):
    server.break_after = 500_000
    with pytest.raises(DataError, match=r"a\.bin could not be.*Run the same command"):
        fetch(tmp_path, remote(server))
    assert not (tmp_path / "a.bin").exists()
    server.break_after = None
    fetch(tmp_path, remote(server))
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=500000-"]


def test_a_server_without_ranges_starts_over(server, tmp_path):
    server.obey_ranges = False
    (tmp_path / "a.bin.part").write_bytes(b"x" * 1000)
    fetch(tmp_path, remote(server))
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_wrong_hash_is_refused_and_deleted(server, tmp_path):
    wrong = replace(remote(server), sha256="0" * 64)
    with pytest.raises(DataError, match=f"a.bin is not the file.*not {'0' * 64}"):
        fetch(tmp_path, wrong)
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_file_with_a_wrong_beginning_is_refused_then_mended(server, tmp_path):
    (tmp_path / "a.bin.part").write_bytes(b"x" * 1000)
    with pytest.raises(DataError, match="not the file expected"):
        fetch(tmp_path, remote(server))
    fetch(tmp_path, remote(server))
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_part_longer_than_the_servers_file_is_dropped(server, tmp_path):
    longer = replace(remote(server), size=len(CONTENT) + 10)
    part = tmp_path / "a.bin.part"
    part.write_bytes(CONTENT + b"1")
    with pytest.raises(DataError, match="416"):
        fetch(tmp_path, longer)
    assert not part.exists()


def test_a_longer_file_than_expected_is_not_read_to_its_end(server, tmp_path):
    told = []
    short = replace(remote(server), size=1000)
    with pytest.raises(DataError, match="not the file expected"):
        fetch(tmp_path, short, progress=lambda *now: told.append(now))
    assert len(told) == 1


def test_a_missing_file_names_the_address(server, tmp_path):
    gone = replace(remote(server), url=remote(server).url.replace("a.bin", "b.bin"))
    with pytest.raises(DataError, match=r"/b\.bin: the server says 404"):
        fetch(tmp_path, gone)


def test_an_unreachable_server_is_an_error_to_read(server, tmp_path):
    file = replace(remote(server), url="http://127.0.0.1:9/a.bin")
    with pytest.raises(DataError, match=r"a\.bin could not be downloaded from"):
        fetch(tmp_path, file)


def test_only_http_is_allowed():
    with pytest.raises(ValueError, match="Must be http or https"):
        RemoteFile(url="file:///etc/passwd", sha256="0" * 64, size=1)


def test_archives_are_unpacked(server, tmp_path):
    server.files["/a.tar.gz"] = tar({"folder/x.txt": b"hello"})
    fetch(tmp_path, remote(server, "/a.tar.gz", unpack=True))
    assert (tmp_path / "folder" / "x.txt").read_bytes() == b"hello"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("digits", "come with scikit-learn"),
        ("imagenet", "image-net.org"),
        ("mnist", "Must be one of cifar10, fashion_mnist"),
    ],
)
def test_what_cannot_be_had_is_explained(name, message, tmp_path):
    with pytest.raises(DataError, match=message):
        get(name, tmp_path)


def test_the_table_is_well_formed():
    for files in SOURCES.values():
        assert all(int(f.sha256, 16) and f.size > 0 for f in files)


def tar(files: dict[str, bytes], *members: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive_file:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive_file.addfile(info, io.BytesIO(content))
        for member in members:
            archive_file.addfile(member)
    return out.getvalue()


def link(kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo("folder/link")
    info.type, info.linkname = kind, "/etc/passwd"
    return info


def special() -> tarfile.TarInfo:
    info = tarfile.TarInfo("device")
    info.type = tarfile.CHRTYPE
    return info


GOOD = {"folder/good": b"fine"}
UNSAFE = {
    "parent": tar(GOOD | {"../evil": b"!"}),
    "hidden parent": tar(GOOD | {"folder/../../evil": b"!"}),
    "absolute": tar(GOOD | {"/tmp/evil": b"!"}),
    "windows": tar(GOOD | {"..\\evil": b"!"}),
    "drive": tar(GOOD | {"C:evil": b"!"}),
    "symbolic link": tar(GOOD, link(tarfile.SYMTYPE)),
    "hard link": tar(GOOD, link(tarfile.LNKTYPE)),
    "device": tar(GOOD, special()),
}


@pytest.mark.parametrize("content", UNSAFE.values(), ids=UNSAFE.keys())
def test_unsafe_archives_leave_nothing(content, tmp_path):
    path, folder = tmp_path / "a.tar.gz", tmp_path / "in" / "here"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.tar\.gz is unsafe"):
        archive.extract(path, folder)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a.tar.gz", "here", "in"]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_bytes": 99}, "over 99 bytes"),
        ({"max_files": 1}, "more than 1 members"),
    ],
)
def test_too_large_archives_are_refused(limits, message, tmp_path):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(tar({"x": b"1" * 50, "y": b"2" * 50}))
    with pytest.raises(DataError, match=message):
        archive.extract(path, tmp_path / "out", **limits)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    "content",
    [b"no archive", tar({"x": b"1" * 5000})[:-20]],
    ids=["no archive", "cut"],
)
def test_damaged_archives_are_named(content, tmp_path):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a.tar.gz cannot be unpacked.*again"):
        archive.extract(path, tmp_path / "out")


def test_unpacking_replaces_what_was_there(tmp_path):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(tar({"folder/x": b"new"}))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").write_bytes(b"old and longer")
    archive.extract(path, tmp_path)
    assert (tmp_path / "folder" / "x").read_bytes() == b"new"
