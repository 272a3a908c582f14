"""Uploads to a real S3 server (moto's) by s3fs. `make test-integrations`."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshtrain.checkpoint.directory import name_of
from meshtrain.checkpoint.retention import Retention
from meshtrain.checkpoint.upload import Uploads
from meshtrain.checkpoint.verify import verify
from tests.checkpoint.going_on import Case, alone, faster, small_run
from tests.checkpoint.kill import rows

pytestmark = pytest.mark.integrations
URL = "s3://bucket/prefix"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server that has it."""
    boto3, server = pytest.importorskip("boto3"), pytest.importorskip("moto.server")
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()  # of another server
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    address = "http://{}:{}".format(*running.get_host_and_port())
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    boto3.client("s3").create_bucket(Bucket="bucket")
    yield address
    running.stop()


def test_a_run_goes_on_from_s3(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder is lost, and of the newest checkpoint in the bucket a file was exchanged."""
    import boto3

    faster()
    config = str(small_run(tmp_path))
    options = ("checkpoint.every=2", "data.workers=0")
    assert alone(Case(config, (*options, f"train.output={tmp_path}/whole"))) == {"status": 0}
    case = (*options, f"train.output={tmp_path}/run", f"checkpoint.upload={URL}")
    assert alone(Case(config, case, interrupt="end", at=7))["status"] == 1
    uploads = Uploads(URL, Retention())
    uploads.offer(tmp_path / "run" / "checkpoints")
    assert uploads.wait()
    assert uploads.steps() == [2, 4, 6]
    client = boto3.client("s3")
    client.put_object(Bucket="bucket", Key="prefix/step_0000006/rank_00000.safetensors", Body=b"something else")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    capsys.readouterr()
    assert alone(Case(config, case)) == {"status": 0}
    out = capsys.readouterr().out
    assert f"{URL}/step_0000006 is passed over" in out
    assert f"step_0000004 was brought from {URL}" in out
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    assert uploads.steps() == [4, 6, 8]
    assert verify(uploads.fetch(8, tmp_path / "back")) == []


def test_a_bucket_that_is_not_there_costs_lines(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faster()
    options = ("checkpoint.every=4", "data.workers=0", "checkpoint.upload=s3://another/prefix")
    assert alone(Case(str(small_run(tmp_path)), options)) == {"status": 0}
    out = capsys.readouterr().out
    assert "warning: the upload to s3://another/prefix failed: FileNotFoundError" in out
    assert not verify(tmp_path / "run" / "checkpoints" / name_of(8))


def test_a_server_that_is_gone(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a checkpoint of its own a run would begin anew, which nobody wants."""
    faster()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    refused = alone(Case(str(small_run(tmp_path)), ("data.workers=0", "checkpoint.upload=s3://elsewhere/prefix")))
    assert refused["status"] == 2
    assert "s3://elsewhere/prefix cannot be asked for checkpoints" in refused["error"]
