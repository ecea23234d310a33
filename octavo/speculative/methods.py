"""Makes the proposer of the configured method (`--speculative-config`)."""

from octavo.speculative.ngram import NgramProposer
from octavo.speculative.proposer import Proposer, ToBeDrafted
from octavo.speculative.speculation import Speculation
from octavo.speculative.suffix import SuffixProposer
from octavo.speculative_config import HEAD_METHODS, SpeculativeConfig
from octavo.step_cost import StepCost


def make_speculation(config: SpeculativeConfig | None, cost: StepCost | None, max_draft_len: int = 0) -> Speculation:
    """Return the speculation of an engine. Without a configuration only requests with a prediction have draft tokens.
    For a method with a draft model the result is the core's part, for sequences of up to `max_draft_len` tokens; the
    worker has the drafter."""
    if config is None:
        return Speculation(cost=cost)
    proposer: Proposer
    if config.method == "ngram":
        proposer = NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    elif config.method == "suffix":
        proposer = SuffixProposer(
            config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_cached_requests,
            config.suffix_decoding_max_spec_factor, config.suffix_decoding_min_token_prob,
        )  # fmt: skip
    else:
        proposer = ToBeDrafted(max_draft_len)
    # Benchmarks with given rates verify all draft tokens.
    known = None if config.synthetic_acceptance_rates is not None else cost
    return Speculation(
        proposer, config.num_speculative_tokens, known, config.method in HEAD_METHODS, config.disable_by_batch_size
    )
