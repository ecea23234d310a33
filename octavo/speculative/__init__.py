"""Speculation: tokens are guessed cheaply, and the model checks several of them in one step.

A sequence brings its guesses as tokens still to compute (`PlannedRow.guesses`). The model samples after each of them
with that position's own random number, and a guess stands if it is the token that was sampled, so that no guess changes
an answer. `proposer.py` says what guesses, `speculation.py` is what the scheduler asks.
"""
