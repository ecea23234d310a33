"""OpenAI's Responses API over the same chats: `protocol` checks, `items` reads what was said, `translate` makes a chat,
`events` its answer, `stored` keeps it."""
