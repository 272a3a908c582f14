"""Servers of object storage on this host, and the environment in which real clients find them: for
tests marked `integrations`."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest


@dataclass(frozen=True)
class Server:
    """It has one bucket, `bucket`, in which nothing is."""

    scheme: str
    address: str
    put: Callable[[str, bytes], object]  # makes an object of the bucket


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """moto's, for s3fs."""
    boto3, moto = pytest.importorskip("boto3"), pytest.importorskip("moto.server")
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()  # of another server
    for name, value in (
        ("ACCESS_KEY_ID", "a"),
        ("SECRET_ACCESS_KEY", "b"),
        ("DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    address = "http://{}:{}".format(*running.get_host_and_port())
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")

    def put(name: str, content: bytes) -> None:
        client.put_object(Bucket="bucket", Key=name, Body=content)

    yield Server("s3", address, put)
    running.stop()


@contextmanager
def gs_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """gcp-storage-emulator's, for gcsfs."""
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    # Not importorskip: a run imports gcsfs itself, in its own way.
    if importlib.util.find_spec("gcsfs") is None:
        pytest.skip("gcsfs is not installed")
    running = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    running.start()
    address = "http://{}:{}".format(*running._api._httpd.server_address)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
    # Without credentials, which would be looked for in the network; here, and in jobs that start.
    monkeypatch.setitem(pytest.importorskip("fsspec.config").conf, "gs", {"token": "anon"})
    monkeypatch.setenv("FSSPEC_GS_TOKEN", "anon")

    def put(name: str, content: bytes) -> None:
        where = f"/upload/storage/v1/b/bucket/o?uploadType=media&name={quote(name, safe='')}"
        urlopen(Request(address + where, content, method="POST")).close()

    yield Server("gs", address, put)
    running.stop()


SERVERS = {"s3": s3_server, "gs": gs_server}
