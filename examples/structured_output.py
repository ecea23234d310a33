"""JSON that keeps a schema, a choice and a regular expression: the grammar leaves the model no other tokens."""

import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"), api_key="none")
model = client.models.list().data[0].id


class Book(BaseModel):
    kind: Literal["novel", "poem", "play"]
    year: int
    in_print: bool


parsed = client.chat.completions.parse(
    model=model,
    messages=[{"role": "user", "content": "Describe Hamlet as JSON."}],
    response_format=Book,
    max_tokens=64,
    temperature=0,
)
print("book:", parsed.choices[0].message.parsed)

for name, rule in (("choice", {"choice": ["positive", "negative"]}), ("date", {"regex": r"\d{4}-\d{2}-\d{2}"})):
    answer = client.completions.create(
        model=model,
        prompt=f"What a wonderful day it was. The {name}: ",
        max_tokens=16,
        temperature=0,
        extra_body={"structured_outputs": rule},
    )
    print(f"{name}: {answer.choices[0].text}")
