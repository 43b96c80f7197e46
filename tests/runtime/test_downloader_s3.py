"""Downloads from S3 and TOS: real sockets, the S3 server of moto."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import random
import zlib
from typing import TYPE_CHECKING

import pytest
from moto.s3.models import get_canned_acl

from penstock.runtime.downloader import (
    AccessDeniedError,
    DownloadError,
    IntegrityError,
    InvalidArgumentError,
    ModelNotFoundError,
    Options,
    download,
    model_state,
    resolve,
)
from support.runtime.remote import FakeClock, Sent, etag_of, files_of, serving_files
from support.runtime.s3 import ACCESS, BUCKET, S3, S3Request, serving_s3

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20
RANDOM = random.Random(1)
MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "model-00001-of-00002.safetensors": RANDOM.randbytes(3 * MIB + 5),
    "model-00002-of-00002.safetensors": RANDOM.randbytes(70_000),
    "tokenizer/tokenizer.json": b"{}" * 100,
    "empty.txt": b"",
}


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    """A server with the model at `m1/` and another one at `m1x/`."""
    with serving_s3() as server:
        for name, content in MODEL.items():
            server.put(f"m1/{name}", content)
        server.put("m1x/other.json", b"{}")
        server.put("m1/folder/", b"")
        yield server


def fetch(s3: S3, path: str, directory: Path, **extra: object) -> dict[str, bytes]:
    """The files of a download."""
    uri = f"s3://{BUCKET}/{path}"
    options = Options.load(uri, {**ACCESS, "endpoint": s3.url, **extra}, {})
    download(resolve(uri, options), directory)
    return files_of(directory)


@pytest.mark.parametrize("path", ["m1", "m1/"])
def test_prefix_is_downloaded_with_its_folders(s3: S3, tmp_path: Path, path: str) -> None:
    assert fetch(s3, path, tmp_path) == MODEL
    assert model_state(tmp_path) == ("complete", "s3")


def test_key_is_downloaded_as_a_single_file(s3: S3, tmp_path: Path) -> None:
    assert fetch(s3, "m1/config.json", tmp_path) == {"config.json": MODEL["config.json"]}


@pytest.mark.parametrize("path", ["m", "m2/", "m1/config", "m1/none.json"])
def test_path_without_objects_is_not_found(s3: S3, tmp_path: Path, path: str) -> None:
    with pytest.raises(ModelNotFoundError, match="s3://models/"):
        fetch(s3, path, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_prefix_without_objects_can_be_allowed(s3: S3, tmp_path: Path) -> None:
    options = Options.load("s3://", {**ACCESS, "endpoint": s3.url}, {"DOWNLOADER_ALLOW_EMPTY": "1"})
    download(resolve(f"s3://{BUCKET}/none/", options), tmp_path / "m")
    assert files_of(tmp_path / "m") == {}
    assert model_state(tmp_path / "m") == ("complete", "s3")
    with pytest.raises(ModelNotFoundError):  # of an object
        download(resolve(f"s3://{BUCKET}/none", options), tmp_path / "m")


def test_bucket_that_does_not_exist_is_not_found(s3: S3, tmp_path: Path) -> None:
    uri = "s3://no-such-bucket/m1/"
    options = Options.load(uri, {**ACCESS, "endpoint": s3.url}, {})
    with pytest.raises(ModelNotFoundError, match="no such bucket"):
        download(resolve(uri, options), tmp_path)


def test_list_of_objects_has_pages(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "4")
    content = {f"part-{number}+ ~é&%20.json": b"%d" % number for number in range(11)}
    for name, data in content.items():
        s3.put(f"many/{name}", data)
    s3.requests.clear()
    assert fetch(s3, "many/", tmp_path) == content
    assert len(s3.asked("")) == 3


def test_parts_are_ranges_and_fit_together(s3: S3, tmp_path: Path) -> None:
    content = RANDOM.randbytes(200 * 1024)
    s3.put("parts/model.safetensors", content)
    sizes = {"part_threshold": 64 << 10, "part_chunksize": 64 << 10}
    assert fetch(s3, "parts/", tmp_path, **sizes) == {"model.safetensors": content}
    ranges = {request.headers["RANGE"] for request in s3.asked("parts/model.safetensors")}
    expected = {"bytes=0-65535", "bytes=65536-131071", "bytes=131072-196607", "bytes=196608-204799"}
    assert (len(s3.asked("parts/model.safetensors")), ranges) == (4, expected)
    versions = {request.headers["IF_MATCH"] for request in s3.asked("parts/model.safetensors")}
    assert versions == {etag_of(content)}


def test_suffixes_have_blanks_in_the_environment(s3: S3, tmp_path: Path) -> None:
    environment = {"DOWNLOADER_ALLOW_FILE_SUFFIX": "json, safetensors", "AWS_ENDPOINT_URL": s3.url}
    uri = f"s3://{BUCKET}/m1/"
    download(resolve(uri, Options.load(uri, ACCESS, environment)), tmp_path)
    assert files_of(tmp_path).keys() == MODEL.keys() - {"empty.txt"}


def test_changed_object_of_same_size_is_downloaded_again(s3: S3, tmp_path: Path) -> None:
    for content in (b"first", b"again"):
        s3.put("changing/config.json", content)
        s3.put("changing/same.json", b"{}")
        assert fetch(s3, "changing/", tmp_path)["config.json"] == content
    assert len(s3.asked("changing/config.json")) == 2
    assert len(s3.asked("changing/same.json")) == 1


@pytest.mark.parametrize("option", [{"force_download": True}, {"check_file_exist": False}])
def test_forced_download_fetches_all_files(s3: S3, tmp_path: Path, option: dict[str, bool]) -> None:
    s3.put("forced/config.json", b"{}")
    fetch(s3, "forced/", tmp_path)
    fetch(s3, "forced/", tmp_path)
    assert len(s3.asked("forced/config.json")) == 1
    fetch(s3, "forced/", tmp_path, **option)
    assert len(s3.asked("forced/config.json")) == 2
    s3.requests.clear()


def test_object_that_changes_meanwhile_is_downloaded_anew(s3: S3, tmp_path: Path) -> None:
    old, new = RANDOM.randbytes(200_000), RANDOM.randbytes(210_000)
    s3.put("moving/model.safetensors", old)

    def change(request: S3Request) -> None:
        if request.headers.get("RANGE", "").startswith("bytes=131072-") and not has_changed:
            has_changed.append(True)
            s3.put("moving/model.safetensors", new)

    has_changed: list[bool] = []
    s3.faults.append(change)
    sizes = {"part_threshold": 64 << 10, "part_chunksize": 64 << 10, "num_threads": 2}
    try:
        assert fetch(s3, "moving/", tmp_path, **sizes) == {"model.safetensors": new}
    finally:
        s3.faults.clear()
    assert has_changed


def test_object_that_always_changes_is_an_error(s3: S3, tmp_path: Path) -> None:
    s3.put("restless/a.json", b"{}")
    numbers = iter(range(100))

    def change(request: S3Request) -> None:
        if request.path.endswith("/a.json"):
            s3.put("restless/a.json", b"%02d" % next(numbers))

    s3.faults.append(change)
    try:
        with pytest.raises(IntegrityError, match="4 attempts"):
            fetch(s3, "restless/", tmp_path)
    finally:
        s3.faults.clear()
    assert files_of(tmp_path) == {}


@pytest.mark.parametrize("size", [3, 200_000])
def test_content_that_does_not_match_its_etag_is_refused(s3: S3, tmp_path: Path, size: int) -> None:
    stored = s3.put("rotten/x.bin", bytes(size))
    etag = stored.etag.strip('"')
    stored.value, stored._etag = b"x" * size, etag
    sizes = {"part_threshold": 64 << 10, "part_chunksize": 64 << 10}
    with pytest.raises(IntegrityError, match="does not match the checksum"):
        fetch(s3, "rotten/", tmp_path, **sizes)
    assert files_of(tmp_path) == {}
    assert model_state(tmp_path) == ("partial", "s3")


@pytest.mark.parametrize("size", [3, 200_000])
@pytest.mark.parametrize("algorithm", ["SHA256", "SHA1", "CRC32"])
def test_checksum_of_s3_is_verified(s3: S3, tmp_path: Path, algorithm: str, size: int) -> None:
    content = RANDOM.randbytes(size)
    crc = zlib.crc32(content).to_bytes(4, "big")
    digest = crc if algorithm == "CRC32" else hashlib.new(algorithm, content).digest()
    stored = s3.put("summed/x.bin", content)
    stored.checksum_algorithm, stored.checksum_value = algorithm, base64.b64encode(digest).decode()
    stored._etag = "of-a-multipart-upload-2"
    sizes = {"part_threshold": 64 << 10, "part_chunksize": 64 << 10}
    assert fetch(s3, "summed/", tmp_path, **sizes) == {"x.bin": content}
    stored.value = bytes(size)
    with pytest.raises(IntegrityError, match="checksum"):
        fetch(s3, "summed/", tmp_path, **sizes, force_download=True)
    assert files_of(tmp_path) == {"x.bin": content}


@pytest.mark.parametrize("kind", ["COMPOSITE", "aws:kms"])
def test_digest_of_something_else_is_not_compared(s3: S3, tmp_path: Path, kind: str) -> None:
    stored = s3.put("other/x.bin", b"content")
    if kind == "COMPOSITE":
        stored.checksum_algorithm, stored.checksum_value, stored.checksum_parts = "SHA256", "AAAA", 2
        stored.checksum_type, stored._etag = "COMPOSITE", "0123-2"
    else:
        stored.encryption, stored._etag = "aws:kms", "0" * 32
    assert fetch(s3, "other/", tmp_path) == {"x.bin": b"content"}


def test_throttled_requests_are_repeated_after_retry_after(s3: S3, tmp_path: Path) -> None:
    clock = FakeClock()
    answers = iter([("503 Slow Down", "7"), ("429 Too Many", "11"), ("500 Oops", "")])

    def throttle(request: S3Request) -> tuple[str, list[tuple[str, str]]] | None:
        if not request.path.endswith("config.json"):
            return None
        status, seconds = next(answers, ("", ""))
        return (status, [("Retry-After", seconds)] if seconds else []) if status else None

    s3.faults.append(throttle)
    uri = f"s3://{BUCKET}/m1/config.json"
    options = Options.load(uri, {**ACCESS, "endpoint": s3.url}, {})
    try:
        download(resolve(uri, options), tmp_path, clock=clock)
    finally:
        s3.faults.clear()
    assert clock.waits[:2] == [7, 11]
    assert 0 < clock.waits[2] <= 2
    assert files_of(tmp_path) == {"config.json": MODEL["config.json"]}


def test_bucket_of_another_region_is_found(s3: S3, tmp_path: Path) -> None:
    def redirect(request: S3Request) -> tuple[str, list[tuple[str, str]]] | None:
        is_there = "/eu-west-3/s3/" in request.headers["AUTHORIZATION"]
        return None if is_there else ("301 Moved Permanently", [("x-amz-bucket-region", "eu-west-3")])

    s3.faults.append(redirect)
    try:
        assert fetch(s3, "m1/", tmp_path) == MODEL
    finally:
        s3.faults.clear()


@pytest.mark.parametrize("region", ["x@127.0.0.1:1/?", "a.b", "a/b", "a\n", "a" * 65])
def test_region_that_changes_the_host_is_refused(s3: S3, tmp_path: Path, region: str) -> None:
    s3.requests.clear()
    with pytest.raises(InvalidArgumentError) as caught:
        fetch(s3, "m1", tmp_path, region=region)
    assert caught.value.field == "region"
    assert s3.requests == []


def test_region_of_a_response_cannot_change_the_host(s3: S3, tmp_path: Path) -> None:
    s3.requests.clear()
    s3.faults.append(lambda _: ("301 Moved", [("x-amz-bucket-region", "x@127.0.0.1:1/?")]))
    try:
        with pytest.raises(DownloadError):
            fetch(s3, "m1", tmp_path)
    finally:
        s3.faults.clear()
    assert all("x@" not in asked.headers["AUTHORIZATION"] for asked in s3.requests)


def test_refused_credentials_are_access_denied(s3: S3, tmp_path: Path) -> None:
    s3.faults.append(lambda _: ("403 Forbidden", []))
    try:
        with pytest.raises(AccessDeniedError, match="access is denied"):
            fetch(s3, "m1/", tmp_path)
    finally:
        s3.faults.clear()


@pytest.mark.parametrize("extra", [{"ak": "a"}, {"sk": "s"}])
def test_half_of_the_credentials_is_refused(extra: dict[str, str]) -> None:
    environment = {"AWS_ACCESS_KEY_ID": "other", "AWS_SECRET_ACCESS_KEY": "pair", "AWS_SESSION_TOKEN": "t"}
    with pytest.raises(InvalidArgumentError, match="belong together"):
        resolve("s3://b/m", Options.load("s3://b/m", extra, environment))


@pytest.mark.parametrize(
    ("field", "uri"), [("ak", "tos://b/m"), ("model_uri", "s3://b"), ("model_uri", "s3:///m")]
)
def test_missing_part_of_the_location_is_refused(field: str, uri: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        resolve(uri, Options.load(uri, {}, {}))
    assert caught.value.field == field


def test_credentials_come_from_the_chain_of_botocore(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = AKIAPROFILE\naws_secret_access_key = x\naws_session_token = token\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    uri = f"s3://{BUCKET}/m1/config.json"
    s3.requests.clear()
    download(resolve(uri, Options.load(uri, {"endpoint": s3.url}, {})), tmp_path / "m")
    assert {request.headers["X_AMZ_SECURITY_TOKEN"] for request in s3.requests} == {"token"}
    assert all("AKIAPROFILE" in request.headers["AUTHORIZATION"] for request in s3.requests)


def test_keys_of_a_list_without_an_encoding_are_literal(tmp_path: Path) -> None:
    key = "m/a+b%20.json"
    item = f"<Contents><Key>{key}</Key><Size>2</Size></Contents>"
    with serving_files() as server:
        server.files["/b/" + key] = b"{}"
        page = Sent(200, f"<ListBucketResult>{item}</ListBucketResult>".encode())
        server.faults.append(lambda asked: page if "list-type" in asked.query else None)
        options = Options.load("s3://b/m", {**ACCESS, "endpoint": server.url}, {})
        download(resolve("s3://b/m", options), tmp_path, clock=FakeClock())
    assert files_of(tmp_path) == {"a+b%20.json": b"{}"}


def test_public_bucket_needs_no_credentials(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    s3.put("public/config.json", b"{}").set_acl(get_canned_acl("public-read"))
    uri = f"s3://{BUCKET}/public/config.json"
    s3.requests.clear()
    download(resolve(uri, Options.load(uri, {"endpoint": s3.url}, {})), tmp_path / "m")
    assert not any("AUTHORIZATION" in request.headers for request in s3.requests)


def test_signatures_are_those_of_boto3(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same request of boto3 at the same time has the same signature."""
    import boto3
    from botocore import auth

    moment = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    monkeypatch.setattr(auth, "get_current_datetime", lambda **_: moment.replace(tzinfo=None))
    key = "m1/tokenizer/tokenizer.json"
    s3.requests.clear()
    fetch(s3, key, tmp_path)
    client = boto3.client(
        "s3",
        endpoint_url=s3.url,
        region_name=ACCESS["region"],
        aws_access_key_id=ACCESS["ak"],
        aws_secret_access_key=ACCESS["sk"],
    )
    client.get_object(Bucket=BUCKET, Key=key, ChecksumMode="ENABLED")
    ours, theirs = (request.headers["AUTHORIZATION"] for request in s3.asked(key))
    assert ours == theirs


