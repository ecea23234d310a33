"""OpenAI's Responses API over `chat`: `responses_protocol` checks the body, `items` reads the conversation,
`items_to_chat` makes a chat of it, `response_builder` builds the response and its events, `stored_responses` keeps it.
"""
