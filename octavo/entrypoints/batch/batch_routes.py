"""/v1/files and /v1/batches: OpenAI's way to have a file of requests answered."""

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.batch import stored_files
from octavo.entrypoints.batch.batch_job import ACTIVE_STATUSES, LIFETIME_S, BatchJob
from octavo.entrypoints.batch.batch_lines import URLS
from octavo.entrypoints.batch.stored_files import BATCH, FILE, PIECE_BYTES, UPLOAD
from octavo.entrypoints.http.body_fields import Int, Metadata, RequestBody, ResponseModel, Text, described
from octavo.entrypoints.http.error_responses import ErrorResponse, validation_error
from octavo.entrypoints.http.pagination import Deleted, Page, PageQuery, page_parameters, page_query
from octavo.entrypoints.http.router import Router
from octavo.entrypoints.http.server_state import state_of
from octavo.entrypoints.http.store import Database
from octavo.entrypoints.http.streaming import EventStream
from octavo.errors import RequestError

router = Router(tags=["Batches"])


class FileObject(ResponseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str
    expires_at: int | None = None


class ExpiresAfter(RequestBody):
    """When a file is deleted: so many seconds after it was created."""

    anchor: Literal["created_at"]
    seconds: Annotated[Int, Field(ge=3600, le=30 * 24 * 3600)]  # OpenAI's limits


class BatchRequest(RequestBody):
    """Body of POST /v1/batches."""

    input_file_id: Text = Field(description="A file of purpose batch.")
    endpoint: Text = Field(description="The url of all its lines.")
    completion_window: Literal["24h"] = Field(description="24h.")
    metadata: Metadata | None = described("Comes back with the batch.")
    output_expires_after: ExpiresAfter | None = described(
        "When the output and the error file are deleted; they stay if left out."
    )


class BatchObject(ResponseModel):
    """A batch. Answers with a status other than 200, and lines that are no requests, are in the error file."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: dict[str, int]
    metadata: dict[str, str] | None
    errors: dict[str, Any] | None


class FileStream(EventStream):
    """The content of a file."""

    media_type = "application/octet-stream"
    keep_alive = b""
    shows_errors = False


MAX_FILES = 10_000  # of one page of the list, as in OpenAI's API
_EXPIRY = ("expires_after[anchor]", "expires_after[seconds]")
_UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"const": "batch"},
                        "expires_after[anchor]": {"const": "created_at"},
                        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
                    },
                }
            }
        },
    }
}


@router.post("/v1/files", openapi_extra=_UPLOAD)
async def upload_file(raw: Request) -> FileObject:
    """Keep a file of requests, until it is deleted or as long as `expires_after` says."""
    state = state_of(raw)
    store = state.store
    async with raw.form(max_files=1, max_fields=8) as form:
        upload, purpose = form.get("file"), form.get("purpose")
        if not isinstance(upload, UploadFile):
            raise RequestError("file is required.", param="file")
        if purpose != "batch":
            raise RequestError(f"purpose {purpose!r:.60} is not built; batch is.", param="purpose")
        unknown = form.keys() - {"file", "purpose", *_EXPIRY}
        if unknown and state.args.unknown_fields == "error":
            raise RequestError(
                f"Unrecognized request argument supplied: {min(unknown):.60}", param=min(unknown),
                code="unknown_parameter",
            )  # fmt: skip
        life_s = _life_s([form.get(name) for name in _EXPIRY])
        file = stored_files.new_file((upload.filename or "file")[:255], purpose, upload.size or 0, life_s)
        await store.run(lambda database: stored_files.begin_upload(database, file))
        try:
            number = 0
            while piece := await upload.read(PIECE_BYTES):
                await store.run(partial(stored_files.add_piece, file_id=file["id"], number=number, piece=piece))
                number += 1
            await store.run(lambda database: stored_files.end_upload(database, file))
        except BaseException:
            await store.run(lambda database: database.delete(UPLOAD, file["id"]))
            raise
    return FileObject(**file)


def _life_s(given: Sequence[Any]) -> int | None:
    """Return the seconds of an upload's `expires_after`, None if it has none. Raises `RequestError`."""
    anchor, seconds = given
    if anchor is seconds is None:
        return None
    number = int(seconds) if isinstance(seconds, str) and seconds.isdecimal() and len(seconds) < 12 else seconds
    fields = {"anchor": anchor, "seconds": number}
    try:
        return ExpiresAfter.model_validate({name: value for name, value in fields.items() if value is not None}).seconds
    except ValidationError as error:
        raise validation_error(
            [{**one, "loc": ("expires_after", *one["loc"])} for one in error.errors(include_url=False)]
        ) from None


@router.get(
    "/v1/files",
    openapi_extra={"parameters": [
        *page_parameters(MAX_FILES),
        {"name": "purpose", "in": "query", "schema": {"type": "string"}, "description": "batch or batch_output."},
    ]},
)  # fmt: skip
async def list_files(raw: Request) -> Page:
    """List the stored files, the newest first."""
    purpose = raw.query_params.get("purpose")
    asked = page_query(raw, limit=MAX_FILES, most=MAX_FILES)
    found = await _page(raw, FILE, asked, {} if purpose is None else {"purpose": purpose})
    return Page.of([FileObject(**one).model_dump() for one in found], asked)


@router.get("/v1/files/{file_id}")
async def get_file(file_id: str, raw: Request) -> FileObject:
    """Describe a file."""
    found = await state_of(raw).store.run(lambda database: stored_files.find(database, FILE, file_id))
    return FileObject(**stored_files.read(found))


@router.get(
    "/v1/files/{file_id}/content",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}},
)
async def get_content(file_id: str, raw: Request) -> Response:
    """Return a file's content."""
    store = state_of(raw).store
    await store.run(lambda database: stored_files.find(database, FILE, file_id))

    async def content() -> AsyncGenerator[bytes, None]:
        async for piece in stored_files.read_content(store, file_id):
            yield piece

    return FileStream(content(), {})


