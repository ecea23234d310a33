"""The bodies of the routes of models that pool, with the names of OpenAI, Cohere, Jina and vLLM."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, Field, PlainValidator, model_validator

from octavo.engine.pooling_input import Text as InputText
from octavo.entrypoints.http.body_fields import (
    Id,
    Int,
    Priority,
    Prompts,
    RequestBody,
    ResponseModel,
    Text,
    check_text,
    described,
)
from octavo.entrypoints.openai.chat_messages import ChatMessage
from octavo.entrypoints.openai.request_bodies import PromptRequest, TemplateRequest
from octavo.errors import RequestError
from octavo.pooling_params import EmbedDtype, PoolingParams

MAX_TEXTS = 2048  # in one request


class PoolingFields(PromptRequest):
    """Common fields of all pooling bodies: how texts are cut, and how the request is scheduled."""

    model: Text | None = described("One of the names of GET /v1/models; may be left out.")
    user: Text | None = described("Accepted, and does not change the answer (as with OpenAI).")
    truncate_prompt_tokens: Int | None = described(
        "Keep this many tokens of a text; -1: all that fit. If left out, a text that is too long is refused.",
        minimum=-1,
    )
    truncation_side: Literal["left", "right"] | None = described(
        "The end at which tokens are cut off; right if left out."
    )
    use_activation: bool | None = described("False: the network's numbers, neither of length 1 nor probabilities.")
    normalize: bool | None = described("A former name of use_activation.")
    softmax: bool | None = described("Another.")
    activation: bool | None = described("Another.")
    priority: Priority = described("Lower goes first, with --scheduling-policy priority.", default=0)
    cache_salt: Annotated[Text, Field(min_length=1)] | None = described(
        "Requests with different salts share no cached prefixes; encoders keep none."
    )
    request_id: Id | None = described("Becomes part of the answer's id, and comes back as header X-Request-Id.")
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = described(
        "Seconds after arrival in which the answer must come; 408 if it does not."
    )

    # Fields of this body that errors name, by the parameters that follow from them.
    SOURCES: ClassVar[Mapping[str, str]] = {"task": "model"}

    def as_sent(self, error: RequestError) -> RequestError:
        """Return an error about a parameter that this request does not have as one about its own field."""
        field = self.SOURCES.get(error.param or "")
        if field is None or error.param is None or getattr(self, error.param, None) is not None:
            return error
        text = str(error) if field == "model" else str(error).replace(error.param, field)
        return RequestError(text, param=field, status=error.status, code=error.code)

    def params(self, **more: Any) -> PoolingParams:
        """Return the pooling parameters. Raises `RequestError` for values out of range."""
        given = {
            "truncate_prompt_tokens": self.truncate_prompt_tokens, "truncation_side": self.truncation_side,
            "use_activation": self.use_activation, "normalize": self.normalize, "softmax": self.softmax,
            "activation": self.activation, **more,
        }  # fmt: skip
        return PoolingParams(**{name: value for name, value in given.items() if value is not None})


class TextsRequest(PoolingFields, TemplateRequest):
    """Texts, or a conversation, that become vectors."""

    input: Prompts | None = described("Text, token ids, or a list of either.")
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = described(
        "A conversation instead of input: the chat template makes it one text."
    )
    add_special_tokens: bool | None = described("Add the tokenizer's special tokens to texts; true if left out.")
    prompt_name: Text | None = described("The name of one of the model's own prompts, which comes before each text.")

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.input is None) == (self.messages is None):
            raise RequestError("Send either input or messages.", param="input")
        if self.input is not None and len(self.input) > MAX_TEXTS:
            raise RequestError(f"input has {len(self.input)} entries; {MAX_TEXTS} is the most.", param="input")
        if self.messages is None:
            self.refuse_template_fields("input")
        return self

    def texts(self, conversation: str | None) -> list[InputText]:
        """Return the texts, or the `conversation` rendered from the messages."""
        given: Sequence[str | list[int]] = self.input if conversation is None else [conversation]  # type: ignore[assignment]
        return [InputText(text, None, self.prompt_name) for text in given]

    @property
    def adds_special_tokens(self) -> bool:
        """Return whether special tokens are added. The chat template has added them already for messages."""
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens


Encoding = Literal["float", "base64", "bytes", "bytes_only"]


class EmbeddingRequest(TextsRequest):
    """Body of POST /v1/embeddings."""

    encoding_format: Encoding | None = described(
        "float: numbers. base64: their bytes in base64. bytes: the body is the bytes of all vectors, and the header "
        "metadata says as JSON where each vector is. bytes_only: bytes without the header."
    )
    dimensions: Int | None = described("Elements of each embedding, of models that were trained for it.", minimum=1)
    embed_dtype: EmbedDtype | None = described("The type of the numbers in base64 and bytes; float32 if left out.")
    endianness: Literal["native", "little", "big"] | None = described("Their byte order; the server's if left out.")

    @model_validator(mode="after")
    def _check_bytes(self) -> Self:
        for name in ("embed_dtype", "endianness"):
            if getattr(self, name) is not None and (self.encoding_format or "float") == "float":
                raise RequestError(f"{name} is for encoding_format base64 and bytes.", param=name)
        return self


EmbeddingType = Literal["float", "base64", "binary", "ubinary"]


class CohereContent(RequestBody):
    type: Literal["text"]
    text: Text


class CohereInput(RequestBody):
    content: list[CohereContent]


class CohereEmbedRequest(PoolingFields):
    """Body of POST /v2/embed."""

    SOURCES: ClassVar[Mapping[str, str]] = {
        "task": "model", "dimensions": "output_dimension", "truncate_prompt_tokens": "max_tokens",
    }  # fmt: skip

    texts: Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)] | None = described("The texts.")
    inputs: Annotated[list[CohereInput], Field(min_length=1, max_length=MAX_TEXTS)] | None = described(
        "The texts as lists of parts of type text, which are joined by line breaks."
    )
    input_type: Literal["search_document", "search_query", "classification", "clustering"] | None = described(
        "What the texts are for: the model's own prompt of that name comes before them, if it has one."
    )
    embedding_types: Annotated[list[EmbeddingType], Field(min_length=1)] | None = described(
        "Numbers, their bytes in base64, or a bit for each number, eight in a byte with a sign (binary) or without; "
        "float if left out."
    )
    output_dimension: Int | None = described(
        "Elements of each embedding, of models that were trained for it.", minimum=1
    )
    truncate: Literal["NONE", "START", "END"] | None = described("Which end of long texts is cut; END if left out.")
    max_tokens: Annotated[Int, Field(ge=1)] | None = described("Cut texts to this many tokens.")

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.texts is None) == (self.inputs is None):
            raise RequestError("Send either texts or inputs.", param="texts")
        if self.truncate == "NONE" and self.max_tokens is not None:
            raise RequestError("max_tokens would cut texts, but truncate is NONE.", param="max_tokens")
        return self

    def cut(self, max_model_len: int) -> dict[str, Any]:
        """Return the arguments of `params` for cutting texts. `max_model_len` is the most tokens that the model
        takes."""
        if self.truncate == "NONE" or self.truncate_prompt_tokens is not None:
            return {}
        side = "left" if self.truncate == "START" else "right"
        return {"truncate_prompt_tokens": min(self.max_tokens or max_model_len, max_model_len), "truncation_side": side}

    @property
    def all_texts(self) -> list[str]:
        if self.texts is not None:
            return list(self.texts)
        return ["\n".join(part.text for part in one.content) for one in self.inputs or ()]


class PoolingRequest(EmbeddingRequest):
    """Body of POST /pooling."""

    task: Text | None = described("embed, token_embed, classify or token_classify; left out, the model's own.")


class ClassifyRequest(TextsRequest):
    """Body of POST /classify."""


def _check_documents(value: Any) -> list[str]:
    """Return the texts of documents, each given as a text or as {"text": ...}. Raises `ValueError`."""
    texts = value if isinstance(value, list) else [value]
    found: list[str] = []
    for given in texts:
        text = given.get("text") if isinstance(given, dict) else given
        if not isinstance(text, str):
            raise ValueError('should be a text, or a list of texts or of objects like {"text": "..."}')
        found.append(check_text(text))
    if not 1 <= len(found) <= MAX_TEXTS:
        raise ValueError(f"should have 1 to {MAX_TEXTS} entries")
    return found


class Document(BaseModel):
    text: str


Documents = Annotated[
    list[str], PlainValidator(_check_documents, json_schema_input_type=str | list[str] | list[Document])
]


class PairsRequest(PoolingFields):
    """Queries and documents."""

    instruction: Text | None = described("Instruction: which documents are relevant, for rerankers that take one.")
    max_tokens_per_query: Annotated[Int, Field(ge=0)] = described("The most tokens of a query; 0: no limit.", default=0)
    max_tokens_per_doc: Annotated[Int, Field(ge=0)] = described(
        "The most tokens of a document; 0: no limit.", default=0
    )


_SIDES = (("text_1", "data_1", "queries"), ("text_2", "data_2", "documents", "items"))


class ScoreRequest(PairsRequest):
    """Body of POST /score."""

    text_1: Documents | None = described("A query for all documents, or one for each.")
    text_2: Documents | None = described("The documents.")
    data_1: Documents | None = described("The newer name of text_1.")
    data_2: Documents | None = described("The newer name of text_2.")
    queries: Documents | None = described("Another name of text_1.")
    documents: Documents | None = described("Another name of text_2.")
    items: Documents | None = described("Another name of text_2.")

    @model_validator(mode="after")
    def _check_sides(self) -> Self:
        for names in _SIDES:
            given = [name for name in names if getattr(self, name) is not None]
            if len(given) != 1:
                raise RequestError(f"Send one of {', '.join(names)}.", param=names[0])
        return self

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """Return the queries and the documents."""
        queries, documents = (getattr(self, name) for name in self.side_fields)
        return queries, documents

    @property
    def side_fields(self) -> tuple[str, str]:
        """Return the names of the fields with queries and documents."""
        queries, documents = (next(name for name in names if getattr(self, name) is not None) for names in _SIDES)
        return queries, documents


class RerankRequest(PairsRequest):
    """Body of POST /rerank: Cohere's and Jina's."""

    query: Text = Field(description="What is looked for.")
    documents: Documents = Field(description="Texts, or objects with text.")
    top_n: Annotated[Int, Field(ge=0)] | None = described("Return this many of the best; 0 or left out: all.")
    return_documents: bool | None = described("Whether to return the documents; true if left out.")
    rank_fields: Literal[None] = None
    max_chunks_per_doc: Literal[1] | None = None


class EmbeddingUsage(ResponseModel):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


_Item = TypeVar("_Item")


class ListResponse(ResponseModel, Generic[_Item]):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[_Item]
    usage: EmbeddingUsage


class EmbeddingData(ResponseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(ListResponse[EmbeddingData]):
    pass


class CohereEmbedResponse(ResponseModel):
    id: str
    embeddings: dict[str, list[list[float]] | list[list[int]] | list[str]]
    texts: list[str]
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"
    meta: dict[str, Any]


class PoolingData(ResponseModel):
    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float] | list[list[float]] | str


class PoolingResponse(ListResponse[PoolingData]):
    pass


class ClassData(ResponseModel):
    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifyResponse(ListResponse[ClassData]):
    pass


class ScoreData(ResponseModel):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(ListResponse[ScoreData]):
    pass


class RerankDocument(ResponseModel):
    text: str


class RerankResult(ResponseModel):
    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankUsage(ResponseModel):
    prompt_tokens: int
    total_tokens: int


class RerankResponse(ResponseModel):
    id: str
    model: str
    usage: RerankUsage
    results: list[RerankResult]
