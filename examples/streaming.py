"""An answer as it is made, and the time to its first piece."""

import os
import time

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"), api_key="none")
model = client.models.list().data[0].id

start, first_s = time.perf_counter(), None
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Count from one to ten."}],
    max_tokens=48,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices and (text := chunk.choices[0].delta.content):
        first_s = first_s or time.perf_counter() - start
        print(text, end="", flush=True)
    if chunk.usage:  # the last one
        print(f"\n{chunk.usage.completion_tokens} tokens, the first after {first_s:.2f} s")
