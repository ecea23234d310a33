"""The page at /ui in a real Chromium, over a real server with the default model."""

from __future__ import annotations

import json
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server, running_server
from tests.entrypoints.fake_engine import FakeEngine, serving
from tests.installing import why_not
from tests.waiting import wait_until

sync_api = pytest.importorskip("playwright.sync_api", reason="the page's tests need the package playwright")
pytestmark = pytest.mark.slow

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TIMEOUT_MS = 30_000


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    if CHROMIUM is None:
        pytest.skip("the page's tests need Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(browser: sync_api.Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--max-model-len", "1024", "--num-gpu-blocks-override", "600", "--check-invariants")
    with running_server(tmp_path_factory.mktemp("ui"), *flags) as server:
        yield server


@pytest.fixture
def page(browser: sync_api.Browser, server: Server) -> Iterator[sync_api.Page]:
    yield from open_page(browser, server.url)


def open_page(browser: sync_api.Browser, url: str, **options: object) -> Iterator[sync_api.Page]:
    """A page of a fresh profile, closed after use; whatever its console calls an error fails the test."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url + "/ui")
    yield page
    context.close()
    # A refused request is the browser's error too, and some tests ask for one.
    assert [error for error in errors if "Failed to load resource" not in error] == []


def say(page: sync_api.Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def until(page: sync_api.Page, condition: str) -> None:
    """Return when the JavaScript is true. `wait_for_function` would evaluate it in a way that the policy refuses."""
    wait_until(lambda: page.evaluate(condition), of_what=lambda: condition)


def finish(page: sync_api.Page, number: int) -> str:
    """The text of the last answer, once there are so many and none is under way."""
    until(page, f"document.querySelectorAll('article.assistant[aria-busy=false]').length === {number}")
    return page.locator("article.assistant .text").last.inner_text()


@pytest.mark.long
def test_a_conversation_streams_stops_and_goes_on(page: sync_api.Page) -> None:
    page.wait_for_selector("#status[data-state=ready]")
    assert page.evaluate("document.activeElement.id") == "prompt"
    say(page, "What is the capital of France?")
    assert "Paris" in finish(page, 1)
    assert "tokens/s" in page.locator("article.assistant .meta").inner_text()

    page.click("#settings summary")
    page.fill("#system", "Be brief.")
    page.fill("#temperature", "0.5")
    page.fill("#seed", "3")
    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, "Write a very long story about the sea, with many chapters.")
    body = json.loads(asked.value.post_data)
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]
    assert (body["temperature"], body["seed"]) == (0.5, 3)
    assert "top_p" not in body
    until(page, "document.querySelectorAll('article.assistant .text')[1]?.textContent.length > 20")
    assert page.get_attribute("article.assistant >> nth=1", "aria-busy") == "true"  # it is shown while it comes
    assert page.inner_text("#send") == "Stop"
    page.click("#send")
    kept = finish(page, 2)
    assert "stopped" in page.locator("article.assistant .meta").last.inner_text()
    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, "Thank you.")
    assert json.loads(asked.value.post_data)["messages"][4]["content"].strip() == kept.strip()
    finish(page, 3)
    page.click("#clear")
    assert page.locator("article").count() == 0


@pytest.mark.long
def test_errors_are_shown_and_the_question_is_kept(page: sync_api.Page) -> None:
    page.click("#settings summary")
    page.fill("#max_tokens", "5000")
    say(page, "Hello")
    page.wait_for_selector("[role=alert]")
    assert "max_tokens is 5000" in page.inner_text("[role=alert]")
    assert page.input_value("#prompt") == "Hello"
    page.fill("#max_tokens", "5")
    page.press("#prompt", "Enter")
    assert finish(page, 1)


@pytest.mark.long
def test_an_answer_follows_a_schema(page: sync_api.Page) -> None:
    page.wait_for_selector("#status[data-state=ready]")
    page.click("#settings summary")
    page.fill("#schema", "{no json")
    say(page, "Name a colour.")
    assert "JSON schema of the answer cannot be read" in page.inner_text("[role=alert]")
    assert page.evaluate("document.activeElement.id") == "schema"
    assert page.locator("article").count() == 0 and page.input_value("#prompt") == "Name a colour."
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"],
              "additionalProperties": False}  # fmt: skip
    page.fill("#schema", json.dumps(schema))
    page.press("#prompt", "Enter")
    assert json.loads(finish(page, 1))["colour"] in ("red", "green")


MARKDOWN = """# Sums
Call `sum()`, **not `add`**:

1. one <b>&amp;</b>
2. 2 * 3 * 4, a*b*c
  - *deep*\r

