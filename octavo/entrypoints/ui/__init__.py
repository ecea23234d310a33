"""The page at /ui: a chat and a live view of the engine. Static files of the package, and the numbers they show."""

from pathlib import Path

STATIC = Path(__file__).parent / "static"
# Every file of the page, and its type. They hold no secrets: who has no key gets a page that can do nothing.
FILES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "api.js": "text/javascript; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "engine.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
OPEN_PATHS = frozenset({"/ui", "/ui/", *(f"/ui/{name}" for name in FILES)})
