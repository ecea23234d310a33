"""The gateway's page in a real Chromium: a gateway in front of a server that stands still when it is told to."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import GATEWAY, Server, running_server
from tests.e2e.test_ui import axe, browser, open_page, sync_api, until, violations
from tests.entrypoints.fake_engine import FakeEngine, serving
from tests.waiting import wait_until, within

pytestmark = pytest.mark.slow
__all__ = ["axe", "browser"]  # the fixtures

KEY = "admin-key"


@pytest.fixture(scope="module")
def engine(tiny_tokenizer: Path) -> FakeEngine:
    return FakeEngine(tiny_tokenizer)


@pytest.fixture(scope="module")
def address(browser: sync_api.Browser, engine: FakeEngine) -> Iterator[str]:
    with serving(engine, disable_log_requests=True) as address:
        yield address


@pytest.fixture(scope="module")
def gateway(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("gateway")
    models = {
        "chat": {"addresses": [address], "served_model_name": "org/fake", "aliases": ["gpt-4o-mini"]},
        "asleep": {"memory_gib": 2},
    }
    (folder / "models.yaml").write_text(json.dumps({"models": models}))  # JSON is YAML
    with running_server(
        folder, "--catalogue", str(folder / "models.yaml"), "--memory-gib", "3", command=GATEWAY
    ) as one:
        yield one


def ask(gateway: Server, **fields: object) -> urllib.request.Request:
    body = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return urllib.request.Request(
        f"{gateway.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )


@pytest.mark.long
def test_models_replicas_memory_and_requests_are_shown_live(
    browser: sync_api.Browser, gateway: Server, engine: FakeEngine, address: str
) -> None:
    for page in open_page(browser, gateway.url):
        page.wait_for_selector("#status[data-state=ready]")
        assert page.locator("#models h3").all_inner_texts() == ["chat\nready", "asleep\nstopped"]
        assert "gpt-4o-mini" in page.inner_text("#models")
        assert address in page.inner_text(".replicas")
        assert page.inner_text("#memory") == "0of 3 GiB"
        engine.is_paused = True
        asking = threading.Thread(target=lambda: urllib.request.urlopen(ask(gateway), timeout=within(60)).read())
        asking.start()
        until(page, "document.getElementById('in-flight').textContent === '1'")
        assert "1 answering" in page.inner_text(".replicas")
        engine.is_paused = False
        asking.join()
        until(page, "document.getElementById('in-flight').textContent === '0'")
        until(page, "document.getElementById('first-byte').textContent !== '–'")
        until(page, "document.querySelector('#totals').textContent.startsWith('Since the start: 1 answers')")
        assert page.is_hidden("#keys-section")


@pytest.mark.long
@pytest.mark.parametrize("width", [320, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_phones_follows_the_system_and_axe_finds_no_violation(
    browser: sync_api.Browser, gateway: Server, axe: Path, width: int, scheme: str
) -> None:
    size = {"width": width, "height": 700}
    for page in open_page(browser, gateway.url, viewport=size, color_scheme=scheme, bypass_csp=True):
        page.wait_for_selector("#status[data-state=ready]")
        page.wait_for_selector(f"html[data-theme={scheme}]")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("(e => e.scrollWidth - e.clientWidth)(document.querySelector('main'))") <= 0
        assert violations(page, axe) == []


@pytest.mark.long
def test_the_admin_port_asks_for_its_key_and_shows_what_clients_keys_have_used(
    browser: sync_api.Browser, address: str, tmp_path: Path
) -> None:
    models = {"chat": {"addresses": [address], "served_model_name": "org/fake"}}
    (tmp_path / "models.yaml").write_text(json.dumps({"models": models}))
    flags = ("--catalogue", str(tmp_path / "models.yaml"), "--keys", str(tmp_path / "keys.db"), "--admin-port", "0")
    with running_server(tmp_path, *flags, "--admin-key", KEY, command=GATEWAY) as gateway:
        said = "the admin routes listen at "
        wait_until(lambda: said in gateway.log.read_text(), gateway.log.read_text)
        admin = gateway.log.read_text().partition(said)[2].split()[0]
        made = urllib.request.Request(f"{admin}/keys", b'{"name": "team"}', {"Authorization": f"Bearer {KEY}"})
        secret = json.load(urllib.request.urlopen(made))["key"]
        request = ask(gateway, max_tokens=3)
        request.add_header("Authorization", f"Bearer {secret}")
        urllib.request.urlopen(request).read()
        for page in open_page(browser, admin):
            page.wait_for_selector("#status[data-state=down]")
            assert page.inner_text("#status") == "API key needed"
            until(page, "document.activeElement.id === 'key'")
            page.fill("#key", KEY)
            page.press("#key", "Tab")
            page.wait_for_selector("#status[data-state=ready]")
            assert page.is_hidden("#ask-key")
            cells = page.locator("#keys tr").first.locator("th, td").all_inner_texts()
            assert cells[:2] == ["team", "1"] and cells[3] == "3"
