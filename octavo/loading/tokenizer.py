"""The tokenizer of a checkpoint, with its chat template: text to token ids and back, and conversations to text.

`ModelTokenizer` uses the `tokenizers` package and has the names and results of `transformers`' tokenizers, for a folder
(`tokenizer_folder`) or a GGUF file (`gguf_tokenizer`). Folders that `tokenizer_folder` cannot read take the slow way
through `AutoTokenizer`. Incremental decoding is elsewhere, on the `backend_tokenizer` of the tokenizers here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from octavo.errors import LoadError
from octavo.loading.checkpoint import Checkpoint
from octavo.loading.gguf_file import read_gguf
from octavo.loading.jinja_template import compile_template, render_template
from octavo.loading.token_texts import decode
from octavo.loading.tokenizer_folder import WHAT_TO_DO, read_tokenizer_folder
from octavo.loading.tokenizer_parts import ROLES, TokenizerParts


class Encoding(dict[str, list[Any]]):
    """The result of calling a tokenizer: `input_ids` and `attention_mask`, as keys and as attributes."""

    def __getattr__(self, name: str) -> list[Any]:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class ModelTokenizer:
    """A tokenizer with its special tokens as attributes by role (`eos_token`, `eos_token_id` and so on; None if there
    is no such token).

    `special_tokens` are by role; `extra_special_tokens` have no role. Tokens of both, and `added_tokens`, are added to
    the backend if it does not know them. `cleans_up_spaces`: decoded text has no blanks before punctuation and English
    endings.
    """

    def __init__(
        self,
        backend: Backend,
        special_tokens: Mapping[str, str | AddedToken],
        extra_special_tokens: Sequence[str | AddedToken] = (),
        added_tokens: Iterable[AddedToken] = (),
        chat_template: str | dict[str, str] | None = None,
        cleans_up_spaces: bool = False,
        response_template: Mapping[str, Any] | None = None,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend_tokenizer = backend
        ordered = [role for role in ROLES if role in special_tokens]
        ordered += [role for role in special_tokens if role not in ROLES]
        self.special_tokens_map = {role: str(special_tokens[role]) for role in ordered}
        self.extra_special_tokens = [str(token) for token in extra_special_tokens]
        self.chat_template = chat_template
        self.cleans_up_spaces = cleans_up_spaces
        self.response_template = response_template
        known = backend.get_added_tokens_decoder().values()
        known_as_they_are = {repr(token) for token in known}  # the texts show the tokens' flags too
        new = [token for token in added_tokens if repr(token) not in known_as_they_are]
        texts = {token.content for token in (*known, *new)}
        for token in [*(special_tokens[role] for role in ordered), *extra_special_tokens]:
            if str(token) not in texts:
                texts.add(str(token))
                new.append(token if isinstance(token, AddedToken) else AddedToken(token, special=True))
        for added in new:
            added.special = added.special or added.content in self.special_tokens_map.values()
        backend.add_tokens(new)

    def __getattr__(self, name: str) -> Any:
        role = name.removesuffix("_id")
        special: dict[str, str] = self.__dict__.get("special_tokens_map", {})
        if role not in special and role not in ROLES:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        token = special.get(role)
        return token if name == role or token is None else self.convert_tokens_to_ids(token)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def __bool__(self) -> bool:
        return True

    @property
    def vocab_size(self) -> int:
        """Return the size of the vocabulary without added tokens."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=False)

    @property
    def vocab(self) -> dict[str, int]:
        return self.get_vocab()

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab()

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    @property
    def all_special_tokens(self) -> list[str]:
        return list(dict.fromkeys([*self.special_tokens_map.values(), *self.extra_special_tokens]))

    @property
    def all_special_ids(self) -> list[int]:
        ids: list[int] = self.convert_tokens_to_ids(self.all_special_tokens)
        return ids

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or a list of the ids of several tokens. An unknown token has the id of the role
        `unk_token`, or None if there is no such token."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        token_id = self.backend_tokenizer.token_to_id(tokens)
        unknown = self.special_tokens_map.get("unk_token")
        return token_id if token_id is not None or unknown is None else self.backend_tokenizer.token_to_id(unknown)

    def convert_ids_to_tokens(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> Any:
        """Return the token of an id, or a list of the tokens of several ids."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        return [self.backend_tokenizer.id_to_token(int(i)) for i in ids if int(i) not in skipped]

    def tokenize(self, text: str, pair: str | None = None, add_special_tokens: bool = False) -> list[str]:
        return self.backend_tokenizer.encode(text, pair, add_special_tokens=add_special_tokens).tokens

    def encode(self, text: str, text_pair: str | None = None, add_special_tokens: bool = True) -> list[int]:
        return self.backend_tokenizer.encode(text, text_pair, add_special_tokens=add_special_tokens).ids

    def __call__(
        self, text: str | Sequence[str], text_pair: str | None = None, add_special_tokens: bool = True
    ) -> Encoding:
        """Return the token ids of a text, or a list of ids for each of several texts."""
        if isinstance(text, str):
            ids: list[Any] = self.encode(text, text_pair, add_special_tokens)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        ids = [e.ids for e in self.backend_tokenizer.encode_batch(list(text), add_special_tokens=add_special_tokens)]
        return Encoding(input_ids=ids, attention_mask=[[1] * len(row) for row in ids])

    def decode(
        self,
        token_ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Return the text of token ids in a list or an array. The text of BPE models is never cleaned, because BPE
        tokens contain their blanks."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        ids = [ids] if isinstance(ids, int) else ids
        text = decode(self.backend_tokenizer, ids, skip_special_tokens=skip_special_tokens)
        cleans_up = self.cleans_up_spaces if clean_up_tokenization_spaces is None else clean_up_tokenization_spaces
        if cleans_up and type(self.backend_tokenizer.model).__name__ != "BPE":
            for ending in (".", "?", "!", ","):
                text = text.replace(" " + ending, ending)
            text = text.replace(" ' ", "'")
            for ending in ("n't", "'m", "'s", "'ve", "'re"):
                text = text.replace(" " + ending, ending)
        return text

    def batch_decode(self, sequences: Iterable[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """Return the text of a chat template. `chat_template` is a template's text, or the name of one of the model's
        templates; None: the model's own. Raises `ValueError` if there is none."""
        templates = self.chat_template
        if isinstance(templates, dict):
            if chat_template is None:
                chat_template = "tool_use" if tools is not None and "tool_use" in templates else "default"
                if chat_template not in templates:
                    raise ValueError(f"there is no default chat template; name one of {sorted(templates)}.")
            return templates.get(chat_template, chat_template)
        template = templates if chat_template is None else chat_template
        if template is None:
            raise ValueError("the tokenizer has no chat template; pass one.")
        return template

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, str]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        tokenize: bool = True,
        return_dict: bool = True,
        keeps_null_content: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return a conversation as text, or as token ids. `kwargs` are variables that the template may read. A null
        content is omitted, as in `transformers`, or kept with `keeps_null_content` for templates that need it.

        Raises `ValueError` for a conversation that cannot be written. The template is the model's program and may raise
        anything.
        """
        if not conversation:
            raise ValueError("the conversation has no messages; it needs one at least.")
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other; choose one.")
        text = render_template(
            self.get_chat_template(chat_template, tools),
            conversation,
            continue_final_message=continue_final_message,
            keeps_null_content=keeps_null_content,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens_map, **kwargs},
        )
        if not tokenize:
            return text
        encoding = self(text, add_special_tokens=False)
        return encoding if return_dict else encoding.input_ids


def load_tokenizer(checkpoint: Checkpoint, chat_template: str | None = None) -> ModelTokenizer:
    """Return the tokenizer of a checkpoint. `chat_template` replaces the checkpoint's templates: it is the name of one
    of these, a file's path, or a template's text.

    Raises `LoadError` if there is no tokenizer, or if it or the template cannot be read.
    """
    tokenizer = read_tokenizer(checkpoint.tokenizer_path, checkpoint.trusts_code)
    if chat_template is not None:
        named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
        template = named.get(chat_template) or _read_template(chat_template, list(named))
        _check_template(template, chat_template)
        tokenizer.chat_template = template
    return tokenizer


def read_tokenizer(path: str, trust_remote_code: bool = False) -> ModelTokenizer:
    """Return the tokenizer in a folder or a .gguf file. Python code in the folder runs only with `trust_remote_code`.
    Raises `LoadError`."""
    try:
        return _from_gguf(path) if path.endswith(".gguf") else _from_folder(path, trust_remote_code)
    except (LoadError, MemoryError):
        raise
    except BaseException as e:  # damaged files raise many types of errors
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":  # of Rust, which is no Exception
            raise
        if "custom code" in str(e) and not trust_remote_code:
            raise LoadError(
                f"the tokenizer in {path} is Python code of its own, which runs only with --trust-remote-code: read "
                "it first, or pass another --tokenizer."
            ) from None
        reason = str(e).strip().splitlines()[0].rstrip(".") if str(e).strip() else type(e).__name__
        raise LoadError(f"the tokenizer in {path} cannot be read ({reason}); {WHAT_TO_DO}.") from None


def _from_gguf(path: str) -> ModelTokenizer:
    from octavo.loading.gguf_tokenizer import build_gguf_tokenizer

    return _of_parts(build_gguf_tokenizer(read_gguf(path)))


def _of_parts(parts: TokenizerParts) -> ModelTokenizer:
    return ModelTokenizer(
        parts.backend, parts.special_tokens, parts.extra_special_tokens, parts.added_tokens, parts.chat_template,
        parts.cleans_up_spaces, parts.response_template,
    )  # fmt: skip


def _from_folder(folder: str, trust_remote_code: bool) -> ModelTokenizer:
    parts = read_tokenizer_folder(folder)
    return _from_transformers(folder, trust_remote_code) if parts is None else _of_parts(parts)


def _from_transformers(folder: str, trust_remote_code: bool) -> ModelTokenizer:
    try:
        import transformers  # it imports torch and takes seconds
    except ImportError:
        raise LoadError(
            f"the tokenizer in {folder} can only be read by transformers, which is not installed: "
            "run scripts/install transformers."
        ) from None
    has_json = os.path.exists(os.path.join(folder, "tokenizer.json"))
    reader = transformers.PreTrainedTokenizerFast if has_json else transformers.AutoTokenizer
    # Without `trust_remote_code`, transformers would ask on a terminal.
    tokenizer: ModelTokenizer = reader.from_pretrained(
        folder, local_files_only=True, trust_remote_code=trust_remote_code
    )
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    return tokenizer


def _read_template(chat_template: str, names: Sequence[str]) -> str:
    if any(mark in chat_template for mark in ("{{", "{%", "\n")):
        return chat_template
    try:
        with open(os.path.expanduser(chat_template), encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as e:
        why = getattr(e, "strerror", None) or e
        raise LoadError(
            f"--chat-template {chat_template} is neither a template (it has no {{{{ or {{%), nor one of the model's "
            f"({', '.join(names) or 'it names none'}), nor a file that can be read: {why}."
        ) from None


def _check_template(template: str, source: str) -> None:
    from jinja2 import TemplateSyntaxError

    try:
        compile_template(template)
    except TemplateSyntaxError as e:
        shown = source if len(source) < 100 else source[:100] + "..."
        raise LoadError(f"--chat-template {shown!r} is not a valid template: {e.message}, line {e.lineno}.") from None
