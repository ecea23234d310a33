"""Adapters of a worker: read from disk by threads, packed on the host, copied into pages of the device.

A page has a fixed number of bytes, enough for the largest piece of any adapter that is allowed. An adapter takes as
many pages as it needs, anywhere, so only memory limits the number of adapters on the device, not their ranks. A device
that shares the host's memory has no pages: it uses adapters where they are on the host, and loading one only records
its addresses.
"""

import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from octavo.config import EngineConfig, LoRAConfig
from octavo.errors import LoadError, RequestError
from octavo.execution.device import Device, Event
from octavo.execution.worker_group import ALONE, WorkerGroup
from octavo.layers.parameters import Module, NamedMatrix
from octavo.loading.file_weights import open_weights
from octavo.loading.memory import available_memory_bytes
from octavo.lora import adapter_files
from octavo.lora.gguf_format import read_gguf_adapter
from octavo.lora.matching import ModuleMap
from octavo.lora.ops import AdaptedOps
from octavo.lora.peft_format import read_peft
from octavo.ops import AdapterTable, Array, ExpertsAdapterTable, ExpertsWeight, FactorShape
from octavo.quantization import dequantize
from octavo.request import AdapterSource
from octavo.step_plan import AdapterLoad, AdapterMemory

logger = logging.getLogger(__name__)

_PAGE_UNIT = 64 << 10  # a page is a multiple of these bytes
_ALIGNMENT = 64
_LEAST_SHARED_BYTES = 4096  # smaller pieces are not searched for duplicates
_MAX_SLOTS = 4096
_NUM_READERS = 2  # so that small adapters overtake large ones, and one is packed while another is read from disk
_SHARE_OF_HOST = 0.1  # share of the host's free memory for adapters
_UNCUT = 1 << 62


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter on the host: images of its pages, as they are copied to the device, and the places of its pieces in
    them. If the device shares the host's memory, there is one page with all pieces."""

    pages: list[NDArray[np.uint8]]
    tables: list[tuple[int, Any, list[tuple[int, int]]]]  # number of the table, `PackedFactors`, (page, offset) of each