* point
After it
and on ```py
x = "**no**"
```
end **open"""


@pytest.mark.long
def test_markdown_is_shown_and_stays_text(page: sync_api.Page) -> None:
    page.evaluate(
        """async (text) => {
            const { renderMarkdown } = await import(new URL("ui/markdown.js", location.href));
            const shown = document.createElement("div");
            shown.id = "shown";
            document.body.append(shown);
            renderMarkdown(shown, text);
        }""",
        MARKDOWN,
    )
    assert page.inner_html("#shown").replace(' class=""', "") == (
        '<p class="heading">Sums</p>Call <code>sum()</code>, <strong>not <code>add</code></strong>:\n'
        '<ol start="1"><li>one &lt;b&gt;&amp;amp;&lt;/b&gt;</li><li>2 * 3 * 4, a*b*c</li></ol>'
        '<ul><li class="deeper"><em>deep</em></li><li>point</li></ul>'
        'After it\nand on <pre tabindex="0">x = "**no**"\n</pre>end **open'
    )


def stream_of(*deltas: dict[str, object]) -> str:
    """A streamed chat completion, as the server writes it."""
    chunks = [json.dumps({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
    return "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"])


@pytest.mark.long
def test_reasoning_and_calls_are_shown_and_results_sent(page: sync_api.Page) -> None:
    page.wait_for_selector("#status[data-state=ready]")
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city"'}}
    rest = {"index": 0, "function": {"arguments": ': "Paris"}'}}
    answers = [
        stream_of(
            {"reasoning_content": "Which "},
            {"reasoning_content": "city?"},
            {"tool_calls": [call]},
            {"tool_calls": [rest]},
            {"tool_calls": [{"index": 1, "id": "call_2", "type": "custom", "custom": {"name": "patch", "input": ""}}]},
            {"tool_calls": [{"index": 1, "custom": {"input": "+a"}}]},
        ),
        stream_of({"content": "It **rains**."}),
    ]
    bodies = []

    def answer(route: sync_api.Route) -> None:
        bodies.append(json.loads(route.request.post_data))
        route.fulfill(body=answers[len(bodies) - 1], headers={"Content-Type": "text/event-stream"})

    page.route("**/v1/chat/completions", answer)
    page.click("#settings summary")
    page.fill("#functions", '[{"name": "get_weather", "parameters": {}}]')
    say(page, "Weather?")
    for i, text in enumerate(("rain", "done")):
        page.locator(".calls textarea").nth(i).fill(text)
    assert page.locator(".calls label").all_inner_texts() == ['get_weather({"city": "Paris"})', "patch(+a)"]
    assert page.locator(".reasoning .text").text_content() == "Which city?"
    page.click(".calls button")
    assert finish(page, 2) == "It rains."
    assert bodies[0]["tools"] == [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
    [asked, called, result, other] = bodies[1]["messages"]
    assert asked == {"role": "user", "content": "Weather?"}
    assert called["reasoning_content"] == "Which city?"
    assert called["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert called["tool_calls"][1] == {"id": "call_2", "type": "custom", "custom": {"name": "patch", "input": "+a"}}
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
    assert other == {"role": "tool", "tool_call_id": "call_2", "content": "done"}


@pytest.mark.long
def test_two_settings_answer_one_message(page: sync_api.Page) -> None:
    page.click("#compare")
    first, second = (page.frame_locator(f"iframe >> nth={i}") for i in range(2))
    for chat, most in ((first, "3"), (second, "5")):
        chat.locator("#settings summary").click()
        chat.locator("#max_tokens").fill(most)
    page.fill("#prompt", "Count to a hundred.")
    page.press("#prompt", "Enter")
    first.get_by_text("3 tokens").wait_for()
    second.get_by_text("5 tokens").wait_for()
    assert first.locator("article.user").inner_text().startswith("Count to a hundred.")
    assert not first.locator("#prompt").is_visible()
    # What is being written in one chat, as after a refusal there, stays.
    first.locator("#prompt").evaluate("prompt => { prompt.value = 'A draft.'; }")
    page.fill("#prompt", "Go on.")
    page.press("#prompt", "Enter")
    for chat in (first, second):
        chat.locator("article.user", has_text="Go on.").wait_for()
        chat.locator("article.assistant .meta", has_text="tokens").nth(1).wait_for()
    assert (first.locator("#prompt").input_value(), second.locator("#prompt").input_value()) == ("A draft.", "")


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """axe-core, which knows the rules of accessible pages (WCAG)."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("axe")
    if reason := why_not(["npm", "install", "--no-audit", "--no-fund", "axe-core@4.14.1"], cwd=folder):
        pytest.skip(f"axe-core cannot be installed here: {reason}")
    return folder / "node_modules" / "axe-core" / "axe.min.js"


