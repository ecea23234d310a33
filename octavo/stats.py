"""Statistics of the engine core: gauges and counters that go to the front end with each step, and how far sequences
are, for the page."""

import msgspec


class SequenceProgress(msgspec.Struct, array_like=True, gc=False):
    """How far a sequence is."""

    request_id: str  # the core's; in a front end the id that its client knows
    is_running: bool  # otherwise it waits
    num_prompt_tokens: int
    num_computed_tokens: int  # of the prompt; those found in the prefix cache included
    num_output_tokens: int
    num_blocks: int
    num_step_tokens: int  # tokens that the last step computed for it


class EngineStats(msgspec.Struct, array_like=True, gc=False):
    """The state after a step (gauges) and what the step did (increments)."""

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0  # waiting requests whose grammar, adapter or media are being prepared
    num_swapped: int = 0
    num_blocks: int = 0
    num_blocks_used: int = 0  # referenced by a sequence
    num_host_blocks: int = 0
    num_host_blocks_used: int = 0
    num_slots_allocated: int = 0  # token slots of referenced blocks
    num_slots_filled: int = 0  # slots that hold a token
    num_chunked_tokens: int = 0  # computed tokens of unfinished prompts
    prompt_token_s: float = 0.0  # seconds for a token of a prompt, beside other running work; 0: not known yet
    num_preemptions: int = 0  # from here on: increments
    num_prompt_tokens: int = 0  # of prompts: computed by steps, or found in the cache
    num_computed_tokens: int = 0  # prompt and output tokens that went through the model
    num_generation_tokens: int = 0
    num_prefix_queries: int = 0  # prompt tokens looked up in the prefix index
    num_prefix_hits: int = 0  # prompt tokens found there
    step_s: float = 0.0  # measured seconds of steps
    predicted_step_s: float = 0.0  # predicted seconds of the same steps
    num_adapter_reads: int = 0  # from disk
    adapter_read_s: float = 0.0  # from request to arrival
    num_adapter_loads: int = 0  # onto the device
    num_adapter_evictions: int = 0  # from the device
    num_adapters_on_host: int = 0  # a gauge, like the next ones
    resident_adapters: list[str] = []  # names of those on the device
    running_adapters: list[str] = []  # names
    waiting_adapters: list[str] = []
    num_drafts: int = 0  # verified drafts, of one token or several
    num_draft_tokens: int = 0  # their tokens
    num_accepted_tokens: int = 0  # accepted draft tokens
    num_accepted_by_position: list[int] = []  # accepted draft tokens by position in the draft
    num_media_queries: int = 0  # media of requests looked up in the cache of rows
    num_media_hits: int = 0  # media whose rows were in the cache
    tower_s: float = 0.0  # seconds of the tower for the other media
    num_host_hits: int = 0  # prompt tokens whose blocks were copied back from the host; `num_prefix_hits` includes them
    num_host_copied: int = 0  # blocks copied to the host
    num_host_dropped: int = 0  # blocks not kept on the host: too many in one plan, or no room
    num_disk_hits: int = 0  # prompt tokens whose blocks were read from disk; `num_prefix_hits` includes them
    disk_read_bytes: int = 0  # bytes of blocks
    disk_copied_bytes: int = 0  # of blocks that other servers gave
    num_disk_written: int = 0  # blocks
    disk_written_bytes: int = 0
    num_disk_dropped: int = 0  # blocks that were not kept on disk: the writer was behind, or the disk refused
    num_disk_damaged: int = 0  # files that were found damaged, and removed
    disk_bytes: int = 0  # gauge: bytes of all blocks on disk
    disk_kept_bytes: int = 0  # gauge: bytes of blocks that sessions keep
    num_disk_sessions: int = 0  # gauge: sessions
