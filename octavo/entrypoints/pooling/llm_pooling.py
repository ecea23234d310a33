"""The methods of `LLM` for models that pool: embeddings, classes, scores, and other vectors of texts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import msgspec

from octavo.engine.input_processor import InputProcessor, PromptInput, as_prompts, sources_of
from octavo.engine.pooling_input import PoolingInput, Scores, Text
from octavo.engine.vllm_names import refuse_kwargs
from octavo.errors import RequestError, naming_prompt
from octavo.lora.request import LoRARequest
from octavo.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from octavo.pooling_params import PoolingParams
from octavo.request import EngineRequest

Prompts = PromptInput | Sequence[PromptInput]
ParamsOfTexts = PoolingParams | Sequence[PoolingParams] | None
UseTqdm = bool | Callable[..., Any]  # whether to show a bar, or its maker (`functools.partial(tqdm, ...)`)


class EncodeOptions(TypedDict, total=False):
    """Keywords of `encode`."""

    truncate_prompt_tokens: int | None
    prompt_name: str | None
    lora_request: LoRARequest | None
    tokenization_kwargs: Mapping[str, Any] | None


class PoolingMethods:
    """The part of `LLM` for models that pool. All methods raise `RequestError` for models that generate, and for a
    refused text before anything runs."""

    inputs: InputProcessor

    def run(
        self, requests: list[EngineRequest], use_tqdm: UseTqdm
    ) -> list[RequestOutput | PoolingRequestOutput[PoolingOutput]]:
        raise NotImplementedError

    def encode(
        self, prompts: Prompts, pooling_params: ParamsOfTexts = None, use_tqdm: UseTqdm = True, *,
        pooling_task: str | None = None, truncate_prompt_tokens: int | None = None, prompt_name: str | None = None,
        lora_request: LoRARequest | None = None, tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:  # fmt: skip
        """Return the vectors of texts: text, `{"prompt": ...}`, `{"prompt_token_ids": [...]}`, or a list of them.

        `pooling_params` is one for all texts or one for each. `prompt_name` names one of the model's own prompts, which
        is put before each text."""
        refuse_kwargs(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        given = as_prompts(prompts)
        params = pooling_params
        if params is None or isinstance(params, PoolingParams):
            params = [params or PoolingParams()] * len(given)
        if len(params) != len(given):
            raise RequestError(f"{len(params)} pooling_params for {len(given)} prompts.", param="pooling_params")
        inputs, sources = PoolingInput(self.inputs), sources_of("prompts", len(given))
        requests: list[EngineRequest] = []
        begin = 0
        for end in range(1, len(given) + 1):  # neighbours with equal parameters are tokenized together
            if end < len(given) and params[end] == params[begin]:
                continue
            its = self._with(params[begin], pooling_task, truncate_prompt_tokens)
            texts = []
            for prompt, source in zip(given[begin:end], sources[begin:end], strict=True):
                with naming_prompt(*source):
                    texts.append(Text.of(prompt, prompt_name))
            requests += inputs.process(texts, its, sources=sources[begin:end])
            begin = end
        return self._run_pooling(requests, use_tqdm)

    def embed(
        self, prompts: Prompts, pooling_params: ParamsOfTexts = None, use_tqdm: UseTqdm = True,
        **options: Unpack[EncodeOptions],
    ) -> list[EmbeddingRequestOutput]:  # fmt: skip
        """Return an embedding of each text; see `encode`."""
        found = self.encode(prompts, pooling_params, use_tqdm, pooling_task="embed", **options)
        return [output.giving(EmbeddingOutput(output.outputs.data.tolist())) for output in found]

    def classify(
        self, prompts: Prompts, pooling_params: ParamsOfTexts = None, use_tqdm: UseTqdm = True,
        **options: Unpack[EncodeOptions],
    ) -> list[ClassificationRequestOutput]:  # fmt: skip
        """Return the probabilities of the model's classes for each text; see `encode`."""
        found = self.encode(prompts, pooling_params, use_tqdm, pooling_task="classify", **options)
        return [output.giving(ClassificationOutput(output.outputs.data.tolist())) for output in found]

    def reward(
        self, prompts: Prompts, pooling_params: ParamsOfTexts = None, use_tqdm: UseTqdm = True,
        **options: Unpack[EncodeOptions],
    ) -> list[PoolingRequestOutput[PoolingOutput]]:  # fmt: skip
        """Return a reward model's output: numbers for each text, or for each of its tokens; see `encode`."""
        return self.encode(prompts, pooling_params, use_tqdm, **options)

    def score(
        self,
        data_1: PromptInput | Sequence[PromptInput],
        data_2: PromptInput | Sequence[PromptInput],
        use_tqdm: UseTqdm = True,
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well one text matches each of several texts, or each text of a list its counterpart: by a
        cross-encoder, by the cosine of embeddings, or by the vectors of tokens. Texts are text, `{"prompt": ...}`, or a
        list of them."""
        refuse_kwargs(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs, chat_template=chat_template)
        queries, documents = _texts(data_1, "data_1"), _texts(data_2, "data_2")
        params = self._with(pooling_params or PoolingParams(), None, truncate_prompt_tokens)
        scores = Scores(
            PoolingInput(self.inputs), queries, documents, params, fields=("data_1", "data_2"), instruction=instruction
        )
        outputs = self._run_pooling(scores.requests, use_tqdm)
        found = scores.results([output.outputs.data for output in outputs])
        by_document = [outputs[place] for place in scores.places]
        return [output.giving(ScoringOutput(one)) for output, one in zip(by_document, found, strict=True)]

    def _run_pooling(
        self, requests: list[EngineRequest], use_tqdm: UseTqdm
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        return [output for output in self.run(requests, use_tqdm) if isinstance(output, PoolingRequestOutput)]

    @staticmethod
    def _with(params: PoolingParams, task: str | None, truncate_prompt_tokens: int | None) -> PoolingParams:
        if truncate_prompt_tokens is None:
            truncate_prompt_tokens = params.truncate_prompt_tokens
        return msgspec.structs.replace(params, task=task or params.task, truncate_prompt_tokens=truncate_prompt_tokens)


def _texts(data: PromptInput | Sequence[PromptInput], name: str) -> list[str]:
    """Return the texts of one side of `score`. Raises `RequestError` for other values, such as token ids."""
    texts = []
    for given in as_prompts(data):
        text = Text.of(given)
        if not isinstance(text.first, str) or text.cache_salt is not None:
            raise RequestError(f"{name} must be a text or a list of them, got {given!r:.100}.", param=name)
        texts.append(text.first)
    return texts
