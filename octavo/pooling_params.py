"""`PoolingParams`, a request's settings for a model that pools, and `PoolingConfig`, the model's own settings."""

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from octavo.errors import RequestError

# Tasks of requests, by vLLM's names: embeddings or classes, for a whole text or for each of its tokens.
TASKS = ("embed", "token_embed", "classify", "token_classify")
EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
# Types of the numbers of embeddings as bytes: vLLM's names, and those of NumPy and torch.
EMBED_DTYPES: dict[EmbedDtype, str] = {
    "float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}  # fmt: skip


class PoolingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request's settings. A field left out follows the model. Raises `RequestError` for an invalid value."""

    task: str | None = None  # one of `TASKS`
    dimensions: int | None = None  # keep this many first elements of an embedding (Kusupati et al. 2022)
    use_activation: bool | None = None  # False: do not normalize embeddings, no softmax or sigmoid for classes
    truncate_prompt_tokens: int | None = None  # keep this many tokens of a text; -1: as many as the model takes
    truncation_side: str = "right"  # side at which tokens are cut off
    # Older names of `use_activation`, which gets their values, and that of an `activation` that is not a string.
    normalize: bool | None = None
    softmax: bool | None = None
    # Set from the model when the request is checked.
    kind: str = ""
    activation: Any = "identity"  # "normalize", "softmax", "sigmoid" or "identity"
    num_skipped: int = 0  # tokens of an instruction that are not pooled

    def __post_init__(self) -> None:
        older = [self.normalize, self.softmax, None if isinstance(self.activation, str) else self.activation]
        self.use_activation = next((said for said in (self.use_activation, *older) if said is not None), None)
        self.normalize = self.softmax = None
        if not isinstance(self.activation, str):
            self.activation = "identity"
        if self.task is not None and self.task not in TASKS:
            raise RequestError(f"task must be one of {', '.join(TASKS)}, got {self.task!r}.", param="task")
        if self.use_activation is not None and type(self.use_activation) is not bool:
            raise RequestError(
                f"use_activation must be true or false, got {self.use_activation!r}.", param="use_activation"
            )
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise RequestError(f"dimensions must be at least 1, got {self.dimensions!r}.", param="dimensions")
        keep = self.truncate_prompt_tokens
        if keep is not None and (type(keep) is not int or (keep < 1 and keep != -1)):
            raise RequestError(
                f"truncate_prompt_tokens must be at least 1, or -1 for as many as the model takes, got {keep!r}.",
                param="truncate_prompt_tokens",
            )
        if self.truncation_side not in ("left", "right"):
            raise RequestError(
                f"truncation_side must be left or right, got {self.truncation_side!r}.", param="truncation_side"
            )

    @property
    def is_by_token(self) -> bool:
        return self.kind == "ALL"


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A matrix after pooling in a sentence-transformers folder. `name` is its folder, and the prefix of its tensors."""

    name: str
    size: int  # elements of its output
    bias: bool
    activation: str | None


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """How a model pools, and the form of its vectors. Plain data: it goes to the core's process."""

    task: str  # one of `TASKS`: the default of requests
    kind: str  # one of `octavo.layers.pooler.KINDS`
    size: int = 0  # elements of a vector
    dense: list[DenseConfig] = field(default_factory=list)
    activation: str = "identity"  # applied to vectors; see `PoolingParams`
    labels: list[str] = field(default_factory=list)  # of classes
    may_cut: bool = False  # the first elements of an embedding are an embedding themselves
    dimensions: list[int] = field(default_factory=list)  # allowed numbers of elements; empty: any
    default_dimensions: int | None = None  # for requests without `dimensions`
    prompts: dict[str, str] = field(default_factory=dict)  # by name: a text put before each text
    default_prompt: str | None = None
    pools_prompts: bool = True
    whole_prompts: bool = True  # a text's tokens are all computed in one step
    label_tokens: list[int] = field(default_factory=list)  # tokens whose rows of the output matrix are the classifier
    is_difference: bool = False
    lowers_case: bool = False
    score_template: str | None = None  # makes one text of {instruction}, {query} and {document}
    score_instruction: str = ""  # for requests without an instruction
    max_length: int | None = None  # longest text that the model was made for; it may accept more

    @property
    def tasks(self) -> tuple[str, ...]:
        """Return the tasks that requests may ask for."""
        both = ("embed", "token_embed") if "embed" in self.task else ("classify", "token_classify")
        if self.kind == "ALL":
            return both[1:]
        return both if self.whole_prompts else both[:1]

    def settle(self, params: PoolingParams) -> PoolingParams:
        """Return `params` completed with the model's settings. Raises `RequestError` if the model cannot do what they
        ask."""
        task = params.task or self.task
        if task not in self.tasks:
            raise RequestError(self._why_not(task), param="task")
        if params.dimensions is not None:
            self._check_dimensions(task, params.dimensions)
        by_token = task.startswith("token_")
        return msgspec.structs.replace(
            params, task=task, kind="ALL" if by_token else self.kind,
            dimensions=params.dimensions or self.default_dimensions,
            activation="identity" if params.use_activation is False else self.activation,
        )  # fmt: skip

    def _why_not(self, task: str) -> str:
        mine = " and ".join(self.tasks)
        if task.removeprefix("token_") != self.task.removeprefix("token_"):
            what = "embeddings" if "embed" in self.task else "classes"
            return f"task {task} is not this model's, which gives {what}: its tasks are {mine}."
        if task.startswith("token_"):
            return (
                f"task {task} needs whole texts in a step, and this server computes them in parts; start it with "
                f"--no-enable-chunked-prefill. Now its tasks are {mine}."
            )
        return (
            f"task {task} needs a vector of the whole text, and this model has one of each token: its task is {mine}."
        )

    def _check_dimensions(self, task: str, wanted: int) -> None:
        if "embed" not in task:
            raise RequestError("dimensions are for embeddings; leave it out.", param="dimensions")
        if not self.may_cut:
            raise RequestError(
                f"this model's embeddings have {self.size} elements and were not trained to be cut; leave dimensions "
                "out, or start the server with --hf-overrides '{\"is_matryoshka\": true}'.",
                param="dimensions",
            )
        if wanted > self.size or (self.dimensions and wanted not in self.dimensions):
            known = ", ".join(map(str, self.dimensions)) if self.dimensions else f"1 to {self.size}"
            raise RequestError(f"dimensions must be {known}, got {wanted}.", param="dimensions")
