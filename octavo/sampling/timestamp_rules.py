"""Whisper's rules for timestamps (Radford et al. 2022, and its code): which tokens a transcribing model may generate
next.

The rules apply before all settings of a request, and before log-probabilities are measured, which therefore cover only
tokens that the rules allow.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.ops import Array, Ops
from octavo.sampling.sampling_table import SpecialSample
from octavo.sampling_params import SpeechRules


def follow_rules(ops: Ops, logits: Array, special: Sequence[SpecialSample]) -> bool:
    """Mask forbidden tokens in logits [N, V] float32, in place. Return whether any sample has rules. Samples with rules
    make the host wait for the device, because the rules depend on the logits."""
    ruled = [(one, rules) for one in special if (rules := one.settings.params.speech) is not None]
    if not ruled:
        return False
    samples = np.array([one.sample for one, _ in ruled], np.int64)
    rows: Any = ops.rows_of(logits, samples)
    on_host: NDArray[np.float32] = rows if isinstance(rows, np.ndarray) else rows.cpu().numpy()
    allowed = []
    for (one, rules), row in zip(ruled, on_host, strict=True):
        bits = allowed_tokens(rules, one.tokens[one.settings.num_prompt_tokens :].tolist(), row)
        padded = np.zeros(-(-len(bits) // 32) * 32, bool)
        padded[: len(bits)] = bits
        allowed.append(np.packbits(padded, bitorder="little").view(np.int32))
    ops.mask_tokens(logits, np.stack(allowed), samples)
    return True


def allowed_tokens(rules: SpeechRules, output: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return [V]: the tokens that may come after `output`. `logits` [V] are the model's own.

    With timestamps: the first token is a timestamp; timestamps come in pairs, or alone before the end; they never
    decrease; and if all timestamps together are likelier than every other token, the next token is a timestamp.
    """
    allowed = np.ones(len(logits), bool)
    allowed[rules.suppressed] = False
    if not output:
        allowed[rules.suppressed_first] = False
    first = rules.first_timestamp
    if not rules.has_times:  # the prompt asks for text without timestamps
        allowed[first:] = False
        return allowed
    allowed[first - 1] = False  # the token for "no timestamps"
    last_is_one = len(output) >= 1 and output[-1] >= first
    one_before_is = len(output) < 2 or output[-2] >= first
    if last_is_one and one_before_is:
        allowed[first:] = False
    elif last_is_one:
        allowed[: rules.end] = False
    if stamps := [token for token in output if token >= first]:
        allowed[first : stamps[-1] + (not last_is_one or one_before_is)] = False
    if not output:
        allowed[:first] = False
        if rules.last_initial is not None:
            allowed[rules.last_initial + 1 :] = False
    found = np.where(allowed, logits.astype(np.float64), -np.inf)
    largest, others = found[first:].max(), found[:first].max()
    if np.isfinite(largest) and largest + np.log(np.exp(found[first:] - largest).sum()) > others:
        allowed[:first] = False
    return allowed
