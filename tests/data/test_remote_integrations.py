"""Token files in a real S3 server (moto's), read by s3fs, and in a real GCS server
(gcp-storage-emulator's), read by gcsfs, in forked workers. `make test-integrations`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from meshtrain.errors import InputError
from tests.data import test_remote
from tests.data.conftest import Opener
from tests.data.test_remote import batches, goes_on_as_from_a_disk
from tests.object_servers import SERVERS

pytestmark = pytest.mark.integrations
folder = test_remote.folder


@pytest.fixture(params=SERVERS)
def url(
    request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    with SERVERS[request.param](monkeypatch) as server:
        for file in folder.iterdir():
            server.put(f"tokens/{file.name}", file.read_bytes())
        yield f"{server.scheme}://bucket/tokens"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cache_gib", [1.0, 7 / 2**20])
def test_samples_are_those_of_the_folder(
    cache_gib: float, url: str, folder: Path, opened: Opener
) -> None:
    expected = batches(opened, folder)
    assert batches(opened, url, workers=2, cache_gib=cache_gib) == expected
    assert batches(opened, url, cache_gib=cache_gib) == expected


@pytest.mark.timeout(300)
def test_a_run_goes_on_as_from_a_disk(url: str, folder: Path, tmp_path: Path) -> None:
    goes_on_as_from_a_disk(url, folder, tmp_path)


def test_what_is_not_there_is_said(url: str, opened: Opener) -> None:
    with pytest.raises(InputError, match=rf"^there is no {url}s/header.json: data.path is the URL"):
        opened(source="tokens", path=f"{url}s", seq_len=32)
    elsewhere = url.replace("bucket", "another")
    with pytest.raises(InputError, match=rf"^there is no {elsewhere}/header.json: data.path"):
        opened(source="tokens", path=elsewhere, seq_len=32)
