"""Conversations: `chat_run` takes a chat through the engine, `chat_template` renders it, `media_parts` reads its media,
and `answer_reader` splits the answer into reasoning, content and tool calls (`reasoning`, `tools`).
"""
