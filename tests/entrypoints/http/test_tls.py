"""HTTPS, and keys that are compared in a time that tells nothing."""

from __future__ import annotations

import hmac
import ssl
import subprocess
from pathlib import Path

import httpx
import openai
import pytest

from octavo.entrypoints.http.server_args import ServerArgs
from octavo.errors import ConfigError
from tests.entrypoints.fake_engine import MODEL, FakeEngine, serving


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(certificate, key) of 127.0.0.1, made by the openssl command."""
    folder = tmp_path_factory.mktemp("tls")
    files = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    try:
        subprocess.run(
            [*command, "-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]],
            check=True, capture_output=True,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("there is no openssl command here")
    return files


def test_the_api_is_served_over_https(engine: FakeEngine, certificate: tuple[str, str]) -> None:
    certfile, keyfile = certificate
    ServerArgs(ssl_certfile=certfile, ssl_keyfile=keyfile).check()
    trusting = ssl.create_default_context(cafile=certfile)
    with serving(engine, ssl_certfile=certfile, ssl_keyfile=keyfile, api_key=["k"]) as url:
        with httpx.Client(verify=trusting) as http:
            client = openai.OpenAI(base_url=url + "/v1", api_key="k", http_client=http, max_retries=0)
            chunks = client.completions.create(model=MODEL, prompt="a", stream=True)
            assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello there"
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(url + "/health")
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http") + "/health", timeout=5)


def test_a_key_that_is_not_the_certificates_is_refused(certificate: tuple[str, str], tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    other.write_text("-----BEGIN PRIVATE KEY-----\nnonsense\n-----END PRIVATE KEY-----\n")
    with pytest.raises(ConfigError, match="not a certificate and its key"):
        ServerArgs(ssl_certfile=certificate[0], ssl_keyfile=str(other)).check()
    with pytest.raises(ConfigError, match="give both or neither"):
        ServerArgs(ssl_certfile=certificate[0]).check()


def test_ciphers_are_openssls(engine: FakeEngine, certificate: tuple[str, str]) -> None:
    flags = {"ssl_certfile": certificate[0], "ssl_keyfile": certificate[1]}
    with pytest.raises(ConfigError, match="--ssl-ciphers no-cipher names no cipher"):
        ServerArgs(**flags, ssl_ciphers="no-cipher").check()
    trusting = ssl.create_default_context(cafile=certificate[0])
    trusting.maximum_version = ssl.TLSVersion.TLSv1_2
    with serving(engine, **flags, ssl_ciphers="ECDHE-RSA-AES256-GCM-SHA384") as url:
        trusting.set_ciphers("ECDHE-RSA-AES256-GCM-SHA384")
        assert httpx.get(url + "/health", verify=trusting).status_code == 200
        trusting.set_ciphers("ECDHE-RSA-AES128-GCM-SHA256")
        with pytest.raises(httpx.ConnectError, match="SSL"):
            httpx.get(url + "/health", verify=trusting)


def test_every_key_is_compared_whole_whatever_was_sent(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[tuple[int, int]] = []

    def compare(sent: bytes, expected: bytes) -> bool:
        lengths.append((len(sent), len(expected)))
        return sent == expected

    monkeypatch.setattr(hmac, "compare_digest", compare)
    with serving(engine, api_key=["one", "a much longer key", "x"]) as url:
        for key, status in (("one", 200), ("x", 200), ("o", 401), ("y" * 5000, 401)):
            lengths.clear()
            assert httpx.get(url + "/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == status
            assert lengths == [(32, 32)] * 3