def place(sizes: Sequence[int], page_bytes: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the number of pages that pieces of these sizes take, and the (page, offset) of each piece. The largest
    piece is placed first, each in the first page with room."""
    filled: list[int] = []
    places = [(0, 0)] * len(sizes)
    page, last = 0, 0
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = -(-sizes[i] // _ALIGNMENT) * _ALIGNMENT
        if size != last:  # no page before that of the last piece has room for another of its size
            page, last = 0, size
        page = next((p for p in range(page, len(filled)) if filled[p] + size <= page_bytes), len(filled))
        if page == len(filled):
            filled.append(0)
        places[i] = page, filled[page]
        filled[page] += size
    return len(filled), places


class AdapterStore:
    """Tables of factors for the products of a model, the pages behind them, and adapters on the host."""

    def __init__(
        self,
        matrices: Sequence[NamedMatrix],
        ops: AdaptedOps,
        config: EngineConfig,
        device: Device,
        worker_group: WorkerGroup = ALONE,
        others: Collection[str] = (),
    ) -> None:
        """`others` are names of other stages' modules. Raises `LoadError` if adapters may change no matrix product of
        the model."""
        assert config.lora is not None
        self._config, self._lora, self._device = config, config.lora, device
        lora = config.lora
        self._map = ModuleMap(matrices, lora.target_modules, lora.max_rank, others)
        names = [*others, *(name for matrix in matrices for module in matrix.modules for name in module.all_names)]
        if not any(map(self._map.is_open, names)):
            raise LoadError(
                f"--lora-target-modules {' '.join(self._lora.target_modules or [])}: the model has no such modules."
            )
        self._backend = ops.backend
        # A table for each matrix, or for all experts of a stack.
        groups = [list(of_one) for _, of_one in groupby(range(len(matrices)), lambda i: _table_key(matrices[i]))]
        groups = [numbers for numbers in groups if matrices[numbers[0]].weight is not None]
        firsts = [matrices[numbers[0]] for numbers in groups]
        self._table_of = {number: table for table, numbers in enumerate(groups) for number in numbers}
        self._size_memory(firsts, worker_group)
        self._arena: Array | None = None
        if device.shares_memory:
            self.num_pages, self.num_slots = 0, lora.max_loras
        else:
            self._arena = self._backend.allocate_arena(self.num_pages * self.page_bytes)
        self._tables = [self._new_table(matrix, self.num_slots) for matrix in firsts]
        for matrix, table in zip(firsts, self._tables, strict=True):
            adapt: Any = ops.adapt_lookup if matrix.is_embedding else ops.adapt
            if matrix.expert is not None:
                adapt = ops.adapt_experts
            adapt(matrix.weight, table)
        self._experts = [matrix.expert for matrix in matrices]
        self._on_host: dict[str, HostAdapter] = {}
        self._left: list[AdapterLoad] = []  # loads that are still to be copied
        self._copied: dict[str, Event] = {}  # by identity: reached when its last copy to the device is done
        self._free_pages: deque[NDArray[np.uint8]] = deque()  # pinned memory, which is reused and never freed
        self._used: dict[int, str] = {}  # by slot: the adapter whose factors on the host the device uses
        self._readers = ThreadPoolExecutor(_NUM_READERS, "adapters")

    def _new_table(self, matrix: NamedMatrix, num_slots: int) -> AdapterTable | ExpertsAdapterTable:
        shape, dtype = _shape(matrix, self._lora), self._lora.dtype
        if matrix.expert is None:
            return self._backend.adapter_table(shape, num_slots, dtype)
        num_experts = cast(ExpertsWeight, matrix.weight).num_experts
        return self._backend.experts_adapter_table(shape, num_experts, num_slots, dtype)

    def _size_memory(self, firsts: Sequence[NamedMatrix], worker_group: WorkerGroup) -> None:
        """Choose the bytes of a page, and the numbers of pages and slots, the same for all workers. `firsts` has a
        matrix of each table."""
        lora, device = self._lora, self._device
        sizing = [self._new_table(matrix, 1) for matrix in firsts]
        products = [
            table for matrix, table in zip(firsts, sizing, strict=True)
            if not matrix.is_embedding and any(self._map.is_open(name) for m in matrix.modules for name in m.all_names)
        ]  # fmt: skip
        # Plans count pages that all workers have. If adapters stay on the host, pages are only a unit of its memory.
        least = worker_group.largest(max((table.least_page_bytes() for table in sizing), default=1))
        self.page_bytes = -(-least // _PAGE_UNIT) * _PAGE_UNIT
        pieces = [size for table in products for size in table.largest(self.page_bytes)]
        most_pages = worker_group.largest(place(pieces, self.page_bytes)[0])
        self.num_pages = lora.max_loras * most_pages
        if lora.memory_bytes is not None:
            self.num_pages = max(1, lora.memory_bytes // self.page_bytes)
        if device.shares_memory and lora.memory_bytes is not None:
            self.num_host_pages = self.num_pages
        else:
            share = int(_SHARE_OF_HOST * available_memory_bytes()) // worker_group.worker_rank.on_host.size
            self.num_host_pages = max(self.num_pages, -worker_group.largest(-(share // self.page_bytes)))
        # A device's tables have a row for each slot and expert, and workers have different numbers of experts.
        num_experts = worker_group.largest(
            max((cast(ExpertsWeight, m.weight).num_experts for m in firsts if m.expert is not None), default=1)
        )
        self.num_slots = min(self.num_pages, max(lora.max_loras, _MAX_SLOTS // num_experts))

    @property
    def memory(self) -> AdapterMemory:
        return AdapterMemory(self.num_pages, self.num_slots, self.num_host_pages, self.page_bytes)

    def prepare(self, source: AdapterSource) -> Future[int]:
        """Have a thread read an adapter into the host's memory. The future returns the number of pages that it takes;
        from then on plans may load it. Raises `RequestError` if it cannot be served."""
        return self._readers.submit(self._read, source)

    def forget(self, identity: str) -> None:
        """Free the host's memory of an adapter that no plan loads any more."""
        adapter, copied = self._on_host.pop(identity, None), self._copied.pop(identity, None)
        if self._arena is None:
            for slot in [slot for slot, used in self._used.items() if used == identity]:
                del self._used[slot]
                for table in self._tables:
                    table.clear(slot)
            return
        if adapter is None:
            return
        if copied is not None:
            copied.wait()  # usually done long ago, unless the only step with this adapter was aborted
        self._free_pages.extend(adapter.pages)

    def load(self, loads: Sequence[AdapterLoad]) -> None:
        """Copy adapters into their pages, after all steps submitted before and before all later steps. If the device
        lacks memory, raise its error; the next call copies the rest."""
        compute = self._device.compute
        self._left += loads
        while self._left:
            one = self._left[0]
            if (adapter := self._on_host.get(one.identity)) is not None:  # None: forgotten meanwhile
                compute.run(partial(self._copy, one, adapter), reads=adapter.pages)
                self._copied[one.identity] = compute.record()
            del self._left[0]

    def _copy(self, load: AdapterLoad, adapter: HostAdapter) -> None:
        size, arena = self.page_bytes, self._arena
        if arena is None:
            self._used[load.slot] = load.identity
        else:
            for page, image in zip(load.pages, adapter.pages, strict=False):  # another worker may need more pages
                self._device.copy(image, arena[page * size : page * size + len(image)])
        put = {number for number, _, _ in adapter.tables}
        for number, table in enumerate(self._tables):
            if number not in put:
                table.clear(load.slot)
        for number, packed, places in adapter.tables:
            at = [offset if arena is None else load.pages[page] * size + offset for page, offset in places]
            self._tables[number].put(load.slot, packed, adapter.pages[0] if arena is None else arena, at)

    def _read(self, source: AdapterSource) -> int:
        begin = time.monotonic()
        try:
            adapter = self._pack(source)
        except LoadError as e:
            raise adapter_files.refusal(source.name, e, os.path.dirname(source.weights), "model") from None
        num_pages = -(-sum(len(page) for page in adapter.pages) // self.page_bytes)
        most = self.num_host_pages if self._arena is None else self.num_pages
        if num_pages > most:
            if self._arena is not None:
                self._free_pages.extend(adapter.pages)
            raise RequestError(
                f"adapter {source.name!r} takes {self._size_of(num_pages)} of memory, and adapters have "
                f"{self._size_of(most)}; raise --lora-memory-gb.",
                param="model",
            )
        self._on_host[source.identity] = adapter
        logger.debug("adapter %s read in %.3f s", source.name, time.monotonic() - begin)
        return num_pages

    def _pack(self, source: AdapterSource) -> HostAdapter:
        contents = adapter_files.read(source)
        if contents.config is None:
            checkpoint = self._config.model.checkpoint
            modules = read_gguf_adapter(contents.weights, checkpoint.config, self._lora.max_rank)
        else:
            modules = read_peft(contents, self._lora.max_rank, self._map.parameters_of)
        by_table: dict[int, Any] = {}
        for number, factors in self._map.factors(source.weights, modules, self._base_weights).items():
            table, expert = self._table_of[number], self._experts[number]
            if expert is None:
                by_table[table] = factors
            else:
                by_table.setdefault(table, {})[expert] = factors
        page_bytes = _UNCUT if self._arena is None else self.page_bytes
        packed = [(number, self._tables[number].pack(found, page_bytes)) for number, found in by_table.items()]
        # If a tied matrix is replaced, embedding and output have the same pieces.
        pieces: dict[Any, NDArray[np.uint8]] = {}
        keys = []
        for number, one in packed:
            may_share = self._tables[number].shape.replaceable
            for i, (piece, is_constant) in enumerate(zip(one.pieces, one.constant, strict=True)):
                is_large = may_share and is_constant and piece.nbytes >= _LEAST_SHARED_BYTES
                keys.append(hashlib.sha256(piece).digest() if is_large else (number, i))
                pieces.setdefault(keys[-1], piece)
        num_pages, placed = place([piece.nbytes for piece in pieces.values()], page_bytes)
        places = dict(zip(pieces, placed, strict=True))
        pages: list[Any]
        if self._arena is None:
            ends = [offset + piece.nbytes for piece, (_, offset) in zip(pieces.values(), placed, strict=True)]
            pages = [self._backend.allocate_arena(max(ends, default=0))]
        else:
            pages = [self._new_page() for _ in range(num_pages)]
        images = {}
        for key, piece in pieces.items():
            page, offset = places[key]
            images[key] = pages[page][offset : offset + piece.nbytes]
            images[key][:] = piece
        tables, first = [], 0
        for number, one in packed:
            of_table = keys[first : first + len(one.pieces)]
            one = one.with_pieces([images[key] for key in of_table])
            tables.append((number, one, [places[key] for key in of_table]))
            first += len(of_table)
        return HostAdapter(pages, tables)

    def _new_page(self) -> NDArray[np.uint8]:
        try:
            return self._free_pages.popleft()
        except IndexError:
            return self._device.pinned([self.page_bytes], "uint8")

    def _size_of(self, num_pages: int) -> str:
        return f"{num_pages * self.page_bytes / (1 << 20):.1f} MiB"

    def _base_weights(self, matrix: NamedMatrix, module: Module) -> NDArray[np.float32]:
        """Return the base weights of a module, read again: DoRA needs the length of each row of base plus adapter."""
        model = self._config.model
        if model.checkpoint.format == "dummy" and model.seed is None:
            raise LoadError("DoRA needs to read the base weights again, and dummy weights without a --seed differ.")
        weights = open_weights(model.checkpoint, model.dtype, model.seed, model.quantization, True)
        try:
            num_in = matrix.all_in
            shape = (num_in, module.num_stored) if module.is_transposed else (module.num_stored, num_in)
            stored = weights.take_matrix(f"{module.name}.weight", shape, is_transposed=module.is_transposed)
            return np.array(dequantize(stored, "float32"))
        finally:
            weights.close()


def _table_key(matrix: NamedMatrix) -> tuple[Any, ...]:
    """Return the key of a matrix's table. Neighbouring matrices with equal keys share a table."""
    return id(matrix.weight), matrix.is_embedding, matrix.expert is None


def _shape(matrix: NamedMatrix, config: LoRAConfig) -> FactorShape:
    return FactorShape(
        matrix.num_in, tuple(module.num_out for module in matrix.modules), matrix.gated, config.max_rank,
        matrix.replaceable, matrix.is_embedding,
    )  # fmt: skip