def violations(page: sync_api.Page, axe: Path) -> list[str]:
    """What axe finds wrong with a page whose policy is bypassed."""
    page.add_script_tag(path=axe)
    found = page.evaluate("axe.run()")
    assert found["passes"]
    return [f"{one['id']}: {one['nodes'][0]['html']}" for one in found["violations"]]


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_no_violation(browser: sync_api.Browser, server: Server, axe: Path, width: int, scheme: str) -> None:
    size = {"width": width, "height": 800}
    for page in open_page(browser, server.url, viewport=size, color_scheme=scheme, bypass_csp=True):
        page.wait_for_selector("#status[data-state=ready]")
        assert violations(page, axe) == []
        page.goto(server.url + "/ui/compare.html")
        assert violations(page, axe) == []
        page.goto(server.url + "/ui")
        say(page, "Print this: ```x = 1```")
        finish(page, 1)
        page.click("#settings summary")
        assert violations(page, axe) == []
        if width < 900:
            page.click("[data-shows=engine]")
            assert violations(page, axe) == []


@pytest.mark.long
def test_the_live_view_follows_the_engine(page: sync_api.Page, server: Server) -> None:
    until(page, "document.getElementById('blocks-0').textContent !== '–'")
    empty = page.evaluate("document.getElementById('map').toDataURL()")
    body = {"prompt": "Page " * 60, "n": 4, "temperature": 1, "max_tokens": 600, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    load = threading.Thread(target=lambda: urllib.request.urlopen(request, timeout=120).read())
    load.start()
    until(page, "Number(document.getElementById('running').textContent) > 0")
    until(
        page,
        "Number(document.getElementById('blocks-3').textContent) > 0"
        " && Number(document.getElementById('blocks-2').textContent) > 0",
    )
    assert page.evaluate("document.getElementById('map').toDataURL()") != empty
    assert "blocks shared" in page.get_attribute("#map", "aria-label")
    until(page, "document.querySelectorAll('#flight tr').length === 4")
    assert "25%" in page.inner_text("#flight")
    load.join()
    until(page, "document.getElementById('running').textContent === '0'")
    until(page, "document.getElementById('blocks-2').textContent === '0'")
    assert page.evaluate("Number(document.getElementById('blocks-1').textContent)") > 0
    assert page.inner_text("#itl") != "–"
    assert page.inner_text("#flight-more") == "none"


@pytest.mark.long
@pytest.mark.parametrize("width", [320, 390, 820])
def test_narrow_screens_show_one_view_and_never_scroll_sideways(
    browser: sync_api.Browser, server: Server, width: int
) -> None:
    for page in open_page(browser, server.url, viewport={"width": width, "height": 700}, has_touch=True):
        page.wait_for_selector("#status[data-state=ready]")
        say(page, "Repeat: " + "unbrokenword" * 20)
        finish(page, 1)
        page.click("#settings summary")
        for view, other in (("engine", ".chat"), ("chat", ".engine")):
            page.click(f"[data-shows={view}]")
            assert page.is_visible(f".{view}")
            assert not page.is_visible(other)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(f"(e => e.scrollWidth - e.clientWidth)(document.querySelector('.{view}'))") <= 0


@pytest.mark.long
def test_light_and_dark_follow_the_system_and_the_button(browser: sync_api.Browser, server: Server) -> None:
    for page in open_page(browser, server.url, color_scheme="dark"):
        page.wait_for_selector("html[data-theme=dark]")
        page.emulate_media(color_scheme="light")
        page.wait_for_selector("html[data-theme=light]")
        page.click("#theme")
        page.click("#theme")
        page.wait_for_selector("html[data-theme=dark]")
        page.reload()
        page.wait_for_selector("html[data-theme=dark]")


@pytest.mark.long
def test_a_key_is_asked_for_and_kept_for_the_tab(browser: sync_api.Browser, tiny_tokenizer: Path) -> None:
    with serving(FakeEngine(tiny_tokenizer), api_key=["secret"], disable_log_requests=True) as address:
        for page in open_page(browser, address):
            page.wait_for_selector("#status[data-state=down]")
            assert page.inner_text("#status") == "API key needed"
            say(page, "Hi")
            page.wait_for_selector("[role=alert]")
            assert page.evaluate("document.activeElement.id") == "key"
            page.fill("#key", "secret")
            page.press("#key", "Tab")
            page.press("#prompt", "Enter")
            assert finish(page, 1) == "Hello there"
            page.reload()
            assert page.input_value("#key") == "secret"
            page.wait_for_selector("#status[data-state=ready]")
