"""Anthropic's Messages API over `chat`: `messages_protocol` checks the body, `to_chat` makes a chat of it,
`answer_blocks` builds the message and its events.
"""
