"""The files of the pages at /ui, of server and gateway, and the headers that keep other sites from using them."""

from pathlib import Path

from starlette.responses import FileResponse

# The folder of the server's page. The gateway's page has its own files, and shares some of these.
SHARED = Path(__file__).parent / "entrypoints" / "ui" / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# A page may run only its own files and connect only to its own server. Only its own pages may frame it.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "media-src data:; connect-src 'self'; frame-src 'self'; frame-ancestors 'self'; base-uri 'none'; "
    "form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # browsers ask again each time, and get 304
}


def page_file(path: Path) -> FileResponse:
    """Return a file of a page as an answer."""
    return FileResponse(path, media_type=_TYPES[path.suffix], headers=_HEADERS)
