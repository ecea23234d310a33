"""Anthropic's Messages API over the same chats: `protocol` checks, `translate` makes a chat, `events` its answer."""
