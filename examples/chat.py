"""A conversation of two turns with a running server, by the `openai` package."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"), api_key="none")
model = client.models.list().data[0].id

messages = [{"role": "system", "content": "Answer in one sentence."}]
for question in ("What is the capital of France?", "Which river is it on?"):
    messages.append({"role": "user", "content": question})
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=48, temperature=0)
    text = answer.choices[0].message.content
    messages.append({"role": "assistant", "content": text})
    print(f"> {question}\n{text}\n({answer.usage.prompt_tokens} + {answer.usage.completion_tokens} tokens)")
