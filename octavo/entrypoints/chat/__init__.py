"""Conversations: `conversation` takes one through the engine; `chat_template` renders it, `media_parts` reads its
media, `answer_reader` splits the answer into reasoning, content and tool calls (`reasoning`, `tools`).
"""
