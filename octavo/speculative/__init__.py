"""Speculative decoding: draft tokens are made cheaply, and the model verifies several of them in one step.

A sequence has draft tokens to compute (`PlannedRow.draft_tokens`). The model samples after each of them with that
position's own random number. A draft token is accepted if it is the sampled token, so drafts never change an answer.
`proposer.py` says what makes them;
the scheduler calls `speculation.py`."""
