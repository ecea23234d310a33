"""Several answers to one prompt: sampled with a seed, which makes them the same each time, and by beam search."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"), api_key="none")
model = client.models.list().data[0].id


def sampled() -> list[str]:
    answer = client.completions.create(
        model=model, prompt="My favourite animal is", n=3, temperature=0.9, seed=7, max_tokens=8
    )
    return [choice.text for choice in answer.choices]  # the prompt is computed once


first = sampled()
for text in first:
    print(f"sampled: {text!r}")
print("again the same:", sampled() == first)
beams = client.completions.create(
    model=model,
    prompt="My favourite animal is",
    n=2,
    temperature=0,
    max_tokens=8,
    extra_body={"use_beam_search": True, "best_of": 4},
)
for choice in beams.choices:
    print(f"beam: {choice.text!r}")
