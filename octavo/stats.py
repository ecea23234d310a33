"""Statistics of the engine core: its gauges and counters, as they cross to the front end with each step."""

from __future__ import annotations

import msgspec


class EngineStats(msgspec.Struct, array_like=True, gc=False):
    """The state after a step (gauges) and what the step did (increments)."""

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0  # those of them whose grammar, adapter or media are being prepared
    num_swapped: int = 0
    num_blocks: int = 0
    num_blocks_used: int = 0  # referenced by a sequence
    num_host_blocks: int = 0
    num_host_blocks_used: int = 0
    num_slots_allocated: int = 0  # token slots of referenced blocks
    num_slots_filled: int = 0  # those that hold a token
    num_chunked_tokens: int = 0  # computed of prompts of which more is to be computed
    prompt_token_s: float = 0.0  # how long a token of a prompt takes, beside what else runs; 0: not known yet
    num_preemptions: int = 0  # from here on: increments
    num_prompt_tokens: int = 0  # of the prompts that were started, found in the cache or not
    num_computed_tokens: int = 0  # prompt and output tokens that went through the model
    num_generation_tokens: int = 0
    num_prefix_queries: int = 0  # prompt tokens looked up in the prefix index
    num_prefix_hits: int = 0  # prompt tokens found there
    step_s: float = 0.0  # what the steps took
    predicted_step_s: float = 0.0  # and what they were expected to take
    num_adapter_reads: int = 0  # from disk
    adapter_read_s: float = 0.0  # from being asked for to being there
    num_adapter_loads: int = 0  # onto the device
    num_adapter_evictions: int = 0  # from there
    num_adapters_on_host: int = 0  # gauges, again
    num_adapters_on_device: int = 0
    running_adapters: list[str] = []  # names
    waiting_adapters: list[str] = []
    num_drafts: int = 0  # verified drafts, of one token or several
    num_draft_tokens: int = 0  # their tokens
    num_accepted_tokens: int = 0  # those of them that stand
    num_accepted_by_position: list[int] = []  # the same by position in the draft
    num_media_queries: int = 0  # media of requests, looked up among those whose rows are kept
    num_media_hits: int = 0  # those that were found there
    tower_s: float = 0.0  # what the tower took for the others