@router.delete(
    "/v1/files/{file_id}", responses={409: {"model": ErrorResponse, "description": "A batch under way needs the file."}}
)
async def delete_file(file_id: str, raw: Request) -> Deleted:
    """Forget a file."""
    await state_of(raw).store.run(lambda database: stored_files.delete(database, file_id))
    return Deleted(id=file_id, object="file")


@router.post("/v1/batches")
async def create_batch(body: BatchRequest, raw: Request) -> BatchObject:
    """Have the lines of a file answered in the background."""
    state = state_of(raw)
    if body.endpoint not in URLS:
        raise RequestError(f"endpoint should be one of {', '.join(sorted(URLS))}.", param="endpoint")
    now = int(time.time())
    batch: dict[str, Any] = {
        "id": f"batch_{uuid.uuid4().hex}",
        "object": "batch",
        "endpoint": body.endpoint,
        "input_file_id": body.input_file_id,
        "completion_window": body.completion_window,
        "status": "validating",
        "created_at": now,
        "expires_at": now + LIFETIME_S,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": body.metadata,
        "output_expires_after": body.output_expires_after and body.output_expires_after.model_dump(),
    }
    batch |= {name: None for name in BatchObject.model_fields if name not in batch}

    def begin(database: Database) -> None:
        stored_files.find(database, FILE, body.input_file_id)
        stored_files.write(database, BATCH, batch, is_owned=True)

    await state.store.run(begin)
    made = BatchObject(**batch)
    state.background.start(batch["id"], BatchJob(raw.app, state, batch), uses_engine=False, is_awaited=False)
    return made


@router.get("/v1/batches", openapi_extra=Page.PARAMETERS)
async def list_batches(raw: Request) -> Page:
    """List the batches, the newest first."""
    asked = page_query(raw)
    return Page.of([_shown(one).model_dump() for one in await _page(raw, BATCH, asked)], asked)


@router.get("/v1/batches/{batch_id}")
async def get_batch(batch_id: str, raw: Request) -> BatchObject:
    """Return a batch with its progress."""
    return _shown(await _batch(raw, batch_id))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(batch_id: str, raw: Request) -> BatchObject:
    """End a batch; its answers so far are kept."""
    state = state_of(raw)

    async def is_under_way() -> bool:
        return (await _batch(raw, batch_id))["status"] in ACTIVE_STATUSES

    if await is_under_way():
        await state.background.cancel_anywhere(BATCH, batch_id, is_under_way)
    return _shown(await _batch(raw, batch_id))


def _shown(batch: dict[str, Any]) -> BatchObject:
    """Return a batch as clients see it. It has output files once they are complete."""
    is_under_way = batch["status"] in ("validating", "in_progress", "cancelling")
    return BatchObject(**batch | (dict.fromkeys(("output_file_id", "error_file_id")) if is_under_way else {}))


async def _batch(raw: Request, batch_id: str) -> dict[str, Any]:
    found = await state_of(raw).store.run(lambda database: stored_files.find(database, BATCH, batch_id))
    return stored_files.read(found)


async def _page(
    raw: Request, kind: str, asked: PageQuery, fields: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Return the objects of a page, only those with these fields, and the next object if there is one."""

    def read(database: Database) -> list[dict[str, Any]]:
        stored_files.delete_expired(database)
        rows = database.page(
            kind, after=asked.after, limit=asked.limit + 1, is_ascending=asked.is_ascending, fields=fields
        )
        return [stored_files.read(row) for row in rows]

    return await state_of(raw).store.run(read)
