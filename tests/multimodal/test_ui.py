"""The page at /ui over a model that sees: pictures by button, drop and paste."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server, served
from tests.e2e.test_ui import browser, finish, open_page, say, sync_api, until
from tests.multimodal.conftest import encoded, picture

__all__ = ["browser"]

pytestmark = pytest.mark.slow

PNG = encoded(picture(0))
SCRIPT = """([picture, kind]) => {
  const data = new DataTransfer();
  const bytes = Uint8Array.from(atob(picture), (c) => c.charCodeAt(0));
  data.items.add(new File([bytes], `${kind}.png`, { type: "image/png" }));
  data.items.add(new File(["no"], "no.txt", { type: "text/plain" }));
  const event = kind === "drop"
    ? new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true })
    : new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
  document.getElementById("prompt").dispatchEvent(event);
}"""


@pytest.fixture(scope="module")
def server(browser: sync_api.Browser, tmp_path_factory: pytest.TempPathFactory, llava: Path) -> Iterator[Server]:
    with served(
        tmp_path_factory.mktemp("ui"), "--model", str(llava), "--served-model-name", "llava", "--dtype", "float32",
        "--limit-mm-per-prompt", '{"image": 3}', "--num-gpu-blocks-override", "64", "--max-model-len", "256",
    ) as server:  # fmt: skip
        yield server


def attached(page: sync_api.Page, number: int) -> None:
    until(page, f"document.querySelectorAll('#media li').length === {number}")


@pytest.mark.long
def test_pictures_go_with_a_message(browser: sync_api.Browser, server: Server) -> None:
    for page in open_page(browser, server.url):
        page.wait_for_selector("#attach:not([hidden])")
        page.click("#settings summary")
        page.fill("#max_tokens", "4")
        page.set_input_files("#files", {"name": "chosen.png", "mimeType": "image/png", "buffer": PNG})
        attached(page, 1)
        for number, way in enumerate(("drop", "paste"), 2):
            page.evaluate(SCRIPT, [base64.b64encode(PNG).decode(), way])
            attached(page, number)  # and no text
        page.click("[aria-label='Remove drop.png']")
        attached(page, 2)
        with page.expect_request("**/v1/chat/completions") as asked:
            say(page, "What is it?")
        finish(page, 1)
        attached(page, 0)
        address = "data:image/png;base64," + base64.b64encode(PNG).decode()
        part = {"type": "image_url", "image_url": {"url": address}}
        expected = [part, part, {"type": "text", "text": "What is it?"}]
        assert json.loads(asked.value.post_data)["messages"] == [{"role": "user", "content": expected}]
        assert page.locator("article.user img").count() == 2
        until(page, "[...document.querySelectorAll('article.user img')].every((e) => e.naturalWidth > 0)")


@pytest.mark.long
def test_a_picture_that_is_refused_can_be_sent_again(browser: sync_api.Browser, server: Server) -> None:
    for page in open_page(browser, server.url):
        page.wait_for_selector("#attach:not([hidden])")
        page.set_input_files("#files", {"name": "broken.png", "mimeType": "image/png", "buffer": PNG[:40]})
        attached(page, 1)
        page.press("#prompt", "Enter")
        page.wait_for_selector("[role=alert]")
        attached(page, 1)
        page.click("#clear")
        attached(page, 0)
