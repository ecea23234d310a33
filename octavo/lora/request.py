"""The request for an adapter by name and path, with vLLM's fields."""

from dataclasses import InitVar, dataclass
from operator import attrgetter

from octavo.errors import RequestError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter's name and its folder, .gguf file or hub id.

    `lora_int_id` is for callers that number adapters; results depend on the files only.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False  # True: may replace an adapter of the same name
    lora_local_path: InitVar[str | None] = None  # the former name of `lora_path`

    def __post_init__(self, lora_local_path: str | None) -> None:
        if lora_local_path is not None:
            if self.lora_path:
                raise RequestError("lora_local_path is the former name of lora_path; give one.", param="lora_path")
            object.__setattr__(self, "lora_path", lora_local_path)
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise RequestError("lora_name must be a text that is not empty.", param="lora_name")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise RequestError(f"lora_int_id must be 1 or more, got {self.lora_int_id!r}.", param="lora_int_id")
        if not isinstance(self.lora_path, str) or not self.lora_path:
            raise RequestError(f"adapter {self.lora_name!r} has no lora_path.", param="lora_path")

    adapter_id = property(attrgetter("lora_int_id"))
    name = property(attrgetter("lora_name"))
    path = property(attrgetter("lora_path"))