@pytest.mark.parametrize(
    ("uri", "endpoint", "host"),
    [
        ("s3://models/m/", "http://s3.eu-west-1.amazonaws.com", "models.s3.eu-west-1.amazonaws.com"),
        ("s3://my.models/m/", "http://s3.eu-west-1.amazonaws.com", "s3.eu-west-1.amazonaws.com"),
        ("s3://models/m/", "http://minio.example:9000", "minio.example:9000"),
        ("tos://models/m/", "http://tos-s3-cn-beijing.volces.com", "models.tos-s3-cn-beijing.volces.com"),
        ("tos://models/m/", "http://tos-cn-beijing.volces.com", "models.tos-s3-cn-beijing.volces.com"),
    ],
)
def test_bucket_is_in_the_host_or_the_path(
    uri: str, endpoint: str, host: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A proxy sees the host."""
    with serving_files() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "")
        options = Options.load(uri, {"ak": "a", "sk": "s", "endpoint": endpoint}, {})
        with pytest.raises(ModelNotFoundError):
            download(resolve(uri, options), tmp_path / "m")
        assert {asked.headers["Host"] for asked in proxy.requests} == {host}
        regions = {asked.headers["Authorization"].split("/")[2] for asked in proxy.requests}
    assert regions == {"cn-beijing" if uri.startswith("tos") else "us-east-1"}


def test_tos_is_downloaded_through_its_s3_interface(s3: S3, tmp_path: Path) -> None:
    environment = {
        "TOS_ACCESS_KEY": "a",
        "TOS_SECRET_KEY": "s",
        "TOS_ENDPOINT": s3.url,
        "TOS_REGION": "cn-beijing",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
    }
    uri = f"tos://{BUCKET}/m1/"
    path = download(resolve(uri, Options.load(uri, {}, environment)), tmp_path)
    assert files_of(path) == MODEL
    assert model_state(path) == ("complete", "tos")
