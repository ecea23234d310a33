"""GET /docs: the API's description to read and to try, from files that come with a package. Nothing is loaded from
elsewhere, so that it works offline."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

router = APIRouter(include_in_schema=False)

FILES = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")


@router.get("/docs")
async def docs(request: Request) -> Response:
    """Swagger UI over /openapi.json."""
    root = request.scope.get("root_path", "")
    script, style, icon = (f"{root}/docs/{name}" for name in FILES)
    return get_swagger_ui_html(
        openapi_url=f"{root}/openapi.json",
        title="Octavo",
        swagger_js_url=script,
        swagger_css_url=style,
        swagger_favicon_url=icon,
    )


@router.get("/docs/{name}")
async def docs_file(name: str) -> Response:
    """A file of the page."""
    if name not in FILES:
        raise HTTPException(404)
    import fastapi_offline  # brings Swagger UI; imported here because a server that starts has no use for it

    return FileResponse(Path(fastapi_offline.__file__).parent / "static" / name)
