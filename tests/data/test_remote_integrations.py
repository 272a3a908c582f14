"""Token files in a real S3 server (moto's), read by s3fs in forked workers. `make
test-integrations`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data import test_remote
from tests.data.conftest import Opener
from tests.data.test_remote import batches

pytestmark = pytest.mark.integrations
folder = test_remote.folder


@pytest.fixture
def url(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    boto3, server = pytest.importorskip("boto3"), pytest.importorskip("moto.server")
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()  # of another server
    for name, value in (
        ("ACCESS_KEY_ID", "a"),
        ("SECRET_ACCESS_KEY", "b"),
        ("DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*running.get_host_and_port()))
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    for file in folder.iterdir():
        client.upload_file(str(file), "bucket", f"tokens/{file.name}")
    yield "s3://bucket/tokens"
    running.stop()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cache_gib", [1.0, 7 / 2**20])
def test_samples_are_those_of_the_folder(
    cache_gib: float, url: str, folder: Path, opened: Opener
) -> None:
    expected = batches(opened, folder)
    assert batches(opened, url, workers=2, cache_gib=cache_gib) == expected
    assert batches(opened, url, cache_gib=cache_gib) == expected
